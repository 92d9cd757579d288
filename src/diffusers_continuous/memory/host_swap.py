"""`HostSwap`: the pages themselves, on the device and in host memory, and the way between them.

A row's tensors lie one behind the other in its pages, each from a page's start. Knows bytes, page tables and devices;
decides nothing: who is swapped, and when, is the scheduler's business.

    pages of the pool     | 5 | 2 | 9 | 4 | 7 |       a row's page table: (5, 2, 9, 4, 7)
    tensors in them       | latents   | text  |       `latents` at page 0 of the table, `text` at page 3
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch

from .block_pool import BlockPool, BlockPoolError


@dataclass(frozen=True, slots=True)
class Place:
    """Where in its owner's page table a tensor lies."""

    first: int
    num_blocks: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class HostSwap:
    """Pages of one size on a device, and pages in host memory for owners that are swapped out.

    Args:
        device: Where the pool lies. Host pages are pinned unless it is the CPU.
        page_size: Bytes of a page, a multiple of 16, so that every dtype fits.
        num_blocks: Pages on the device.
        num_host_blocks: Pages in host memory; they take room only once they are used.

    Attributes:
        pool, host_pool: The two ledgers.
        swapped_out_bytes, swapped_in_bytes: What has moved so far.
    """

    def __init__(self, device: torch.device, page_size: int, num_blocks: int, num_host_blocks: int) -> None:
        if page_size < 16 or page_size % 16:
            raise BlockPoolError(f"page_size={page_size} must be a positive multiple of 16 bytes")
        self.page_size = page_size
        self.pool, self.host_pool = BlockPool(num_blocks), BlockPool(num_host_blocks)
        self.swapped_out_bytes = self.swapped_in_bytes = 0
        self._pages = torch.empty(num_blocks, page_size, dtype=torch.uint8, device=device)
        self._host_pages: torch.Tensor | None = None
        self._places: dict[Hashable, dict[str, Place]] = {}

    def num_blocks_for(self, *num_bytes: int) -> int:
        """Pages that tensors of so many bytes take, each from a page's start."""
        return sum(math.ceil(each / self.page_size) for each in num_bytes)

    # ------------------------------------------------------------------ tensors in pages

    def put(self, owner: Hashable, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor into the owner's pages; over the one of that name, which must have been as large.

        Raises:
            BlockPoolError: when the owner has no room for it, or is swapped out.
        """
        places = self._places.setdefault(owner, {})
        num_blocks = self.num_blocks_for(tensor.numel() * tensor.element_size())
        first = places[name].first if name in places else sum(place.num_blocks for place in places.values())
        table = self.pool.blocks_of(owner)
        is_moved = name in places and places[name].num_blocks != num_blocks
        if is_moved or first + num_blocks > len(table):
            raise BlockPoolError(f"{name} takes {num_blocks} blocks from {first} on, {owner!r} has {len(table)}")
        places[name] = Place(first, num_blocks, tuple(tensor.shape), tensor.dtype)
        pages = self._index(table[first : first + num_blocks])
        flat = torch.empty(num_blocks * self.page_size, dtype=torch.uint8, device=self._pages.device)
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        flat[: len(data)].copy_(data)
        self._pages.index_copy_(0, pages, flat.view(num_blocks, self.page_size))

    def get(self, owner: Hashable, name: str) -> torch.Tensor:
        """A copy of the tensor that lies in the owner's pages under that name.

        Raises:
            BlockPoolError: when there is none, or the owner is swapped out.
        """
        place = self._places.get(owner, {}).get(name)
        table = self.pool.blocks_of(owner)
        if place is None or not table:
            raise BlockPoolError(f"{owner!r} has no {name} on the device")
        pages = self._pages.index_select(0, self._index(table[place.first : place.first + place.num_blocks]))
        num_bytes = math.prod(place.shape) * place.dtype.itemsize
        return pages.view(-1)[:num_bytes].view(place.dtype).view(place.shape)

    def drop(self, owner: Hashable, name: str) -> None:
        """Forget the last of the owner's tensors, so that another may take its pages."""
        places = self._places[owner]
        if list(places)[-1] != name:
            raise BlockPoolError(f"{name} is not the last of {list(places)}")
        del places[name]

    def release(self, owner: Hashable) -> None:
        """Take back all that the owner has, wherever it lies; nothing happens for whoever has nothing."""
        self._places.pop(owner, None)
        self.pool.free(owner)
        self.host_pool.free(owner)

    # ------------------------------------------------------------------ between device and host

    def is_out(self, owner: Hashable) -> bool:
        """True while the owner's pages lie in host memory."""
        return bool(self.host_pool.blocks_of(owner))

    def can_swap_out(self, owner: Hashable) -> bool:
        """True when host memory has room for the owner's pages."""
        return self.host_pool.can_allocate(len(self.pool.blocks_of(owner)))

    def swap_out(self, owner: Hashable) -> None:
        """Move the owner's pages to host memory, bit by bit the same.

        Raises:
            BlockPoolError: when it has none on the device, or host memory has no room; nothing has changed then.
        """
        blocks = self.pool.blocks_of(owner)
        if not blocks:
            raise BlockPoolError(f"{owner!r} has nothing on the device to swap out")
        host = self.host_pool.allocate(len(blocks), owner)
        content = self._pages.index_select(0, self._index(blocks)).cpu()
        self._host().index_copy_(0, torch.tensor(host), content)
        self.pool.free(owner)
        self.swapped_out_bytes += content.numel()

    def swap_in(self, owner: Hashable) -> None:
        """Move the owner's pages back to the device.

        Raises:
            BlockPoolError: when it is not swapped out, or the device has no room; nothing has changed then.
        """
        host = self.host_pool.blocks_of(owner)
        if not host:
            raise BlockPoolError(f"{owner!r} is not swapped out")
        blocks = self.pool.allocate(len(host), owner)
        content = self._host().index_select(0, torch.tensor(host))
        self._pages.index_copy_(0, self._index(blocks), content.to(self._pages.device))
        self.host_pool.free(owner)
        self.swapped_in_bytes += content.numel()

    # ------------------------------------------------------------------ books

    @property
    def places(self) -> Mapping[Hashable, Mapping[str, Place]]:
        """Which tensors lie where, per owner."""
        return self._places

    def check_integrity(self) -> None:
        """Both ledgers add up, nobody is in two places, and every tensor lies inside its owner's pages.

        Raises:
            BlockPoolError: says what does not.
        """
        self.pool.check_integrity()
        self.host_pool.check_integrity()
        twice = set(self.pool.owners) & set(self.host_pool.owners)
        if twice:
            raise BlockPoolError(f"in both places: {sorted(map(str, twice))}")
        for owner, places in self._places.items():
            table = self.pool.blocks_of(owner) or self.host_pool.blocks_of(owner)
            if sum(place.num_blocks for place in places.values()) > len(table):
                raise BlockPoolError(f"{owner!r} has more in its pages than the {len(table)} it owns")

    def _index(self, blocks: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self._pages.device)

    def _host(self) -> torch.Tensor:
        if self._host_pages is None:
            is_pinned = self._pages.device.type != "cpu"
            shape = (self.host_pool.num_blocks, self.page_size)
            self._host_pages = torch.empty(shape, dtype=torch.uint8, pin_memory=is_pinned)
        return self._host_pages
