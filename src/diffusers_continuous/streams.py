"""How callers wait for their request: blocking, iterating, on an asyncio loop; callbacks run where the caller waits.

Knows the engine and one request's future; nothing of arguments, tensors or pipelines.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence

from .engine import DiffusionEngine
from .request import CallbackCall, RequestOutput, RequestState, RequestStatus


class RequestStream:
    """Iterates over one request's outputs; the last has `finished`. Closing or dropping it cancels the request."""

    def __init__(self, engine: DiffusionEngine, state: RequestState) -> None:
        self._engine = engine
        self._state = state
        self._is_over = False

    @property
    def request_id(self) -> str:
        """The request's name, for `engine.cancel_request`."""
        return self._state.request_id

    @property
    def status(self) -> RequestStatus:
        """Where the request stands now."""
        return self._state.status

    @property
    def step(self) -> int:
        """Denoising steps that every picture of the request has done."""
        return self._state.step

    @property
    def num_steps(self) -> int:
        """Denoising steps to be done."""
        return self._state.num_steps

    def listen(self, listener: Callable[[RequestOutput], None], final_only: bool = False) -> None:
        """Have `listener` called with every output, none left out, in place of iterating.

        The engine's thread calls it and waits for it, so it must be quick and raise nothing. The final output may be
        told twice. Not for a request with a callback.
        """
        self._state.streaming = not final_only

        def announce() -> None:
            """Runs in whichever thread delivers; nothing may be there any more."""
            event = self._state.future.take(timeout=0)
            if isinstance(event, RequestOutput):
                self._is_over |= event.finished
                listener(event)

        self._state.future.add_listener(announce)

    def __iter__(self) -> RequestStream:
        return self

    def __next__(self) -> RequestOutput:
        if self._is_over:
            raise StopIteration
        self._state.caller_thread = threading.current_thread()  # a stream may be read elsewhere than it was made
        try:
            while not isinstance(event := self._state.future.take(), RequestOutput):
                assert event is not None
                _answer(event)
        except BaseException:
            self.close()
            raise
        self._is_over = event.finished
        return event

    def close(self) -> None:
        """Cancel the request unless it has ended; no effect the second time."""
        self._is_over = True
        self._engine.cancel(self._state)

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._is_over:
            self._engine.abandon(self._state)


class AsyncRequestStream:
    """`RequestStream` on an asyncio loop; callbacks run in the loop's default executor."""

    def __init__(self, stream: RequestStream, final_only: bool = False) -> None:
        self._stream = stream
        self._final_only = final_only
        self._wake: asyncio.Event | None = None
        stream._state.streaming = not final_only

    @property
    def request_id(self) -> str:
        """The request's name, for `engine.cancel_request`."""
        return self._stream.request_id

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._stream._is_over:
            raise StopAsyncIteration
        self._stream._state.caller_thread = threading.current_thread()
        try:
            while True:
                event = await self._event()
                if isinstance(event, CallbackCall):
                    await asyncio.get_running_loop().run_in_executor(None, _answer, event)
                elif event.finished or not self._final_only:
                    break
        except BaseException:
            self._stream.close()
            raise
        self._stream._is_over = event.finished
        return event

    async def _event(self) -> RequestOutput | CallbackCall:
        future = self._stream._state.future
        if self._wake is None:
            self._wake = asyncio.Event()
            loop, wake = asyncio.get_running_loop(), self._wake

            def announce() -> None:
                """Called from the engine's thread, which must not touch the asyncio loop itself."""
                with contextlib.suppress(RuntimeError):  # the asyncio loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(wake.set)

            future.add_listener(announce)
        while (event := future.take(timeout=0)) is None:
            self._wake.clear()
            if (event := future.take(timeout=0)) is not None:
                break
            await self._wake.wait()
        return event

    async def aclose(self) -> None:
        """Cancel the request unless it has ended."""
        self._stream.close()


def wait(state: RequestState, on_output: Callable[[RequestOutput], None] | None = None) -> RequestOutput:
    """Wait for the final output, running due callbacks here, in the caller's thread."""
    while True:
        event = state.future.take()
        if isinstance(event, CallbackCall):
            _answer(event)
        elif event is not None:
            if on_output is not None:
                on_output(event)
            if event.finished:
                return event


def wait_for_all(states: Sequence[RequestState]) -> list[RequestOutput]:
    """Wait for the final outputs, running the due callbacks of all of them here, whoever's is due first.

    One after the other would leave those behind the first half way, where everybody who waits for them waits for it.
    """
    news: queue.SimpleQueue[RequestState] = queue.SimpleQueue()
    for state in states:
        state.future.add_listener(functools.partial(news.put, state))
    left = set(states)
    while left:
        state = news.get()
        event = state.future.take(timeout=0)
        if isinstance(event, CallbackCall):
            _answer(event)
        elif event is not None and event.finished:
            left.discard(state)
    outputs = [state.future.final for state in states]
    return [output for output in outputs if output is not None]


def _answer(call: CallbackCall) -> None:
    """Run a due callback; whatever it raises ends its request and comes back as that request's error."""
    try:
        result = call.run()
    except BaseException as error:
        call.reply(None, error)
        if not isinstance(error, Exception):  # Ctrl-C is meant for the caller, whatever it waits for
            raise
    else:
        call.reply(result, None)
