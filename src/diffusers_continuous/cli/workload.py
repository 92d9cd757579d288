"""What callers ask for, when they come, and how on time they were served. Numbers only: no server, engine or torch.

The benchmarks and the simulator share it, so that their figures are about the same requests.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .arguments import suggest

# (share, side in pixels, steps)
MIXES = {
    "rfc": ((0.7, 1024, 10), (0.3, 1024, 50)),
    "dataset-c": ((0.15, 512, 20), (0.25, 768, 20), (0.45, 1024, 25), (0.15, 1536, 35)),
}
BURST_S, BURST_FACTOR = 60.0, 4.0  # a tenth of the time, in stretches of about a minute, four times the calls
# What a deadline is in multiples of a request's time alone.
SLO_SCALES = (1.5, 2.0, 3.0)

Kind = tuple[int, int]  # side in pixels, steps


def read_mix(text: str) -> tuple[tuple[float, int, int], ...]:
    """A mix by its name, or written out: "SHARE:SIDE:STEPS,..." such as "0.7:128:10,0.3:128:50"."""
    if text in MIXES:
        return MIXES[text]
    parts = [part.split(":") for part in text.split(",")]
    try:
        mix = tuple((float(share), int(side), int(steps)) for share, side, steps in parts)
    except ValueError:
        known = suggest(text, MIXES)
        raise ValueError(f"mix {text!r} is not known{known}, or write SHARE:SIDE:STEPS,...") from None
    if not all(0 < share < math.inf and side > 0 and steps > 0 for share, side, steps in mix):
        raise ValueError(f"mix {text!r} has a share, side or number of steps that is not above 0")
    return mix


def draw_kinds(mix: Sequence[tuple[float, int, int]], count: int, rng: random.Random, shrink: int = 1) -> list[Kind]:
    """So many requests out of a mix, every side divided by `shrink`."""
    kinds = [(side // shrink, steps) for _, side, steps in mix]
    return rng.choices(kinds, [share for share, _, _ in mix], k=count)


def poisson(rng: random.Random) -> Iterator[float]:
    """Gaps of mean 1."""
    while True:
        yield rng.expovariate(1.0)


def bursty(rng: random.Random) -> Iterator[float]:
    """Gaps of a process that is faster for a tenth of the time."""
    is_burst, left = False, rng.expovariate(1 / (9 * BURST_S))
    while True:
        gap = rng.expovariate(BURST_FACTOR if is_burst else 1.0)
        left -= gap
        if left < 0:
            is_burst = not is_burst
            left = rng.expovariate(1 / (BURST_S if is_burst else 9 * BURST_S))
        yield gap


ARRIVALS: dict[str, Callable[[random.Random], Iterator[float]]] = {"bursty": bursty, "poisson": poisson}


def arrival_times(name: str, count: int, rng: random.Random) -> list[float]:
    """When each of so many requests comes, from 0 on, about one in each unit of time."""
    times = list(itertools.accumulate(itertools.islice(ARRIVALS[name](rng), count)))
    return [at - times[0] for at in times]


def kind_name(kind: Kind) -> str:
    """As tables call it."""
    return f"{kind[0]}px/{kind[1]}"


def slowdowns(
    kinds: Sequence[Kind], latencies_s: Sequence[float], usual_s: dict[Kind, float]
) -> dict[str, list[float]]:
    """Latency over the kind's usual time: of all, and by kind. inf stands for a request that failed."""
    found: dict[str, list[float]] = {"all": []}
    for kind, latency in zip(kinds, latencies_s, strict=True):
        for name in ("all", kind_name(kind)):
            found.setdefault(name, []).append(latency / usual_s[kind])
    return found


def attainment(values: Sequence[float]) -> dict[str, float]:
    """Share of slowdowns within each of `SLO_SCALES`, and the slowdown that 50, 95 and 99 % do not exceed."""
    shares = {f"attainment_{scale:g}x": sum(value <= scale for value in values) / len(values) for scale in SLO_SCALES}
    return shares | {f"p{percent}_slowdown": percentile(values, percent) for percent in (50, 95, 99)}


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that so many percent do not exceed; inf of none."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)] if values else math.inf


def rounded(value: Any) -> Any:
    """Numbers with four digits that count; what is not finite as a string, which JSON has no number for."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else str(value)
    return value
