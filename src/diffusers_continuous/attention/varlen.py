"""What kernels for sequences of unequal length have in common: how they are told the rows, and that none is padded.

    padded     | text .. 0 0 | image ...... | text | image ...... |     what the batch has, with `valid` False at 0
    attended   | text .. | image ...... | text | image ...... |         what the kernel sees

Knows no kernel.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..models.interface import JointRows


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The rows of a batch, without padding.

    Attributes:
        cu_seqlens: (rows + 1,) int32 on the device, where every row starts and the last one ends.
        ends: The same on the host without the first, which is 0.
        max_length: Tokens of the longest row.
        token_index: (valid tokens,) int64 where they lie in the padded batch; None when nothing is padded.
    """

    cu_seqlens: torch.Tensor
    ends: tuple[int, ...]
    max_length: int
    token_index: torch.Tensor | None = None

    @staticmethod
    def of(rows: JointRows) -> Sequences:
        """Worked out once for each batch."""
        if "sequences" not in rows.kept:
            rows.kept["sequences"] = _unpadded(rows) if rows.valid is None else _compacted(rows, rows.valid)
        kept: Sequences = rows.kept["sequences"]
        return kept


def _unpadded(rows: JointRows) -> Sequences:
    return Sequences(rows.cu_seqlens, tuple(itertools.accumulate(rows.lengths)), max(rows.lengths))


def _compacted(rows: JointRows, valid: torch.Tensor) -> Sequences:
    on_host = valid.cpu()  # the only wait for the device, once for each batch
    lengths = [int(part.sum()) for part in on_host.split(rows.lengths)]
    ends = tuple(itertools.accumulate(lengths))
    token_index = on_host.nonzero()[:, 0]
    both = torch.cat([token_index, torch.tensor([0, *ends])]).to(valid.device)
    return Sequences(both[len(token_index) :].int(), ends, max(lengths), both[: len(token_index)])


class VarlenBackend(ABC):
    """A backend over a kernel for sequences of unequal length, which keeps them apart by itself."""

    isolates_rows = True

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: JointRows) -> torch.Tensor:
        """(tokens, heads, head_dim) each -> (tokens, heads * head_dim), 0 at padding."""
        sequences = Sequences.of(rows)
        index = sequences.token_index
        if index is None:
            return self.attend(q, k, v, sequences).flatten(1)
        valid = self.attend(q.index_select(0, index), k.index_select(0, index), v.index_select(0, index), sequences)
        return torch.zeros_like(q).index_copy_(0, index, valid).flatten(1)

    @abstractmethod
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """(tokens, heads, head_dim) each -> the same, over tokens of which none is padding."""
