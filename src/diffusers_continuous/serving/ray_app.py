"""The same server on several devices or machines: Ray Serve runs one engine, with one application, on each.

    serve run diffusers_continuous.serving.ray_app:app model=Qwen/Qwen-Image max_replicas=4

A gateway, which draws nothing, hands each call to the replica that will be done soonest (see `ray_router`) and passes
the answer through as it comes. It knows what the replicas' application cannot know: what became of a request whose
replica died, and which replica has a request that somebody asks about. Needs the extra `ray`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import ray
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from starlette.types import Message, Receive, Scope, Send

from diffusers_continuous.config import ContinuousBatchingConfig
from diffusers_continuous.sizes import read_size

from . import sse
from .errors import ApiError
from .middleware import LimitBody
from .ray_router import QueueCostRouter
from .ray_routing import WAIT_METRIC, Call, PredictedWaitPolicy, Work
from .settings import DEFAULT_STEPS, MAX_QUEUE_SIZE, ServingSettings

if TYPE_CHECKING:
    from diffusers_continuous import ContinuousBatchingPipeline

logger = logging.getLogger(__name__)

# Ray Serve's own limit of calls at a time. Ours is the queue of each engine, which answers 429 and says when to return.
MAX_ONGOING_CALLS = 4096
# How often every replica is asked what it has to do.
ROUTING_PERIOD_S = 0.25
# How many calls a replica remembers to have received, and how many requests a gateway remembers the replica of.
MAX_KNOWN_CALLS = 128
MAX_KNOWN_HOMES = 4096
API_KEY_VARIABLE = "DIFFUSERS_CONTINUOUS_API_KEY"
GENERATIONS = "/v1/images/generations"
# Only one replica can answer these.
LOOKUPS = ("/v1/requests/", "/media/")
RETRY_AFTER_S = 1
REPLICA_HEADER = b"x-replica"


# ---------------------------------------------------------------------- one engine


class EngineReplica:
    """One engine with its application, in a process of its own. Ray Serve awaits its constructor.

    Args:
        make_pipe: Called once in that process.
        settings: The application's.
    """

    async def __init__(  # type: ignore[misc]
        self, make_pipe: Callable[[], ContinuousBatchingPipeline], settings: ServingSettings
    ) -> None:
        from .app import create_app  # here, since it needs torch, which the gateway does not

        self._name = serve.get_replica_context().replica_id.unique_id
        self._under_way: dict[str, Call] = {}
        self._ended: deque[str] = deque(maxlen=MAX_KNOWN_CALLS)
        self._num_default_image_tokens = 0

        def make() -> ContinuousBatchingPipeline:
            pipe = make_pipe()
            side = int(pipe.default_sample_size * pipe.vae_scale_factor)
            self._num_default_image_tokens = (side // 16) ** 2
            return pipe

        self._app = create_app(make, settings)
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()

    async def __del__(self) -> None:
        """Ray Serve stops the replica, after the calls that it was given have ended."""
        await self._lifespan.__aexit__(None, None, None)

    def check_health(self) -> None:
        """Ray Serve replaces a replica where this raises: its engine has died."""
        self._app.state.board.check_health()

    def record_routing_stats(self) -> dict[str, Any]:
        """What `QueueCostRouter` goes by."""
        # First, so that the backlog has all that these are about.
        accepted = [key for key, call in self._under_way.items() if self._is_accepted(call)]
        engine, num_tokens = self._app.state.board.engine, 2 * self._num_default_image_tokens
        step_ms = engine.scheduler.cost_model.ms("denoise", num_tokens, num_tokens**2 / 2)
        return {
            "backlog_s": engine.backlog_s(),
            "s_per_token": step_ms / 1e3 / num_tokens,
            "num_default_image_tokens": self._num_default_image_tokens,
            "known": [*self._ended, *accepted],
        }

    def _is_accepted(self, call: Call) -> bool:
        """True once the engine has the request."""
        try:
            job = self._app.state.board.find(request_id_of(call) or "")
        except ApiError:
            return False
        return job.stream is not None or job.ended.is_set()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `PredictedWaitPolicy` goes by."""
        return {WAIT_METRIC: self._app.state.board.engine.backlog_s()}

    async def call(self, call: Call) -> AsyncGenerator[str | Message]:
        """This replica's name, then what its application sends. Closing the iterator is the client's leaving."""
        yield self._name
        self._under_way[call.key] = call
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        has_left = asyncio.Event()
        requests: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> Message:
            if requests:
                return requests.pop()
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            messages.put_nowait(message)

        running = asyncio.ensure_future(self._app(_scope_of(call), receive, send))
        running.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
        finally:
            has_left.set()
            await asyncio.wait([running])
            del self._under_way[call.key]
            self._ended.append(call.key)
            if running.exception() is not None:  # the client has been told
                logger.error("a call of %s %s failed", call.method, call.path, exc_info=running.exception())


def _scope_of(call: Call) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": call.method,
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": call.query_string,
        "root_path": "",
        "headers": list(call.headers),
        "scheme": call.scheme,
        "server": call.server,
        "client": call.client,
    }


# ---------------------------------------------------------------------- the gateway


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


@serve.ingress()
class GatewayDeployment:
    """Runs the `Gateway` under Ray Serve's HTTP proxy."""

    def __init__(self, replicas: Any, settings: ServingSettings) -> None:
        self._asgi = LimitBody(Gateway(replicas, settings), settings.max_body_bytes)

    def __serve_build_asgi_app__(self) -> LimitBody:
        return self._asgi


# ---------------------------------------------------------------------- the application


class RayAppOptions(BaseModel):
    """What may follow `serve run diffusers_continuous.serving.ray_app:app`, as NAME=VALUE."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, description="A Qwen-Image model; the embedded one by default.")
    served_model_name: str | None = Field(None, description="The last part of `model` by default.")
    min_replicas: int = Field(1, ge=1)
    max_replicas: int | None = Field(None, ge=1, description="`min_replicas` by default.")
    target_wait_s: float = Field(30.0, gt=0, description="Predicted wait that more replicas are started above.")
    gpus_per_replica: float | None = Field(None, ge=0, description="1 by default in a cluster that has any.")
    cpus_per_replica: float = Field(1.0, ge=0)
    max_queue: int = Field(MAX_QUEUE_SIZE, ge=0, description="Pictures that may wait in each replica.")
    max_batch: int = Field(32, ge=1)
    max_size: int = Field(2048, ge=16)
    max_steps: int = Field(200, ge=1)
    max_n: int = Field(10, ge=1)
    drain_s: float = Field(30.0, ge=0)


def app(options: Mapping[str, Any]) -> serve.Application:
    """The application that `serve run` starts: see `RayAppOptions`. Clients' key is in the environment variable
    `DIFFUSERS_CONTINUOUS_API_KEY`.

    Raises:
        ValueError: for an unknown option or a wrong value.
    """
    chosen = RayAppOptions.model_validate(dict(options))
    name = "tiny-qwen-image" if chosen.model is None else Path(chosen.model).name
    settings = ServingSettings(
        model_names=(chosen.served_model_name or name,),
        engine_config=ContinuousBatchingConfig(
            max_queue_size=chosen.max_queue, max_requests_per_batch=chosen.max_batch
        ),
        max_size=chosen.max_size,
        max_steps=chosen.max_steps,
        max_n=chosen.max_n,
        api_key=os.environ.get(API_KEY_VARIABLE) or None,
        drain_s=chosen.drain_s,
    )
    num_gpus = chosen.gpus_per_replica
    if num_gpus is None:
        num_gpus = float(ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0)
    return build_app(
        partial(load_pipeline, chosen.model),
        settings,
        min_replicas=chosen.min_replicas,
        max_replicas=chosen.max_replicas,
        target_wait_s=chosen.target_wait_s,
        ray_actor_options={"num_cpus": chosen.cpus_per_replica, "num_gpus": num_gpus},
    )


def build_app(
    make_pipe: Callable[[], ContinuousBatchingPipeline],
    settings: ServingSettings,
    min_replicas: int = 1,
    max_replicas: int | None = None,
    target_wait_s: float = 30.0,
    ray_actor_options: Mapping[str, Any] | None = None,
) -> serve.Application:
    """The Ray Serve application of any pipeline.

    Args:
        make_pipe: Called once in the process of every replica.
        settings: Of each replica's server; `media_dir` should be a folder that all of them see, or none.
        min_replicas, max_replicas: So many engines, autoscaled between the two where they differ.
        target_wait_s: Predicted seconds of work per engine that more of them are started above.
        ray_actor_options: What Ray gives each engine, such as `{"num_gpus": 1}`.
    """
    max_replicas = min_replicas if max_replicas is None else max_replicas
    if max_replicas < min_replicas:
        raise ValueError(f"max_replicas={max_replicas} is less than min_replicas={min_replicas}")
    number: dict[str, Any] = {"num_replicas": min_replicas}
    if max_replicas > min_replicas:
        policy = AutoscalingPolicy(policy_function=PredictedWaitPolicy, policy_kwargs={"target_wait_s": target_wait_s})
        number = {
            "autoscaling_config": AutoscalingConfig(min_replicas=min_replicas, max_replicas=max_replicas, policy=policy)
        }
    engines = serve.deployment(
        name="Engine",
        max_ongoing_requests=MAX_ONGOING_CALLS,
        ray_actor_options=dict(ray_actor_options or {}),
        request_router_config=router_config(),
        graceful_shutdown_timeout_s=settings.drain_s,
        **number,
    )(EngineReplica)
    gateway = serve.deployment(
        name="Gateway",
        max_ongoing_requests=MAX_ONGOING_CALLS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=settings.drain_s,
    )(GatewayDeployment)
    bound: serve.Application = gateway.bind(engines.bind(make_pipe, settings), settings)
    return bound


def router_config() -> RequestRouterConfig:
    """How Ray Serve is to choose the engine for a call."""
    options: dict[str, Any] = {
        "request_router_class": QueueCostRouter,
        "request_routing_stats_period_s": ROUTING_PERIOD_S,
    }
    return RequestRouterConfig(**options)  # its constructor pickles the class, which validating would not


def load_pipeline(model: str | None) -> ContinuousBatchingPipeline:
    """The pipeline of a folder or repository, or of the embedded model, on the device that Ray gave this process."""
    from diffusers_continuous import ContinuousBatchingPipeline, embedded_model_path
    from diffusers_continuous.devices import best_device, default_dtype

    device, source = best_device(), model or str(embedded_model_path())
    pipe = ContinuousBatchingPipeline.from_pretrained(source, dtype=default_dtype(device)).to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe
