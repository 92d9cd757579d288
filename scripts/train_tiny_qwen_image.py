"""Trains the embedded tiny Qwen-Image from nothing: tokenizer, VAE, latents, transformer with text encoder, export.

    python scripts/train_tiny_qwen_image.py tokenizer
    python scripts/train_tiny_qwen_image.py vae
    python scripts/train_tiny_qwen_image.py latents
    python scripts/train_tiny_qwen_image.py transformer
    python scripts/train_tiny_qwen_image.py export

Every stage keeps its files in --work-dir and continues from its checkpoint when it is started again. What a step sees
depends on the seed and the step's number only, and the schedules count steps, so a resumed run equals an uninterrupted
one. This program does not judge the result: that is scripts/judge_prompt_following.py.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import random
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.models.autoencoders import autoencoder_kl_qwenimage as qwen_vae
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import nn
from tqdm import tqdm
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from tiny_scenes import COLORS, KINDS, RELATIONS, SIZE_WORDS, Scene, caption, render, sample_scene

logger = logging.getLogger("train_tiny_qwen_image")

LATENT_CHANNELS = 16
NATIVE_SIZE_PX = 128
WIDTH = 128
CHECKPOINT_EVERY_S = 120.0
LOG_EVERY_STEPS = 50
DEFAULT_OUTPUT = Path(__file__).parents[1] / "src/diffusers_continuous/assets/tiny-qwen-image"


# ---------------------------------------------------------------------------------------------------------------------
# Shared by both trainings: Muon, the average of the weights, the loop that can be resumed
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def orthogonalize(matrices: torch.Tensor, num_iterations: int = 5) -> torch.Tensor:
    """The nearest semi-orthogonal matrices of a (n, rows, columns) stack, by Newton-Schulz iteration."""
    x = (matrices / (torch.linalg.matrix_norm(matrices, keepdim=True) + 1e-7)).bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.mT if is_tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalized updates.

    `torch.optim.Muon` takes matrices only and walks over them one at a time; this one also takes convolution kernels
    (as matrices of their output channels) and updates all parameters of one shape together.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, num_iterations: int = 5
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "num_iterations": num_iterations})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    by_shape.setdefault(param.shape, []).append(param)
            for params in by_shape.values():
                self._update(params, group)

    def _update(self, params: list[nn.Parameter], group: dict) -> None:
        gradients = [param.grad for param in params]
        buffers = [self.state[param].setdefault("momentum", torch.zeros_like(param)) for param in params]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        directions = torch._foreach_lerp(gradients, buffers, group["momentum"])
        stacked = torch.stack([direction.flatten(1) for direction in directions])
        updates = orthogonalize(stacked, group["num_iterations"])
        scale = group["lr"] * math.sqrt(max(1.0, stacked.shape[1] / stacked.shape[2]))
        for param, update in zip(params, updates, strict=True):
            param.add_(update.view_as(param), alpha=-scale)


class WeightAverage:
    """An exponential moving average of parameters; the horizon grows with the step until `decay` is reached."""

    def __init__(self, params: Iterable[nn.Parameter], decay: float) -> None:
        self.params = list(params)
        self.decay = decay
        self.values = [param.detach().clone() for param in self.params]

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (step + 1) / (step + 10))
        torch._foreach_lerp_(self.values, [param.detach() for param in self.params], 1 - decay)

    @torch.no_grad()
    def copy_to_params(self) -> None:
        torch._foreach_copy_(self.params, self.values)


class SharedGradients:
    """Averages gradients over worker processes through shared memory.

    One worker per core with one thread each: two threads in one process would wait for each other after every
    operation, which costs more than one exchange per step, most of all where something else runs as well.
    """

    def __init__(self, num_workers: int, num_values: int) -> None:
        self.buffer = torch.zeros(num_workers, num_values + 1).share_memory_()
        self.barrier = torch.multiprocessing.get_context("spawn").Barrier(num_workers)

    def average(self, rank: int, params: list[nn.Parameter], wants_stop: bool) -> bool:
        """Replaces every gradient by the mean over the workers; True if any of them wants to stop."""
        for param in params:
            if param.grad is None:  # the last block's text output leads nowhere
                param.grad = torch.zeros_like(param)
        gradients = [param.grad for param in params]
        torch.cat([gradient.flatten() for gradient in gradients], out=self.buffer[rank, :-1])
        self.buffer[rank, -1] = float(wants_stop)
        self.barrier.wait()
        mean = self.buffer.mean(0)
        self.barrier.wait()
        for gradient, values in zip(gradients, mean[:-1].split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(values.view_as(gradient))
        return bool(mean[-1] > 0)


class Trainer:
    """Runs numbered steps on a module, logs, and keeps a checkpoint it continues from."""

    def __init__(
        self,
        module: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        ema: WeightAverage,
        checkpoint: Path,
        max_grad_norm: float = math.inf,
        rank: int = 0,
        shared: SharedGradients | None = None,
    ) -> None:
        self.module = module
        self.optimizers = optimizers
        self.base_lrs = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        self.ema = ema
        self.checkpoint = checkpoint
        self.max_grad_norm = max_grad_norm
        self.rank = rank
        self.shared = shared
        self.step = 0

    def run(
        self,
        num_steps: int,
        loss_of_step: Callable[[int], tuple[torch.Tensor, dict[str, float]]],
        lr_scale: Callable[[float], float],
        max_minutes: float,
    ) -> bool:
        """True if all steps are done, False if the time ran out (a checkpoint is left in both cases)."""
        self._restore()
        started = last_saved = time.monotonic()
        sums: dict[str, float] = {}
        is_stopped = False
        with tqdm(total=num_steps, initial=self.step, mininterval=30, disable=self.rank > 0) as progress:
            while self.step < num_steps and not is_stopped:
                self._set_lr(lr_scale(self.step / num_steps) * min(1.0, (self.step + 1) / 100))
                elapsed = time.monotonic() - started
                figures, is_stopped = self._train_step(loss_of_step, elapsed > 60 * max_minutes)
                for name, value in figures.items():
                    sums[name] = sums.get(name, 0.0) + value / LOG_EVERY_STEPS
                progress.update()
                if self.step % LOG_EVERY_STEPS == 0:
                    text = " ".join(f"{name} {value:.4f}" for name, value in sums.items())
                    logger.info("step %d %.0f s %s", self.step, elapsed, text)
                    sums = {}
                if time.monotonic() - last_saved > CHECKPOINT_EVERY_S:
                    self._save()
                    last_saved = time.monotonic()
        self._save()
        return self.step == num_steps

    def _train_step(
        self, loss_of_step: Callable[[int], tuple[torch.Tensor, dict[str, float]]], wants_stop: bool
    ) -> tuple[dict[str, float], bool]:
        torch.manual_seed(self.step * 1000 + self.rank)
        loss, figures = loss_of_step(self.step)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.shared is not None:
            wants_stop = self.shared.average(self.rank, self.ema.params, wants_stop)
        nn.utils.clip_grad_norm_(self.module.parameters(), self.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        self.ema.update(self.step)
        self.step += 1
        return figures, wants_stop

    def _set_lr(self, scale: float) -> None:
        for optimizer, base_lrs in zip(self.optimizers, self.base_lrs, strict=True):
            for group, base_lr in zip(optimizer.param_groups, base_lrs, strict=True):
                group["lr"] = base_lr * scale

    def _save(self) -> None:
        if self.rank > 0:
            return
        state = {
            "step": self.step,
            "module": self.module.state_dict(),
            "ema": self.ema.values,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.rename(self.checkpoint)

    def _restore(self) -> None:
        if not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint, weights_only=True)
        self.step = state["step"]
        self.module.load_state_dict(state["module"])
        self.ema.values = state["ema"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        logger.info("continuing from step %d", self.step)


def cosine_decay(hold: float, floor: float) -> Callable[[float], float]:
    """The learning rate's factor at a share of the training: 1 up to `hold`, then half a cosine down to `floor`."""

    def scale(progress: float) -> float:
        falling = max(0.0, (progress - hold) / (1 - hold))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * falling))

    return scale


# ---------------------------------------------------------------------------------------------------------------------
# VAE
# ---------------------------------------------------------------------------------------------------------------------


class NormSilu(torch.autograd.Function):
    """SiLU of the channel-wise RMS norm, keeping only the input for the backward pass (memory traffic is the cost)."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        inverse_norm = torch.rsqrt(torch.linalg.vector_norm(x, dim=1, keepdim=True).square_().clamp_min_(1e-24))
        ctx.save_for_backward(x, gain, inverse_norm)
        return F.silu(x * inverse_norm * gain)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, gain, inverse_norm = ctx.saved_tensors
        normed = x * inverse_norm
        grad = torch.ops.aten.silu_backward(grad, normed * gain)
        grad_normed = grad * gain
        grad_x = (grad_normed - normed * (grad_normed * normed).sum(1, keepdim=True)) * inverse_norm
        return grad_x, (grad * normed).sum((0, 2, 3), keepdim=True)


class PlanarAutoencoder(nn.Module):
    """The stock autoencoder for a single frame: a 2-D net of the last temporal taps, with the stock parameter names.

    For one frame the stock class pads the past with zeros, so its other taps never matter; the export has zeros there.
    The mid blocks' attention is left at zero.
    """

    def __init__(self, vae: AutoencoderKLQwenImage) -> None:
        super().__init__()
        self.config = dict(vae.config)
        for name in ("encoder", "quant_conv", "post_quant_conv", "decoder"):
            setattr(self, name, _planar_copy(getattr(vae, name)))
        self.to(memory_format=torch.channels_last)
        self.is_skeleton = False

    def encode(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and log variance, (batch, 16, height / 8, width / 8) each, of images (batch, 3, height, width)."""
        x = self.encoder.conv_in(images)
        for block in self.encoder.down_blocks:
            x = self._residual(block, x) if isinstance(block, qwen_vae.QwenImageResidualBlock) else block.resample(x)
        x = self._middle(self.encoder.mid_block, x)
        moments = self.quant_conv(self.encoder.conv_out(_norm_silu(self.encoder.norm_out, x)))
        return moments.chunk(2, dim=1)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Images, not clamped, of latents (batch, 16, height / 8, width / 8)."""
        x = self._middle(self.decoder.mid_block, self.decoder.conv_in(self.post_quant_conv(latents)))
        for block in self.decoder.up_blocks:
            for residual in block.resnets:
                x = self._residual(residual, x)
            if block.upsamplers is not None:
                x = block.upsamplers[0].resample(x)
        return self.decoder.conv_out(_norm_silu(self.decoder.norm_out, x))

    def to_stock(self) -> AutoencoderKLQwenImage:
        """A new stock autoencoder that computes the same for a single frame."""
        vae = AutoencoderKLQwenImage.from_config(self.config)
        own = self.state_dict()
        vae.load_state_dict({name: _to_shape_of(own[name], value) for name, value in vae.state_dict().items()})
        return vae

    def _middle(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for residual in block.resnets:
            x = self._residual(residual, x)
        return x

    def _residual(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        shortcut = block.conv_shortcut(x)
        if self.is_skeleton:
            return shortcut
        return block.conv2(_norm_silu(block.norm2, block.conv1(_norm_silu(block.norm1, x)))) + shortcut


def _norm_silu(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return NormSilu.apply(x, (norm.gamma * norm.scale).view(1, -1, 1, 1))


def _planar_copy(module: nn.Module) -> nn.Module:
    if isinstance(module, qwen_vae.QwenImageCausalConv3d):
        kernel, stride, padding = module.kernel_size[1:], module.stride[1:], module._padding[2]
        conv = nn.Conv2d(module.in_channels, module.out_channels, kernel, stride, padding)
        conv.load_state_dict({"weight": module.weight[:, :, -1], "bias": module.bias})
        return conv
    module = copy.deepcopy(module)
    for name, child in module.named_children():
        setattr(module, name, _planar_copy(child))
    return module


def _to_shape_of(planar: torch.Tensor, stock: torch.Tensor) -> torch.Tensor:
    if planar.shape == stock.shape:
        return planar
    full = torch.zeros_like(stock)
    full[:, :, -1] = planar
    return full


def make_planar_vae() -> PlanarAutoencoder:
    """An untrained autoencoder whose residual branches, attention and log variances start at zero effect."""
    torch.manual_seed(0)
    vae = PlanarAutoencoder(
        AutoencoderKLQwenImage(
            base_dim=16,
            z_dim=LATENT_CHANNELS,
            dim_mult=[1, 2, 4, 4],
            num_res_blocks=1,
            temperal_downsample=[False, False, False],  # its length makes the spatial factor 8
            latents_mean=[0.0] * LATENT_CHANNELS,
            latents_std=[1.0] * LATENT_CHANNELS,
        )
    )
    for module in vae.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            module.weight.data.mul_(0.7)
            nn.init.zeros_(module.bias)
    for module in vae.modules():
        if isinstance(module, qwen_vae.QwenImageResidualBlock):
            nn.init.zeros_(module.conv2.weight)
        if isinstance(module, qwen_vae.QwenImageAttentionBlock):
            nn.init.zeros_(module.proj.weight)
            module.requires_grad_(False)
    for conv in (vae.quant_conv, vae.post_quant_conv):
        nn.init.dirac_(conv.weight)
    nn.init.zeros_(vae.encoder.conv_out.weight[LATENT_CHANNELS:].data)
    nn.init.constant_(vae.encoder.conv_out.bias[LATENT_CHANNELS:].data, -4.0)
    return vae


def vae_optimizers(vae: PlanarAutoencoder) -> list[torch.optim.Optimizer]:
    outer = {
        id(conv.weight) for conv in (vae.quant_conv, vae.post_quant_conv, vae.encoder.conv_in, vae.decoder.conv_out)
    }
    params = [param for param in vae.parameters() if param.requires_grad]
    kernels = [param for param in params if param.ndim == 4 and param.shape[-1] <= 3 and id(param) not in outer]
    kernels = [param for param in kernels if param.shape[0] > 1 and param.shape[1] > 1]
    rest = [param for param in params if all(param is not kernel for kernel in kernels)]
    return [Muon(kernels, lr=0.01), torch.optim.Adam(rest, lr=3e-3, betas=(0.9, 0.98))]


def sample_crops(rng: random.Random, crop_px: int, count: int) -> torch.Tensor:
    """Crops of training scenes near an object, on the 8 px latent grid, (count, 3, crop_px, crop_px) in -1..1."""
    crops = np.empty((count, crop_px, crop_px, 3), np.uint8)
    for row in crops:
        width, height = rng.choice(VAE_SIZES)
        scene = sample_scene(rng, width, height)
        obj = rng.choice(scene.objects)
        reach = obj.size * min(width, height) / 2
        left = _crop_start(obj.x * width + rng.uniform(-reach, reach), crop_px, width)
        top = _crop_start(obj.y * height + rng.uniform(-reach, reach), crop_px, height)
        row[:] = render(scene, width, height)[top : top + crop_px, left : left + crop_px]
    return to_model_range(crops)


def _crop_start(center: float, crop_px: int, side: int) -> int:
    return min(max(round((center - crop_px / 2) / 8) * 8, 0), side - crop_px)


def to_model_range(images: np.ndarray) -> torch.Tensor:
    """(batch, height, width, 3) uint8 to (batch, 3, height, width) in -1..1, channels last in memory."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)


VAE_SIZES = [(128, 128)] * 4 + [(96, 96)] * 2 + [(160, 160), (192, 128), (128, 192), (192, 192), (256, 256)]


def _huber(difference: torch.Tensor) -> torch.Tensor:
    return F.smooth_l1_loss(difference, torch.zeros_like(difference), beta=0.5)


def vae_loss(vae: PlanarAutoencoder, images: torch.Tensor, is_late: bool) -> tuple[torch.Tensor, dict[str, float]]:
    """Huber and L1 on the pixels and on their differences (edges are what the eye and the judge see), a little KL."""
    mean, log_variance = vae.encode(images)
    log_variance = log_variance.clamp(-12, 4)
    error = vae.decode(mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)) - images
    error_x, error_y = error.diff(dim=-1), error.diff(dim=-2)
    pixels, edges = error.abs().mean(), error_x.abs().mean() + error_y.abs().mean()
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    loss = _huber(error) + 1.5 * (_huber(error_x) + _huber(error_y)) + 1e-3 * kl
    loss = loss + (0.2 * pixels + 0.3 * edges if is_late else 0.05 * pixels + 0.1 * edges)
    psnr = -10 * math.log10(error.detach().square().mean().item() / 4)
    return loss, {"psnr": psnr, "l1": pixels.item(), "kl": kl.item(), "logvar": log_variance.detach().mean().item()}


def train_vae(work_dir: Path, num_steps: int, max_minutes: float) -> None:
    vae = make_planar_vae()
    ema = WeightAverage((param for param in vae.parameters() if param.requires_grad), decay=0.995)
    trainer = Trainer(vae, vae_optimizers(vae), ema, work_dir / "vae.pt")

    def loss_of_step(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        progress = step / num_steps
        vae.is_skeleton = progress < 0.1  # shortcuts first: a linear code, cheap and a good start
        rng = random.Random(f"vae {step}")
        crop_px, count = rng.choice([(48, 16), (48, 16), (48, 16), (64, 9)] if progress < 0.75 else [(64, 9), (96, 4)])
        return vae_loss(vae, sample_crops(rng, crop_px, count), is_late=progress >= 0.5)

    if trainer.run(num_steps, loss_of_step, cosine_decay(hold=0.1, floor=0.02), max_minutes):
        ema.copy_to_params()
        vae.to_stock().save_pretrained(work_dir / "vae")


# ---------------------------------------------------------------------------------------------------------------------
# Latents: every training scene is encoded once
# ---------------------------------------------------------------------------------------------------------------------

# (width, height): share of the steps in the first and in the second half of the training: the shapes are
# learned at the native size, where they are cheap, and have the same latents at the others.
SIZE_SHARES: dict[tuple[int, int], tuple[float, float]] = {
    (128, 128): (1.0, 0.52),
    (96, 96): (0.0, 0.12),
    (192, 192): (0.0, 0.10),
    (128, 192): (0.0, 0.09),
    (192, 128): (0.0, 0.09),
    (160, 160): (0.0, 0.03),
    (96, 128): (0.0, 0.02),
    (128, 96): (0.0, 0.02),
    (256, 256): (0.0, 0.01),
}
LATENT_CHUNK = 512
LATENT_BATCH = 4  # its largest feature maps still fit into the cache: twice as fast as 32


def latent_scene(width: int, height: int, index: int) -> Scene:
    """The scene behind a stored latent (its caption is made anew at every use)."""
    return sample_scene(random.Random(f"latents {width}x{height} {index}"), width, height)


def latent_chunks(num_scenes: int) -> list[tuple[int, int, int]]:
    """(width, height, first scene) of every file of LATENT_CHUNK scenes, `num_scenes` in all."""
    counts = {size: math.ceil(num_scenes * sum(shares) / 2) for size, shares in SIZE_SHARES.items()}
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


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer, text encoder, scheduler, transformer: the stock classes, untrained
# ---------------------------------------------------------------------------------------------------------------------

PROMPT_PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
PROMPT_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
NUM_PREFIX_TOKENS = 34  # what QwenImagePipeline cuts off
NUM_CAPTION_TOKENS = 20  # the longest caption with the template's suffix
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def make_tokenizer() -> Qwen2Tokenizer:
    """A byte-level BPE in which each word of the captions and of the pipeline's template is one token."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_tokenizer_corpus(), trainer)
    trained = json.loads(bpe.to_str())["model"]
    vocab = trained["vocab"] | {token: len(trained["vocab"]) + i for i, token in enumerate(SPECIAL_TOKENS)}
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=[tuple(merge) for merge in trained["merges"]],
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="right",
        extra_special_tokens=[token for token in SPECIAL_TOKENS if token not in ("<|endoftext|>", "<|im_end|>")],
        model_max_length=2048,
    )


def _tokenizer_corpus() -> list[str]:
    rng = random.Random("tokenizer")
    words = [*COLORS, *KINDS, *SIZE_WORDS, *" ".join(RELATIONS).split(), *EXTRA_WORDS]
    spelled = [form for word in words for form in (word, f" {word}", word.capitalize(), f" {word.capitalize()}")]
    template = [part for part in re.split(r"<\|\w+\|>", PROMPT_PREFIX + PROMPT_SUFFIX) if part]
    return template + spelled + [caption(sample_scene(rng), rng) for _ in range(3000)]


EXTRA_WORDS = [
    "a",
    "an",
    "the",
    "two",
    "three",
    "big",
    "tiny",
    "and",
    "with",
    "picture",
    "photo",
    "drawing",
    "next",
    "under",
    "over",
    "on",
    "in",
    "top",
    "bottom",
    "center",
]


def make_text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """0.5 M parameters: two layers of width 128, and the smallest vision tower the class allows (never used here)."""
    token_id = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    text_config = {
        "vocab_size": math.ceil(len(tokenizer) / 64) * 64,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "bos_token_id": token_id["<|endoftext|>"],
        "eos_token_id": token_id["<|im_end|>"],
        "pad_token_id": token_id["<|endoftext|>"],
        "tie_word_embeddings": True,
    }
    vision_config = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 14,
        "out_hidden_size": WIDTH,
        "fullatt_block_indexes": [0],
    }
    config = Qwen2_5_VLConfig(
        text_config=text_config,
        vision_config=vision_config,
        image_token_id=token_id["<|image_pad|>"],
        video_token_id=token_id["<|video_pad|>"],
        vision_start_token_id=token_id["<|vision_start|>"],
        vision_end_token_id=token_id["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    text_encoder = Qwen2_5_VLForConditionalGeneration(config)
    nn.init.normal_(text_encoder.model.language_model.embed_tokens.weight, std=0.5)
    return text_encoder


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Qwen-Image's own: a shift that grows with the number of image tokens."""
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        shift=1.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )


def make_transformer() -> QwenImageTransformer2DModel:
    """3.7 M parameters. Modulation and output start at zero, the gates at 0.3 so that all layers learn at once."""
    torch.manual_seed(2)
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=6,
        attention_head_dim=32,
        num_attention_heads=WIDTH // 32,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(8, 12, 12),
    )
    modulations = [
        block_mod[1] for block in transformer.transformer_blocks for block_mod in (block.img_mod, block.txt_mod)
    ]
    for linear in (*modulations, transformer.norm_out.linear, transformer.proj_out):
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    for linear in modulations:  # (shift, scale, gate) of the attention, then of the feed-forward
        linear.bias.data.view(6, WIDTH)[[2, 5]] = 0.3
    return transformer


# ---------------------------------------------------------------------------------------------------------------------
# Transformer and text encoder
# ---------------------------------------------------------------------------------------------------------------------


class Denoiser(nn.Module):
    """The transformer and the text encoder as one training module, computing what the stock pipeline computes."""

    def __init__(self, tokenizer: Qwen2Tokenizer, text_encoder: nn.Module, transformer: nn.Module) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.language_model = text_encoder.model.language_model
        self.transformer = transformer
        self.prefix_ids = torch.tensor([tokenizer(PROMPT_PREFIX).input_ids])
        if self.prefix_ids.shape[1] != NUM_PREFIX_TOKENS:
            raise ValueError(f"the template's prefix has {self.prefix_ids.shape[1]} tokens, not {NUM_PREFIX_TOKENS}")

    def tokenize(self, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids (batch, NUM_CAPTION_TOKENS) of what follows the template's prefix, and their mask."""
        texts = [text + PROMPT_SUFFIX for text in captions]
        tokens = self.tokenizer(texts, padding="max_length", max_length=NUM_CAPTION_TOKENS, return_tensors="pt")
        return tokens.input_ids, tokens.attention_mask.bool()

    def encode(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Prompt embeddings (batch, tokens, 128); the fixed prefix is run once for the whole batch."""
        net = self.language_model
        prefix, text = net.embed_tokens(self.prefix_ids), net.embed_tokens(token_ids)
        positions = torch.arange(prefix.shape[1] + text.shape[1])
        angles = positions[:, None] * net.rotary_emb.inv_freq.repeat(2)  # (positions, head_dim)
        for layer in net.layers:
            prefix, text = _text_layer_forward(layer, prefix, text, angles.cos(), angles.sin())
        return net.norm(text)

    def forward(
        self,
        noisy: torch.Tensor,
        sigma: torch.Tensor,
        token_ids: torch.Tensor,
        token_mask: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """noise - latents, as predicted from packed latents (batch, tokens, 64) at noise level `sigma` (batch,)."""
        net = self.transformer
        text = net.txt_in(net.txt_norm(self.encode(token_ids)))
        image = net.img_in(noisy)
        time = net.time_text_embed(sigma, noisy)
        joint_mask = torch.cat([token_mask, token_mask.new_ones(image.shape[:2])], dim=1)[:, None, None]
        for block in net.transformer_blocks:
            text, image = _block_forward(block, text, image, F.silu(time), joint_mask, cos, sin)
        return net.proj_out(net.norm_out(image, time))

    def rotary(self, width: int, height: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of the joint sequence, text first, (tokens, head_dim / 2) each."""
        grid = [[(1, height // 16, width // 16)]]
        image, text = self.transformer.pos_embed(grid, max_txt_seq_len=NUM_CAPTION_TOKENS, device=torch.device("cpu"))
        freqs = torch.cat([text, image])
        return freqs.real.contiguous(), freqs.imag.contiguous()


def _text_layer_forward(
    layer: nn.Module, prefix: torch.Tensor, text: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer of the text encoder on the prefix (1, 34, 128) and on texts that follow it (batch, tokens, 128)."""
    num_prefix, batch, num_text = prefix.shape[1], text.shape[0], text.shape[1]
    q_prefix, k_prefix, v_prefix = _text_qkv(layer, prefix, cos[:num_prefix], sin[:num_prefix])
    q_text, k_text, v_text = _text_qkv(layer, text, cos[num_prefix:], sin[num_prefix:])
    k = torch.cat([k_prefix.expand(batch, -1, -1, -1), k_text], dim=2)
    v = torch.cat([v_prefix.expand(batch, -1, -1, -1), v_text], dim=2)
    is_seen = torch.ones(num_text, num_prefix + num_text, dtype=torch.bool).tril(num_prefix)
    text_out = F.scaled_dot_product_attention(q_text, k, v, attn_mask=is_seen)
    prefix_out = F.scaled_dot_product_attention(q_prefix, k_prefix, v_prefix, is_causal=True)
    return _text_residuals(layer, prefix, prefix_out), _text_residuals(layer, text, text_out)


def _text_qkv(layer: nn.Module, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rotated q and k, and v, each (batch, heads, tokens, head_dim), with keys and values repeated for their group."""
    attn = layer.self_attn
    normed = layer.input_layernorm(x)
    q, k, v = (
        linear(normed).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)
        for linear in (attn.q_proj, attn.k_proj, attn.v_proj)
    )
    q, k = (part * cos + torch.cat([-part.chunk(2, -1)[1], part.chunk(2, -1)[0]], dim=-1) * sin for part in (q, k))
    return q, *(part.repeat_interleave(attn.num_key_value_groups, dim=1) for part in (k, v))


def _text_residuals(layer: nn.Module, x: torch.Tensor, attention_out: torch.Tensor) -> torch.Tensor:
    x = x + layer.self_attn.o_proj(attention_out.transpose(1, 2).flatten(2))
    return x + layer.mlp(layer.post_attention_layernorm(x))


def _block_forward(
    block: nn.Module,
    text: torch.Tensor,
    image: torch.Tensor,
    time_silu: torch.Tensor,
    joint_mask: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """QwenImageTransformerBlock with one product for q, k and v and a real-valued RoPE, which a compiler can fuse."""
    attn, num_text = block.attn, text.shape[1]
    image_mod = block.img_mod[1](time_silu)[:, None].chunk(6, dim=-1)
    text_mod = block.txt_mod[1](time_silu)[:, None].chunk(6, dim=-1)
    text_qkv = _joint_linear(_modulate(text, *text_mod[:2]), attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    image_qkv = _joint_linear(_modulate(image, *image_mod[:2]), attn.to_q, attn.to_k, attn.to_v)
    text_q, text_k, text_v = (part.unflatten(-1, (attn.heads, -1)) for part in text_qkv)
    image_q, image_k, image_v = (part.unflatten(-1, (attn.heads, -1)) for part in image_qkv)
    q = torch.cat([attn.norm_added_q(text_q), attn.norm_q(image_q)], dim=1)  # (batch, tokens, heads, head_dim)
    k = torch.cat([attn.norm_added_k(text_k), attn.norm_k(image_k)], dim=1)
    v = torch.cat([text_v, image_v], dim=1)
    q, k, v = (x.transpose(1, 2) for x in (_rotate(q, cos, sin), _rotate(k, cos, sin), v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=joint_mask).transpose(1, 2).flatten(2)
    text = text + text_mod[2] * attn.to_add_out(out[:, :num_text])
    image = image + image_mod[2] * attn.to_out[0](out[:, num_text:])
    text = text + text_mod[5] * block.txt_mlp(_modulate(text, *text_mod[3:5]))
    image = image + image_mod[5] * block.img_mlp(_modulate(image, *image_mod[3:5]))
    return text, image


def _joint_linear(x: torch.Tensor, *linears: nn.Linear) -> tuple[torch.Tensor, ...]:
    weight = torch.cat([linear.weight for linear in linears])
    return F.linear(x, weight, torch.cat([linear.bias for linear in linears])).chunk(len(linears), dim=-1)


def _modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on neighbouring channels of (batch, tokens, heads, head_dim); cos and sin are (tokens, head_dim / 2)."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


TOKENS_PER_BATCH = 64 * (64 + NUM_CAPTION_TOKENS)


def make_denoiser() -> tuple[Denoiser, Qwen2_5_VLForConditionalGeneration]:
    tokenizer = make_tokenizer()
    text_encoder = make_text_encoder(tokenizer)
    return Denoiser(tokenizer, text_encoder, make_transformer()), text_encoder


def denoiser_optimizers(denoiser: Denoiser) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for the rest."""
    blocks = (denoiser.transformer.transformer_blocks, denoiser.language_model.layers)
    matrices = [
        param for part in blocks for name, param in part.named_parameters() if param.ndim == 2 and "_mod." not in name
    ]
    chosen = {id(param) for param in matrices}
    rest = [param for param in denoiser.parameters() if id(param) not in chosen]
    return [
        Muon(matrices, lr=0.02, num_iterations=4),
        torch.optim.AdamW(rest, 2e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def sample_sigmas(count: int) -> torch.Tensor:
    """Noise levels: 80 % logit-normal, leaning to the noisy side where the layout is decided, 20 % uniform."""
    leaning = torch.sigmoid(1.1 * torch.randn(count) + 0.4)
    return torch.where(torch.rand(count) < 0.2, torch.rand(count), leaning).clamp(0.005, 1.0)


def training_caption(scene: Scene, rng: random.Random) -> str:
    """A varied caption; 8 % are the usual negative prompt " ", 2 % are empty."""
    roll = rng.random()
    if roll < 0.10:
        return " " if roll < 0.08 else ""
    return caption(scene, rng)


def train_transformer(work_dir: Path, num_steps: int, max_minutes: float, num_workers: int) -> None:
    denoiser, _ = make_denoiser()
    shared = SharedGradients(num_workers, sum(param.numel() for param in denoiser.parameters()))
    arguments = (work_dir, num_steps, max_minutes, num_workers, shared)
    torch.multiprocessing.spawn(run_transformer_worker, arguments, nprocs=num_workers)


def run_transformer_worker(
    rank: int, work_dir: Path, num_steps: int, max_minutes: float, num_workers: int, shared: SharedGradients
) -> None:
    start_logging(logging.INFO if rank == 0 else logging.WARNING)
    torch.set_num_threads(1)
    latents = LatentPool(work_dir)
    denoiser, _ = make_denoiser()
    compiled = torch.compile(denoiser, dynamic=False)
    ema = WeightAverage(denoiser.parameters(), decay=0.995)
    optimizers = denoiser_optimizers(denoiser)
    trainer = Trainer(denoiser, optimizers, ema, work_dir / "transformer.pt", 1.0, rank, shared)
    sizes = list(SIZE_SHARES)

    def loss_of_step(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        half = 0 if step < num_steps / 2 else 1
        shares = [SIZE_SHARES[size][half] for size in sizes]
        width, height = random.Random(f"size {step}").choices(sizes, shares)[0]  # the same in all workers
        rng = random.Random(f"transformer {step} {rank}")
        pool = latents.of_size(width, height)
        count = round(TOKENS_PER_BATCH / num_workers / (pool.shape[1] + NUM_CAPTION_TOKENS))
        picked = [rng.randrange(len(pool)) for _ in range(count)]
        captions = [training_caption(latent_scene(width, height, index), rng) for index in picked]
        clean = pool[picked]
        noise, sigma = torch.randn_like(clean), sample_sigmas(count)
        noisy = torch.lerp(clean, noise, sigma.view(-1, 1, 1))
        is_native = width == height == NATIVE_SIZE_PX  # the others are not worth the compiler's time
        model = compiled if is_native else denoiser
        velocity = model(noisy, sigma, *denoiser.tokenize(captions), *denoiser.rotary(width, height))
        loss = (velocity - (noise - clean)).square().mean()
        return loss, {"loss": loss.item(), "samples": count * num_workers}

    trainer.run(num_steps, loss_of_step, cosine_decay(hold=0.4, floor=0.01), max_minutes)


# ---------------------------------------------------------------------------------------------------------------------
# Export
# ---------------------------------------------------------------------------------------------------------------------


def export(work_dir: Path, output: Path) -> None:
    """Writes the folder that QwenImagePipeline.from_pretrained loads, with the averaged weights of the last checkpoint.

    transformers loads a model in the dtype it is stored in, diffusers in float32. The text encoder is therefore stored
    in float32, or a plain load would mix dtypes and fail.
    """
    latents = LatentPool(work_dir)
    vae = AutoencoderKLQwenImage.from_pretrained(work_dir / "vae")
    vae.register_to_config(latents_mean=latents.mean.tolist(), latents_std=latents.std.tolist())
    denoiser, text_encoder = make_denoiser()
    state = torch.load(work_dir / "transformer.pt", weights_only=True)
    torch._foreach_copy_([param.detach() for param in denoiser.parameters()], state["ema"])
    pipeline = QwenImagePipeline(
        scheduler=make_scheduler(),
        vae=vae.to(torch.bfloat16),
        text_encoder=text_encoder,
        tokenizer=denoiser.tokenizer,
        transformer=denoiser.transformer.to(torch.bfloat16),
    )
    pipeline.save_pretrained(output)
    for path in output.rglob("*.json"):
        _drop_local_path(path)
    index = output / "model_index.json"
    settings = json.loads(index.read_text()) | {"default_sample_size": NATIVE_SIZE_PX // 8}
    index.write_text(json.dumps(settings, indent=2) + "\n")
    logger.info("exported step %d to %s", state["step"], output)


def _drop_local_path(path: Path) -> None:
    """The name of the folder a part was loaded from says nothing to others."""
    settings = json.loads(path.read_text())
    if settings.pop("_name_or_path", None) is not None:
        path.write_text(json.dumps(settings, indent=2) + "\n")


def start_logging(level: int) -> None:
    logging.basicConfig(level=level, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["tokenizer", "vae", "latents", "transformer", "export"])
    parser.add_argument("--work-dir", type=Path, default=Path("runs/tiny-qwen-image"))
    parser.add_argument("--num-steps", type=int, help="length of the vae or transformer training")
    parser.add_argument("--num-scenes", type=int, default=24_000, help="how many scenes the latents stage encodes")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="folder the export stage writes")
    parser.add_argument("--num-workers", type=int, default=2, help="processes, one thread each, after the vae stage")
    parser.add_argument("--max-minutes", type=float, default=math.inf, help="stop early, leaving a checkpoint")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    start_logging(logging.INFO)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    if args.stage == "vae":
        train_vae(args.work_dir, args.num_steps or 3600, args.max_minutes)
    elif args.stage == "latents":
        encode_latents(args.work_dir, args.num_scenes, args.num_workers)
    elif args.stage == "transformer":
        train_transformer(args.work_dir, args.num_steps or 3200, args.max_minutes, args.num_workers)
    elif args.stage == "export":
        export(args.work_dir, args.output)
    else:
        make_tokenizer().save_pretrained(args.work_dir / "tokenizer")


if __name__ == "__main__":
    main()
