"""Measures how close the tiny PiD's pictures are to true renderings, against VAE decode and bicubic enlargement.

    python scripts/judge_pid.py
    python scripts/judge_pid.py --num-scenes 20 --contact-sheet sheet.png

Scenes of the held-out split of tiny_scenes.py are rendered, encoded by the embedded model's VAE (posterior mean), and
decoded at four times the size: by the VAE and a bicubic filter, by PiD from the same latent ("clean"), and by PiD from
that latent noised as it is two steps before the end of a 20-step run ("noisy"; the VAE always gets the clean one).
Prints a table, and as its last line one JSON object. PSNR is that of the mean squared error over all pictures.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift, retrieve_timesteps
from PIL import Image
from tqdm import tqdm

from diffusers_continuous.pid import PiDDecoder
from judge_prompt_following import DEFAULT_MODEL, held_out_scenes, psnr
from tiny_scenes import Scene, caption, render

DEFAULT_DECODER = DEFAULT_MODEL.parent / "tiny-pid"
SCALE = 4
NUM_STEPS = 20
BATCH_SIZE = 4
SHEET_COLUMNS = ("true", "vae_bicubic", "pid_clean", "pid_noisy")


def stopped_sigma(model: Path, width: int, height: int, num_steps_left: int) -> float:
    """The noise level that many steps before the end of a run of NUM_STEPS, as QwenImagePipeline schedules it."""
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(model, subfolder="scheduler")
    config, num_tokens = scheduler.config, height // 16 * (width // 16)
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    mu = calculate_shift(num_tokens, *(config[name] for name in names))
    retrieve_timesteps(scheduler, sigmas=np.linspace(1.0, 1 / NUM_STEPS, NUM_STEPS), mu=mu)
    return float(scheduler.sigmas[NUM_STEPS - num_steps_left])


@torch.no_grad()
def encode(vae: AutoencoderKLQwenImage, pictures: list[np.ndarray]) -> torch.Tensor:
    """Normalized latents, (pictures, 16, h, w): the posterior's mean, as the denoiser sees it."""
    frames = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)[:, :, None].float() / 127.5 - 1
    means = torch.cat([vae.encode(frame[None]).latent_dist.mode()[:, :, 0] for frame in frames])
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std))
    return (means - mean) / std


@torch.no_grad()
def decode_and_enlarge(vae: AutoencoderKLQwenImage, latents: torch.Tensor) -> list[np.ndarray]:
    """The VAE's pictures, SCALE times larger by PIL's bicubic filter."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std))
    pictures = []
    for latent in latents:
        frame = vae.decode((latent * std + mean)[None, :, None]).sample[0, :, 0].clamp(-1, 1)
        picture = Image.fromarray(((frame.permute(1, 2, 0) + 1) * 127.5).round().byte().numpy())
        size = (SCALE * picture.width, SCALE * picture.height)
        pictures.append(np.asarray(picture.resize(size, Image.Resampling.BICUBIC)))
    return pictures


def decode_with_pid(
    decoder: PiDDecoder, latents: torch.Tensor, captions: list[str], sigma: float, num_inference_steps: int, seed: int
) -> list[np.ndarray]:
    """PiD's pictures of latents noised to `sigma`; picture i has its noise, and the latent's, from seed `seed` + i."""
    pictures: list[np.ndarray] = []
    for start in tqdm(range(0, len(latents), BATCH_SIZE), desc=f"pid at sigma {sigma:.3f}"):
        rows = range(start, min(start + BATCH_SIZE, len(latents)))
        generators = [torch.Generator().manual_seed(seed + row) for row in rows]
        noise = torch.stack([torch.randn(latents.shape[1:], generator=generator) for generator in generators])
        output = decoder(
            latents=torch.lerp(latents[rows.start : rows.stop], noise, sigma),
            prompt=captions[rows.start : rows.stop],
            sigma=sigma,
            num_inference_steps=num_inference_steps,
            generator=generators,
        )
        pictures += [np.asarray(image) for image in output.images]
    return pictures


def ssim(pictures: list[np.ndarray], references: list[np.ndarray]) -> float:
    """Mean structural similarity over pictures, channels and places, with the usual Gaussian window of 11 pixels."""
    return float(np.mean([_ssim_of_picture(a, b) for a, b in zip(pictures, references, strict=True)]))


def _ssim_of_picture(picture: np.ndarray, reference: np.ndarray) -> float:
    x, y = (torch.from_numpy(image.copy()).permute(2, 0, 1)[:, None].double() for image in (picture, reference))
    mean_x, mean_y = _blur(x), _blur(y)
    var_x, var_y = _blur(x * x) - mean_x.square(), _blur(y * y) - mean_y.square()
    covariance = _blur(x * y) - mean_x * mean_y
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    luminance = (2 * mean_x * mean_y + c1) / (mean_x.square() + mean_y.square() + c1)
    return float((luminance * (2 * covariance + c2) / (var_x + var_y + c2)).mean())


def _blur(x: torch.Tensor) -> torch.Tensor:
    window = torch.exp(-torch.arange(-5, 6, dtype=x.dtype).square() / (2 * 1.5**2))
    window = window / window.sum()
    return F.conv2d(F.conv2d(x, window.view(1, 1, 1, -1)), window.view(1, 1, -1, 1))


def draw_contact_sheet(pictures: dict[str, list[np.ndarray]], path: Path, num_rows: int = 16) -> None:
    """A row per scene: the true picture, the VAE's enlarged, PiD's of the clean and of the noisy latent."""
    rows = [np.concatenate([pictures[name][i] for name in SHEET_COLUMNS], 1) for i in range(num_rows)]
    Image.fromarray(np.concatenate(rows)).save(path)


def make_pictures(args: argparse.Namespace, scenes: list[Scene], sigma: float) -> tuple[dict, dict[str, float]]:
    """The pictures by column of the sheet, and how long each decoder took."""
    width, height = args.size
    vae = AutoencoderKLQwenImage.from_pretrained(args.model, subfolder="vae").eval()
    decoder = PiDDecoder.from_pretrained(args.decoder)
    decoder.set_progress_bar_config(disable=True)
    latents = encode(vae, [render(scene, width, height) for scene in scenes])
    settings = ([caption(scene) for scene in scenes], args.num_inference_steps, args.seed)
    started = time.perf_counter()
    pictures = {"vae_bicubic": decode_and_enlarge(vae, latents)}
    vae_done = time.perf_counter()
    captions, num_inference_steps, seed = settings
    for name, level in (("pid_clean", 0.0), ("pid_noisy", sigma)):
        pictures[name] = decode_with_pid(decoder, latents, captions, level, num_inference_steps, seed)
    pid_s = (time.perf_counter() - vae_done) / 2
    pictures["true"] = [render(scene, SCALE * width, SCALE * height) for scene in scenes]
    return pictures, {
        "vae_s_per_picture": round((vae_done - started) / len(scenes), 3),
        "pid_s_per_picture": round(pid_s / len(scenes), 3),
    }


def measure(pictures: dict[str, list[np.ndarray]]) -> dict[str, float]:
    """PSNR and SSIM of each decoder, and PiD's lead in dB."""
    figures = {}
    for name in SHEET_COLUMNS[1:]:
        figures[f"{name}_psnr_db"] = round(psnr(pictures[name], pictures["true"]), 2)
        figures[f"{name}_ssim"] = round(ssim(pictures[name], pictures["true"]), 4)
    for name in ("clean", "noisy"):
        lead = figures[f"pid_{name}_psnr_db"] - figures["vae_bicubic_psnr_db"]
        figures[f"{name}_lead_db"] = round(lead, 2)
    return figures


def _size(text: str) -> tuple[int, int]:
    width, height = text.split("x")
    return int(width), int(height)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="folder of the pipeline with the VAE")
    parser.add_argument("--decoder", type=Path, default=DEFAULT_DECODER, help="folder of the PiDDecoder")
    parser.add_argument("--num-scenes", type=int, default=100)
    parser.add_argument("--size", type=_size, default=(128, 128), metavar="WxH", help="of the latent's picture")
    parser.add_argument("--num-inference-steps", type=int, default=4, help="of PiD")
    parser.add_argument("--num-steps-left", type=int, default=2, help="denoising steps that the noisy latent lacks")
    parser.add_argument("--seed", type=int, default=0, help="of the scenes and of all noise")
    parser.add_argument("--contact-sheet", type=Path, help="write the first pictures to this PNG")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    width, height = args.size
    scenes = held_out_scenes(args.num_scenes, width, height, args.seed)
    sigma = stopped_sigma(args.model, width, height, args.num_steps_left)
    pictures, durations = make_pictures(args, scenes, sigma)
    result = {
        "size": f"{width}x{height}",
        "num_scenes": len(scenes),
        "num_inference_steps": args.num_inference_steps,
        "sigma": round(sigma, 4),
        "machine": f"{platform.machine()} {platform.system()}",
        **durations,
        **measure(pictures),
    }
    for name, value in result.items():
        print(f"{name:24} {value}")
    if args.contact_sheet:
        draw_contact_sheet(pictures, args.contact_sheet, min(16, len(scenes)))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
