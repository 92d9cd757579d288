"""Measures how well the tiny Qwen-Image follows captions it was never trained on, by an automatic judge of the picture.

    python scripts/judge_prompt_following.py --truth     # the judge itself: on true renderings
    python scripts/judge_prompt_following.py --vae       # the judge and the VAE: on reconstructions, with their PSNR
    python scripts/judge_prompt_following.py --contact-sheet sheet.png --size 128x192
    python scripts/judge_prompt_following.py --step-cache-threshold 0.12   # what the step cache changes

The pictures come from the unchanged `QwenImagePipeline`, unless a step cache is asked for, which is ours. The captions
come from the held-out split of tiny_scenes.py: a single object on a background it was never trained on, or a pair that
training never saw. The judge looks at the pixels only; it does not know the caption until it compares. Prints a table,
and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from dataclasses import dataclass
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


def draw_pictures(
    model: Path,
    captions: list[str],
    width: int,
    height: int,
    num_inference_steps: int,
    true_cfg_scale: float,
    seed: int,
    step_cache_threshold: float = 0.0,
) -> tuple[list[np.ndarray], float]:
    """One picture per caption, picture i with seed `seed` + i; and the block evaluations saved, as a factor.

    From the stock pipeline, or, with a step cache, from ours.
    """
    import torch

    pipeline = load_pipeline(model, step_cache_threshold)
    images: list[np.ndarray] = []
    for start in tqdm(range(0, len(captions), BATCH_SIZE), desc="draw"):
        prompts = captions[start : start + BATCH_SIZE]
        output = pipeline(
            prompts,
            negative_prompt=[" "] * len(prompts),
            true_cfg_scale=true_cfg_scale,
            width=width,
            height=height,
            num_inference_steps=num_inference_steps,
            generator=[torch.Generator().manual_seed(seed + start + i) for i in range(len(prompts))],
        )
        images += [np.asarray(image) for image in output.images]
    return images, saved_evaluations(pipeline) if step_cache_threshold else 1.0


def load_pipeline(model: Path, step_cache_threshold: float) -> Any:
    """The stock pipeline, or ours with a step cache."""
    from diffusers import QwenImagePipeline

    from diffusers_continuous import ContinuousBatchingPipeline

    pipeline = (ContinuousBatchingPipeline if step_cache_threshold else QwenImagePipeline).from_pretrained(model)
    pipeline.set_progress_bar_config(disable=True)
    if step_cache_threshold:
        pipeline.init_continuous_batching(step_cache_threshold=step_cache_threshold)
    return pipeline


def saved_evaluations(pipeline: Any) -> float:
    """Evaluations of a block by a guidance branch that there would be without the cache, over those there were."""
    stats, num_blocks = pipeline._engine.stats(), len(pipeline.transformer.transformer_blocks)
    return (
        num_blocks
        * stats.num_branch_steps
        / (num_blocks * stats.num_branch_steps - (num_blocks - 1) * stats.num_skipped_branch_steps)
    )


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
    form = _to_template_frame(alpha)
    overlaps = {kind: np.minimum(form, own).sum() / np.maximum(form, own).sum() for kind, own in _templates().items()}
    best = max(overlaps, key=overlaps.__getitem__)
    return best if overlaps[best] >= MIN_OVERLAP else None


@lru_cache(maxsize=1)
def _templates() -> dict[str, np.ndarray]:
    return {kind: _to_template_frame(coverage(kind, 96.0)) for kind in KINDS}


def _to_template_frame(alpha: np.ndarray) -> np.ndarray:
    """The shape scaled into a square around its bounding box, (32, 32)."""
    rows, columns = np.nonzero(alpha > 0.5)
    top, bottom, left, right = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
    side, x, y = max(bottom - top, right - left), (left + right) / 2, (top + bottom) / 2
    box = (x - side / 2, y - side / 2, x + side / 2, y + side / 2)
    frame = Image.fromarray(alpha.astype(np.float32))
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
    settings = (width, height, args.num_inference_steps, args.true_cfg_scale)
    captions = [caption(scene) for scene in scenes]
    started = time.perf_counter()
    images, saved = draw_pictures(args.model, captions, *settings, args.seed, args.step_cache_threshold)
    figures = {"s_per_picture": round((time.perf_counter() - started) / len(images), 3)}
    if args.step_cache_threshold:
        uncached, _ = draw_pictures(args.model, captions, *settings, args.seed)
        figures |= {"saved_block_evaluations": round(saved, 3), "psnr_to_uncached_db": round(psnr(images, uncached), 2)}
        return images, figures
    again, _ = draw_pictures(args.model, captions[:BATCH_SIZE], *settings, args.seed + len(captions))
    differences = [np.abs(a.astype(float) - b).mean() for a, b in zip(images, again, strict=False)]
    return images, figures | {"other_seed_mean_difference": round(float(np.mean(differences)), 2)}


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
