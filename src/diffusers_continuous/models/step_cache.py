"""Skips the transformer's later blocks for branches that have hardly changed. Off unless asked for.

What a branch's first block adds to its image tokens tells how much a step differs from the last one that was run in
full. Where that is less than a threshold, relative to what was added then (mean absolute values, as in diffusers'
first-block cache), what all later blocks added then is added again, and the branch leaves the packed batch for those
blocks. Each branch decides by its own tokens alone, so the decision and the picture are the same alone or in a crowd.
Knows tensors and branches; not requests, and not what a block does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .interface import BatchLayout

# (image tokens, dim), (text tokens, dim), layout -> the image tokens after all blocks but the first
LaterBlocks = Callable[[torch.Tensor, torch.Tensor, BatchLayout], torch.Tensor]


@dataclass(slots=True, eq=False)
class BranchCache:
    """Of one branch's last full step: what the first block added to its image tokens, and what the later ones did.

    Both are (image tokens, dim), None before the first step.
    """

    first: torch.Tensor | None = None
    later: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of both tensors."""
        return sum(t.numel() * t.element_size() for t in (self.first, self.later) if t is not None)


@dataclass(slots=True, eq=False)
class StepCache:
    """The branches' caches for one forward; `num_skipped` counts the branches that used theirs.

    Attributes:
        branches: One per branch, in the batch's order.
        threshold: Relative change of the first block's addition below which the later blocks are skipped.
        subset: Gives the layout of some branches (by index) out of the batch's.
    """

    branches: Sequence[BranchCache]
    threshold: float
    subset: Callable[[tuple[int, ...]], BatchLayout]
    num_skipped: int = 0

    def run(
        self,
        before: torch.Tensor,
        image: torch.Tensor,
        text: torch.Tensor,
        layout: BatchLayout,
        later_blocks: LaterBlocks,
    ) -> torch.Tensor:
        """The image tokens after all blocks, from those before and after the first one; updates the caches."""
        added = (image - before).split(_lengths(layout))
        changed = self._changed(added)
        after = image.split(_lengths(layout))
        done: list[torch.Tensor] = []
        if changed:
            done = self._run_changed(changed, image, text, layout, later_blocks)
        out = list(after)
        for index, cache in enumerate(self.branches):
            if index not in changed:
                assert cache.later is not None
                out[index] = after[index] + cache.later
                self.num_skipped += 1
        for index, tokens in zip(changed, done, strict=True):
            out[index], self.branches[index].later = tokens, tokens - after[index]
            self.branches[index].first = added[index].clone()
        return torch.cat(out)

    def _changed(self, added: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The branches whose later blocks must run. One transfer from the device tells for all of them."""
        known = [i for i, cache in enumerate(self.branches) if cache.first is not None]
        if not known:
            return tuple(range(len(added)))
        changes = torch.stack([_relative_change(added[i], self.branches[i].first) for i in known])
        is_small = dict(zip(known, (changes < self.threshold).tolist(), strict=True))
        return tuple(i for i in range(len(added)) if not is_small.get(i, False))

    def _run_changed(
        self,
        changed: tuple[int, ...],
        image: torch.Tensor,
        text: torch.Tensor,
        layout: BatchLayout,
        later_blocks: LaterBlocks,
    ) -> list[torch.Tensor]:
        if len(changed) == len(self.branches):
            return list(later_blocks(image, text, layout).split(_lengths(layout)))
        part = self.subset(changed)
        images, texts = image.split(_lengths(layout)), text.split(_text_lengths(layout))
        image, text = (torch.cat([tokens[i] for i in changed]) for tokens in (images, texts))
        return list(later_blocks(image, text, part).split(_lengths(part)))


def _relative_change(now: torch.Tensor, then: torch.Tensor | None) -> torch.Tensor:
    assert then is not None
    return (now - then).abs().mean() / then.abs().mean()


def _lengths(layout: BatchLayout) -> list[int]:
    """Image tokens of each branch."""
    return [run.length for run in layout.image.runs for _ in range(run.num_rows)]


def _text_lengths(layout: BatchLayout) -> list[int]:
    lengths = [0] * layout.num_rows
    for run in layout.text.runs:
        lengths[run.rows] = [run.length] * run.num_rows
    return lengths
