"""Which rows fit together in one step: by places and tokens, by what sharing saves and whom it makes late, by pages.

Rows and pages stay as they are, but for `PageRoom.commit`, which writes the moves into the ledger of pages. Knows no
policy and no order of rows; talks of numbers, never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field

from .config import ContinuousBatchingConfig
from .cost_model import RowCost, StepCostModel
from .memory.block_pool import PageLedger
from .request import Row, Stage

# A row joins others only where its share of their step is below this part of its step alone: where sharing saves
# nothing, one after the other is better, since it leaves the choice open.
MAX_SHARE = 0.8


@dataclass(slots=True)
class StepBatch:
    """Rows that are to share their steps.

    Args:
        is_guarded: True where rows join only if that saves time and makes nobody late who would have been on time.
        now: Seconds on the engine's clock.

    Attributes:
        leaders: Who is in, each with its gang.
        num_tokens: What `max_batch_tokens` limits.
        tokens, pairs, sequences: What the cost model counts in a step of theirs, which takes `step_ms`.
        allowed_ms: How long a step may take before somebody who is on time would be late.
    """

    config: ContinuousBatchingConfig
    cost_model: StepCostModel
    is_guarded: bool
    now: float
    leaders: dict[Row, None] = field(default_factory=dict)
    num_rows: int = 0
    num_tokens: int = 0
    tokens: float = 0.0
    pairs: float = 0.0
    sequences: float = 0.0
    step_ms: float = 0.0
    allowed_ms: float = math.inf

    @property
    def is_full(self) -> bool:
        """True when no row can join any more."""
        return self.num_rows >= self.config.max_requests_per_batch or self.num_tokens >= self.config.max_batch_tokens

    def take(self, leader: Row) -> bool:
        """Let the row and its gang join; False, and no effect, when there is no room. The first one always fits."""
        gang = leader.gang
        num_rows, num_tokens = self.num_rows, self.num_tokens
        tokens, pairs, sequences = self.tokens, self.pairs, self.sequences
        for row in gang:
            cost = known_cost(row)
            num_rows += 1
            num_tokens += row.num_tokens
            tokens += cost.tokens
            pairs += cost.pairs
            sequences += cost.sequences
        step_ms = self.cost_model.ms("denoise", tokens, pairs, sequences)
        if self.leaders:
            if num_rows > self.config.max_requests_per_batch or num_tokens > self.config.max_batch_tokens:
                return False
            share_ms = MAX_SHARE * sum(known_cost(row).step_ms for row in gang)
            if self.is_guarded and (step_ms > self.allowed_ms or step_ms - self.step_ms > share_ms):
                return False
        self.leaders[leader] = None
        self.num_rows, self.num_tokens = num_rows, num_tokens
        self.tokens, self.pairs, self.sequences, self.step_ms = tokens, pairs, sequences, step_ms
        allowed_ms = self._allowed_ms(leader)
        if allowed_ms >= step_ms:  # else it is late, and slower steps take nothing from it
            self.allowed_ms = min(self.allowed_ms, allowed_ms)
        return True

    def _allowed_ms(self, row: Row) -> float:
        """How long its steps may take for it to be on time."""
        spare_ms = 1e3 * (row.latest_start_s - self.now)
        return known_cost(row).step_ms + spare_ms / max(1, row.num_steps - row.step)


@dataclass(slots=True)
class PageRoom:
    """Pages for rows that are to run together, found by sending others to host memory. Moves nothing before `commit`.

    Args:
        find_leavers: Who may be sent there, the first to go in front; asked only when there are too few free pages.
    """

    memory: PageLedger
    find_leavers: Callable[[], list[Row]]
    taken: dict[Row, None] = field(default_factory=dict)
    num_missing: int = 0
    _leavers: list[Row] | None = None

    def could_hold(self, leader: Row) -> bool:
        """True when the row and its gang, and nobody else, could be on the device."""
        gang = pages_together(leader)
        num_missing = self._missing(gang)
        return not num_missing or self._finds(num_missing, gang)

    def could_take(self, gang: Sequence[Row]) -> bool:
        """True when there are pages for these rows beside those that were taken."""
        num_missing = self.num_missing + self._missing(gang)
        return not num_missing or self._finds(num_missing, gang, self.taken)

    def take(self, gang: Sequence[Row]) -> bool:
        """Let these rows have pages; False, and no effect, when there are not enough."""
        if not self.could_take(gang):
            return False
        self.add(gang)
        return True

    def add(self, gang: Sequence[Row]) -> None:
        """Let these rows have pages, which `could_take` has found."""
        self.num_missing += self._missing(gang)
        for row in gang:
            self.taken[row] = None

    def commit(self) -> None:
        """Send out whoever makes way, and give those that were taken their pages."""
        shortage = self.num_missing - self.memory.device.num_free
        for row in self._making_way(shortage, self.taken)[0]:
            self.memory.send_out(row)
        for row in self.taken:
            if self._missing((row,)):
                self.memory.bring_in(row, row.num_blocks)
        self.num_missing, self._leavers = 0, None

    def _missing(self, rows: Iterable[Row]) -> int:
        num_missing = 0
        for row in rows:
            if row.num_blocks and not self.memory.is_on_device(row):
                num_missing += row.num_blocks
        return num_missing

    def _finds(self, num_missing: int, *staying: Container[Row]) -> bool:
        shortage = num_missing - self.memory.device.num_free
        return shortage <= 0 or self._making_way(shortage, *staying)[1] >= shortage

    def _making_way(self, shortage: int, *staying: Container[Row]) -> tuple[list[Row], int]:
        if shortage <= 0:
            return [], 0
        if self._leavers is None:
            self._leavers = self.find_leavers()
        leavers = (row for row in self._leavers if not any(row in rows for rows in staying))
        return self.memory.could_leave(leavers, shortage)


def pages_together(leader: Row) -> tuple[Row, ...]:
    """The rows that need their pages together with `leader`: decoding goes row by row."""
    return (leader,) if leader.stage is Stage.DECODE else leader.gang


def known_cost(row: Row) -> RowCost:
    """The cost of a row that was added to a scheduler."""
    assert row.cost is not None
    return row.cost
