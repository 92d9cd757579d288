"""The same server on several devices or machines: Ray Serve runs one engine, with one application, on each.

    serve run diffusers_continuous.serving.ray_app:app model=Qwen/Qwen-Image max_replicas=4

A gateway (`ray_gateway`), which draws nothing, hands each call to the replica that will be done soonest (`ray_router`)
and passes the answer through as it comes. Needs the extra `ray`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import ray
from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.context import _get_global_client
from starlette.types import Message, Scope

from diffusers_continuous.config import ContinuousBatchingConfig, check_known, read_config
from diffusers_continuous.errors import ConfigError
from diffusers_continuous.loading import load_pipeline

from .errors import ApiError
from .middleware import LimitBody
from .ray_gateway import Gateway, request_id_of
from .ray_router import QueueCostRouter
from .ray_routing import WAIT_METRIC, Call, PredictedWaitPolicy
from .settings import API_KEY_VARIABLE, MAX_QUEUE_SIZE, ServingSettings, is_loopback, names_of

if TYPE_CHECKING:
    from diffusers_continuous import ContinuousBatchingPipeline

logger = logging.getLogger(__name__)

# Ray Serve's own limit of calls at a time. Ours is the queue of each engine, which answers 429 and says when to return.
MAX_ONGOING_CALLS = 4096
# How often every replica is asked what it has to do.
ROUTING_PERIOD_S = 0.25
# How many calls that have ended a replica remembers.
MAX_KNOWN_CALLS = 512


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
            """The pipeline, once the tokens of a picture of its own size are noted."""
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
        step_ms = engine.scheduler.cost_model.ms("denoise", num_tokens, num_tokens**2 / 2, 2)
        return {
            # A dead engine's queue is empty, and still no place to go.
            "backlog_s": math.inf if engine.is_stopped else engine.backlog_s(),
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
        engine = self._app.state.board.engine
        return {WAIT_METRIC: engine.backlog_s() if engine.stats().num_waiting else 0.0}  # who runs does not wait

    async def call(self, call: Call) -> AsyncGenerator[str | Message]:
        """This replica's name, then what its application sends. Closing the iterator is the client's leaving."""
        yield self._name
        self._under_way[call.key] = call
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        has_left = asyncio.Event()
        requests: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> Message:
            """The whole body at once, then nothing until the client has left."""
            if requests:
                return requests.pop()
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            """Never waits: the queue has no limit."""
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
            if call.work is not None:  # else the router counts nothing for it
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


@serve.ingress()
class GatewayDeployment:
    """Runs the `Gateway` under Ray Serve's HTTP proxy."""

    def __init__(self, replicas: Any, settings: ServingSettings, allow_unauthenticated: bool) -> None:
        self._asgi = make_gateway(replicas, settings, allow_unauthenticated)

    def __serve_build_asgi_app__(self) -> LimitBody:
        return self._asgi


def make_gateway(replicas: Any, settings: ServingSettings, allow_unauthenticated: bool) -> LimitBody:
    """The gateway as an ASGI application.

    Raises:
        ConfigError: where the proxy lets other machines in, and nobody said that they may.
    """
    host = proxy_host()
    if host is not None and not is_loopback(host) and settings.api_key is None and not allow_unauthenticated:
        raise ConfigError(
            f"Ray Serve's HTTP proxy listens at {host}, which lets other machines in: set {API_KEY_VARIABLE} "
            "in the environment, or say allow_unauthenticated=true"
        )
    return LimitBody(Gateway(replicas, settings), settings.max_body_bytes)


def proxy_host() -> str | None:
    """Where Ray Serve's HTTP proxies listen; None where there are none."""
    client = _get_global_client()
    assert client is not None
    return client.http_config.host


# ---------------------------------------------------------------------- the application

# On a command line, separated by commas.
Texts = Annotated[tuple[str, ...], BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value)]


class RayAppOptions(BaseModel):
    """What may follow `serve run diffusers_continuous.serving.ray_app:app`, as NAME=VALUE, or stand in the `args` of a
    config file. What they have in common with `diffusers-continuous serve` is called and does the same."""

    model: str | None = Field(None, description="A Qwen-Image model; the embedded one by default.")
    served_model_name: Texts = Field((), description="The last part of `model` by default.")
    decoder_model: str | None = Field(None, description="A PiDDecoder; none by default.")
    min_replicas: int = Field(1, ge=1)
    max_replicas: int | None = Field(None, ge=1, description="`min_replicas` by default.")
    target_wait_s: float = Field(30.0, gt=0, description="Predicted wait that more replicas are started above.")
    gpus_per_replica: float | None = Field(None, ge=0, description="1 by default where this machine has one.")
    cpus_per_replica: float = Field(1.0, ge=0)
    allow_unauthenticated: bool = Field(False, description="Let other machines in without a key.")
    max_queue: int | None = Field(
        None, ge=0, description=f"Pictures that may wait in each replica; 0 for no limit; {MAX_QUEUE_SIZE} by default."
    )
    max_batch: int | None = Field(
        None, ge=1, description=f"{ContinuousBatchingConfig.max_requests_per_batch} by default."
    )
    engine: Texts = Field((), description="NAME=VALUE for fields of `ContinuousBatchingConfig`.")
    max_size: int = ServingSettings.max_size
    max_steps: int = ServingSettings.max_steps
    max_n: int = ServingSettings.max_n
    max_body_bytes: int = ServingSettings.max_body_bytes
    cors_origin: Texts = ServingSettings.cors_origins
    media_dir: Path | None = Field(None, description="A folder that every replica's machine sees.")
    metrics_prefix: str = ServingSettings.metrics_prefix
    drain_s: float = ServingSettings.drain_s

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> RayAppOptions:
        """Options as they were written.

        Raises:
            ConfigError: names the option, its value and what it may be.
        """
        for name in options:
            check_known("option", name, cls.model_fields)
        try:
            return cls.model_validate(dict(options))
        except ValidationError as error:
            problems = [f"{problem['loc'][0]}={problem['input']!r}: {problem['msg']}" for problem in error.errors()]
            raise ConfigError("; ".join(problems)) from None


def app(options: Mapping[str, Any]) -> serve.Application:
    """The application that `serve run` starts: see `RayAppOptions`. Clients' key is in the environment variable
    `DIFFUSERS_CONTINUOUS_API_KEY`, since Ray shows options to whoever asks; a proxy that other machines reach needs it.

    Raises:
        ConfigError: for an unknown option or a wrong value.
    """
    chosen = RayAppOptions.read(options)
    engine_config = read_config(
        "engine",
        chosen.engine,
        {
            "max_queue_size": ("max_queue", chosen.max_queue),
            "max_requests_per_batch": ("max_batch", chosen.max_batch),
        },
        max_queue_size=MAX_QUEUE_SIZE,
    )
    if engine_config.calibration is not None:  # replicas may work in another folder than this one
        engine_config = replace(engine_config, calibration=str(Path(engine_config.calibration).resolve()))
    settings = ServingSettings(
        model_names=chosen.served_model_name or names_of(chosen.model),
        engine_config=engine_config,
        max_size=chosen.max_size,
        max_steps=chosen.max_steps,
        max_n=chosen.max_n,
        max_body_bytes=chosen.max_body_bytes,
        api_key=os.environ.get(API_KEY_VARIABLE) or None,
        cors_origins=chosen.cors_origin,
        media_dir=None if chosen.media_dir is None else chosen.media_dir.resolve(),
        metrics_prefix=chosen.metrics_prefix,
        drain_s=chosen.drain_s,
    )
    num_gpus = float(_has_gpu()) if chosen.gpus_per_replica is None else chosen.gpus_per_replica
    return build_app(
        partial(load_pipeline, _place(chosen.model), _place(chosen.decoder_model)),
        settings,
        min_replicas=chosen.min_replicas,
        max_replicas=chosen.max_replicas,
        target_wait_s=chosen.target_wait_s,
        ray_actor_options={"num_cpus": chosen.cpus_per_replica, "num_gpus": num_gpus},
        allow_unauthenticated=chosen.allow_unauthenticated,
    )


def _place(model: str | None) -> str | None:
    """A folder's full path, since replicas may work in another folder than this one; a repository's name as it is."""
    return str(Path(model).resolve()) if model is not None and Path(model).exists() else model


def _has_gpu() -> bool:
    """Asks the cluster; `serve run` connects to it only after this, so that then this machine stands for all."""
    if ray.is_initialized():
        return bool(ray.cluster_resources().get("GPU", 0) > 0)
    from diffusers_continuous.devices import best_device

    return best_device().type in ("cuda", "xpu")


def build_app(
    make_pipe: Callable[[], ContinuousBatchingPipeline],
    settings: ServingSettings,
    min_replicas: int = 1,
    max_replicas: int | None = None,
    target_wait_s: float = 30.0,
    ray_actor_options: Mapping[str, Any] | None = None,
    allow_unauthenticated: bool = False,
) -> serve.Application:
    """The Ray Serve application of any pipeline.

    Args:
        make_pipe: Called once in the process of every replica.
        settings: Of each replica's server; `media_dir` should be a folder that all of them see, or none.
        min_replicas, max_replicas: So many engines, autoscaled between the two where they differ.
        target_wait_s: Predicted seconds of work per engine that more of them are started above.
        ray_actor_options: What Ray gives each engine, such as `{"num_gpus": 1}`.
        allow_unauthenticated: Start without an API key even where other machines reach Ray Serve's HTTP proxy.
    """
    max_replicas = min_replicas if max_replicas is None else max_replicas
    if max_replicas < min_replicas:
        raise ConfigError(f"max_replicas={max_replicas} is less than min_replicas={min_replicas}")
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
    bound: serve.Application = gateway.bind(engines.bind(make_pipe, settings), settings, allow_unauthenticated)
    return bound


def router_config() -> RequestRouterConfig:
    """How Ray Serve is to choose the engine for a call."""
    options: dict[str, Any] = {
        "request_router_class": QueueCostRouter,
        "request_routing_stats_period_s": ROUTING_PERIOD_S,
    }
    return RequestRouterConfig(**options)  # its constructor pickles the class, which validating would not
