"""Checks what a caller passed to a pipeline and says in plain words what is wrong with it.

Knows the limits of a request; draws no noise and starts nothing.
"""

from __future__ import annotations

import inspect
import math
import numbers
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.utils import logging

from .config import check_known
from .errors import FLOAT16_ADVICE, RequestError, UnsupportedModelError, shorten
from .request import SamplingParams

logger = logging.get_logger(__name__)

OUTPUT_TYPES = ("latent", "np", "pil", "pt")
DECODERS = ("pid", "vae")
MAX_SEQUENCE_LENGTH = 1024
MAX_STEPS = 1000
MAX_IMAGES_PER_PROMPT = 1000  # all of them are noise in memory before the first step
MAX_PIXELS = 4096 * 4096
MAX_SEED = 2**62  # row k uses seed + k
# Rotary positions exist up to here: half of the larger side in 16-pixel tokens, then the text.
MAX_ROTARY_POSITIONS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class CallArguments:
    """A checked call. Lists have one entry per row, in stock order (each prompt's images next to each other).

    `device` is where the pipeline computes.
    """

    params: SamplingParams
    prompts: list[str | None]
    negative_prompts: list[str | None]
    prompt_embeds: torch.Tensor | None
    prompt_embeds_mask: torch.Tensor | None
    negative_prompt_embeds: torch.Tensor | None
    negative_prompt_embeds_mask: torch.Tensor | None
    sigmas: Any
    guidance_scale: float | None
    generator: torch.Generator | list[torch.Generator] | None
    latents: torch.Tensor | None
    callback: Callable[..., Any] | None
    request_id: str | None
    seed: int | None
    device: torch.device

    @property
    def num_rows(self) -> int:
        """Pictures of the call."""
        return len(self.prompts)


def check_arguments(
    pipe: Any,
    prompt: str | list[str] | None = None,
    negative_prompt: str | list[str] | None = None,
    true_cfg_scale: float = 4.0,
    height: int | None = None,
    width: int | None = None,
    num_inference_steps: int = 50,
    sigmas: list[float] | None = None,
    guidance_scale: float | None = None,
    num_images_per_prompt: int = 1,
    generator: torch.Generator | list[torch.Generator] | None = None,
    latents: torch.Tensor | None = None,
    prompt_embeds: torch.Tensor | None = None,
    prompt_embeds_mask: torch.Tensor | None = None,
    negative_prompt_embeds: torch.Tensor | None = None,
    negative_prompt_embeds_mask: torch.Tensor | None = None,
    output_type: str | None = "pil",
    return_dict: bool = True,
    attention_kwargs: dict[str, Any] | None = None,
    callback_on_step_end: Callable[..., Any] | None = None,
    callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
    max_sequence_length: int = 512,
    *,
    deadline_s: float | None = None,
    priority: int = 0,
    request_id: str | None = None,
    seed: int | None = None,
    decoder: str | None = None,
    early_stop_steps: int | None = None,
    early_stop_at: int | None = None,
) -> CallArguments:
    """The call's arguments, checked and spread over rows. Same names and order as the stock `__call__`.

    Raises:
        RequestError: names the argument, its value and the limit.
        UnsupportedModelError: when something attached to the pipeline would mix rows up.
    """
    device = torch.device(pipe._execution_device)  # asked once: diffusers goes through all modules to find out
    _check_pipeline(pipe, device)
    num_inference_steps = _whole("num_inference_steps", num_inference_steps, 1, MAX_STEPS)
    num_images_per_prompt = _whole("num_images_per_prompt", num_images_per_prompt, 1, MAX_IMAGES_PER_PROMPT)
    max_sequence_length = _whole("max_sequence_length", max_sequence_length, 1, MAX_SEQUENCE_LENGTH)
    priority = _whole("priority", priority)
    deadline_s = None if deadline_s is None else _finite("deadline_s", deadline_s)
    if deadline_s is not None and deadline_s <= 0:
        raise RequestError(f"deadline_s={deadline_s!r} must be above 0: it counts from the call")
    true_cfg_scale = _finite("true_cfg_scale", true_cfg_scale)
    sigmas = _check_sigmas(sigmas)
    seed = None if seed is None else _whole("seed", seed, 0, MAX_SEED)
    callback_on_step_end_tensor_inputs = callback_on_step_end_tensor_inputs or ()
    if output_type not in OUTPUT_TYPES:
        raise RequestError(f"output_type={shorten(output_type)} is not known; choose from {list(OUTPUT_TYPES)}")
    if request_id is not None and (not isinstance(request_id, str) or not request_id):
        raise RequestError(f"request_id={shorten(request_id)} must be a non-empty string")
    height, width = _sizes(pipe, height, width)
    _check_prompts(pipe, prompt, prompt_embeds, prompt_embeds_mask)
    count = len(prompt) if isinstance(prompt, list) else 1 if prompt is not None else len(prompt_embeds)  # type: ignore[arg-type]
    do_true_cfg = _uses_guidance(true_cfg_scale, negative_prompt, negative_prompt_embeds)
    negatives = _check_negative(
        pipe, count, do_true_cfg, negative_prompt, negative_prompt_embeds, negative_prompt_embeds_mask
    )
    prompts = prompt if isinstance(prompt, list) else [prompt] * count
    num_rows = count * num_images_per_prompt
    limit = MAX_ROTARY_POSITIONS - max_sequence_length
    if max(height, width) // 32 > limit:
        raise RequestError(f"height={height}, width={width}: no side may be longer than {limit * 32} pixels")
    num_steps = num_inference_steps if sigmas is None else len(sigmas)
    decoder = _decoder(pipe, decoder, prompt, output_type)
    early_stop_steps = _early_stop(decoder, num_steps, early_stop_steps, early_stop_at)
    _check_noise(pipe, generator, latents, seed, num_rows, height, width)
    _check_callback(pipe, callback_on_step_end, callback_on_step_end_tensor_inputs)
    if guidance_scale is not None:
        logger.warning(
            f"guidance_scale is passed as {shorten(guidance_scale)}, but ignored since the model is not "
            "guidance-distilled."
        )
    return CallArguments(
        params=SamplingParams(
            height=height,
            width=width,
            num_inference_steps=num_steps,
            true_cfg_scale=true_cfg_scale,
            do_true_cfg=do_true_cfg,
            max_sequence_length=max_sequence_length,
            output_type=output_type,
            decoder=decoder,
            early_stop_steps=early_stop_steps,
            lora_scale=_lora_scale(attention_kwargs),
            priority=priority,
            deadline_s=deadline_s,
            callback_tensor_inputs=tuple(callback_on_step_end_tensor_inputs),
        ),
        prompts=[text for text in prompts for _ in range(num_images_per_prompt)],
        negative_prompts=[text for text in negatives for _ in range(num_images_per_prompt)],
        prompt_embeds=prompt_embeds,
        prompt_embeds_mask=prompt_embeds_mask,
        negative_prompt_embeds=negative_prompt_embeds,
        negative_prompt_embeds_mask=negative_prompt_embeds_mask,
        sigmas=sigmas,
        guidance_scale=guidance_scale,
        generator=generator,
        latents=latents,
        callback=callback_on_step_end,
        request_id=request_id,
        seed=seed,
        device=device,
    )


CALL_ARGUMENTS = tuple(inspect.signature(check_arguments).parameters)[1:]


def _check_pipeline(pipe: Any, device: torch.device) -> None:
    """Refuse a pipeline in a state in which requests would disturb each other or come out wrong."""
    transformer = pipe.transformer
    if transformer.dtype == torch.float16:
        raise UnsupportedModelError(FLOAT16_ADVICE)
    if getattr(transformer, "is_cache_enabled", False):
        raise UnsupportedModelError(
            "the transformer's cache hooks keep one state for all requests and would mix them up; "
            "call pipe.transformer.disable_cache() and use ContinuousBatchingConfig(step_cache_threshold=...)"
        )
    if torch.is_autocast_enabled(device.type):
        raise RequestError(
            "called inside torch.autocast, which cannot reach the engine's thread; "
            "load the pipeline with dtype=... instead"
        )


# ---------------------------------------------------------------------- pieces


def _whole(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """The value as a Python int; numpy's whole numbers are welcome, a bool is not."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    is_whole = number is not None and not isinstance(value, bool)
    if number is not None and is_whole and (least is None or number >= least) and (most is None or number <= most):
        return number
    span = "" if least is None else f" of at least {least}" if most is None else f" from {least} to {most}"
    raise RequestError(f"{name}={shorten(value)} must be a whole number{span}")


def _finite(name: str, value: Any) -> float:
    """The value as a Python float."""
    number = math.nan if isinstance(value, bool) or not isinstance(value, numbers.Real) else _as_float(value)
    if not math.isfinite(number):
        raise RequestError(f"{name}={shorten(value)} must be a finite number")
    return number


def _as_float(value: numbers.Real) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number that no float can hold
        return math.inf


def _check_sigmas(sigmas: Any) -> Any:
    """Sigmas of any sequence or tensor, as the noise schedulers take them."""
    if sigmas is None:
        return None
    sigmas = sigmas.tolist() if isinstance(sigmas, torch.Tensor) else sigmas
    if not hasattr(sigmas, "__len__") or not 0 < len(sigmas) <= MAX_STEPS:
        raise RequestError(f"sigmas={shorten(sigmas)} must be a sequence of 1 to {MAX_STEPS} numbers")
    if any(isinstance(sigma, numbers.Real) and not math.isfinite(_as_float(sigma)) for sigma in sigmas):
        raise RequestError("`sigmas` has non-finite values")
    return sigmas


def _sizes(pipe: Any, height: Any, width: Any) -> tuple[int, int]:
    """Floored to multiples of 16, with the stock warning."""
    unit = pipe.vae_scale_factor * 2
    default = pipe.default_sample_size * pipe.vae_scale_factor
    height, width = default if height is None else height, default if width is None else width
    height, width = _whole("height", height), _whole("width", width)
    for name, value in (("height", height), ("width", width)):
        if value < unit:
            raise RequestError(f"{name}={shorten(value)} must be at least {unit} pixels")
    if height * width > MAX_PIXELS:
        given = f"height={shorten(height)}, width={shorten(width)}"
        raise RequestError(f"{given}: at most {MAX_PIXELS} pixels (4096x4096) in all")
    if height % unit or width % unit:
        logger.warning(
            f"`height` and `width` have to be divisible by {unit} but are {height} and {width}. "
            "Dimensions will be resized accordingly"
        )
    return height // unit * unit, width // unit * unit


def _check_prompts(pipe: Any, prompt: Any, embeds: Any, mask: Any) -> None:
    if (prompt is None) == (embeds is None):
        raise RequestError("pass either `prompt` or `prompt_embeds`, and not both")
    if prompt is not None:
        _check_texts("prompt", prompt)
    else:
        _check_embeds(pipe, "prompt_embeds", embeds, mask)


def _check_texts(name: str, value: Any) -> None:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"`{name}` has to be a string or a non-empty list of strings, not {_shorten(value)}")
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            bad = text[error.start]
            raise RequestError(f"`{name}` has {bad!r}, half a character, at {error.start}: {_shorten(text)}") from None


def _check_embeds(pipe: Any, name: str, embeds: Any, mask: Any) -> None:
    width, dtype = pipe.transformer.config.joint_attention_dim, pipe.transformer.dtype
    if not isinstance(embeds, torch.Tensor) or embeds.ndim != 3 or embeds.shape[2] != width or 0 in embeds.shape:
        raise RequestError(f"`{name}` must be a (prompts, tokens, {width}) tensor, not {_shorten(embeds)}")
    if embeds.dtype != dtype:
        # One row of another dtype would silently change the dtype of everybody's batch.
        raise RequestError(f"`{name}` is {embeds.dtype}, the transformer computes in {dtype}; convert it first")
    if not bool(torch.isfinite(embeds).all()):
        raise RequestError(f"`{name}` has non-finite values")
    if mask is None:
        logger.warning(
            f"`{name}` is provided and `{name}_mask` is not provided, so the model will treat all tokens as valid."
        )
    elif not isinstance(mask, torch.Tensor) or mask.shape != embeds.shape[:2]:
        raise RequestError(f"`{name}_mask` must be a {tuple(embeds.shape[:2])} tensor, not {_shorten(mask)}")


def _uses_guidance(scale: float, negative: Any, negative_embeds: Any) -> bool:
    """The stock rule: guidance needs a scale above 1 and a negative prompt, even an empty one."""
    has_negative = negative is not None or negative_embeds is not None
    if scale > 1 and not has_negative:
        logger.warning(
            f"true_cfg_scale is passed as {scale}, but classifier-free guidance is not enabled since no "
            "negative_prompt is provided."
        )
    elif scale <= 1 and has_negative:
        logger.warning(
            " negative_prompt is passed but classifier-free guidance is not enabled since true_cfg_scale <= 1"
        )
    return scale > 1 and has_negative


def _check_negative(
    pipe: Any, count: int, do_true_cfg: bool, negative: Any, embeds: Any, mask: Any
) -> list[str | None]:
    """The negative prompt of every prompt; one string serves all of them."""
    if negative is not None and embeds is not None:
        raise RequestError("pass either `negative_prompt` or `negative_prompt_embeds`, and not both")
    if embeds is not None:
        _check_embeds(pipe, "negative_prompt_embeds", embeds, mask)
        if len(embeds) not in (1, count):
            raise RequestError(f"`negative_prompt_embeds` has {len(embeds)} rows for {count} prompts")
    if negative is None or not do_true_cfg:
        return [None] * count
    _check_texts("negative_prompt", negative)
    negatives = negative if isinstance(negative, list) else [negative] * count
    if len(negatives) == 1:
        negatives = negatives * count
    if len(negatives) != count:
        raise RequestError(f"{len(negatives)} negative prompts for {count} prompts; pass one for all or one for each")
    return list(negatives)


def _check_noise(pipe: Any, generator: Any, latents: Any, seed: Any, num_rows: int, height: int, width: int) -> None:
    if sum(given is not None for given in (generator, latents, seed)) > 1 and seed is not None:
        raise RequestError("pass `seed` or a `generator` or `latents`, not several of them")
    generators = generator if isinstance(generator, list) else [] if generator is None else [generator]
    if not all(isinstance(g, torch.Generator) for g in generators):
        raise RequestError(f"`generator` must be a torch.Generator or a list of them, not {_shorten(generator)}")
    if isinstance(generator, list) and len(generator) != num_rows:
        raise RequestError(f"a list of {len(generator)} generators for {num_rows} pictures; pass one for each picture")
    if latents is None:
        return
    shape = (num_rows, (height // 16) * (width // 16), pipe.transformer.config.in_channels)
    if not isinstance(latents, torch.Tensor) or tuple(latents.shape) != shape:
        raise RequestError(f"`latents` must be a packed {shape} tensor for this size, not {_shorten(latents)}")
    if not bool(torch.isfinite(latents).all()):
        raise RequestError("`latents` has non-finite values")


def _decoder(pipe: Any, name: Any, prompt: Any, output_type: str) -> str:
    """Which decoder makes the pictures: the one that was asked for, else the pipeline's own."""
    own = getattr(pipe, "decoder", None)
    name = name if name is not None else "vae" if own is None else "pid"
    if not isinstance(name, str):
        raise RequestError(f"decoder={type(name).__name__}(...): a call names 'pid' or 'vae'; the pipeline holds it")
    check_known("decoder", name, DECODERS, RequestError)
    if name == "pid" and own is None:
        raise RequestError("decoder='pid' needs a PiDDecoder: load the pipeline with decoder=PiDDecoder...")
    if name == "pid" and output_type != "latent":
        _check_captions(own, prompt)
    return name


def _check_captions(decoder: Any, prompt: Any) -> None:
    if prompt is None:
        raise RequestError("decoder='pid' reads the prompt itself, with its own text encoder: pass `prompt`")
    if decoder.has_text_encoder:
        return
    unknown = [text for text in ([prompt] if isinstance(prompt, str) else prompt) if not decoder.remembers(text)]
    if unknown:
        raise RequestError(
            f"decoder='pid' has no text encoder any more and does not remember the prompt {_shorten(unknown[0])}"
        )


def _early_stop(decoder: str, num_steps: int, steps: Any, at: Any) -> int:
    """Denoising steps to leave out."""
    if steps is not None and at is not None:
        raise RequestError("pass `early_stop_steps` or `early_stop_at`, not both")
    if at is not None:
        steps = num_steps - _whole("early_stop_at", at, 1, num_steps)
    steps = 0 if steps is None else _whole("early_stop_steps", steps, 0, num_steps - 1)
    if steps and decoder == "vae":
        given = f"early_stop_steps={steps}" if at is None else f"early_stop_at={at}"
        raise RequestError(f"{given} leaves noise that only decoder='pid' takes away")
    return steps


def _check_callback(pipe: Any, callback: Any, names: Any) -> None:
    if callback is not None and not callable(callback):
        raise RequestError(f"callback_on_step_end={shorten(callback)} is not callable")
    if not isinstance(names, Collection):
        raise RequestError(f"callback_on_step_end_tensor_inputs={shorten(names)} must be a list of names")
    known = pipe._callback_tensor_inputs
    unknown = [name for name in names if name not in known]
    if unknown:
        raise RequestError(f"`callback_on_step_end_tensor_inputs` has to be in {known}, but found {shorten(unknown)}")


def _lora_scale(attention_kwargs: Any) -> float:
    if not attention_kwargs:
        return 1.0
    if not isinstance(attention_kwargs, dict) or set(attention_kwargs) != {"scale"}:
        given = f"attention_kwargs={shorten(attention_kwargs)}"
        raise RequestError(f"{given}: only {{'scale': number}} is known, a LoRA scale")
    return _finite("attention_kwargs['scale']", attention_kwargs["scale"])


def _shorten(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {tuple(value.shape)}"
    return shorten(value)
