"""From a request's body to the pipeline's arguments, and from its output to what the client gets. Knows no HTTP."""

from __future__ import annotations

import base64
import io
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image

from diffusers_continuous.sizes import MAX_SIDE, SIZE_MULTIPLE, diffusion_size, read_size

from .errors import ApiError
from .protocol import (
    GenerationMetrics,
    ImageData,
    ImageGenerationRequest,
    ImagesResponse,
    InputTokensDetails,
    Usage,
)
from .settings import DEFAULT_STEPS, DEFAULT_TRUE_CFG_SCALE, ServingSettings

if TYPE_CHECKING:
    from diffusers_continuous import ContinuousBatchingPipeline, RequestOutput

# A seed that is drawn here is a number that every JSON reader keeps exactly.
MAX_DRAWN_SEED = 2**53


@dataclass(frozen=True)
class Generation:
    """One checked request.

    Attributes:
        width, height: Of the pictures that the client gets.
        seed: Of the first picture.
        arguments: For the pipeline's call.
        warnings: What of the request has no effect.
    """

    request: ImageGenerationRequest
    width: int
    height: int
    seed: int
    arguments: dict[str, Any]
    warnings: tuple[str, ...]

    @property
    def size(self) -> str:
        """As OpenAI writes it."""
        return f"{self.width}x{self.height}"

    @property
    def output_format(self) -> str:
        """How the pictures are encoded."""
        return self.request.output_format or "png"

    def encode(self, picture: Image.Image) -> bytes:
        """The picture as a file."""
        file = io.BytesIO()
        compression = self.request.output_compression
        if self.output_format == "png":
            picture.save(file, "PNG", compress_level=1)  # a network is faster than the last percent
        else:
            quality = 100 if compression is None else max(1, compression)
            picture.save(file, self.output_format.upper(), quality=quality)
        return file.getvalue()

    def encode_preview(self, picture: Image.Image) -> str:
        """A small picture in the size of the real one, as base64, so that it can be shown in its place."""
        return to_base64(self.encode(picture.resize((self.width, self.height), Image.Resampling.BICUBIC)))

    def event_fields(self) -> dict[str, Any]:
        """What OpenAI's clients expect in every event that has a picture."""
        return {
            "created_at": int(time.time()),
            "size": self.size,
            "output_format": self.output_format,
            "quality": "auto",
            "background": "opaque",
        }

    def response(
        self, output: RequestOutput, data: Sequence[ImageData], peak_memory_bytes: int | None
    ) -> ImagesResponse:
        """The answer to a request that finished."""
        metrics = output.metrics
        num_prompt_tokens = metrics.num_prompt_tokens or 0
        num_image_tokens = 0 if output.latents is None else output.latents.shape[0] * output.latents.shape[1]
        return ImagesResponse(
            created=int(time.time()),
            data=list(data),
            output_format=self.request.output_format or "png",
            size=self.size,
            usage=Usage(
                input_tokens=num_prompt_tokens,
                input_tokens_details=InputTokensDetails(text_tokens=num_prompt_tokens, image_tokens=0),
                output_tokens=num_image_tokens,
                total_tokens=num_prompt_tokens + num_image_tokens,
                peak_memory_mb=None if peak_memory_bytes is None else peak_memory_bytes / 2**20,
            ),
            metrics=GenerationMetrics(
                queue_wait_s=metrics.queue_wait_s or 0.0,
                first_step_latency_s=metrics.first_step_latency_s or 0.0,
                latency_s=metrics.latency_s or 0.0,
                num_inference_steps=output.num_steps,
                is_on_time=bool(metrics.is_on_time),
            ),
            warnings=list(self.warnings) or None,
        )


def with_urls(response: ImagesResponse, url_of: Callable[[str], str]) -> ImagesResponse:
    """The response with a URL in place of each picture's name."""
    data = [item if item.url is None else item.model_copy(update={"url": url_of(item.url)}) for item in response.data]
    return response.model_copy(update={"data": data})


def to_base64(content: bytes) -> str:
    """As JSON carries bytes."""
    return base64.b64encode(content).decode("ascii")


def make_generation(
    pipe: ContinuousBatchingPipeline, settings: ServingSettings, request: ImageGenerationRequest
) -> Generation:
    """Check what the document cannot tell, and fill in what was left out.

    Raises:
        ApiError: names the field, the value and the limit.
    """
    _check_model(settings, request)
    _check_output(settings, request)
    if request.decoder == "pid" and pipe.decoder is None:
        problem = "decoder: 'pid' needs a server that has one (--decoder-model); use 'vae'"
        raise ApiError(400, problem, "invalid_value", "decoder")
    scale = 1
    if request.decoder != "vae" and pipe.decoder is not None:
        scale = int(pipe.decoder.transformer.config.sr_scale)
    width, height = _picture_size(pipe, settings, request.size, scale)
    try:
        diffusion_width, diffusion_height = diffusion_size((width, height), scale)
    except ValueError as error:
        raise ApiError(400, str(error), "invalid_value", "size") from None
    seed = request.seed
    if seed is None:
        seed = secrets.randbelow(MAX_DRAWN_SEED - settings.max_n)
    num_steps = request.num_inference_steps or min(DEFAULT_STEPS, settings.max_steps)
    scale_of_guidance = DEFAULT_TRUE_CFG_SCALE if request.true_cfg_scale is None else request.true_cfg_scale
    negative_prompt = " " if request.negative_prompt is None else request.negative_prompt
    arguments = {
        "prompt": request.prompt,
        "negative_prompt": negative_prompt if scale_of_guidance > 1 else None,
        "true_cfg_scale": scale_of_guidance,
        "width": diffusion_width,
        "height": diffusion_height,
        "num_inference_steps": num_steps,
        "num_images_per_prompt": request.n or 1,
        "seed": seed,
        "deadline_s": request.deadline_s,
        "priority": request.priority or 0,
        "decoder": request.decoder,
        "early_stop_steps": request.early_stop_steps,
    }
    return Generation(request, width, height, seed, arguments, tuple(_warnings(request, scale_of_guidance)))


def _check_model(settings: ServingSettings, request: ImageGenerationRequest) -> None:
    if request.model is not None and request.model not in settings.model_names:
        names = ", ".join(map(repr, settings.model_names))
        raise ApiError(
            404, f"model {request.model!r:.200} is not served here; this is {names}", "model_not_found", "model"
        )


def _check_output(settings: ServingSettings, request: ImageGenerationRequest) -> None:
    problem = None
    if request.response_format == "url" and settings.media_dir is None:
        problem = "response_format", "'url' needs a server that keeps pictures (--media-dir); use 'b64_json'"
    elif request.response_format == "url" and request.stream:
        problem = "response_format", "'url' cannot be streamed; events carry the picture as base64"
    elif request.stream and (request.n or 1) > 1:
        problem = "n", f"{request.n} pictures cannot be streamed, since events do not say which one they show; use 1"
    elif request.partial_images and not request.stream:
        problem = "partial_images", f"{request.partial_images} previews need stream=true"
    elif (request.output_format or "png") == "png" and request.output_compression not in (None, 100):
        problem = "output_compression", f"{request.output_compression} is for jpeg and webp; png loses nothing"
    if problem is not None:
        raise ApiError(400, f"{problem[0]}: {problem[1]}", "invalid_value", problem[0])


def _picture_size(
    pipe: ContinuousBatchingPipeline, settings: ServingSettings, size: str | None, scale: int
) -> tuple[int, int]:
    """(width, height) of the pictures; without a size the model's own, or the largest below the limit."""
    if size is None or size == "auto":
        side = int(pipe.default_sample_size * pipe.vae_scale_factor) * scale
        multiple = SIZE_MULTIPLE * scale
        side = max(multiple, min(side, settings.max_size // multiple * multiple))
        return side, side
    try:
        return read_size(size, min(settings.max_size, MAX_SIDE))
    except ValueError as error:
        raise ApiError(400, str(error), "invalid_value", "size") from None


def _warnings(request: ImageGenerationRequest, scale_of_guidance: float) -> list[str]:
    warnings = []
    if request.guidance_scale is not None:
        warnings.append("guidance_scale has no effect on this model; true_cfg_scale guides it")
    if request.negative_prompt is not None and scale_of_guidance <= 1:
        warnings.append(f"negative_prompt has no effect with true_cfg_scale={scale_of_guidance:g}; above 1 it has")
    return warnings
