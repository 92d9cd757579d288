"""Latents to pictures: the VAE's decoder for single frames, PiD step by step, and a preview that needs neither.

For a single frame the VAE's causal 3-D convolutions multiply two frames of zeros, so a 2-D convolution with the last
temporal tap is the same sum. `FrameDecoder` is that form; it steps aside where anything else hangs on the VAE.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import (
    QwenImageAttentionBlock,
    QwenImageCausalConv3d,
    QwenImageResample,
    QwenImageResidualBlock,
    QwenImageRMS_norm,
)
from PIL import Image
from torch import nn

from .devices import is_host
from .errors import RequestError
from .hooks import is_bare
from .pid import LatentFeatures, PiDDecoder, PiDScheduler
from .request import Row, in_pages

if TYPE_CHECKING:
    from .memory.host_swap import PagedTensors

# Pixels decoded together: enough to fill a device with small pictures, and no more than one 1024 x 1024 picture, so
# that many requests finishing at once do not multiply the decode's peak memory.
MAX_DECODE_PIXELS = 2**20
# On a CPU feature maps that leave its cache cost more than sharing saves.
MAX_CPU_DECODE_PIXELS = 2**17


def decode_latents(pipe: Any, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """(rows, image tokens, channels) packed latents -> (rows, 3, height, width) in -1..1, like stock."""
    vae = pipe.vae
    z = pipe._unpack_latents(latents, height, width, pipe.vae_scale_factor).to(vae.dtype)
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    # Dividing by the reciprocal, rounded twice, is what the stock pipeline does; in bf16 multiplying is not the same.
    z = z / (1.0 / std.to(z.device, z.dtype)) + mean.to(z.device, z.dtype)
    max_pixels = MAX_CPU_DECODE_PIXELS if is_host(z.device) else MAX_DECODE_PIXELS
    chunk = 1 if vae.use_slicing else max(1, max_pixels // (height * width))
    return torch.cat([_decode(vae, part) for part in z.split(chunk)])


def _decode(vae: AutoencoderKLQwenImage, z: torch.Tensor) -> torch.Tensor:
    if not _is_plain(vae, z):
        return vae.decode(z, return_dict=False)[0][:, :, 0].clamp(-1.0, 1.0)  # the stock tiled decode does not
    return FrameDecoder()(vae, z[:, :, 0])


def _is_plain(vae: AutoencoderKLQwenImage, z: torch.Tensor) -> bool:
    """True when the decoder's modules are the stock ones and nothing hangs on them."""
    if type(vae) is not AutoencoderKLQwenImage or vae.use_tiling or getattr(vae, "hf_quantizer", None) is not None:
        return False
    known = (QwenImageCausalConv3d, QwenImageRMS_norm, nn.Conv2d)
    for module in (vae, vae.post_quant_conv, *vae.decoder.modules()):
        if not is_bare(module) or (module._parameters and type(module) not in known):
            return False
        weight = module._parameters.get("weight")
        if weight is not None and (weight.dtype != z.dtype or weight.device != z.device or weight.is_inference()):
            return False
    return True


class FrameDecoder:
    """The stock decoder's sums for one frame, in 2-D. Keeps nothing: copies of the last taps were not faster."""

    def __call__(self, vae: AutoencoderKLQwenImage, z: torch.Tensor) -> torch.Tensor:
        """(rows, z_dim, h, w) latents, de-normalised -> (rows, 3, 8h, 8w) in -1..1."""
        decoder = vae.decoder
        x = self._conv(decoder.conv_in, self._conv(vae.post_quant_conv, z))
        x = self._residual(decoder.mid_block.resnets[0], x)
        for attention, resnet in zip(decoder.mid_block.attentions, decoder.mid_block.resnets[1:], strict=True):
            x = self._residual(resnet, self._attention(attention, x))
        for block in decoder.up_blocks:
            for resnet in block.resnets:
                x = self._residual(resnet, x)
            if block.upsamplers is not None:
                x = self._upsample(block.upsamplers[0], x)
        x = self._conv(decoder.conv_out, decoder.nonlinearity(_norm(decoder.norm_out, x)))
        return torch.clamp(x, min=-1.0, max=1.0)

    def _conv(self, conv: QwenImageCausalConv3d, x: torch.Tensor) -> torch.Tensor:
        left, _, top, *_ = conv._padding
        return F.conv2d(x, conv.weight[:, :, -1], conv.bias, stride=conv.stride[1:], padding=(top, left))

    def _residual(self, block: QwenImageResidualBlock, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if isinstance(block.conv_shortcut, nn.Identity) else self._conv(block.conv_shortcut, x)
        x = self._conv(block.conv1, block.nonlinearity(_norm(block.norm1, x)))
        x = self._conv(block.conv2, block.nonlinearity(_norm(block.norm2, x)))
        return x + shortcut

    def _attention(self, block: QwenImageAttentionBlock, x: torch.Tensor) -> torch.Tensor:
        return block(x[:, :, None])[:, :, 0]

    def _upsample(self, block: QwenImageResample, x: torch.Tensor) -> torch.Tensor:
        # The first frame skips the temporal convolution of "upsample3d": the cache has nothing to repeat yet.
        return block.resample(x)


def _norm(norm: QwenImageRMS_norm, x: torch.Tensor) -> torch.Tensor:
    """The stock norm over channels; its gamma has one axis too many for a single frame."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    # What F.normalize computes; its reduction over the channels of one picture takes 10 to 30 times as long on a CPU.
    length = wide.square().sum(1, keepdim=True).sqrt_().clamp_min_(1e-12)
    return (wide / length).to(x.dtype) * norm.scale * norm.gamma.view(-1, 1, 1)


@in_pages("sample")
@dataclass(eq=False)
class PiDState:
    """What a row keeps between two steps of its PiD decode; every tensor has a batch of one.

    `sample` lies in the row's `pages`, where its texts did.
    """

    pages: PagedTensors | None
    sample: torch.Tensor
    features: LatentFeatures
    sigma: torch.Tensor
    prompt_embeds: torch.Tensor
    negative_prompt_embeds: torch.Tensor | None
    noise_scheduler: PiDScheduler
    generator: torch.Generator

    @property
    def has_heads(self) -> bool:
        """True until the largest part of the features is dropped."""
        return self.features.heads is not None

    def drop_heads(self) -> None:
        """Forget the largest part of the features, which can be made again wherever it is used."""
        self.features = replace(self.features, heads=None)


class PiDStage:
    """Takes rows through `PiDDecoder`'s steps, many rows in one forward, each with its own step, noise and caption.

    A row gets what `decoder(latents=..., prompt=..., sigma=..., generator=...)` makes of it alone.

    Args:
        max_bytes: Most bytes that a step may need beside the weights; 0 for no limit.
    """

    def __init__(self, max_bytes: int = 0) -> None:
        self._max_bytes = max_bytes

    def begin(self, decoder: PiDDecoder, row: Row, embeds: torch.Tensor, negative_embeds: torch.Tensor | None) -> None:
        """Draw the row's noise and encode its latents, whose noise level is that of the row's own schedule.

        `embeds` and `negative_embeds` are (1, tokens, width) captions; the latter only where guidance is used.
        """
        assert row.decode_seed is not None
        params, transformer = row.request.params, decoder.transformer
        row.num_decode_steps = decoder.default_num_inference_steps
        latents = row.latents[None].to(decoder._execution_device)
        latents = decoder.unpack_latents(latents, params.height, params.width)
        height, width = transformer.output_size(latents)
        generator = torch.Generator().manual_seed(row.decode_seed)
        noise_scheduler = copy.deepcopy(decoder.scheduler)
        noise_scheduler.set_timesteps(row.num_decode_steps, latents.device, height, width)
        row.drop_texts()
        row.decode_state = PiDState(
            pages=row.pages,
            sample=decoder.prepare_noise(1, height, width, generator),
            features=transformer.encode_latents(latents, height, width, with_heads=not self._max_bytes),
            sigma=row.noise_scheduler.sigmas[row.step].to(latents.device, torch.float32).view(1),
            prompt_embeds=embeds,
            negative_prompt_embeds=negative_embeds,
            noise_scheduler=noise_scheduler,
            generator=generator,
        )

    def step(self, decoder: PiDDecoder, rows: Sequence[Row]) -> None:
        """One step of rows of one size that have begun; sets `image` of those for which it was the last.

        After an error each row has moved or is as it was, its noise not drawn, and takes its next step when told to.

        Raises:
            ArithmeticError: when a prediction is not finite.
        """
        velocities = self._predict(decoder, rows)
        if not bool(velocities.isfinite().all()):
            raise ArithmeticError("the decoder's result is not finite")
        states: list[PiDState] = [row.decode_state for row in rows]
        noise_schedulers = [copy.copy(state.noise_scheduler) for state in states]
        drawn = [state.generator.get_state() for state in states]
        num_moved = 0
        try:
            samples = [
                self._advance(row, scheduler, velocity)
                for row, scheduler, velocity in zip(rows, noise_schedulers, velocities.split(1), strict=True)
            ]
            for row, scheduler, sample in zip(rows, noise_schedulers, samples, strict=True):
                self._move_on(row, scheduler, sample)
                num_moved += 1
        except BaseException:
            for state, before in zip(states[num_moved:], drawn[num_moved:], strict=True):
                state.generator.set_state(before)
            raise

    def _move_on(self, row: Row, noise_scheduler: PiDScheduler, sample: torch.Tensor) -> None:
        """What needs memory comes first, so that the row has moved wholly or not at all."""
        state: PiDState = row.decode_state
        if row.decode_step + 1 == row.num_decode_steps:
            row.image, row.decode_state = sample[0].clamp(-1, 1), None
        else:
            state.sample = sample
            state.noise_scheduler = noise_scheduler
        row.decode_step += 1

    def _advance(self, row: Row, noise_scheduler: PiDScheduler, velocity: torch.Tensor) -> torch.Tensor:
        state: PiDState = row.decode_state
        timestep = noise_scheduler.timesteps[row.decode_step]
        return noise_scheduler.step(velocity, timestep, state.sample, state.generator, return_dict=False)[0]

    def _predict(self, decoder: PiDDecoder, rows: Sequence[Row]) -> torch.Tensor:
        """(rows, 3, height, width) velocities, each row at its own time, as many at once as fit."""
        count = len(rows)
        while count > 1 and not self._fits(decoder, rows, count):
            count = (count + 1) // 2
        parts = [rows[start : start + count] for start in range(0, len(rows), count)]
        return _join([self._predict_together(decoder, part) for part in parts])

    def _predict_together(self, decoder: PiDDecoder, rows: Sequence[Row]) -> torch.Tensor:
        states: list[PiDState] = [row.decode_state for row in rows]
        times = [state.noise_scheduler.timesteps[row.decode_step] for row, state in zip(rows, states, strict=True)]
        negatives = [state.negative_prompt_embeds for state in states if state.negative_prompt_embeds is not None]
        sample, embeds = (_join([getattr(state, name) for state in states]) for name in ("sample", "prompt_embeds"))
        return decoder.predict(
            sample,
            torch.stack(times),
            LatentFeatures.stack(_alike([state.features for state in states])),
            _join([state.sigma for state in states]),
            embeds,
            _join(negatives) if negatives else None,
            decoder.default_guidance_scale,
            self._chunk(decoder, sample.shape[2], sample.shape[3], len(rows), embeds.shape[1]),
        )

    def _chunk(self, decoder: PiDDecoder, height: int, width: int, batch: int, text_length: int) -> int | None:
        if not self._max_bytes:
            return None
        return decoder.transformer.choose_chunk(height, width, batch, self._max_bytes, text_length)

    def _fits(self, decoder: PiDDecoder, rows: Sequence[Row], count: int) -> bool:
        state: PiDState = rows[0].decode_state
        try:
            self._chunk(decoder, state.sample.shape[2], state.sample.shape[3], count, state.prompt_embeds.shape[1])
        except RequestError:
            return False
        return True


def _alike(features: Sequence[LatentFeatures]) -> list[LatentFeatures]:
    """With heads only if all have theirs, which who was in host memory has not."""
    has_heads = all(each.heads is not None for each in features)
    return [each if has_heads else replace(each, heads=None) for each in features]


def _join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors in one; a single one is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


class LatentPreview:
    """A linear map from latent channels to RGB, fitted once per VAE on a synthetic picture of plain colours.

    The fit encodes one small picture; afterwards a preview is one product of (pixels, z_dim) by (z_dim, 3).
    """

    def __init__(self) -> None:
        self._factors: torch.Tensor | None = None

    @property
    def is_fitted(self) -> bool:
        """True once `render` needs the VAE no more."""
        return self._factors is not None

    def render(self, pipe: Any, latents: torch.Tensor, height: int, width: int) -> Image.Image:
        """(image tokens, channels) packed latents -> a picture of height / 8 x width / 8 pixels."""
        if self._factors is None:
            self._factors = _fit_preview(pipe)
        z = pipe._unpack_latents(latents[None].float().cpu(), height, width, pipe.vae_scale_factor)[0, :, 0]
        rgb = torch.einsum("chw,cr->hwr", torch.cat([z, torch.ones_like(z[:1])]), self._factors)
        return Image.fromarray((rgb.clamp(0, 1) * 255).round().byte().numpy())


def _fit_preview(pipe: Any) -> torch.Tensor:
    """Least squares from normalised latents (and a constant) to RGB in 0..1: (z_dim + 1, 3), float32, on the CPU."""
    vae = pipe.vae
    levels = np.linspace(0.0, 1.0, 4, dtype=np.float32)
    colours = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), -1).reshape(8, 8, 3)
    colours = np.random.default_rng(0).permutation(colours.reshape(-1, 3)).reshape(8, 8, 3)
    cell = 32  # pixels; the middle 2 x 2 latents of each cell see one colour only
    picture = torch.from_numpy(colours.repeat(cell, 0).repeat(cell, 1)).permute(2, 0, 1)  # (3, 256, 256)
    pixels = (picture * 2 - 1)[None, :, None].to(pipe._execution_device, vae.dtype)
    mean = vae.encode(pixels).latent_dist.mean[0, :, 0].float().cpu()  # (z_dim, 32, 32)
    shift, scale = (torch.tensor(v).view(-1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    z = (mean - shift) / scale
    middle = z.unflatten(1, (8, 4)).unflatten(3, (8, 4))[:, :, 1:3, :, 1:3]  # (z_dim, 8, 2, 8, 2)
    inputs = middle.permute(1, 3, 2, 4, 0).reshape(-1, z.shape[0])
    targets = torch.from_numpy(colours).reshape(64, 1, 3).expand(64, 4, 3).reshape(-1, 3)
    inputs = torch.cat([inputs, torch.ones(len(inputs), 1)], 1)
    ridge = 1e-3 * torch.eye(inputs.shape[1])
    return torch.linalg.solve(inputs.T @ inputs + ridge, inputs.T @ targets)
