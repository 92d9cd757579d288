"""What clients send and get, as Pydantic models: OpenAI's fields, and at the top level those of a diffusion pipeline.

Knows limits and names, no engine. `None` means "not given" in every field, as OpenAI's clients send it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from diffusers_continuous.arguments import MAX_SEED
from diffusers_continuous.request import RequestStatus

from .settings import ServingSettings

MAX_PROMPT_CHARS = 32000
MAX_PARTIAL_IMAGES = 3
MAX_DEADLINE_S = 24 * 3600.0
REQUEST_ID = r"^[A-Za-z0-9._:-]{1,64}$"
# For the document only: what a size must be is said in the error.
SIZE = r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$"

OutputFormat = Literal["png", "jpeg", "webp"]


class ImageGenerationRequest(BaseModel):
    """A request for pictures. The limits are the server's."""

    model_config = ConfigDict(extra="forbid", strict=True, title="ImageGenerationRequest")

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARS, description="What to draw.")]
    model: str | None = Field(default=None, max_length=256, description="A name of the served model.")
    n: int | None = Field(default=None, description="How many pictures; 1 by default.")
    size: Annotated[
        str | None,
        Field(
            max_length=32,
            json_schema_extra={"pattern": SIZE, "examples": ["1024x1024"]},
            description="WIDTHxHEIGHT of the picture, both multiples of 16; `auto`, the default, is the model's own.",
        ),
    ] = None
    response_format: Literal["b64_json", "url"] | None = Field(
        default=None, description="`b64_json` by default; `url` where the server keeps pictures."
    )
    output_format: OutputFormat | None = Field(default=None, description="`png` by default.")
    output_compression: int | None = Field(
        default=None,
        ge=0,
        le=100,
        description="Quality of `jpeg` and `webp` in percent; 100, the default, is the best.",
    )
    user: str | None = Field(default=None, max_length=1024, description="Whom the request is for; not used.")
    stream: bool | None = Field(default=None, description="Answer with server-sent events.")
    partial_images: int | None = Field(
        default=None,
        ge=0,
        le=MAX_PARTIAL_IMAGES,
        description="With `stream`: previews before the picture; 0 by default.",
    )
    quality: Literal["auto", "standard"] | None = Field(default=None, description="The steps decide; only the default.")
    style: Literal["auto", "vivid"] | None = Field(default=None, description="The prompt decides; only the default.")
    background: Literal["auto", "opaque"] | None = Field(default=None, description="Pictures are opaque.")
    moderation: Literal["auto"] | None = Field(default=None, description="There is none; only the default.")
    negative_prompt: str | None = Field(
        default=None,
        max_length=MAX_PROMPT_CHARS,
        description="What guidance leads away from; a single space by default.",
    )
    num_inference_steps: int | None = Field(default=None, description="Denoising steps; the pipeline's 50 by default.")
    true_cfg_scale: float | None = Field(
        default=None,
        ge=0,
        le=100,
        allow_inf_nan=False,
        description="Guidance, 4 by default; 1 or less draws without, in half the time.",
    )
    guidance_scale: float | None = Field(
        default=None,
        ge=0,
        le=100,
        allow_inf_nan=False,
        description="Taken, and without effect on Qwen-Image; a warning says so.",
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        le=MAX_SEED,
        description="Picture k is drawn with seed + k; a random one by default, which is told.",
    )
    deadline_s: float | None = Field(
        default=None, gt=0, le=MAX_DEADLINE_S, description="Seconds from now until the pictures should be there."
    )
    priority: int | None = Field(default=None, ge=-100, le=100, description="Lower goes first; 0 by default.")
    decoder: Literal["vae", "pid"] | None = Field(
        default=None, description="What makes the pictures; the model's own by default."
    )
    early_stop_steps: int | None = Field(
        default=None, ge=0, description="Last steps to leave to the `pid` decoder; 0 by default."
    )
    detach: bool | None = Field(default=None, description="Go on when the client disconnects.")


def request_model(settings: ServingSettings) -> type[ImageGenerationRequest]:
    """`ImageGenerationRequest` with this server's limits, so that its document and its errors tell them."""
    steps, fields = settings.max_steps, ImageGenerationRequest.model_fields
    limits: dict[str, Any] = {
        "n": (Annotated[int | None, Field(ge=1, le=settings.max_n, description=fields["n"].description)], None),
        "num_inference_steps": (
            Annotated[int | None, Field(ge=1, le=steps, description=fields["num_inference_steps"].description)],
            None,
        ),
        "early_stop_steps": (
            Annotated[int | None, Field(ge=0, lt=steps, description=fields["early_stop_steps"].description)],
            None,
        ),
    }
    return create_model("ImageGenerationRequest", __base__=ImageGenerationRequest, **limits)


class ImageData(BaseModel):
    """One picture."""

    b64_json: str | None = None
    url: str | None = None
    seed: int


class InputTokensDetails(BaseModel):
    """What the input was made of."""

    text_tokens: int
    image_tokens: int


class Usage(BaseModel):
    """Tokens, counted as the model counts them, of one prompt and of all pictures as they were denoised; and memory."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    total_tokens: int
    peak_memory_mb: float | None = Field(
        default=None, description="MiB of the device that were held at most so far, by all requests; none on a CPU."
    )


class GenerationMetrics(BaseModel):
    """How long a request took. Times are seconds from its arrival in the engine."""

    queue_wait_s: float
    first_step_latency_s: float
    latency_s: float
    num_inference_steps: int
    is_on_time: bool = Field(description="True when the pictures were there by their deadline.")


class ImagesResponse(BaseModel):
    """The pictures of a request, in the order of their seeds."""

    created: int
    data: list[ImageData]
    output_format: OutputFormat
    size: str
    background: Literal["opaque"] = "opaque"
    usage: Usage
    metrics: GenerationMetrics
    warnings: list[str] | None = Field(default=None, description="What of the request had no effect.")


class ErrorObject(BaseModel):
    """What went wrong."""

    message: str
    type: str
    code: str | None
    param: str | None


class ErrorResponse(BaseModel):
    """Every answer that is an error."""

    error: ErrorObject


class RequestInfo(BaseModel):
    """Where a request stands."""

    id: str
    object: Literal["request"] = "request"
    created: int
    status: RequestStatus
    step: int = Field(description="Denoising steps that every picture has done.")
    num_steps: int
    queue_position: int | None = Field(
        default=None, description="Requests that get a place first, this one counted; 0 runs."
    )
    eta_s: float | None = Field(
        default=None, description="Predicted seconds until it ends; none while that would be a guess."
    )
    result: ImagesResponse | None = Field(default=None, description="Of a detached request that has finished.")
    error: ErrorObject | None = None


class CancelledRequest(BaseModel):
    """What became of a call for cancelling."""

    id: str
    object: Literal["request"] = "request"
    cancelled: bool = Field(description="False for a request that had ended already.")


class Model(BaseModel):
    """A name of the served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "diffusers-continuous"


class ModelList(BaseModel):
    """All names of the served model."""

    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    """The server takes requests."""

    status: Literal["ok"] = "ok"
