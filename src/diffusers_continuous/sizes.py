"""Sizes of pictures as users write them, and what the model draws at for them. Knows no pipeline."""

from __future__ import annotations

import math
import re

from .errors import shorten

SIZE_MULTIPLE = 16  # a token is 2x2 latent pixels of 8x8 picture pixels
MAX_SIDE = 8192


def read_size(value: object, max_side: int = MAX_SIDE) -> tuple[int, int]:
    """(width, height) from "WxH" or [W, H]; both are multiples of 16 and at most `max_side`."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(-?\d{1,20})\s*[xX×]\s*(-?\d{1,20})\s*", value)  # noqa: RUF001
        sides = [int(side) for side in match.groups()] if match else []
    else:
        sides = value if isinstance(value, list) and all(type(side) is int for side in value) else []
    if len(sides) != 2:
        raise ValueError(f"size {shorten(value)} is not WIDTHxHEIGHT, for example 1328x1328 or 128x192")
    width, height = sides
    if min(sides) < SIZE_MULTIPLE or max(sides) > max_side:
        raise ValueError(f"size {width}x{height} is out of range: each side is {SIZE_MULTIPLE} to {max_side} pixels")
    if width % SIZE_MULTIPLE or height % SIZE_MULTIPLE:
        raise ValueError(
            f"size {width}x{height} is not a multiple of {SIZE_MULTIPLE} on both sides; the nearest sizes are "
            + _nearest_sizes(width, height, SIZE_MULTIPLE)
        )
    return width, height


def diffusion_size(size: tuple[int, int], scale: int) -> tuple[int, int]:
    """(width, height) that the model draws at for a decoder that makes pictures of `size`, `scale` times larger."""
    width, height = size
    multiple = scale * SIZE_MULTIPLE
    if width % multiple or height % multiple:
        raise ValueError(
            f"size {width}x{height}: a decoder that enlarges {scale} times makes multiples of {multiple}; the nearest "
            f"sizes are {_nearest_sizes(width, height, multiple)}"
        )
    return width // scale, height // scale


def _nearest_sizes(width: int, height: int, multiple: int) -> str:
    down, up = (
        [max(1, rounded(side / multiple)) * multiple for side in (width, height)] for rounded in (int, math.ceil)
    )
    return " and ".join(dict.fromkeys("{}x{}".format(*size) for size in (down, up)))
