"""The front of several engines under Ray Serve: hands every call to one of them, and knows what none of them can know.

That is what became of a request whose replica died, and which replica has a request that somebody asks about. Needs no
torch and no model.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any
from uuid import uuid4

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from starlette.types import Message, Receive, Scope, Send

from diffusers_continuous.sizes import read_size

from . import sse
from .errors import ApiError
from .ray_routing import Call, Work
from .settings import DEFAULT_STEPS, ServingSettings

# How many requests a gateway remembers the replica of.
MAX_KNOWN_HOMES = 4096
GENERATIONS = "/v1/images/generations"
# Only one replica can answer these.
LOOKUPS = ("/v1/requests/", "/media/")
RETRY_AFTER_S = 1
REPLICA_HEADER = b"x-replica"


class Gateway:
    """An ASGI application that hands every call to a replica.

    A call whose replica dies before anything of the answer was passed on is tried once more where that gives the same
    pictures: where it fixes their seed. Else its client gets 503, in OpenAI's shape, with `Retry-After`.

    Args:
        replicas: Ray Serve's handle of the `EngineReplica`s.
        settings: The application's.
    """

    def __init__(self, replicas: Any, settings: ServingSettings) -> None:
        self._replicas = replicas.options(method_name="call", stream=True)
        self._settings = settings
        self._homes: OrderedDict[str, str] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application; a call's body must be one message."""
        if scope["type"] == "lifespan":
            await _no_lifespan(receive, send)
            return
        message = await receive()
        call = self._make_call(scope, message.get("body", b""))
        answer = self._look_up if call.path.startswith(LOOKUPS) else self._pass_on
        answering = asyncio.ensure_future(answer(call, send))
        leaving = asyncio.ensure_future(sse.disconnected(receive))
        try:
            await asyncio.wait([leaving, answering], return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            leaving.cancel()
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    def _make_call(self, scope: Scope, body: bytes) -> Call:
        headers = list(scope["headers"])
        work = None
        if (scope["method"], scope["path"]) == ("POST", GENERATIONS):
            work = work_of(body, self._settings)
            if _header(headers, b"x-request-id") is None:
                headers.append((b"x-request-id", f"req-{uuid4().hex}".encode()))
        return Call(
            key=uuid4().hex,
            method=scope["method"],
            path=scope["path"],
            query_string=scope["query_string"],
            headers=headers,
            body=body,
            scheme=scope.get("scheme", "http"),
            server=scope.get("server"),
            client=scope.get("client"),
            work=work,
            preferred=self._homes.get(scope["path"].rpartition("/")[2]),
        )

    async def _pass_on(self, call: Call, send: Send) -> None:
        """Send the call to one replica, and what it answers to the client."""
        answer = _Answer(send)
        for _ in range(2 if is_idempotent(call) else 1):
            try:
                async with contextlib.aclosing(self._items(call)) as items:
                    answer.replica = await anext(items)
                    self._remember(call, answer.replica)
                    async for message in items:
                        await answer.take(message)
                return
            except RayActorError:
                if answer.has_begun:
                    break
                call = replace(call, key=uuid4().hex)
            except DeploymentUnavailableError:
                await answer.fail(_no_replica())
                return
        await answer.fail(
            ApiError(
                503,
                "the replica that had this request died, and nothing of it is left: send it again",
                "replica_died",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        )

    async def _look_up(self, call: Call, send: Send) -> None:
        """Ask one replica after another, until one knows; the answer of one that does not is as good as any."""
        messages: list[Message] = []
        name = ""
        while True:
            try:
                async with contextlib.aclosing(self._items(call)) as items:
                    name = await anext(items)
                    if name in call.excluded:
                        break
                    messages = [message async for message in items]
            except RayActorError:
                continue  # the router knows by now
            except DeploymentUnavailableError:
                await _Answer(send).fail(_no_replica())
                return
            if messages and messages[0].get("status") != 404:
                break
            call = replace(call, key=uuid4().hex, preferred=None, excluded=call.excluded | {name})
        answer = _Answer(send)
        answer.replica = name
        for message in messages:
            await answer.take(message)

    async def _items(self, call: Call) -> AsyncGenerator[Any]:
        """What `EngineReplica.call` gives."""
        response = self._replicas.remote(call)
        try:
            async for item in response:
                yield item
        finally:
            response.cancel()

    def _remember(self, call: Call, replica: str) -> None:
        request_id = request_id_of(call)
        if call.work is None or request_id is None:
            return
        self._homes[request_id] = replica
        while len(self._homes) > MAX_KNOWN_HOMES:
            self._homes.popitem(last=False)


class _Answer:
    """What a client gets. It begins with the first byte of the body, so that until then it may still become another.

    Attributes:
        replica: Whose answer it is; the client is told.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message = {}
        self.replica = ""
        self.has_begun = False

    async def take(self, message: Message) -> None:
        """Pass on what a replica's application sent."""
        if message["type"] == "http.response.start":
            headers = [*message["headers"], (REPLICA_HEADER, self.replica.encode())]
            self._start = {**message, "headers": headers}
            return
        if not self.has_begun:
            self.has_begun = True
            await self._send(self._start)
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """End with an error; as an event where events were sent already."""
        if not self.has_begun:
            await error.response()({"type": "http"}, _nothing, self._send)
        elif (_header(self._start["headers"], b"content-type") or b"").startswith(b"text/event-stream"):
            event = sse.event("error", error.body)
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        else:
            raise error


async def _nothing() -> Message:
    raise AssertionError("an answer asks for nothing")


async def _no_lifespan(receive: Receive, send: Send) -> None:
    """Nothing to start or to stop."""
    for phase in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{phase}.complete"})


def _no_replica() -> ApiError:
    return ApiError(503, "no replica can be started", "no_replica", headers={"Retry-After": str(RETRY_AFTER_S)})


def _header(headers: Any, name: bytes) -> bytes | None:
    return next((value for key, value in headers if key.lower() == name), None)


def request_id_of(call: Call) -> str | None:
    """What its client, or the gateway, named the request."""
    value = _header(call.headers, b"x-request-id")
    return None if value is None else value.decode("latin-1")


def work_of(body: bytes, settings: ServingSettings) -> Work | None:
    """What the body of a request for pictures asks for; None where it is wrong, which its replica will say."""
    fields = _fields_of(body)
    num_steps = fields.get("num_inference_steps") or min(DEFAULT_STEPS, settings.max_steps)
    num_pictures, scale = fields.get("n") or 1, fields.get("true_cfg_scale")
    if not fields or not _is_within(num_steps, settings.max_steps) or not _is_within(num_pictures, settings.max_n):
        return None
    is_guided = scale is None or (_is_within(scale, math.inf) and scale > 1)
    try:
        width, height = read_size(fields.get("size"))
        num_image_tokens = width * height // 256
    except ValueError:
        num_image_tokens = None
    return Work(num_steps, num_pictures * (2 if is_guided else 1), num_image_tokens)


def _is_within(value: object, most: float) -> bool:
    return isinstance(value, int | float) and 0 < value <= most


def is_idempotent(call: Call) -> bool:
    """True where the call gives the same when it is sent again: the seed of its pictures is fixed."""
    return call.method != "POST" or _fields_of(call.body).get("seed") is not None


def _fields_of(body: bytes) -> dict[str, Any]:
    """Of a JSON object, none of which is checked; empty for anything else."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
