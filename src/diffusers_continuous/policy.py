"""In which order waiting rows are considered. Knows numbers only: no torch, no device, no batch.

A policy is one small object with one method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .request import Row


class Policy(Protocol):
    """Orders rows; the scheduler takes them in that order while they fit."""

    def order(self, waiting: Sequence[Row], running: Sequence[Row], now: float) -> list[Row]:
        """Hand back `waiting`, the row to run first in front. `now` is in seconds on the engine's clock."""
        ...


class FCFS:
    """First come, first served; a lower `priority` goes before a higher one."""

    def order(self, waiting: Sequence[Row], running: Sequence[Row], now: float) -> list[Row]:
        """Order by priority; Python's sort is stable, so arrival decides among equals."""
        return sorted(waiting, key=_priority)


def _priority(row: Row) -> int:
    return row.request.params.priority


POLICIES: dict[str, type[Policy]] = {"fcfs": FCFS}
