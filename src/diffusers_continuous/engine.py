"""`DiffusionEngine`: one background thread that steps everybody's requests together.

Callers only insert requests and wait on futures. Knows no tensors and no arguments of a pipeline: requests come ready
made, the scheduler decides, the runner runs.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import threading
import time
import traceback
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .errors import EngineStoppedError, RequestCancelledError, RequestError, StepFailedError, shorten
from .futures import RequestFuture
from .metrics import EngineStats, StatsObserver, StatsRecorder
from .request import CallbackCall, RequestOutput, RequestState, RequestStatus, SchedulerOutput
from .runner import DiffusionModelRunner
from .scheduler import StepScheduler

logger = logging.getLogger(__name__)

# Results of `add_request` that nobody has fetched are kept, oldest dropped first.
MAX_UNFETCHED_RESULTS = 1024
# How long one forecast serves everybody who asks.
FORECAST_S = 0.25
# How often a loop that only waits for callbacks looks for streams that nobody holds any more.
REAP_EVERY_S = 0.5

_engines: weakref.WeakSet[DiffusionEngine] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """The interpreter ends: end every loop, and wait for the step it is in."""
    for engine in list(_engines):
        engine.stop(hard_stop=True)


def _forget_locks() -> None:
    """In a forked child nobody lets go of what the parent's threads held: whoever asks there must not wait for it."""
    for engine in list(_engines):
        engine._make_locks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


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
        self._thread: threading.Thread | None = None
        self._active: dict[str, RequestState] = {}
        self._unfetched: OrderedDict[str, RequestFuture] = OrderedDict()
        self._ends: dict[str, float] = {}
        self._ends_until_s = -math.inf
        self._is_stopping = False
        self._is_hard_stop = False
        self._abandoned: deque[RequestState] = deque()
        self._ended: list[RequestState] = []
        self._is_stuck = False  # callers have had their time to run the callbacks that are due
        self._calling: set[threading.Thread] = set()  # who runs one now
        self._stopping_threads: list[threading.Thread] = []  # who waits for the loop's end
        self._make_locks()
        scheduler.is_phased = runner.is_phased
        scheduler.memory = runner.make_ledger()
        _engines.add(self)

    def _make_locks(self) -> None:
        self._condition = threading.Condition(threading.RLock())
        self._exclusive_lock = threading.RLock()
        self._mine = threading.local()  # per thread: how many pauses it holds, how many callbacks it is in
        self._num_pauses = 0
        self._is_in_step = False

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
        """Take no more requests; finish the accepted ones (also under `pause`), or fail them at once with `hard_stop`.

        Args:
            block: Wait until the loop has ended. Inside a callback, whose own request must end first, nothing waits.
            timeout: Seconds to wait at most; what is unfinished then is failed.
        """
        with self._condition:
            self._is_stopping = True
            self._is_hard_stop |= hard_stop
            if self._is_hard_stop:
                self._fail_all("the engine was stopped before this request finished")
            elif block and not self._is_mine():
                self._fail_callbacks_of_nobody((threading.current_thread(),))
            self._condition.notify_all()
        if self._thread is None:
            self._close()
        elif block and not self._is_mine():
            self._stopping_threads.append(threading.current_thread())
            self._thread.join(timeout)
            if self._thread.is_alive():
                self.stop(block=False, hard_stop=True)

    def _fail_callbacks_of_nobody(self, stopping: Sequence[threading.Thread]) -> None:
        """Requests whose callback is due in a thread that has ended, or in one of those, which wait for them."""
        for state in list(self._active.values()):
            caller = state.caller_thread
            if state.is_in_callback and caller is not None and (caller in stopping or not caller.is_alive()):
                error = EngineStoppedError("the thread whose turn it was to run the callback stopped the engine")
                self._end(state, RequestStatus.FAILED, error)

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
            self._mine.num_pauses = self._held() + 1
        try:
            with self._condition:
                self._condition.wait_for(lambda: not self._is_in_step)
            yield
        finally:
            with self._condition:
                self._num_pauses -= 1
                self._mine.num_pauses -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Finish what runs, hold what waits, halt the loop for the body; waiting requests see what it changed.

        Raises:
            RuntimeError: where what runs could not finish first: inside a callback, under this thread's own `pause`,
                or while a stream of this thread, or of one that has ended, waits for its callback to be run.
        """
        if self._is_mine():
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
                        self._reset()
            finally:
                with self._condition:
                    self.scheduler.is_holding = was_holding
                    self._condition.notify_all()

    def _reset(self) -> None:
        """Components may have changed or moved: nothing that was worked out from them, or lies there, stays."""
        with self._condition:
            is_draining = bool(self._active) and not self._is_hard_stop and self.fatal_error is None
            if self.is_stopped and not is_draining:
                return
            self.scheduler.memory.release_all()
            self.runner.move(self.scheduler.memory.take_moves())
            self.runner.reset()
            self.scheduler.memory = self.runner.make_ledger()
            self.scheduler.forget_texts()
            self.scheduler.is_phased = self.runner.is_phased
            for state in list(self._active.values()):
                try:
                    self._measure(state)
                except RequestError as error:
                    self._end(state, RequestStatus.FAILED, error)

    def _has_nothing_running(self) -> bool:
        is_idle = self._thread is None or not self._thread.is_alive()
        if is_idle or not (self._is_in_step or self.scheduler.has_started()):
            return True
        if self._held():
            raise RuntimeError(
                "requests are under way and this thread holds pause(): leave it, so that they can finish"
            )
        me = threading.current_thread()
        if any(state.is_in_callback and state.caller_thread is me for state in self._active.values()):
            raise RuntimeError("a stream of this thread waits for its callback to be run: finish or close it first")
        if self._is_stuck and any(thread is not None and not thread.is_alive() for thread in self._callers()):
            raise RuntimeError(
                "a stream whose thread has ended waits for its callback to be run: read or close it first"
            )
        return False

    def _held(self) -> int:
        """Pauses that this thread holds."""
        return getattr(self._mine, "num_pauses", 0)

    def _is_mine(self) -> bool:
        """True in the loop's thread and inside a callback of one of its requests."""
        return threading.current_thread() is self._thread or getattr(self._mine, "num_callbacks", 0) > 0

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
            self._drop_old_results()
        return state.request_id

    def _drop_old_results(self) -> None:
        if len(self._unfetched) <= MAX_UNFETCHED_RESULTS:
            return
        finished = [request_id for request_id, future in self._unfetched.items() if future.final is not None]
        for request_id in finished[: max(0, len(finished) - MAX_UNFETCHED_RESULTS)]:
            del self._unfetched[request_id]
            logger.warning("the result of request %r was dropped: nobody fetched it", request_id)

    def submit(self, state: RequestState) -> None:
        """Queue a ready-made request; its future is attached already, so nothing about it can be missed."""
        with self._condition:
            self._check_open()
            if state.request_id in self._active or state.request_id in self._unfetched:
                raise RequestError(f"request_id={state.request_id!r} is in use by another request")
            state.metrics.arrival_s = self.clock()
            state.caller_thread = threading.current_thread()
            # Its callback's request cannot end before it, so it must not wait for that one to end.
            state.passes_hold = getattr(self._mine, "num_callbacks", 0) > 0
            self._measure(state)
            self.scheduler.add_request(state)
            self._active[state.request_id] = state
            self._condition.notify_all()
        self.runner.leave_cores()

    def _measure(self, state: RequestState) -> None:
        """Set how many pages its rows need; one that cannot wait for others to give some back needs none."""
        for row in state.rows:
            row.num_blocks = 0 if state.passes_hold else self.runner.num_blocks_of(row)
        self.scheduler.check_pages(state)

    def cancel_request(self, request_id: str) -> bool:
        """Cancel before its next step. False, and no effect, for a request that has ended or is not known."""
        with self._condition:
            state = self._active.get(request_id)
            return state is not None and self.cancel(state)

    def cancel(self, state: RequestState) -> bool:
        """Cancel this very request, whatever else has used its id since."""
        error = RequestCancelledError(f"request {state.request_id!r} was cancelled")
        with self._condition:
            return self._end(state, RequestStatus.CANCELLED, error)

    def abandon(self, state: RequestState) -> None:
        """Cancel soon, without waiting for anything: garbage collection may call this wherever the thread stands."""
        if state.future.final is None:  # else there is nothing to cancel, and an idle loop would keep it
            self._abandoned.append(state)

    def get_result(self, request_id: str, timeout: float | None = None) -> RequestOutput | None:
        """Wait for a request of `add_request` and take its final output; None when `timeout` seconds passed.

        Raises:
            RequestError: for an id that is not known or whose result was taken already.
        """
        output = self._future_of(request_id).result(timeout)
        if output is not None:
            self._forget_result(request_id)
        return output

    def request_id_iter(self, request_id: str) -> Iterator[RequestOutput]:
        """Iterate over a request's outputs, newest intermediate ones (if streaming) and then the final one."""
        return self._iterate(request_id, self._future_of(request_id))

    def _iterate(self, request_id: str, future: RequestFuture) -> Iterator[RequestOutput]:
        while True:
            output = future.take()
            assert isinstance(output, RequestOutput)
            if output.finished:
                self._forget_result(request_id)
            yield output
            if output.finished:
                return

    def _forget_result(self, request_id: str) -> None:
        with self._condition:  # somebody may be going through them
            self._unfetched.pop(request_id, None)

    def _future_of(self, request_id: str) -> RequestFuture:
        future = self._unfetched.get(request_id)
        if future is None:
            raise RequestError(f"request_id={shorten(request_id)} is not known, or its result was taken already")
        return future

    def position(self, request_id: str) -> int | None:
        """How many requests get a place before this one, itself counted; 0 when it runs, None when it has ended."""
        with self._condition:
            state = self._active.get(request_id)
            return None if state is None else self.scheduler.position(state, self.clock())

    def eta_s(self, request_id: str) -> float | None:
        """Seconds until it will have ended, as predicted if nobody else comes.

        None when it has ended, and while it would be a guess: until the first few pieces of every kind of work that is
        left of it were measured, or are known from a calibration.
        """
        with self._condition:
            state = self._active.get(request_id)
            if state is None or not all(map(self.scheduler.cost_model.knows, state.rows)):
                return None
            now = self.clock()
            if now >= self._ends_until_s or request_id not in self._ends:
                self._ends, self._ends_until_s = self.scheduler.ends(now), now + FORECAST_S
            return max(0.0, self._ends.get(request_id, now) - now)

    def backlog_s(self) -> float:
        """Seconds until everything that was accepted will have ended, as predicted if nobody else comes."""
        with self._condition:
            return self.scheduler.backlog_s(self.clock())

    def stats(self) -> EngineStats:
        """A snapshot of what the engine does and did."""
        with self._condition:
            scheduler = self.scheduler
            num_running = len({row.request for row in (*scheduler.running, *scheduler.decoding)})
            return self._stats.snapshot(
                len(scheduler.running),
                scheduler.num_waiting,
                (num_running, len(self._active) - num_running),
                scheduler.num_preemptions,
                scheduler.cost_model.prediction_error(),
                scheduler.memory.usage(),
                scheduler.config.max_batch_tokens,
                self.runner.max_decode_tokens,
            )

    def observe(self, observer: StatsObserver | None) -> None:
        """Have `observer`, in place of the last one, told of all work and all endings from now on."""
        self._stats.observer = observer

    # ------------------------------------------------------------------ the loop

    def _busy_loop(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as error:
            logger.exception("the engine's loop died")
            traceback.clear_frames(error.__traceback__)  # their locals would keep the last batch alive
            self.fatal_error = error
        finally:
            self._close()

    def _step(self) -> bool:
        """Schedule, execute, update; False when the loop is to end. Its locals go with it, and so does the batch."""
        output = self._next_output()
        if output is None:
            return False
        output = self.runner.bring_in(output)
        if output.is_empty:
            self._wait_for_a_callback()
        self._update(output, self.runner.execute(output))
        if not self.scheduler.has_requests():
            self.runner.release()
        return True

    def _wait_for_a_callback(self) -> None:
        """Who found no memory to come goes on when others have ended: also those that are in their callbacks now."""
        with self._condition:
            called = [state for state in self._active.values() if state.is_in_callback]
            if called:
                self._condition.wait_for(lambda: not all(state.is_in_callback for state in called), REAP_EVERY_S)

    def _next_output(self) -> SchedulerOutput | None:
        """Wait until there is something to do, and decide what; None when the loop is to end."""
        with self._condition:
            self._is_in_step = self._is_stuck = False
            self._condition.notify_all()
            idle_since = self.clock()
            while True:
                self._reap()
                if self._is_hard_stop or (self._is_stopping and not self._active):
                    return None
                if not self._num_pauses or self._is_stopping:
                    start = self.clock()
                    output = self.scheduler.schedule(start)
                    for state in output.hopeless:
                        self._end(state, RequestStatus.FAILED, state.error)
                    if output.is_empty and output.hopeless:
                        continue  # it may have been all that a stopping engine waited for
                    if not output.is_empty:
                        self._stats.add("schedule", 1e3 * (self.clock() - start))
                        self._is_in_step = True
                        return output
                self._condition.wait(REAP_EVERY_S if self._active else None)
                if self.clock() - idle_since >= REAP_EVERY_S:
                    self._is_stuck = True
                    self._condition.notify_all()
                    self._release_the_stuck()

    def _callers(self) -> set[threading.Thread | None]:
        """In whose threads callbacks are due."""
        return {state.caller_thread for state in self._active.values() if state.is_in_callback}

    def _release_the_stuck(self) -> None:
        """Nobody waits for callbacks that are due in a thread which itself waits for something else."""
        if self._stopping_threads:
            self._fail_callbacks_of_nobody(self._stopping_threads)
        threads = self._callers() - self._calling.copy()  # others only take their time
        for state in self._active.values():
            if state.caller_thread in threads and not (state.is_in_callback or state.passes_hold):
                self.scheduler.let_pass(state)

    def _reap(self) -> None:
        """Between two steps: end what nobody holds any more, and let go of what has ended."""
        while self._abandoned:
            self.cancel(self._abandoned.popleft())
        self.runner.move(self.scheduler.memory.take_moves())
        while lost := self.runner.take_lost():
            for row, error in lost.items():
                self._end(row.request, RequestStatus.FAILED, error)
            self.runner.move(self.scheduler.memory.take_moves())  # which gives their pages back
        for state in self._ended:
            for row in state.rows:
                row.let_go()
        self._ended.clear()

    def _update(self, output: SchedulerOutput, errors: dict[Any, BaseException]) -> None:
        """Move the rows on, end what has ended, tell everybody else how far they are."""
        with self._condition:
            live = [state for state in dict.fromkeys(row.request for row in output.denoise) if self._is_active(state)]
            for state in live:
                state.is_in_callback = state.is_gang and not any(row in errors for row in state.rows)
            for work in self.runner.take_timings():
                self.scheduler.cost_model.observe(*work)
            self.scheduler.limit_tokens(self.runner.max_batch_tokens)
            ended = self.scheduler.update_from_output(output, errors)
        for state in ended:
            self._finish(state)
        for state in live:
            is_told = state.streaming and not state.status.is_ending
            progress = self._output(state) if is_told else None
            with self._condition:  # who has ended meanwhile is told nothing more
                if progress is not None and self._is_active(state):
                    state.future.put(progress)
                if state.is_in_callback:
                    state.future.put_callback(self._callback_call(state))

    def _is_active(self, state: RequestState) -> bool:
        """True until the request ends. By identity: an id may be used again."""
        return self._active.get(state.request_id) is state

    def _finish(self, state: RequestState) -> None:
        """Make the final output, outside the lock: turning tensors into pictures takes time."""
        status, error, result = state.status, state.error, {}
        if status is RequestStatus.FINISHED:
            try:
                result = {
                    "images": self.runner.make_output(state),
                    "latents": self.runner.latents_of(state),
                    "final_sigmas": state.final_sigmas,
                }
            except Exception as problem:
                status = RequestStatus.FAILED
                error = self.runner.lost_of(state)
                if error is None:
                    error = StepFailedError(f"request {state.request_id!r} failed after its decode stage: {problem}")
                    error.__cause__ = problem
                traceback.clear_frames(problem.__traceback__)  # or whoever keeps the error would keep their tensors
        with self._condition:
            self._end(state, status, error, result)

    def _end(
        self,
        state: RequestState,
        status: RequestStatus,
        error: BaseException | None = None,
        result: dict[str, Any] | None = None,
    ) -> bool:
        """The one place where a request ends; False when it has ended before. Everything that can fail is done."""
        if not self._is_active(state):
            return False
        del self._active[state.request_id]
        self.scheduler.remove(state)
        state.status, state.error, state.callback, state.is_in_callback = status, error, None, False
        state.metrics.finish_s = self.clock()
        self._stats.add_ending(status, state.metrics)
        state.future.finish(self._output(state, **result or {}))
        self._ended.append(state)  # a step may be using its rows
        self._condition.notify_all()
        return True

    def _output(self, state: RequestState, **result: Any) -> RequestOutput:
        return RequestOutput(
            request_id=state.request_id,
            status=state.status,
            step=state.step,
            num_steps=state.num_steps,
            seeds=state.seeds,
            metrics=state.metrics,
            decode_seeds=state.decode_seeds,
            error=state.error,
            make_preview=None if state.status.is_ending else self.runner.preview_of(state),
            **result,
        )

    # ------------------------------------------------------------------ callbacks

    def _callback_call(self, state: RequestState) -> CallbackCall:
        callback = state.callback
        assert callback is not None

        def run() -> Any:
            """What the callback returned; runs in the caller's thread, without the engine's lock."""
            me = threading.current_thread()
            caller, state.caller_thread = state.caller_thread, me
            self._mine.num_callbacks = getattr(self._mine, "num_callbacks", 0) + 1
            self._calling.add(me)
            try:
                return callback.run(state)
            finally:
                self._mine.num_callbacks -= 1
                if not self._mine.num_callbacks:
                    self._calling.discard(me)
                state.caller_thread = caller

        return CallbackCall(run, lambda result, error: self._on_callback_reply(state, result, error))

    def _on_callback_reply(self, state: RequestState, result: Any, error: BaseException | None) -> None:
        """Let the gang go on with what its callback changed; an error ends it, and it alone."""
        with self._condition:
            if not self._is_active(state):
                return
            state.is_in_callback = False
            if error is not None:
                self._end(state, RequestStatus.FAILED, self.runner.lost_of(state) or error)
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
        if self._thread is not None and not self._thread.is_alive():
            raise EngineStoppedError("the engine's thread does not run in this process; was it forked?")

    def _close(self) -> None:
        """The loop is over: whoever still waits is told why."""
        with self._condition:
            self._is_in_step = False
            self._is_stopping = True
            died = self.fatal_error is not None
            self._fail_all(f"the engine died: {self.fatal_error!r}" if died else "the engine was stopped")
            try:
                self._reap()
            except Exception:
                logger.exception("the engine stopped, and pages could not be moved")
            self._condition.notify_all()
        with contextlib.suppress(Exception):
            self.runner.close()

    def _fail_all(self, reason: str) -> None:
        """An error of its own for everybody: raising one object in many threads would pile up their tracebacks."""
        for state in list(self._active.values()):
            error = EngineStoppedError(reason)
            error.__cause__ = self.fatal_error
            self._end(state, RequestStatus.FAILED, error)
