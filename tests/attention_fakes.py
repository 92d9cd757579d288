"""Stand-ins for attention kernels that need a card. They compute the right answer, and refuse what the kernels refuse.

    with installed("flash") as calls:
        pipe.init_continuous_batching(attention_backend=FAKES["flash"])

Signatures, dtypes, shapes and errors are those of torch 2.13, flash-attn 2.8, FlashAttention-3 and torch_npu 2.7.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from diffusers_continuous import attention, devices

# Each fake, and the `attention_backend` that it stands in for.
FAKES = {"flash": "flash", "flash3": "flash", "npu": "npu", "torch_varlen": "torch_varlen"}
HALF = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def installed(name: str, float32: bool = False) -> Iterator[list[torch.Size]]:
    """Lets the backend of a fake be chosen on this machine's CPU, for the body; gives the query's shape of every call.

    A backend that was chosen in the body goes on working after it.

    Args:
        float32: Let it take float32 too, which only Ascend's kernel does, so that results can be compared tightly.
    """
    dtypes = (*HALF, torch.float32) if float32 or name == "npu" else HALF
    calls: list[torch.Size] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in _modules(name, dtypes, calls):
            patch.setitem(sys.modules, module.__name__, module)
        if name == "flash3":
            patch.setattr(devices, "compute_capability", lambda device: (9, 0))
        spec = attention.ATTENTION_BACKENDS[FAKES[name]]
        names = tuple(str(dtype).removeprefix("torch.") for dtype in dtypes)
        taken = replace(spec, device_types=(*spec.device_types, "cpu"), dtypes=names)
        patch.setitem(attention.ATTENTION_BACKENDS, FAKES[name], taken)
        yield calls


def _modules(name: str, dtypes: Sequence[torch.dtype], calls: list[torch.Size]) -> Iterator[types.ModuleType]:
    if name == "torch_varlen":
        yield _module("torch.nn.attention.varlen", varlen_attn=fake_varlen_attn(dtypes, calls))
    elif name == "npu":
        yield _module("torch_npu", npu_fusion_attention=fake_npu_fusion_attention(dtypes, calls))
    else:
        yield _module("flash_attn", flash_attn_varlen_func=fake_flash_attention_2(dtypes, calls), __version__="2.8.3")
        if name == "flash3":
            yield _module("flash_attn_interface", flash_attn_varlen_func=fake_flash_attention_3(dtypes, calls))


def _module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(members)
    return module


# ---------------------------------------------------------------------- the kernels


def fake_varlen_attn(dtypes: Sequence[torch.dtype], calls: list[torch.Size]) -> Any:
    """`torch.nn.attention.varlen.varlen_attn`."""

    def varlen_attn(
        query: Any,
        key: Any,
        value: Any,
        cu_seq_q: Any,
        cu_seq_k: Any,
        max_q: Any,
        max_k: Any,
        *,
        return_aux: Any = None,
        scale: Any = None,
        window_size: Any = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: Any = None,
        block_table: Any = None,
        num_splits: Any = None,
    ) -> torch.Tensor:
        calls.append(query.shape)
        for tensor in (query, key, value):
            _require(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")
            _require(tensor.shape[2] % 8 == 0, "head_size must be a multiple of 8")
        return _flash(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, dtypes)

    return varlen_attn


def fake_flash_attention_2(dtypes: Sequence[torch.dtype], calls: list[torch.Size]) -> Any:
    """`flash_attn.flash_attn_varlen_func`. It pads head_dim and copies what is not contiguous by itself."""

    def flash_attn_varlen_func(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        dropout_p: float = 0.0,
        softmax_scale: Any = None,
        causal: bool = False,
        window_size: Any = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Any = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Any = None,
    ) -> torch.Tensor:
        calls.append(q.shape)
        _require((dropout_p, causal, return_attn_probs) == (0.0, False, False), "not what this fake computes")
        return _flash(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, dtypes)

    return flash_attn_varlen_func


def fake_flash_attention_3(dtypes: Sequence[torch.dtype], calls: list[torch.Size]) -> Any:
    """`flash_attn_interface.flash_attn_varlen_func` of the releases that hand back (out, softmax_lse)."""

    def flash_attn_varlen_func(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        seqused_q: Any = None,
        seqused_k: Any = None,
        softmax_scale: Any = None,
        causal: bool = False,
        qv: Any = None,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
        window_size: Any = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: Any = None,
        deterministic: bool = False,
        sm_margin: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(q.shape)
        _require(not causal, "not what this fake computes")
        out = _flash(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, dtypes)
        return out, torch.zeros(q.shape[1], q.shape[0])

    return flash_attn_varlen_func


def fake_npu_fusion_attention(dtypes: Sequence[torch.dtype], calls: list[torch.Size]) -> Any:
    """`torch_npu.npu_fusion_attention` in its TND layout. Its scale is 1 where none is given."""

    def npu_fusion_attention(
        query: Any,
        key: Any,
        value: Any,
        head_num: Any,
        input_layout: Any,
        *,
        pse: Any = None,
        padding_mask: Any = None,
        atten_mask: Any = None,
        scale: float = 1.0,
        keep_prob: float = 1.0,
        pre_tockens: int = 2147483647,
        next_tockens: int = 2147483647,
        inner_precise: int = 0,
        prefix: Any = None,
        actual_seq_qlen: Any = None,
        actual_seq_kvlen: Any = None,
        sparse_mode: int = 0,
        gen_mask_parallel: bool = True,
        sync: bool = False,
    ) -> tuple[Any, ...]:
        calls.append(query.shape)
        _require(input_layout == "TND", f"this fake knows TND, not {input_layout}")
        _require(pse is None and padding_mask is None and keep_prob == 1.0, "not what this fake computes")
        for ends in (actual_seq_qlen, actual_seq_kvlen):
            _require(isinstance(ends, list | tuple), "TND needs actual_seq_qlen and actual_seq_kvlen as int[]")
            _require(all(type(end) is int for end in ends), "TND needs lengths on the host, as whole numbers")
            _require(all(a < b for a, b in itertools.pairwise((0, *ends))), "lengths must be told summed up, without 0")
        _require((actual_seq_qlen[-1], actual_seq_kvlen[-1]) == (len(query), len(key)), "not all tokens have a row")
        longest = max(b - a for a, b in itertools.pairwise((0, *actual_seq_qlen)))
        if atten_mask is not None:
            _require(atten_mask.dtype == torch.bool, "atten_mask must be bool")
            _require(tuple(atten_mask.shape) == (longest, longest), f"no mask of shape {tuple(atten_mask.shape)}")
            _require(not bool(atten_mask.any()), "not what this fake computes")
        for tensor in (query, key, value):
            _require(tensor.ndim == 3 and tensor.dtype == query.dtype, "TND is (tokens, heads, head_dim) of one dtype")
            _require(tensor.is_contiguous(), "tensors must be contiguous")
        _require(query.dtype in dtypes, f"query is {query.dtype}")
        _require(type(head_num) is int and head_num == query.shape[1], f"head_num {head_num}")
        _require(query.shape[2] % 16 == 0 and query.shape[2] <= 512, f"head_dim {query.shape[2]}")
        out = _attend(query, key, value, [0, *actual_seq_qlen], scale)
        sums = torch.zeros(len(query), head_num, 8)
        return out, sums, sums, torch.zeros(0), 0, 0, 0

    return npu_fusion_attention


# ---------------------------------------------------------------------- pieces


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    dtypes: Sequence[torch.dtype],
) -> torch.Tensor:
    """Attention, after what the kernels' C++ checks, and two mistakes that they would answer with a wrong result."""
    _require(q.dtype in dtypes, "FlashAttention only support fp16 and bf16 data type")
    _require(k.dtype == q.dtype and v.dtype == q.dtype, "query and key must have the same dtype")
    _require(q.ndim == k.ndim == v.ndim == 3, "q, k and v must be (tokens, heads, head_dim)")
    _require(q.shape[2] <= 256, "FlashAttention forward only supports head dimension at most 256")
    for starts, longest, tokens in ((starts_q, max_q, q), (starts_k, max_k, k)):
        _require(starts.dtype == torch.int32, "cu_seqlens must have dtype int32")
        _require(starts.ndim == 1 and len(starts) > 1 and starts.is_contiguous(), "cu_seqlens must be (rows + 1,)")
        _require(starts.device == tokens.device, "cu_seqlens must be on the device")
        _require(type(longest) is int, f"the longest row must be a whole number on the host, not {type(longest)}")
        _require(int(starts[0]) == 0 and int(starts[-1]) == len(tokens), "not all tokens have a row")
        _require(int(starts.diff().max()) <= longest, "a row is longer than the longest: its end would be left out")
    return _attend(q, k, v, starts_q.tolist(), scale)


def _require(is_so: bool, text: str) -> None:
    if not is_so:
        raise RuntimeError(text)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: list[int], scale: float | None) -> torch.Tensor:
    """Softmax attention between the tokens from one start to the next."""
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    parts = []
    for start, stop in itertools.pairwise(starts):
        row = (x[start:stop].transpose(0, 1) for x in (q, k, v))  # (heads, length, head_dim)
        parts.append(F.scaled_dot_product_attention(*row, scale=scale).transpose(0, 1))
    return torch.cat(parts)
