"""The pipelines users hold: stock signatures and results, safe from any thread, many calls in one forward.

Turns call arguments into a `RequestState`, hands it to the engine and waits. Knows arguments and results; never sees
another caller's tensors.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.pipelines.qwenimage import QwenImagePipelineOutput
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift, retrieve_timesteps
from diffusers.utils import logging
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from .arguments import CALL_ARGUMENTS, CallArguments, check_arguments
from .attention import get_backend
from .callbacks import RequestPipelineView, StepCallback
from .config import ContinuousBatchingConfig, check_known, resolve_config
from .cost_model import StepCostModel
from .devices import load_device
from .engine import DiffusionEngine
from .errors import EngineStoppedError, RequestError, UnsupportedModelError, shorten
from .futures import RequestFuture
from .metrics import StatsRecorder
from .models.parallel import follow
from .models.qwen_image import QwenImageStepModel, attention_task, check_transformer, split_embeds
from .models.qwen_image_transformer import check_rows_stay_apart
from .pid import PiDDecoder
from .request import RequestMetrics, RequestOutput, RequestState, RequestStatus, Row, TextEmbeds
from .runner import DiffusionModelRunner
from .scheduler import StepScheduler
from .streams import AsyncRequestStream, RequestStream, wait, wait_for_all

logger = logging.get_logger(__name__)

# Methods of a pipeline that change what all requests share. They wait until nothing runs, hold what waits, and let it
# go on with the change.
_CHANGES_SHARED_STATE = (
    "delete_adapters",
    "disable_lora",
    "enable_group_offload",
    "enable_lora",
    "enable_model_cpu_offload",
    "enable_sequential_cpu_offload",
    "fuse_lora",
    "load_lora_weights",
    "maybe_free_model_hooks",
    "remove_all_hooks",
    "reset_device_map",
    "set_adapters",
    "to",
    "unfuse_lora",
    "unload_lora_weights",
)


# Those of them that may be given the name of a device that PyTorch has yet to learn about.
_TAKES_A_DEVICE = ("enable_model_cpu_offload", "enable_sequential_cpu_offload", "to")


# Those of them that the stock pipeline does not pass on to a pipeline inside it.
_REACHES_THE_DECODER = (
    "enable_group_offload",
    "enable_model_cpu_offload",
    "enable_sequential_cpu_offload",
    "maybe_free_model_hooks",
    "remove_all_hooks",
    "reset_device_map",
    "to",
)


class ContinuousBatchingMixin:
    """Gives a Qwen-Image pipeline an engine. Mix it in before the stock class.

    The engine starts with the first call and ends with the pipeline; it holds the pipeline by weak reference only.
    """

    _engine: DiffusionEngine | None = None
    _stock_class_name = "QwenImagePipeline"

    if TYPE_CHECKING:  # what the stock class brings
        config_name: str
        decoder: PiDDecoder | None
        scheduler: Any
        text_encoder: Any
        transformer: Any
        vae_scale_factor: int
        _execution_device: torch.device
        prepare_latents: Callable[..., torch.Tensor]
        progress_bar: Callable[..., Any]

    # ------------------------------------------------------------------ the engine

    @property
    def engine(self) -> DiffusionEngine | None:
        """The pipeline's present engine, running or stopped; None before the first call, or whatever else makes one."""
        return self._engine

    def init_continuous_batching(
        self, continuous_batching_config: ContinuousBatchingConfig | dict[str, Any] | None = None, **options: Any
    ) -> DiffusionEngine:
        """Make this pipeline's engine with a config, not started yet; a first call or `start()` starts it.

        Raises:
            ConfigError: for an unknown option or value, and for an attention backend that cannot be used here.
            EngineStoppedError: while the pipeline's present engine still takes requests; `stop()` it first.
        """
        config = resolve_config(continuous_batching_config, **options)
        with _lock_of(self):
            if self._engine is not None and not self._engine.is_stopped:
                raise EngineStoppedError(
                    "this pipeline has an engine already, from its first call or from you: pipe.engine.stop() ends it"
                )
            engine = self._make_engine(config)
            self._remember_what_drains()
            self.__dict__["_engine"] = engine
            self.__dict__["_config_of_engine"] = config
            return engine

    def _remember_what_drains(self) -> None:
        """The last engine is about to be replaced, and may have requests to finish; its thread keeps it until then."""
        older = [reference for reference in self.__dict__.get("_older_engines", ()) if reference() is not None]
        if self._engine is not None:
            older.append(weakref.ref(self._engine))
        self.__dict__["_older_engines"] = older

    def _make_engine(self, config: ContinuousBatchingConfig) -> DiffusionEngine:
        stats = StatsRecorder()
        model = QwenImageStepModel(self, functools.partial(get_backend, config.attention_backend), config)
        runner = DiffusionModelRunner(
            model, self._execution_device, config, stats, lock=_step_lock_of(self.transformer)
        )
        make_request = weakref.WeakMethod(self._make_request)

        def make(**arguments: Any) -> RequestState:
            """Lets the pipeline go although the engine keeps this; EngineStoppedError once it is gone."""
            method = make_request()
            if method is None:
                raise EngineStoppedError("the pipeline of this engine is gone")
            return method(**arguments)

        cost_model = StepCostModel() if config.calibration is None else StepCostModel.load(config.calibration)
        engine = DiffusionEngine(StepScheduler(config, cost_model=cost_model), runner, make, stats)
        weakref.finalize(self, _stop_orphan, weakref.ref(engine)).atexit = False
        return engine

    @contextlib.contextmanager
    def continuous_batching_context_manager(
        self,
        continuous_batching_config: ContinuousBatchingConfig | dict[str, Any] | None = None,
        block: bool = True,
        timeout: float | None = None,
        **options: Any,
    ) -> Iterator[DiffusionEngine]:
        """A started engine for the body. It drains at the end; an exception in the body stops it hard."""
        engine = self.init_continuous_batching(continuous_batching_config, **options)
        engine.start()
        try:
            yield engine
        except BaseException:
            engine.stop(block=block, timeout=timeout, hard_stop=True)
            raise
        engine.stop(block=block, timeout=timeout)

    def follow_continuous_batching(
        self, continuous_batching_config: ContinuousBatchingConfig | dict[str, Any] | None = None, **options: Any
    ) -> None:
        """In every process of a `parallel` config but rank 0: take part in rank 0's steps until its engine has stopped.

        Raises:
            ConfigError: on rank 0, which has the engine, and for a config that spreads the transformer over nothing.
            UnsupportedModelError: when the transformer cannot be spread.
            EngineStoppedError: when rank 0 went away, or a step failed.
        """
        config = resolve_config(continuous_batching_config, **options)
        check_transformer(self.transformer)
        follow(self.transformer, get_backend(config.attention_backend, attention_task(self)), config.parallel)

    def _running_engine(self) -> DiffusionEngine:
        """The engine, started; a new one after the last was stopped.

        Raises:
            EngineStoppedError: when the engine has died, with the cause.
        """
        with _lock_of(self):
            if self._engine is None or (self._engine.is_stopped and self._engine.fatal_error is None):
                self.init_continuous_batching(self.__dict__.get("_config_of_engine"))
            assert self._engine is not None
            self._engine.start()
            return self._engine

    # ------------------------------------------------------------------ other ways to call

    def stream(self, *args: Any, **kwargs: Any) -> RequestStream:
        """Submit now and iterate over the request's outputs as it advances; closing the iterator cancels it."""
        engine = self._running_engine()
        state = self._make_request(*args, **kwargs)
        state.streaming = True
        engine.submit(state)
        return RequestStream(engine, state)

    def astream(self, *args: Any, **kwargs: Any) -> AsyncRequestStream:
        """`stream` for asyncio."""
        return AsyncRequestStream(self.stream(*args, **kwargs))

    async def agenerate(self, *args: Any, **kwargs: Any) -> Any:
        """`__call__` for asyncio: waits without blocking the event loop; cancelling the task cancels the request."""
        return_dict = kwargs.pop("return_dict", True)
        stream = AsyncRequestStream(self.stream(*args, **kwargs), final_only=True)
        async with contextlib.aclosing(stream):
            async for output in stream:
                if output.finished:
                    return _pipeline_output(output, return_dict)
        raise AssertionError("a stream ends with a final output")

    def generate_batch(self, inputs: Sequence[dict[str, Any]], **common: Any) -> dict[str, RequestOutput]:
        """Generate for every dict of call arguments; outputs by request id, in input order.

        A request that is refused or fails has its `status` and `error` set; the others are not disturbed.

        Args:
            common: Arguments for all of them; an input's own win.

        Raises:
            RequestError: for an input that is no dict, or two with one `request_id`; nothing is submitted then.
        """
        _check_inputs(inputs)
        engine = self._running_engine()
        states: list[RequestState | RequestOutput] = []
        try:
            for arguments in inputs:
                states.append(self._submit_or_refuse(engine, {**common, **arguments}))
            finals = iter(wait_for_all([state for state in states if isinstance(state, RequestState)]))
            outputs = [s if isinstance(s, RequestOutput) else next(finals) for s in states]
        except BaseException:
            for state in states:
                if isinstance(state, RequestState):
                    engine.cancel(state)
            raise
        return {output.request_id: output for output in outputs}

    def _submit_or_refuse(self, engine: DiffusionEngine, arguments: dict[str, Any]) -> RequestState | RequestOutput:
        try:
            state = self._make_request(**arguments)
            engine.submit(state)
            return state
        except EngineStoppedError:
            raise
        except Exception as error:
            return _refused(arguments.get("request_id") or _new_request_id(), error)

    # ------------------------------------------------------------------ requests

    def _call(self, return_dict: bool, **arguments: Any) -> Any:
        """Submit, wait, show progress, run callbacks; what `__call__` does in every variant."""
        engine = self._running_engine()
        state = self._make_request(**arguments)
        show_progress = not getattr(self, "_progress_bar_config", {}).get("disable", False)
        state.streaming = show_progress
        engine.submit(state)
        try:
            if not show_progress:
                return _pipeline_output(wait(state), return_dict)
            with self.progress_bar(total=state.num_steps) as bar:
                output = wait(state, lambda out: bar.update(out.step - bar.n))
                return _pipeline_output(output, return_dict)
        except BaseException:
            engine.cancel(state)
            raise

    @torch.no_grad()
    def _make_request(self, *args: Any, **kwargs: Any) -> RequestState:
        """Validate call arguments and draw the noise, in the caller's thread; nothing is shared with others yet.

        Raises:
            RequestError: for a bad argument, with the value and the limit.
        """
        for name in kwargs:
            check_known("argument", name, CALL_ARGUMENTS, RequestError)
        arguments = check_arguments(self, *args, **kwargs)
        check_rows_stay_apart(self.transformer)
        state = RequestState(
            request_id=arguments.request_id or _new_request_id(),
            params=arguments.params,
            future=RequestFuture(),
        )
        texts, negative_texts = self._given_embeds(arguments)
        num_decode_steps = self._prepare_decoder(arguments)
        latents, seeds, generators = self._draw_latents(arguments)
        noise_schedulers = self._noise_schedulers(arguments, latents.shape[1])
        state.rows = tuple(
            Row(
                request=state,
                index=index,
                num_image_tokens=latents.shape[1],
                latents=latents[index],
                noise_scheduler=noise_scheduler,
                num_steps=len(noise_scheduler.timesteps) - arguments.params.early_stop_steps,
                prompt=arguments.prompts[index],
                negative_prompt=arguments.negative_prompts[index],
                text=texts[index],
                negative_text=negative_texts[index],
                seed=seeds[index],
                generator=generators[index],
                decode_seed=None if arguments.params.decoder == "vae" else _decode_seed(generators[index]),
                num_decode_steps=num_decode_steps,
            )
            for index, noise_scheduler in enumerate(noise_schedulers)
        )
        if arguments.callback is not None:
            assert self._engine is not None
            view = RequestPipelineView(self, state, arguments.guidance_scale, self._engine.runner.lock)
            state.callback = StepCallback(arguments.callback, view)
        return state

    def _given_embeds(self, arguments: CallArguments) -> tuple[list[TextEmbeds | None], list[TextEmbeds | None]]:
        """Embeddings that the caller brought, per row; None where a prompt is to be encoded."""

        def per_row(embeds: torch.Tensor | None, mask: torch.Tensor | None) -> list[TextEmbeds | None]:
            """A copy of (prompts, tokens, dim), each prompt's as often as it has pictures."""
            if embeds is None:
                return [None] * arguments.num_rows
            limit = arguments.params.max_sequence_length
            mask = None if mask is None else mask[:, :limit]
            texts = split_embeds(embeds[:, :limit].to(arguments.device, copy=True), mask)
            repeat = arguments.num_rows // len(texts)
            return [text for text in texts for _ in range(repeat)]

        negative = arguments.negative_prompt_embeds if arguments.params.do_true_cfg else None
        return (
            per_row(arguments.prompt_embeds, arguments.prompt_embeds_mask),
            per_row(negative, arguments.negative_prompt_embeds_mask),
        )

    def _draw_latents(
        self, arguments: CallArguments
    ) -> tuple[torch.Tensor, list[int | None], list[torch.Generator | None]]:
        """(rows, image tokens, channels) noise, the seed of each row that has one, a generator per row for later noise.

        A caller's generator is drawn from once, in the stock shape. Without one every row has its own seed.
        """
        params, num_rows = arguments.params, arguments.num_rows
        dtype = self.text_encoder.dtype if arguments.prompt_embeds is None else arguments.prompt_embeds.dtype
        channels = self.transformer.config.in_channels // 4
        prepare = functools.partial(
            self.prepare_latents,
            num_channels_latents=channels,
            height=params.height,
            width=params.width,
            dtype=dtype,
            device=arguments.device,
        )
        if arguments.generator is None and arguments.latents is None:
            first = arguments.seed
            if first is None:
                first = int(torch.randint(0, 2**62, (), dtype=torch.int64))
            seeds = [first + index for index in range(num_rows)]
            generators = [torch.Generator().manual_seed(seed) for seed in seeds]
            drawn = [prepare(batch_size=1, generator=generator) for generator in generators]
            return torch.cat(drawn), list(seeds), list(generators)
        latents = prepare(batch_size=num_rows, generator=arguments.generator, latents=arguments.latents)
        latents = latents.clone() if latents is arguments.latents else latents  # the caller may edit its own
        return latents, [None] * num_rows, self._step_generators(arguments)

    def _step_generators(self, arguments: CallArguments) -> list[torch.Generator | None]:
        """Generators for stochastic noise schedulers, seeded from a copy of the caller's, whose own state stays put.

        The stock pipeline never draws from the caller's generator after the latents, so a second call with it must
        find it where the stock call would have left it.
        """
        given = arguments.generator
        if given is None:
            return [None] * arguments.num_rows
        sources = given if isinstance(given, list) else [given]
        copies = []
        for source in sources:
            twin = torch.Generator(device=source.device)
            twin.set_state(source.get_state())
            copies.append(twin)
        rows = [copies[index % len(copies)] for index in range(arguments.num_rows)]
        seeds = [int(torch.randint(0, 2**62, (), dtype=torch.int64, generator=g, device=g.device)) for g in rows]
        return [torch.Generator(device=arguments.device).manual_seed(seed) for seed in seeds]

    def _prepare_decoder(self, arguments: CallArguments) -> int:
        """Steps of the decoder that was asked for; refuses or warns about what it cannot do well."""
        params, decoder = arguments.params, self.decoder
        if params.decoder == "vae" or decoder is None:
            return 1
        transformer = decoder.transformer
        height, width = (
            side // self.vae_scale_factor * transformer.spatial_scale for side in (params.height, params.width)
        )
        if torch.device(decoder._execution_device).type != arguments.device.type:
            raise RequestError(
                f"the decoder is on {decoder._execution_device}, the pipeline on {arguments.device}: "
                "call pipe.decoder.to(...), or pipe.to(...), which moves both"
            )
        transformer.warn_if_untrained_size(height, width)
        max_bytes = self.__dict__["_config_of_engine"].max_decode_bytes
        if max_bytes:
            transformer.choose_chunk(height, width, 1, max_bytes)  # refuses what does not fit at all
        return decoder.default_num_inference_steps

    def _noise_schedulers(self, arguments: CallArguments, image_seq_len: int) -> list[Any]:
        """A copy of the pipeline's noise scheduler per row, its timesteps set; a gang's rows share one."""
        noise_scheduler = copy.deepcopy(self.scheduler)
        config = noise_scheduler.config
        mu = calculate_shift(
            image_seq_len,
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        steps = arguments.params.num_inference_steps
        sigmas = np.linspace(1.0, 1 / steps, steps) if arguments.sigmas is None else arguments.sigmas
        name = type(noise_scheduler).__name__
        try:
            with np.errstate(all="ignore"):  # what is not finite is refused below
                retrieve_timesteps(noise_scheduler, steps, arguments.device, sigmas=sigmas, mu=mu)
        except Exception as error:
            raise RequestError(f"{name} does not accept these sigmas: {error}") from error
        if arguments.params.decoder == "pid":
            _check_final_sigma(noise_scheduler, arguments.params.early_stop_steps)
        if not bool(torch.isfinite(noise_scheduler.timesteps).all()):
            raise RequestError(f"{name} makes no finite schedule of num_inference_steps={steps}; use at least 2 steps")
        noise_scheduler.set_begin_index(0)
        if arguments.callback is not None:
            return [noise_scheduler] * arguments.num_rows
        return [noise_scheduler, *(copy.deepcopy(noise_scheduler) for _ in range(arguments.num_rows - 1))]

    # ------------------------------------------------------------------ shared state

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Nothing of this pipeline runs inside; without an engine there is nothing to wait for."""
        with contextlib.ExitStack() as stack:
            for engine in self._engines():
                stack.enter_context(engine.exclusive())
            yield

    def _engines(self) -> list[DiffusionEngine]:
        """The present one, if there is one, and before it those that may still drain."""
        older = (reference() for reference in self.__dict__.get("_older_engines", ()))
        return [engine for engine in (*older, self.__dict__.get("_engine")) if engine is not None]

    def __setattr__(self, name: str, value: Any) -> None:
        is_component = name != "scheduler" and name in getattr(self, "config", {}) and name in self.__dict__
        if is_component and name == "transformer":
            check_transformer(value)
        if is_component and name == "decoder":
            check_decoder(value, self.transformer, self.vae_scale_factor)
        with self._exclusively() if is_component else contextlib.nullcontext():
            if is_component and name == "decoder":
                self._check_nobody_waits_for(self.decoder)
            super().__setattr__(name, value)

    def _check_nobody_waits_for(self, decoder: PiDDecoder | None) -> None:
        waiting = [row for engine in self._engines() for row in (*engine.scheduler.waiting, *engine.scheduler.late)]
        num_waiting = len({id(row.request) for row in waiting if row.request.params.decoder == "pid"})
        if num_waiting:
            raise RuntimeError(f"{num_waiting} requests wait for {type(decoder).__name__}; let them finish first")

    @property
    def components(self) -> dict[str, Any]:
        """The pipeline's parts by name, as every pipeline class of the family takes them."""
        parts: dict[str, Any] = super().components  # type: ignore[misc]
        return {name: part for name, part in parts.items() if name != "decoder" or part is not None}

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """The stock method; `dtype` also holds for a decoder that is loaded from the folder."""
        pipe = super().from_pretrained(*args, **kwargs)  # type: ignore[misc]
        dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
        if isinstance(dtype, torch.dtype) and pipe.decoder is not None and "decoder" not in kwargs:
            pipe.decoder.to(dtype)
        return pipe

    def __getstate__(self) -> dict[str, Any]:
        if "_engine" in self.__dict__:
            raise TypeError("a pipeline with an engine cannot be copied or pickled; build one from `pipe.components`")
        return self.__dict__

    def save_config(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save the index as the stock pipeline would, so that every Diffusers pipeline class loads the folder."""
        super().save_config(save_directory, *args, **kwargs)  # type: ignore[misc]
        index = Path(save_directory) / self.config_name
        content = json.loads(index.read_text())
        content["_class_name"] = self._stock_class_name
        index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _exclusive_method(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The stock method while nothing runs, and the decoder's where it has to follow."""
        if name in _TAKES_A_DEVICE:
            for value in (*args, *kwargs.values()):
                if isinstance(value, str):
                    load_device(value)
        with self._exclusively():
            result = getattr(super(ContinuousBatchingMixin, self), name)(*args, **kwargs)
            if name in _REACHES_THE_DECODER and self.decoder is not None:
                getattr(self.decoder, name)(*args, **kwargs)
            return result

    stock = getattr(QwenImagePipeline, name)
    return functools.wraps(stock)(method)


for _name in _CHANGES_SHARED_STATE:
    setattr(ContinuousBatchingMixin, _name, _exclusive_method(_name))


class ContinuousBatchingPipeline(ContinuousBatchingMixin, QwenImagePipeline):
    """`QwenImagePipeline` for many callers at once: same arguments, same pictures, one shared batch.

    Args:
        default_sample_size: Latent size of a picture whose size is not given, in 8-pixel units; the stock default
            (128, a 1024-pixel picture) when None.
        decoder: Makes the pictures in place of the VAE, `sr_scale` times larger, for every request that does not ask
            for `decoder="vae"`.
    """

    _optional_components: ClassVar = [*QwenImagePipeline._optional_components, "decoder"]

    def __init__(
        self,
        scheduler: FlowMatchEulerDiscreteScheduler,
        vae: AutoencoderKLQwenImage,
        text_encoder: Qwen2_5_VLForConditionalGeneration,
        tokenizer: Qwen2Tokenizer,
        transformer: QwenImageTransformer2DModel,
        default_sample_size: int | None = None,
        decoder: PiDDecoder | None = None,
    ) -> None:
        check_transformer(transformer)
        super().__init__(scheduler, vae, text_encoder, tokenizer, transformer)
        check_decoder(decoder, transformer, self.vae_scale_factor)
        self.register_modules(decoder=decoder)
        if default_sample_size is not None:
            self.default_sample_size = default_sample_size
        self.register_to_config(default_sample_size=default_sample_size)

    def __call__(
        self,
        prompt: str | list[str] = None,  # type: ignore[assignment]  # noqa: RUF013  (the stock signature)
        negative_prompt: str | list[str] = None,  # type: ignore[assignment]  # noqa: RUF013
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
        callback_on_step_end: Callable[[int, int], None] | None = None,
        callback_on_step_end_tensor_inputs: list[str] = ["latents"],  # noqa: B006
        max_sequence_length: int = 512,
        *,
        deadline_s: float | None = None,
        priority: int = 0,
        request_id: str | None = None,
        seed: int | None = None,
        decoder: str | None = None,
        early_stop_steps: int | None = None,
        early_stop_at: int | None = None,
    ) -> QwenImagePipelineOutput | tuple[Any]:
        """Generate, together with everybody else's requests, and return what `QwenImagePipeline` returns.

        Every stock argument means what it means there. In addition:

        Args:
            deadline_s: Seconds from now until the pictures should be there. By default `slo_scale` times what the
                request is predicted to take alone.
            priority: Lower runs first.
            request_id: A name for cancelling and for error texts; made up when None.
            seed: Row k draws its noise from `seed + k`. Without `seed`, `generator` and `latents` a seed is drawn
                from torch's default generator, so `torch.manual_seed` repeats.
            decoder: `"vae"`, or `"pid"`: the pipeline's PiDDecoder, whose pictures are `sr_scale` times larger than
                `height` x `width`. Its own noise comes from a seed of its own, which `RequestOutput` reports. By
                default the pipeline's PiDDecoder where there is one, else the VAE.
            early_stop_steps: Leave out so many of the last denoising steps; `decoder="pid"` takes away what noise is
                left, knowing how much it is from this call's own schedule.
            early_stop_at: The same, told as the number of steps to take.

        Raises:
            RequestError: for a bad argument, with the value and the limit.
            StepFailedError: when this request failed while running.
            DeadlineError, RequestCancelledError, QueueFullError, EngineStoppedError: as their names say.
        """
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        return self._call(**arguments)


def check_decoder(decoder: PiDDecoder | None, transformer: QwenImageTransformer2DModel, vae_scale_factor: int) -> None:
    """Refuse a decoder of other latents than the transformer's.

    Raises:
        UnsupportedModelError: says what differs.
    """
    if decoder is None:
        return
    if not isinstance(decoder, PiDDecoder):
        raise UnsupportedModelError(f"the decoder must be a PiDDecoder, not {decoder!r:.60}")
    config = decoder.transformer.config
    has = config.lq_latent_channels, config.latent_spatial_down_factor
    needs = transformer.config.in_channels // 4, vae_scale_factor
    if has != needs:
        raise UnsupportedModelError(
            f"the decoder takes latents of {has[0]} channels and {has[1]} pixels a cell; this pipeline's have "
            f"{needs[0]} and {needs[1]}"
        )


def _check_final_sigma(noise_scheduler: Any, early_stop_steps: int) -> None:
    """PiD must know how much noise is left, and there must not be more than it knows."""
    sigmas = getattr(noise_scheduler, "sigmas", None)
    name = type(noise_scheduler).__name__
    if sigmas is None:
        raise RequestError(f"decoder='pid' needs a noise scheduler that tells its sigmas, which {name} does not")
    sigma = float(sigmas[len(noise_scheduler.timesteps) - early_stop_steps])
    if not 0 <= sigma <= 1:
        raise RequestError(f"stopping {early_stop_steps} steps early leaves sigma={sigma:g}; PiD takes 0 to 1")


def _decode_seed(generator: torch.Generator | None) -> int:
    """A seed for a row's decoder: the next number of the row's own generator, which is left as it is."""
    if generator is not None:
        twin = torch.Generator(device=generator.device)
        twin.set_state(generator.get_state())
        generator = twin
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(0, 2**62, (), dtype=torch.int64, generator=generator, device=device))


def _pipeline_output(output: RequestOutput, return_dict: bool) -> QwenImagePipelineOutput | tuple[Any]:
    if output.error is not None:
        raise output.error
    if output.status is not RequestStatus.FINISHED:
        raise AssertionError(f"request {output.request_id!r} ended as {output.status} without an error")
    return QwenImagePipelineOutput(images=output.images) if return_dict else (output.images,)


def _refused(request_id: str, error: Exception) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        status=RequestStatus.FAILED,
        step=0,
        num_steps=0,
        seeds=[],
        metrics=RequestMetrics(arrival_s=0.0),
        error=error,
    )


def _check_inputs(inputs: Sequence[dict[str, Any]]) -> None:
    for arguments in inputs:
        if not isinstance(arguments, dict):
            raise RequestError(f"each input is a dict of call arguments, not {type(arguments).__name__}")
    names = [arguments["request_id"] for arguments in inputs if arguments.get("request_id") is not None]
    twins = sorted({shorten(name) for name in names if names.count(name) > 1})
    if twins:
        raise RequestError(f"request_id={twins[0]} names two inputs; outputs are found by it")


def _new_request_id() -> str:
    return f"req-{uuid.uuid4().hex[:12]}"


_locks_guard = threading.Lock()


def _lock_of(pipe: Any) -> threading.RLock:
    """One lock per pipeline, made on first use: the stock constructors know nothing of it."""
    with _locks_guard:
        return pipe.__dict__.setdefault("_engine_lock", threading.RLock())


# Of each transformer: engines that share one, of two pipelines or where the last one is still draining, take turns,
# since components keep state while they run: its LoRA scales, and those of the VAE and the tokenizer that mostly come
# with it. Pipelines that share only these do not take turns.
_step_locks: weakref.WeakKeyDictionary[torch.nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_step_locks.clear)  # who holds one is not there


def _step_lock_of(transformer: torch.nn.Module) -> threading.RLock:
    """Held by an engine while it runs anything."""
    with _locks_guard:
        return _step_locks.setdefault(transformer, threading.RLock())


def _stop_orphan(reference: weakref.ref[DiffusionEngine]) -> None:
    """The pipeline is gone: end its loop. Another thread does it: garbage collection calls this under any lock."""
    engine = reference()
    if engine is not None and not engine.is_stopped:
        threading.Thread(target=engine.stop, kwargs={"block": False, "hard_stop": True}, daemon=True).start()
