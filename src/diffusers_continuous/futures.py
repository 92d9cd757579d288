"""What one caller waits on. Knows nothing of engines, devices or scheduling; any thread may use it.

The loop's thread puts things in; one consumer, in a thread or on an asyncio loop, takes them out. An intermediate
output that was not taken is replaced by the newer one; the final output is never dropped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from .request import CallbackCall, RequestOutput

Event = RequestOutput | CallbackCall


class RequestFuture:
    """The mailbox of one request: a due callback, the newest intermediate output, the final output."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._latest: RequestOutput | None = None
        self._callback: CallbackCall | None = None
        self._final: RequestOutput | None = None
        self._listeners: list[Callable[[], None]] = []

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener()` from the loop's thread whenever `take` has something; at once if it has already."""
        with self._condition:
            self._listeners.append(listener)
            has_event = self._has_event()
        if has_event:
            listener()

    def put(self, output: RequestOutput) -> None:
        """Offer an intermediate output in place of an older one that was not taken."""
        with self._condition:
            self._latest = output
        self._announce()

    def put_callback(self, call: CallbackCall) -> None:
        """Ask the consumer to run a callback."""
        with self._condition:
            self._callback = call
        self._announce()

    def finish(self, output: RequestOutput) -> bool:
        """Set the final output; False, and no effect, when there is one already."""
        with self._condition:
            if self._final is not None:
                return False
            self._final, self._latest, self._callback = output, None, None
        self._announce()
        return True

    @property
    def final(self) -> RequestOutput | None:
        """The final output, once there is one."""
        return self._final

    def take(self, timeout: float | None = None) -> Event | None:
        """Wait for the next event and take it; None when `timeout` seconds passed. The final one can be taken again."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._condition:
            while not self._has_event():
                remaining = None if end is None else end - time.monotonic()
                if remaining is not None and remaining <= 0:
                    return None
                self._condition.wait(remaining)
            return self._pop()

    def result(self, timeout: float | None = None) -> RequestOutput | None:
        """Wait for the final output, leaving everything else alone; None when `timeout` seconds passed."""
        with self._condition:
            self._condition.wait_for(lambda: self._final is not None, timeout)
            return self._final

    def _has_event(self) -> bool:
        return self._callback is not None or self._latest is not None or self._final is not None

    def _pop(self) -> Event | None:
        if self._callback is not None:
            call, self._callback = self._callback, None
            return call
        if self._latest is not None:
            output, self._latest = self._latest, None
            return output
        return self._final

    def _announce(self) -> None:
        with self._condition:
            self._condition.notify_all()
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener()
