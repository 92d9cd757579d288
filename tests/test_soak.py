"""Eight threads, fifty mixed requests, everything that can go wrong at once: the others' pictures are right."""

from __future__ import annotations

import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import assert_latents_equal, generator
from diffusers_continuous import EngineStats, RequestCancelledError, RequestError, StepFailedError
from test_equality import mixed_call

NUM_REQUESTS = 50
BAD = {5: "nan latents", 13: "callback raises", 21: "invalid size", 34: "turns non-finite"}


def live_tensor_bytes() -> int:
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        # By exact type: isinstance would ask lazy modules for their class, and compilers leave tensors without memory.
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type != "meta":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def arguments_of(number: int) -> dict:
    """Of request `number`; the same every time it is asked for."""
    rng = random.Random(number)
    call = mixed_call(rng, steps=(2, 8))
    call.update(num_images_per_prompt=rng.choice([1, 1, 2]), generator=generator(number), output_type="latent")
    if BAD.get(number) == "nan latents":
        shape = (call["num_images_per_prompt"], call["height"] * call["width"] // 256, 64)
        call.update(generator=None, latents=torch.full(shape, torch.nan))
    elif BAD.get(number) == "callback raises":
        call["callback_on_step_end"] = raising_callback
    elif BAD.get(number) == "invalid size":
        call["width"] = -128
    elif BAD.get(number) == "turns non-finite":
        call["callback_on_step_end"] = poisoning_callback
    return call


def raising_callback(view, step, timestep, kwargs):
    raise LookupError("the callback of one request")


def poisoning_callback(view, step, timestep, kwargs):
    view.scheduler.sigmas[step + 1 :] = torch.nan
    return {}


def run_all(pipe: Any, to_cancel: set[int]) -> tuple[list[Any], EngineStats]:
    """Every request from a pool of eight threads while another cancels some; results or errors, in order."""
    engine = pipe.init_continuous_batching(max_requests_per_batch=10, max_batch_tokens=3000)
    results_are_in = threading.Event()

    def call(number: int) -> Any:
        try:
            return pipe(request_id=f"soak-{number}", **arguments_of(number)).images
        except Exception as error:
            return error

    def cancel() -> None:
        waiting = sorted(to_cancel)
        while waiting and not results_are_in.wait(0.002):  # without a pause it would keep the engine's lock busy
            waiting = [number for number in waiting if not engine.cancel_request(f"soak-{number}")]

    canceller = threading.Thread(target=cancel)
    canceller.start()
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(call, range(NUM_REQUESTS)))
    results_are_in.set()
    canceller.join()
    assert [*engine.scheduler.waiting, *engine.scheduler.running, *engine.scheduler.decoding] == []
    assert engine._active == {}
    engine.stop()
    return results, engine.stats()


def test_fifty_mixed_requests_from_eight_threads(make_pipe, stock):
    pipe = make_pipe()
    pipe("warm up", height=64, width=64, num_inference_steps=2, true_cfg_scale=1.0)
    pipe._engine.stop()
    tensor_bytes, threads, files = live_tensor_bytes(), set(threading.enumerate()), open_files()

    to_cancel = set(random.Random(0).sample([n for n in range(NUM_REQUESTS) if n not in BAD], 8))
    results, stats = run_all(pipe, to_cancel)
    expected_errors = {5: RequestError, 13: LookupError, 21: RequestError, 34: StepFailedError}
    cancelled = {n for n, result in enumerate(results) if isinstance(result, RequestCancelledError)}
    assert cancelled <= to_cancel
    for number, result in enumerate(results):
        if number in BAD:
            assert isinstance(result, expected_errors[number]), (number, result)
        elif number not in cancelled:
            assert_latents_equal(result, stock(**arguments_of(number)).images)
    assert sum(stats.num_by_status.values()) == NUM_REQUESTS - 2  # two were refused before they were accepted
    assert stats.num_by_status.get("cancelled", 0) == len(cancelled)
    assert stats.num_by_status["failed"] == 2
    assert stats.mean_rows_per_step > 3

    del results, result
    assert live_tensor_bytes() <= tensor_bytes * 1.01
    assert set(threading.enumerate()) <= threads
    assert open_files() <= files


def open_files() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


def test_a_step_that_turns_non_finite_names_the_step(pipe):
    with pytest.raises(StepFailedError, match="step 3 of 5"):
        pipe(
            "a ring",
            height=64,
            width=64,
            num_inference_steps=5,
            true_cfg_scale=1.0,
            callback_on_step_end=lambda view, step, timestep, kwargs: (
                view.scheduler.sigmas.__setitem__(slice(2, None), torch.nan) or {}
            ),
        )
