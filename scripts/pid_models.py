"""Two ways to a picture: drawn at its size for the VAE, or drawn small for PiD. The models that `bench_pid.py` runs.

Knows nothing of how they are measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)

from diffusers_continuous import embedded_model_path
from diffusers_continuous.pid import PiDDecoder, PiDScheduler, PiDTransformer2DModel
from pid_formulas import NUM_CHUNKS, TEXT_TOKENS
from stock_process import decode_with_vae

PROMPT = "a red star to the left of a white ring on a blue background"


class BenchError(RuntimeError):
    """What was asked for cannot be measured here; the text says what is missing."""


@dataclass(frozen=True)
class Settings:
    """How pictures are drawn."""

    steps: int
    early_stop: int
    decode_steps: int
    cfg: float
    repeats: int

    @staticmethod
    def of(args: argparse.Namespace, steps: int, early_stop: int, repeats: int) -> Settings:
        """What was asked for, else these defaults.

        Raises:
            BenchError: if nothing would be drawn or measured.
        """
        steps = steps if args.steps is None else args.steps
        early_stop = early_stop if args.early_stop is None else args.early_stop
        repeats = repeats if args.repeats is None else args.repeats
        if not 0 <= early_stop < steps:
            raise BenchError(f"--early-stop {early_stop} must leave at least one of --steps {steps}")
        if repeats < 3:
            raise BenchError(f"--repeats {repeats} is too few for a median; at least 3")
        return Settings(steps, early_stop, args.decode_steps, args.cfg, repeats)


@dataclass(frozen=True)
class Models:
    """The stock pipeline, a PiDDecoder, and the prompt in the form that each takes."""

    pipe: QwenImagePipeline
    decoder: PiDDecoder
    prompt: dict[str, Any]
    caption: dict[str, Any]

    @property
    def device(self) -> torch.device:
        return self.pipe.device

    @property
    def scale(self) -> int:
        """How many times larger than the VAE's PiD's pictures are."""
        return int(self.decoder.transformer.config.sr_scale)

    def weights(self) -> list[torch.Tensor]:
        """Every parameter and buffer."""
        modules = [*self.pipe.components.values(), *self.decoder.components.values()]
        modules = [module for module in modules if isinstance(module, torch.nn.Module)]
        return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]

    def draw(self, side: int, settings: Settings, early_stop: int) -> tuple[torch.Tensor, float]:
        """Packed latents of a square picture some steps before the end, and their noise level."""
        done = settings.steps - early_stop

        def stop(pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            pipe._interrupt = index + 1 >= done
            return {}

        latents = self._call(side, settings, output_type="latent", callback_on_step_end=stop)
        return latents, float(self.pipe.scheduler.sigmas[done])

    def draw_and_decode(self, side: int, settings: Settings) -> Any:
        """The main model's own picture."""
        return self._call(side, settings)

    def _call(self, side: int, settings: Settings, **options: Any) -> Any:
        generator = torch.Generator().manual_seed(0)
        return self.pipe(
            **self.prompt,
            true_cfg_scale=settings.cfg,
            height=side,
            width=side,
            num_inference_steps=settings.steps,
            generator=generator,
            **options,
        ).images

    def decode_vae(self, latents: torch.Tensor, side: int) -> Any:
        """Packed latents to a picture, as the stock pipeline does it after its last step."""
        return self.pipe.image_processor.postprocess(decode_with_vae(self.pipe, latents, side, side))

    def decode_pid(
        self, latents: torch.Tensor, side: int, sigma: float, settings: Settings, in_chunks: bool = False
    ) -> Any:
        """Packed latents of a `side` x `side` picture to one that is larger by the scale."""
        return self.decoder(
            latents.float(),
            **self.caption,
            sigma=sigma,
            height=side,
            width=side,
            num_inference_steps=settings.decode_steps,
            generator=torch.Generator(self.device).manual_seed(1),  # noise of this size takes a CPU long
            max_bytes=self.chunk_bytes(side * self.scale) if in_chunks else None,
        ).images

    def chunk_bytes(self, target: int) -> int:
        """What a step needs when the pixel stage is done in NUM_CHUNKS parts."""
        net = self.decoder.transformer
        chunk = max(1, (target // net.config.patch_size) ** 2 // NUM_CHUNKS)
        return net.estimate_decode_bytes(target, target, 1, net.dtype, chunk)

    def draw_and_decode_pid(self, target: int, settings: Settings, in_chunks: bool = False) -> Any:
        """A picture of the target size by way of a small latent."""
        side = target // self.scale
        latents, sigma = self.draw(side, settings, settings.early_stop)
        return self.decode_pid(latents, side, sigma, settings, in_chunks)


def load_embedded(args: argparse.Namespace) -> Models:
    """The models of the folders, on the best device here.

    Raises:
        BenchError: if there is no decoder.
    """
    if not (args.decoder / "model_index.json").is_file():
        raise BenchError(f"no PiDDecoder in {args.decoder}: name a folder with --decoder, or train one")
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    pipe = QwenImagePipeline.from_pretrained(args.model or embedded_model_path(), dtype=dtype).to(device)
    decoder = PiDDecoder.from_pretrained(args.decoder, dtype=dtype).to(device)
    for each in (pipe, decoder):
        each.set_progress_bar_config(disable=True)
    return Models(pipe, decoder, {"prompt": PROMPT, "negative_prompt": " "}, {"prompt": PROMPT})


def random_models(
    device: torch.device,
    transformer: dict[str, Any] | None = None,
    vae: dict[str, Any] | None = None,
    pid: dict[str, Any] | None = None,
) -> Models:
    """Networks with random weights in bfloat16, and random prompts; of the released sizes unless options are given."""
    with default_dtype(torch.bfloat16), torch.device(device):
        main_model = QwenImageTransformer2DModel(**{"num_layers": 60, **(transformer or {})}).eval()
        vae_model = AutoencoderKLQwenImage(**(vae or {})).eval()
        pid_model = PiDTransformer2DModel(**(pid or {})).eval()
        texts = [torch.randn(1, TEXT_TOKENS, main_model.config.joint_attention_dim) for _ in range(2)]
        mask = torch.ones(1, TEXT_TOKENS, dtype=torch.long)
    caption = torch.randn(1, pid_model.config.txt_max_length, pid_model.config.txt_embed_dim, device=device)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(embedded_model_path(), subfolder="scheduler")
    pipe = QwenImagePipeline(scheduler, vae_model, None, None, main_model)
    decoder = PiDDecoder(pid_model, PiDScheduler())
    for each in (pipe, decoder):
        each.set_progress_bar_config(disable=True)
    prompt = {"prompt_embeds": texts[0], "prompt_embeds_mask": mask}
    prompt |= {"negative_prompt_embeds": texts[1], "negative_prompt_embeds_mask": mask}
    return Models(pipe, decoder, prompt, {"prompt_embeds": caption})


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New weights are made in that dtype, so that no float32 copy of them must fit."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
