"""What happens to a call before the application sees it: the key, and the limit of its body. Plain ASGI."""

from __future__ import annotations

import hmac
from collections.abc import Container

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError

# Python refuses to read endless numbers; no body is that long.
MAX_LENGTH_DIGITS = 20


class RequireApiKey:
    """Lets only calls with the key through, and those to `open_paths`."""

    def __init__(self, app: ASGIApp, api_key: str, open_paths: Container[str]) -> None:
        self._app = app
        self._api_key = api_key.encode()
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        is_open = scope["type"] == "lifespan" or scope.get("path") in self._open_paths
        if not is_open and not self._has_key(scope):
            message = "this server needs its API key, as `Authorization: Bearer KEY`"
            error = ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        return hmac.compare_digest(key.strip().encode("latin-1"), self._api_key) and scheme.lower() == "bearer"


class LimitBody:
    """Reads the whole body first, and refuses it as soon as it is longer than `max_bytes`."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = bytearray()
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and (len(length) > MAX_LENGTH_DIGITS or int(length) > self._max_bytes):
            await self._refuse(scope, receive, send)
            return
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client left in the middle
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                await self._refuse(scope, receive, send)
                return
            if not message.get("more_body", False):
                break
        await self._app(scope, _Replay(bytes(body), receive), send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = ApiError(413, f"the body is longer than {self._max_bytes} bytes, the limit", "body_too_large")
        await error.response({"Connection": "close"})(scope, receive, send)


class _Replay:
    """Gives a body that was read already, and then whatever else comes."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}
