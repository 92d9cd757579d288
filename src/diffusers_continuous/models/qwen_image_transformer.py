"""Packed forward over the stock `QwenImageTransformer2DModel`: many rows of any size in one call.

Everything in a block except attention works per token, so a packed forward only has to say which modulation row
belongs to which token and keep attention inside a row. Knows nothing of requests and steps.

Offloading, quantisation, LoRA and compilation hang on `module(...)` calls. So the stock modules stay what they are and
are called as modules; four of them (transformer, block, attention, last norm) get an instance-level innermost
`forward` that takes the packed path when it is given a `packed` layout and is the stock forward otherwise. It goes
under whatever hooks are there already, and hooks that come later wrap it. Where nothing hangs on a block's modules,
q, k and v come from one merged product, and the attention module's own call, which only inspects signatures, is
skipped.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import AdaLayerNormContinuous, RMSNorm
from diffusers.models.transformers.transformer_qwenimage import (
    QwenDoubleStreamAttnProcessor2_0,
    QwenImageTransformer2DModel,
    QwenImageTransformerBlock,
)
from diffusers.utils import apply_lora_scale
from torch import nn

from ..attention import AttentionBackend
from ..errors import UnsupportedModelError
from ..hooks import has_stateful_hooks, is_bare, restore_forward, set_innermost_forward
from .interface import SMALL_PRODUCT, BatchLayout, SmallProduct, TokenStream
from .step_cache import StepCache

if TYPE_CHECKING:
    from .compiled_blocks import CompiledBlocks

# Runs of equal-length rows are modulated one by one by broadcasting. Where they have fewer elements than this on
# average, one gather per token is cheaper than the small calls: on a CPU, those of one run cost 15 us.
MIN_BROADCAST_ELEMENTS = 2**16
# A merged q/k/v weight is a copy. It pays where calls are small and many; at Qwen-Image's width (6.8 GB of copies)
# one product fills the device anyway.
MAX_MERGED_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """What travels through the stock modules' keyword arguments to reach ours."""

    layout: BatchLayout
    attention: AttentionBackend
    can_merge: bool = False
    cache: StepCache | None = None
    compiled: CompiledBlocks | None = None


# By name and not as `type(self).forward`, which the compiler cannot trace.
_stock_transformer_forward = QwenImageTransformer2DModel.forward
_stock_block_forward = QwenImageTransformerBlock.forward
_stock_attention_forward = Attention.forward
_stock_norm_out_forward = AdaLayerNormContinuous.forward


# ---------------------------------------------------------------------- installing


_installing = threading.Lock()
_users: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


def install_packed_forward(transformer: QwenImageTransformer2DModel, user: object) -> None:
    """Put our forwards innermost in `transformer` and what it consists of; they stay until the last user leaves.

    Raises:
        UnsupportedModelError: when something else has replaced a forward, or would mix rows up.
    """
    check_rows_stay_apart(transformer)
    with _installing:
        for module, forward, stock in _targets(transformer):
            set_innermost_forward(module, forward, stock)
        _users.setdefault(transformer, weakref.WeakSet()).add(user)


def uninstall_packed_forward(transformer: QwenImageTransformer2DModel, user: object) -> None:
    """Give every module its stock forward back, under whatever hooks are there, unless others use ours."""
    with _installing:
        users = _users.get(transformer, weakref.WeakSet())
        users.discard(user)
        if users:
            return
        for module, forward, stock in _targets(transformer):
            restore_forward(module, forward, stock)


def _targets(
    transformer: QwenImageTransformer2DModel,
) -> Iterator[tuple[nn.Module, Callable[..., Any], Callable[..., Any]]]:
    """Every module that gets a forward of ours, that forward, and the stock one that it stands in for."""
    yield transformer, _transformer_forward, _stock_transformer_forward
    for block in transformer.transformer_blocks:
        yield block, _block_forward, _stock_block_forward
        yield block.attn, _attention_forward, _stock_attention_forward
    yield transformer.norm_out, _norm_out_forward, _stock_norm_out_forward


def check_rows_stay_apart(transformer: QwenImageTransformer2DModel) -> None:
    """Refuse what was attached to the transformer and would mix rows up or be passed over; cheap enough for each step.

    Raises:
        UnsupportedModelError: names what is in the way and how to remove it.
    """
    for block in transformer.transformer_blocks:
        processor = type(block.attn.processor)
        if processor is not QwenDoubleStreamAttnProcessor2_0:
            raise UnsupportedModelError(
                f"the attention processor {processor.__name__} does not know packed rows; "
                "remove it with pipe.transformer.set_attn_processor(QwenDoubleStreamAttnProcessor2_0())"
            )
        if block.attn.processor._attention_backend is not None:
            raise UnsupportedModelError(
                "transformer.set_attention_backend has no effect on packed rows: call its reset_attention_backend() "
                "and choose with ContinuousBatchingConfig(attention_backend=...)"
            )
        if has_stateful_hooks(block) or has_stateful_hooks(block.attn):
            raise UnsupportedModelError(
                "the transformer's cache hooks keep one state for all requests and would mix them up; "
                "call pipe.transformer.disable_cache() and use ContinuousBatchingConfig(step_cache_threshold=...)"
            )


def can_merge(transformer: QwenImageTransformer2DModel) -> bool:
    """True when nothing moves or changes the weights while the transformer runs, so that copies of them stay right."""
    return is_bare(transformer, _transformer_forward) and all(
        is_bare(block, _block_forward) for block in transformer.transformer_blocks
    )


# What a stock block consists of, with the forward of ours that it may have.
_PARTS: dict[type[nn.Module], Callable[..., Any] | None] = dict.fromkeys(
    (nn.Sequential, nn.ModuleList, nn.SiLU, nn.Linear, nn.LayerNorm, nn.Dropout, RMSNorm, FeedForward, GELU)
)


def why_not_compiled(transformer: QwenImageTransformer2DModel) -> str | None:
    """What would be passed over if the blocks' weights were used without their modules; None when nothing."""
    if not is_bare(transformer, _transformer_forward):
        return "the transformer has hooks"
    parts = {**_PARTS, QwenImageTransformerBlock: _block_forward, Attention: _attention_forward}
    for module in transformer.transformer_blocks.modules():
        reason = _why_not_plain(module, parts)
        if reason is not None:
            name = next(name for name, other in transformer.named_modules() if other is module)
            return f"{name} {reason}"
    return None


def _why_not_plain(module: nn.Module, parts: dict[type[nn.Module], Callable[..., Any] | None]) -> str | None:
    if type(module) not in parts:
        return f"is a {type(module).__module__}.{type(module).__name__}"
    if not is_bare(module, parts[type(module)]):
        return "has hooks"
    if module._compiled_call_impl is not None:
        return "is compiled already"
    if any(type(weight) is not nn.Parameter for weight in module._parameters.values() if weight is not None):
        return "has weights of another kind"
    if isinstance(module, nn.Dropout) and module.training and module.p:
        return "drops features"
    return None


# ---------------------------------------------------------------------- the forwards


def _transformer_forward(
    self: QwenImageTransformer2DModel, *args: Any, packed: Packed | None = None, **kwargs: Any
) -> Any:
    if packed is None:
        return _stock_transformer_forward(self, *args, **kwargs)
    with _scaling_kept(self, kwargs.get("attention_kwargs")):
        return _packed_transformer(self, packed=packed, **kwargs)


@contextlib.contextmanager
def _scaling_kept(transformer: nn.Module, attention_kwargs: dict[str, Any] | None) -> Iterator[None]:
    """Leave the LoRA layers' scales exactly as they were found: after a scale of 0 the decorator sets them to 1."""
    found = []
    if attention_kwargs:
        layers = (getattr(module, "scaling", None) for module in transformer.modules())
        found = [(scaling, dict(scaling)) for scaling in layers if isinstance(scaling, dict)]
    try:
        yield
    finally:
        for scaling, before in found:
            scaling.update(before)


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
    layout = packed.layout
    image = _by_call(self.img_in, hidden_states, layout.image)  # (image tokens, dim)
    text = _by_call(self.txt_in, self.txt_norm(encoder_hidden_states), layout.text)  # (text tokens, dim)
    temb = _embed_time(self.time_text_embed, timestep.to(image.dtype), image, layout)  # (rows, dim)
    image = _packed_blocks(self.transformer_blocks, image, text, temb, packed)
    return _by_call(self.proj_out, self.norm_out(image, temb, packed=packed), layout.image)


def _packed_blocks(
    blocks: Any, image: torch.Tensor, text: torch.Tensor, temb: torch.Tensor, packed: Packed
) -> torch.Tensor:
    """The image tokens after all blocks: (image tokens, dim)."""
    first, *later = blocks

    def run(block: Any, image: torch.Tensor, text: torch.Tensor, part: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """(text tokens, dim) and (image tokens, dim) after the block, compiled where that can run `part`."""
        if packed.compiled is not None and packed.compiled.can_run(part.layout):
            return packed.compiled.run(block, image, text, temb, part.layout, part.attention)
        return block(hidden_states=image, encoder_hidden_states=text, temb=temb, packed=part)

    def run_later(image: torch.Tensor, text: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
        """(image tokens, dim) after all blocks but the first; `layout` may be of some of the rows only."""
        part = packed if layout is packed.layout else replace(packed, layout=layout)
        for block in later:
            text, image = run(block, image, text, part)
        return image

    text, after = run(first, image, text, packed)
    if packed.cache is None:
        return run_later(after, text, packed.layout)
    return packed.cache.run(image, after, text, packed.layout, run_later)


def _norm_out_forward(self: AdaLayerNormContinuous, *args: Any, packed: Packed | None = None, **kwargs: Any) -> Any:
    if packed is None:
        return _stock_norm_out_forward(self, *args, **kwargs)
    image, temb = args
    scale, shift = _rows_by_call(self.linear, self.silu(temb).to(image.dtype), packed.layout).chunk(2, dim=-1)
    return _modulate(self.norm(image), shift, scale, packed.layout.image)


def _block_forward(self: QwenImageTransformerBlock, *args: Any, packed: Packed | None = None, **kwargs: Any) -> Any:
    if packed is None:
        return _stock_block_forward(self, *args, **kwargs)
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
    image_mod = _conditioning(self.img_mod, temb, layout).chunk(6, dim=-1)
    text_mod = _conditioning(self.txt_mod, temb, layout).chunk(6, dim=-1)

    image_in = _modulate(self.img_norm1(hidden_states), image_mod[0], image_mod[1], layout.image)
    text_in = _modulate(self.txt_norm1(encoder_hidden_states), text_mod[0], text_mod[1], layout.text)
    if _is_plain(self.attn):
        image_attn, text_attn = _packed_attention(self.attn, image_in, text_in, packed, is_plain=True)
    else:
        image_attn, text_attn = self.attn(hidden_states=image_in, encoder_hidden_states=text_in, packed=packed)
    image = _add_gated(hidden_states, image_mod[2], image_attn, layout.image)
    text = _add_gated(encoder_hidden_states, text_mod[2], text_attn, layout.text)

    image_in = _modulate(self.img_norm2(image), image_mod[3], image_mod[4], layout.image)
    text_in = _modulate(self.txt_norm2(text), text_mod[3], text_mod[4], layout.text)
    image_mlp = _feed_forward(self.img_mlp, image_in, layout.image)
    text_mlp = _feed_forward(self.txt_mlp, text_in, layout.text)
    image = _add_gated(image, image_mod[5], image_mlp, layout.image)
    text = _add_gated(text, text_mod[5], text_mlp, layout.text)
    return text, image


def _attention_forward(self: Attention, *args: Any, packed: Packed | None = None, **kwargs: Any) -> Any:
    if packed is None:
        return _stock_attention_forward(self, *args, **kwargs)
    return _packed_attention(self, kwargs["hidden_states"], kwargs["encoder_hidden_states"], packed, is_plain=False)


def _packed_attention(
    attn: Attention, image: torch.Tensor, text: torch.Tensor, packed: Packed, is_plain: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joint attention inside each row: (image tokens, dim), (text tokens, dim) -> the same two."""
    layout = packed.layout
    can_merge = is_plain and packed.can_merge
    image_qkv = _project(attn, ("to_q", "to_k", "to_v"), image, layout, layout.image, can_merge)
    text_qkv = _project(attn, ("add_q_proj", "add_k_proj", "add_v_proj"), text, layout, layout.text, can_merge)
    norms = ((attn.norm_added_q, attn.norm_q), (attn.norm_added_k, attn.norm_k))
    q, k = (
        _joined(_rms_norm(norm_t, t, is_plain), _rms_norm(norm_i, i, is_plain), layout)
        for (norm_t, norm_i), t, i in zip(norms, text_qkv[:2], image_qkv[:2], strict=True)
    )
    v = _joined(text_qkv[2], image_qkv[2], layout)  # (tokens, heads, head_dim), joint order
    out = packed.attention.forward(_rotate(q, layout.rotary), _rotate(k, layout.rotary), v, layout.joint)
    text_out, image_out = _parted(out, layout)
    image_out = attn.to_out[1](_by_call(attn.to_out[0], image_out, layout.image))
    return image_out, _by_call(attn.to_add_out, text_out, layout.text)


# ---------------------------------------------------------------------- pieces


def _embed_time(module: Any, timestep: torch.Tensor, image: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
    """The stock time embedding, (rows,) -> (rows, dim)."""
    embedder = module.timestep_embedder
    if not (is_bare(module) and is_bare(embedder)) or embedder.cond_proj is not None or embedder.post_act is not None:
        return module(timestep, image)
    hidden = _rows_by_call(embedder.linear_1, module.time_proj(timestep).to(image.dtype), layout)
    return _rows_by_call(embedder.linear_2, embedder.act(hidden), layout)


def _conditioning(module: Any, temb: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
    """The stock modulation table, `Linear(SiLU(temb))`: (rows, dim) -> (rows, 6 * dim)."""
    return _rows_by_call(module[1], module[0](temb), layout) if is_bare(module) else module(temb)


def _rows_by_call(linear: Any, x: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
    """`linear(x)` over (rows, in), each pipeline call's rows summed as if it were alone; see `SMALL_PRODUCT`."""
    is_alone = len(layout.calls) == 1 and layout.calls[0].num_lines == len(x)
    if is_alone or x.dtype != torch.float32 or type(linear) is not nn.Linear or not is_bare(linear):
        return linear(x)
    if torch.compiler.is_compiling() or linear.bias is None or type(linear.weight) is not nn.Parameter:
        return linear(x)
    # One row at a time for calls of one picture, in one product.
    out = torch.bmm(x[:, None], linear.weight.t().expand(len(x), -1, -1))[:, 0] + linear.bias
    for call in layout.calls:
        if call.num_lines > 1:
            _redo(linear.weight, linear.bias, x, out, call)
    return out


def _by_call(linear: Any, x: torch.Tensor, stream: TokenStream) -> torch.Tensor:
    """`linear(x)` over (tokens, in), the few tokens of a small call computed as if alone; see `SMALL_PRODUCT`."""
    out = linear(x)
    is_plain = type(linear) is nn.Linear and type(linear.weight) is nn.Parameter and is_bare(linear)
    if stream.small_products and is_plain:
        _redo_small_products(linear.weight, linear.bias, x, out, stream)
    return out


def _redo_small_products(
    weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, out: torch.Tensor, stream: TokenStream
) -> None:
    if x.dtype != torch.float32 or bias is None or torch.compiler.is_compiling():
        return
    for product in stream.small_products:
        _redo(weight, bias, x, out, product)


def _redo(weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor, out: torch.Tensor, product: SmallProduct) -> None:
    """Put what the stock pipeline's own product gives into lines of `out`; a line does not depend on the others."""
    lines, num_lines = slice(product.start, product.stop), product.stop - product.start
    num_missing = min(product.num_lines, SMALL_PRODUCT) - num_lines
    if num_missing > 0:
        before = product.first if product.num_lines < SMALL_PRODUCT else 0
        there = F.pad(x[lines], (0, 0, before, num_missing - before))
        out[lines] = torch.addmm(bias, there, weight.t())[before : before + num_lines]
    else:
        torch.addmm(bias, x[lines], weight.t(), out=out[lines])


def _feed_forward(mlp: Any, x: torch.Tensor, stream: TokenStream) -> torch.Tensor:
    """The stock block's MLP, (tokens, dim) -> (tokens, dim)."""
    if not stream.small_products or not (is_bare(mlp) and is_bare(mlp.net[0])):
        return mlp(x)
    hidden = mlp.net[0].gelu(_by_call(mlp.net[0].proj, x, stream))
    return _by_call(mlp.net[2], mlp.net[1](hidden), stream)


def _modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, stream: TokenStream) -> torch.Tensor:
    """`x * (1 + scale) + shift`, each row of the stream with its own request's (rows, dim) scale and shift."""
    # Product and sum stay two operations, as in the stock block: a fused one rounds differently, and over many guided
    # steps that is the only difference that would be left.
    out = _per_row(torch.mul, x, 1 + scale, stream)
    return _per_row(torch.add, out, shift, stream, out=out)


def _add_gated(x: torch.Tensor, gate: torch.Tensor, update: torch.Tensor, stream: TokenStream) -> torch.Tensor:
    """`x + gate * update` with the (rows, dim) gate of each row's request."""
    return _per_row(torch.mul, update, gate, stream).add_(x)


def _per_row(
    operation: Callable[..., torch.Tensor],
    x: torch.Tensor,
    table: torch.Tensor,
    stream: TokenStream,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`operation(x, t)` with t the row of the (rows, dim) table that belongs to each token of (tokens, dim) x."""
    if len(table) == 1:  # one request, guided or not: the same row for every token
        return operation(x, table, out=out)
    if x.numel() < MIN_BROADCAST_ELEMENTS * len(stream.runs) or torch.compiler.is_compiling():
        return operation(x, table.index_select(0, stream.token_modulation_index))
    out = torch.empty_like(x) if out is None else out
    for run in stream.runs:
        part, shape = slice(run.start, run.stop), (run.num_rows, run.length)
        rows = table.index_select(0, stream.modulation_index[run.rows])[:, None]  # (rows, 1, dim)
        operation(x[part].unflatten(0, shape), rows, out=out[part].unflatten(0, shape))
    return out


def _project(
    attn: Attention,
    names: tuple[str, str, str],
    x: torch.Tensor,
    layout: BatchLayout,
    stream: TokenStream,
    can_merge: bool,
) -> tuple[torch.Tensor, ...]:
    """q, k and v: (tokens, heads, head_dim) each."""
    head_dim = attn.inner_dim // attn.heads
    linears = [getattr(attn, name) for name in names]
    one = merged(layout.kept, linears) if can_merge else None
    if one is None:
        return tuple(_by_call(linear, x, stream).unflatten(-1, (-1, head_dim)) for linear in linears)
    qkv = F.linear(x, *one)
    _redo_small_products(*one, x, qkv, stream)
    return qkv.unflatten(-1, (3, -1, head_dim)).unbind(1)


def merged(kept: dict[Any, Any], linears: list[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """q, k and v weights in one, kept in a layout's `kept`; None where the copy would cost too much.

    A layout ends when a row joins or leaves, so a weight that was edited between two requests is never missed, even
    by an edit that leaves address and version as they were (`weight.data += delta`).
    """
    first = linears[0].weight
    is_large = 3 * first.numel() * first.element_size() > MAX_MERGED_BYTES
    if torch.compiler.is_compiling() or is_large or first.is_inference():  # inference tensors count no versions
        return None
    version = tuple((t.data_ptr(), t._version) for linear in linears for t in (linear.weight, linear.bias))
    found = kept.get(linears[0])
    if found is None or found[0] != version:
        # Parameters, whose sizes the compiler takes as they are.
        weight, bias = (torch.cat([getattr(linear, name) for linear in linears]) for name in ("weight", "bias"))
        found = (version, *(nn.Parameter(t, requires_grad=False) for t in (weight, bias)))
        kept[linears[0]] = found
    return found[1:]


def _is_plain(attn: Attention) -> bool:
    """True when the attention's modules are the stock ones and nothing hangs on them."""
    linears = (attn.to_q, attn.to_k, attn.to_v, attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    norms = (attn.norm_q, attn.norm_k, attn.norm_added_q, attn.norm_added_k)
    return (
        is_bare(attn, _attention_forward)
        and all(type(linear) is nn.Linear and type(linear.weight) is nn.Parameter for linear in linears)
        and all(is_bare(module) for module in (*linears, *norms) if module is not None)
    )


def _joined(text: torch.Tensor, image: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
    """Text and image tokens in joint order, each row's text before its image."""
    joint = torch.cat([text, image])
    return joint if layout.is_joint else joint.index_select(0, layout.joint_index)


def _parted(joint: torch.Tensor, layout: BatchLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Text and image tokens out of the joint order."""
    if layout.is_joint:
        text, image = joint.split([len(layout.text_index), len(layout.image_index)])
        return text, image
    return joint.index_select(0, layout.text_index), joint.index_select(0, layout.image_index)


def _rms_norm(norm: Any, x: torch.Tensor, is_plain: bool) -> torch.Tensor:
    if norm is None:
        return x
    if is_plain and norm.weight is not None and norm.bias is None:
        if x.dtype == torch.float32:
            return F.rms_norm(x, norm.dim, norm.weight, norm.eps)
        return F.rms_norm(x, norm.dim, None, norm.eps) * norm.weight  # the stock norm rounds before the weight
    return norm(x)


def _rotate(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring feature pairs in float32: (tokens, heads, head_dim) by (tokens, head_dim / 2)."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotary[:, None]).flatten(-2).type_as(x)
