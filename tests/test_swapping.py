"""Requests whose state goes to host memory and comes back: the same bits, in a pool that is much too small."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import UniPCMultistepScheduler

from conftest import assert_latents_equal, assert_pictures_equal, generator
from diffusers_continuous import ConfigError, ContinuousBatchingPipeline, RequestError, StepFailedError, devices
from diffusers_continuous.batch import InputBatch
from diffusers_continuous.engine import DiffusionEngine
from diffusers_continuous.memory import budget
from diffusers_continuous.memory.block_pool import BlockPoolError
from diffusers_continuous.memory.budget import LEAST_BYTES
from diffusers_continuous.memory.host_swap import HostSwap, PagedTensors
from diffusers_continuous.memory.row_state import RowMover, keep_texts, replace_tensors
from diffusers_continuous.pid import PiDDecoder, PiDScheduler
from diffusers_continuous.request import RequestOutput, RequestState, RequestStatus, TextEmbeds
from test_pid_engine import MAX_ABS, decode_alone, make_decoder

PAGE = 4096
SMALL = {"height": 64, "width": 64, "num_inference_steps": 5}
FAR, NEAR = 1e6, 1e-3  # deadlines, in seconds


def blocks_of(pipe: ContinuousBatchingPipeline, **call: Any) -> int:
    """Pages that one picture of such a call needs at most."""
    engine = pipe._engine or pipe.init_continuous_batching(page_size=PAGE)
    return max(engine.runner.num_blocks_of(row) for row in pipe._make_request(**call).rows)


def small_pool(pipe: ContinuousBatchingPipeline, num_blocks: int, scheduler_type: str = "edf", **options: Any) -> Any:
    """A new engine that is stepped by hand. Its batches are read by page table, so who runs must be on the device."""
    if pipe._engine is not None:
        pipe._engine.stop()
    options = {"page_size": PAGE, "num_blocks": num_blocks, "cpu_offload_space": 0.01, **options}
    engine = pipe.init_continuous_batching(scheduler_type=scheduler_type, **options)
    denoise_step = engine.runner._model.denoise_step

    def checked(batch: InputBatch) -> list[torch.Tensor]:
        assert batch.composition.gather is not None
        assert not any(row.pages.is_out for row in batch.rows)
        return denoise_step(batch)

    engine.runner._model.denoise_step = checked
    return engine


def submit(pipe: ContinuousBatchingPipeline, **call: Any) -> RequestState:
    state = pipe._make_request(**call)
    pipe._engine.submit(state)
    return state


def step_until(engine: DiffusionEngine, is_reached: Any) -> None:
    while not is_reached():
        assert engine._step()
        engine.scheduler.memory.check_integrity()


def finish(engine: DiffusionEngine, *states: RequestState) -> list[RequestOutput]:
    step_until(engine, lambda: all(state.future.final is not None for state in states))
    outputs = [state.future.result(0) for state in states]
    assert [output.error for output in outputs] == [None] * len(outputs)
    return outputs


def is_out(engine: DiffusionEngine, state: RequestState) -> bool:
    return any(row in engine.scheduler.memory.host.owners for row in state.rows)


def use(pipe: ContinuousBatchingPipeline, name: str) -> None:
    if name == "unipc":
        pipe.scheduler = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=2.0, solver_order=2
        )


@pytest.mark.parametrize("noise_scheduler", ["euler", "unipc"])
def test_a_request_that_was_out_after_any_step_has_the_same_bits(make_pipe, noise_scheduler):
    pipe = make_pipe()
    use(pipe, noise_scheduler)
    call = {"prompt": "a ring", "negative_prompt": " ", "true_cfg_scale": 3.0, "output_type": "latent", **SMALL}
    other = {"prompt": "a star", "height": 64, "width": 64, "num_inference_steps": 2, "output_type": "latent"}
    num_blocks = blocks_of(pipe, **call)
    (alone,) = finish(pipe._engine, submit(pipe, seed=1, **call))
    engine = small_pool(pipe, num_blocks)
    for step in range(1, SMALL["num_inference_steps"]):
        long = submit(pipe, seed=1, deadline_s=FAR, **call)
        step_until(engine, lambda: long.step == step)  # noqa: B023
        before = engine.stats().swapped_out_bytes
        short = submit(pipe, seed=2, deadline_s=NEAR, **other)
        assert engine._step()
        assert (long.step, short.step, is_out(engine, long)) == (step, 1, True)
        assert engine.stats().num_swapped_out_rows == 1
        num_used = max(span.stop for span in long.rows[0].pages.spans.values())
        assert 1 < num_used < num_blocks  # texts are shorter than they might have been
        output, _ = finish(engine, long, short)
        assert torch.equal(output.latents, alone.latents)
        assert engine.stats().swapped_out_bytes - before == num_used * PAGE
    stats = engine.stats()
    assert (stats.num_used_blocks, stats.num_swapped_out_rows) == (0, 0)
    assert stats.swapped_in_bytes == stats.swapped_out_bytes


@pytest.mark.parametrize("algorithm", ["sde", "dpmsolver++"])
def test_a_decode_that_was_out_after_any_step_has_the_same_bits(make_pipe, algorithm, monkeypatch):
    monkeypatch.setattr("diffusers_continuous.pid.pipeline.UNDISTILLED_STEPS", 6)
    times = {} if algorithm == "sde" else {"t_list": None}
    pipe = make_pipe(decoder=make_decoder(PiDScheduler(algorithm_type=algorithm, **times)))
    call = {"prompt": "a cat", "height": 32, "width": 32, "num_inference_steps": 2, "output_type": "pt"}
    other = {"prompt": "a star", "decoder": "vae", "num_inference_steps": 2, "output_type": "latent"}
    num_blocks = blocks_of(pipe, **call)
    (alone,) = finish(pipe._engine, submit(pipe, seed=1, **call))
    engine = small_pool(pipe, num_blocks)
    num_steps = submit(pipe, seed=1, **call).rows[0].num_decode_steps
    for step in range(1, min(num_steps, 5)):
        long = submit(pipe, seed=1, deadline_s=FAR, **call)
        step_until(engine, lambda: long.rows[0].decode_step == step)  # noqa: B023
        short = submit(pipe, seed=2, deadline_s=NEAR, height=32, width=32, **other)
        while short.step < 1:
            assert engine._step()
        assert (long.rows[0].decode_step, is_out(engine, long)) == (step, True)
        assert long.rows[0].decode_state.features.heads is None  # made again where they are used
        output, _ = finish(engine, long, short)
        assert torch.equal(output.images, alone.images)
        assert torch.equal(output.latents, alone.latents)
    assert engine.stats().swapped_out_bytes > 0


def mixed_calls(count: int) -> list[dict[str, Any]]:
    chance = random.Random(0)
    calls = []
    for seed in range(count):
        height, width = chance.choice([(32, 32), (32, 48), (48, 32), (16, 16)])
        call = {"prompt": chance.choice(["red", "a cat", "a"]), "height": height, "width": width}
        call |= {"num_inference_steps": chance.randint(2, 6), "seed": seed}
        if chance.random() < 0.5:
            call |= {"negative_prompt": " ", "true_cfg_scale": chance.choice([2.0, 5.0])}
        calls.append(call | {"decoder": chance.choice(["vae", "vae", "vae", "pid"])})
    return calls


@pytest.fixture(scope="module")
def expected_latents(stock: Any) -> list[torch.Tensor]:
    """What the stock pipeline draws, call for call."""
    return [stock_latents(stock, call) for call in mixed_calls(40)]


def stock_latents(stock: Any, call: dict[str, Any]) -> torch.Tensor:
    plain = {name: value for name, value in call.items() if name not in ("seed", "decoder")}
    return stock(**plain, generator=generator(call["seed"]), output_type="latent").images


@pytest.mark.parametrize("scheduler_type", ["slo", "edf", "fcfs"])
def test_a_pool_for_3_requests_serves_40(make_pipe, expected_latents, scheduler_type):
    pipe = make_pipe(decoder=make_decoder())
    calls = mixed_calls(40)
    engine = small_pool(pipe, 3 * max(blocks_of(pipe, **call) for call in calls), scheduler_type)
    chance = random.Random(1)
    states = []
    for call in calls:
        states.append(submit(pipe, deadline_s=chance.uniform(0, 10), output_type="pt", **call))
        assert engine._step()
    outputs = finish(engine, *states)
    assert_served(pipe, calls, outputs, expected_latents)
    stats = engine.stats()
    assert stats.num_by_status == {"finished": 40}
    assert (stats.num_used_blocks, stats.num_swapped_out_rows) == (0, 0)
    assert (stats.swapped_out_bytes > 0) == (scheduler_type != "fcfs")  # who runs makes way for nobody there


def assert_served(
    pipe: Any, calls: list[dict[str, Any]], outputs: list[RequestOutput], expected: list[torch.Tensor]
) -> None:
    for call, output, latents in zip(calls, outputs, expected, strict=True):
        if call["decoder"] == "pid":
            size = {"height": call["height"], "width": call["width"]}
            assert (decode_alone(pipe, output, call["prompt"], **size) - output.images).abs().max() <= MAX_ABS
        assert_latents_equal(output.latents, latents)


def test_with_no_host_memory_newcomers_wait_and_nobody_is_lost(make_pipe):
    pipe = make_pipe()
    call = {"prompt": "a ring", "output_type": "latent", **SMALL}
    engine = small_pool(pipe, 2 * blocks_of(pipe, **call), cpu_offload_space=0.0)
    states = [submit(pipe, seed=seed, deadline_s=FAR - seed, **call) for seed in range(2)]
    assert engine._step()
    states += [submit(pipe, seed=seed, deadline_s=NEAR, **call) for seed in range(2, 80)]
    assert engine._step()
    assert [state.step for state in states[:3]] == [2, 2, 0]
    finish(engine, *states)
    assert engine.stats().swapped_out_bytes == 0


def test_a_picture_larger_than_the_pool_is_refused_with_the_numbers(make_pipe):
    pipe = make_pipe()
    call = {"prompt": "a ring", "num_inference_steps": 2}
    needed = blocks_of(pipe, height=96, width=96, **call)
    engine = small_pool(pipe, needed - 1)
    with pytest.raises(RequestError, match=f"needs {needed} pages and num_blocks={needed - 1}"):
        submit(pipe, height=96, width=96, **call)
    finish(engine, submit(pipe, height=32, width=32, **call))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_blocks": 10**15}, f"num_blocks={10**15} of page_size=65536 bytes are more than the .* bytes of cpu"),
        ({"num_blocks": 2**40, "page_size": 2**62}, f"num_blocks={2**40} of page_size={2**62} bytes are more than"),
        ({"page_size": 2**62}, f"page_size={2**62}: not one page"),
    ],
)
def test_a_pool_larger_than_the_machine_is_refused_with_the_numbers(make_pipe, options, text):
    with pytest.raises(ConfigError, match=text):
        make_pipe(**options)


def test_a_pool_larger_than_what_is_free_is_refused_with_the_numbers(make_pipe, monkeypatch):
    monkeypatch.setattr(budget, "memory_info", lambda device: (2**62, 2**62))
    with pytest.raises(ConfigError, match=f"num_blocks={2**44} of page_size=65536 bytes are more than is free on cpu"):
        make_pipe(num_blocks=2**44)


@pytest.mark.parametrize("cpu_offload_space", [1e12, 1e308])
def test_host_memory_beyond_the_machines_is_not_asked_for(make_pipe, cpu_offload_space):
    pipe = make_pipe()
    call = {"prompt": "a ring", "output_type": "latent", **SMALL}
    engine = small_pool(pipe, blocks_of(pipe, **call), cpu_offload_space=cpu_offload_space)
    long = submit(pipe, deadline_s=FAR, **call)
    step_until(engine, lambda: long.step == 1)
    finish(engine, long, submit(pipe, deadline_s=NEAR, **call))
    assert engine.stats().swapped_out_bytes > 0


def test_a_cancelled_request_gives_its_pages_back_wherever_they_are(make_pipe):
    pipe = make_pipe()
    call = {"prompt": "a ring", "output_type": "latent", **SMALL}
    engine = small_pool(pipe, blocks_of(pipe, **call))
    out, here = submit(pipe, deadline_s=FAR, **call), None
    assert engine._step()
    here = submit(pipe, deadline_s=NEAR, **call)
    assert engine._step()
    assert is_out(engine, out)
    for state in (out, here):
        assert engine.cancel(state)
        assert state.status is RequestStatus.CANCELLED
        engine.scheduler.memory.check_integrity()
    assert engine.stats().num_used_blocks == engine.stats().num_swapped_out_rows == 0
    finish(engine, submit(pipe, **call))


def test_a_row_that_is_done_gives_its_pages_to_the_next_row_of_its_request(make_pipe, stock):
    pipe = make_pipe()
    call = {"prompt": "a ring", "num_images_per_prompt": 3, **SMALL}
    engine = small_pool(pipe, blocks_of(pipe, **call), "fcfs")
    (output,) = finish(engine, submit(pipe, generator=generator(3), output_type="latent", **call))
    assert_latents_equal(output.images, stock(generator=generator(3), output_type="latent", **call).images)
    (output,) = finish(engine, submit(pipe, generator=generator(3), **call))
    for ours, theirs in zip(output.images, stock(generator=generator(3), **call).images, strict=True):
        assert_pictures_equal(ours, theirs)


@pytest.mark.parametrize("scheduler_type", ["fcfs", "edf"])
def test_a_call_whose_callback_waits_for_another_picture_makes_way_for_it(make_pipe, stock, scheduler_type):
    pipe = make_pipe()
    call = {"prompt": "a ring", "output_type": "latent", **SMALL}
    engine = small_pool(pipe, blocks_of(pipe, **call), scheduler_type)
    engine.start()
    stream = pipe.stream(seed=1, callback_on_step_end=lambda *_: {}, **call)
    while not stream._state.is_in_callback:
        threading.Event().wait(0.001)  # without a pause it would keep the interpreter busy
    assert pipe("a star", **SMALL).images  # the stream's callback is not run before it is read
    assert engine.stats().swapped_out_bytes > 0
    *_, last = stream
    expected = stock(generator=generator(1), **call).images
    assert_latents_equal(last.images, expected)


def test_a_changed_component_finds_the_waiting_rows_outside_the_pool(make_pipe):
    pipe = make_pipe(fresh=True)
    call = {"prompt": "a ring", "output_type": "latent", **SMALL}
    engine = small_pool(pipe, blocks_of(pipe, **call))
    state = submit(pipe, seed=1, **call)
    memory = engine.scheduler.memory
    engine.scheduler.schedule(0.0)
    engine.runner.move(memory.take_moves())
    engine.runner.move(())  # nothing to do
    assert memory.device.num_used
    engine._reset()
    assert engine.scheduler.memory.device.num_used == 0
    (output,) = finish(engine, state)
    (again,) = finish(engine, submit(pipe, seed=1, **call))
    assert torch.equal(output.latents, again.latents)


def test_everything_that_a_row_keeps_beside_its_pages_goes_along(make_pipe):
    teacher = make_decoder(PiDScheduler(algorithm_type="dpmsolver++", t_list=None))
    pipe = make_pipe(decoder=teacher)
    use(pipe, "unipc")
    engine = small_pool(pipe, 10**4)
    call = {"prompt": "a cat", "height": 32, "width": 32, "num_inference_steps": 4}
    state = submit(pipe, **call)
    (row,) = state.rows
    step_until(engine, lambda: row.decode_step == 2)
    moved: list[torch.Tensor] = []

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor.clone())
        return moved[-1]

    replace_tensors(row, move)
    pid = row.decode_state
    kept = [row.noise_pred, pid.sigma, pid.prompt_embeds, pid.features.trunk, *(pid.features.heads or ())]
    for solver in (row.noise_scheduler, pid.noise_scheduler._solver):
        kept += [solver.sigmas, solver.timesteps, *(each for each in solver.model_outputs if each is not None)]
    kept.append(row.noise_scheduler.last_sample)
    assert {id(tensor) for tensor in kept} <= {id(tensor) for tensor in moved}
    assert not any(np.shares_memory(t.numpy(), pid.sample.numpy()) for t in moved)  # that one is in the pages
    finish(engine, state)


def assert_fails_alone(engine: DiffusionEngine, bad: RequestState, *good: RequestState) -> None:
    finish(engine, *good)
    error = bad.future.result(0).error
    assert isinstance(error, StepFailedError)
    assert "its pages could not be moved" in str(error)
    engine._reap()
    engine.scheduler.memory.check_integrity()
    assert engine.stats().num_used_blocks == engine.stats().num_swapped_out_rows == 0


def test_a_row_that_takes_more_pages_than_were_counted_fails_alone(make_pipe):
    pipe = make_pipe()
    call = {"prompt": "a ring", "output_type": "latent", **SMALL}
    engine = small_pool(pipe, 10**3)
    count = engine.runner.num_blocks_of
    engine.runner.num_blocks_of = lambda row: 1 if row.seed == 1 else count(row)
    bad, *good = (submit(pipe, seed=seed, **{**call, "height": 96}) for seed in (1, 2, 3))
    assert_fails_alone(engine, bad, *good)


def test_a_row_that_cannot_be_sent_out_fails_alone(make_pipe, monkeypatch):
    pipe = make_pipe()
    call = {"prompt": "a ring", "output_type": "latent", **SMALL}
    engine = small_pool(pipe, 2 * blocks_of(pipe, **call))
    two = submit(pipe, seed=1, deadline_s=FAR, num_images_per_prompt=2, **call)
    two.streaming = True  # its previews go on while one of its rows is gone
    step_until(engine, lambda: two.step == 2)
    short = submit(pipe, seed=3, deadline_s=NEAR, **call)
    with monkeypatch.context() as patch:
        patch.setattr(PagedTensors, "swap_out", lambda *_: torch.empty(2**60))
        assert engine._step()
    assert_fails_alone(engine, two, short, submit(pipe, seed=4, **call))


def test_nothing_of_a_row_that_was_lost_waits_for_the_next_request(make_pipe, monkeypatch):
    pipe = make_pipe()
    call = {"prompt": "a ring", "output_type": "latent", **SMALL}
    engine = small_pool(pipe, blocks_of(pipe, **call))
    long = submit(pipe, deadline_s=FAR, **call)
    assert engine._step()
    short = submit(pipe, deadline_s=NEAR, **call)
    with monkeypatch.context() as patch:
        patch.setattr(PagedTensors, "swap_out", lambda *_: torch.empty(2**60))
        assert engine._step()
    assert engine.cancel(short)
    with engine._condition:
        engine._reap()
    assert isinstance(long.error, StepFailedError)
    assert engine.scheduler.memory.take_moves() == ()
    assert repr(long.rows[0]) == f"<row 0 of request {long.request_id!r}>"  # which reads none of its tensors


def test_a_callback_of_a_row_that_was_lost_ends_with_what_lost_it(make_pipe, monkeypatch):
    pipe = make_pipe()
    call = {"prompt": "a ring", "output_type": "latent", **SMALL}
    engine = small_pool(pipe, blocks_of(pipe, **call))
    long = submit(pipe, deadline_s=FAR, callback_on_step_end=lambda *_: {}, **call)
    assert engine._step()
    due = long.future.take(0)
    submit(pipe, deadline_s=NEAR, **call)
    with monkeypatch.context() as patch:
        patch.setattr(PagedTensors, "swap_out", lambda *_: torch.empty(2**60))
        engine.runner.execute(engine.runner.bring_in(engine._next_output()))
    with pytest.raises(BlockPoolError) as caught:  # there are no latents to show to the callback
        due.run()
    due.reply(None, caught.value)
    assert isinstance(long.error, StepFailedError)
    assert "its pages could not be moved" in str(long.error)


def test_a_finished_row_whose_pages_could_not_be_given_back_says_so(make_pipe):
    pipe = make_pipe()
    call = {"prompt": "a ring", "output_type": "latent", **SMALL}
    engine = small_pool(pipe, blocks_of(pipe, **call))
    state = submit(pipe, **call)
    step_until(engine, lambda: state.step == 2)
    engine.runner._mover._lose(state.rows[0], OSError("the bus is off"))
    state.status = RequestStatus.FINISHED
    engine._finish(state)
    assert isinstance(state.error, StepFailedError)
    assert "its pages could not be moved: the bus is off" in str(state.error)


def take_along(mover: RowMover, row: Any, tensor: torch.Tensor) -> torch.Tensor:
    """As from a device that is not the CPU."""
    mover._away[row].append(tensor.clone())
    mover.swapped_out_bytes += tensor.nbytes
    return mover._away[row][-1]


@pytest.mark.parametrize(
    ("owner", "name", "is_half_done"),
    [
        (PagedTensors, "enter", True),
        (PagedTensors, "swap_out", False),
        (PagedTensors, "swap_in", False),
        (RowMover, "_take_along", True),
        (RowMover, "_bring_along", False),
    ],
)
def test_a_move_that_ran_out_of_memory_is_carried_out_with_more_room(make_pipe, monkeypatch, owner, name, is_half_done):
    pipe = make_pipe()
    use(pipe, "unipc")
    call = {"prompt": "a cat", "output_type": "latent", **SMALL}
    num_blocks = blocks_of(pipe, **call)
    (alone,) = finish(pipe._engine, submit(pipe, seed=1, **call))
    engine = small_pool(pipe, num_blocks, step_cache_threshold=1e-9)
    monkeypatch.setattr(RowMover, "_take_along", take_along)
    work, calls, emptied = getattr(owner, name), [], []

    def full_at_first(self: Any, *args: Any) -> Any:
        calls.append(1)
        result = work(self, *args) if is_half_done or len(calls) > 1 else None
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no room")
        return result

    monkeypatch.setattr(owner, name, full_at_first)
    monkeypatch.setattr(devices, "empty_cache", lambda device: emptied.append(len(engine.runner._caching)))
    states = [submit(pipe, seed=1, deadline_s=FAR, **call)]
    for deadline_s in (NEAR, NEAR / 2):
        assert engine._step()
        states.append(submit(pipe, seed=1, deadline_s=deadline_s, **call))
    for output in finish(engine, *states):
        assert torch.equal(output.latents, alone.latents)
    assert emptied == [0]
    assert not engine.runner._mover._away
    stats = engine.stats()
    assert stats.swapped_in_bytes == stats.swapped_out_bytes > 0
    assert (stats.num_used_blocks, stats.num_swapped_out_rows) == (0, 0)


def crowded(pipe: ContinuousBatchingPipeline, monkeypatch: Any, **call: Any) -> tuple[Any, list[RequestState]]:
    """An engine whose pool holds two of three: the first one is out after a step, the last one runs longest."""
    engine = small_pool(pipe, 2 * blocks_of(pipe, **call))
    monkeypatch.setattr(RowMover, "_take_along", take_along)
    states = [submit(pipe, seed=1, deadline_s=FAR, **call)]
    assert engine._step()
    for num_steps in (2, SMALL["num_inference_steps"]):
        states.append(submit(pipe, seed=1, deadline_s=NEAR, **{**call, "num_inference_steps": num_steps}))
    return engine, states


@pytest.mark.parametrize(("owner", "name"), [(PagedTensors, "enter"), (RowMover, "_bring_along")])
def test_a_row_that_finds_no_memory_to_come_waits_while_others_go_on(make_pipe, monkeypatch, owner, name):
    pipe = make_pipe()
    use(pipe, "unipc")
    call = {"prompt": "a cat", "output_type": "latent", **SMALL}
    num_blocks = blocks_of(pipe, **call)
    (alone,) = finish(pipe._engine, submit(pipe, seed=1, **call))
    if name == "enter":
        engine = small_pool(pipe, 2 * num_blocks)
        states = [submit(pipe, seed=1, deadline_s=FAR, **call)]
        assert engine._step()
        states.append(submit(pipe, seed=1, deadline_s=NEAR, **call))
        other, waiter = states
    else:
        engine, states = crowded(pipe, monkeypatch, **call)
        waiter, _, other = states
    work, refused, emptied = getattr(owner, name), [], []
    monkeypatch.setattr(devices, "empty_cache", emptied.append)

    def full_for_a_while(self: Any, *args: Any) -> None:
        if len(refused) < 4:
            refused.append((waiter.step, other.step))
            raise torch.OutOfMemoryError("no room")
        work(self, *args)

    monkeypatch.setattr(owner, name, full_for_a_while)
    outputs = finish(engine, *states)
    (waiter_step, other_step) = refused[0]
    assert refused == [(waiter_step, other_step + i) for i in (0, 0, 1, 2)]
    assert len(emptied) == 1  # what others keep to be faster is not thrown away at every step
    for output in (outputs[0], outputs[-1]):
        assert torch.equal(output.latents, alone.latents)
    assert engine.stats().swapped_in_bytes == engine.stats().swapped_out_bytes
    assert not engine.runner._mover.waiting
    assert not engine.runner._mover._away


def test_what_finds_no_host_memory_stays_where_it_is(make_pipe, monkeypatch):
    pipe = make_pipe()
    use(pipe, "unipc")
    call = {"prompt": "a cat", "output_type": "latent", **SMALL}
    (alone,) = finish(pipe.init_continuous_batching(), submit(pipe, seed=1, **call))
    engine, states = crowded(pipe, monkeypatch, **call)
    monkeypatch.setattr(RowMover, "_take_along", lambda *_: torch.empty(2**60))
    assert engine._step()
    assert is_out(engine, states[0])
    assert states[0].rows[0] in engine.runner._mover.waiting
    outputs = finish(engine, *states)
    assert torch.equal(outputs[0].latents, alone.latents)
    assert engine.stats().num_used_blocks == engine.stats().num_swapped_out_rows == 0


def test_a_row_that_waits_for_host_memory_gathers_none_meanwhile(make_pipe, monkeypatch):
    pipe = make_pipe()
    use(pipe, "unipc")
    engine, states = crowded(pipe, monkeypatch, prompt="a cat", output_type="latent", **SMALL)
    num_taken = []

    def full_after_one(mover: RowMover, row: Any, tensor: torch.Tensor) -> torch.Tensor:
        num_taken.append(1)
        if len(num_taken) % 2 == 0:
            raise torch.OutOfMemoryError("no room")
        return take_along(mover, row, tensor)

    monkeypatch.setattr(RowMover, "_take_along", full_after_one)
    for _ in range(2):
        assert engine._step()
        (row,) = states[0].rows
        assert engine.runner._mover._away[row] == []
    assert row in engine.runner._mover.waiting
    assert len(num_taken) == 6  # two tries, then one


def test_a_row_that_never_finds_memory_to_come_fails_alone(make_pipe, monkeypatch):
    pipe = make_pipe()
    call = {"prompt": "a ring", "output_type": "latent", **SMALL}
    engine, (bad, *good) = crowded(pipe, monkeypatch, **call)
    monkeypatch.setattr(RowMover, "_bring_along", lambda *_: torch.empty(2**60))
    finish(engine, *good)
    assert bad.future.final is None  # as long as somebody else's end may give it room
    step_until(engine, lambda: bad.future.final is not None)
    assert_fails_alone(engine, bad, submit(pipe, seed=4, **call))
    assert not engine.runner._mover.waiting


def test_a_row_that_finds_no_memory_to_come_waits_for_who_is_in_a_callback(make_pipe, monkeypatch):
    pipe = make_pipe()
    call = {"prompt": "a ring", "output_type": "latent", **SMALL}
    engine = small_pool(pipe, 2 * blocks_of(pipe, **call))
    other = submit(pipe, callback_on_step_end=lambda *_: {}, **call)
    assert engine._step()
    enter, refused = PagedTensors.enter, []

    def full_until_the_other_has_ended(self: Any, *args: Any) -> None:
        if other.future.final is None:
            refused.append(other.step)
            raise torch.OutOfMemoryError("no room")
        enter(self, *args)

    def answer(is_reached: Any, timeout: float) -> bool:
        """What the caller's thread does meanwhile."""
        due = other.future.take(0)
        due.reply(due.run(), None)
        return is_reached()

    monkeypatch.setattr(PagedTensors, "enter", full_until_the_other_has_ended)
    monkeypatch.setattr(engine._condition, "wait_for", answer)
    waiter = submit(pipe, **call)
    step_until(engine, lambda: waiter.future.final is not None)
    assert waiter.error is None
    assert other.error is None
    assert set(refused) == set(range(1, SMALL["num_inference_steps"] + 1))


def test_a_row_that_is_cancelled_while_it_waits_for_memory_leaves_nothing(make_pipe, monkeypatch):
    pipe = make_pipe()
    call = {"prompt": "a ring", "output_type": "latent", **SMALL}
    engine, (waiter, *others) = crowded(pipe, monkeypatch, **call)
    with monkeypatch.context() as patch:
        patch.setattr(RowMover, "_bring_along", lambda *_: torch.empty(2**60))
        step_until(engine, lambda: engine.runner._mover.waiting or waiter.status.is_ending)
        assert engine.runner._mover.waiting
        assert engine.cancel(waiter)
        finish(engine, *others)
    mover = engine.runner._mover
    assert (mover.waiting, mover.lost, mover._away) == ({}, {}, {})
    finish(engine, submit(pipe, seed=4, **call))


def test_a_call_with_a_callback_waits_for_memory_as_a_whole(make_pipe, monkeypatch):
    pipe = make_pipe()
    call = {"prompt": "a ring", "num_images_per_prompt": 2, "output_type": "latent", **SMALL}
    expected = pipe(generator=generator(3), **call).images
    enter, num_tries, steps = PagedTensors.enter, [], []

    def full_at_first(self: Any, *args: Any) -> None:
        num_tries.append(1)
        if len(num_tries) <= 2:
            raise torch.OutOfMemoryError("no room")
        enter(self, *args)

    monkeypatch.setattr(PagedTensors, "enter", full_at_first)
    callback = lambda pipeline, step, *_: steps.append(step) or {}  # noqa: E731
    assert torch.equal(pipe(generator=generator(3), callback_on_step_end=callback, **call).images, expected)
    assert steps == list(range(SMALL["num_inference_steps"]))
    assert len(num_tries) == 4  # the first row's three and the second row's one


def test_an_engine_stops_though_pages_cannot_be_moved(make_pipe, monkeypatch):
    pipe = make_pipe()
    engine = small_pool(pipe, 10**3)
    state = submit(pipe, prompt="a ring", **SMALL)
    assert engine._step()
    closed: list[bool] = []
    monkeypatch.setattr(engine.runner, "move", lambda moves: 1 // 0)
    monkeypatch.setattr(engine.runner, "close", lambda: closed.append(True))
    engine.stop(hard_stop=True)
    assert state.future.result(0).status is RequestStatus.FAILED
    assert closed


def test_a_first_call_in_inference_mode_leaves_a_pool_that_can_be_swapped(make_pipe):
    pipe = make_pipe()
    call = {"prompt": "a ring", "output_type": "latent", **SMALL}
    num_blocks = blocks_of(pipe, **call)
    with torch.inference_mode():
        engine = small_pool(pipe, num_blocks + 1)
        first = submit(pipe, seed=1, deadline_s=FAR, **call)
    step_until(engine, lambda: first.step == 2)
    second = submit(pipe, seed=2, deadline_s=NEAR, **call)
    third = submit(pipe, seed=3, deadline_s=NEAR, **{**call, "height": 32})
    finish(engine, first, second, third)
    assert engine.stats().swapped_in_bytes > 0


def test_what_went_along_comes_back_when_a_row_leaves_from_host_memory(make_pipe, monkeypatch):
    monkeypatch.setattr(RowMover, "_take_along", take_along)
    pipe = make_pipe()
    call = {"prompt": "a ring", "output_type": "latent", **SMALL}
    engine = small_pool(pipe, blocks_of(pipe, **call))
    long = submit(pipe, seed=1, deadline_s=FAR, **call)
    assert engine._step()
    short = submit(pipe, seed=2, deadline_s=NEAR, **call)
    assert engine._step()
    assert is_out(engine, long)
    along = sum(tensor.nbytes for tensor in engine.runner._mover._away[long.rows[0]])
    assert along > 0
    engine._reset()
    assert engine.runner._mover.swapped_in_bytes == along
    assert not engine.runner._mover._away
    finish(engine, long, short)


def test_of_a_row_that_is_done_only_the_latents_are_copied_out(make_pipe, monkeypatch):
    pipe = make_pipe()
    call = {"prompt": "a ring", "negative_prompt": " ", "num_images_per_prompt": 2, "output_type": "latent", **SMALL}
    engine = small_pool(pipe, blocks_of(pipe, **call), "fcfs")
    state, copied = submit(pipe, seed=1, **call), []
    leave, get = PagedTensors.leave, PagedTensors.get

    def watched(self: PagedTensors) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(PagedTensors, "get", lambda pages, name: copied.append(name) or get(pages, name))
            leave(self)

    monkeypatch.setattr(PagedTensors, "leave", watched)
    finish(engine, state)
    engine._reap()
    assert copied == ["latents", "latents"]


def test_where_the_pool_finds_no_room_on_a_new_device_it_is_the_least_one(make_pipe, monkeypatch):
    pipe = make_pipe()
    engine = small_pool(pipe, 10**6)
    runner = engine.runner
    runner._device = torch.device("meta")  # where the pipeline was, until now
    monkeypatch.setattr(runner, "_make_swap", lambda: torch.empty(2**60))
    engine._reset()
    assert engine.scheduler.memory.device.num_blocks == LEAST_BYTES // PAGE
    finish(engine, submit(pipe, prompt="a ring", output_type="latent", **SMALL))


def no_room(*args: Any) -> None:
    raise torch.OutOfMemoryError("no room")


def test_a_text_in_pages_is_brought_along_to_another_dtype(make_pipe, monkeypatch):
    pipe = make_pipe(page_size=2**20)
    model = pipe._engine.runner._model
    (row,) = pipe._make_request(prompt="a ring", **SMALL).rows
    model.prepare_encode([row])
    embeds = row.text.embeds
    latents, row.pages = row.latents, PagedTensors(HostSwap(2**20, torch.device("cpu"), 4, 4))
    row.latents = latents.double()
    row.pages.enter((0, 1, 2))
    keep_texts(row)
    with monkeypatch.context() as patch:
        patch.setattr("diffusers_continuous.models.qwen_image.TextEmbeds", no_room)
        with pytest.raises(torch.OutOfMemoryError):
            model.prepare_denoise([row])
    model.prepare_denoise([row])  # tries again what ran out of memory
    assert type(row.text) is TextEmbeds
    assert torch.equal(row.text.embeds, embeds)
    keep_texts(row)
    assert torch.equal(row.text.embeds, embeds)


def test_the_probe_of_the_largest_step_runs(make_pipe):
    pipe = make_pipe(max_batch_tokens=64)
    runner, sizes = pipe._engine.runner, []
    denoise_step = runner._model.denoise_step
    runner._model.denoise_step = lambda batch: sizes.append(batch.num_tokens) or denoise_step(batch)
    runner.warm_up()
    assert 40 < sizes[0] <= 64


@pytest.mark.parametrize("max_decode_bytes", [0, 1, 10**7])
@pytest.mark.parametrize("has_encoder", [True, False])
def test_the_probe_decodes_with_pid_too_where_there_is_one(make_pipe, monkeypatch, has_encoder, max_decode_bytes):
    decoder = make_decoder()
    captions, pictures = [], []
    encode, forward = PiDDecoder._encode, type(decoder.transformer).forward

    def watched_encode(self: Any, texts: list[str]) -> torch.Tensor:
        captions.extend(texts)
        return encode(self, texts)

    def watched_forward(self: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        pictures.append((tuple(sample.shape), kwargs["chunk"]))
        return forward(self, sample, *args, **kwargs)

    monkeypatch.setattr(PiDDecoder, "_encode", watched_encode)
    monkeypatch.setattr(type(decoder.transformer), "forward", watched_forward)
    if not has_encoder:
        decoder.free_text_encoder()
    pipe = make_pipe(decoder=decoder, max_batch_tokens=64, max_decode_bytes=max_decode_bytes)
    pipe._engine.runner.warm_up()
    assert captions == [""] * has_encoder
    chunk = decoder.transformer.choose_chunk(448, 448, 1, max_decode_bytes, 8) if max_decode_bytes > 1 else None
    assert pictures == ([((1, 3, 448, 448), chunk)] if max_decode_bytes != 1 else [])  # which no decode can do with


def test_no_encoding_is_larger_than_the_one_that_the_pool_was_made_beside(make_pipe, monkeypatch):
    pipe = make_pipe(dtype=torch.bfloat16, max_batch_tokens=1600)
    sizes: list[int] = []

    def count(module: Any, args: Any, kwargs: Any) -> None:
        sizes.append(kwargs["input_ids"].numel())

    def peak_of(device: torch.device, work: Any) -> int:
        work()
        return max(sizes, default=0)

    monkeypatch.setattr(budget, "is_host", lambda device: False)
    monkeypatch.setattr(budget, "peak_bytes", peak_of)
    monkeypatch.setattr(budget, "empty_cache", lambda device: None)
    monkeypatch.setattr(budget, "memory_info", lambda device: (10**10, 10**10))
    monkeypatch.setattr(budget, "LEAST_BYTES", 0)
    runner = pipe._engine.runner
    with pipe.text_encoder.register_forward_pre_hook(count, with_kwargs=True):
        num_bytes = budget.pool_bytes(torch.device("cpu"), 1.0, runner.warm_up)
        assert not runner._model._prompts
        peak = 10**10 - num_bytes
        sizes.clear()
        prompts = ["a " * length for length in (3, 900, 40, 80, 1500, 500, 501)]
        rows = pipe._make_request(prompt=prompts, **SMALL).rows
        runner._model.prepare_encode(rows)
    assert sizes == [3 * 120, 2 * 541, 940, 1058]  # 40 tokens are the template's, and the longest prompt is cut
    assert max(sizes) <= peak
    assert [row.text.num_tokens for row in rows] == [9, 512, 46, 86, 512, 506, 507]
