"""Captioned scenes for the tiny Qwen-Image: one or two flat shapes on a plain background, exact at any resolution.

This module knows what a scene is, how it is described, how it is drawn and which scenes are held out of training. It
does not know of latents, models or training, and it needs numpy only.

Centers lie on the 8 px latent grid (mostly on the 16 px grid of the transformer's patches) and sizes come from a short
list, so that one shape has one latent patch wherever it stands: that is what lets a 3.7 M parameter transformer learn
it within two hours on two CPU cores.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (200, 20, 30),
    "orange": (255, 130, 0),
    "yellow": (255, 230, 60),
    "green": (30, 160, 70),
    "blue": (30, 80, 220),
    "purple": (140, 50, 180),
    "white": (250, 250, 250),
    "black": (20, 20, 25),
}
KINDS = ("circle", "square", "triangle", "star", "heart", "diamond", "ring", "cross")
RELATIONS: dict[str, tuple[int, int]] = {
    "to the left of": (-1, 0),
    "to the right of": (1, 0),
    "above": (0, -1),
    "below": (0, 1),
}
SIZE_WORDS = ("small", "large")
SHARE_OF_PAIRS = 0.5
OBJECT_SIZES_PX = (40, 56, 80, 112, 160, 224, 320, 448)
_SHARE_OF_SIDE = {"small": 0.44, "pair": 0.44, "medium": 0.66, "large": 0.90}
_LATTICE_PX = 16
_ROWS_PER_PX = 16
_OFFSETS_PER_PX = 8


@dataclass(frozen=True)
class SceneObject:
    """One flat shape. `x`, `y`: centre as a share of width, height; `size`: extent as a share of the shorter side."""

    kind: str
    color: str
    x: float
    y: float
    size: float


@dataclass(frozen=True)
class Scene:
    """One or two objects on a plain background; `relation` says how the first stands to the second."""

    background: str
    objects: tuple[SceneObject, ...]
    relation: str | None = None
    size_word: str | None = None


def is_background_held_out(kind: str, color: str, background: str) -> bool:
    """True for about 1 in 7 (object, background) combinations; every color meets every background in another kind."""
    return (3 * KINDS.index(kind) + _color_index(color) + 2 * _color_index(background)) % 7 == 0


def is_pair_held_out(first: tuple[str, str], second: tuple[str, str]) -> bool:
    """True for about 1 in 5 unordered pairs of (kind, color)."""
    return (sum(KINDS.index(kind) + 3 * _color_index(color) for kind, color in (first, second))) % 5 == 0


def is_held_out(scene: Scene) -> bool:
    """True if training never saw this pair of objects, or never saw one of the objects on this background."""
    names = [(obj.kind, obj.color) for obj in scene.objects]
    is_new_pair = len(names) == 2 and is_pair_held_out(*names)
    return is_new_pair or any(is_background_held_out(kind, color, scene.background) for kind, color in names)


def sample_scene(rng: random.Random, width: int = 128, height: int = 128, split: str = "train") -> Scene:
    """A random scene laid out for `width` x `height` pixels.

    split "train": nothing held out occurs. split "test": a single object always stands on a background it was never
    trained on, and a pair is always one that training never saw (its background is free).
    """
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r} is not known; choose from ['train', 'test']")
    sample = _sample_pair if rng.random() < SHARE_OF_PAIRS else _sample_single
    while True:
        scene = sample(rng, width, height)
        if _belongs_to(scene, split):
            return scene


def caption(scene: Scene, rng: random.Random | None = None) -> str:
    """The caption of a scene: the canonical one, or a lightly varied one when `rng` is given."""
    first, *others = (f"{obj.color} {obj.kind}" for obj in scene.objects)
    text = _with_article(f"{scene.size_word} {first}" if scene.size_word else first)
    for other in others:
        text += f" {scene.relation} {_with_article(other)}"
    if rng is None:
        return f"{text} on {_with_article(scene.background)} background"
    return _vary(text, scene.background, rng)


def render(scene: Scene, width: int, height: int) -> np.ndarray:
    """The picture as (height, width, 3) uint8, with antialiased edges; the same scene at any resolution."""
    image = np.empty((height, width, 3), np.float32)
    image[:] = COLORS[scene.background]
    for obj in scene.objects:
        _draw(image, obj)
    return np.rint(image).astype(np.uint8)


@lru_cache(maxsize=4096)
def coverage(kind: str, size_px: float, offset_x: float = 0.0, offset_y: float = 0.0) -> np.ndarray:
    """How much of each pixel a shape covers, in 0..1, as (n, n) float32 centred up to a sub-pixel offset."""
    num_px = math.ceil(size_px) + 2
    center = np.array([num_px / 2 + offset_x, num_px / 2 + offset_y])
    starts, ends = (center + points * size_px / 2 for points in _edges(kind))  # (num_edges, 2) each
    row_y = (np.arange(num_px * _ROWS_PER_PX) + 0.5) / _ROWS_PER_PX
    crossings = _sorted_crossings(row_y, starts, ends)  # (rows, crossings)
    left_of = np.clip(crossings[:, :, None] - np.arange(num_px), 0, 1)  # share of each pixel to the left of a crossing
    inside = (left_of[:, 1::2] - left_of[:, ::2]).sum(1)
    return inside.reshape(num_px, _ROWS_PER_PX, num_px).mean(1).astype(np.float32)


def _sorted_crossings(row_y: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Where each row crosses the outline, from left to right, padded with infinity to an even number."""
    is_crossed = (starts[:, 1] <= row_y[:, None]) != (ends[:, 1] <= row_y[:, None])
    rise = np.where(starts[:, 1] == ends[:, 1], 1.0, ends[:, 1] - starts[:, 1])
    x = starts[:, 0] + (row_y[:, None] - starts[:, 1]) * (ends[:, 0] - starts[:, 0]) / rise
    return np.sort(np.where(is_crossed, x, np.inf), axis=1)[:, : 2 * math.ceil(is_crossed.sum(1).max() / 2)]


def _color_index(color: str) -> int:
    return list(COLORS).index(color)


def _belongs_to(scene: Scene, split: str) -> bool:
    if split == "train" or len(scene.objects) == 1:
        return is_held_out(scene) == (split == "test")
    first, second = scene.objects
    return is_pair_held_out((first.kind, first.color), (second.kind, second.color))


def _sample_single(rng: random.Random, width: int, height: int) -> Scene:
    background = rng.choice(list(COLORS))
    (name,) = _sample_names(rng, background, 1)
    size_word = rng.choices([None, *SIZE_WORDS], [0.7, 0.15, 0.15])[0]
    aside = 0 if size_word == "large" else _sample_aside(rng)
    obj = _place(name, _snap(width / 2) + aside, _snap(height / 2), width, height, size_word or "medium")
    return Scene(background, (obj,), size_word=size_word)


def _sample_pair(rng: random.Random, width: int, height: int) -> Scene:
    background = rng.choice(list(COLORS))
    relation = rng.choice(list(RELATIONS))
    step_x, step_y = RELATIONS[relation]
    across = _sample_aside(rng)
    objects = []
    for name, sign in zip(_sample_names(rng, background, 2), (1, -1), strict=True):
        x = _snap(width / 2 + sign * step_x * width / 4) + (0 if step_x else across)
        y = _snap(height / 2 + sign * step_y * height / 4) + (0 if step_y else across)
        objects.append(_place(name, x, y, width, height, "pair"))
    return Scene(background, tuple(objects), relation=relation)


def _sample_aside(rng: random.Random) -> int:
    """Pixels from the middle. Few places: a model this small mixes the shapes of places it cannot decide between."""
    return rng.choices((-_LATTICE_PX, 0, _LATTICE_PX), (0.2, 0.6, 0.2))[0]


def _sample_names(rng: random.Random, background: str, count: int) -> list[tuple[str, str]]:
    colors = [color for color in COLORS if color != background]
    return rng.sample([(kind, color) for kind in KINDS for color in colors], count)


def _snap(position_px: float) -> int:
    """To the 8 px latent grid (a patch of the transformer is 2 x 2 of it)."""
    return round(position_px / 8) * 8


def _place(name: tuple[str, str], x: int, y: int, width: int, height: int, extent: str) -> SceneObject:
    shorter = min(width, height)
    fitting = [px for px in OBJECT_SIZES_PX if px <= _SHARE_OF_SIDE[extent] * shorter]
    size_px = fitting[-1] if fitting else _SHARE_OF_SIDE[extent] * shorter
    return SceneObject(name[0], name[1], x / width, y / height, size_px / shorter)


def _with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _vary(text: str, background: str, rng: random.Random) -> str:
    roll = rng.random()
    if roll < 0.10:
        text = f"{text}, {background} background"
    elif roll < 0.95:
        text = f"{text} on {_with_article(background)} background"
    if rng.random() < 0.15:
        text = text[0].upper() + text[1:]
    return text + ("." if rng.random() < 0.15 else "")


def _draw(image: np.ndarray, obj: SceneObject) -> None:
    height, width = image.shape[:2]
    size_px = obj.size * min(width, height)
    half = (math.ceil(size_px) + 2) / 2
    left, offset_x = _split(obj.x * width - half)
    top, offset_y = _split(obj.y * height - half)
    alpha = coverage(obj.kind, round(size_px, 3), offset_x, offset_y)
    bottom, right = min(height, top + alpha.shape[0]), min(width, left + alpha.shape[1])
    alpha = alpha[max(0, -top) : bottom - top, max(0, -left) : right - left, None]
    area = image[max(0, top) : bottom, max(0, left) : right]
    area += alpha * (np.array(COLORS[obj.color], np.float32) - area)


def _split(position_px: float) -> tuple[int, float]:
    """Whole pixels, and the rest in eighths (so that the cached coverages stay few)."""
    eighths = round(position_px * _OFFSETS_PER_PX)
    return eighths // _OFFSETS_PER_PX, eighths % _OFFSETS_PER_PX / _OFFSETS_PER_PX


def _edges(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of every edge of a shape, (num_edges, 2) each; inside is where a row has crossed an odd number."""
    outlines = _outlines(kind)
    return np.concatenate(outlines), np.concatenate([np.roll(points, -1, axis=0) for points in outlines])


def _outlines(kind: str) -> list[np.ndarray]:
    """The outline of a shape within [-1, 1]², y downwards, (num_points, 2); a second outline is a hole."""
    if kind == "circle":
        return [_circle(1.0)]
    if kind == "ring":
        return [_circle(1.0), _circle(0.5)]
    if kind == "square":
        return [np.array([(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)])]
    if kind == "triangle":
        return [np.array([(0.0, -0.95), (1.0, 0.9), (-1.0, 0.9)])]
    if kind == "diamond":
        return [np.array([(0.0, -1.0), (0.75, 0.0), (0.0, 1.0), (-0.75, 0.0)])]
    if kind == "star":
        return [_star(1.0, 0.42)]
    if kind == "heart":
        return [_heart()]
    if kind == "cross":
        return [_cross(0.32)]
    raise ValueError(f"kind={kind!r} is not known; choose from {list(KINDS)}")


def _circle(radius: float) -> np.ndarray:
    angle = np.linspace(0, 2 * np.pi, 128, endpoint=False)
    return radius * np.stack([np.cos(angle), np.sin(angle)], 1)


def _star(outer: float, inner: float) -> np.ndarray:
    angle = np.arange(10) * np.pi / 5 - np.pi / 2
    radius = np.where(np.arange(10) % 2 == 0, outer, inner)
    return radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1) + (0.0, 0.09)


def _heart() -> np.ndarray:
    angle = np.linspace(0, 2 * np.pi, 128, endpoint=False)
    x = 16 * np.sin(angle) ** 3
    y = 13 * np.cos(angle) - 5 * np.cos(2 * angle) - 2 * np.cos(3 * angle) - np.cos(4 * angle)
    return np.stack([x / 16.5, (-y - 2.5) / 15.5], 1)


def _cross(arm: float) -> np.ndarray:
    corners = [(arm, -1), (arm, -arm), (1, -arm), (1, arm), (arm, arm), (arm, 1)]
    return np.array(corners + [(-x, -y) for x, y in corners], float)
