"""What replicas have to do, in predicted seconds, and how many of them there should be.

Ray Serve asks every replica now and then what it has to do (`EngineReplica.record_routing_stats`). In between, a router
adds what it sent itself and the replica had not received when it answered. Knows seconds and ids; no HTTP, no engine.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.serve.config import AutoscalingContext

# What a router sent and no replica has confirmed is forgotten, oldest first: it never arrived.
MAX_UNCONFIRMED = 512
# Until a replica has told anything: what a token costs in one denoising step. It only has to be more than nothing.
DEFAULT_S_PER_TOKEN, DEFAULT_IMAGE_TOKENS = 1e-5, 4096
WAIT_METRIC = "predicted_wait_s"


@dataclass(frozen=True, slots=True)
class Work:
    """What a request for pictures asks for. `num_image_tokens` is None for the model's own size."""

    num_steps: int
    num_branches: int
    num_image_tokens: int | None

    def seconds(self, stats: dict[str, Any]) -> float:
        """How long a replica that told these figures takes for it alone, about."""
        tokens = self.num_image_tokens or stats.get("num_default_image_tokens", DEFAULT_IMAGE_TOKENS)
        s_per_token: float = stats.get("s_per_token", DEFAULT_S_PER_TOKEN)
        return self.num_steps * self.num_branches * tokens * s_per_token


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call on its way to a replica, its body read.

    Attributes:
        key: Names this attempt.
        work: None for a call that asks for no pictures.
        preferred: The replica that probably knows of it.
        excluded: Replicas that were tried.
    """

    key: str
    method: str
    path: str
    query_string: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    scheme: str
    server: tuple[str, int | None] | None
    client: tuple[str, int] | None
    work: Work | None = None
    preferred: str | None = None
    excluded: frozenset[str] = frozenset()


class Backlogs:
    """Predicted seconds until each replica has done all that it was given."""

    def __init__(self) -> None:
        self._sent: dict[str, OrderedDict[str, Work]] = {}

    def seconds(self, replica: str, stats: dict[str, Any]) -> float:
        """What the replica told, and what it was sent since."""
        sent = self._sent.get(replica)
        if sent:
            for key in stats.get("known", ()):
                sent.pop(key, None)
        return stats.get("backlog_s", 0.0) + sum(work.seconds(stats) for work in (sent or {}).values())

    def send(self, replica: str, call: Call) -> None:
        """The replica gets the call, and no other does."""
        if call.work is None:
            return
        for others in self._sent.values():
            others.pop(call.key, None)
        sent = self._sent.setdefault(replica, OrderedDict())
        sent[call.key] = call.work
        while len(sent) > MAX_UNCONFIRMED:
            sent.popitem(last=False)

    def keep(self, replicas: set[str]) -> None:
        """Forget the replicas that are gone."""
        for name in self._sent.keys() - replicas:
            del self._sent[name]


class PredictedWaitPolicy:
    """As many replicas as make the predicted wait, were all work shared out evenly, at most `target_wait_s`.

    Ray Serve applies the bounds and delays of its `AutoscalingConfig` to the answer.
    """

    def __init__(self, target_wait_s: float) -> None:
        self._target_wait_s = target_wait_s

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas wanted."""
        waits = (context.aggregated_metrics or {}).get(WAIT_METRIC)
        if not waits:  # nobody has told anything yet
            return context.target_num_replicas, {}
        return max(1, math.ceil(sum(waits.values()) / self._target_wait_s)), {}
