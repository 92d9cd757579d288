"""In which order rows run. Knows numbers only: no torch, no device, no batch.

A policy is one small object: where a row stands in the queue, and which rows go first now. Times are seconds on the
engine's clock; `row.remaining_ms` is what the cost model predicts for the rest of the row alone, in all stages.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from .cost_model import StepCostModel
from .request import Row, Stage

# Rows whose deadlines are weighed against each other: so many take a tenth of a millisecond, and what is due after
# all of them changes little about who should run now.
MAX_PLANNED = 128


# Written this way since a queue of a thousand is searched with it: half as slow as a function.
_by_deadline: Callable[[Row], tuple[float, ...]] = operator.attrgetter(
    "request.params.priority", "request.metrics.deadline_s"
)
_priority: Callable[[Row], int] = operator.attrgetter("request.params.priority")


class Policy(Protocol):
    """Orders rows; the scheduler takes them in that order while they fit.

    Attributes:
        is_preemptive: A running row goes back to the queue when others are in front of it; else it runs to its end.
        keeps_deadlines: The scheduler sets aside what can no longer be on time, and lets no row join a batch whose
            slower steps would make another one late.
    """

    is_preemptive: bool
    keeps_deadlines: bool

    def key(self, row: Row) -> tuple[float, ...]:
        """Where `row` stands in the queue, the smallest in front. It does not change while the row waits."""
        ...

    def order(self, waiting: Sequence[Row], running: Sequence[Row], now: float) -> Iterable[Row]:
        """The rows to consider, the one to run first in front. `waiting` comes sorted by `key`."""
        ...


class FCFS:
    """First come, first served; a lower `priority` goes before a higher one."""

    is_preemptive = False
    keeps_deadlines = False

    def key(self, row: Row) -> tuple[float, ...]:
        """Priority; the queue keeps the order of arrival among equals."""
        return (row.request.params.priority,)

    def order(self, waiting: Sequence[Row], running: Sequence[Row], now: float) -> Iterable[Row]:
        """Who waits, in that order; who runs stays."""
        return waiting


class EDF:
    """Earliest deadline first."""

    is_preemptive = True
    keeps_deadlines = False

    key = staticmethod(_by_deadline)

    def order(self, waiting: Sequence[Row], running: Sequence[Row], now: float) -> Iterable[Row]:
        """Everybody by `key`; among equals, who runs stays."""
        return heapq.merge(sorted(running, key=self.key), waiting, key=self.key)


class LeastSlack(EDF):
    """Least slack first: deadline, less now, less the remaining time."""

    def key(self, row: Row) -> tuple[float, ...]:
        """Priority, then the latest moment to start; it orders like the slack, as now is the same for all."""
        return row.request.params.priority, row.request.deadline_s - row.remaining_ms / 1e3


@dataclass(slots=True)
class SLO(EDF):
    """As many requests on time as can be: earliest deadline first, without those that would make others late.

    Moore and Hodgson's rule: walk the requests by deadline and add up their remaining times; whenever the sum passes a
    deadline, give up the longest request so far. For one machine no other choice keeps more of them. What was given up
    runs after the others, the shortest first. A lower `priority` goes before all of that.
    """

    cost_model: StepCostModel

    keeps_deadlines = True

    def order(self, waiting: Sequence[Row], running: Sequence[Row], now: float) -> Iterable[Row]:
        """Per priority: the kept requests by deadline, then the others by remaining time."""
        pace = self._pace(running)
        running = sorted(running, key=_by_deadline)
        start = 0
        while running or start < len(waiting):
            priority = min(_priority(rows[at]) for rows, at in ((running, 0), (waiting, start)) if at < len(rows))
            stop = bisect.bisect_right(waiting, priority, start, key=_priority)
            split = bisect.bisect_right(running, priority, key=_priority)
            equals = heapq.merge(running[:split], itertools.islice(waiting, start, stop), key=_by_deadline)
            yield from _keep_most(equals, now, pace)
            passed = itertools.chain(running[:split], itertools.islice(waiting, start, stop))
            now += pace * sum(row.remaining_ms for row in passed)
            running, start = running[split:], stop

    def _pace(self, running: Sequence[Row]) -> float:
        """Seconds of the device per millisecond of a row alone: fewer when rows share their steps."""
        costs = [row.cost for row in running if row.cost is not None and row.stage is not Stage.DECODE]
        alone_ms = sum(cost.step_ms for cost in costs)
        if not alone_ms:
            return 1e-3
        work = sum(c.tokens for c in costs), sum(c.pairs for c in costs), sum(c.sequences for c in costs)
        together_ms = self.cost_model.ms("denoise", *work)
        return 1e-3 * min(1.0, together_ms / alone_ms)


def _keep_most(rows: Iterator[Row], now: float, pace: float) -> Iterator[Row]:
    """Moore-Hodgson over requests: `rows` are sorted by deadline, the rows of one request next to each other."""
    requests = _by_request(itertools.islice(rows, MAX_PLANNED))
    total_ms = 0.0
    kept: list[tuple[float, int]] = []  # a heap of (-milliseconds, index), the longest request in front
    given_up: list[tuple[float, int]] = []
    for index, group in enumerate(requests):
        state = group[0].request
        room_s = state.metrics.deadline_s - now
        ms = longest_ms = group[0].remaining_ms
        if len(state.rows) > 1:
            times = [row.remaining_ms for row in (state.rows if state.is_gang else group)]
            ms, longest_ms = sum(times), max(times)
        if 1e-3 * longest_ms > room_s:
            given_up.append((ms, index))
            continue
        total_ms += ms
        if pace * total_ms <= room_s:
            heapq.heappush(kept, (-ms, index))
        else:
            longest, index = heapq.heappushpop(kept, (-ms, index))
            total_ms += longest
            given_up.append((-longest, index))
    for index in sorted(index for _, index in kept):
        yield from requests[index]
    yield from rows
    for _, index in sorted(given_up):
        yield from requests[index]


def _by_request(rows: Iterable[Row]) -> list[list[Row]]:
    requests: list[list[Row]] = []
    last = None
    for row in rows:
        if row.request is last:
            requests[-1].append(row)
        else:
            last = row.request
            requests.append([row])
    return requests


def make_policy(scheduler_type: str, cost_model: StepCostModel) -> Policy:
    """The policy that a config names."""
    plain: dict[str, type[Policy]] = {"edf": EDF, "fcfs": FCFS, "least_slack": LeastSlack}
    return SLO(cost_model) if scheduler_type == "slo" else plain[scheduler_type]()
