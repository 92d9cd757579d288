"""`InputBatch`: the chosen rows' tensors gathered into one forward, and the way back.

An ephemeral view. What stays the same while the same rows run together (text, rotary tables, index tensors) is kept
from the previous batch; per step only latents, timesteps and guidance scales are gathered. Knows no scheduling rule
and calls no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from .layouts import LAYOUTS, Branch, choose_layout, index_tensor, neighbours, packed, ranges, upload_with
from .memory.host_swap import Gather, HostSwap
from .models.interface import BatchLayout, SmallProduct, StepModel
from .request import Row


@dataclass(frozen=True, slots=True, eq=False)
class Guidance:
    """The image tokens of all guided rows in turn: (tokens,) of either branch, and float32 scales (tokens, 1).

    Both branches of a row lie in one order, so that tiles need not be put together before.
    """

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
        """The layout of some branches of a packed batch, over the same table of rows; made once for each choice."""
        key = "subset", indices
        if key not in self.layout.kept:
            branches = [self.branches[i] for i in indices]
            rotary = self.layout.rotary.split([branch.length for branch in self.branches])
            layout = packed(branches, self.layout.calls, [rotary[i] for i in indices])
            layout, _ = upload_with(layout, [], layout.rotary.device)
            self.layout.kept[key] = replace(layout, kept=self.layout.kept)  # merged weights serve both
        part: BatchLayout = self.layout.kept[key]
        return part


@dataclass(frozen=True, slots=True, eq=False)
class InputBatch:
    """One forward.

    Attributes:
        rows: The rows, in the order in which `timesteps` counts them.
        latents: (image tokens of all branches, channels), in the layout's order.
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
        """Tokens of the forward, both streams, all branches, padding too."""
        return int(self.composition.layout.joint_index.shape[0])

    def scatter(self, noise_pred: torch.Tensor) -> list[torch.Tensor]:
        """Split the guided result of the forward: (image tokens, channels) per row, in image order."""
        if self.layout.recover_index is not None:
            noise_pred = noise_pred.index_select(0, self.layout.recover_index)
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
            if composition.layout.scatter_index is not None:
                latents = latents.index_select(0, composition.layout.scatter_index)
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
    calls = tuple(
        SmallProduct(part.start, part.stop, rows[part.start].index, len(rows[part.start].request.rows))
        for part in neighbours([(row.request, row.index - r) for r, row in enumerate(rows)])
    )
    make_layout = LAYOUTS[choose_layout(model.batch_layout, branches)]
    layout = make_layout(branches, calls, [model.rotary(rows[b.row], b.is_negative) for b in branches])
    starts = np.cumsum([0, *(branch.num_image_tokens for branch in branches)])
    tokens = {
        (branch.row, branch.is_negative): slice(int(start), int(start) + branch.num_image_tokens)
        for branch, start in zip(branches, starts, strict=False)
    }
    guiding = _guiding(rows, tokens)
    layout, there = upload_with(layout, guiding, layout.rotary.device)
    return Composition(
        key=key,
        branches=branches,
        layout=layout,
        prompt_embeds=_prompt_embeds(branches, layout),
        cond_slices=tuple(tokens[r, False] for r in range(len(rows))),
        guidance=Guidance(*there) if there else None,
        gather=None if swap is None else _gather(rows, branches, layout, swap),
    )


def _prompt_embeds(branches: Sequence[Branch], layout: BatchLayout) -> torch.Tensor:
    """(text tokens, dim), 0 where the layout has padding."""
    embeds = [branch.text.embeds for branch in branches]
    return torch.cat(embeds) if layout.joint.valid is None else pad_sequence(embeds, batch_first=True).flatten(0, 1)


def _gather(rows: Sequence[Row], branches: Sequence[Branch], layout: BatchLayout, swap: HostSwap) -> Gather | None:
    """Reads the latents in the layout's order."""
    gather = swap.gather("latents", [rows[branch.row].pages for branch in branches])
    if gather is None or layout.scatter_index is None:
        return gather
    return replace(gather, index=gather.index[layout.scatter_index])


def _guiding(rows: Sequence[Row], tokens: dict[tuple[int, bool], slice]) -> list[torch.Tensor]:
    """What `Guidance` is made of, on the host; nothing where no row is guided."""
    guided = [r for r in range(len(rows)) if (r, True) in tokens]
    if not guided:
        return []
    lengths = np.array([rows[r].num_image_tokens for r in guided])
    cond, negative = (
        ranges(np.array([tokens[r, is_negative].start for r in guided]), lengths) for is_negative in (False, True)
    )
    scales = np.array([rows[r].request.params.true_cfg_scale for r in guided], dtype=np.float32)
    per_token = torch.from_numpy(np.repeat(scales, lengths))
    return [index_tensor(cond), index_tensor(negative), per_token[:, None]]


def _sorted_branches(rows: Sequence[Row]) -> tuple[Branch, ...]:
    """All branches, those of equal lengths next to each other, so that they are handled as one."""
    branches = []
    first_row: dict[object, int] = {}
    for r, row in enumerate(rows):
        assert row.text is not None
        call, params = first_row.setdefault(row.request, r), row.request.params
        of_call = call, row.index, len(row.request.rows)
        branches.append(Branch(r, *of_call, False, row.text, params.height, params.width))
        if row.negative_text is not None:
            branches.append(Branch(r, *of_call, True, row.negative_text, params.height, params.width))

    def key(branch: Branch) -> tuple[int, ...]:
        """Shapes first; among branches of one shape those of a call stay together, its negative ones last."""
        return branch.num_image_tokens, branch.text.num_tokens, branch.call, branch.is_negative, branch.row

    return tuple(sorted(branches, key=key))
