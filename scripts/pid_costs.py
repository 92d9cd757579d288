"""What decoding and denoising cost, by formula: arithmetic, and bytes beside the weights.

One picture, one forward. A multiplication and its addition are two operations, norms and the like are left out. Bytes
are the largest sum of tensors alive at once; what a kernel keeps for itself is not counted. The PiD's bytes are
`PiDTransformer2DModel.estimate_decode_bytes`. Configurations are those of the models, by attribute. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Gemma-2-2b's decoder layers: width, layers, query width, key and value width, hidden width of the MLP.
GEMMA = {"width": 2304, "layers": 26, "query": 2048, "key": 1024, "hidden": 9216}


def image_tokens(height: int, width: int) -> int:
    """Tokens of a Qwen-Image latent: 2 x 2 cells of 8 x 8 pixels."""
    return (height // 16) * (width // 16)


def transformer_flops(config: Any, tokens: int, text_tokens: int) -> int:
    """One forward of Qwen-Image's transformer; guidance needs two."""
    width = config.num_attention_heads * config.attention_head_dim
    joint = tokens + text_tokens
    per_layer = joint * (4 + 8) * width**2 + 2 * joint**2 * width + 2 * 6 * width**2  # linear, attention, modulation
    ends = tokens * width * (config.in_channels + config.out_channels * config.patch_size**2)
    ends += text_tokens * width * config.joint_attention_dim + (256 + 3 * width) * width
    return 2 * (config.num_layers * per_layer + ends)


def transformer_bytes(config: Any, tokens: int, text_tokens: int, itemsize: int) -> int:
    """In a block's MLP: its hidden layer before and after the activation, four times the width each, and seven streams
    that the block's variables keep (came in, two norms, two modulated, attention's, its sum)."""
    width = config.num_attention_heads * config.attention_head_dim
    return itemsize * (7 + 2 * 4) * (tokens + text_tokens) * width


@dataclass(frozen=True, slots=True)
class Convolution:
    """One convolution of the VAE's decoder, at so many pixels."""

    channels_in: int
    channels_out: int
    taps: int
    pixels: int

    @property
    def flops(self) -> int:
        return 2 * self.channels_in * self.channels_out * self.taps * self.pixels

    @property
    def is_cached(self) -> bool:
        """Those over frames keep their input until the picture is done, for a next frame that a picture has not."""
        return self.taps == 27


def vae_convolutions(config: Any, height: int, width: int) -> Iterator[Convolution]:
    """All of a decode, in order. Those over frames have 3 x 3 x 3 taps, two thirds of them on padding."""
    multipliers = config.dim_mult[::-1]
    dims = [config.base_dim * multiplier for multiplier in multipliers]
    pixels = height * width // 4 ** (len(dims) - 1)
    yield Convolution(config.z_dim, config.z_dim, 1, pixels)
    yield Convolution(config.z_dim, dims[0], 27, pixels)
    yield from _residual_block(dims[0], dims[0], pixels)
    yield Convolution(dims[0], 4 * dims[0], 1, pixels)  # the attention's projections
    yield from _residual_block(dims[0], dims[0], pixels)
    channels = dims[0]
    for index, dim in enumerate(dims):
        for _ in range(config.num_res_blocks + 1):
            yield from _residual_block(channels, dim, pixels)
            channels = dim
        if index < len(dims) - 1:
            pixels, channels = 4 * pixels, dim // 2
            yield Convolution(dim, channels, 9, pixels)
    yield Convolution(channels, config.input_channels, 27, pixels)


def _residual_block(channels_in: int, channels_out: int, pixels: int) -> Iterator[Convolution]:
    if channels_in != channels_out:
        yield Convolution(channels_in, channels_out, 1, pixels)
    yield Convolution(channels_in, channels_out, 27, pixels)
    yield Convolution(channels_out, channels_out, 27, pixels)


def vae_flops(config: Any, height: int, width: int) -> int:
    """One decode: convolutions, and one attention among all latent cells."""
    cells = height * width // 4 ** (len(config.dim_mult) - 1)
    attention = 4 * cells**2 * config.base_dim * config.dim_mult[-1]
    return attention + sum(convolution.flops for convolution in vae_convolutions(config, height, width))


def vae_bytes(config: Any, height: int, width: int, itemsize: int) -> int:
    """In the last residual block's last convolution: what all before it keep, and at full size the inputs of the stage,
    of the block and of the convolution, the latter padded to three frames, and the result."""
    *before, _last = [item for item in vae_convolutions(config, height, width) if item.is_cached]
    kept = sum(item.channels_in * item.pixels for item in before)
    work = (3 + 3 + 1) * config.base_dim * config.dim_mult[0] * height * width
    return itemsize * (kept + work)


def pid_adapter_flops(config: Any, patches: int) -> int:
    """The convolutions over the latent, once per picture."""
    ratio = (
        config.sr_scale * config.latent_spatial_down_factor / (config.lq_latent_unpatchify_factor * config.patch_size)
    )
    fold = max(1, round(1 / ratio))
    channels = config.lq_latent_channels * fold**2 // config.lq_latent_unpatchify_factor**2
    hidden = config.lq_hidden_dim
    return 2 * 9 * patches * (channels * hidden + (1 + 2 * config.lq_num_res_blocks) * hidden**2)


def pid_heads_flops(config: Any, patches: int) -> int:
    """The adapter's last linear maps, once per picture, or once per step when the work is done in chunks."""
    heads = math.ceil(config.patch_depth / config.lq_interval) + config.pit_lq_inject
    return 2 * patches * heads * config.lq_hidden_dim * config.hidden_size


def pid_step_flops(config: Any, patches: int, text_tokens: int, in_chunks: bool = False) -> int:
    """One step of the PiD's network from finished features; guidance, of undistilled networks, needs two."""
    pixels = _pixel_stage_flops(config, patches, in_chunks)
    heads = pid_heads_flops(config, patches) if in_chunks else 0
    return _patch_stage_flops(config, patches, text_tokens) + pixels + heads


def _patch_stage_flops(config: Any, patches: int, text_tokens: int) -> int:
    width, joint = config.hidden_size, patches + text_tokens
    per_token = 4 * width**2 + 3 * width * int(8 * width / 3)
    block = joint * per_token + 2 * joint**2 * width + 2 * 6 * width**2
    gates = math.ceil(config.patch_depth / config.lq_interval) + config.pit_lq_inject
    is_per_dim = config.lq_gate_type == "sigma_aware_per_token_per_dim"
    gate = patches * 2 * width * (width if is_per_dim else 1)
    embedding = patches * config.in_channels * config.patch_size**2 * width
    embedding += text_tokens * config.txt_embed_dim * width + (256 + width) * width
    return 2 * (config.patch_depth * block + gates * gate + embedding)


def _pixel_stage_flops(config: Any, patches: int, in_chunks: bool) -> int:
    """In chunks, every pass takes the pixels from the start: block d is expanded once for every pass after it."""
    per_patch, narrow, wide = config.patch_size**2, config.pixel_hidden_size, config.pixel_attn_hidden_size
    modulation = config.hidden_size * per_patch * 6 * narrow
    link = per_patch * narrow * wide  # to and from the attention's width
    mlp = per_patch * 2 * narrow * 4 * narrow
    attention = 4 * wide**2 + 2 * patches * wide
    depth = config.pixel_depth
    expansions = depth * (depth + 1) // 2 if in_chunks else depth
    modulations = depth + expansions if in_chunks else depth
    embeddings = depth + 1 if in_chunks else 1
    ends = per_patch * config.in_channels * narrow * (embeddings + 1)
    per_picture = modulations * modulation + depth * (link + attention) + expansions * (link + mlp) + ends
    return 2 * patches * per_picture


def caption_flops(tokens: int) -> int:
    """Gemma-2-2b over so many tokens."""
    linear = 2 * GEMMA["width"] * (GEMMA["query"] + GEMMA["key"]) + 3 * GEMMA["width"] * GEMMA["hidden"]
    return 2 * GEMMA["layers"] * tokens * (linear + 2 * tokens * GEMMA["query"])
