"""Moments at which requests get lost or callers hang elsewhere: reused ids, full batches, pauses, garbage, forks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
import weakref
from collections import OrderedDict

import numpy as np
import pytest
import torch

from conftest import assert_latents_equal, generator, load_stock
from diffusers_continuous import (
    ContinuousBatchingPipeline,
    EngineStoppedError,
    RequestCancelledError,
    RequestError,
    RequestStatus,
    StepFailedError,
    UnsupportedModelError,
    embedded,
)
from diffusers_continuous import (
    engine as engine_module,
)
from diffusers_continuous.models.qwen_image import QwenImageStepModel
from diffusers_continuous.scheduler import StepScheduler
from test_engine import SMALL, Gate, assert_is_empty

WAIT_S = 60  # far above what anything here takes; only a hang reaches it


def in_thread(function, *args, **kwargs):
    """Run in a thread; `join()` fails the test instead of hanging it, and hands back the result or the error."""
    outcome = []

    def run():
        try:
            outcome.append(function(*args, **kwargs))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join():
        thread.join(WAIT_S)
        assert not thread.is_alive(), "it hangs"
        return outcome[0]

    thread.outcome = join
    return thread


# ---------------------------------------------------------------------- ids


def test_a_reused_id_belongs_to_the_newer_request_only(pipe):
    engine = pipe.init_continuous_batching()
    in_callback, go_on = threading.Event(), threading.Event()

    def callback(*_):
        in_callback.set()
        assert go_on.wait(WAIT_S)
        return {}

    first = in_thread(pipe, "a ring", request_id="x", callback_on_step_end=callback, **SMALL)
    assert in_callback.wait(WAIT_S)
    assert engine.cancel_request("x")
    gate = Gate(engine)
    second = in_thread(pipe, "a star", request_id="x", **SMALL)
    assert gate.reached.wait(WAIT_S)
    go_on.set()  # the first callback's answer must not end the second request
    assert isinstance(first.outcome(), RequestCancelledError)
    gate.opened.set()
    assert second.outcome().images.shape == (1, 16, 64)
    assert engine.stats().num_by_status == {"cancelled": 1, "finished": 1}


def test_dropping_a_finished_stream_does_not_cancel_who_uses_its_id_now(pipe):
    engine = pipe.init_continuous_batching()
    stream = pipe.stream("a ring", request_id="x", **SMALL)
    assert stream._state.future.result(WAIT_S) is not None  # it has finished; nobody has read it
    gate = Gate(engine)
    other = in_thread(pipe, "a star", request_id="x", **SMALL)
    assert gate.reached.wait(WAIT_S)
    stream.close()
    gate.opened.set()
    assert other.outcome().images.shape == (1, 16, 64)


def test_generate_batch_refuses_twins_and_non_dicts_before_anything_runs(pipe):
    with pytest.raises(RequestError, match="request_id='a' names two inputs"):
        pipe.generate_batch([{"prompt": "x", "request_id": "a"}, {"prompt": "y", "request_id": "a"}], **SMALL)
    with pytest.raises(RequestError, match="each input is a dict"):
        pipe.generate_batch(["a ring"], **SMALL)


# ---------------------------------------------------------------------- memory


def test_an_idle_engine_keeps_nothing_of_the_last_request(make_pipe):
    pipe = ContinuousBatchingPipeline.from_pretrained(embedded.embedded_model_path())
    pipe.set_progress_bar_config(disable=True)
    pipe("a ring", callback_on_step_end=lambda *_: {}, **SMALL)
    weights, thread = weakref.ref(pipe.transformer.proj_out.weight), pipe._engine._thread
    del pipe
    gc.collect()
    thread.join(WAIT_S)
    gc.collect()
    assert not thread.is_alive()
    assert weights() is None


def test_a_stream_that_was_dropped_at_its_end_is_not_kept(pipe):
    engine = pipe.init_continuous_batching()
    engine.start()
    stream = pipe.stream("a ring", **SMALL)
    assert stream._state.future.result(WAIT_S) is not None
    row = weakref.ref(stream._state.rows[0])
    del stream
    with engine.pause():
        gc.collect()
    assert row() is None


def test_stopped_engines_are_not_kept(pipe):
    engines = []
    for _ in range(3):
        with pipe.continuous_batching_context_manager() as engine:
            engine.get_result(engine.add_request(prompt="a ring", **SMALL), timeout=WAIT_S)
        engines.append(weakref.ref(engine))
    pipe.init_continuous_batching()
    del engine
    gc.collect()
    assert [reference() for reference in engines] == [None] * 3


def test_pending_requests_are_never_dropped_for_being_many(pipe, monkeypatch):
    monkeypatch.setattr(engine_module, "MAX_UNFETCHED_RESULTS", 3)
    engine = pipe.init_continuous_batching()
    ids = [engine.add_request(prompt="a ring", **SMALL) for _ in range(6)]
    engine.start()
    assert engine.get_result(ids[0], timeout=WAIT_S).status is RequestStatus.FINISHED


def test_a_result_is_fetched_while_old_ones_are_looked_for(pipe, monkeypatch):
    monkeypatch.setattr(engine_module, "MAX_UNFETCHED_RESULTS", 1)
    engine = pipe.init_continuous_batching()
    engine.start()
    ids = [engine.add_request(prompt="a ring", **SMALL) for _ in range(2)]
    for request_id in ids:
        engine._unfetched[request_id].result(WAIT_S)
    future, fetching = engine._unfetched[ids[0]], []

    class Watched(OrderedDict):
        def items(self):
            for item in super().items():
                fetching.append(in_thread(engine.get_result, ids[1]))
                fetching[-1].join(0.1)  # it has to wait
                yield item

    engine._unfetched = Watched(engine._unfetched)
    engine.get_result(engine.add_request(prompt="a ring", **SMALL))
    assert fetching[0].outcome().status is RequestStatus.FINISHED
    assert ids[0] not in engine._unfetched
    assert future.final is not None


def test_a_failure_while_making_the_pictures_ends_that_request(pipe, monkeypatch):
    engine = pipe.init_continuous_batching()
    monkeypatch.setattr(engine.runner, "latents_of", lambda state: 1 / 0)
    with pytest.raises(StepFailedError, match="after its decode stage") as failure:
        pipe("a ring", **SMALL)
    assert isinstance(failure.value.__cause__, ZeroDivisionError)
    monkeypatch.undo()
    assert pipe("a ring", **SMALL).images.shape == (1, 16, 64)
    assert_is_empty(engine)


def test_a_stream_collected_under_any_lock_only_leaves_word(pipe):
    engine = pipe.init_continuous_batching()
    gate = Gate(engine, at_step=2)
    stream = pipe.stream("a ring", **SMALL)
    assert gate.reached.wait(WAIT_S)
    dropped = in_thread(stream.__del__)  # from another thread, while this one holds the engine's locks
    with engine._condition, engine._stats._lock:
        dropped.outcome()
    gate.opened.set()
    stream._is_over = True
    with engine.exclusive():
        pass
    assert engine.stats().num_by_status == {"cancelled": 1}


# ---------------------------------------------------------------------- callbacks


def test_a_callback_gives_its_place_in_a_full_batch_away(make_pipe):
    pipe = make_pipe(max_requests_per_batch=1)
    others_done = threading.Event()

    def slow(*_):
        assert others_done.wait(WAIT_S)
        return {}

    slow_call = in_thread(pipe, "a ring", callback_on_step_end=slow, **SMALL)
    assert pipe("a star", **SMALL).images.shape == (1, 16, 64)
    others_done.set()
    assert slow_call.outcome().images.shape == (1, 16, 64)


def test_a_call_inside_a_callback_runs_even_in_a_full_or_held_batch(make_pipe, stock):
    pipe = make_pipe(max_requests_per_batch=1)
    inner, in_callback, go_on = [], threading.Event(), threading.Event()

    def callback(view, step, timestep, kwargs):
        in_callback.set()
        assert go_on.wait(WAIT_S)
        inner.append(pipe("a star", generator=generator(1), **SMALL).images)
        return {}

    outer = in_thread(pipe, "a ring", generator=generator(0), callback_on_step_end=callback, **SMALL)
    assert in_callback.wait(WAIT_S)
    moving = in_thread(pipe.to, "cpu")  # waits for the outer call, and holds newcomers meanwhile
    while not pipe._engine.scheduler.is_holding:
        go_on.wait(0.001)
    go_on.set()
    assert_latents_equal(outer.outcome().images, stock("a ring", generator=generator(0), **SMALL).images)
    assert moving.outcome() is pipe
    for latents in inner:
        assert_latents_equal(latents, stock("a star", generator=generator(1), **SMALL).images)


def test_a_request_is_cancelled_while_its_callback_becomes_due(pipe, monkeypatch):
    engine = pipe.init_continuous_batching()
    callback_call = engine._callback_call

    def cancelled_meanwhile(state):
        in_thread(engine.cancel_request, state.request_id).join(0.1)  # it has to wait for this one
        return callback_call(state)

    monkeypatch.setattr(engine, "_callback_call", cancelled_meanwhile)
    with pytest.raises(RequestCancelledError):
        pipe("a ring", callback_on_step_end=lambda *_: {}, **SMALL)
    assert engine.fatal_error is None


def test_who_was_cancelled_is_told_of_no_further_steps(pipe, monkeypatch):
    engine = pipe.init_continuous_batching()
    make_output = engine._output

    def cancelled_meanwhile(state, **result):
        output = make_output(state, **result)
        if not output.finished:
            engine.cancel(state)
        return output

    monkeypatch.setattr(engine, "_output", cancelled_meanwhile)
    assert [output.status for output in pipe.stream("a ring", **SMALL)] == [RequestStatus.CANCELLED]


def test_progress_is_shown_beside_a_callback(pipe):
    steps = [out.step for out in pipe.stream("a ring", callback_on_step_end=lambda *_: {}, **SMALL)]
    assert (steps[:2], steps[-1]) == ([1, 2], 3)


def test_edits_in_place_count_as_in_stock(pipe, stock):
    def callback(view, step, timestep, kwargs):
        kwargs["latents"].mul_(0.9)
        return {}

    call = {**SMALL, "callback_on_step_end": callback}
    expected = stock("a ring", generator=generator(0), **call).images
    assert_latents_equal(pipe("a ring", generator=generator(0), **call).images, expected)


@pytest.mark.parametrize("how", ["stream", "generate_batch"])
def test_ctrl_c_in_a_callback_reaches_the_caller_however_it_waits(pipe, how):
    def interrupted(*_):
        raise KeyboardInterrupt

    call = {"prompt": "a ring", "callback_on_step_end": interrupted, **SMALL}
    with pytest.raises(KeyboardInterrupt):
        list(pipe.stream(**call)) if how == "stream" else pipe.generate_batch([call])


def test_stopping_inside_a_callback_does_not_wait_for_itself(pipe):
    call = in_thread(pipe, "a ring", callback_on_step_end=lambda *_: pipe._engine.stop() or {}, **SMALL)
    assert call.outcome().images.shape == (1, 16, 64)


def test_nested_callbacks_do_not_lift_the_outer_ones_guard(pipe):
    seen = []

    def outer(*_):
        pipe("a star", callback_on_step_end=lambda *_: {}, **SMALL)
        with pytest.raises(RuntimeError, match="inside callback_on_step_end"):
            pipe.to("cpu")
        seen.append(True)
        return {}

    assert in_thread(pipe, "a ring", callback_on_step_end=outer, **SMALL).outcome().images.shape == (1, 16, 64)
    assert seen


def test_an_unread_stream_with_a_callback_blocks_nothing_for_ever(pipe):
    def unread_then(act):
        stream = pipe.stream("a ring", callback_on_step_end=lambda *_: {}, **SMALL)
        while not stream._state.is_in_callback:
            threading.Event().wait(0.001)
        return act(stream)

    moved = in_thread(unread_then, lambda stream: pipe.to("cpu")).outcome()
    assert isinstance(moved, RuntimeError)
    assert "finish or close it first" in str(moved)
    engine = pipe._engine
    stopped = in_thread(unread_then, lambda stream: engine.stop() or list(stream)).outcome()
    assert stopped[-1].status is RequestStatus.FAILED
    assert isinstance(stopped[-1].error, EngineStoppedError)


def test_stop_ends_a_callback_that_becomes_due_in_its_own_thread_later(pipe, monkeypatch):
    monkeypatch.setattr(engine_module, "REAP_EVERY_S", 0.01)
    engine = pipe.init_continuous_batching()
    gate = Gate(engine)

    def stop():
        stream = pipe.stream("a ring", callback_on_step_end=lambda *_: {}, **SMALL)
        assert gate.reached.wait(WAIT_S)
        threading.Timer(0.05, gate.opened.set).start()
        engine.stop()
        return list(stream)

    assert isinstance(in_thread(stop).outcome()[-1].error, EngineStoppedError)


def test_stop_ends_a_callback_whose_event_loop_waits_for_it(pipe, monkeypatch):
    monkeypatch.setattr(engine_module, "REAP_EVERY_S", 0.01)
    engine = pipe.init_continuous_batching()

    async def stop():
        ran, outputs = [], []
        call = {**SMALL, "num_inference_steps": 9, "callback_on_step_end": lambda *_: ran.append(True) or {}}
        async for output in pipe.astream("a ring", **call):
            outputs.append(output)
            if ran:
                engine.stop()
        return outputs

    assert isinstance(in_thread(asyncio.run, stop()).outcome()[-1].error, EngineStoppedError)


def test_a_batch_of_calls_with_callbacks_lets_a_change_happen(make_pipe):
    pipe = make_pipe(max_requests_per_batch=1)
    engine = pipe._engine
    gate = Gate(engine)
    calls = [
        {"prompt": "a ring", "priority": priority, "callback_on_step_end": lambda *_: {}, **SMALL}
        for priority in (1, 0)  # the one that is waited for first starts last
    ]
    engine.start()
    with engine.pause():
        batch = in_thread(pipe.generate_batch, calls)
        while len(engine._active) < len(calls):
            threading.Event().wait(0.001)
    assert gate.reached.wait(WAIT_S)
    moving = in_thread(pipe.to, "cpu")
    while not engine.scheduler.is_holding:
        threading.Event().wait(0.001)
    gate.opened.set()
    assert [output.error for output in batch.outcome().values()] == [None, None]
    assert moving.outcome() is pipe


def test_who_holds_an_unread_stream_is_served_while_a_change_waits_for_that(pipe, monkeypatch):
    monkeypatch.setattr(engine_module, "REAP_EVERY_S", 0.01)
    engine = pipe.init_continuous_batching()
    is_due, is_held = threading.Event(), threading.Event()

    def call():
        stream = pipe.stream("a ring", callback_on_step_end=lambda *_: {}, **SMALL)
        while not stream._state.is_in_callback:
            threading.Event().wait(0.001)
        is_due.set()
        assert is_held.wait(WAIT_S)
        images = pipe("a star", **SMALL).images
        return images, list(stream)

    calling = in_thread(call)
    assert is_due.wait(WAIT_S)
    moving = in_thread(pipe.to, "cpu")
    while not engine.scheduler.is_holding:
        threading.Event().wait(0.001)
    is_held.set()
    images, outputs = calling.outcome()
    assert images.shape == (1, 16, 64)
    assert outputs[-1].status is RequestStatus.FINISHED
    assert moving.outcome() is pipe


def test_a_callback_that_takes_its_time_takes_nobody_out_of_the_pool(pipe, monkeypatch):
    monkeypatch.setattr(engine_module, "REAP_EVERY_S", 0.01)
    call = {"prompt": "a ring", **SMALL}
    (row,) = pipe._make_request(**call).rows
    num_blocks = pipe.init_continuous_batching().runner.num_blocks_of(row)
    pipe.engine.stop()
    engine = pipe.init_continuous_batching(num_blocks=num_blocks, cpu_offload_space=0.0)
    release, num_looks, looked = engine._release_the_stuck, [], threading.Event()

    def look():
        release()
        num_looks.append(1)
        if len(num_looks) == 3:
            looked.set()

    engine._release_the_stuck = look
    passed = []
    monkeypatch.setattr(StepScheduler, "let_pass", lambda _, state: passed.append(state))
    slow = {**call, "callback_on_step_end": lambda *_: looked.wait(WAIT_S) and {}}
    outputs = pipe.generate_batch([slow, call]).values()
    assert [output.error for output in outputs] == [None, None]
    assert looked.is_set()
    assert passed == []


@pytest.fixture
def left_stream(pipe):
    """A stream whose callback is due in a thread that has ended."""
    streams = []

    def leave():
        streams.append(pipe.stream("a ring", callback_on_step_end=lambda *_: {}, **SMALL))
        while not streams[0]._state.is_in_callback:
            threading.Event().wait(0.001)

    in_thread(leave).outcome()
    return streams[0]


def test_stop_does_not_wait_for_a_callback_whose_thread_has_ended(pipe, left_stream):
    stopping = in_thread(pipe._engine.stop)  # in another thread, so it has another identity
    stopping.outcome()
    assert isinstance(list(left_stream)[-1].error, EngineStoppedError)


def test_a_change_does_not_wait_for_a_callback_whose_thread_has_ended(pipe, left_stream, monkeypatch):
    monkeypatch.setattr(engine_module, "REAP_EVERY_S", 0.01)
    refused = in_thread(pipe.to, "cpu").outcome()
    assert isinstance(refused, RuntimeError)
    assert "read or close it first" in str(refused)
    assert list(left_stream)[-1].status is RequestStatus.FINISHED
    assert in_thread(pipe.to, "cpu").outcome() is pipe


# ---------------------------------------------------------------------- pausing and stopping


def test_a_change_under_ones_own_pause_is_refused_while_requests_are_under_way(pipe):
    engine = pipe.init_continuous_batching()
    gate = Gate(engine, at_step=2)
    request_id = engine.add_request(prompt="a ring", **SMALL)
    engine.start()
    assert gate.reached.wait(WAIT_S)

    def change():
        threading.Timer(0.05, gate.opened.set).start()
        with engine.pause(), pytest.raises(RuntimeError, match="this thread holds pause"):
            pipe.to("cpu")

    assert in_thread(change).outcome() is None
    assert engine.get_result(request_id, timeout=WAIT_S).status is RequestStatus.FINISHED
    with engine.pause():
        pipe.to("cpu")  # nothing is under way


def test_stop_drains_under_a_pause(pipe):
    engine = pipe.init_continuous_batching()
    engine.start()

    def stop():
        with engine.pause():
            request_id = engine.add_request(prompt="a ring", **SMALL)
            engine.stop()
        return engine.get_result(request_id, timeout=1)

    assert in_thread(stop).outcome().status is RequestStatus.FINISHED


def test_a_draining_engine_is_waited_for_before_a_change(pipe, stock):
    engine = pipe.init_continuous_batching()
    gate = Gate(engine, at_step=2)
    request_id = engine.add_request(prompt="a ring", seed=1, **SMALL)
    engine.start()
    assert gate.reached.wait(WAIT_S)
    engine.stop(block=False)
    moving = in_thread(pipe.to, "cpu")
    gate.opened.set()
    assert moving.outcome() is pipe
    assert_latents_equal(
        engine.get_result(request_id, timeout=WAIT_S).images, stock("a ring", generator=generator(1), **SMALL).images
    )


def test_a_change_waits_for_a_draining_engine_behind_the_present_one(pipe):
    engine = pipe.init_continuous_batching()
    gate = Gate(engine, at_step=2)
    request_id = engine.add_request(prompt="a ring", **SMALL)
    engine.start()
    assert gate.reached.wait(WAIT_S)
    engine.stop(block=False)
    assert pipe("a star", **SMALL).images.shape == (1, 16, 64)
    assert pipe.engine is not engine
    moving = in_thread(pipe.to, "cpu")
    moving.join(0.1)
    assert moving.is_alive()
    gate.opened.set()
    assert moving.outcome() is pipe
    assert engine.get_result(request_id, timeout=WAIT_S).status is RequestStatus.FINISHED


def test_what_a_draining_engine_has_yet_to_begin_sees_a_change(make_pipe, stock):
    pipe = make_pipe(max_requests_per_batch=1)
    engine = pipe._engine
    gate = Gate(engine, at_step=2)
    ids = [engine.add_request(prompt="a ring", seed=seed, **SMALL) for seed in (1, 2)]
    engine.start()
    assert gate.reached.wait(WAIT_S)
    engine.stop(block=False)
    changing = in_thread(setattr, pipe, "transformer", load_stock().transformer)
    while not engine.scheduler.is_holding:
        threading.Event().wait(0.001)
    gate.opened.set()
    assert changing.outcome() is None
    for seed, request_id in zip((1, 2), ids, strict=True):
        latents = engine.get_result(request_id, timeout=WAIT_S).images
        assert_latents_equal(latents, stock("a ring", generator=generator(seed), **SMALL).images)
    engine.stop()
    assert "forward" not in vars(pipe.transformer)


def test_engines_that_share_components_take_turns(make_pipe, monkeypatch):
    denoise_step, inside, are_two = QwenImageStepModel.denoise_step, [], threading.Event()

    def watched(self, batch):
        inside.append(self)
        if len(inside) > 1:
            are_two.set()
        are_two.wait(0.05)  # for the other one, if it may come
        try:
            return denoise_step(self, batch)
        finally:
            inside.remove(self)

    monkeypatch.setattr(QwenImageStepModel, "denoise_step", watched)
    first, second = make_pipe(), make_pipe()
    calls = [in_thread(pipe, "a ring", **SMALL) for pipe in (first, second)]
    while len(first._engine._active if first._engine else ()) < 1:
        threading.Event().wait(0.001)
    first._engine.stop(block=False)
    calls.append(in_thread(first, "a ring", **SMALL))  # another engine, while the last one drains
    assert [call.outcome().images.shape for call in calls] == [(1, 16, 64)] * 3
    assert not are_two.is_set()


def test_stop_with_a_timeout_fails_what_is_left_without_waiting_for_the_step(pipe):
    engine = pipe.init_continuous_batching()
    gate = Gate(engine)
    request_id = engine.add_request(prompt="a ring", **SMALL)
    engine.start()
    assert gate.reached.wait(WAIT_S)
    engine.stop(timeout=0.05)  # the step is stuck behind the gate
    assert engine.get_result(request_id, timeout=1).status is RequestStatus.FAILED
    gate.opened.set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_instead_of_hanging(pipe):
    pipe("a ring", **SMALL)
    with held_by_another_thread(pipe._engine._condition):  # as the loop does, now and then
        child = os.fork()
        if child == 0:
            signal.alarm(WAIT_S)  # ends the child, should it hang
            try:
                pipe._engine.add_request(prompt="a ring", **SMALL)
            except EngineStoppedError:
                pipe._engine.stop()
                os._exit(7)
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@contextlib.contextmanager
def held_by_another_thread(lock):
    """The lock is taken for the body, and not by the calling thread."""
    is_held, is_over = threading.Event(), threading.Event()

    def hold():
        with lock:
            is_held.set()
            is_over.wait(WAIT_S)

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(WAIT_S)
    try:
        yield
    finally:
        is_over.set()
        holder.join()


# ---------------------------------------------------------------------- values


def test_numpy_numbers_are_numbers(pipe, stock):
    plain = {"height": 64, "width": 64, "num_inference_steps": 3, "true_cfg_scale": 2.0, "num_images_per_prompt": 1}
    numpy = {name: np.float32(v) if isinstance(v, float) else np.int64(v) for name, v in plain.items()}
    more = {"negative_prompt": " ", "output_type": "latent"}
    ours = pipe("a ring", seed=np.int64(5), **numpy, **more).images
    assert_latents_equal(ours, stock("a ring", generator=generator(5), **plain, **more).images)
    with pytest.raises(RequestError, match="num_inference_steps=True"):
        pipe("a ring", num_inference_steps=True)


def test_what_the_caller_edits_after_submitting_changes_nothing(pipe, stock):
    latents = torch.randn(1, 16, 64, generator=generator(0))
    embeds, _ = stock.encode_prompt("a ring")
    embeds = embeds.detach().clone()
    call = {**SMALL, "latents": latents.clone(), "prompt_embeds": embeds.clone()}
    engine = pipe.init_continuous_batching()
    request_id = engine.add_request(**{**SMALL, "latents": latents, "prompt_embeds": embeds})
    latents.zero_()
    embeds.zero_()
    engine.start()
    assert_latents_equal(engine.get_result(request_id, timeout=WAIT_S).images, stock(**call).images)


def test_non_finite_latents_of_the_last_step_are_an_error(pipe):
    engine = pipe.init_continuous_batching()
    model = engine.runner._model
    step_scheduler = model.step_scheduler

    def poison(rows, noise_pred):
        step_scheduler(rows, noise_pred)
        for row in rows:
            row.latents = row.latents * float("nan") if row.remaining_steps == 0 else row.latents

    model.step_scheduler = poison
    with pytest.raises(StepFailedError, match="step 3 of 3: the latents are not finite"):
        pipe("a ring", **SMALL)


def test_a_refused_component_is_not_kept(make_pipe):
    pipe = make_pipe(fresh=True)
    before = pipe.transformer
    with pytest.raises(UnsupportedModelError):
        pipe.transformer = torch.nn.Linear(2, 2)
    assert pipe.transformer is before


def test_float16_is_refused_even_after_submission(make_pipe):
    pipe = make_pipe(fresh=True)
    engine = pipe.init_continuous_batching()
    request_id = engine.add_request(prompt="a ring", **SMALL)
    pipe.transformer.to(torch.float16)
    with pytest.raises(UnsupportedModelError, match="bfloat16"):
        pipe("a ring", **SMALL)
    engine.start()
    output = engine.get_result(request_id, timeout=WAIT_S)
    assert output.status is RequestStatus.FAILED
    assert "bfloat16" in str(output.error)


def test_a_chosen_attention_backend_is_not_passed_over_in_silence(make_pipe):
    pipe = make_pipe(fresh=True)
    pipe.transformer.set_attention_backend("native")
    with pytest.raises(UnsupportedModelError, match="attention_backend"):
        pipe("a ring", **SMALL)
    pipe.transformer.reset_attention_backend()
    assert pipe("a ring", **SMALL).images.shape == (1, 16, 64)
