"""`BlockPool`: the ledger of a fixed number of pages. Knows numbers and owners; no tensors, no devices, no scheduling.

A page is free or has one owner. Allocation and release are both here, so the books can be checked: `check_integrity`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from ..errors import ContinuousBatchingError


class BlockPoolError(ContinuousBatchingError):
    """The ledger was used wrongly, or does not add up: a fault of this package, never of a request."""


@dataclass(slots=True)
class BlockPool:
    """Pages 0 to `num_blocks` - 1. Not thread-safe: its one user locks.

    An owner's pages keep their order: `blocks_of(owner)` is its page table.
    """

    num_blocks: int
    _free: list[int] = field(init=False)
    _blocks: dict[Hashable, tuple[int, ...]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_blocks < 0:
            raise BlockPoolError(f"a pool cannot have {self.num_blocks} blocks")
        self._free = list(range(self.num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that somebody owns."""
        return self.num_blocks - self.num_free

    @property
    def owners(self) -> tuple[Hashable, ...]:
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
        blocks = tuple(self._free.pop() for _ in range(num_blocks))
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
        if sorted(owned + self._free) != list(range(self.num_blocks)):
            books = {owner: len(blocks) for owner, blocks in self._blocks.items()}
            raise BlockPoolError(f"{self.num_blocks} blocks, {self.num_free} free, owned: {books}: does not add up")
