"""`InputBatch`: the chosen rows' tensors gathered into one packed forward, and the way back.

An ephemeral view. What stays the same while the same rows run together (text, rotary tables, index tensors) is kept
from the previous batch; per step only latents, timesteps and guidance scales are gathered. Knows no scheduling rule
and calls no model.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from .memory.host_swap import Gather, HostSwap
from .models.interface import SMALL_PRODUCT, BatchLayout, JointRows, Run, StepModel, TokenStream
from .request import Row, TextEmbeds


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """One sequence of the forward: the conditional or the negative side of a row; `call` is its call's first row."""

    row: int
    call: int
    is_negative: bool
    text: TextEmbeds
    num_image_tokens: int

    @property
    def length(self) -> int:
        """Tokens of the sequence that attention sees."""
        return self.text.num_tokens + self.num_image_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Guidance:
    """The image tokens of all guided rows in turn: (tokens,) of either branch, and float32 scales (tokens, 1)."""

    cond_index: torch.Tensor
    negative_index: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Composition:
    """What a batch of the same rows keeps from step to step.

    `cond_slices[r]` are the tokens of row r's conditional branch in the image stream. `gather` reads the latents of all
    branches out of the rows' pages at once; None where they are not in pages.
    """

    key: tuple[object, ...]
    branches: tuple[Branch, ...]
    layout: BatchLayout
    prompt_embeds: torch.Tensor
    cond_slices: tuple[slice, ...]
    guidance: Guidance | None
    gather: Gather | None = None

    def subset(self, indices: tuple[int, ...]) -> BatchLayout:
        """The layout of some of the branches, over the same table of rows; made once for each choice."""
        key = "subset", indices
        if key not in self.layout.kept:
            branches = [self.branches[i] for i in indices]
            rotary = self.layout.rotary.split([branch.length for branch in self.branches])
            layout = _batch_layout(branches, self.layout.calls, [rotary[i] for i in indices])
            self.layout.kept[key] = replace(layout, kept=self.layout.kept)  # merged weights serve both
        part: BatchLayout = self.layout.kept[key]
        return part


@dataclass(frozen=True, slots=True, eq=False)
class InputBatch:
    """One packed forward.

    Attributes:
        rows: The rows, in the order in which `timesteps` counts them.
        latents: (image tokens of all branches, channels).
        timesteps: (rows,) as the noise schedulers give them, in the latents' dtype.
        composition: Everything that does not change while the same rows run together.
    """

    rows: tuple[Row, ...]
    latents: torch.Tensor
    timesteps: torch.Tensor
    composition: Composition

    @property
    def layout(self) -> BatchLayout:
        """How the tokens lie."""
        return self.composition.layout

    @property
    def num_tokens(self) -> int:
        """Tokens of the forward, both streams, all branches."""
        return int(self.composition.layout.joint_index.shape[0])

    def scatter(self, noise_pred: torch.Tensor) -> list[torch.Tensor]:
        """Guide and split the forward's result: one (image tokens, channels) view per row."""
        return [noise_pred[tokens] for tokens in self.composition.cond_slices]

    @staticmethod
    def make(
        rows: Sequence[Row], model: StepModel, previous: Composition | None = None, swap: HostSwap | None = None
    ) -> InputBatch:
        """Gather `rows`, which must be encoded. `previous` is used again when it is of the same rows and texts.

        With `swap`, which owns the rows' pages, latents are read by page table, all in one go.
        """
        key = tuple(_identity(row) for row in rows)
        if previous is not None and previous.key == key:
            composition = previous
        else:
            composition = _compose(key, rows, model, swap)
        if composition.gather is None:
            latents = torch.cat([rows[branch.row].latents for branch in composition.branches])
        else:
            latents = composition.gather()
        dtype = latents.dtype
        timesteps = torch.stack([row.noise_scheduler.timesteps[row.step] for row in rows])
        return InputBatch(tuple(rows), latents, timesteps.to(latents.device, dtype), composition)


def _identity(row: Row) -> tuple[int, ...]:
    """Changes when anything changes that a composition was made of."""
    num_moves = 0 if row.pages is None else row.pages.num_moves
    return row.row_id, id(row.text), id(row.negative_text), num_moves


def _compose(
    key: tuple[object, ...], rows: Sequence[Row], model: StepModel, swap: HostSwap | None = None
) -> Composition:
    branches = _sorted_branches(rows)
    calls = tuple(_neighbours([row.request for row in rows]))
    layout = _batch_layout(branches, calls, [model.rotary(rows[b.row], b.is_negative) for b in branches])
    starts = np.cumsum([0, *(branch.num_image_tokens for branch in branches)])
    tokens = {
        (branch.row, branch.is_negative): slice(int(start), int(start) + branch.num_image_tokens)
        for branch, start in zip(branches, starts, strict=False)
    }
    return Composition(
        key=key,
        branches=branches,
        layout=layout,
        prompt_embeds=torch.cat([branch.text.embeds for branch in branches]),
        cond_slices=tuple(tokens[r, False] for r in range(len(rows))),
        guidance=_guidance(rows, tokens, layout.rotary.device),
        gather=None if swap is None else swap.gather("latents", [rows[branch.row].pages for branch in branches]),
    )


def _guidance(rows: Sequence[Row], tokens: dict[tuple[int, bool], slice], device: torch.device) -> Guidance | None:
    guided = [r for r in range(len(rows)) if (r, True) in tokens]
    if not guided:
        return None
    lengths = np.array([rows[r].num_image_tokens for r in guided])
    cond, negative = (
        _ranges(np.array([tokens[r, is_negative].start for r in guided]), lengths) for is_negative in (False, True)
    )
    scales = np.array([rows[r].request.params.true_cfg_scale for r in guided], dtype=np.float32)
    per_token = torch.from_numpy(np.repeat(scales, lengths))
    return Guidance(_to(cond, device), _to(negative, device), per_token.to(device)[:, None])


def _sorted_branches(rows: Sequence[Row]) -> tuple[Branch, ...]:
    """All branches, those of equal lengths next to each other, so that they are handled as one."""
    branches = []
    first_row: dict[object, int] = {}
    for r, row in enumerate(rows):
        assert row.text is not None
        call = first_row.setdefault(row.request, r)
        branches.append(Branch(r, call, False, row.text, row.num_image_tokens))
        if row.negative_text is not None:
            branches.append(Branch(r, call, True, row.negative_text, row.num_image_tokens))

    def key(branch: Branch) -> tuple[int, ...]:
        return branch.num_image_tokens, branch.text.num_tokens, branch.call, branch.is_negative, branch.row

    return tuple(sorted(branches, key=key))


def _batch_layout(branches: Sequence[Branch], calls: tuple[slice, ...], rotary: Sequence[torch.Tensor]) -> BatchLayout:
    """`calls` cut the table of rows; `rotary` has a table per branch."""
    device = rotary[0].device
    text_lengths = np.array([branch.text.num_tokens for branch in branches])
    image_lengths = np.array([branch.num_image_tokens for branch in branches])
    owners = np.array([branch.row for branch in branches])
    joint_starts = np.cumsum(text_lengths + image_lengths) - (text_lengths + image_lengths)
    text_index = _ranges(joint_starts, text_lengths)
    image_index = _ranges(joint_starts + text_lengths, image_lengths)
    joint_index = np.empty(len(text_index) + len(image_index), dtype=np.int64)
    joint_index[text_index] = np.arange(len(text_index))
    joint_index[image_index] = np.arange(len(text_index), len(joint_index))
    products = _neighbours([(branch.call, branch.is_negative) for branch in branches])
    return BatchLayout(
        image=_stream(image_lengths, owners, products, device),
        text=_stream(text_lengths, owners, products, device),
        calls=calls,
        joint=_joint_rows(text_lengths + image_lengths, device),
        joint_index=_to(joint_index, device),
        text_index=_to(text_index, device),
        image_index=_to(image_index, device),
        rotary=torch.cat(list(rotary)),
    )


def _joint_rows(lengths: np.ndarray, device: torch.device) -> JointRows:
    cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)
    return JointRows(_runs(lengths), tuple(lengths.tolist()), cu_seqlens)


def _stream(lengths: np.ndarray, owners: np.ndarray, calls: Sequence[slice], device: torch.device) -> TokenStream:
    ends = np.cumsum(lengths)
    call_lengths = np.array([int(lengths[call].sum()) for call in calls])
    limit = min(SMALL_PRODUCT, int(ends[-1]))
    small = tuple(run for run in _runs(call_lengths) if run.length < limit)
    return TokenStream(_runs(lengths), _to(owners, device), _to(np.repeat(owners, lengths), device), small)


def _neighbours(keys: Sequence[object]) -> list[slice]:
    """Cut into slices of neighbours with one key."""
    cuts = [0, *(i for i in range(1, len(keys)) if keys[i] != keys[i - 1]), len(keys)]
    return [slice(start, stop) for start, stop in itertools.pairwise(cuts)]


def _runs(lengths: np.ndarray) -> tuple[Run, ...]:
    """Cut a stream into runs of neighbouring rows of one length; rows without tokens are in none."""
    runs, start, first = [], 0, 0
    for last in range(1, len(lengths) + 1):
        if last < len(lengths) and lengths[last] == lengths[first]:
            continue
        length, count = int(lengths[first]), last - first
        if length:
            runs.append(Run(start, start + length * count, first, count, length))
        start, first = start + length * count, last
    return tuple(runs)


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenated `arange(start, start + length)`."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)


def _to(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)
