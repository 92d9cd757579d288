"""What whoever runs a server may choose about it. Knows nothing of HTTP."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path

from diffusers_continuous.config import ContinuousBatchingConfig, check_known
from diffusers_continuous.errors import ConfigError

# A server that lets everybody wait for ever serves nobody: this many rows may.
MAX_QUEUE_SIZE = 256
METRICS_PREFIXES = ("diffusers_continuous", "vllm_omni")
# The clients' key, where other users of the machine do not see it.
API_KEY_VARIABLE = "DIFFUSERS_CONTINUOUS_API_KEY"
# As browsers send it, which is what it is compared with.
ORIGIN = r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/?#@:\[\]A-Z]+)(:[0-9]{1,5})?"
# What the pipeline's call takes by default.
DEFAULT_STEPS = 50
DEFAULT_TRUE_CFG_SCALE = 4.0


@dataclass(frozen=True)
class ServingSettings:
    """The limits and places of one server. Frozen.

    Attributes:
        model_names: What the served model is called; a request may name any of them, or none.
        engine_config: How the engine forms its batches.
        max_size: Longest side of a picture in pixels.
        max_steps: Most denoising steps of a request.
        max_n: Most pictures of a request.
        max_body_bytes: Longest request body.
        api_key: What clients send as `Authorization: Bearer ...`; None lets everybody in.
        cors_origins: Web origins whose pages may call the server; `"*"` is all of them.
        media_dir: Folder for pictures that clients get as URLs; without it they get base64 only.
        metrics_prefix: What the names of the metrics start with, before a colon: one of `METRICS_PREFIXES`.
        drain_s: Seconds that accepted requests get to finish once the server was told to stop.
    """

    model_names: tuple[str, ...] = ("qwen-image",)
    engine_config: ContinuousBatchingConfig = field(
        default_factory=lambda: ContinuousBatchingConfig(max_queue_size=MAX_QUEUE_SIZE)
    )
    max_size: int = 2048
    max_steps: int = 200
    max_n: int = 10
    max_body_bytes: int = 2**20
    api_key: str | None = field(default=None, repr=False)
    cors_origins: tuple[str, ...] = ()
    media_dir: Path | None = None
    metrics_prefix: str = METRICS_PREFIXES[0]
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        for name, least in (("max_size", 16), ("max_steps", 1), ("max_n", 1), ("max_body_bytes", 1), ("drain_s", 0)):
            value = getattr(self, name)
            if not value >= least:
                raise ConfigError(f"{name}={value!r} must be at least {least}")
        check_known("metrics_prefix", self.metrics_prefix, METRICS_PREFIXES)
        if not self.model_names or not all(self.model_names):
            raise ConfigError("model_names must have at least one name, and none may be empty")
        if self.api_key == "":
            raise ConfigError("api_key is empty; leave it out to let everybody in")
        for origin in self.cors_origins:
            if origin != "*" and re.fullmatch(ORIGIN, origin) is None:
                raise ConfigError(
                    f"CORS origin {origin!r:.200} is none: write scheme://host or scheme://host:port, in small letters "
                    "and without a path, or '*' for all"
                )


def is_loopback(host: str) -> bool:
    """True for an address, or localhost, that only this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def names_of(model: str | None) -> tuple[str, ...]:
    """What clients may call the model of a folder or a repository; where it lies on this machine is not told."""
    if model is None:
        return ("tiny-qwen-image",)
    name = Path(model).resolve().name
    return (name,) if Path(model).exists() or name == model else (name, model)
