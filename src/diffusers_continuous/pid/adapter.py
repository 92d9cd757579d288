"""From a latent to what the network adds to its streams. Does not depend on the time: once per image is enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

GROUPS = 4
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]
GATE_TYPES = {"sigma_aware_per_token": False, "sigma_aware_per_token_per_dim": True}


@dataclass(frozen=True, slots=True, eq=False)
class LatentFeatures:
    """What the adapter made of latents: good for every step at this size and noise-independent.

    `trunk` is (batch, patches, lq_hidden_dim). `heads` are the finished features of the injection points, each
    (batch, patches, hidden_size), the one of the pixel stage last, or None: then each is made where it is used, chunk
    by chunk, which costs a fraction of a percent of a step and saves most of the memory.
    """

    grid: tuple[int, int]
    trunk: torch.Tensor
    heads: tuple[torch.Tensor, ...] | None

    @staticmethod
    def stack(features: Sequence[LatentFeatures]) -> LatentFeatures:
        """Put rows of one size together, so that they share a forward."""
        if len(features) == 1:
            return features[0]
        grids = {item.grid for item in features}
        if len(grids) != 1:
            raise ValueError(f"only features of one grid can share a forward, not {sorted(grids)}")
        made = [item.heads for item in features if item.heads is not None]
        if len(made) not in (0, len(features)):
            raise ValueError("features with and without finished heads cannot share a forward")
        heads = tuple(torch.cat(parts) for parts in zip(*made, strict=True)) if made else None
        return LatentFeatures(features[0].grid, torch.cat([item.trunk for item in features]), heads)


class PiDGroupNorm(nn.GroupNorm):
    """Group norm whose statistics and result are float32 whatever comes in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, channels, rows, columns) -> the same shape, float32."""
        return F.group_norm(x.float(), self.num_groups, self.weight.float(), self.bias.float(), self.eps)


class PiDResidualBlock(nn.Module):
    """Two convolutions beside the identity."""

    def __init__(self, dim: int, padding_mode: PaddingMode) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(dim, dim, 3, padding=1, padding_mode=padding_mode) for _ in range(2)]
        norms = [PiDGroupNorm(GROUPS, dim) for _ in range(2)]
        self.block = nn.ModuleList([norms[0], nn.SiLU(), convolutions[0], norms[1], nn.SiLU(), convolutions[1]])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, dim, rows, columns) -> the same."""
        hidden = x
        for norm, act, conv in (self.block[:3], self.block[3:]):
            hidden = conv(act(norm(hidden)).to(x.dtype))
        return x + hidden


class PiDLatentAdapter(nn.Module):
    """Latents of any size, brought to the grid of patches, through convolutions to one feature map per head.

    `ratio` is the number of patches per latent cell along an axis: above 1 cells are repeated, below 1 folded into
    channels.
    """

    def __init__(
        self,
        latent_channels: int,
        hidden_dim: int,
        out_dim: int,
        num_outputs: int,
        patch_size: int,
        sr_scale: int,
        latent_spatial_down_factor: int,
        latent_unpatchify_factor: int = 1,
        num_res_blocks: int = 4,
        conv_padding_mode: PaddingMode = "zeros",
        gate_type: str = "sigma_aware_per_token",
        has_pit_head: bool = False,
    ) -> None:
        super().__init__()
        self.unpatchify_factor = latent_unpatchify_factor
        self.ratio = sr_scale * latent_spatial_down_factor / (latent_unpatchify_factor * patch_size)
        channels = latent_channels // latent_unpatchify_factor**2 * self.fold_factor**2
        first, second = (
            nn.Conv2d(c, hidden_dim, 3, padding=1, padding_mode=conv_padding_mode) for c in (channels, hidden_dim)
        )
        blocks = [PiDResidualBlock(hidden_dim, conv_padding_mode) for _ in range(num_res_blocks)]
        self.latent_proj = nn.Sequential(first, nn.SiLU(), second, *blocks)
        self.output_heads = nn.ModuleList(nn.Linear(hidden_dim, out_dim) for _ in range(num_outputs))
        self.pit_head = nn.Linear(hidden_dim, out_dim) if has_pit_head else None
        self.gate_modules = nn.ModuleList(PiDGate(out_dim, gate_type) for _ in range(num_outputs))

    @property
    def fold_factor(self) -> int:
        """Latent cells per patch along an axis, at least 1."""
        return max(1, round(1 / self.ratio))

    @property
    def all_heads(self) -> list[nn.Module]:
        """The heads of the injection points, the pixel stage's last."""
        return [*self.output_heads, *([] if self.pit_head is None else [self.pit_head])]

    def forward(
        self, latents: torch.Tensor, grid: tuple[int, int], dtype: torch.dtype, with_heads: bool
    ) -> LatentFeatures:
        """(batch, channels, h, w) latents, (rows, columns) of patches -> features, see `LatentFeatures`."""
        trunk = self.latent_proj(self.align(latents, grid).to(dtype)).flatten(2).transpose(1, 2).contiguous()
        heads = tuple(head(trunk) for head in self.all_heads) if with_heads else None
        return LatentFeatures(grid, trunk, heads)

    def align(self, latents: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """(batch, channels, h, w) -> (batch, channels', rows, columns) of the grid."""
        latents = F.pixel_shuffle(latents, self.unpatchify_factor)
        if self.ratio > 1:
            return F.interpolate(latents, grid, mode="nearest")
        fine = (grid[0] * self.fold_factor, grid[1] * self.fold_factor)
        if tuple(latents.shape[2:]) != fine:
            latents = F.interpolate(latents, fine, mode="bilinear", align_corners=False)
        return F.pixel_unshuffle(latents, self.fold_factor)


class PiDGate(nn.Module):
    """How much of a latent feature joins a stream: less where the content says so, less the noisier the latent is."""

    def __init__(self, dim: int, gate_type: str) -> None:
        super().__init__()
        if gate_type not in GATE_TYPES:
            raise ValueError(f"lq_gate_type={gate_type!r} is not known; choose from {sorted(GATE_TYPES)}")
        self.content_proj = nn.Linear(2 * dim, dim if GATE_TYPES[gate_type] else 1)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(5.0)))
        nn.init.constant_(self.content_proj.bias, 2.0)  # open, until something is learnt

    def forward(self, x: torch.Tensor, feature: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, dim) stream and feature, (batch,) float32 noise levels -> the stream, float32."""
        return torch.addcmul(x, self.openness(x, feature, sigma), feature)

    def openness(self, x: torch.Tensor, feature: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """0 to 1: (batch, tokens, 1), or one number per dimension, float32."""
        content = self.content_proj(torch.cat([x.to(feature.dtype), feature], -1)).float()
        return torch.sigmoid(content - self.log_alpha.float().exp() * sigma.float()[:, None, None])
