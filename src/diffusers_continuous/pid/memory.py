"""What one step of the network needs beside its weights, in bytes, and which chunk of patches fits a budget.

The formulas add up the tensors that are alive together at the moments that can be the worst; each is written next to
the line of `layers` or `modeling` that it describes. Tests hold them against the measured peak. No torch here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError

# Patches that the patch stage and the attentions take at once, whatever the chunk: fewer save next to nothing (one
# patch is 6 * 256 * 16 numbers in the pixel stage, 1,536 here), and few rows make kernels sum in another order.
MIN_TOKEN_CHUNK = 256
# The pixel stage's products get a multiple of so many rows, for the same reason: kernels work in such tiles and sum
# what is left over in another order. On two threads of an x86 processor that decides between 0 and 4e-5.
ROW_TILE = 4
FLOAT32 = 4


def padded_tokens(batch: int, tokens: int) -> int:
    """The least number, `tokens` or more, with which (batch, tokens) is a whole number of row tiles."""
    while batch * tokens % ROW_TILE:
        tokens += 1
    return tokens


def token_chunk(chunk: int | None) -> int | None:
    """Patches at once where a patch is one token."""
    return None if chunk is None else max(chunk, MIN_TOKEN_CHUNK)


def estimate_decode_bytes(
    config: Any, height: int, width: int, batch: int, itemsize: int, chunk: int | None, text_length: int | None = None
) -> int:
    """The largest sum of live tensors of a step that starts from latents: inputs, result and all in between.

    `itemsize` is the weights', in bytes; `chunk` is in patches per picture, None for all at once.
    """
    step = StepBytes(config, height, width, batch, itemsize, chunk, text_length or config.txt_max_length)
    return step.inputs + max(
        step.adapter(),
        step.embedding(),
        step.projections(),
        step.attention(),
        step.mlp(),
        step.pixel_attention(),
        step.pixels(),
        step.result(),
    )


def choose_chunk(
    config: Any,
    height: int,
    width: int,
    batch: int,
    itemsize: int,
    max_bytes: int,
    text_length: int | None = None,
) -> int | None:
    """The largest of all patches, half of them, a quarter, ... with which a step fits; None stands for all.

    Raises:
        RequestError: if one patch at a time is still too much; names what is needed.
    """
    num_patches = (height // config.patch_size) * (width // config.patch_size)
    needed = 0
    for halvings in range(num_patches.bit_length() + 1):
        chunk = math.ceil(num_patches / 2**halvings) if halvings else None
        needed = estimate_decode_bytes(config, height, width, batch, itemsize, chunk, text_length)
        if needed <= max_bytes:
            return chunk
    raise RequestError(f"{batch} x {height} x {width} pixels need at least {needed:,} bytes, max_bytes={max_bytes:,}")


@dataclass(frozen=True, slots=True)
class StepBytes:
    """One step's sizes. Every method gives the bytes alive at one moment, `inputs` aside."""

    config: Any
    height: int
    width: int
    batch: int
    itemsize: int
    chunk: int | None
    text_length: int

    @property
    def pixel_values(self) -> int:
        """Numbers in the pictures."""
        return self.batch * self.config.in_channels * self.height * self.width

    @property
    def patches(self) -> int:
        """Patches of all pictures."""
        return self.batch * (self.height // self.config.patch_size) * (self.width // self.config.patch_size)

    def _at_once(self, chunk: int | None) -> int:
        """Patches of all pictures that a slice has, of nearly equal slices."""
        per_picture = self.patches // self.batch
        if chunk is None or chunk >= per_picture:
            return self.patches
        return self.batch * math.ceil(per_picture / math.ceil(per_picture / chunk))

    @property
    def is_whole(self) -> bool:
        """True when nothing is divided."""
        return self._at_once(self.chunk) == self.patches

    @property
    def tokens_at_once(self) -> int:
        """Patches in a slice of the patch stage."""
        return self._at_once(None if self.is_whole else token_chunk(self.chunk))

    @property
    def joint_tokens(self) -> int:
        """Patches and text tokens."""
        return self.patches + self.batch * min(self.text_length, self.config.txt_max_length)

    @property
    def inputs(self) -> int:
        """Noisy pictures, captions and latents, float32."""
        cfg = self.config
        scale = cfg.sr_scale * cfg.latent_spatial_down_factor
        latents = self.batch * cfg.lq_latent_channels * self.height * self.width // scale**2
        return FLOAT32 * (self.pixel_values + self.batch * self.text_length * cfg.txt_embed_dim + latents)

    @property
    def features(self) -> int:
        """The adapter's result; undivided steps have the heads' too."""
        cfg = self.config
        heads = math.ceil(cfg.patch_depth / cfg.lq_interval) + cfg.pit_lq_inject if self.is_whole else 0
        return self.itemsize * self.patches * (cfg.lq_hidden_dim + heads * cfg.hidden_size)

    @property
    def streams(self) -> int:
        """The patch stage's float32 streams, the features, and both rotary tables of one picture."""
        cfg = self.config
        rotary = FLOAT32 * (self.joint_tokens // self.batch) * cfg.hidden_size // cfg.num_groups
        return FLOAT32 * self.joint_tokens * cfg.hidden_size + self.features + rotary

    def adapter(self) -> int:
        """The last convolution of a residual block: identity, hidden, input, padded input, output; or its norm."""
        cfg = self.config
        rows, columns = self.height // cfg.patch_size, self.width // cfg.patch_size
        padded = 0 if cfg.lq_conv_padding_mode == "zeros" else self.batch * (rows + 2) * (columns + 2)
        convolution = self.itemsize * (4 * self.patches + padded)
        norm = (2 * self.itemsize + 2 * FLOAT32) * self.patches
        return cfg.lq_hidden_dim * max(convolution, norm)

    def embedding(self) -> int:
        """Patches as float32 and in the weights' dtype, and what they become."""
        cfg = self.config
        values = cfg.in_channels * cfg.patch_size**2
        cut = self.tokens_at_once * (values * (FLOAT32 + self.itemsize) + FLOAT32 * cfg.hidden_size)
        whole = 0 if self.tokens_at_once == self.patches else FLOAT32 * self.patches * cfg.hidden_size
        return self.features + cut + whole

    def _qkv_work(self, width: int, tokens: int) -> int:
        """q, k and v of one slice: all three as projected, the finished q, and three float32 copies for k; or both
        finished ones and the stack of three."""
        return width * tokens * max(8 * self.itemsize, 4 * self.itemsize + 3 * FLOAT32)

    def projections(self) -> int:
        """Filling the joint buffer of queries, keys and values; undivided, the last slice is the buffer."""
        cfg = self.config
        joint = 0 if self.is_whole else 3 * self.itemsize * self.joint_tokens * cfg.hidden_size
        tokens = self.tokens_at_once
        work = self._qkv_work(cfg.hidden_size, tokens) + self.itemsize * tokens * cfg.hidden_size
        return self.streams + joint + work

    def attention(self) -> int:
        """Queries, keys, values and what was found, beside the log-sums that the kernel keeps."""
        cfg = self.config
        return self.streams + self.joint_tokens * (4 * self.itemsize * cfg.hidden_size + FLOAT32 * cfg.num_groups)

    def mlp(self) -> int:
        """What attention found; of a slice the new stream, the projection, the input and three hidden tensors."""
        cfg = self.config
        inner = int(8 * cfg.hidden_size / 3)
        work = (FLOAT32 + 2 * self.itemsize) * cfg.hidden_size + 3 * self.itemsize * inner
        found = self.itemsize * self.joint_tokens * cfg.hidden_size
        return self.streams + found + self.tokens_at_once * work

    def _pixel_stage(self, attention_tensors: int) -> int:
        """What the pixel stage keeps: conditions, features, the rotary table, and so many attention-wide tensors."""
        cfg = self.config
        kept = self.patches * (cfg.hidden_size + attention_tensors * cfg.pixel_attn_hidden_size) * self.itemsize
        rotary = FLOAT32 * (self.patches // self.batch) * cfg.pixel_attn_hidden_size // cfg.pixel_num_groups
        return kept + rotary + self.features

    @property
    def _found(self) -> int:
        """Results of attentions that are kept: in chunks, every block's."""
        return 1 if self.is_whole else self.config.pixel_depth

    def pixel_attention(self) -> int:
        """Input, queries, keys, values and output, beside what the blocks before found; undivided, never the worst."""
        log_sums = FLOAT32 * self.patches * self.config.pixel_num_groups
        return self._pixel_stage(self._found - 1 + 5) + log_sums

    def pixels(self) -> int:
        """A slice inside the per-pixel MLP: modulation, pixels before and after attention, input, hidden twice."""
        cfg = self.config
        values = cfg.patch_size**2 * cfg.pixel_hidden_size
        patches = self._at_once(self.chunk)
        rows = self.batch * padded_tokens(self.batch, patches // self.batch)
        work = values * (patches * (2 * FLOAT32 + self.itemsize + 8 * self.itemsize) + rows * 6 * self.itemsize)
        result = 0 if self.is_whole else self.itemsize * self.pixel_values
        return self._pixel_stage(self._found) + work + result

    def result(self) -> int:
        """The velocity as pixels of patches and as a picture, or as a picture in two dtypes."""
        return self._pixel_stage(self._found) + self.pixel_values * max(2 * self.itemsize, self.itemsize + FLOAT32)
