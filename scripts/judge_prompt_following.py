"""Measures how well the tiny Qwen-Image follows captions it was never trained on, by an automatic judge of the picture.

    python scripts/judge_prompt_following.py --truth     # the judge itself: on true renderings
    python scripts/judge_prompt_following.py --vae       # the judge and the VAE: on reconstructions, with their PSNR
    python scripts/judge_prompt_following.py --contact-sheet sheet.png --size 128x192
    python scripts/judge_prompt_following.py --step-cache-threshold 0.12   # what the step cache changes
    python scripts/judge_prompt_following.py --decoder src/diffusers_continuous/assets/tiny-pid --early-stop 2

The pictures come from the unchanged `QwenImagePipeline`, unless a step cache or PiD is asked for, which are ours. The
captions come from the held-out split of tiny_scenes.py: a single object on a background it was never trained on, or a
pair that training never saw. The judge looks at the pixels only; it does not know the caption until it compares. Prints
a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from tqdm import tqdm

from tiny_scenes import COLORS, KINDS, RELATIONS, Scene, caption, coverage, render, sample_scene

DEFAULT_MODEL = Path(__file__).parents[1] / "src/diffusers_continuous/assets/tiny-qwen-image"
MIN_CONTRAST = 40.0  # RGB distance from the background at which a pixel may belong to an object
MIN_AREA_SHARE = 0.01  # smaller spots are blemishes, not objects
MIN_OVERLAP = 0.7  # soft intersection over union with the best shape; below it the object has no kind
TEMPLATE_PX = 32
FRAME_SCALES = (0.8, 0.87, 0.93, 1.0, 1.07)
FRAME_SHIFTS = (-0.1, -0.05, 0.0, 0.05, 0.1)
BATCH_SIZE = 20


@dataclass(frozen=True)
class SeenObject:
    """What the judge found: `x`, `y` as shares of width, height; `area` in pixels; `kind` None for a formless spot."""

    kind: str | None
    color: str
    x: float
    y: float
    area: float


@dataclass(frozen=True)
class SeenPicture:
    """The background's color and the objects, largest first."""

    background: str
    objects: tuple[SeenObject, ...]


@dataclass(frozen=True)
class Verdict:
    """A picture compared with its scene; one entry per expected object in the tuples."""

    is_background_right: bool
    is_kind_right: tuple[bool, ...]
    is_color_right: tuple[bool, ...]
    is_count_right: bool

    @property
    def is_object_right(self) -> tuple[bool, ...]:
        return tuple(kind and color for kind, color in zip(self.is_kind_right, self.is_color_right, strict=True))

    @property
    def is_all_right(self) -> bool:
        return self.is_background_right and self.is_count_right and all(self.is_object_right)


def look_at(image: np.ndarray) -> SeenPicture:
    """What is in a picture (height, width, 3) uint8, judged from the pixels alone."""
    pixels = image.astype(np.float32)
    background = np.median(_border(pixels), axis=0)
    spots = label_spots(np.linalg.norm(pixels - background, axis=-1) > MIN_CONTRAST)
    min_area = MIN_AREA_SHARE * spots.size
    labels, areas = np.unique(spots[spots > 0], return_counts=True)
    objects = [_look_at_spot(pixels, background, spots == label) for label in labels[areas >= min_area]]
    return SeenPicture(nearest_color(background), tuple(sorted(objects, key=lambda seen: -seen.area)))


def compare(scene: Scene, seen: SeenPicture) -> Verdict:
    """A pair's object counts only where the caption puts it: on its side of the picture's middle."""
    found = [_find(scene, index, seen) for index in range(len(scene.objects))]
    return Verdict(
        is_background_right=seen.background == scene.background,
        is_kind_right=tuple(
            got is not None and got.kind == want.kind for got, want in zip(found, scene.objects, strict=True)
        ),
        is_color_right=tuple(
            got is not None and got.color == want.color for got, want in zip(found, scene.objects, strict=True)
        ),
        is_count_right=len(seen.objects) == len(scene.objects),
    )


def nearest_color(rgb: np.ndarray) -> str:
    return min(COLORS, key=lambda name: float(np.square(rgb - np.array(COLORS[name])).sum()))


def label_spots(mask: np.ndarray) -> np.ndarray:
    """Numbers the 8-connected spots of a mask: 0 outside, and one positive number in all pixels of a spot."""
    labels = np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape), 0)
    while True:
        padded = np.pad(labels, 1)
        rows = np.maximum(np.maximum(padded[:-2], padded[1:-1]), padded[2:])
        spread = np.where(mask, np.maximum(np.maximum(rows[:, :-2], rows[:, 1:-1]), rows[:, 2:]), 0)
        if (spread == labels).all():
            return labels
        labels = spread


def held_out_scenes(count: int, width: int, height: int, seed: int) -> list[Scene]:
    """Scenes of the test split with different captions, always the same for the same arguments."""
    rng = random.Random(f"held out {seed}")
    scenes: dict[str, Scene] = {}
    while len(scenes) < count:
        scene = sample_scene(rng, width, height, split="test")
        scenes.setdefault(caption(scene), scene)
    return list(scenes.values())


def summarize(scenes: list[Scene], verdicts: list[Verdict]) -> dict[str, float]:
    """Shares in percent: of pictures for the background, of objects otherwise; "both" and "all" of pictures."""
    judged = list(zip(scenes, verdicts, strict=True))
    single = [verdict for scene, verdict in judged if scene.relation is None]
    pair = [verdict for scene, verdict in judged if scene.relation]
    return {
        "background": _percent([verdict.is_background_right for verdict in verdicts]),
        "object_color": _percent([right for verdict in verdicts for right in verdict.is_color_right]),
        "single_kind": _percent([verdict.is_kind_right[0] for verdict in single]),
        "single_all": _percent([verdict.is_all_right for verdict in single]),
        "pair_each_in_place": _percent([right for verdict in pair for right in verdict.is_object_right]),
        "pair_both_in_place": _percent([all(verdict.is_object_right) for verdict in pair]),
        "pair_all": _percent([verdict.is_all_right for verdict in pair]),
        "all": _percent([verdict.is_all_right for verdict in verdicts]),
    }


def kind_table(scenes: list[Scene], verdicts: list[Verdict]) -> dict[str, float]:
    """In percent: how often each kind was drawn as such where it belongs, alone or in a pair."""
    right: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    for scene, verdict in zip(scenes, verdicts, strict=True):
        for obj, is_right in zip(scene.objects, verdict.is_kind_right, strict=True):
            right[obj.kind].append(is_right)
    return {kind: _percent(values) for kind, values in right.items()}


def draw_contact_sheet(images: list[np.ndarray], scenes: list[Scene], verdicts: list[Verdict], path: Path) -> None:
    """The pictures in order, eight in a row, with their captions; red captions are misses."""
    height, width = images[0].shape[:2]
    columns, line = 8, 11
    sheet = Image.new("RGB", (columns * (width + 8), -(-len(images) // columns) * (height + 4 * line)), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (image, scene, verdict) in enumerate(zip(images, scenes, verdicts, strict=True)):
        left, top = index % columns * (width + 8), index // columns * (height + 4 * line)
        sheet.paste(Image.fromarray(image), (left, top))
        text = _wrap(caption(scene), width // 6)
        draw.multiline_text((left, top + height + 1), text, fill="black" if verdict.is_all_right else "red", spacing=0)
    sheet.save(path)


def psnr(images: list[np.ndarray], references: list[np.ndarray]) -> float:
    """In dB, of the mean squared error over all pictures."""
    error = np.mean([np.square(a.astype(float) - b).mean() for a, b in zip(images, references, strict=True)])
    return float(10 * np.log10(255**2 / error))


def reconstruct(model: Path, images: list[np.ndarray]) -> list[np.ndarray]:
    """The pictures after the model's VAE, encoded to the mode and decoded."""
    import torch
    from diffusers import AutoencoderKLQwenImage

    vae = AutoencoderKLQwenImage.from_pretrained(model, subfolder="vae").eval()
    out = []
    with torch.no_grad():
        for image in tqdm(images, desc="reconstruct"):
            frame = torch.from_numpy(image).permute(2, 0, 1)[None, :, None].float() / 127.5 - 1
            decoded = vae.decode(vae.encode(frame).latent_dist.mode()).sample[0, :, 0]
            out.append(((decoded.permute(1, 2, 0) + 1) * 127.5).round().byte().numpy())
    return out


@dataclass(frozen=True)
class Artist:
    """Draws pictures of one size: with the stock pipeline, or with ours where something of ours is asked for."""

    model: Path
    width: int
    height: int
    num_inference_steps: int
    true_cfg_scale: float
    step_cache_threshold: float = 0.0
    decoder: Path | None = None
    early_stop_steps: int = 0

    @property
    def is_stock(self) -> bool:
        return not self.step_cache_threshold and self.decoder is None

    def draw(self, captions: list[str], seed: int) -> tuple[list[np.ndarray], dict[str, float]]:
        """One picture per caption, picture i with seed `seed` + i; and what a step cache saved.

        PiD's larger pictures are averaged down, so that the judge sees all of one size.
        """
        import torch

        pipeline = self._load()
        own = {} if self.decoder is None else {"early_stop_steps": self.early_stop_steps}
        images: list[np.ndarray] = []
        for start in tqdm(range(0, len(captions), BATCH_SIZE), desc="draw"):
            prompts = captions[start : start + BATCH_SIZE]
            output = pipeline(
                prompts,
                negative_prompt=[" "] * len(prompts),
                true_cfg_scale=self.true_cfg_scale,
                width=self.width,
                height=self.height,
                num_inference_steps=self.num_inference_steps,
                generator=[torch.Generator().manual_seed(seed + start + i) for i in range(len(prompts))],
                **own,
            )
            size = self.width, self.height
            images += [np.asarray(image.resize(size, Image.Resampling.BOX)) for image in output.images]
        return images, self._savings(pipeline)

    def _load(self) -> Any:
        from diffusers import QwenImagePipeline

        from diffusers_continuous import ContinuousBatchingPipeline, PiDDecoder

        if self.is_stock:
            pipeline = QwenImagePipeline.from_pretrained(self.model)
        else:
            decoder = None if self.decoder is None else PiDDecoder.from_pretrained(self.decoder)
            pipeline = ContinuousBatchingPipeline.from_pretrained(self.model, decoder=decoder)
            pipeline.init_continuous_batching(step_cache_threshold=self.step_cache_threshold)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def _savings(self, pipeline: Any) -> dict[str, float]:
        """Evaluations of a block by a guidance branch that there would be without the cache, over those there were."""
        if not self.step_cache_threshold:
            return {}
        stats, num_blocks = pipeline._engine.stats(), len(pipeline.transformer.transformer_blocks)
        total = num_blocks * stats.num_branch_steps
        return {"saved_block_evaluations": total / (total - (num_blocks - 1) * stats.num_skipped_branch_steps)}


def _border(pixels: np.ndarray, depth: int = 3) -> np.ndarray:
    edges = (pixels[:depth], pixels[-depth:], pixels[:, :depth], pixels[:, -depth:])
    return np.concatenate([edge.reshape(-1, 3) for edge in edges])


def _look_at_spot(pixels: np.ndarray, background: np.ndarray, spot: np.ndarray) -> SeenObject:
    difference = pixels - background
    contrast = np.linalg.norm(difference, axis=-1)
    color = np.median(pixels[spot & (contrast >= np.median(contrast[spot]))], axis=0)
    direction = (color - background) / np.square(color - background).sum()
    alpha = np.where(spot, np.clip(difference @ direction, 0, 1), 0)  # how much of the object is in each pixel
    rows, columns = np.nonzero(alpha > 0.5)
    x, y = (columns.mean() + 0.5) / alpha.shape[1], (rows.mean() + 0.5) / alpha.shape[0]
    return SeenObject(_kind_of(alpha), nearest_color(color), float(x), float(y), float(alpha.sum()))


def _kind_of(alpha: np.ndarray) -> str | None:
    """The kind that the shape overlaps most with, at the best of several alignments."""
    forms, spill = _aligned(alpha)
    overlaps = {
        kind: float((np.minimum(forms, own).sum((1, 2)) / (np.maximum(forms, own).sum((1, 2)) + spill)).max())
        for kind, own in _templates().items()
    }
    best = max(overlaps, key=overlaps.__getitem__)
    return best if overlaps[best] >= MIN_OVERLAP else None


@lru_cache(maxsize=1)
def _templates() -> dict[str, np.ndarray]:
    return {kind: _to_template_frame(coverage(kind, 96.0), 1.0, 0.0, 0.0) for kind in KINDS}


def _aligned(alpha: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The shape in frames around its bounding box, (frames, 32, 32), and its area outside each, in the frame's pixels.

    Frames of several sizes and places: a blemish on an edge moves the bounding box, and with the box alone a triangle
    with a thorn would be compared with triangles that are smaller and stand elsewhere.
    """
    frames, spills = [], []
    for scale, shift_x, shift_y in itertools.product(FRAME_SCALES, FRAME_SHIFTS, FRAME_SHIFTS):
        frame = _to_template_frame(alpha, scale, shift_x, shift_y)
        pixel_area = (scale * _longer_side(alpha) / TEMPLATE_PX) ** 2
        frames.append(frame)
        spills.append(max(0.0, float(alpha.sum()) / pixel_area - float(frame.sum())))
    return np.stack(frames), np.array(spills)


def _bounds(alpha: np.ndarray) -> tuple[int, int, int, int]:
    rows, columns = np.nonzero(alpha > 0.5)
    return columns.min(), rows.min(), columns.max() + 1, rows.max() + 1


def _longer_side(alpha: np.ndarray) -> int:
    left, top, right, bottom = _bounds(alpha)
    return max(right - left, bottom - top)


def _to_template_frame(alpha: np.ndarray, scale: float, shift_x: float, shift_y: float) -> np.ndarray:
    """The shape in a square around its bounding box, (32, 32), that is scaled and shifted by shares of the box."""
    left, top, right, bottom = _bounds(alpha)
    side = _longer_side(alpha)
    x, y, half = (left + right) / 2 + shift_x * side, (top + bottom) / 2 + shift_y * side, scale * side / 2
    frame = Image.fromarray(alpha.astype(np.float32))
    box = (x - half, y - half, x + half, y + half)
    return np.asarray(
        frame.transform((TEMPLATE_PX, TEMPLATE_PX), Image.Transform.EXTENT, box, Image.Resampling.BILINEAR)
    )


def _find(scene: Scene, index: int, seen: SeenPicture) -> SeenObject | None:
    """The largest object where the caption wants object `index`, or None."""
    if scene.relation is None:
        return seen.objects[0] if seen.objects else None
    step_x, step_y = RELATIONS[scene.relation]
    sign = 1 if index == 0 else -1
    in_place = (obj for obj in seen.objects if sign * (step_x * (obj.x - 0.5) + step_y * (obj.y - 0.5)) > 0)
    return next(in_place, None)


def _percent(values: list[bool]) -> float:
    return round(100 * float(np.mean(values)), 1) if values else float("nan")


def _wrap(text: str, columns: int) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > columns:
            lines.append("")
        lines[-1] += f"{word} "
    return "\n".join(lines)


def _size(text: str) -> tuple[int, int]:
    width, height = text.split("x")
    return int(width), int(height)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--truth", action="store_true", help="judge true renderings instead of drawn pictures")
    source.add_argument("--vae", action="store_true", help="judge VAE reconstructions instead of drawn pictures")
    parser.add_argument("--num-captions", type=int, default=200)
    parser.add_argument("--size", type=_size, default=(128, 128), metavar="WxH")
    parser.add_argument("--num-inference-steps", type=int, default=20)
    parser.add_argument("--true-cfg-scale", type=float, default=4.0)
    parser.add_argument("--decoder", type=Path, help="decode with this PiDDecoder (a folder) in place of the VAE")
    parser.add_argument("--early-stop", type=int, default=0, help="denoising steps that are left to the PiDDecoder")
    parser.add_argument("--step-cache-threshold", type=float, default=0.0, help="draw with a step cache (0: without)")
    parser.add_argument("--seed", type=int, default=0, help="of the captions and of the pictures' noise")
    parser.add_argument("--contact-sheet", type=Path, help="write the pictures to this PNG")
    return parser.parse_args()


def make_pictures(args: argparse.Namespace, scenes: list[Scene]) -> tuple[list[np.ndarray], dict[str, float]]:
    """The pictures to judge, and further figures about them."""
    width, height = args.size
    if args.truth or args.vae:
        truth = [render(scene, width, height) for scene in scenes]
        if args.truth:
            return truth, {}
        images = reconstruct(args.model, truth)
        return images, {"psnr_db": round(psnr(images, truth), 2)}
    plain = Artist(args.model, width, height, args.num_inference_steps, args.true_cfg_scale)
    artist = replace(
        plain,
        step_cache_threshold=args.step_cache_threshold,
        decoder=args.decoder,
        early_stop_steps=args.early_stop,
    )
    captions = [caption(scene) for scene in scenes]
    started = time.perf_counter()
    images, figures = artist.draw(captions, args.seed)
    figures["s_per_picture"] = (time.perf_counter() - started) / len(images)
    if artist.step_cache_threshold:
        figures["psnr_to_uncached_db"] = psnr(images, plain.draw(captions, args.seed)[0])
    again, _ = artist.draw(captions[:BATCH_SIZE], args.seed + len(captions))
    differences = [np.abs(a.astype(float) - b).mean() for a, b in zip(images, again, strict=False)]
    figures["other_seed_mean_difference"] = float(np.mean(differences))
    return images, {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    args = parse_args()
    width, height = args.size
    scenes = held_out_scenes(args.num_captions, width, height, args.seed)
    images, figures = make_pictures(args, scenes)
    verdicts = [compare(scene, look_at(image)) for scene, image in zip(scenes, images, strict=True)]
    result = {
        "source": "truth" if args.truth else "vae" if args.vae else "model",
        "size": f"{width}x{height}",
        "num_captions": len(scenes),
        "num_singles": sum(scene.relation is None for scene in scenes),
        "num_inference_steps": args.num_inference_steps,
        "true_cfg_scale": args.true_cfg_scale,
        "machine": f"{platform.machine()} {platform.system()}",
        **figures,
        **summarize(scenes, verdicts),
        "kinds": kind_table(scenes, verdicts),
    }
    for name, value in result.items():
        print(f"{name:28} {value}")
    if args.contact_sheet:
        draw_contact_sheet(images, scenes, verdicts, args.contact_sheet)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
