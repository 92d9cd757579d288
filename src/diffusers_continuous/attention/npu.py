"""Ascend's fused attention kernel, in its layout for sequences of unequal length."""

from __future__ import annotations

import math

import torch

from ..extras import import_extra
from .varlen import Sequences, VarlenBackend


class NPUBackend(VarlenBackend):
    """`torch_npu.npu_fusion_attention` with `input_layout="TND"`, one call for all rows.

    Its lengths are told on the host and padding is left out, so it is never given a mask: of the masks that Ascend
    takes, each has a row for every query.

    Raises:
        ImportError: says what to install.
    """

    name = "npu"

    def __init__(self) -> None:
        self._kernel = import_extra("torch_npu", "torch_npu", "npu").npu_fusion_attention

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """(tokens, heads, head_dim) each, float16, bfloat16 or float32 -> the same."""
        num_heads, head_dim = q.shape[1:]
        out: torch.Tensor = self._kernel(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            num_heads,
            input_layout="TND",
            scale=1 / math.sqrt(head_dim),
            keep_prob=1.0,
            actual_seq_qlen=sequences.ends,
            actual_seq_kvlen=sequences.ends,
        )[0]
        return out
