"""What happens to a row when its pages move: its tensors go into them, and what it keeps beside them goes along.

Knows rows and their tensors; who moves, and where to, is settled in the ledger.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from ..devices import is_host
from ..errors import EngineStoppedError
from ..request import Row, Stage, TextEmbeds
from .block_pool import Move, Where
from .budget import is_out_of_memory
from .host_swap import HostSwap, PagedTensors

TEXTS = ("text", "negative_text")


class PagedText(TextEmbeds):
    """A prompt's tokens in their row's pages."""

    __slots__ = ("_name", "_num_tokens", "_pages")
    _name: str
    _num_tokens: int
    _pages: PagedTensors

    def __init__(self, pages: PagedTensors, name: str, text: TextEmbeds) -> None:
        values = {"width": text.width, "positions": text.positions, "_num_tokens": text.num_tokens}
        for field, value in {**values, "_pages": pages, "_name": name}.items():
            object.__setattr__(self, field, value)

    @property
    def embeds(self) -> torch.Tensor:
        """(tokens, joint_attention_dim); a copy, since the pages may be others' while somebody still reads."""
        return self._pages.get(self._name)

    @property
    def num_tokens(self) -> int:
        """Number of valid tokens."""
        return self._num_tokens


class RowMover:
    """Carries out moves of rows.

    Args:
        swap: Their pages.
        prepare: Called with a row before it gets pages for the first time.
        make_room: Frees what it can of the device's memory, before a move that ran out of it is tried again.

    Attributes:
        swapped_out_bytes, swapped_in_bytes: What has moved so far, with what goes along beside the pages.
        waiting: Rows that found no memory to move with all they have, and how they should have. Their pages have moved,
            which takes none; what they keep beside them, or all of a newcomer, is still where it was, and may stay.
        lost: Rows whose move failed, and why. They have nothing in pages any more and cannot go on.
    """

    def __init__(self, swap: HostSwap, prepare: Callable[[Row], None], make_room: Callable[[], None]) -> None:
        self.swap = swap
        self.swapped_out_bytes = self.swapped_in_bytes = 0
        self.waiting: dict[Row, Move] = {}
        self.lost: dict[Row, Exception] = {}
        self._prepare = prepare
        self._make_room = make_room
        self._away: dict[Row, list[torch.Tensor]] = {}  # what went along, as it lies in host memory now

    def carry_out(self, moves: Sequence[Move]) -> None:
        """Do what the ledger has written down, in its order.

        A row that only wants for memory is `waiting` if it can, one that cannot be moved is `lost`, and they alone.
        """
        for move in moves:
            try:
                self._try_twice(move)
            except EngineStoppedError:
                raise
            except Exception as error:
                if is_out_of_memory(error) and _have_pages_moved(move):
                    self.waiting[move.owner] = move
                else:
                    self._lose(move.owner, error)

    def give_up(self, rows: Iterable[Row]) -> None:
        """Those of the rows that are `waiting` are `lost`."""
        for row in rows:
            if self.waiting.pop(row, None) is not None:
                self._lose(row, torch.OutOfMemoryError("no memory for what it keeps beside its pages"))

    def _try_twice(self, move: Move) -> None:
        """Carry it out; from where it got to, with more room, where there was no memory for it.

        A row that is `waiting` comes with every step, and has what others give back: for it nothing more is freed.
        """
        has_waited = self.waiting.get(move.owner) is move
        try:
            self._carry_out(move)
            return
        except Exception as error:
            if has_waited or not is_out_of_memory(error):
                raise
        self._make_room()
        self._carry_out(move)

    def _carry_out(self, move: Move) -> None:
        self.waiting.pop(move.owner, None)
        if move.where is Where.NOWHERE:
            self._leave(move.owner)
        elif move.owner not in self.lost:
            step = self._bring_in if move.where is Where.DEVICE else self._send_out
            step(move.owner, move.blocks)

    def _lose(self, row: Row, error: Exception) -> None:
        """By the books its pages are elsewhere, so those it has may be others' from now on."""
        self.lost[row] = error
        self._away.pop(row, None)
        if row.pages is not None:
            row.pages.forget()

    def _bring_in(self, row: Row, blocks: tuple[int, ...]) -> None:
        if row.pages is not None:
            if row.pages.is_out:
                self.swapped_in_bytes += row.pages.swap_in(blocks)
            self._bring_along(row)
            return
        self._prepare(row)
        pages = PagedTensors(self.swap)
        pages.put("latents", row.latents)
        pages.enter(blocks)
        row.pages = pages
        del vars(row)["latents"]

    def _send_out(self, row: Row, blocks: tuple[int, ...]) -> None:
        if row.pages is None:
            return  # it never came to have any
        row.drop_caches()
        if not row.pages.is_out:
            self.swapped_out_bytes += row.pages.swap_out(blocks)
        self._take_all_along(row)

    def _take_all_along(self, row: Row) -> None:
        """Everything or, without memory for it, nothing: a row that waits would gather copies with every try."""
        away, num_bytes = self._away.setdefault(row, []), self.swapped_out_bytes
        num_away = len(away)
        taken: dict[int, torch.Tensor] = {}

        def take(tensor: torch.Tensor) -> torch.Tensor:
            """The tensor itself; the copy that takes its place is in `taken`."""
            if id(tensor) not in taken:
                taken[id(tensor)] = self._take_along(row, tensor)
            return tensor

        try:
            replace_tensors(row, take)
        except BaseException:
            del away[num_away:]
            self.swapped_out_bytes = num_bytes
            raise
        replace_tensors(row, lambda tensor: taken.get(id(tensor), tensor))

    def _take_along(self, row: Row, tensor: torch.Tensor) -> torch.Tensor:
        if is_host(tensor.device):
            return tensor
        away = tensor.cpu()
        self._away[row].append(away)
        self.swapped_out_bytes += away.nbytes
        return away

    def _bring_along(self, row: Row) -> None:
        away = self._away[row]
        there = {id(tensor): tensor.to(self.swap.device) for tensor in away}
        replace_tensors(row, lambda tensor: there.get(id(tensor), tensor))
        self.swapped_in_bytes += sum(tensor.nbytes for tensor in away)
        del self._away[row]

    def _leave(self, row: Row) -> None:
        """Of a row that is done the latents stay, as its result; of one that will go on, everything; else nothing."""
        is_done, has_failed = row.stage is Stage.DONE, row.request.status.is_ending
        if row in self._away and not (is_done or has_failed):
            self._bring_along(row)
        self._away.pop(row, None)
        pages = row.pages
        if pages is None:
            return
        if is_done:
            pages.drop(*(name for name in pages.spans if name != "latents"))
        elif has_failed:
            pages.drop(*pages.spans)
        pages.leave()
        if "latents" in pages:
            vars(row)["latents"] = pages.get("latents")  # before the pages go: another thread may be reading
            row.pages = None
        for name in TEXTS:
            text = getattr(row, name)
            if isinstance(text, PagedText) and name in pages:
                setattr(row, name, TextEmbeds(text.embeds, text.width, text.positions))


def _have_pages_moved(move: Move) -> bool:
    """True where nothing is left to be done in pages that may be others' by now. A newcomer has none yet."""
    pages = move.owner.pages
    return move.where is not Where.NOWHERE and (pages is None or pages.is_out == (move.where is Where.HOST))


def keep_texts(row: Row) -> None:
    """Put the row's texts into its pages, if it has some and they are not there."""
    for name in TEXTS:
        text = getattr(row, name)
        if row.pages is not None and text is not None and not isinstance(text, PagedText):
            row.pages.put(name, text.embeds)
            setattr(row, name, PagedText(row.pages, name, text))


def replace_tensors(row: Row, replacement: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Exchange every tensor that a row keeps beside its pages: its noise scheduler's, its decoder's, its prediction."""
    _replaced(row.noise_scheduler, replacement)
    row.decode_state = _replaced(row.decode_state, replacement)
    row.noise_pred = _replaced(row.noise_pred, replacement)


def _replaced(value: Any, replacement: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The value with its tensors exchanged; objects that others may hold are changed in place."""
    if isinstance(value, torch.Tensor):
        return replacement(value)
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, replacement) for item in value)
    is_dataclass = dataclasses.is_dataclass(value)
    if is_dataclass and value.__dataclass_params__.frozen:
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: _replaced(getattr(value, name), replacement) for name in names})
    if is_dataclass or isinstance(value, SchedulerMixin):
        vars(value).update({name: _replaced(item, replacement) for name, item in vars(value).items()})
    return value
