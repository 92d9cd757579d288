"""Server-sent events: how they are written, and a response that sends them and sees when nobody listens any more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

# Proxies close a connection that is silent for long; a comment, which clients skip, keeps it.
KEEP_ALIVE_S = 15.0


def event(kind: str, payload: Mapping[str, Any]) -> bytes:
    """One event; its data has the event's name as `type`."""
    data = json.dumps({"type": kind, **payload}, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


async def disconnected(receive: Receive) -> None:
    """Returns once the client is gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends the queue's events until it gives None. Where the client leaves before that, `on_disconnect` is awaited."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: asyncio.Queue[bytes | None],
        on_disconnect: Callable[[], Awaitable[None]],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._on_disconnect = on_disconnect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        gone = asyncio.ensure_future(disconnected(receive))
        is_over = False
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while not gone.done():
                chunk = await self._next(gone)
                is_over = chunk is None
                if chunk is None:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    break
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except OSError:
            pass  # sending to a client that has left
        finally:
            gone.cancel()
            if not is_over:
                await self._on_disconnect()

    async def _next(self, gone: asyncio.Future[None]) -> bytes | None:
        """The next event; a comment where none comes for a while, and nothing of interest once nobody listens."""
        coming = asyncio.ensure_future(self._events.get())
        try:
            waits: set[asyncio.Future[Any]] = {coming, gone}
            await asyncio.wait(waits, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
            return coming.result() if coming.done() else b": waiting\n\n"
        finally:
            coming.cancel()
