"""The two kinds of blocks of the network, and what they consist of. Knows nothing of images, latents and steps.

Residual streams, norms and rotary angles are float32; every product runs in the dtype of the weights. Each block takes
`chunk`: so many tokens (per row of the batch) go through at once, all of them when it is None. The sums are the same.
Parameter names are those of the official checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import nn

from .memory import padded_tokens
from .tables import Rotary, apply_rotary, time_features

Modulation = tuple[torch.Tensor, ...]  # shift, scale, gate of the attention; shift, scale, gate of the MLP


def slices(length: int, chunk: int | None) -> list[slice]:
    """`length` tokens in nearly equal slices of at most `chunk`; one slice when `chunk` is None."""
    count = math.ceil(length / chunk) if chunk else 1
    edges = [length * i // count for i in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def map_slices(function: Callable[[slice], torch.Tensor], length: int, chunk: int | None) -> torch.Tensor:
    """`function` of every slice of `length` tokens, put together along axis 1 without a second copy."""
    parts = slices(length, chunk)
    if len(parts) == 1:
        return function(parts[0])
    whole = None
    for part in parts:
        result = function(part)
        if whole is None:
            whole = result.new_empty(result.shape[0], length, *result.shape[2:])
        whole[:, part] = result
        del result  # or it would still be there while the next one is made
    assert whole is not None
    return whole


def update_slices(
    function: Callable[[torch.Tensor, slice], torch.Tensor], stream: torch.Tensor, chunk: int | None
) -> torch.Tensor:
    """`function` of every slice of `stream` (batch, tokens, dim); with more than one slice, `stream` is overwritten."""
    parts = slices(stream.shape[1], chunk)
    if len(parts) == 1:
        return function(stream, parts[0])
    for part in parts:
        stream[:, part] = function(stream[:, part], part)
    return stream


def linear_in_tiles(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """`linear(x)` for (batch, tokens, dim), with rows added so that each is summed as among many; see `ROW_TILE`."""
    batch, tokens = x.shape[:2]
    missing = padded_tokens(batch, tokens) - tokens
    return linear(F.pad(x, (0, 0, 0, missing)))[:, :tokens] if missing else linear(x)


class PiDRMSNorm(nn.Module):
    """Root-mean-square norm over the last axis; the statistic and the result are float32 whatever comes in."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., dim) -> (..., dim)."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), 1e-6)


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x * (1 + scale) + shift, in float32."""
    return torch.addcmul(shift, x, 1 + scale)


class PiDTimeEmbedder(nn.Module):
    """Network times to vectors."""

    def __init__(self, features: int, dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(features, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, timestep: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(batch,) times, 0 to 1000 -> (batch, dim)."""
        return self.mlp(time_features(timestep).to(dtype))


class PiDTextEmbedder(nn.Module):
    """Caption features to text tokens."""

    def __init__(self, text_dim: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(text_dim, dim)
        self.norm = PiDRMSNorm(dim)

    def forward(self, text: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(batch, tokens, text_dim) -> (batch, tokens, dim), float32."""
        return self.norm(self.proj(text.to(dtype)))


class PiDLinearEmbedder(nn.Module):
    """A linear map of patches or of single pixels; the result joins a float32 stream."""

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(in_dim, dim)

    def forward(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(..., in_dim) -> (..., dim), float32."""
        return self.proj(x.to(dtype)).float()


class PiDSwiGLU(nn.Module):
    """Gated MLP without biases; two thirds of the nominal width, so that three matrices weigh what two would."""

    def __init__(self, dim: int, nominal: int) -> None:
        super().__init__()
        inner = int(2 * nominal / 3)
        self.w1 = nn.Linear(dim, inner, bias=False)
        self.w3 = nn.Linear(dim, inner, bias=False)
        self.w2 = nn.Linear(inner, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., dim) -> (..., dim)."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def project_qkv(x: torch.Tensor, linear: Any, norms: tuple[PiDRMSNorm, PiDRMSNorm], rotary: Rotary) -> torch.Tensor:
    """(batch, tokens, dim) -> (batch, tokens, 3, heads, head_dim): queries and keys normed and turned."""
    head_dim = norms[0].weight.shape[0]
    q, k, v = linear(x).unflatten(-1, (3, -1, head_dim)).unbind(2)
    q, k = (apply_rotary(norm(part), rotary).to(v.dtype) for norm, part in zip(norms, (q, k), strict=True))
    return torch.stack([q, k, v], 2)


def attend(qkv: torch.Tensor) -> torch.Tensor:
    """(batch, tokens, 3, heads, head_dim) -> (batch, tokens, dim); all tokens see all, no mask, no score matrix."""
    q, k, v = qkv.unbind(2)
    return dispatch_attention_fn(q, k, v).flatten(2)


class PiDJointAttention(nn.Module):
    """The weights of an attention that image (x) and text (y) tokens share; the block runs it."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.qkv_x = nn.Linear(dim, 3 * dim, bias=False)
        self.qkv_y = nn.Linear(dim, 3 * dim, bias=False)
        self.q_norm_x, self.k_norm_x = PiDRMSNorm(dim // num_heads), PiDRMSNorm(dim // num_heads)
        self.q_norm_y, self.k_norm_y = PiDRMSNorm(dim // num_heads), PiDRMSNorm(dim // num_heads)
        self.proj_x = nn.Linear(dim, dim)
        self.proj_y = nn.Linear(dim, dim)

    def image_qkv(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """(batch, patches, dim) -> (batch, patches, 3, heads, head_dim)."""
        return project_qkv(x, self.qkv_x, (self.q_norm_x, self.k_norm_x), rotary)

    def text_qkv(self, y: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """(batch, text tokens, dim) -> (batch, text tokens, 3, heads, head_dim)."""
        return project_qkv(y, self.qkv_y, (self.q_norm_y, self.k_norm_y), rotary)


class PiDPatchBlock(nn.Module):
    """A transformer block of two streams, patches and text, that meet in one attention."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm_x1, self.norm_y1 = PiDRMSNorm(dim), PiDRMSNorm(dim)
        self.attn = PiDJointAttention(dim, num_heads)
        self.norm_x2, self.norm_y2 = PiDRMSNorm(dim), PiDRMSNorm(dim)
        self.mlp_x, self.mlp_y = PiDSwiGLU(dim, 4 * dim), PiDSwiGLU(dim, 4 * dim)
        self.adaLN_modulation_img = nn.Sequential(nn.Linear(dim, 6 * dim))
        self.adaLN_modulation_txt = nn.Sequential(nn.Linear(dim, 6 * dim))

    def forward(
        self,
        image: torch.Tensor,
        text: torch.Tensor,
        condition: torch.Tensor,
        rotary: tuple[Rotary, Rotary],
        chunk: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, patches, dim) and (batch, text tokens, dim) float32 streams, (batch, 1, dim) -> both streams.

        `rotary` are the tables of the image and the text. With a `chunk` smaller than the image its stream is
        overwritten.
        """
        image_mod = self.adaLN_modulation_img(condition).float().chunk(6, -1)
        text_mod = self.adaLN_modulation_txt(condition).float().chunk(6, -1)
        attended = attend(self._joint_qkv(image, text, image_mod, text_mod, rotary, condition.dtype, chunk))
        of_text, of_image = attended.split([text.shape[1], image.shape[1]], 1)

        def advance(tokens: torch.Tensor, part: slice) -> torch.Tensor:
            """(batch, patches of `part`, dim) float32 after attention and MLP."""
            return _advance(tokens, self.attn.proj_x(of_image[:, part]), image_mod, self.norm_x2, self.mlp_x)

        text = _advance(text, self.attn.proj_y(of_text), text_mod, self.norm_y2, self.mlp_y)
        return update_slices(advance, image, chunk), text

    def _joint_qkv(
        self,
        image: torch.Tensor,
        text: torch.Tensor,
        image_mod: Modulation,
        text_mod: Modulation,
        rotary: tuple[Rotary, Rotary],
        dtype: torch.dtype,
        chunk: int | None,
    ) -> torch.Tensor:
        """Queries, keys and values of the text, then of the image: (batch, text + patches, 3, heads, head_dim)."""
        (cos, sin), text_table = rotary

        def project(part: slice) -> torch.Tensor:
            """(batch, patches of `part`, 3, heads, head_dim)."""
            tokens = modulate(self.norm_x1(image[:, part]), *image_mod[:2]).to(dtype)
            return self.attn.image_qkv(tokens, (cos[part], sin[part]))

        text_qkv = self.attn.text_qkv(modulate(self.norm_y1(text), *text_mod[:2]).to(dtype), text_table)
        parts = slices(image.shape[1], chunk)
        if len(parts) == 1:
            return torch.cat([text_qkv, project(parts[0])], 1)
        offset = text.shape[1]
        joint = text_qkv.new_empty(text.shape[0], offset + image.shape[1], *text_qkv.shape[2:])
        joint[:, :offset] = text_qkv
        for part in parts:
            joint[:, offset + part.start : offset + part.stop] = project(part)
        return joint


def _advance(
    tokens: torch.Tensor, attended: torch.Tensor, mod: Modulation, norm: nn.Module, mlp: nn.Module
) -> torch.Tensor:
    """Add what the attention found, then what the MLP makes of it: (batch, tokens, dim) float32 -> the same."""
    tokens = torch.addcmul(tokens, mod[2], attended)
    hidden = modulate(norm(tokens), mod[3], mod[4]).to(attended.dtype)
    return torch.addcmul(tokens, mod[5], mlp(hidden))


class PiDPixelAttention(nn.Module):
    """Attention among the patches of a picture, one token each."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_norm, self.k_norm = PiDRMSNorm(dim // num_heads), PiDRMSNorm(dim // num_heads)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, rotary: Rotary, chunk: int | None = None) -> torch.Tensor:
        """(batch, patches, dim) -> (batch, patches, dim)."""
        cos, sin = rotary

        def project(part: slice) -> torch.Tensor:
            """(batch, patches of `part`, 3, heads, head_dim)."""
            return project_qkv(x[:, part], self.qkv, (self.q_norm, self.k_norm), (cos[part], sin[part]))

        attended = attend(map_slices(project, x.shape[1], chunk))
        return map_slices(lambda part: self.proj(attended[:, part]), x.shape[1], chunk)


class PiDPixelMLP(nn.Module):
    """The same small MLP for every pixel."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, inner)
        self.fc2 = nn.Linear(inner, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., dim) -> (..., dim); the exact GELU, which the tanh form misses by 5e-3."""
        return self.fc2(F.gelu(self.fc1(x)))


class PiDPixelBlock(nn.Module):
    """A transformer block over pixels: modulation and MLP for each pixel, attention among the patches they sit in.

    Only the attention sees more than one patch. So the block can be run in three parts, the first and the last of them
    for a few patches at a time: `"compress"` makes attention tokens, `"attend"` is the attention, `"expand"` brings
    what it found back to the pixels. The part is an argument because offloading and compilation hang on the call of
    the block, which methods beside it would pass by.
    """

    def __init__(self, patch_dim: int, pixel_dim: int, attn_dim: int, num_heads: int, pixels_per_patch: int) -> None:
        super().__init__()
        self.pixels_per_patch = pixels_per_patch
        self.compress_to_attn = nn.Linear(pixels_per_patch * pixel_dim, attn_dim)
        self.expand_from_attn = nn.Linear(attn_dim, pixels_per_patch * pixel_dim)
        self.norm1, self.norm2 = PiDRMSNorm(pixel_dim), PiDRMSNorm(pixel_dim)
        self.attn = PiDPixelAttention(attn_dim, num_heads)
        self.mlp = PiDPixelMLP(pixel_dim, 4 * pixel_dim)
        self.adaLN_modulation = nn.Sequential(nn.Linear(patch_dim, pixels_per_patch * 6 * pixel_dim))

    def forward(self, part: Literal["whole", "compress", "attend", "expand"], *args: Any) -> torch.Tensor:
        """`"whole"`: pixels, condition, rotary -> pixels. `"compress"`: pixels, condition -> attention tokens.

        `"attend"`: attention tokens, rotary, chunk -> attention tokens. `"expand"`: pixels, condition, attention
        tokens -> pixels. Pixels are (batch, patches, pixels of a patch, pixel_dim) float32, conditions (batch,
        patches, patch_dim), attention tokens (batch, patches, attn_dim).
        """
        if part == "whole":
            pixels, condition, rotary = args
            mod = self._modulation(condition)
            return self._expand(pixels, mod, self.attn(self._compress(pixels, mod), rotary))
        if part == "attend":
            return self.attn(*args)
        pixels, condition, *attended = args
        mod = self._modulation(condition)
        return self._compress(pixels, mod) if part == "compress" else self._expand(pixels, mod, *attended)

    def _modulation(self, condition: torch.Tensor) -> Modulation:
        """(batch, patches, patch_dim) -> six views (batch, patches, pixels of a patch, pixel_dim)."""
        return (
            linear_in_tiles(self.adaLN_modulation, condition).unflatten(-1, (self.pixels_per_patch, 6, -1)).unbind(-2)
        )

    def _compress(self, pixels: torch.Tensor, mod: Modulation) -> torch.Tensor:
        hidden = modulate(self.norm1(pixels), mod[0], mod[1]).to(mod[0].dtype)
        return linear_in_tiles(self.compress_to_attn, hidden.flatten(-2))

    def _expand(self, pixels: torch.Tensor, mod: Modulation, attended: torch.Tensor) -> torch.Tensor:
        pixels = torch.addcmul(pixels, mod[2], linear_in_tiles(self.expand_from_attn, attended).reshape(pixels.shape))
        hidden = modulate(self.norm2(pixels), mod[3], mod[4]).to(mod[0].dtype)
        return torch.addcmul(pixels, mod[5], self.mlp(hidden))


class PiDFinalLayer(nn.Module):
    """Pixel tokens to colour channels."""

    def __init__(self, pixel_dim: int, channels: int) -> None:
        super().__init__()
        self.norm = PiDRMSNorm(pixel_dim)
        self.linear = nn.Linear(pixel_dim, channels)

    def forward(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(..., pixel_dim) -> (..., channels)."""
        return self.linear(self.norm(pixels).to(dtype))
