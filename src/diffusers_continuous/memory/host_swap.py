"""`HostSwap`: the pages themselves, on the device and in host memory, and the way between them.

An owner's tensors lie one behind the other in its pages, each from a page's start. Knows bytes, page tables and
devices; decides nothing: who gets pages, and who is swapped, is settled in the ledger.

    pages of the pool     | 5 | 2 | 9 | 4 | 7 |       a page table: (5, 2, 9, 4, 7)
    tensors in them       | latents   | text  |       `latents` at page 0 of the table, `text` at page 3
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..devices import is_pinning_useful, synchronize
from .block_pool import BlockPoolError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Span:
    """Where in its owner's page table a tensor lies, and what it is."""

    first: int
    num_blocks: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        """The page behind its last."""
        return self.first + self.num_blocks

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor itself."""
        return math.prod(self.shape) * self.dtype.itemsize


class PagedTensors:
    """One owner's tensors by name: its own until it has pages, then in these, wherever they lie.

    They can be read and written at any time from any thread; from host memory that is slow, but right.

    Attributes:
        is_out: True while the pages lie in host memory.
        num_moves: How often the page table has changed.
    """

    def __init__(self, swap: HostSwap) -> None:
        self.is_out = False
        self.num_moves = 0
        self._swap = swap
        self._own: dict[str, torch.Tensor] = {}
        self._spans: dict[str, Span] = {}
        self._blocks: tuple[int, ...] = ()
        self._known: dict[tuple[str, str], torch.Tensor | None] = {}  # worked out for this page table

    @property
    def spans(self) -> dict[str, Span]:
        """Which tensors lie where in the page table."""
        return dict(self._spans)

    def __contains__(self, name: str) -> bool:
        """True when there is a tensor of that name."""
        return name in self._own or name in self._spans

    def get(self, name: str) -> torch.Tensor:
        """The tensor of that name: a copy of what lies in pages, on the device.

        Raises:
            BlockPoolError: when there is none.
        """
        with self._swap.lock:
            if name in self._own:
                return self._own[name]
            if name not in self._spans:
                raise BlockPoolError(f"there is no {name} among {[*self._own, *self._spans]}")
            view = self._view(name)
            if view is not None:
                return view.to(self._swap.device, copy=True)
            span = self._spans[name]
            data = self._swap.pages(self.is_out).index_select(0, self._page_index(name))
            tensor = data.view(-1)[: span.num_bytes].view(span.dtype).view(span.shape)
            return tensor.to(self._swap.device)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a tensor under that name, in place of the one that had it, which must have taken as many pages.

        Raises:
            BlockPoolError: when it does not fit into the owner's pages.
        """
        tensor = tensor.detach()  # or the pool would get its history
        with self._swap.lock:
            if not self._blocks:
                self._own[name] = tensor
                return
            span = self._span_for(name, tensor)
            if self._spans.get(name) != span:
                self._spans[name] = span
                self._known.clear()
            view = self._view(name)
            if view is not None:
                view.copy_(tensor)
                return
            pages = self._swap.pages(self.is_out)
            pages.index_copy_(0, self._page_index(name), self._as_pages(tensor, span, pages.device))

    def drop(self, *names: str) -> None:
        """Forget tensors, so that others may take their pages.

        Raises:
            BlockPoolError: when others lie behind them.
        """
        with self._swap.lock:
            for name in names:
                self._own.pop(name, None)
            gone = [name for name in names if name in self._spans]
            if set(list(self._spans)[len(self._spans) - len(gone) :]) != set(gone):
                raise BlockPoolError(f"{gone} are not the last of {list(self._spans)}")
            for name in gone:
                del self._spans[name]
            self._known.clear()

    @property
    def _num_used(self) -> int:
        """Pages up to the last one that holds something."""
        return max((span.stop for span in self._spans.values()), default=0)

    def _span_for(self, name: str, tensor: torch.Tensor) -> Span:
        num_blocks = self._swap.num_blocks_for(tensor.numel() * tensor.element_size())
        old = self._spans.get(name)
        first = self._num_used if old is None else old.first
        is_moved = old is not None and old.num_blocks != num_blocks
        if is_moved or first + num_blocks > len(self._blocks):
            raise BlockPoolError(f"{name} takes {num_blocks} blocks from {first} on; there are {len(self._blocks)}")
        return Span(first, num_blocks, tuple(tensor.shape), tensor.dtype)

    def _view(self, name: str) -> torch.Tensor | None:
        """The tensor itself, where its pages happen to follow one another; usual, and much the fastest."""
        if ("view", name) not in self._known:
            span = self._spans[name]
            blocks = self._blocks[span.first : span.stop]
            start = blocks[0] * self._swap.page_size if blocks else 0
            is_one_piece = blocks == tuple(range(blocks[0], blocks[0] + len(blocks))) if blocks else True
            with torch.inference_mode(False):  # who looks first may be in inference mode, who writes later is not
                flat = self._swap.pages(self.is_out).view(-1)[start : start + span.num_bytes]
                self._known["view", name] = flat.view(span.dtype).view(span.shape) if is_one_piece else None
        return self._known["view", name]

    def _page_index(self, name: str) -> torch.Tensor:
        """(pages,) where they lie in the pool; made when it is used, so that moving takes no memory of the device."""
        index = self._known.get(("pages", name))
        if index is None:
            span = self._spans[name]
            blocks, device = self._blocks[span.first : span.stop], self._swap.pages(self.is_out).device
            index = self._known["pages", name] = torch.tensor(blocks, dtype=torch.int64, device=device)
        return index

    def _as_pages(self, tensor: torch.Tensor, span: Span, device: torch.device) -> torch.Tensor:
        """(pages, bytes of a page), the end of the last one filled with whatever was there."""
        data = tensor.to(device).contiguous().view(-1).view(torch.uint8)
        room = span.num_blocks * self._swap.page_size
        if len(data) < room:
            padded = torch.empty(room, dtype=torch.uint8, device=device)
            padded[: len(data)].copy_(data)
            data = padded
        return data.view(span.num_blocks, self._swap.page_size)

    # ------------------------------------------------------------------ what the ledger decided

    def enter(self, blocks: tuple[int, ...]) -> None:
        """Take pages on the device, and put everything there."""
        with self._swap.lock:
            self._take(blocks)
            own, self._own = self._own, {}
            for name, tensor in own.items():
                self.put(name, tensor)

    def swap_out(self, blocks: tuple[int, ...]) -> int:
        """Move what lies in the pages to those in host memory; how many bytes that was."""
        return self._move(blocks, is_out=True)

    def swap_in(self, blocks: tuple[int, ...]) -> int:
        """Move it back to pages on the device; how many bytes that was."""
        return self._move(blocks, is_out=False)

    def leave(self) -> None:
        """Give the pages back; the tensors are the owner's own again."""
        with self._swap.lock:
            own = {name: self.get(name) for name in (*self._own, *self._spans)}  # it may be tried twice
            self.forget()
            self._own = own

    def forget(self) -> None:
        """Give the pages back, and everything with them."""
        with self._swap.lock:
            self._own.clear()
            self._spans.clear()
            self._take(())
            self.is_out = False

    def _move(self, blocks: tuple[int, ...], is_out: bool) -> int:
        """Copy the pages that hold something. Nothing has changed when that fails."""
        with self._swap.lock:
            used = self._blocks[: self._num_used]
            self._swap.copy(used, self.is_out, blocks, is_out)
            self._take(blocks)
            self.is_out = is_out
            return len(used) * self._swap.page_size

    def _take(self, blocks: tuple[int, ...]) -> None:
        self._blocks = blocks
        self._known.clear()
        self.num_moves += 1

    def token_index(self, name: str) -> torch.Tensor | None:
        """(tokens,) where the tensor's rows lie in the pool cut into pieces of their size; None if it cannot be cut."""
        span = self._spans.get(name)
        if span is None or self.is_out or len(span.shape) != 2:
            return None
        token_bytes = span.shape[1] * span.dtype.itemsize
        if self._swap.page_size % token_bytes:
            return None
        if ("tokens", name) not in self._known:
            per_page = self._swap.page_size // token_bytes
            starts = np.array(self._blocks[span.first : span.stop], dtype=np.int64) * per_page
            index = (starts[:, None] + np.arange(per_page)).reshape(-1)[: span.shape[0]]
            self._known["tokens", name] = torch.from_numpy(index).to(self._swap.device)
        return self._known["tokens", name]


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """Reads tensors of one kind out of many owners' pages at once, one behind the other.

    `tokens` is the pool cut into (pieces, channels), `index` says which of them.
    """

    tokens: torch.Tensor
    index: torch.Tensor

    def __call__(self) -> torch.Tensor:
        """What lies there now: (tokens of all owners, channels)."""
        return self.tokens.index_select(0, self.index)


class HostSwap:
    """Pages of one size on a device, and pages in host memory for owners that are swapped out.

    Args:
        page_size: Bytes of a page, a multiple of 16, so that every dtype fits.
        device: Where the pool lies. Host pages are pinned where that helps it and the system allows.
        num_blocks: Pages on the device. A CPU's take room only once they are used.
        num_host_blocks: Pages in host memory; made when first needed.

    Attributes:
        lock: Held while pages are read, written or moved.
    """

    def __init__(self, page_size: int, device: torch.device, num_blocks: int, num_host_blocks: int) -> None:
        if page_size < 16 or page_size % 16:
            raise BlockPoolError(f"page_size={page_size} must be a positive multiple of 16 bytes")
        self.page_size = page_size
        self.device = device
        self.num_blocks, self.num_host_blocks = num_blocks, num_host_blocks
        self.lock = threading.RLock()
        self._pages = _empty(num_blocks, page_size, device)
        self._host_pages: torch.Tensor | None = None

    def num_blocks_for(self, *num_bytes: int) -> int:
        """Pages that tensors of so many bytes take, each from a page's start."""
        return sum(math.ceil(each / self.page_size) for each in num_bytes)

    def pages(self, is_out: bool) -> torch.Tensor:
        """(pages, bytes of a page) on the device, or in host memory."""
        if not is_out:
            return self._pages
        if self._host_pages is None:
            self._host_pages = _host_memory(self.num_host_blocks, self.page_size, is_pinning_useful(self.device))
        return self._host_pages

    def copy(self, blocks: Sequence[int], is_out: bool, new_blocks: Sequence[int], is_new_out: bool) -> None:
        """Copy pages to the first of `new_blocks`, straight from place to place, as many at once as lie together."""
        here, there = self.pages(is_out), self.pages(is_new_out)
        for old, new in _runs(blocks, new_blocks):
            there[new].copy_(here[old], non_blocking=True)
        synchronize(self.device)

    def close(self) -> None:
        """Give all memory back; what lay in pages is gone."""
        self._pages, self._host_pages = self._pages.new_empty(0), None

    def gather(self, name: str, tensors: Sequence[PagedTensors | None]) -> Gather | None:
        """A way to read all of them at once; None where some are not in pages here, or are of another kind."""
        indices = [None if each is None else each.token_index(name) for each in tensors]
        kinds = {(span.shape[1], span.dtype) for each in tensors if each and (span := each.spans.get(name))}
        found = [index for index in indices if index is not None]
        if len(found) < len(indices) or len(kinds) != 1:
            return None
        ((channels, dtype),) = kinds
        return Gather(self._pages.view(dtype).view(-1, channels), torch.cat(found))


def _runs(blocks: Sequence[int], new_blocks: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Pages that follow one another both where they are and where they go."""
    start = 0
    for i in range(1, len(blocks) + 1):
        is_next = i < len(blocks) and (blocks[i], new_blocks[i]) == (blocks[i - 1] + 1, new_blocks[i - 1] + 1)
        if not is_next:
            yield slice(blocks[start], blocks[i - 1] + 1), slice(new_blocks[start], new_blocks[i - 1] + 1)
            start = i


# In inference mode, which callers may be in, tensors are made that nobody can write to afterwards outside of it.
@torch.inference_mode(False)
def _empty(num_blocks: int, page_size: int, device: torch.device) -> torch.Tensor:
    """Memory that nobody has touched, even where torch was told to fill new tensors."""
    storage = torch.UntypedStorage(num_blocks * page_size, device=device)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage).view(num_blocks, page_size)


@torch.inference_mode(False)
def _host_memory(num_blocks: int, page_size: int, is_pinned: bool) -> torch.Tensor:
    """Pinned if possible: that is faster, but a system may have too little of it."""
    if is_pinned:
        try:
            return torch.empty(num_blocks, page_size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            logger.warning("no pinned host memory for %d pages, so swapping is slower: %s", num_blocks, error)
    return _empty(num_blocks, page_size, torch.device("cpu"))
