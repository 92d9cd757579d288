"""`PiDDecoder`: latents, their noise level and a caption in, pictures 4 or 8 times the VAE's size out.

Stands where a pipeline's VAE decode stands, or is called alone. Knows nothing of engines and other callers.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.modeling_utils import ModelMixin  # noqa: F401 - diffusers looks for it here when it loads a folder
from diffusers.pipelines.pipeline_utils import DiffusionPipeline, ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor

from ..errors import ConfigError, RequestError, StepFailedError
from .adapter import LatentFeatures
from .checkpoints import find_checkpoint
from .conversion import load_original
from .modeling import PiDTransformer2DModel
from .scheduling import PiDScheduler
from .text_encoding import encode_captions, repeat_captions

UNDISTILLED_STEPS = 25
MAX_CAPTIONS = 32  # whose embeddings are kept: 2.8 MB each at full size
UNDISTILLED_GUIDANCE = 5.0


class PiDDecoder(DiffusionPipeline):
    """The Pixel Diffusion Decoder as a diffusers pipeline; without a text encoder it takes `prompt_embeds`.

    `instruction` is the text before every caption; None is that of the released decoders.
    """

    model_cpu_offload_seq = "text_encoder->transformer"
    _optional_components: ClassVar = ["text_encoder", "tokenizer"]

    def __init__(
        self,
        transformer: PiDTransformer2DModel,
        scheduler: PiDScheduler,
        text_encoder: Any = None,
        tokenizer: Any = None,
        instruction: str | None = None,
    ) -> None:
        super().__init__()
        width = getattr(getattr(text_encoder, "config", None), "hidden_size", None)
        if width is not None and width != transformer.config.txt_embed_dim:
            raise ConfigError(f"the text encoder is {width} wide, the decoder takes {transformer.config.txt_embed_dim}")
        self.register_modules(
            transformer=transformer, scheduler=scheduler, text_encoder=text_encoder, tokenizer=tokenizer
        )
        self.register_to_config(instruction=instruction)
        self.image_processor = VaeImageProcessor()
        self._captions: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._encoding = threading.Lock()  # a tokenizer serves one thread at a time

    @classmethod
    def from_original(
        cls,
        path_or_repo: str | Path,
        backbone: str = "qwenimage",
        variant: str = "2kto4k_v1pt5",
        checkpoint_type: str = "distilled",
        sr_scale: int | None = None,
        text_encoder: Any = None,
        tokenizer: Any = None,
    ) -> PiDDecoder:
        """A decoder from an official checkpoint: a file, a folder laid out like the repository, or a hub repository.

        `text_encoder` is a Gemma-2 model or where to load one and its tokenizer from.

        Raises:
            ConfigError: if there is no such checkpoint, or the file is not exactly it.
        """
        checkpoint = find_checkpoint(backbone, variant, checkpoint_type, sr_scale)
        transformer = load_original(path_or_repo, checkpoint)
        if isinstance(text_encoder, str | Path):
            from transformers import AutoTokenizer, Gemma2Model

            tokenizer = tokenizer or AutoTokenizer.from_pretrained(text_encoder)
            text_encoder = Gemma2Model.from_pretrained(text_encoder, dtype=transformer.dtype)
        return cls(transformer, PiDScheduler(**checkpoint.scheduler_config), text_encoder, tokenizer)

    @property
    def is_distilled(self) -> bool:
        """True when guidance is part of the weights and a few steps suffice."""
        return self.scheduler.config.algorithm_type != "dpmsolver++"

    @property
    def default_num_inference_steps(self) -> int:
        """Steps of a decode for which no number was asked for."""
        return self.scheduler.max_steps or UNDISTILLED_STEPS

    @property
    def default_guidance_scale(self) -> float:
        """Guidance of a decode for which none was asked for; 1, which is none, where it is part of the weights."""
        return 1.0 if self.is_distilled else UNDISTILLED_GUIDANCE

    # ------------------------------------------------------------------ the pieces of a decode

    def encode_prompt(self, prompt: str | Sequence[str]) -> torch.Tensor:
        """Captions -> (captions, txt_max_length, txt_embed_dim) float32, for `prompt_embeds`.

        The last few captions are remembered and not encoded again. Any thread may call this.

        Raises:
            RequestError: without a text encoder, for a caption that is not remembered.
        """
        captions = [prompt] if isinstance(prompt, str) else list(prompt)
        with self._encoding:
            known = {caption: self._captions[caption] for caption in captions if caption in self._captions}
            new = [caption for caption in dict.fromkeys(captions) if caption not in known]
            if new:
                known.update(zip(new, self._encode(new), strict=True))
            self._captions.update(known)
            while len(self._captions) > MAX_CAPTIONS:
                self._captions.popitem(last=False)
        return torch.stack([known[caption] for caption in captions]).to(self._execution_device)

    def _encode(self, captions: list[str]) -> torch.Tensor:
        if not self.has_text_encoder:
            raise RequestError("this decoder has no text encoder: pass prompt_embeds, or load one")
        num_positions = self.transformer.config.txt_max_length
        components = self.text_encoder, self.tokenizer
        return encode_captions(*components, captions, num_positions, self.config.instruction, self._execution_device)

    @property
    def has_text_encoder(self) -> bool:
        """True when any caption can be encoded."""
        return self.text_encoder is not None and self.tokenizer is not None

    def remembers(self, caption: str) -> bool:
        """True when `encode_prompt` needs no text encoder for this caption."""
        return caption in self._captions

    def forget_captions(self) -> None:
        """Encode every caption anew from here on, if that is possible: the text encoder may have changed."""
        if self.has_text_encoder:
            self._captions.clear()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("text_encoder", "tokenizer") and "_captions" in self.__dict__:
            self.forget_captions()

    def free_text_encoder(self) -> None:
        """Let go of the text encoder, which weighs twice the network; what was encoded stays good."""
        self.register_modules(text_encoder=None)

    def unpack_latents(
        self, latents: torch.Tensor, height: int | None = None, width: int | None = None
    ) -> torch.Tensor:
        """Latents as a pipeline returns them -> (batch, channels, h, w).

        Packed latents, (batch, tokens, values), need the size in pixels that they were made for.

        Raises:
            RequestError: for any other shape, or a size that does not fit.
        """
        config = self.transformer.config
        channels, cell = config.lq_latent_channels, config.latent_spatial_down_factor
        if latents.ndim == 4:
            actual = (latents.shape[2] * cell, latents.shape[3] * cell)
            if (height or actual[0], width or actual[1]) != actual:
                raise RequestError(f"the latents are of {actual[0]} x {actual[1]} pixels, not {height} x {width}")
            return latents
        if latents.ndim != 3:
            raise RequestError(f"latents must be (batch, {channels}, h, w), not {tuple(latents.shape)}")
        if height is None or width is None:
            raise RequestError("packed latents need height and width, the size in pixels that they were made for")
        side = 1 if latents.shape[2] == channels else 2
        rows, columns = height // (cell * side), width // (cell * side)
        if tuple(latents.shape[1:]) != (rows * columns, channels * side**2) or height % cell or width % cell:
            raise RequestError(f"packed latents {tuple(latents.shape)} are not {channels} x {height} x {width} pixels'")
        grid = latents.unflatten(2, (channels, side, side)).unflatten(1, (rows, columns))
        return grid.permute(0, 3, 1, 4, 2, 5).reshape(-1, channels, rows * side, columns * side)

    def prepare_noise(
        self, batch: int, height: int, width: int, generator: torch.Generator | list[torch.Generator] | None = None
    ) -> torch.Tensor:
        """(batch, 3, height, width) float32 noise, the first that is drawn from the generator."""
        shape = (batch, self.transformer.config.in_channels, height, width)
        return randn_tensor(shape, generator=generator, device=self._execution_device, dtype=torch.float32)

    def predict(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        features: LatentFeatures | torch.Tensor,
        sigma: torch.Tensor,
        prompt_embeds: torch.Tensor,
        negative_prompt_embeds: torch.Tensor | None = None,
        guidance_scale: float = 1.0,
        chunk: int | None = None,
    ) -> torch.Tensor:
        """Velocity of noisy pictures, guided away from the negative prompt if there is one."""
        steps = (sample, timestep.expand(len(sample)))
        (velocity,) = self.transformer(*steps, prompt_embeds, features, sigma, return_dict=False, chunk=chunk)
        if negative_prompt_embeds is None:
            return velocity
        (null,) = self.transformer(*steps, negative_prompt_embeds, features, sigma, return_dict=False, chunk=chunk)
        return null + guidance_scale * (velocity - null)

    # ------------------------------------------------------------------ the call

    @torch.no_grad()
    def __call__(
        self,
        latents: torch.Tensor,
        prompt: str | Sequence[str] | None = None,
        sigma: float | Sequence[float] | torch.Tensor = 0.0,
        num_inference_steps: int | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
        height: int | None = None,
        width: int | None = None,
        negative_prompt: str | Sequence[str] = "",
        guidance_scale: float | None = None,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        max_bytes: int | None = None,
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Pictures `sr_scale` times larger than the VAE would make of the latents.

        Args:
            latents: normalised, as the denoiser sees them: (batch, channels, h, w), or packed with `height`, `width`.
            prompt: one caption for all, or one per latent; "" is legal.
            sigma: the latents' noise level, 0 (finished) to 1: after k steps of a flow scheduler, its `sigmas[k]`.
            num_inference_steps: 4 (distilled; fewer are possible) or 25 unless given.
            generator: where all noise comes from, the first picture's first; one per row makes rows independent.
            output_type: "pil", "np", "pt" (0 to 1) or "latent" (-1 to 1, a tensor).
            guidance_scale: undistilled networks only; 5 unless given, 1 switches it off.
            max_bytes: do the network's work in chunks so that a step needs no more, beside the weights.

        Raises:
            RequestError: for anything that does not fit, before any work.
            StepFailedError: when the network's result is not finite; says in which step.
        """
        latents = self.unpack_latents(latents, height, width)
        steps, scale = self._steps_and_guidance(num_inference_steps, guidance_scale)
        levels = self.transformer.check_latents(latents, sigma)
        if isinstance(generator, list) and len(generator) != len(latents):
            raise RequestError(f"{len(generator)} generators do not fit {len(latents)} latents")
        embeds = self._embeds("prompt", len(latents), prompt, prompt_embeds)
        negative = None
        if scale != 1:
            negative = self._embeds("negative_prompt", len(latents), negative_prompt, negative_prompt_embeds)
        self.transformer.warn_if_untrained_size(*self.transformer.output_size(latents))
        sample = self._denoise(latents, levels, embeds, negative, scale, steps, generator, max_bytes)
        images = self.image_processor.postprocess(sample.clamp(-1, 1), output_type=output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _denoise(
        self,
        latents: torch.Tensor,
        sigma: torch.Tensor,
        embeds: torch.Tensor,
        negative: torch.Tensor | None,
        guidance_scale: float,
        steps: int,
        generator: torch.Generator | list[torch.Generator] | None,
        max_bytes: int | None,
    ) -> torch.Tensor:
        """(batch, 3, height, width) float32, from noise in so many steps."""
        batch, device, chunk = len(latents), self._execution_device, None
        height, width = self.transformer.output_size(latents)
        if max_bytes is not None:
            chunk = self.transformer.choose_chunk(height, width, batch, max_bytes, embeds.shape[1])
        latents, sigma = latents.to(device), sigma.to(device)
        features = self.transformer.encode_latents(latents, height, width, with_heads=chunk is None)
        self.scheduler.set_timesteps(steps, device, height, width)
        sample = self.prepare_noise(batch, height, width, generator)
        for index, timestep in enumerate(self.progress_bar(self.scheduler.timesteps)):
            velocity = self.predict(sample, timestep, features, sigma, embeds, negative, guidance_scale, chunk)
            if not bool(velocity.isfinite().all()):
                raise StepFailedError(f"the decoder's result is not finite in step {index + 1} of {steps}")
            sample = self.scheduler.step(velocity, timestep, sample, generator, return_dict=False)[0]
        return sample

    def _steps_and_guidance(self, steps: int | None, guidance_scale: float | None) -> tuple[int, float]:
        if self.is_distilled and guidance_scale not in (None, 1):
            raise RequestError(
                f"guidance_scale={guidance_scale} has no effect on a distilled network: guidance is part of its weights"
            )
        steps = self.default_num_inference_steps if steps is None else steps
        self.scheduler.check_steps(steps)
        return steps, self.default_guidance_scale if guidance_scale is None else guidance_scale

    def _embeds(
        self, name: str, batch: int, prompt: str | Sequence[str] | None, embeds: torch.Tensor | None
    ) -> torch.Tensor:
        """(batch, tokens, width) of captions that are given in one of two forms."""
        if embeds is None:
            if prompt is None:
                raise RequestError(f"pass {name} or {name}_embeds")
            captions = repeat_captions(prompt, batch)
            embeds = self.encode_prompt(captions)
        if embeds.ndim == 3 and len(embeds) == 1:
            embeds = embeds.expand(batch, -1, -1)
        if embeds.ndim != 3 or len(embeds) != batch:
            raise RequestError(f"{name}_embeds of shape {tuple(embeds.shape)} do not fit {batch} latents")
        return embeds.to(self._execution_device)
