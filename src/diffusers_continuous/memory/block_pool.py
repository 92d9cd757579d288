"""Ledgers of pages. Know numbers and owners; no tensors, no devices, no scheduling.

`BlockPool` counts the pages of one place: each is free or has one owner. `PageLedger` keeps two of them, device and
host, and writes down in which order pages must move for its books to become true. Allocation and release are both
here, so the books can be checked: `check_integrity`.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..errors import ContinuousBatchingError


class BlockPoolError(ContinuousBatchingError):
    """The ledger was used wrongly, or does not add up: a fault of this package, never of a request."""


@dataclass(slots=True)
class BlockPool:
    """Pages 0 to `num_blocks` - 1. Not thread-safe: its one user locks.

    An owner's pages keep their order: `blocks_of(owner)` is its page table. Pages that were used before are used again
    first, so that memory which is only reserved stays untouched while it can.
    """

    num_blocks: int
    _num_touched: int = 0
    _free: list[int] = field(init=False, default_factory=list)
    _blocks: dict[Hashable, tuple[int, ...]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_blocks < 0:
            raise BlockPoolError(f"a pool cannot have {self.num_blocks} blocks")

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free) + self.num_blocks - self._num_touched

    @property
    def num_used(self) -> int:
        """Pages that somebody owns."""
        return self.num_blocks - self.num_free

    @property
    def owners(self) -> tuple[Any, ...]:
        """Whoever owns pages, the oldest owner first."""
        return tuple(self._blocks)

    def blocks_of(self, owner: Hashable) -> tuple[int, ...]:
        """The owner's pages in order; none for whoever owns nothing."""
        return self._blocks.get(owner, ())

    def can_allocate(self, num_blocks: int) -> bool:
        """True when so many pages are free."""
        return num_blocks <= self.num_free

    def allocate(self, num_blocks: int, owner: Hashable) -> tuple[int, ...]:
        """Give `owner`, who has none yet, so many pages.

        Raises:
            BlockPoolError: when fewer are free, or the owner has some; nothing has changed then.
        """
        if owner in self._blocks:
            raise BlockPoolError(f"{owner!r} owns {len(self._blocks[owner])} blocks already")
        if num_blocks < 1 or not self.can_allocate(num_blocks):
            raise BlockPoolError(f"{num_blocks} blocks were asked for, {self.num_free} of {self.num_blocks} are free")
        again = [self._free.pop() for _ in range(min(num_blocks, len(self._free)))]
        first = self._num_touched
        self._num_touched += num_blocks - len(again)
        blocks = (*again, *range(first, self._num_touched))
        self._blocks[owner] = blocks
        return blocks

    def free(self, owner: Hashable) -> int:
        """Take back all pages of `owner`; how many they were, 0 for whoever owns nothing."""
        blocks = self._blocks.pop(owner, ())
        self._free.extend(reversed(blocks))
        return len(blocks)

    def check_integrity(self) -> None:
        """Add up the books.

        Raises:
            BlockPoolError: prints them when a page is missing, owned twice, or owned and free.
        """
        owned = [block for blocks in self._blocks.values() for block in blocks]
        is_within = self._num_touched <= self.num_blocks
        if not is_within or sorted(owned + self._free) != list(range(self._num_touched)):
            books = {owner: len(blocks) for owner, blocks in self._blocks.items()}
            raise BlockPoolError(f"{self.num_blocks} blocks, {self.num_free} free, owned: {books}: does not add up")


class Where(enum.Enum):
    """Where an owner's tensors lie."""

    DEVICE = "device"
    HOST = "host"
    NOWHERE = "nowhere"  # in no pages: they are the owner's own, or gone


@dataclass(frozen=True, slots=True)
class Move:
    """What is to be done with the pages of one owner: where they go, and which pages they are there."""

    owner: Any
    where: Where
    blocks: tuple[int, ...] = ()


@dataclass(slots=True)
class PageLedger:
    """Who owns pages on the device and who in host memory. Not thread-safe: its one user locks.

    The books change at once, the pages when somebody carries out `take_moves()`, in that order and before anything
    else: pages that were given back here may still hold, and be read by, what lay there until then.
    """

    device: BlockPool = field(default_factory=lambda: BlockPool(0))
    host: BlockPool = field(default_factory=lambda: BlockPool(0))
    _moves: list[Move] = field(init=False, default_factory=list)

    def is_on_device(self, owner: Hashable) -> bool:
        """True when the owner has pages on the device."""
        return bool(self.device.blocks_of(owner))

    def has_pages(self, owner: Hashable) -> bool:
        """True when the owner has pages, wherever they are."""
        return self.is_on_device(owner) or bool(self.host.blocks_of(owner))

    def bring_in(self, owner: Hashable, num_blocks: int) -> None:
        """Give the owner its pages on the device, whether it comes for the first time or from host memory.

        Raises:
            BlockPoolError: when the device has no room; nothing has changed then.
        """
        self._moves.append(Move(owner, Where.DEVICE, self.device.allocate(num_blocks, owner)))
        self.host.free(owner)

    def send_out(self, owner: Hashable) -> None:
        """Give the owner pages in host memory for those it has on the device.

        Raises:
            BlockPoolError: when host memory has no room; nothing has changed then.
        """
        self._moves.append(Move(owner, Where.HOST, self.host.allocate(len(self.device.blocks_of(owner)), owner)))
        self.device.free(owner)

    def release(self, owner: Hashable) -> None:
        """Take back all that the owner has, wherever it lies; nothing happens for whoever has nothing."""
        if self.device.free(owner) + self.host.free(owner):
            self._moves.append(Move(owner, Where.NOWHERE))

    def release_all(self) -> None:
        """Take back everything from everybody."""
        for owner in (*self.device.owners, *self.host.owners):
            self.release(owner)

    def usage(self) -> dict[str, int]:
        """What `EngineStats` shows of it."""
        return {
            "num_blocks": self.device.num_blocks,
            "num_used_blocks": self.device.num_used,
            "num_swapped_out_rows": len(self.host.owners),
        }

    def take_moves(self) -> tuple[Move, ...]:
        """What has to be done since the last time, in order."""
        moves, self._moves = tuple(self._moves), []
        return moves

    def could_leave(self, leavers: Iterable[Hashable], num_blocks: float) -> tuple[list[Any], int]:
        """Those of `leavers`, the first ones first, that host memory has room for, until they free so many pages.

        Hands back who they are and how many pages of the device they free, which may be too few.
        """
        chosen: list[Any] = []
        num_freed, room = 0, self.host.num_free
        for owner in leavers:
            if num_freed >= num_blocks or not room:
                break
            size = len(self.device.blocks_of(owner))
            if size <= room:
                chosen.append(owner)
                num_freed, room = num_freed + size, room - size
        return chosen, num_freed

    def check_integrity(self) -> None:
        """Both books add up, and nobody is in two places.

        Raises:
            BlockPoolError: says what does not.
        """
        self.device.check_integrity()
        self.host.check_integrity()
        twice = set(self.device.owners) & set(self.host.owners)
        if twice:
            raise BlockPoolError(f"in both places: {sorted(map(str, twice))}")
