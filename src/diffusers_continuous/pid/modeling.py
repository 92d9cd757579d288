"""The network: a noisy picture, its time, a caption, a latent and the latent's noise level -> the picture's velocity.

Two stages. The patch stage is a transformer over 16 x 16 patches and the caption; the pixel stage refines every pixel
under the condition that the patch stage made of its patch. Everything but the two kinds of attention and the latent's
convolutions treats patches one by one, so it can be done a chunk of patches at a time: the same sums, other bytes.

Knows nothing of schedules, noise and checkpoints' files.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import nn

from ..errors import ConfigError, RequestError
from . import memory
from .adapter import GATE_TYPES, LatentFeatures, PaddingMode, PiDGate, PiDLatentAdapter
from .layers import (
    PiDFinalLayer,
    PiDLinearEmbedder,
    PiDPatchBlock,
    PiDPixelBlock,
    PiDTextEmbedder,
    PiDTimeEmbedder,
    map_slices,
    update_slices,
)
from .tables import TIME_FEATURES, Rotary, image_rotary, pixel_positions, text_rotary

Axes: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class PiDTransformer2DModel(ModelMixin, ConfigMixin):
    """The Pixel Diffusion Decoder's network, both families of released checkpoints.

    v1: `lq_gate_type="sigma_aware_per_token_per_dim"`, `lq_conv_padding_mode="zeros"`, no `pit_lq_inject`, reference
    size 1024. v1.5: `"sigma_aware_per_token"`, `"replicate"`, `pit_lq_inject=True`, reference size 2048. The defaults
    are those of the Qwen-Image v1.5 network. The parameters have the names of the official checkpoints without `net.`.

    `trained_sides` is the range of sqrt(height * width), in pixels, that the weights were trained for; None if that
    is not known.
    """

    _supports_gradient_checkpointing = False
    _no_split_modules: ClassVar = ["PiDPatchBlock", "PiDPixelBlock"]
    _repeated_blocks: ClassVar = ["PiDPatchBlock", "PiDPixelBlock"]
    # Called outside `forward`, so group offloading must bring their weights in by themselves.
    _group_offload_block_modules: ClassVar = ["lq_proj", "pit_head"]

    @register_to_config
    def __init__(
        self,
        in_channels: int = 3,
        patch_size: int = 16,
        hidden_size: int = 1536,
        num_groups: int = 24,
        patch_depth: int = 14,
        pixel_hidden_size: int = 16,
        pixel_attn_hidden_size: int = 1152,
        pixel_num_groups: int = 16,
        pixel_depth: int = 2,
        txt_embed_dim: int = 2304,
        txt_max_length: int = 300,
        text_rope_theta: float = 10000.0,
        rope_ref_h: int = 2048,
        rope_ref_w: int = 2048,
        lq_latent_channels: int = 16,
        lq_hidden_dim: int = 1024,
        lq_num_res_blocks: int = 4,
        lq_latent_unpatchify_factor: int = 1,
        lq_conv_padding_mode: PaddingMode = "replicate",
        lq_gate_type: str = "sigma_aware_per_token",
        lq_interval: int = 2,
        pit_lq_inject: bool = True,
        sr_scale: int = 4,
        latent_spatial_down_factor: int = 8,
        trained_sides: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        _check_config(self.config)
        self.y_pos_embedding = nn.Parameter(torch.randn(1, txt_max_length, hidden_size) * 0.02)
        self.pixel_embedder = PiDLinearEmbedder(in_channels, pixel_hidden_size)
        self.s_embedder = PiDLinearEmbedder(in_channels * patch_size**2, hidden_size)
        self.t_embedder = PiDTimeEmbedder(TIME_FEATURES, hidden_size)
        self.y_embedder = PiDTextEmbedder(txt_embed_dim, hidden_size)
        self.patch_blocks = nn.ModuleList(PiDPatchBlock(hidden_size, num_groups) for _ in range(patch_depth))
        self.pixel_blocks = nn.ModuleList(
            PiDPixelBlock(hidden_size, pixel_hidden_size, pixel_attn_hidden_size, pixel_num_groups, patch_size**2)
            for _ in range(pixel_depth)
        )
        self.final_layer = PiDFinalLayer(pixel_hidden_size, in_channels)
        self.lq_proj = PiDLatentAdapter(
            latent_channels=lq_latent_channels,
            hidden_dim=lq_hidden_dim,
            out_dim=hidden_size,
            num_outputs=math.ceil(patch_depth / lq_interval),
            patch_size=patch_size,
            sr_scale=sr_scale,
            latent_spatial_down_factor=latent_spatial_down_factor,
            latent_unpatchify_factor=lq_latent_unpatchify_factor,
            num_res_blocks=lq_num_res_blocks,
            conv_padding_mode=lq_conv_padding_mode,
            gate_type=lq_gate_type,
            has_pit_head=pit_lq_inject,
        )
        self.pit_lq_gate = PiDGate(hidden_size, lq_gate_type) if pit_lq_inject else None

    @classmethod
    def from_original(cls, state_dict: Mapping[str, torch.Tensor], **config: Any) -> PiDTransformer2DModel:
        """The network with an official checkpoint's tensors, in their dtype; `config` has the official names.

        Raises:
            ConfigError: names every tensor that is missing, unexpected or of another shape, and impossible options.
        """
        from .conversion import convert_config, convert_state_dict, load_exactly

        with torch.device("meta"):
            model = cls(**convert_config(config))
        return load_exactly(model, convert_state_dict(state_dict))

    # ------------------------------------------------------------------ sizes and bytes

    @property
    def spatial_scale(self) -> int:
        """Output pixels per latent cell along an axis."""
        return int(self.config.sr_scale * self.config.latent_spatial_down_factor)

    def output_size(self, latents: torch.Tensor) -> tuple[int, int]:
        """(height, width) of the picture that (batch, channels, h, w) latents stand for."""
        return latents.shape[2] * self.spatial_scale, latents.shape[3] * self.spatial_scale

    def warn_if_untrained_size(self, height: int, width: int) -> None:
        """Warn, in one sentence, about a size that the weights were not trained for."""
        sides = self.config.trained_sides
        if sides is not None and not sides[0] <= math.sqrt(height * width) <= sides[1]:
            warnings.warn(
                f"{height} x {width} pixels is outside what this decoder was trained for: sqrt(height * width) from "
                f"{sides[0]} to {sides[1]}. The picture may be worse.",
                stacklevel=3,
            )

    def estimate_decode_bytes(
        self,
        height: int,
        width: int,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        chunk: int | None = None,
        text_length: int | None = None,
    ) -> int:
        """The largest sum of live tensors, in bytes, of one step that starts from latents; weights are not counted.

        Counted are the inputs (float32 picture, latents and caption), the result and all that exists in between.
        `dtype` is the weights', `chunk` the number of patches done at a time (None: all).
        """
        return memory.estimate_decode_bytes(self.config, height, width, batch, dtype.itemsize, chunk, text_length)

    def choose_chunk(
        self, height: int, width: int, batch: int, max_bytes: int, text_length: int | None = None
    ) -> int | None:
        """The largest chunk with which a step needs at most `max_bytes`; None if it fits undivided.

        Raises:
            RequestError: if even the smallest chunk needs more.
        """
        itemsize = self.dtype.itemsize
        return memory.choose_chunk(self.config, height, width, batch, itemsize, max_bytes, text_length)

    # ------------------------------------------------------------------ forward

    @apply_forward_hook  # so that offloading brings the weights in, as for `forward`
    def encode_latents(
        self, latents: torch.Tensor, height: int | None = None, width: int | None = None, with_heads: bool = True
    ) -> LatentFeatures:
        """(batch, channels, h, w) normalised latents -> what every step takes in their place.

        `height` and `width` are the picture's, by default `output_size(latents)`. `with_heads=False` leaves the last
        linear maps to the steps, which makes the features of a large picture several times smaller.
        """
        default = self.output_size(latents) if latents.ndim == 4 else (0, 0)
        size = (height or default[0], width or default[1])
        self._check_latents(latents, latents.shape[0], *size)
        grid = (size[0] // self.config.patch_size, size[1] // self.config.patch_size)
        return self.lq_proj(latents, grid, self.dtype, with_heads)

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        latents: torch.Tensor | LatentFeatures,
        sigma: torch.Tensor | float,
        return_dict: bool = True,
        chunk: int | None = None,
        max_bytes: int | None = None,
    ) -> Transformer2DModelOutput | tuple[torch.Tensor]:
        """Velocity (noise minus picture) of (batch, 3, height, width) noisy pictures, in their dtype.

        Args:
            timestep: (batch,) network times, 0 (picture) to 1000 (noise); float32, never rounded.
            encoder_hidden_states: (batch, tokens, txt_embed_dim) caption; tokens beyond `txt_max_length` are ignored.
            latents: (batch, channels, h, w), normalised as the denoiser sees them, or what `encode_latents` made.
            sigma: noise level of the latents, 0 to 1, one for all or (batch,).
            chunk: patches (per picture) that go through at once; None for all. Needs `torch.no_grad()`.
            max_bytes: choose the chunk so that the step needs no more than this, by `estimate_decode_bytes`.

        Raises:
            RequestError: for any input that does not fit, before any work.
        """
        batch, _, height, width = self._check_images(hidden_states)
        timestep, sigma = (
            _per_row(x, name, batch, hidden_states.device) for x, name in ((timestep, "timestep"), (sigma, "sigma"))
        )
        self._check_conditions(encoder_hidden_states, latents, timestep, sigma, batch, height, width)
        if max_bytes is not None and chunk is None:
            text_length = encoder_hidden_states.shape[1]
            chunk = self.choose_chunk(height, width, batch, max_bytes, text_length)
        chunk = _check_chunk(chunk, height * width // self.config.patch_size**2)
        features = latents
        if isinstance(features, torch.Tensor):
            features = self.encode_latents(features, height, width, with_heads=chunk is None)
        condition = self._patch_stage(
            hidden_states, timestep, encoder_hidden_states, features, sigma, memory.token_chunk(chunk)
        )
        sample = self._pixel_stage(hidden_states, condition, chunk)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def _patch_stage(
        self,
        images: torch.Tensor,
        timestep: torch.Tensor,
        captions: torch.Tensor,
        features: LatentFeatures,
        sigma: torch.Tensor,
        chunk: int | None,
    ) -> torch.Tensor:
        """What the pixel stage is to know of each patch: (batch, patches, hidden_size) in the weights' dtype."""
        cutter = PatchCutter(images, self.config.patch_size)
        image = map_slices(lambda part: self.s_embedder(cutter.patches(part), self.dtype), cutter.num_patches, chunk)
        text = self._embed_text(captions)
        time = self.t_embedder(timestep, self.dtype)[:, None]  # (batch, 1, hidden_size)
        rotary = self._patch_rotary(features.grid, text)
        condition = F.silu(time)
        for index, block in enumerate(self.patch_blocks):
            if index % self.config.lq_interval == 0:
                image = self._inject(index // self.config.lq_interval, image, features, sigma, chunk)
            image, text = block(image, text, condition, rotary, chunk)

        def finish(part: slice) -> torch.Tensor:
            """(batch, patches of `part`, hidden_size) in the weights' dtype."""
            tokens = F.silu(time + image[:, part])
            if self.pit_lq_gate is not None:
                tokens = self.pit_lq_gate(tokens, self._feature(-1, features, part), sigma)
            return tokens.to(self.dtype)

        return map_slices(finish, cutter.num_patches, chunk)

    def _embed_text(self, captions: torch.Tensor) -> torch.Tensor:
        captions = captions[:, : self.config.txt_max_length]
        return self.y_embedder(captions, self.dtype) + self.y_pos_embedding[:, : captions.shape[1]]

    def _patch_rotary(self, grid: tuple[int, int], text: torch.Tensor) -> tuple[Rotary, Rotary]:
        head_dim = self.config.hidden_size // self.config.num_groups
        theta = self.config.text_rope_theta
        return self._image_rotary(grid, head_dim, text.device), text_rotary(text.shape[1], head_dim, theta, text.device)

    def _image_rotary(self, grid: tuple[int, int], head_dim: int, device: torch.device) -> Rotary:
        patch = self.config.patch_size
        reference = (self.config.rope_ref_h / patch, self.config.rope_ref_w / patch)
        return image_rotary(grid, reference, head_dim, device)

    def _inject(
        self, index: int, image: torch.Tensor, features: LatentFeatures, sigma: torch.Tensor, chunk: int | None
    ) -> torch.Tensor:
        gate = self.lq_proj.gate_modules[index]
        return update_slices(lambda x, part: gate(x, self._feature(index, features, part), sigma), image, chunk)

    def _feature(self, index: int, features: LatentFeatures, part: slice) -> torch.Tensor:
        if features.heads is not None:
            return features.heads[index][:, part]
        return self.lq_proj.all_heads[index](features.trunk[:, part])

    def _pixel_stage(self, images: torch.Tensor, condition: torch.Tensor, chunk: int | None) -> torch.Tensor:
        """(batch, channels, height, width) and each patch's condition -> velocity, in the images' shape and dtype."""
        cutter = PatchCutter(images, self.config.patch_size)
        head_dim = self.config.pixel_attn_hidden_size // self.config.pixel_num_groups
        rotary = self._image_rotary(cutter.grid, head_dim, images.device)
        run = self._pixels_whole if chunk is None else partial(self._pixels_in_chunks, chunk=chunk)
        return cutter.join(run(cutter, condition, rotary)).to(images.dtype)

    def _pixels_whole(self, cutter: PatchCutter, condition: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """The plain pixel stage: (batch, patches, pixels of a patch, channels)."""
        axes = cutter.axes(self.config.pixel_hidden_size)
        pixels = self._embed_pixels(cutter, slice(0, cutter.num_patches), axes)
        for block in self.pixel_blocks:
            pixels = block("whole", pixels, condition, rotary)
        return self.final_layer(pixels, self.dtype)

    def _pixels_in_chunks(
        self, cutter: PatchCutter, condition: torch.Tensor, rotary: Rotary, chunk: int
    ) -> torch.Tensor:
        """The same without ever having all pixel tokens, or all modulations, at once.

        What the attention of block d needs is made by taking the pixels of a chunk from the start through the blocks
        before d, whose attention is known by then. With the two blocks of the released networks that costs three more
        modulations per patch than the plain way, less than a tenth of a step.
        """
        axes = cutter.axes(self.config.pixel_hidden_size)
        attended: list[torch.Tensor] = []

        def advance(part: slice) -> torch.Tensor:
            """The patches' way as far as attention is known: the next one's input, or at the end their pixels."""
            pixels = self._embed_pixels(cutter, part, axes)
            for block, found in zip(self.pixel_blocks, attended, strict=False):
                pixels = block("expand", pixels, condition[:, part], found[:, part])
            if len(attended) == len(self.pixel_blocks):
                return self.final_layer(pixels, self.dtype)
            return self.pixel_blocks[len(attended)]("compress", pixels, condition[:, part])

        token_chunk = memory.token_chunk(chunk)
        for block in self.pixel_blocks:
            # The attention's input gets no name here, or it would outlive the attention.
            attended.append(block("attend", map_slices(advance, cutter.num_patches, chunk), rotary, token_chunk))
        return map_slices(advance, cutter.num_patches, chunk)

    def _embed_pixels(self, cutter: PatchCutter, part: slice, axes: Axes) -> torch.Tensor:
        """Pixel tokens of some patches: (batch, patches, pixels of a patch, pixel_hidden_size) float32."""
        return self.pixel_embedder(cutter.pixels(part), self.dtype) + cutter.positions(part, axes)

    # ------------------------------------------------------------------ refusals

    def check_latents(self, latents: torch.Tensor, sigma: torch.Tensor | Sequence[float] | float) -> torch.Tensor:
        """Noise levels of (batch, channels, h, w) latents as (batch,) float32, if both are as they should be.

        Raises:
            RequestError: names the value and what it should be.
        """
        height, width = self.output_size(latents) if latents.ndim == 4 else (0, 0)
        self._check_latents(latents, latents.shape[0], height, width)
        rows = _per_row(sigma, "sigma", latents.shape[0], latents.device)
        _check_range("sigma", rows, 1)
        return rows

    def _check_images(self, images: torch.Tensor) -> torch.Size:
        if images.ndim != 4 or images.shape[1] != self.config.in_channels:
            raise RequestError(
                f"hidden_states must be (batch, {self.config.in_channels}, height, width), not {tuple(images.shape)}"
            )
        self._check_size(*images.shape[2:])
        return images.shape

    def _check_size(self, height: int, width: int) -> None:
        patch = self.config.patch_size
        if height < patch or width < patch or height % patch or width % patch:
            raise RequestError(f"the output size must be a multiple of {patch} pixels, not {height} x {width}")

    def _check_latents(self, latents: torch.Tensor, batch: int, height: int, width: int) -> None:
        channels = self.config.lq_latent_channels
        if latents.ndim != 4:
            raise RequestError(
                f"latents must be unpacked, (batch, {channels}, h, w), not of shape {tuple(latents.shape)}"
            )
        if latents.shape[1] != channels:
            raise RequestError(f"this decoder takes latents of {channels} channels, not {latents.shape[1]}")
        if latents.shape[0] != batch:
            raise RequestError(f"{latents.shape[0]} latents do not fit {batch} pictures")
        self._check_size(height, width)

    def _check_conditions(
        self,
        captions: torch.Tensor,
        latents: torch.Tensor | LatentFeatures,
        timestep: torch.Tensor,
        sigma: torch.Tensor,
        batch: int,
        height: int,
        width: int,
    ) -> None:
        if captions.ndim != 3 or captions.shape[2] != self.config.txt_embed_dim or captions.shape[1] == 0:
            expected = f"(batch, tokens, {self.config.txt_embed_dim})"
            raise RequestError(f"encoder_hidden_states must be {expected}, not {tuple(captions.shape)}")
        if captions.shape[0] != batch:
            raise RequestError(f"{captions.shape[0]} captions do not fit {batch} pictures")
        if isinstance(latents, LatentFeatures):
            grid = (height // self.config.patch_size, width // self.config.patch_size)
            if latents.grid != grid or latents.trunk.shape[0] != batch:
                made_for = f"{latents.trunk.shape[0]} x {latents.grid}"
                raise RequestError(f"features were encoded for {made_for} patches, the pictures have {batch} x {grid}")
        else:
            self._check_latents(latents, batch, height, width)
        _check_range("timestep", timestep, 1000)
        _check_range("sigma", sigma, 1)


@dataclass(frozen=True, slots=True, eq=False)
class PatchCutter:
    """Cuts patches out of (batch, channels, height, width) pictures, row by row, and joins them again."""

    images: torch.Tensor
    size: int

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.images.shape[2] // self.size, self.images.shape[3] // self.size

    @property
    def num_patches(self) -> int:
        """Patches per picture."""
        return self.grid[0] * self.grid[1]

    def _places(self, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.arange(part.start, part.stop, device=self.images.device)
        return index // self.grid[1], index % self.grid[1]

    def _cut(self, part: slice, order: tuple[int, ...]) -> torch.Tensor:
        rows, columns = self._places(part)
        cut = self.images.unflatten(3, (-1, self.size)).unflatten(2, (-1, self.size)).permute(0, 2, 4, *order)
        return cut[:, rows, columns]

    def patches(self, part: slice) -> torch.Tensor:
        """(batch, patches, values of a patch), channel by channel."""
        return self._cut(part, (1, 3, 5)).flatten(2)

    def pixels(self, part: slice) -> torch.Tensor:
        """(batch, patches, pixels of a patch, channels)."""
        return self._cut(part, (3, 5, 1)).flatten(2, 3)

    def axes(self, width: int) -> Axes:
        """Tables of where the pixels' rows and columns are, for `positions`: (rows or columns, size, width / 2)."""
        y, x = (pixel_positions(n, width // 2).to(self.images.device, torch.float32) for n in self.images.shape[2:])
        return y.unflatten(0, (-1, self.size)), x.unflatten(0, (-1, self.size))

    def positions(self, part: slice, axes: Axes) -> torch.Tensor:
        """Where in the picture each pixel is: (patches, pixels of a patch, width) float32, columns first."""
        along_y, along_x = axes
        rows, columns = self._places(part)
        shape = (-1, self.size, self.size, -1)
        where = [along_x[columns][:, None].expand(shape), along_y[rows][:, :, None].expand(shape)]
        return torch.cat(where, -1).flatten(1, 2)

    def join(self, pixels: torch.Tensor) -> torch.Tensor:
        """(batch, patches, pixels of a patch, channels) -> (batch, channels, height, width)."""
        cut = pixels.unflatten(2, (self.size, self.size)).unflatten(1, self.grid)
        return cut.permute(0, 5, 1, 3, 2, 4).reshape(self.images.shape)


def _per_row(value: Any, name: str, batch: int, device: torch.device) -> torch.Tensor:
    """A number or a list, as (batch,) float32."""
    rows = torch.as_tensor(value, dtype=torch.float32, device=device)
    if rows.ndim == 0:
        return rows.expand(batch)
    if rows.shape != (batch,):
        raise RequestError(f"{name} must be one number or {batch}, not of shape {tuple(rows.shape)}")
    return rows


def _check_range(name: str, values: torch.Tensor, upper: float) -> None:
    if torch.compiler.is_compiling() or values.device.type == "meta":
        return
    if not bool(((values >= 0) & (values <= upper)).all()):
        raise RequestError(f"{name} must lie between 0 and {upper}, not {values.tolist()}")


def _check_chunk(chunk: int | None, num_patches: int) -> int | None:
    """None where one chunk would hold everything."""
    if chunk is None or chunk >= num_patches:
        return None
    if chunk < 1:
        raise RequestError(f"chunk must be at least 1 patch, not {chunk}")
    if torch.is_grad_enabled():
        raise RequestError("chunks overwrite the streams they work on: call the network under torch.no_grad()")
    return chunk


def _check_config(config: Any) -> None:
    heads = {"hidden_size": "num_groups", "pixel_attn_hidden_size": "pixel_num_groups"}
    for width, count in heads.items():
        if config[width] % (4 * config[count]):
            raise ConfigError(f"{width}={config[width]} must be 4 x {count}={config[count]} times a whole number")
    if config["pixel_hidden_size"] % 4:
        raise ConfigError(f"pixel_hidden_size={config['pixel_hidden_size']} must be a multiple of 4")
    if config["lq_gate_type"] not in GATE_TYPES:
        raise ConfigError(f"lq_gate_type={config['lq_gate_type']!r} is not known; choose from {sorted(GATE_TYPES)}")
