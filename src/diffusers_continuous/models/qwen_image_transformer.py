"""Packed forward over the stock `QwenImageTransformer2DModel`: many rows of any size in one call.

Everything in a block except attention works per token, so a packed forward only has to say which modulation row
belongs to which token and keep attention inside a row. Knows nothing of requests and steps.

Offloading, quantisation, LoRA and compilation hang on `module(...)` calls. So the stock modules stay what they are and
are called as modules; three of them (transformer, block, attention) get an instance-level innermost `forward` that
takes the packed path when it is given a `packed` layout and is the stock forward otherwise. It goes under whatever
hooks are there already, and hooks that come later wrap it. Where nothing hangs on a block's modules, q, k and v come
from one merged product, and the attention module's own call, which only inspects signatures, is skipped.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_qwenimage import (
    QwenDoubleStreamAttnProcessor2_0,
    QwenImageTransformer2DModel,
    QwenImageTransformerBlock,
)
from diffusers.utils import apply_lora_scale
from torch import nn

from ..attention import AttentionBackend
from ..errors import UnsupportedModelError
from .interface import PackedLayout, TokenStream

# Up to this many runs of equal-length rows are modulated one by one by broadcasting; with more, one gather per token
# is cheaper than the many small calls.
MAX_BROADCAST_RUNS = 4
# A merged q/k/v weight is a copy. It pays where calls are small and many; at Qwen-Image's width (6.8 GB of copies)
# one product fills the device anyway.
MAX_MERGED_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """What travels through the stock modules' keyword arguments to reach ours."""

    layout: PackedLayout
    attention: AttentionBackend


# ---------------------------------------------------------------------- installing


def install_packed_forward(transformer: QwenImageTransformer2DModel) -> None:
    """Put our forwards innermost in `transformer`, its blocks and their attention; once is enough, twice does no harm.

    Raises:
        UnsupportedModelError: when something else has replaced a forward or an attention processor.
    """
    for block in transformer.transformer_blocks:
        if type(block.attn.processor) is not QwenDoubleStreamAttnProcessor2_0:
            raise UnsupportedModelError(
                f"the attention processor {type(block.attn.processor).__name__} does not know packed rows; "
                "remove it with transformer.set_attn_processor(QwenDoubleStreamAttnProcessor2_0())"
            )
    for module, forward in _targets(transformer):
        _set_innermost_forward(module, forward)


def uninstall_packed_forward(transformer: QwenImageTransformer2DModel) -> None:
    """Give every module its stock forward back, under whatever hooks are there."""
    for module, forward in _targets(transformer):
        for holder, slot in _forward_slots(module):
            if getattr(_get(holder, slot), "__func__", None) is forward:
                if holder is module.__dict__ and slot == "forward":
                    del module.__dict__["forward"]
                else:
                    _set(holder, slot, types.MethodType(type(module).forward, module))


def _targets(transformer: QwenImageTransformer2DModel) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    yield transformer, _transformer_forward
    for block in transformer.transformer_blocks:
        yield block, _block_forward
        yield block.attn, _attention_forward


def _set_innermost_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace the stock bound `forward` of `module` wherever hooks have put it."""
    slots = list(_forward_slots(module))
    found = [getattr(_get(holder, slot), "__func__", None) for holder, slot in slots]
    if forward in found:
        return
    stock = type(module).forward
    for (holder, slot), function in zip(slots, found, strict=True):
        if function is stock:
            _set(holder, slot, types.MethodType(forward, module))
            return
    if slots:
        raise UnsupportedModelError(
            f"{type(module).__name__}.forward was replaced by something else; continuous batching needs the stock one"
        )
    module.__dict__["forward"] = types.MethodType(forward, module)


def _forward_slots(module: nn.Module) -> Iterator[tuple[Any, str]]:
    """Every place where a hook library keeps a forward of `module`: accelerate's, then diffusers'."""
    for name in ("forward", "_old_forward"):
        if name in module.__dict__:
            yield module.__dict__, name
    registry = module.__dict__.get("_diffusers_hook")
    for reference in registry._fn_refs if registry is not None else ():
        for name in ("original_forward", "forward"):
            if getattr(reference, name) is not None:
                yield reference, name


def _get(holder: Any, slot: str) -> Any:
    return holder[slot] if isinstance(holder, dict) else getattr(holder, slot)


def _set(holder: Any, slot: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[slot] = value
    else:
        setattr(holder, slot, value)


# ---------------------------------------------------------------------- the forwards


def _transformer_forward(
    self: QwenImageTransformer2DModel, *args: Any, packed: Packed | None = None, **kwargs: Any
) -> Any:
    if packed is None:
        return type(self).forward(self, *args, **kwargs)
    return _packed_transformer(self, packed=packed, **kwargs)


@apply_lora_scale("attention_kwargs")  # scales the LoRA layers for the whole forward, as the stock forward does
def _packed_transformer(
    self: QwenImageTransformer2DModel,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    timestep: torch.Tensor,
    packed: Packed,
    attention_kwargs: dict[str, Any] | None = None,
) -> torch.Tensor:
    """(image tokens, channels), (text tokens, joint dim), (rows,) -> predicted noise (image tokens, channels)."""
    image = self.img_in(hidden_states)  # (image tokens, dim)
    text = self.txt_in(self.txt_norm(encoder_hidden_states))  # (text tokens, dim)
    temb = self.time_text_embed(timestep.to(image.dtype), image)  # (rows, dim)
    for block in self.transformer_blocks:
        text, image = block(hidden_states=image, encoder_hidden_states=text, temb=temb, packed=packed)
    scale, shift = self.norm_out.linear(self.norm_out.silu(temb).to(image.dtype)).chunk(2, dim=-1)
    image = _modulate(self.norm_out.norm(image), shift, scale, packed.layout.image)
    return self.proj_out(image)


def _block_forward(self: QwenImageTransformerBlock, *args: Any, packed: Packed | None = None, **kwargs: Any) -> Any:
    if packed is None:
        return type(self).forward(self, *args, **kwargs)
    return _packed_block(self, packed=packed, **kwargs)


def _packed_block(
    self: QwenImageTransformerBlock,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    packed: Packed,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The stock block, modulation once per request row: (text, image) tokens -> (text, image) tokens."""
    layout = packed.layout
    # Six (rows, dim) each: shift, scale and gate of attention, then of the MLP.
    image_mod = self.img_mod(temb).chunk(6, dim=-1)
    text_mod = self.txt_mod(temb).chunk(6, dim=-1)

    image_in = _modulate(self.img_norm1(hidden_states), image_mod[0], image_mod[1], layout.image)
    text_in = _modulate(self.txt_norm1(encoder_hidden_states), text_mod[0], text_mod[1], layout.text)
    if _is_plain(self.attn):
        image_attn, text_attn = _packed_attention(self.attn, image_in, text_in, packed, is_plain=True)
    else:
        image_attn, text_attn = self.attn(hidden_states=image_in, encoder_hidden_states=text_in, packed=packed)
    image = _add_gated(hidden_states, image_mod[2], image_attn, layout.image)
    text = _add_gated(encoder_hidden_states, text_mod[2], text_attn, layout.text)

    image_mlp = self.img_mlp(_modulate(self.img_norm2(image), image_mod[3], image_mod[4], layout.image))
    text_mlp = self.txt_mlp(_modulate(self.txt_norm2(text), text_mod[3], text_mod[4], layout.text))
    image = _add_gated(image, image_mod[5], image_mlp, layout.image)
    text = _add_gated(text, text_mod[5], text_mlp, layout.text)
    return text, image


def _attention_forward(self: Attention, *args: Any, packed: Packed | None = None, **kwargs: Any) -> Any:
    if packed is None:
        return type(self).forward(self, *args, **kwargs)
    return _packed_attention(self, kwargs["hidden_states"], kwargs["encoder_hidden_states"], packed, is_plain=False)


def _packed_attention(
    attn: Attention, image: torch.Tensor, text: torch.Tensor, packed: Packed, is_plain: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joint attention inside each row: (image tokens, dim), (text tokens, dim) -> the same two."""
    layout = packed.layout
    image_qkv = _project(attn, ("to_q", "to_k", "to_v"), image, is_plain)
    text_qkv = _project(attn, ("add_q_proj", "add_k_proj", "add_v_proj"), text, is_plain)
    norms = ((attn.norm_added_q, attn.norm_q), (attn.norm_added_k, attn.norm_k))
    q, k = (
        torch.cat([_rms_norm(norm_t, t, is_plain), _rms_norm(norm_i, i, is_plain)])
        for (norm_t, norm_i), t, i in zip(norms, text_qkv[:2], image_qkv[:2], strict=True)
    )
    v = torch.cat([text_qkv[2], image_qkv[2]])
    q, k, v = (x.index_select(0, layout.joint_index) for x in (q, k, v))  # (tokens, heads, head_dim), joint order
    out = packed.attention.forward(_rotate(q, layout.rotary), _rotate(k, layout.rotary), v, layout.joint_runs)
    image_out = attn.to_out[0](out.index_select(0, layout.image_index))
    return attn.to_out[1](image_out), attn.to_add_out(out.index_select(0, layout.text_index))


# ---------------------------------------------------------------------- pieces


def _modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, stream: TokenStream) -> torch.Tensor:
    """`x * (1 + scale) + shift`, each row of the stream with its own request's (rows, dim) scale and shift."""
    scale = 1 + scale
    if len(stream.runs) > MAX_BROADCAST_RUNS or torch.compiler.is_compiling():
        index = stream.token_modulation_index
        return torch.addcmul(shift.index_select(0, index), x, scale.index_select(0, index))
    out = torch.empty_like(x)
    for run in stream.runs:
        rows = stream.modulation_index[run.rows]
        part = slice(run.start, run.stop)
        torch.addcmul(
            shift.index_select(0, rows)[:, None],
            x[part].unflatten(0, (run.num_rows, run.length)),
            scale.index_select(0, rows)[:, None],
            out=out[part].unflatten(0, (run.num_rows, run.length)),
        )
    return out


def _add_gated(x: torch.Tensor, gate: torch.Tensor, update: torch.Tensor, stream: TokenStream) -> torch.Tensor:
    """`x + gate * update` with the (rows, dim) gate of each row's request."""
    if len(stream.runs) > MAX_BROADCAST_RUNS or torch.compiler.is_compiling():
        return torch.addcmul(x, gate.index_select(0, stream.token_modulation_index), update)
    out = torch.empty_like(x)
    for run in stream.runs:
        part, shape = slice(run.start, run.stop), (run.num_rows, run.length)
        torch.addcmul(
            x[part].unflatten(0, shape),
            gate.index_select(0, stream.modulation_index[run.rows])[:, None],
            update[part].unflatten(0, shape),
            out=out[part].unflatten(0, shape),
        )
    return out


def _project(attn: Attention, names: tuple[str, str, str], x: torch.Tensor, is_plain: bool) -> tuple[torch.Tensor, ...]:
    """q, k and v: (tokens, heads, head_dim) each."""
    head_dim = attn.inner_dim // attn.heads
    linears = [getattr(attn, name) for name in names]
    merged = _merged(attn, names[0], linears) if is_plain else None
    if merged is None:
        return tuple(linear(x).unflatten(-1, (-1, head_dim)) for linear in linears)
    return F.linear(x, *merged).unflatten(-1, (3, -1, head_dim)).unbind(1)


def _merged(attn: Attention, key: str, linears: list[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """q, k and v weights in one, made anew when one of them changes; None where the copy would cost too much."""
    first = linears[0].weight
    if 3 * first.numel() * first.element_size() > MAX_MERGED_BYTES // 16 or torch.compiler.is_compiling():
        return None
    version = tuple((t.data_ptr(), t._version) for linear in linears for t in (linear.weight, linear.bias))
    cache = attn.__dict__.setdefault("_merged_qkv", {})
    if key not in cache or cache[key][0] != version:
        with torch.no_grad():
            weight = torch.cat([linear.weight for linear in linears])
            bias = torch.cat([linear.bias for linear in linears])
        cache[key] = (version, (weight, bias))
    return cache[key][1]


def _is_plain(attn: Attention) -> bool:
    """True when the attention's modules are the stock ones and nothing hangs on them."""
    if "_hf_hook" in attn.__dict__ or "_diffusers_hook" in attn.__dict__ or attn._forward_hooks:
        return False
    return all(
        type(module) is nn.Linear
        and "forward" not in module.__dict__
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and type(module.weight) is nn.Parameter
        for module in (attn.to_q, attn.to_k, attn.to_v, attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    )


def _rms_norm(norm: Any, x: torch.Tensor, is_plain: bool) -> torch.Tensor:
    if norm is None:
        return x
    if is_plain and norm.weight is not None and norm.bias is None:
        return F.rms_norm(x, norm.dim, norm.weight, norm.eps)
    return norm(x)


def _rotate(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring feature pairs in float32: (tokens, heads, head_dim) by (tokens, head_dim / 2)."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotary[:, None]).flatten(-2).type_as(x)
