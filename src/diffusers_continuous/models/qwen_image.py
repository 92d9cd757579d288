"""Qwen-Image text-to-image as a `StepModel`, over the components of a stock `QwenImagePipeline`.

Knows the pipeline's mathematics (prompt embedding, guidance, noise-scheduler step, decoding), not who asked for it.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel

from ..attention import AttentionBackend, AttentionTask
from ..config import ContinuousBatchingConfig
from ..decode import LatentPreview, PiDStage, decode_latents
from ..errors import FLOAT16_ADVICE, EngineStoppedError, RequestError, UnsupportedModelError
from ..futures import RequestFuture
from ..hooks import is_bare, model_offload_hook
from ..request import RequestState, Row, SamplingParams, TextEmbeds
from .compiled_blocks import CompiledBlocks
from .parallel import check_parallelism, join
from .qwen_image_transformer import (
    Packed,
    can_merge,
    check_rows_stay_apart,
    install_packed_forward,
    uninstall_packed_forward,
    why_not_compiled,
)
from .step_cache import BranchCache, StepCache

if TYPE_CHECKING:
    from ..batch import InputBatch
    from ..pid import PiDDecoder

logger = logging.getLogger(__name__)


def check_transformer(transformer: Any) -> None:
    """Refuse a transformer that cannot be stepped row by row.

    Raises:
        UnsupportedModelError: says what is in the way and what to do about it.
    """
    if not isinstance(transformer, QwenImageTransformer2DModel):
        compiled = "; compile with pipe.transformer.compile_repeated_blocks() instead"
        hint = compiled if isinstance(getattr(transformer, "_orig_mod", None), QwenImageTransformer2DModel) else ""
        raise UnsupportedModelError(f"{type(transformer).__name__} is not a QwenImageTransformer2DModel{hint}")
    for option, why in (
        ("guidance_embeds", "the stock model crashes with it"),
        ("zero_cond_t", "it belongs to the edit pipelines"),
        ("use_additional_t_cond", "it belongs to the layered pipeline"),
        ("use_layer3d_rope", "it belongs to the layered pipeline"),
    ):
        if transformer.config.get(option):
            raise UnsupportedModelError(f"transformer.config.{option}=True cannot be batched here: {why}")


def attention_task(pipe: QwenImagePipeline) -> AttentionTask:
    """What an attention backend has to take for this pipeline as it is now."""
    transformer = pipe.transformer
    head_dim = transformer.config.attention_head_dim
    return AttentionTask(torch.device(pipe._execution_device), transformer.dtype, head_dim)


class QwenImageStepModel:
    """The four verbs over one pipeline's components. Runs on the runner's thread only, under `no_grad`.

    Args:
        pipe: The pipeline; its components are read at every call, so an exchanged one is used from then on.
        choose_attention: Gives the forward's backend for where the transformer is and what it computes in.
        config: Sizes of its caches and limits of its steps.

    Raises:
        ConfigError: when the backend that was chosen cannot be used; says why.
    """

    def __init__(
        self,
        pipe: QwenImagePipeline,
        choose_attention: Callable[[AttentionTask], AttentionBackend],
        config: ContinuousBatchingConfig,
    ) -> None:
        self._pipe_ref = weakref.ref(pipe)
        self._transformer_ref = weakref.ref(pipe.transformer)
        self._choose_attention = choose_attention
        self._attention: AttentionBackend | None = None
        self._device: torch.device | None = None
        self._prompts: OrderedDict[tuple[str, int], TextEmbeds] = OrderedDict()
        self._config = config
        self.num_branch_steps = self.num_skipped_branch_steps = 0
        # What branches keep between their steps is in image order, and some leave in the middle of a step.
        self.batch_layout = "packed" if config.step_cache_threshold else config.batch_layout
        self._rotary: OrderedDict[tuple[Any, ...], torch.Tensor] = OrderedDict()
        self._preview = LatentPreview()
        self._pid = PiDStage(config.max_decode_bytes)
        self._compiled = CompiledBlocks() if config.compile else None
        self._is_uncompiled = False
        self._ranks = join(pipe.transformer, config.parallel)
        self._attention_backend()  # a wrong choice is told now
        install_packed_forward(pipe.transformer, self)

    def reset(self) -> None:
        """Forget what was worked out from components that may have changed."""
        self._forget()
        transformer = self._pipe.transformer
        check_transformer(transformer)
        if transformer is not self._transformer_ref():
            if self._ranks is not None:
                raise UnsupportedModelError("a transformer that other processes share cannot be exchanged in this one")
            self.close()
            self._transformer_ref = weakref.ref(transformer)
        install_packed_forward(transformer, self)

    def close(self) -> None:
        """Leave the pipeline's modules as they were found and keep nothing."""
        self._forget()
        if self._ranks is not None:
            self._ranks.close()
        transformer = self._transformer_ref()
        if transformer is not None:
            uninstall_packed_forward(transformer, self)

    def drop_caches(self) -> None:
        """Forget prompts and rotary tables."""
        self._prompts.clear()
        self._rotary.clear()

    def _forget(self) -> None:
        self.drop_caches()
        decoder = getattr(self._pipe_ref(), "decoder", None)
        if decoder is not None:
            decoder.forget_captions()
        self._preview = LatentPreview()
        self._attention = self._device = None

    @property
    def _pipe(self) -> QwenImagePipeline:
        """The pipeline, which owns this object and not the other way round, so that `del pipe` frees the weights."""
        pipe = self._pipe_ref()
        if pipe is None:
            raise EngineStoppedError("the pipeline of this engine is gone")
        return pipe

    # ------------------------------------------------------------------ where things are

    @property
    def device(self) -> torch.device:
        """Where rows live and forwards run. Asked once: diffusers goes through all modules to find out."""
        if self._device is None:
            self._device = torch.device(self._pipe._execution_device)
        return self._device

    @property
    def is_phased(self) -> bool:
        """True after `enable_model_cpu_offload`, on whichever pipeline: one big component on the device at a time."""
        return any(True for _ in self._offloaded())

    def release(self) -> None:
        """Nothing to do for now: let offloaded components leave the device."""
        self._make_room(None)
        if self._ranks is not None:
            self._ranks.forget()

    def _make_room(self, needed: torch.nn.Module | None) -> None:
        """With model offload, move every component off the device except the one that is about to be used."""
        for component, hook in self._offloaded():
            is_away = next(component.parameters()).device.type != torch.device(hook.execution_device).type
            if component is not needed and not is_away:
                hook.init_hook(component)

    def _offloaded(self) -> Iterator[tuple[torch.nn.Module, Any]]:
        """The components that `enable_model_cpu_offload` moves, those of the nested decoder too, with their hooks."""
        pipe = self._pipe
        decoder = getattr(pipe, "decoder", None)
        nested = () if decoder is None else (decoder.text_encoder, decoder.transformer)
        for component in (pipe.text_encoder, pipe.transformer, pipe.vae, *nested):
            hook = None if component is None else model_offload_hook(component)
            if hook is not None:
                yield component, hook

    # ------------------------------------------------------------------ encode

    def prepare_encode(self, rows: Sequence[Row]) -> None:
        """Set the texts of `rows`; prompts not seen lately are encoded together, each once."""
        wanted: OrderedDict[int, OrderedDict[str, None]] = OrderedDict()
        for row in rows:
            for prompt in _missing_prompts(row):
                wanted.setdefault(row.request.params.max_sequence_length, OrderedDict())[prompt] = None
        fresh: dict[tuple[str, int], TextEmbeds] = {}
        for length, prompts in wanted.items():
            new = [prompt for prompt in prompts if (prompt, length) not in self._prompts]
            if new:
                fresh.update({(p, length): text for p, text in zip(new, self._encode(new, length), strict=True)})
        for row in rows:
            length = row.request.params.max_sequence_length
            if row.text is None:
                row.text = self._lookup(row.prompt, length, fresh)
            if row.negative_text is None and row.num_branches == 2:
                row.negative_text = self._lookup(row.negative_prompt, length, fresh)
        for key, text in fresh.items():
            self._remember(key, text)

    def _encode(self, prompts: list[str], max_sequence_length: int) -> list[TextEmbeds]:
        self._make_room(self._pipe.text_encoder)
        texts: dict[str, TextEmbeds] = {}
        for together in self._encodable_together(prompts):
            embeds, mask = self._pipe.encode_prompt(prompt=together, max_sequence_length=max_sequence_length)
            texts.update(zip(together, split_embeds(embeds, mask), strict=True))
        for prompt, text in texts.items():
            if text.num_tokens == max_sequence_length:
                logger.warning(
                    "a prompt of %d characters was cut to max_sequence_length=%d tokens", len(prompt), text.num_tokens
                )
        return [texts[prompt] for prompt in prompts]

    def _encodable_together(self, prompts: list[str]) -> list[list[str]]:
        """So many that they have `max_batch_tokens` with padding; in float32, whose last bits that changes, without."""
        pipe, limit = self._pipe, self._config.max_batch_tokens
        texts = [pipe.prompt_template_encode.format(prompt) for prompt in prompts]
        ids = pipe.tokenizer(texts, max_length=self._max_encoder_tokens, truncation=True).input_ids
        has_padding = pipe.text_encoder.dtype != torch.float32
        groups: list[list[str]] = []
        shortest = 0
        for length, prompt in sorted(zip(map(len, ids), prompts, strict=True), key=operator.itemgetter(0)):
            fits = bool(groups) and length * (len(groups[-1]) + 1) <= limit
            if not fits or (length > shortest and not has_padding):
                groups.append([])
                shortest = length
            groups[-1].append(prompt)
        return groups

    @property
    def _max_encoder_tokens(self) -> int:
        """Tokens at which the pipeline cuts a prompt, its template among them."""
        return int(self._pipe.tokenizer_max_length + self._pipe.prompt_template_encode_start_idx)

    def encode_examples(self) -> None:
        """Encode the longest prompts, so many that no encoding is larger. Keeps nothing."""
        encoder = self._pipe.text_encoder
        if not _can_run(encoder, self.device):
            return  # it can encode nothing: requests bring their embeddings
        longest = self._max_encoder_tokens
        prompts = ["a " * longest] * math.ceil(self._config.max_batch_tokens / longest)
        self._make_room(encoder)
        self._pipe.encode_prompt(prompt=prompts)

    def _lookup(self, prompt: str | None, length: int, fresh: dict[tuple[str, int], TextEmbeds]) -> TextEmbeds:
        assert prompt is not None
        key = (prompt, length)
        if key in fresh:
            return fresh[key]
        self._prompts.move_to_end(key)
        return self._prompts[key]

    def _remember(self, key: tuple[str, int], text: TextEmbeds) -> None:
        self._prompts[key] = text
        while len(self._prompts) > self._config.prompt_cache_size:
            self._prompts.popitem(last=False)

    # ------------------------------------------------------------------ denoise

    def rotary(self, row: Row, is_negative: bool) -> torch.Tensor:
        """The stock rotary table of this row alone: text positions begin after the larger half side of its image."""
        text = row.negative_text if is_negative else row.text
        assert text is not None
        grid = (1, row.request.params.height // 16, row.request.params.width // 16)
        key = (grid, text.width, text.positions, row.noise_scheduler.timesteps.device)
        if key not in self._rotary:
            image, words = self._pipe.transformer.pos_embed([grid], max_txt_seq_len=text.width, device=key[-1])
            if text.positions is not None:
                words = words[list(text.positions)]
            self._rotary[key] = torch.cat([words, image])
            while len(self._rotary) > 4 * self._config.prompt_cache_size + 16:
                self._rotary.popitem(last=False)
        self._rotary.move_to_end(key)
        return self._rotary[key]

    def prepare_denoise(self, rows: Sequence[Row]) -> None:
        """Bring along the rows that waited while the pipeline was moved to another device or cast to another dtype."""
        if not rows:
            return
        if next(self._pipe.transformer.parameters()).dtype == torch.float16:
            raise UnsupportedModelError(FLOAT16_ADVICE)
        device = self.device
        for row in rows:
            dtype = self._dtype_of(row)
            if (row.latents.device, row.latents.dtype) == (device, dtype):
                continue
            row.noise_scheduler.timesteps = row.noise_scheduler.timesteps.to(device)
            for name in ("text", "negative_text"):
                text = getattr(row, name)
                if text is not None:
                    setattr(row, name, TextEmbeds(text.embeds.to(device, dtype), text.width, text.positions))
            row.latents = row.latents.to(device, dtype)  # last: they tell, to whoever tries again, what is done

    def _dtype_of(self, row: Row) -> torch.dtype:
        """Its own when it was submitted: the encoder's for a prompt, the transformer's for given embeddings."""
        dtype: torch.dtype = self._pipe.transformer.dtype if row.prompt is None else self._pipe.text_encoder.dtype
        return dtype

    def state_bytes(self, row: Row) -> list[list[int]]:
        """Latents and texts, then, with PiD, latents and its picture."""
        pipe, params, size = self._pipe, row.request.params, self._dtype_of(row).itemsize
        config = pipe.transformer.config
        latents = row.num_image_tokens * config.in_channels * size
        stages = [[latents, *(tokens * config.joint_attention_dim * size for tokens in row.text_tokens)]]
        if params.decoder == "pid" and params.output_type != "latent":
            scale = pipe.decoder.transformer.spatial_scale
            sides = (side // pipe.vae_scale_factor * scale for side in (params.height, params.width))
            stages.append([latents, 3 * math.prod(sides) * torch.float32.itemsize])
        return stages

    def step_cache_bytes(self, num_tokens: int) -> int:
        """Of what the first block added and of what the others did."""
        transformer = self._pipe.transformer
        return int(2 * num_tokens * transformer.inner_dim * transformer.dtype.itemsize)

    def example_row(self, num_tokens: int) -> Row:
        """A square picture of noise that is all 0, and one token of text."""
        side = max(1, math.isqrt(num_tokens - 1))
        params = SamplingParams(16 * side, 16 * side, 1, 1.0, False)
        config, tensor = self._pipe.transformer.config, {"device": self.device, "dtype": self._pipe.transformer.dtype}
        request = RequestState("example", params, RequestFuture())
        row = Row(
            request=request,
            index=0,
            num_image_tokens=side**2,
            latents=torch.zeros(side**2, config.in_channels, **tensor),
            noise_scheduler=SimpleNamespace(timesteps=torch.zeros(1, device=self.device)),
            num_steps=1,
            text=TextEmbeds(torch.zeros(1, config.joint_attention_dim, **tensor), 1),
        )
        request.rows = (row,)
        return row

    def compile(self) -> None:
        """Compile the transformer's blocks if the config says so and nothing hangs on them."""
        transformer = self._pipe.transformer
        if self._can_compile(transformer):
            assert self._compiled is not None
            self._compiled.warm_up(transformer)

    def _can_compile(self, transformer: QwenImageTransformer2DModel) -> bool:
        """Whether to use compiled blocks now; says why not, when that begins."""
        if self._compiled is None:
            return False
        reason = why_not_compiled(transformer)
        if reason is not None and not self._is_uncompiled:
            logger.warning("compile=True has no effect for now: %s, which compiled blocks would pass over", reason)
        self._is_uncompiled = reason is not None
        return reason is None

    def denoise_step(self, batch: InputBatch) -> list[torch.Tensor]:
        """Guided noise prediction of each row: (image tokens, channels)."""
        transformer = self._pipe.transformer
        check_rows_stay_apart(transformer)
        check_parallelism(transformer, self._config.parallel)
        self._make_room(transformer)
        scale = batch.rows[0].request.params.lora_scale
        if scale != 1.0 and self._ranks is not None:
            raise RequestError(f"attention_kwargs={{'scale': {scale}}} cannot be used with parallel")
        cache = self._step_cache(batch) if self._config.step_cache_threshold else None
        compiled = self._compiled if self._can_compile(transformer) else None
        prompt_embeds, timestep = batch.composition.prompt_embeds, batch.timesteps / 1000
        with self._all_ranks(batch.latents, prompt_embeds, timestep, batch.layout):
            noise_pred = transformer(
                hidden_states=batch.latents,
                encoder_hidden_states=prompt_embeds,
                timestep=timestep,
                attention_kwargs={"scale": scale} if scale != 1.0 else None,
                packed=Packed(batch.layout, self._attention_backend(), can_merge(transformer), cache, compiled),
            )
        self.num_branch_steps += batch.layout.num_rows
        self.num_skipped_branch_steps += 0 if cache is None else cache.num_skipped
        return batch.scatter(_guide(noise_pred, batch))

    def _attention_backend(self) -> AttentionBackend:
        """Chosen anew where the pipeline may have been moved to another device or cast to another dtype."""
        if self._attention is None:
            self._attention = self._choose_attention(attention_task(self._pipe))
        return self._attention

    def _all_ranks(self, *inputs: Any) -> contextlib.AbstractContextManager[None]:
        """Every process that shares the transformer runs the body's forward; without `parallel` this one alone does."""
        return contextlib.nullcontext() if self._ranks is None else self._ranks.leading(*inputs)

    def _step_cache(self, batch: InputBatch) -> StepCache:
        """What every branch keeps between its steps, with its row."""
        caches = [
            batch.rows[branch.row].step_cache.setdefault(branch.is_negative, BranchCache())
            for branch in batch.composition.branches
        ]
        return StepCache(caches, self._config.step_cache_threshold, batch.composition.subset)

    def step_scheduler(self, rows: Sequence[Row], noise_pred: torch.Tensor) -> None:
        """One `noise_scheduler.step` for rows that share one; sets `latents`, `noise_pred` and `step`.

        After an error, as long as no row's `step` has moved, it can be taken again: nothing else has either.
        """
        noise_scheduler, step = rows[0].noise_scheduler, rows[0].step
        extra = {}
        if rows[0].generator is not None and "generator" in _step_parameters(type(noise_scheduler)):
            extra["generator"] = rows[0].generator
        sample = torch.stack([row.latents for row in rows])  # (rows, image tokens, channels)
        with _undone_on_error(noise_scheduler, extra.get("generator")):
            timestep = noise_scheduler.timesteps[step]
            stepped = noise_scheduler.step(noise_pred, timestep, sample, return_dict=False, **extra)
            latents = stepped[0].to(sample.dtype)
            for row, row_latents, row_pred in zip(rows, latents.unbind(), noise_pred.unbind(), strict=True):
                row.latents, row.noise_pred, row.step = row_latents, row_pred, step + 1

    # ------------------------------------------------------------------ decode

    def post_decode(self, rows: Sequence[Row]) -> None:
        """Take the next decoding step of rows of one size and decoder; the last one sets `image`, -1..1."""
        params = rows[0].request.params
        if params.decoder == "pid":
            self._decode_pid(rows)
            return
        self._make_room(self._pipe.vae)
        images = decode_latents(self._pipe, torch.stack([row.latents for row in rows]), params.height, params.width)
        for row, image in zip(rows, images.unbind(), strict=True):
            row.image = image

    def _decode_pid(self, rows: Sequence[Row]) -> None:
        decoder = self._pipe.decoder
        if decoder is None:
            raise RequestError("the pipeline's PiDDecoder was taken away")
        rows = [row for row in rows if row.image is None]
        if not rows:
            return  # they were done when something else failed, and are tried again
        fresh = [row for row in rows if row.decode_state is None]
        if fresh:
            self._begin_pid(decoder, fresh)
        self._make_room(decoder.transformer)
        self._pid.step(decoder, rows)

    def _begin_pid(self, decoder: PiDDecoder, rows: Sequence[Row]) -> None:
        captions = [row.prompt or "" for row in rows]
        negative_prompts = [""] if decoder.default_guidance_scale != 1 else []
        if not all(map(decoder.remembers, captions + negative_prompts)):
            self._make_room(decoder.text_encoder)
        embeds = decoder.encode_prompt(captions)
        negative = decoder.encode_prompt(negative_prompts) if negative_prompts else None
        self._make_room(decoder.transformer)
        for row, row_embeds in zip(rows, embeds.split(1), strict=True):
            self._pid.begin(decoder, row, row_embeds, negative)

    def decode_examples(self, num_tokens: int) -> None:
        """One picture by the VAE, and PiD's first step of another."""
        self.post_decode([self.example_row(num_tokens)])
        decoder = getattr(self._pipe, "decoder", None)
        if decoder is None:
            return
        if decoder.has_text_encoder and _can_run(decoder.text_encoder, decoder._execution_device):
            self._make_room(decoder.text_encoder)
            decoder.encode_prompt("")  # all captions are filled up to one length
        if _can_run(decoder.transformer, decoder._execution_device):
            self._make_room(decoder.transformer)
            with contextlib.suppress(ArithmeticError, RequestError):  # its requests will say so
                self._pid_example(decoder, self.example_row(num_tokens))

    def _pid_example(self, decoder: PiDDecoder, row: Row) -> None:
        config = decoder.transformer.config
        embeds = torch.zeros(1, config.txt_max_length, config.txt_embed_dim, device=decoder._execution_device)
        row.decode_seed, row.noise_scheduler.sigmas = 0, torch.zeros(1)
        self._pid.begin(decoder, row, embeds, embeds if decoder.default_guidance_scale != 1 else None)
        self._pid.step(decoder, [row])

    def make_output(self, state: RequestState) -> Any:
        """All pictures of the request as the stock pipeline returns them: PIL list, array, tensor or packed latents."""
        if state.params.output_type == "latent":
            return torch.stack([row.latents for row in state.rows])
        images = torch.stack([row.image for row in state.rows if row.image is not None])
        return self._pipe.image_processor.postprocess(images, output_type=state.params.output_type)

    def moment(self, row: Row) -> Moment:
        """Copies of the row's latents and last prediction, as they stand now."""
        sigmas = getattr(row.noise_scheduler, "sigmas", None)
        params = row.request.params
        return Moment(row.latents, row.noise_pred, sigmas, row.step, params.height, params.width, self._preview)

    def can_preview_aside(self, moment: Moment) -> bool:
        """True once the preview is fitted: before, it needs the VAE."""
        return moment.latent_preview.is_fitted

    def preview(self, moment: Moment) -> Any:
        """The picture that the last prediction points at, `x0 = x - sigma * v`; one pixel per 8 x 8 of the real one."""
        if not moment.latent_preview.is_fitted:
            self._make_room(self._pipe.vae)
        latents = moment.latents
        if moment.noise_pred is not None and moment.sigmas is not None:
            sigma = moment.sigmas[moment.step].to(latents.device)
            latents = latents - sigma * moment.noise_pred.to(latents.device)
        return moment.latent_preview.render(self._pipe, latents, moment.height, moment.width)


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """One row between two steps: (image tokens, channels) latents and prediction, the schedule, the size in pixels."""

    latents: torch.Tensor
    noise_pred: torch.Tensor | None
    sigmas: torch.Tensor | None
    step: int
    height: int
    width: int
    latent_preview: LatentPreview


def _can_run(component: Any, device: torch.device) -> bool:
    """False for one that is not there, or elsewhere with nothing that would bring it."""
    return component is not None and not (is_bare(component) and component.device != device)


def _missing_prompts(row: Row) -> list[str]:
    missing = [row.prompt] if row.text is None else []
    if row.num_branches == 2 and row.negative_text is None:
        missing.append(row.negative_prompt)
    return [prompt for prompt in missing if prompt is not None]


def split_embeds(embeds: torch.Tensor, mask: torch.Tensor | None) -> list[TextEmbeds]:
    """Take the valid tokens of each prompt out of padded (prompts, tokens, dim) embeddings.

    Args:
        mask: (prompts, tokens), non-zero where a token is valid; None when all are.
    """
    width = embeds.shape[1]
    if mask is None:
        return [TextEmbeds(row, width) for row in embeds]
    texts = []
    for row, keep in zip(embeds, mask.bool().cpu(), strict=True):
        positions = keep.nonzero()[:, 0]
        count = len(positions)
        if count == 0 or int(positions[-1]) == count - 1:
            texts.append(TextEmbeds(row[:count].clone(), count))
        else:
            kept = tuple(positions.tolist())
            texts.append(TextEmbeds(row[list(kept)], width, kept))
    return texts


def _guide(noise_pred: torch.Tensor, batch: InputBatch) -> torch.Tensor:
    """True classifier-free guidance with the stock pipeline's norm rescale, for all guided rows at once."""
    guidance = batch.composition.guidance
    if guidance is None:
        return noise_pred
    cond = noise_pred.index_select(0, guidance.cond_index)
    negative = noise_pred.index_select(0, guidance.negative_index)
    # The scale is float32, so the product rounds once, like the stock pipeline's product with a Python number.
    combined = negative + (guidance.scale * (cond - negative)).to(cond.dtype)
    cond_norm = torch.norm(cond, dim=-1, keepdim=True)
    combined_norm = torch.norm(combined, dim=-1, keepdim=True)
    return noise_pred.index_copy(0, guidance.cond_index, combined * (cond_norm / combined_norm))


@contextlib.contextmanager
def _undone_on_error(noise_scheduler: Any, generator: torch.Generator | None) -> Iterator[None]:
    """When the body fails, put both back to where they were. Noise schedulers exchange tensors and change lists."""
    before = {name: list(value) if type(value) is list else value for name, value in vars(noise_scheduler).items()}
    drawn = None if generator is None else generator.get_state()
    try:
        yield
    except BaseException:
        vars(noise_scheduler).clear()
        vars(noise_scheduler).update(before)
        if generator is not None and drawn is not None:
            generator.set_state(drawn)
        raise


_STEP_PARAMETERS: dict[Any, frozenset[str]] = {}


def _step_parameters(cls: Any) -> frozenset[str]:
    if cls not in _STEP_PARAMETERS:
        _STEP_PARAMETERS[cls] = frozenset(inspect.signature(cls.step).parameters)
    return _STEP_PARAMETERS[cls]
