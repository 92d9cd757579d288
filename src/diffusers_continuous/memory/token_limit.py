"""`TokenLimit`: how much is done at one time, learned from running out of memory. Knows numbers only; no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Pieces of work without a shortage after which a limit rises, and by which part of the most: additive increase, which
# with halving (what a shortage does) is how TCP finds a capacity that nobody tells and that others share. Where the
# shortage is there to stay, at most one piece in so many runs into it.
CALM_STEPS = 128
RISE = 1 / 8


@dataclass(slots=True)
class TokenLimit:
    """Most tokens of one piece of work: at first `most`, fewer after a shortage, then slowly more again.

    Counts pieces of work, not time: while nothing runs, nothing is learned.

    Attributes:
        most: It never rises above.
        tokens: The limit now.
    """

    most: int
    tokens: int = field(init=False)
    _num_calm_steps: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.tokens = self.most

    @property
    def is_lowered(self) -> bool:
        """True from a shortage until as much as before is allowed again."""
        return self.tokens < self.most

    def lower(self, num_tokens: int) -> None:
        """There was no memory for more than so many."""
        self.tokens = min(self.tokens, num_tokens)
        self._num_calm_steps = 0

    def count_step(self) -> None:
        """There was memory for a piece of work at once."""
        self._num_calm_steps += 1
        if self._num_calm_steps >= CALM_STEPS:
            self.tokens = min(self.most, self.tokens + math.ceil(RISE * self.most))
            self._num_calm_steps = 0
