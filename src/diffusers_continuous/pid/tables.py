"""Positions and times as numbers: rotary tables, pixel positions, the time sinusoid. No parameters live here."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch

# Cosines and sines of the rotary angles, each (tokens, head_dim / 2), float32.
Rotary: TypeAlias = tuple[torch.Tensor, torch.Tensor]

ROPE_THETA = 10000.0
# Patch positions run from 0 to this on both axes, whatever the size of the picture.
ROPE_EXTENT = 16.0
TIME_FEATURES = 256
TIME_MAX_PERIOD = 10.0


def image_rotary(
    grid: tuple[int, int], reference: tuple[float, float], head_dim: int, device: torch.device | None = None
) -> Rotary:
    """The table of a (rows, columns) grid of patches, row by row; axes alternate: x, y, x, y, ...

    A grid that is larger than `reference` along an axis stretches that axis's wavelengths ("NTK aware").
    """
    (rows, columns), exponent = grid, torch.arange(0, head_dim, 4, device=device)[: head_dim // 4].float() / head_dim
    y, x = (torch.linspace(0, ROPE_EXTENT, n, device=device) for n in grid)
    theta_y, theta_x = (_stretched_theta(n / r, head_dim) for n, r in zip(grid, reference, strict=True))
    angles_x = torch.outer(x, 1.0 / theta_x**exponent)[None].expand(rows, -1, -1)
    angles_y = torch.outer(y, 1.0 / theta_y**exponent)[:, None].expand(-1, columns, -1)
    angles = torch.stack([angles_x, angles_y], -1).view(rows * columns, -1)
    return angles.cos(), angles.sin()


def _stretched_theta(ratio: float, head_dim: int) -> float:
    half = head_dim / 2
    return ROPE_THETA * ratio ** (half / (half - 2)) if half > 2 else ROPE_THETA


def text_rotary(length: int, head_dim: int, theta: float = ROPE_THETA, device: torch.device | None = None) -> Rotary:
    """The table of `length` text tokens at positions 0, 1, 2, ..."""
    exponent = torch.arange(0, head_dim, 2, device=device)[: head_dim // 2].float() / head_dim
    angles = torch.outer(torch.arange(length, device=device).float(), 1.0 / theta**exponent)
    return angles.cos(), angles.sin()


def apply_rotary(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Turn consecutive pairs of (batch, tokens, heads, head_dim) features, in float32; keeps the dtype."""
    cos, sin = (table[:, None] for table in rotary)  # (tokens, 1, head_dim / 2)
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)


def pixel_positions(length: int, width: int) -> torch.Tensor:
    """Sines, then cosines of `length` pixel indices along one axis: (length, width), float64, on the CPU.

    Float64 because the reference rounds only the finished table; on the CPU because not every device has float64.
    """
    frequencies = ROPE_THETA ** -(torch.arange(width // 2, dtype=torch.float64) / (width // 2))
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return torch.cat([angles.sin(), angles.cos()], -1)


def time_features(timestep: torch.Tensor) -> torch.Tensor:
    """(batch,) network times, 0 to 1000 -> (batch, 256), cosines first, float32.

    The longest period is 10, not the usual 10,000: rounding the time to bfloat16 (999 becomes 1000) would turn the
    fast phases by a whole radian, so it stays float32 up to here.
    """
    half = TIME_FEATURES // 2
    steps = torch.arange(half, dtype=torch.float32, device=timestep.device)
    angles = timestep.float()[:, None] * torch.exp(-math.log(TIME_MAX_PERIOD) * steps / half)
    return torch.cat([angles.cos(), angles.sin()], -1)
