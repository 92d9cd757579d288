"""Every training scene encoded once, in files, and the pool that trainings draw latents from.

Knows the sizes that are trained and how often; no captions, no networks but the VAE's encoder.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage
from tqdm import tqdm

from tiny_scenes import Scene, render, sample_scene
from tiny_vae import PlanarAutoencoder, to_model_range

NATIVE_SIZE_PX = 128

# (width, height): share of the steps in the first and in the second half of the training, and in the sizes stage after
# it. Most shapes are learned at the native size, where they are cheap, and have the same latents at the others.
SIZE_SHARES: dict[tuple[int, int], tuple[float, float, float]] = {
    (128, 128): (0.70, 0.36, 0.18),
    (96, 96): (0.10, 0.16, 0.18),
    (192, 192): (0.10, 0.19, 0.28),
    (128, 192): (0.05, 0.10, 0.14),
    (192, 128): (0.05, 0.10, 0.14),
    (160, 160): (0.0, 0.03, 0.03),
    (96, 128): (0.0, 0.02, 0.015),
    (128, 96): (0.0, 0.02, 0.015),
    (256, 256): (0.0, 0.02, 0.02),
}
LATENT_CHUNK = 512
LATENT_BATCH = 4  # its largest feature maps still fit into the cache: twice as fast as 32


def latent_scene(width: int, height: int, index: int) -> Scene:
    """The scene behind a stored latent (its caption is made anew at every use)."""
    return sample_scene(random.Random(f"latents {width}x{height} {index}"), width, height)


def latent_chunks(num_scenes: int) -> list[tuple[int, int, int]]:
    """(width, height, first scene) of every file of LATENT_CHUNK scenes, `num_scenes` in all."""
    counts = {size: math.ceil(num_scenes * max((a + b) / 2, last)) for size, (a, b, last) in SIZE_SHARES.items()}
    return [(*size, start) for size, count in counts.items() for start in range(0, count, LATENT_CHUNK)]


def encode_latents(work_dir: Path, num_scenes: int, num_workers: int) -> None:
    """Writes the VAE's means of about `num_scenes` training scenes, in files of LATENT_CHUNK scenes of one size."""
    torch.multiprocessing.spawn(encode_latent_chunks, (work_dir, num_scenes, num_workers), nprocs=num_workers)


@torch.no_grad()
def encode_latent_chunks(rank: int, work_dir: Path, num_scenes: int, num_workers: int) -> None:
    torch.set_num_threads(1)
    vae = PlanarAutoencoder(AutoencoderKLQwenImage.from_pretrained(work_dir / "vae"))
    chunks = latent_chunks(num_scenes)[rank::num_workers]
    for width, height, start in tqdm(chunks, mininterval=10, disable=rank > 0):
        path = work_dir / f"latents_{width}x{height}_{start}.pt"
        if not path.exists():
            torch.save(_encode_scenes(vae, width, height, start), path)


def _encode_scenes(vae: PlanarAutoencoder, width: int, height: int, start: int) -> dict[str, torch.Tensor]:
    means, variances = [], []
    for first in range(start, start + LATENT_CHUNK, LATENT_BATCH):
        scenes = [latent_scene(width, height, index) for index in range(first, first + LATENT_BATCH)]
        images = np.stack([render(scene, width, height) for scene in scenes])
        mean, log_variance = vae.encode(to_model_range(images))
        means.append(mean.half())
        variances.append(log_variance.exp().mean((2, 3)))
    return {"means": torch.cat(means), "variances": torch.cat(variances)}


class LatentPool:
    """The stored latents, packed and normalized; a size is loaded when it is first asked for.

    `mean` and `std` are per channel, of the native size. The deviation includes the posterior's own: a channel that
    carries little is then not blown up to be learned.
    """

    def __init__(self, work_dir: Path) -> None:
        self.work_dir = work_dir
        self.by_size: dict[tuple[int, int], torch.Tensor] = {}
        stored = self._load(NATIVE_SIZE_PX, NATIVE_SIZE_PX)
        means = stored["means"].float()
        self.mean = means.mean((0, 2, 3))
        self.std = (means.var((0, 2, 3)) + stored["variances"].mean(0)).sqrt()

    def of_size(self, width: int, height: int) -> torch.Tensor:
        """(scenes, tokens, 64)"""
        if (width, height) not in self.by_size:
            means = self._load(width, height)["means"].float()
            self.by_size[width, height] = pack_latents((means - self.mean.view(-1, 1, 1)) / self.std.view(-1, 1, 1))
        return self.by_size[width, height]

    def _load(self, width: int, height: int) -> dict[str, torch.Tensor]:
        """All chunks there are, in the order of their scenes."""
        chunks: list[dict[str, torch.Tensor]] = []
        while (path := self.work_dir / f"latents_{width}x{height}_{len(chunks) * LATENT_CHUNK}.pt").exists():
            chunks.append(torch.load(path, weights_only=True))
        return {name: torch.cat([chunk[name] for chunk in chunks]) for name in ("means", "variances")}


def pack_latents(latents: torch.Tensor) -> torch.Tensor:
    """(batch, 16, height, width) to (batch, height / 2 * width / 2, 64), as QwenImagePipeline packs them."""
    batch, channels, height, width = latents.shape
    patches = latents.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, height // 2 * (width // 2), channels * 4)
