"""The flash-attn package: FlashAttention-3 on Hopper where it is installed, else FlashAttention-2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import devices
from ..extras import import_extra
from .varlen import Sequences, VarlenBackend

HOPPER = 9  # the compute capability that FlashAttention-3 is written for
MIN_VERSION = (2, 7)


class FlashBackend(VarlenBackend):
    """`flash_attn_varlen_func`, one call for all rows.

    Args:
        device: Where it will run.

    Raises:
        ImportError: says what to install.
    """

    name = "flash"

    def __init__(self, device: torch.device) -> None:
        self._kernel = _flash_attention_3(device) or _flash_attention_2()

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """(tokens, heads, head_dim) each, float16 or bfloat16 -> the same."""
        starts, longest = sequences.cu_seqlens, sequences.max_length
        out: Any = self._kernel(q, k, v, starts, starts, longest, longest)
        # Early releases of FlashAttention-3 hand back the logarithms of the sums too.
        attended: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return attended


def _flash_attention_3(device: torch.device) -> Callable[..., Any] | None:
    capability = devices.compute_capability(device)
    if capability is None or capability[0] != HOPPER:
        return None
    try:
        kernel: Callable[..., Any] = import_extra("flash_attn_interface", "flash-attn", "flash").flash_attn_varlen_func
    except ImportError as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            return None
        raise
    return kernel


def _flash_attention_2() -> Callable[..., Any]:
    module = import_extra("flash_attn", "flash-attn", "flash")
    if not hasattr(module, "__version__"):
        # FlashAttention-4 puts its own part into a package of this name, and nothing else.
        raise ImportError("flash_attn is not FlashAttention-2 here: pip install 'diffusers-continuous[flash]'")
    version = tuple(int(part) for part in module.__version__.split(".")[:2])
    if version < MIN_VERSION:
        needed = ".".join(map(str, MIN_VERSION))
        raise ImportError(
            f"flash-attn {module.__version__} is too old, {needed} is needed: pip install 'diffusers-continuous[flash]'"
        )
    kernel: Callable[..., Any] = module.flash_attn_varlen_func
    return kernel
