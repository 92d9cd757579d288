"""The VAE of the tiny Qwen-Image: the stock class for one frame as a 2-D net, and its training on crops of scenes.

Knows pictures, no captions.
"""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders import autoencoder_kl_qwenimage as qwen_vae
from torch import nn

from tiny_scenes import render, sample_scene
from tiny_training import Muon, Trainer, WeightAverage, cosine_decay

LATENT_CHANNELS = 16


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
