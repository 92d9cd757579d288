"""The engine's life: starting, waiting, cancelling, pausing, draining, dying; everybody accepted ends exactly once."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from conftest import assert_latents_equal, generator
from diffusers_continuous import (
    EngineStoppedError,
    QueueFullError,
    RequestCancelledError,
    RequestError,
    RequestStatus,
    StepFailedError,
    StepScheduler,
    embedded,
    runner,
)

SMALL = {"height": 64, "width": 64, "num_inference_steps": 3, "true_cfg_scale": 1.0, "output_type": "latent"}


class Gate:
    """Stops the runner before a step until it is opened; lets a test act at a known moment without sleeping."""

    def __init__(self, engine, at_step=1):
        self.reached, self.opened = threading.Event(), threading.Event()
        self._execute, self._left = engine.runner.execute, at_step
        engine.runner.execute = self

    def __call__(self, output):
        self._left -= 1
        if self._left == 0:
            self.reached.set()
            assert self.opened.wait(30)
        return self._execute(output)


def assert_is_empty(engine):
    scheduler = engine.scheduler
    assert [*scheduler.waiting, *scheduler.running, *scheduler.decoding] == []
    assert engine._active == {}


def test_requests_added_before_the_start_run_after_it(pipe, stock):
    engine = pipe.init_continuous_batching()
    ids = [engine.add_request(prompt="a ring", seed=seed, **SMALL) for seed in (1, 2)]
    assert not engine.is_running()
    assert engine.stats().num_waiting == 2
    engine.start()
    for seed, request_id in zip((1, 2), ids, strict=True):
        output = engine.get_result(request_id, timeout=60)
        assert (output.status, output.seeds, output.finished) == (RequestStatus.FINISHED, [seed], True)
        assert_latents_equal(output.images, stock("a ring", generator=generator(seed), **SMALL).images)
    assert engine.stats().mean_rows_per_step == 2.0


def test_a_started_engine_that_idled_serves_and_uses_no_cpu_meanwhile(pipe):
    engine = pipe.init_continuous_batching()
    engine.start()
    pipe("a ring", **SMALL)
    before = engine.stats()
    cpu, wall = time.process_time(), time.monotonic()
    threading.Event().wait(1.0)
    assert time.process_time() - cpu < 0.01 * (time.monotonic() - wall)  # under 1 % of a core
    assert engine.stats().num_steps == before.num_steps
    assert pipe("a ring", **SMALL).images.shape == (1, 16, 64)


def test_short_requests_return_before_the_long_one_that_came_first(pipe):
    with pipe.continuous_batching_context_manager() as engine:
        gate = Gate(engine)
        long = engine.add_request(prompt="a star", **{**SMALL, "num_inference_steps": 12})
        gate.reached.wait(30)
        short = engine.add_request(prompt="a ring", **{**SMALL, "num_inference_steps": 2})
        gate.opened.set()
        first, second = engine.get_result(short).metrics, engine.get_result(long).metrics
    assert first.finish_s < second.finish_s
    assert second.arrival_s < first.arrival_s


def test_streamed_outputs_end_with_the_final_one(pipe):
    with pipe.continuous_batching_context_manager() as engine:
        request_id = engine.add_request(prompt="a ring", streaming=True, **SMALL)
        outputs = list(engine.request_id_iter(request_id))
        assert [out.finished for out in outputs] == [False] * (len(outputs) - 1) + [True]
        assert [out.step for out in outputs] == [*sorted({out.step for out in outputs[:-1]}), 3]
        with pytest.raises(RequestError, match="taken already"):
            engine.get_result(request_id)


def test_get_result_returns_none_at_its_timeout_and_the_request_goes_on(pipe):
    engine = pipe.init_continuous_batching()
    gate = Gate(engine)
    engine.start()
    request_id = engine.add_request(prompt="a ring", **SMALL)
    assert engine.get_result(request_id, timeout=0.01) is None
    gate.opened.set()
    assert engine.get_result(request_id, timeout=30).status is RequestStatus.FINISHED


def test_cancelling_queued_running_finished_unknown_and_twice(make_pipe):
    pipe = make_pipe(max_requests_per_batch=1)
    engine = pipe._engine
    gate = Gate(engine, at_step=2)
    engine.start()
    running = engine.add_request(prompt="a ring", **SMALL)
    queued = engine.add_request(prompt="a star", **SMALL)
    kept = engine.add_request(prompt="a cross", **SMALL)
    assert gate.reached.wait(30)
    assert engine.cancel_request(running)
    assert engine.cancel_request(queued)
    assert not engine.cancel_request(queued)
    assert not engine.cancel_request("nobody")
    for request_id in (running, queued):  # told at once, although the step still runs
        output = engine.get_result(request_id, timeout=5)
        assert output.status is RequestStatus.CANCELLED
        assert isinstance(output.error, RequestCancelledError)
    gate.opened.set()
    assert engine.get_result(kept, timeout=30).status is RequestStatus.FINISHED
    assert not engine.cancel_request(kept)
    assert_is_empty(engine)


def test_pausing_halts_between_steps_and_changes_nothing(pipe, stock):
    engine = pipe.init_continuous_batching()
    gate = Gate(engine, at_step=2)
    engine.start()
    request_id = engine.add_request(prompt="a ring", seed=3, **SMALL)
    assert gate.reached.wait(30)
    threading.Timer(0.05, gate.opened.set).start()
    with engine.pause():
        steps = engine.stats().num_steps
        assert engine.get_result(request_id, timeout=0.05) is None
        assert engine.stats().num_steps == steps
    output = engine.get_result(request_id, timeout=30)
    assert_latents_equal(output.images, stock("a ring", generator=generator(3), **SMALL).images)


def test_stop_drains_and_then_refuses(pipe):
    engine = pipe.init_continuous_batching()
    engine.start()
    ids = [engine.add_request(prompt="a ring", **SMALL) for _ in range(3)]
    engine.stop()
    assert not engine.is_running()
    assert [engine.get_result(i, timeout=1).status for i in ids] == [RequestStatus.FINISHED] * 3
    with pytest.raises(EngineStoppedError, match="stopped"):
        engine.add_request(prompt="a ring", **SMALL)
    assert pipe("a ring", **SMALL).images.shape == (1, 16, 64)  # the pipeline makes itself a new one


def test_a_hard_stop_fails_what_is_left_at_once(pipe):
    engine = pipe.init_continuous_batching()
    gate = Gate(engine)
    engine.start()
    ids = [engine.add_request(prompt="a ring", **SMALL) for _ in range(3)]
    assert gate.reached.wait(30)
    engine.stop(block=False, hard_stop=True)
    gate.opened.set()
    outputs = [engine.get_result(i, timeout=30) for i in ids]
    assert all(output.status is RequestStatus.FAILED for output in outputs)
    assert all(isinstance(output.error, EngineStoppedError) for output in outputs)
    engine.stop()
    assert_is_empty(engine)


def test_an_exception_in_the_context_body_leaves_no_thread(pipe):
    with pytest.raises(KeyError), pipe.continuous_batching_context_manager() as engine:  # noqa: PT012
        engine.add_request(prompt="a ring", **SMALL)
        raise KeyError
    assert not engine._thread.is_alive()


@pytest.mark.parametrize("cause", [ZeroDivisionError("a bug in deciding"), SystemExit("killed")])
def test_a_killed_loop_tells_every_waiter_and_every_later_caller_why(pipe, monkeypatch, cause):
    engine = pipe.init_continuous_batching()
    gate = Gate(engine, at_step=2)
    errors = []

    def call():
        try:
            pipe("a ring", **SMALL)
        except EngineStoppedError as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert gate.reached.wait(30)

    def kill(*_):
        raise cause

    monkeypatch.setattr(StepScheduler, "schedule", kill)
    gate.opened.set()
    for thread in threads:
        thread.join(10)
    assert len(errors) == 3
    assert all(error.__cause__ is cause for error in errors)
    assert engine.fatal_error is cause
    with pytest.raises(EngineStoppedError) as later:
        pipe("a ring", **SMALL)
    assert later.value.__cause__ is cause


def test_a_full_queue_refuses_and_keeps_the_others(make_pipe):
    pipe = make_pipe(max_queue_size=2)
    engine = pipe._engine
    ids = [engine.add_request(prompt="a ring", **SMALL) for _ in range(2)]
    with pytest.raises(QueueFullError, match="max_queue_size=2"):
        engine.add_request(prompt="a ring", **SMALL)
    engine.start()
    assert all(engine.get_result(i, timeout=30).status is RequestStatus.FINISHED for i in ids)


def test_a_request_id_in_use_is_refused(pipe):
    engine = pipe.init_continuous_batching()
    engine.add_request(prompt="a ring", request_id="mine", **SMALL)
    with pytest.raises(RequestError, match="'mine' is in use"):
        engine.add_request(prompt="a ring", request_id="mine", **SMALL)


# ---------------------------------------------------------------------- failures inside a step


def fail_for(engine, method, is_bad):
    """Make one of the model's verbs raise whenever a bad row takes part."""
    model = engine.runner._model
    original = getattr(model, method)

    def failing(argument):
        rows = getattr(argument, "rows", argument)
        if any(is_bad(row) for row in rows):
            raise ValueError("broken row")
        return original(argument)

    setattr(model, method, failing)


@pytest.mark.parametrize("method", ["prepare_encode", "denoise_step", "post_decode"])
def test_one_bad_row_fails_alone_and_says_where(pipe, stock, method):
    engine = pipe.init_continuous_batching()
    fail_for(engine, method, lambda row: row.request.request_id == "bad")
    call = {**SMALL, "output_type": "np"}
    ids = [
        engine.add_request(prompt=f"a {w}", seed=i, request_id=w, **call) for i, w in enumerate(["ring", "bad", "star"])
    ]
    engine.start()
    outputs = [engine.get_result(i, timeout=60) for i in ids]
    assert [out.status.value for out in outputs] == ["finished", "failed", "finished"]
    assert isinstance(outputs[1].error, StepFailedError)
    where = {"prepare_encode": "encode stage", "denoise_step": "step 1 of 3", "post_decode": "decode stage"}[method]
    assert where in str(outputs[1].error)
    assert "'bad'" in str(outputs[1].error)
    assert isinstance(outputs[1].error.__cause__, ValueError)
    for index, word in ((0, "ring"), (2, "star")):
        expected = stock(f"a {word}", generator=generator(index), **call).images
        assert abs(outputs[index].images - expected).max() < 1e-4
    assert_is_empty(engine)


def test_a_bad_row_of_rows_that_share_a_noise_scheduler_is_the_one_that_is_named(make_pipe):
    pipe = make_pipe()
    pipe.scheduler = NOISE_SCHEDULERS["unipc"]  # it keeps what it had of all rows
    engine = pipe.init_continuous_batching()
    fail_for(engine, "denoise_step", lambda row: row.index == 1 and row.step == 2)
    with pytest.raises(StepFailedError, match="row 1, failed in step 3 of 3: broken row"):
        pipe("a ring", num_images_per_prompt=2, callback_on_step_end=lambda *_: {}, **SMALL)


def test_out_of_memory_splits_the_batch_and_everybody_finishes(pipe, stock):
    engine = pipe.init_continuous_batching()
    model, sizes = engine.runner._model, []
    denoise_step = model.denoise_step

    def small_memory(batch):
        sizes.append(len(batch.rows))
        if len(batch.rows) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return denoise_step(batch)

    model.denoise_step = small_memory
    ids = [engine.add_request(prompt="a ring", seed=i, **SMALL) for i in range(5)]
    engine.start()
    for seed, request_id in enumerate(ids):
        output = engine.get_result(request_id, timeout=60)
        assert_latents_equal(output.images, stock("a ring", generator=generator(seed), **SMALL).images)
    assert sizes[:6] == [5, 3, 2, 1, 2, 2]  # what was too much is not tried again
    assert engine.stats().num_batch_retries > 0
    assert engine.stats().max_batch_tokens < engine.stats().recent_steps[1].num_tokens


VERBS = {"prepare_encode": "encode", "denoise_step": "denoise", "post_decode": "decode"}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("is_half_done", [False, True])
def test_a_row_that_ran_out_of_memory_by_itself_is_tried_once_more(make_pipe, monkeypatch, verb, is_half_done):
    pipe = make_pipe(max_batch_tokens=100)
    call = {**SMALL, "prompt": "a ring", "negative_prompt": " ", "true_cfg_scale": 2.0, "seed": 3, "output_type": "pt"}
    expected = make_pipe()(**call).images
    engine = pipe._engine
    model, num_tries, kept, kinds = engine.runner._model, [], [], []
    work, take_timings = getattr(model, verb), engine.runner.take_timings

    def full_at_first(argument):
        num_tries.append(1)
        kept.append(len(model._prompts) + len(engine.runner._compositions))
        if is_half_done or len(num_tries) > 1:
            result = work(argument)
        if len(num_tries) == 1:
            raise torch.OutOfMemoryError("no room")
        return result

    def watched():
        timings = take_timings()
        kinds.extend(kind for kind, *_ in timings)
        return timings

    monkeypatch.setattr(model, verb, full_at_first)
    monkeypatch.setattr(engine.runner, "take_timings", watched)
    assert torch.equal(pipe(**call).images, expected)
    assert engine.stats().num_batch_retries == 1
    assert kept[1] <= (verb == "denoise_step")  # the batch is made again
    whole = {"encode": 1, "denoise": 3, "decode": 1}
    assert {kind: kinds.count(kind) for kind in whole} == {**whole, VERBS[verb]: whole[VERBS[verb]] - 1}
    assert (engine.stats().max_batch_tokens, engine.stats().max_decode_tokens) == (100, {})


@pytest.mark.parametrize("verb", VERBS)
def test_a_row_that_never_has_memory_by_itself_fails_after_two_tries(pipe, stock, monkeypatch, verb):
    engine = pipe.init_continuous_batching()
    model, num_tries = engine.runner._model, []
    work = getattr(model, verb)

    def full(argument):
        rows = getattr(argument, "rows", argument)
        if any(row.request.request_id == "bad" for row in rows):
            num_tries.append(len(rows))
            raise torch.OutOfMemoryError("no room")
        return work(argument)

    monkeypatch.setattr(model, verb, full)
    call = {**SMALL, "output_type": "np"}
    bad = engine.add_request(prompt="a ring", request_id="bad", **call)
    good = engine.add_request(prompt="a star", seed=4, **call)
    engine.start()
    assert isinstance(engine.get_result(bad, timeout=60).error, StepFailedError)
    expected = stock("a star", generator=generator(4), **call).images
    assert abs(engine.get_result(good, timeout=60).images - expected).max() < 1e-4
    assert num_tries == [2, 1, 1]
    assert engine.stats().num_batch_retries == 2


def test_an_error_keeps_nothing_of_the_step_that_failed(pipe, monkeypatch):
    engine = pipe.init_continuous_batching()
    seen = []

    def broken(batch):
        activations = torch.zeros(10)
        seen.append(weakref.ref(activations))
        raise ValueError("broken")

    monkeypatch.setattr(engine.runner._model, "denoise_step", broken)
    with pytest.raises(StepFailedError, match="broken") as failure:
        pipe("a ring", **SMALL)
    assert failure.value.__cause__.__traceback__ is not None
    assert [reference() for reference in seen] == [None]


@pytest.mark.parametrize("verb", ["make_output", "latents_of"])
def test_a_result_that_ran_out_of_memory_is_made_again(make_pipe, monkeypatch, verb):
    pipe = make_pipe()
    call = {**SMALL, "prompt": "a ring", "num_images_per_prompt": 2, "seed": 3, "output_type": "pt"}
    expected = make_pipe()(**call).images
    engine = pipe.init_continuous_batching()
    owner, name = (engine.runner._model, verb) if verb == "make_output" else (torch, "stack")
    work, num_tries = getattr(owner, name), []

    def full_at_first(argument, *args, **kwargs):
        is_result = verb == "make_output" or (len(argument) == 2 and argument[0].shape == (16, 64))
        num_tries.extend([1] * is_result)
        if is_result and len(num_tries) == 1:
            raise torch.OutOfMemoryError("no room")
        return work(argument, *args, **kwargs)

    finish = engine._finish

    def finish_without_room(state):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full_at_first)
            finish(state)

    engine._finish = finish_without_room
    assert torch.equal(pipe(**call).images, expected)
    assert len(num_tries) == 2


def test_room_for_a_result_is_made_between_others_steps(pipe, monkeypatch):
    runner = pipe.init_continuous_batching().runner
    num_tries, is_mine = [], []

    def full_at_first(state):
        num_tries.append(1)
        if len(num_tries) == 1:
            raise torch.OutOfMemoryError("no room")
        return make_output(state)

    make_output = runner._model.make_output
    monkeypatch.setattr(runner._model, "make_output", full_at_first)
    monkeypatch.setattr(runner._model, "drop_caches", lambda: is_mine.append(runner.lock._is_owned()))
    pipe("a ring", callback_on_step_end=lambda *_: {}, **SMALL)  # whose last callback's thread makes the result
    assert (len(num_tries), is_mine) == (2, [True])


def test_nobody_is_asked_for_caches_who_has_none(make_pipe):
    pipe = make_pipe(step_cache_threshold=0.5)
    gc.disable()
    try:
        for _ in range(3):
            pipe("a ring", **{**SMALL, "output_type": "pt"})
            assert len(pipe._engine.runner._caching) <= 1
    finally:
        gc.enable()


@pytest.mark.parametrize("verb", ["denoise_step", "post_decode"])
def test_a_limit_rises_again_after_a_shortage_that_passed(pipe, monkeypatch, verb):
    engine = pipe.init_continuous_batching(max_batch_tokens=120, scheduler_type="fcfs")
    model, sizes, most = engine.runner._model, [], [4]
    work = getattr(model, verb)

    def short_of_memory(argument):
        sizes.append(len(getattr(argument, "rows", argument)))
        if sizes[-1] > most[0]:
            raise torch.OutOfMemoryError("no room")
        return work(argument)

    def latents():
        (output,) = pipe.generate_batch([call]).values()
        return output.latents

    monkeypatch.setattr(model, verb, short_of_memory)
    call = {**SMALL, "prompt": "a ring", "num_images_per_prompt": 4, "seed": 1, "output_type": "pt"}
    alone = latents()
    assert set(sizes) == {4}
    most[0] = 1
    assert torch.equal(latents(), alone)
    stats = engine.stats()
    assert stats.max_batch_tokens == (23 if verb == "denoise_step" else 120)  # of one row
    assert stats.max_decode_tokens == ({} if verb == "denoise_step" else {"vae": 16})
    most[0] = 4
    sizes.clear()
    monkeypatch.setattr("diffusers_continuous.memory.token_limit.CALM_STEPS", 2)
    for _ in range(6):
        assert torch.equal(latents(), alone)
    assert (engine.stats().max_batch_tokens, engine.stats().max_decode_tokens) == (120, {})
    assert engine.stats().num_batch_retries == stats.num_batch_retries
    assert sizes[0] == 1
    assert {2, 3} & set(sizes)  # not all at once
    assert sizes[-1] == 4


def test_components_that_find_no_memory_to_go_to_stay_where_they_are(pipe, monkeypatch, caplog):
    engine = pipe.init_continuous_batching()

    def full():
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 40 GB")

    monkeypatch.setattr(engine.runner._model, "release", full)
    for _ in range(2):
        assert pipe("a ring", **SMALL).images is not None
    with engine.pause():  # after the step that was the last
        assert engine.fatal_error is None
    assert "offloaded components stay on cpu: DefaultCPUAllocator" in caplog.text


def test_without_memory_for_a_preview_there_is_none(pipe, monkeypatch):
    engine = pipe.init_continuous_batching()

    def no_room(row):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(engine.runner._model, "moment", no_room)
    outputs = list(pipe.stream("a ring", **SMALL))
    assert [output.preview for output in outputs] == [None] * len(outputs)
    assert outputs[-1].status is RequestStatus.FINISHED
    assert engine.fatal_error is None


@pytest.mark.parametrize("num_refused", [1, 2, 3])
def test_a_step_whose_end_ran_out_of_memory_is_looked_at_row_by_row(pipe, stock, monkeypatch, num_refused):
    engine = pipe.init_continuous_batching()
    are_finite, refused = runner._are_finite, []

    def small_memory(tensors):
        if len(refused) < num_refused:
            refused.append(len(tensors))
            raise torch.OutOfMemoryError("no room")
        return are_finite(tensors)

    monkeypatch.setattr(runner, "_are_finite", small_memory)
    ids = [engine.add_request(prompt="a ring", seed=seed, **SMALL) for seed in range(3)]
    engine.start()
    outputs = [engine.get_result(request_id, timeout=60) for request_id in ids]
    assert refused == [3, 1, 1][:num_refused]
    good = [seed for seed, output in enumerate(outputs) if output.error is None]
    assert len(good) == (2 if num_refused == 3 else 3)  # a row whose own turn is refused twice fails alone
    assert engine.stats().num_batch_retries == min(num_refused, 2)
    assert all("step 1 of 3" in str(output.error) for output in outputs if output.error)
    for seed in good:
        assert_latents_equal(outputs[seed].images, stock("a ring", generator=generator(seed), **SMALL).images)
    assert engine.fatal_error is None


NOISE_SCHEDULERS = {
    "euler": FlowMatchEulerDiscreteScheduler(),
    "stochastic": FlowMatchEulerDiscreteScheduler(stochastic_sampling=True),
    "unipc": UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
}


@pytest.mark.parametrize("name", NOISE_SCHEDULERS)
def test_a_noise_scheduler_without_memory_halfway_steps_again_from_where_it_was(make_pipe, monkeypatch, name):
    pipe = make_pipe()
    pipe.scheduler = NOISE_SCHEDULERS[name]
    step, calls = type(pipe.scheduler).step, []

    def full_now_and_then(self, *args, **kwargs):
        result = step(self, *args, **kwargs)  # it has moved and has drawn its noise
        calls.append(1)
        if len(calls) in (3, 5):
            raise torch.OutOfMemoryError("no room")
        return result

    call = {**SMALL, "num_inference_steps": 5, "seed": 3}
    inputs = [
        {"prompt": "a ring", **call},
        {"prompt": "a star", "num_images_per_prompt": 2, "callback_on_step_end": lambda *_: {}, **call},
    ]
    for arguments in inputs:
        expected = pipe(**arguments).images
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(type(pipe.scheduler), "step", full_now_and_then)
            again = pipe(**arguments).images
        assert torch.equal(again, expected)
        assert len(calls) == 7
    assert pipe._engine.stats().num_batch_retries == 4


def test_a_noise_scheduler_that_never_has_memory_fails_its_request_alone(pipe, stock, monkeypatch):
    engine = pipe.init_continuous_batching()
    model = engine.runner._model
    step_scheduler, num_tries = model.step_scheduler, []

    def full(rows, noise_pred):
        is_last = rows[0].request.request_id == "bad" and rows[0].step >= 2
        if not is_last or num_tries:
            step_scheduler(rows, noise_pred)
        if is_last:
            num_tries.append(1)
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(model, "step_scheduler", full)
    bad = engine.add_request(prompt="a ring", request_id="bad", **SMALL)
    good = engine.add_request(prompt="a star", seed=4, **SMALL)
    engine.start()
    error = engine.get_result(bad, timeout=60).error
    assert "step 3 of 3: the noise scheduler failed" in str(error)  # the second time it had moved already
    assert len(num_tries) == 2
    latents = engine.get_result(good, timeout=60).images
    assert_latents_equal(latents, stock("a star", generator=generator(4), **SMALL).images)


def test_a_row_that_turns_non_finite_fails_alone_with_its_step(pipe, stock):
    engine = pipe.init_continuous_batching()
    model = engine.runner._model
    step_scheduler = model.step_scheduler

    def poison(rows, noise_pred):
        step_scheduler(rows, noise_pred)
        for row in rows:
            if row.request.request_id == "bad" and row.step == 2:
                row.latents = row.latents * float("nan")

    model.step_scheduler = poison
    bad = engine.add_request(prompt="a ring", request_id="bad", **SMALL)
    good = engine.add_request(prompt="a star", seed=4, **SMALL)
    engine.start()
    output = engine.get_result(bad, timeout=60)
    assert output.status is RequestStatus.FAILED
    assert "step 3 of 3" in str(output.error)
    expected = stock("a star", generator=generator(4), **SMALL).images
    assert_latents_equal(engine.get_result(good, timeout=60).images, expected)


# ---------------------------------------------------------------------- memory and exit


def test_dropping_the_pipeline_frees_the_weights_and_ends_the_thread(make_pipe):
    from diffusers_continuous import ContinuousBatchingPipeline

    pipe = ContinuousBatchingPipeline.from_pretrained(embedded.embedded_model_path())
    pipe.set_progress_bar_config(disable=True)
    pipe("a ring", **SMALL)
    thread = pipe._engine._thread
    weights = weakref.ref(pipe.transformer.proj_out.weight)
    del pipe
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    assert weights() is None


def test_the_interpreter_exits_cleanly_with_requests_in_flight():
    code = f"""
from diffusers_continuous import ContinuousBatchingPipeline
pipe = ContinuousBatchingPipeline.from_pretrained({embedded.embedded_model_path()!r})
engine = pipe.init_continuous_batching()
engine.start()
for _ in range(3):
    engine.add_request(prompt="a ring", height=64, width=64, num_inference_steps=500)
print("end of script")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "end of script" in done.stdout
    assert "Traceback" not in done.stderr


def test_the_books_are_balanced_after_mixed_endings(pipe):
    engine = pipe.init_continuous_batching(max_requests_per_batch=2)
    engine.start()
    ids = [engine.add_request(prompt="a ring", **SMALL) for _ in range(6)]
    engine.cancel_request(ids[3])
    for request_id in ids:
        engine.get_result(request_id, timeout=60)
    stats = engine.stats()
    assert sum(stats.num_by_status.values()) == 6
    assert stats.num_by_status["cancelled"] == 1
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert len(stats.latency_s) == len(stats.queue_wait_s) == 5
    assert all(
        wait <= first <= total
        for wait, first, total in zip(stats.queue_wait_s, stats.first_step_latency_s, stats.latency_s, strict=True)
    )
    assert_is_empty(engine)
    assert not engine._unfetched
