"""`DiffusionEngine`: one background thread that steps everybody's requests together.

Callers only insert requests and wait on futures. Knows no tensors and no arguments of a pipeline: requests come ready
made, the scheduler decides, the runner runs.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from .errors import (
    EngineStoppedError,
    RequestCancelledError,
    RequestError,
)
from .futures import RequestFuture
from .metrics import EngineStats, StatsRecorder
from .request import CallbackCall, RequestOutput, RequestState, RequestStatus, SchedulerOutput
from .runner import DiffusionModelRunner
from .scheduler import StepScheduler

logger = logging.getLogger(__name__)

# Results of `add_request` that nobody has fetched are kept, oldest dropped first.
MAX_UNFETCHED_RESULTS = 1024


class DiffusionEngine:
    """Owns the busy loop: schedule, execute, update, until stopped. Every method may be called from any thread.

    Args:
        scheduler: Decides what runs next.
        runner: Runs it.
        make_request: Turns the keyword arguments of `add_request` into a `RequestState`.
        stats: Shared with the runner.
        clock: Seconds; every time that the engine reports is on it.
    """

    def __init__(
        self,
        scheduler: StepScheduler,
        runner: DiffusionModelRunner,
        make_request: Callable[..., RequestState],
        stats: StatsRecorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.fatal_error: BaseException | None = None
        self._make_request = make_request
        self._stats = stats or StatsRecorder()
        self._condition = threading.Condition(threading.RLock())
        self._exclusive_lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._active: dict[str, RequestState] = {}
        self._unfetched: OrderedDict[str, RequestFuture] = OrderedDict()
        self._is_stopping = False
        self._is_hard_stop = False
        self._is_in_step = False
        self._num_pauses = 0
        self._callback_threads: set[int] = set()
        scheduler.is_phased = runner.is_phased

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Start the loop; no effect when it runs.

        Raises:
            EngineStoppedError: after `stop` or a fatal error.
        """
        with self._condition:
            self._check_open()
            if self._thread is None:
                self._thread = threading.Thread(target=self._busy_loop, name="diffusion-engine", daemon=True)
                self._thread.start()

    def stop(self, block: bool = True, timeout: float | None = None, hard_stop: bool = False) -> None:
        """Take no more requests; finish the accepted ones, or fail them at once with `hard_stop`.

        Args:
            block: Wait until the loop has ended.
            timeout: Seconds to wait at most; what is unfinished then is failed.
        """
        with self._condition:
            self._is_stopping = True
            self._is_hard_stop |= hard_stop or self._thread is None
            if self._thread is None:
                self._close()
            self._condition.notify_all()
        if block and self._thread not in (None, threading.current_thread()):
            assert self._thread is not None
            self._thread.join(timeout)
            if self._thread.is_alive() and not self._is_hard_stop:
                self.stop(hard_stop=True)

    def is_running(self) -> bool:
        """True while the loop takes requests."""
        return self._thread is not None and self._thread.is_alive() and not self._is_stopping

    @property
    def is_stopped(self) -> bool:
        """True once the engine was told to stop, or died: it takes no more requests."""
        return self._is_stopping or self.fatal_error is not None

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Halt the loop between two steps for the body; running requests go on afterwards as if nothing happened."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("the engine's own thread cannot pause it")
        with self._condition:
            self._num_pauses += 1
            self._condition.wait_for(lambda: not self._is_in_step)
        try:
            yield
        finally:
            with self._condition:
                self._num_pauses -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Finish what runs, hold what waits, halt the loop for the body; waiting requests see what it changed.

        Raises:
            RuntimeError: inside a callback, whose own request would have to finish first.
        """
        if threading.get_ident() in self._callback_threads or threading.current_thread() is self._thread:
            raise RuntimeError("shared components cannot be changed inside callback_on_step_end: its request uses them")
        with self._exclusive_lock:
            was_holding = self.scheduler.is_holding
            try:
                with self._condition:
                    self.scheduler.is_holding = True
                    self._condition.wait_for(self._has_nothing_running)
                with self.pause():
                    try:
                        yield
                    finally:
                        if not self.is_stopped:
                            self.runner.reset()
                            self.scheduler.is_phased = self.runner.is_phased
            finally:
                with self._condition:
                    self.scheduler.is_holding = was_holding
                    self._condition.notify_all()

    def _has_nothing_running(self) -> bool:
        is_idle = self._thread is None or not self._thread.is_alive()
        return is_idle or not (self._is_in_step or self.scheduler.running or self.scheduler.decoding)

    # ------------------------------------------------------------------ requests

    def add_request(self, streaming: bool = False, **arguments: Any) -> str:
        """Queue one generation, given by the pipeline's call arguments, and return its id at once.

        Raises:
            RequestError: for a bad argument.
            QueueFullError: when the queue has no room.
            EngineStoppedError: when the engine takes no more requests.
        """
        if arguments.get("callback_on_step_end") is not None:
            raise RequestError(
                "callback_on_step_end runs in a waiting caller's thread: use pipe(...) or pipe.stream(...)"
            )
        with self._condition:
            self._check_open()
        state = self._make_request(**arguments)
        state.streaming = streaming
        with self._condition:
            self.submit(state)
            self._unfetched[state.request_id] = state.future
            while len(self._unfetched) > MAX_UNFETCHED_RESULTS:
                dropped, _ = self._unfetched.popitem(last=False)
                logger.warning("the result of request %r was dropped: nobody fetched it", dropped)
        return state.request_id

    def submit(self, state: RequestState) -> None:
        """Queue a ready-made request; its future is attached already, so nothing about it can be missed."""
        with self._condition:
            self._check_open()
            if state.request_id in self._active or state.request_id in self._unfetched:
                raise RequestError(f"request_id={state.request_id!r} is in use by another request")
            state.metrics.arrival_s = self.clock()
            self.scheduler.add_request(state)
            self._active[state.request_id] = state
            self._condition.notify_all()

    def cancel_request(self, request_id: str) -> bool:
        """Cancel before its next step. False, and no effect, for a request that has ended or is not known."""
        with self._condition:
            state = self._active.get(request_id)
            if state is None:
                return False
            self._end(state, RequestStatus.CANCELLED, RequestCancelledError(f"request {request_id!r} was cancelled"))
            return True

    def get_result(self, request_id: str, timeout: float | None = None) -> RequestOutput | None:
        """Wait for a request of `add_request` and take its final output; None when `timeout` seconds passed.

        Raises:
            RequestError: for an id that is not known or whose result was taken already.
        """
        output = self._future_of(request_id).result(timeout)
        if output is not None:
            self._unfetched.pop(request_id, None)
        return output

    def request_id_iter(self, request_id: str) -> Iterator[RequestOutput]:
        """Iterate over a request's outputs, newest intermediate ones (if streaming) and then the final one."""
        return self._iterate(request_id, self._future_of(request_id))

    def _iterate(self, request_id: str, future: RequestFuture) -> Iterator[RequestOutput]:
        while True:
            output = future.take()
            assert isinstance(output, RequestOutput)
            if output.finished:
                self._unfetched.pop(request_id, None)
            yield output
            if output.finished:
                return

    def _future_of(self, request_id: str) -> RequestFuture:
        future = self._unfetched.get(request_id)
        if future is None:
            raise RequestError(f"request_id={request_id!r} is not known, or its result was taken already")
        return future

    def stats(self) -> EngineStats:
        """A snapshot of what the engine does and did."""
        with self._condition:
            return self._stats.snapshot(len(self.scheduler.running), self.scheduler.num_waiting)

    # ------------------------------------------------------------------ the loop

    def _busy_loop(self) -> None:
        try:
            while (output := self._next_output()) is not None:
                errors = self.runner.execute(output)
                self._update(output, errors)
                if not self.scheduler.has_requests():
                    self.runner.release()
        except BaseException as error:
            logger.exception("the engine's loop died")
            self.fatal_error = error
        finally:
            self._close()

    def _next_output(self) -> SchedulerOutput | None:
        """Wait until there is something to do, and decide what; None when the loop is to end."""
        with self._condition:
            self._is_in_step = False
            self._condition.notify_all()
            while True:
                if self._is_hard_stop or (self._is_stopping and not self.scheduler.has_requests()):
                    return None
                if not self._num_pauses:
                    start = self.clock()
                    output = self.scheduler.schedule(start)
                    if not output.is_empty:
                        self._stats.add("schedule", 1e3 * (self.clock() - start))
                        self._is_in_step = True
                        return output
                self._condition.wait()

    def _update(self, output: SchedulerOutput, errors: dict[Any, BaseException]) -> None:
        """Move the rows on, end what has ended, tell everybody else how far they are."""
        with self._condition:
            stepped = dict.fromkeys(row.request for row in output.denoise)
            live = [state for state in stepped if state.request_id in self._active]
            for state in live:
                state.is_in_callback = state.is_gang and not any(row in errors for row in state.rows)
            ended = self.scheduler.update_from_output(output, errors)
        for state in ended:
            self._finish(state)
        for state in live:
            if state.is_in_callback:
                state.future.put_callback(self._callback_call(state))
            elif state.streaming and not state.status.is_ending:
                state.future.put(self._output(state))

    def _finish(self, state: RequestState) -> None:
        """Make the final output, outside the lock: turning tensors into pictures takes time."""
        images = None
        if state.status is RequestStatus.FINISHED:
            try:
                images = self.runner.make_output(state)
            except Exception as error:
                state.status, state.error = RequestStatus.FAILED, error
        with self._condition:
            self._end(state, state.status, state.error, images)

    def _end(
        self, state: RequestState, status: RequestStatus, error: BaseException | None = None, images: Any = None
    ) -> None:
        """The one place where a request ends."""
        if self._active.pop(state.request_id, None) is None:
            return
        self.scheduler.remove(state)
        state.status, state.error = status, error
        state.metrics.finish_s = self.clock()
        self._stats.add_ending(status, state.metrics)
        state.future.finish(self._output(state, images))
        self._condition.notify_all()

    def _output(self, state: RequestState, images: Any = None) -> RequestOutput:
        return RequestOutput(
            request_id=state.request_id,
            status=state.status,
            step=state.step,
            num_steps=state.num_steps,
            seeds=state.seeds,
            metrics=state.metrics,
            images=images,
            latents=self.runner.latents_of(state) if state.status is RequestStatus.FINISHED else None,
            error=state.error,
            make_preview=None if state.status.is_ending else self.runner.preview_of(state),
        )

    # ------------------------------------------------------------------ callbacks

    def _callback_call(self, state: RequestState) -> CallbackCall:
        callback = state.callback
        assert callback is not None

        def run() -> Any:
            self._callback_threads.add(threading.get_ident())
            try:
                return callback.run(state)
            finally:
                self._callback_threads.discard(threading.get_ident())

        return CallbackCall(run, lambda result, error: self._on_callback_reply(state, result, error))

    def _on_callback_reply(self, state: RequestState, result: Any, error: BaseException | None) -> None:
        """Let the gang go on with what its callback changed; an error ends it, and it alone."""
        with self._condition:
            if state.request_id not in self._active:
                return
            state.is_in_callback = False
            if error is not None:
                self._end(state, RequestStatus.FAILED, error)
                return
            assert state.callback is not None
            try:
                is_interrupted = state.callback.apply(state, result)
            except Exception as problem:
                self._end(state, RequestStatus.FAILED, problem)
                return
            for row in state.rows:
                if is_interrupted or row.remaining_steps == 0:
                    self.scheduler.finish_denoising(row)
            is_over = self.scheduler.settle(state)
            self._condition.notify_all()
        if is_over:
            self._finish(state)

    # ------------------------------------------------------------------ endings

    def _check_open(self) -> None:
        if self.fatal_error is not None:
            raise EngineStoppedError(f"the engine died: {self.fatal_error!r}") from self.fatal_error
        if self._is_stopping:
            raise EngineStoppedError("the engine is stopped")

    def _close(self) -> None:
        """The loop is over: whoever still waits is told why."""
        with self._condition:
            self._is_in_step = False
            if self.fatal_error is not None:
                error = EngineStoppedError(f"the engine died: {self.fatal_error!r}")
                error.__cause__ = self.fatal_error
            else:
                error = EngineStoppedError("the engine was stopped before this request finished")
            self._is_stopping = True
            self._fail_all(error)
            self._condition.notify_all()
        with contextlib.suppress(Exception):
            self.runner.close()

    def _fail_all(self, error: BaseException) -> None:
        for state in list(self._active.values()):
            self._end(state, RequestStatus.FAILED, error)
