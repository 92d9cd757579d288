"""PyTorch's own kernel for sequences of unequal length; nothing to install, on NVIDIA cards from Ampere on."""

from __future__ import annotations

from typing import cast

import torch

from .varlen import Sequences, VarlenBackend


class TorchVarlenBackend(VarlenBackend):
    """`torch.nn.attention.varlen.varlen_attn`, one call for all rows.

    Raises:
        ImportError: says which PyTorch has it.
    """

    name = "torch_varlen"

    def __init__(self) -> None:
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError as error:
            raise ImportError("PyTorch has no torch.nn.attention.varlen here: pip install 'torch>=2.10'") from error
        self._kernel = varlen_attn

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """(tokens, heads, head_dim) each, float16 or bfloat16 -> the same."""
        starts, longest = sequences.cu_seqlens, sequences.max_length
        # What follows the lengths was renamed between releases; the defaults (no mask, 1 / sqrt(head_dim)) were not.
        return cast("torch.Tensor", self._kernel(q, k, v, starts, starts, longest, longest))
