"""The transformer's repeated blocks, compiled once for batches of every shape. Knows tensors; not rows and requests.

A block is cut where attention is. What comes before it and what comes after it are functions of tensors alone, in which
only the numbers of tokens and of modulation rows vary. Weights go in as arguments, so that all blocks share the two
functions and an edited weight is seen. Attention itself runs as it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from diffusers import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from torch import nn

from ..attention import AttentionBackend
from .interface import BatchLayout
from .qwen_image_transformer import merged

logger = logging.getLogger(__name__)

BACKEND = "inductor"
# What the compiler sees first: usual numbers, by which it decides how to share work among threads, and all different,
# since it takes numbers that are equal the first time for always equal.
EXAMPLE_ROWS, EXAMPLE_TEXT_TOKENS, EXAMPLE_IMAGE_TOKENS = 5, 131, 1021

Weights = tuple[torch.Tensor, torch.Tensor]  # of a linear layer: (out, in) and (out,)


class StreamWeights(NamedTuple):
    """What a block does to one stream; `qkv` is one merged product or three."""

    modulation: Weights
    qkv: tuple[Weights, ...]
    norm_q: torch.Tensor
    norm_k: torch.Tensor
    out: Weights
    up: Weights
    down: Weights


class TokenIndex(NamedTuple):
    """The tensors of a `BatchLayout`; `rotary` is (2, tokens, head_dim / 2): cosines and sines in joint order."""

    image_row: torch.Tensor
    text_row: torch.Tensor
    joint: torch.Tensor
    image: torch.Tensor
    text: torch.Tensor
    rotary: torch.Tensor


class CompiledBlocks:
    """The two compiled functions; `warm_up` makes them."""

    def __init__(self) -> None:
        self._before: Callable[..., Any] | None = None
        self._after: Callable[..., Any] | None = None

    def warm_up(self, transformer: QwenImageTransformer2DModel) -> None:
        """Compile, with tokens of no request; takes tens of seconds the first time in a process.

        Logs a warning and makes nothing where the compiler cannot work, for example without a C++ compiler.
        """
        import torch._inductor.config as inductor

        start = time.perf_counter()
        self._before = self._after = None
        before, after = (torch.compile(f, dynamic=True, backend=BACKEND) for f in (_before_attention, _after_attention))
        try:
            # All in this process: those that would compile beside it would stay as long as it does.
            # The engine's thread is never in inference mode, as a caller may be; leaving it switches gradients on.
            with inductor.patch(compile_threads=1), torch.inference_mode(False), torch.no_grad():
                _run_example(transformer, before, after)
        except Exception as error:
            reason = " ".join(str(error).partition("\n\n")[0].split())  # advice to the compiler's developers follows
            logger.warning("compile=True has no effect: the compiler failed with %s: %s", type(error).__name__, reason)
            return
        self._before, self._after = before, after
        logger.info("compiled the transformer's blocks in %.1f s", time.perf_counter() - start)

    def can_run(self, layout: BatchLayout) -> bool:
        """False before a warm-up, and for a stream of a single token: the compiler takes a size of 1 for a constant."""
        return self._before is not None and min(len(layout.image_index), len(layout.text_index)) > 1

    def run(
        self,
        block: QwenImageTransformerBlock,
        image: torch.Tensor,
        text: torch.Tensor,
        temb: torch.Tensor,
        layout: BatchLayout,
        attention: AttentionBackend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stock block: (text tokens, dim) and (image tokens, dim) after it. `temb` is (rows, dim)."""
        assert self._before is not None
        assert self._after is not None
        weights = _block_weights(block, layout.kept)
        index, eps = _token_index(layout), block.img_norm1.eps
        temb = temb if len(temb) > 1 else temb.repeat(2, 1)  # else a constant, too
        *tables, q, k, v = self._before(image, text, temb, index, *weights, eps)
        out = _plain(attention.forward(q, k, v, layout.joint))
        text, image = self._after(image, text, out, *tables, index, *weights, eps)
        return text, image


def _plain(out: torch.Tensor) -> torch.Tensor:
    """The same tensor as no view of another: the compiler would depend on what it is a view of."""
    return out.contiguous().data


def _run_example(
    transformer: QwenImageTransformer2DModel, before: Callable[..., Any], after: Callable[..., Any]
) -> None:
    block, num_tokens = transformer.transformer_blocks[0], EXAMPLE_TEXT_TOKENS + EXAMPLE_IMAGE_TOKENS
    weights, eps = _block_weights(block, {}), block.img_norm1.eps
    like = weights[0].out[0]
    image, text, temb = (
        like.new_zeros(n, len(like)) for n in (EXAMPLE_IMAGE_TOKENS, EXAMPLE_TEXT_TOKENS, EXAMPLE_ROWS)
    )
    numbers = (len(image), len(text), num_tokens, len(image), len(text))
    indices = [torch.zeros(n, dtype=torch.int64, device=like.device) for n in numbers]
    rotary = torch.zeros(2, num_tokens, len(weights[0].norm_q) // 2, device=like.device)
    index = TokenIndex._make([*indices, rotary])
    for _ in range(2):  # the second time runs what the first has compiled
        *tables, _, _, v = before(image, text, temb, index, *weights, eps)
        after(image, text, _plain(v.flatten(1)), *tables, index, *weights, eps)


# ---------------------------------------------------------------------- what is compiled


def _before_attention(
    image: torch.Tensor,
    text: torch.Tensor,
    temb: torch.Tensor,
    index: TokenIndex,
    image_weights: StreamWeights,
    text_weights: StreamWeights,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Modulation tables (rows, 6, dim) of image and text; rotated q and k, and v: (tokens, heads, head_dim)."""
    image_table, text_table = _table(temb, image_weights), _table(temb, text_weights)
    image_q, image_k, image_v = _qkv(_modulated(image, image_table, 0, index.image_row, eps), image_weights, eps)
    text_q, text_k, text_v = _qkv(_modulated(text, text_table, 0, index.text_row, eps), text_weights, eps)
    q, k, v = (
        torch.cat(both).index_select(0, index.joint)
        for both in ((text_q, image_q), (text_k, image_k), (text_v, image_v))
    )
    return image_table, text_table, _rotated(q, index.rotary), _rotated(k, index.rotary), v


def _after_attention(
    image: torch.Tensor,
    text: torch.Tensor,
    out: torch.Tensor,
    image_table: torch.Tensor,
    text_table: torch.Tensor,
    index: TokenIndex,
    image_weights: StreamWeights,
    text_weights: StreamWeights,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(text tokens, dim) and (image tokens, dim) after the block."""
    text = _updated(text, out.index_select(0, index.text), text_table, index.text_row, text_weights, eps)
    image = _updated(image, out.index_select(0, index.image), image_table, index.image_row, image_weights, eps)
    return text, image


def _table(temb: torch.Tensor, weights: StreamWeights) -> torch.Tensor:
    """Shift, scale and gate of attention, then of the MLP: (rows, 6, dim)."""
    return F.linear(F.silu(temb), *weights.modulation).unflatten(-1, (6, -1))


def _qkv(x: torch.Tensor, weights: StreamWeights, eps: float) -> tuple[torch.Tensor, ...]:
    """(tokens, heads, head_dim) each, q and k normed."""
    head_dim = len(weights.norm_q)
    if len(weights.qkv) == 1:
        q, k, v = _linear(x, weights.qkv[0]).unflatten(-1, (3, -1, head_dim)).unbind(1)
    else:
        q, k, v = (_linear(x, part).unflatten(-1, (-1, head_dim)) for part in weights.qkv)
    q, k = (F.rms_norm(t, (head_dim,), norm, eps) for t, norm in ((q, weights.norm_q), (k, weights.norm_k)))
    return q, k, v


def _updated(
    x: torch.Tensor, out: torch.Tensor, table: torch.Tensor, row: torch.Tensor, weights: StreamWeights, eps: float
) -> torch.Tensor:
    x = x + table[:, 2].index_select(0, row) * _linear(out, weights.out)
    hidden = _gelu(_linear(_modulated(x, table, 3, row, eps), weights.up))
    return x + table[:, 5].index_select(0, row) * _linear(hidden, weights.down)


def _modulated(x: torch.Tensor, table: torch.Tensor, first: int, row: torch.Tensor, eps: float) -> torch.Tensor:
    shift, scale = table[:, first].index_select(0, row), table[:, first + 1].index_select(0, row)
    return F.layer_norm(x, x.shape[-1:], eps=eps) * (1 + scale) + shift


def _linear(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """`F.linear`, its bias added by whatever element-wise kernel comes next.

    The views keep the compiler from making one operation of the two again, which on a CPU would first fill the result
    with copies of the bias.
    """
    weight, bias = weights
    return ((x @ weight.t()).unflatten(-1, (2, -1)) + bias.unflatten(0, (2, -1))).flatten(-2)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU by tanh, with the tanh written as the sigmoid that it is: `exp` takes a CPU half as long as `tanh`."""
    return x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 2 * sqrt(2 / pi)


def _rotated(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Neighbouring features rotated in float32. First all real parts, then all imaginary ones, which is faster.

    Attention sees the same products, as q and k are both in that order.
    """
    real, imaginary = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # (tokens, heads, head_dim / 2)
    cos, sin = rotary[0][:, None], rotary[1][:, None]
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1).type_as(x)


# ---------------------------------------------------------------------- their arguments


def _token_index(layout: BatchLayout) -> TokenIndex:
    key = "token index", id(layout.rotary)  # layouts of parts of the batch share `kept`
    if key not in layout.kept:
        layout.kept[key] = TokenIndex(
            layout.image.token_modulation_index,
            layout.text.token_modulation_index,
            layout.joint_index,
            layout.image_index,
            layout.text_index,
            torch.stack([layout.rotary.real, layout.rotary.imag]),
        )
    index: TokenIndex = layout.kept[key]
    return index


def _block_weights(block: QwenImageTransformerBlock, kept: dict[Any, Any]) -> tuple[StreamWeights, StreamWeights]:
    """Of the image and the text stream."""
    attn = block.attn
    image = StreamWeights(
        modulation=_of(block.img_mod[1]),
        qkv=_qkv_weights([attn.to_q, attn.to_k, attn.to_v], kept),
        norm_q=attn.norm_q.weight,
        norm_k=attn.norm_k.weight,
        out=_of(attn.to_out[0]),
        up=_of(block.img_mlp.net[0].proj),
        down=_of(block.img_mlp.net[2]),
    )
    text = StreamWeights(
        modulation=_of(block.txt_mod[1]),
        qkv=_qkv_weights([attn.add_q_proj, attn.add_k_proj, attn.add_v_proj], kept),
        norm_q=attn.norm_added_q.weight,
        norm_k=attn.norm_added_k.weight,
        out=_of(attn.to_add_out),
        up=_of(block.txt_mlp.net[0].proj),
        down=_of(block.txt_mlp.net[2]),
    )
    return image, text


def _of(linear: nn.Linear) -> Weights:
    return linear.weight, linear.bias


def _qkv_weights(linears: list[nn.Linear], kept: dict[Any, Any]) -> tuple[Weights, ...]:
    one = merged(kept, linears)
    return tuple(_of(linear) for linear in linears) if one is None else (one,)
