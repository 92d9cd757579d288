"""`DiffusionModelRunner`: the only code that runs a model. Knows rows and tensors, not queues, callers or policies.

A row that fails ends alone: a batch that fails is run again in halves (out of memory) or row by row, and only a row
that fails by itself is reported; one that runs out of memory, only when it does so twice, since that often passes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from . import devices
from .batch import Composition, InputBatch
from .config import ContinuousBatchingConfig
from .cost_model import kind_of
from .cpu_threads import release_helpers
from .errors import ConfigError, EngineStoppedError, StepFailedError, UnsupportedModelError
from .memory.block_pool import BlockPool, Move, PageLedger
from .memory.budget import LEAST_BYTES, check_pool, host_bytes, is_out_of_memory, pool_bytes
from .memory.host_swap import HostSwap
from .memory.row_state import RowMover, keep_texts
from .memory.token_limit import TokenLimit
from .metrics import StatsRecorder
from .models.interface import StepModel
from .request import RequestState, Row, SchedulerOutput, Stage

logger = logging.getLogger(__name__)

Errors = dict[Row, BaseException]
Timing = tuple[str, Sequence[Row], float]  # the kind of work, on which rows, how many milliseconds
T = TypeVar("T")
# Of a 1024 x 1024 picture.
USUAL_TOKENS = 4096
# How often in a row nobody may be there to take a step, for want of memory to come, before who should take it fails:
# a decoder of many steps takes turns with others' denoising, so once is not yet the end.
MAX_EMPTY_STEPS = 4


class DiffusionModelRunner:
    """Runs what a `SchedulerOutput` says, on one device.

    Args:
        model: The model's four verbs.
        device: Where they run.
        config: How large the pool of pages is.
        stats: Told about every piece of work.
        clock: Seconds, the engine's.
        lock: Shared with whoever else runs the same components.

    Attributes:
        lock: Held while anything runs; a callback's view of the VAE or the text encoder takes it too.
    """

    def __init__(
        self,
        model: StepModel,
        device: torch.device,
        config: ContinuousBatchingConfig,
        stats: StatsRecorder,
        clock: Callable[[], float] = time.monotonic,
        lock: threading.RLock | None = None,
    ) -> None:
        self.lock = threading.RLock() if lock is None else lock
        self._model = model
        self._device = device
        self._config = config
        self._stats = stats
        self._clock = clock
        self._compositions: dict[float, Composition] = {}  # by LoRA scale: such rows share a forward
        self._timings: list[Timing] = []
        self._num_empty_steps = 0
        self._step_limit = TokenLimit(config.max_batch_tokens)
        self._decode_limits: dict[str, TokenLimit] = {}  # of decoders that have run out of memory lately
        self._caching: weakref.WeakSet[Row] = weakref.WeakSet()  # who may keep what can be made again
        self._compile()
        self._mover = RowMover(self._make_swap(), self._prepare, self._free_memory)

    # ------------------------------------------------------------------ what the engine asks

    @property
    def is_phased(self) -> bool:
        """True when only one big component fits the device at a time."""
        return self._model.is_phased

    def execute(self, output: SchedulerOutput) -> Errors:
        """Encode, decode and take one denoising step; hand back the rows that failed, with the reason.

        Its moves are carried out already, by `bring_in`.
        """
        with self.lock, torch.no_grad(), devices.current(self._device):
            errors = self._lost()
            encode = [row for row in output.encode if row not in errors]
            if encode:
                self._timed(Stage.ENCODE, encode, self._model.prepare_encode, errors)
            for rows in _grouped((row for row in output.decode if row not in errors), _decodes_as):
                for part in self._decodable_together(rows):
                    self._timed(Stage.DECODE, part, self._decode, errors)
            denoise = _grouped((row for row in output.denoise if row not in errors), _lora_scale)
            for rows in denoise:
                self._denoise(rows, errors)
            for scale in self._compositions.keys() - {_lora_scale(rows[0]) for rows in denoise}:
                del self._compositions[scale]
        return errors

    def take_timings(self) -> list[Timing]:
        """How long the last work took, each piece once; what failed or had to be repeated is left out."""
        timings, self._timings = self._timings, []
        return timings

    @property
    def max_batch_tokens(self) -> int:
        """Most tokens that a step should have: the config's, or fewer where batches ran out of memory lately."""
        return self._step_limit.tokens

    @property
    def max_decode_tokens(self) -> dict[str, int]:
        """Most image tokens that each decoder gets at one time; none for one that has not run out of memory lately."""
        return {decoder: limit.tokens for decoder, limit in self._decode_limits.copy().items()}

    def make_output(self, state: RequestState) -> Any:
        """The pictures of a finished request."""
        return self._with_room(lambda: self._model.make_output(state))

    def latents_of(self, state: RequestState) -> torch.Tensor:
        """(rows, image tokens, channels) as they stand."""
        return self._with_room(lambda: torch.stack([row.latents for row in state.rows]))

    def preview_of(self, state: RequestState) -> Callable[[], list[Any]] | None:
        """A function that draws what the model expects of every row now; nothing is computed before it is called.

        None where there is no memory for a copy of what it needs.
        """
        try:
            moments = [self._model.moment(row) for row in state.rows if row not in self._mover.lost]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("no preview of request %r: %s", state.request_id, error)
            return None

        def draw() -> list[Any]:
            """One picture per row; any thread may call it."""
            # Taking turns with the loop would make a preview wait for as long as a step takes.
            is_free = all(map(self._model.can_preview_aside, moments))
            turn = contextlib.nullcontext() if is_free else self.lock
            with turn, torch.no_grad(), devices.current(self._device):
                return [self._model.preview(moment) for moment in moments]

        return draw

    def release(self) -> None:
        """Nothing to do for now: forget the last batch and let offloaded components leave the device."""
        self._compositions.clear()
        try:
            with self.lock, contextlib.suppress(EngineStoppedError):
                self._model.release()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("offloaded components stay on %s: %s", self._device, error)

    def reset(self) -> None:
        """Components may have changed: forget everything worked out from them."""
        self._compositions.clear()
        with self.lock, torch.no_grad():
            self._model.reset()
            if self._device != self._model.device:
                self._device = self._model.device
                self._mover.swap.close()
                self._mover.swap = self._make_swap_or_least()
        self._compile()

    def _compile(self) -> None:
        if self._config.compile:
            with self.lock, torch.no_grad(), devices.current(self._device):
                self._model.compile()

    def close(self) -> None:
        """Leave the model as it was found."""
        self._compositions.clear()
        self._mover.swap.close()
        self._model.close()

    def leave_cores(self) -> None:
        """Let the calling thread, which is about to wait for pictures, keep no helpers that slow the engine's down."""
        if devices.is_host(self._device):
            release_helpers()

    # ------------------------------------------------------------------ memory

    def _make_swap(self) -> HostSwap:
        config = self._config
        num_blocks = config.num_blocks
        if num_blocks is None:
            caches = self._model.step_cache_bytes(config.max_batch_tokens) if config.step_cache_threshold else 0
            num_bytes = pool_bytes(self._device, config.max_memory_percent, self.warm_up, caches)
            num_blocks = num_bytes // config.page_size
        check_pool(self._device, config.page_size, num_blocks)
        try:
            return self._swap_of(num_blocks)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            pages = f"num_blocks={num_blocks} of page_size={config.page_size} bytes"
            raise ConfigError(f"{pages} are more than is free on {self._device}: {error}") from error

    def _make_swap_or_least(self) -> HostSwap:
        """A pool in any case: requests wait for it, and each of them will say what is wrong."""
        try:
            return self._make_swap()
        except Exception:
            logger.exception("no pool as configured could be made on %s; it gets the least one", self._device)
        least = LEAST_BYTES // self._config.page_size
        return self._swap_of(min(least, self._config.num_blocks or least))

    def _swap_of(self, num_blocks: int) -> HostSwap:
        page_size = self._config.page_size
        num_host_blocks = host_bytes(self._config.cpu_offload_space) // page_size
        return HostSwap(page_size, self._device, num_blocks, num_host_blocks)

    def warm_up(self) -> None:
        """Denoise and encode as many tokens as a step may have, and decode one picture of usual size in every way."""
        with self.lock, torch.no_grad(), devices.current(self._device):
            large = self._model.example_row(self._config.max_batch_tokens)
            self._model.denoise_step(InputBatch.make([large], self._model))
            del large
            self._model.decode_examples(min(USUAL_TOKENS, self._config.max_batch_tokens))
            self._model.encode_examples()

    def make_ledger(self) -> PageLedger:
        """An empty ledger of the pages that there are."""
        swap = self._mover.swap
        return PageLedger(BlockPool(swap.num_blocks), BlockPool(swap.num_host_blocks))

    def num_blocks_of(self, row: Row) -> int:
        """The most pages that the row will need at any time."""
        return max(self._mover.swap.num_blocks_for(*stage) for stage in self._model.state_bytes(row))

    def move(self, moves: Sequence[Move]) -> None:
        """Carry out what the ledger wrote down. Rows that could not be moved are in `take_lost`."""
        if not moves:
            return
        with torch.no_grad(), devices.current(self._device):
            self._mover.carry_out(moves)
        self._stats.count_swaps(self._mover.swapped_out_bytes, self._mover.swapped_in_bytes)

    def bring_in(self, output: SchedulerOutput) -> SchedulerOutput:
        """Carry out its moves, and hand it back without the rows that find no memory for all they need to be here.

        They go on later. When time and again nobody else has anything to do, whose end would give them room, they are
        lost.
        """
        with self.lock:
            if self._num_empty_steps == MAX_EMPTY_STEPS - 1:
                self._free_memory()  # for the last try
            self.move((*self._mover.waiting.values(), *output.moves))
        waiting = {row for row in output.rows if row in self._mover.waiting}
        if not waiting:
            self._num_empty_steps = 0
            return output
        held = {row for leader in waiting for row in leader.gang}  # which steps together
        here = dataclasses.replace(
            output,
            encode=tuple(row for row in output.encode if row not in waiting),
            decode=tuple(row for row in output.decode if row not in waiting),
            denoise=tuple(row for row in output.denoise if row not in held),
        )
        self._num_empty_steps = self._num_empty_steps + 1 if here.is_empty else 0
        if self._num_empty_steps < MAX_EMPTY_STEPS:
            return here
        self._num_empty_steps = 0
        self._mover.give_up(waiting)
        return output

    def _prepare(self, row: Row) -> None:
        with contextlib.suppress(UnsupportedModelError):  # its first step will say so
            self._model.prepare_denoise([row])

    def take_lost(self) -> Errors:
        """Rows that cannot go on, since their pages could not be moved, with the reason; each once."""
        lost = self._lost()
        self._mover.lost.clear()
        return lost

    def lost_of(self, state: RequestState) -> StepFailedError | None:
        """Why this request cannot go on, if pages of its rows could not be moved. Any thread may ask."""
        lost = ((row, self._mover.lost.get(row)) for row in state.rows)
        return next((_move_failure(row, error) for row, error in lost if error is not None), None)

    def _lost(self) -> Errors:
        return {row: _move_failure(row, error) for row, error in self._mover.lost.items()}

    # ------------------------------------------------------------------ one step

    def _timed(self, stage: Stage, rows: Sequence[Row], work: Callable[[Sequence[Row]], None], errors: Errors) -> None:
        start, num_retries = self._clock(), self._stats.num_batch_retries
        self._isolating(stage, rows, work, errors)
        self._told(stage, rows, start, num_retries, errors)

    def _told(self, stage: Stage, rows: Sequence[Row], start: float, num_retries: int, errors: Errors) -> None:
        """Tell everybody who keeps count how long it took."""
        end = self._clock()
        num_tokens = sum(row.num_tokens for row in rows) if stage is Stage.DENOISE else 0
        self._stats.add_step(stage, rows, start, end, num_tokens)
        if self._stats.num_batch_retries == num_retries and not any(row in errors for row in rows):
            self._timings.append((kind_of(stage, rows[0]), rows, 1e3 * (end - start)))
            self._raise_limit(stage, rows)

    def _decodable_together(self, rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
        """Rows of one size and decoder, as many at a time as memory has been there for."""
        limit = self._decode_limits.get(rows[0].request.params.decoder)
        count = len(rows) if limit is None else max(1, limit.tokens // rows[0].num_image_tokens)
        return (rows[start : start + count] for start in range(0, len(rows), count))

    def _decode(self, rows: Sequence[Row]) -> None:
        self._caching.update(rows)
        self._model.post_decode(rows)
        sums = [row.image.sum(dtype=torch.float32) for row in rows if row.image is not None]
        if sums and not bool(torch.isfinite(torch.stack(sums)).all()):
            raise ArithmeticError("the decoded picture has non-finite pixels")

    def _denoise(self, rows: Sequence[Row], errors: Errors) -> None:
        start, num_retries = self._clock(), self._stats.num_batch_retries
        predictions: dict[Row, torch.Tensor] = {}

        def forward(part: Sequence[Row]) -> None:
            """Adds to `predictions` for all of `part`, or raises for all of it."""
            self._model.prepare_denoise([row for row in part if row.step == 0])
            for row in part:
                keep_texts(row)
            if self._config.step_cache_threshold:
                self._caching.update(part)
            predictions.update(zip(part, self._forward(part), strict=True))

        self._isolating(Stage.DENOISE, rows, forward, errors)
        failed = {row.request for row in errors}  # as a whole: rows that share a noise scheduler step together or not
        good = [row for row in rows if row in predictions and row.request not in failed]
        for sharing in _grouped(good, lambda row: id(row.noise_scheduler)):
            self._step(sharing, predictions, errors)
        self._check_finite([row for row in good if row not in errors], predictions, errors)
        end = self._clock()
        for row in rows:
            metrics = row.request.metrics
            if metrics.first_step_s is None:
                metrics.first_step_s, metrics.first_step_end_s = start, end
                metrics.num_prompt_tokens = row.text_tokens[0]
        self._told(Stage.DENOISE, rows, start, num_retries, errors)

    def _check_finite(
        self, rows: Sequence[Row], predictions: dict[Row, torch.Tensor], errors: Errors, is_retry: bool = False
    ) -> None:
        """Fail rows whose step went wrong. This waits for the device, as nothing before it does: so the step is over.

        Latents are looked at after the last step only: of others, the next prediction shows it.
        """
        try:
            self._fail_what_is_not_finite(rows, predictions, errors)
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if is_retry:
                rows[0].step -= 1  # the step that failed is the one to name
                errors[rows[0]] = _failure(rows[0], Stage.DENOISE, str(error), error)
                return
        self._make_all_room()
        for row in rows:
            self._check_finite([row], predictions, errors, is_retry=len(rows) == 1)

    def _fail_what_is_not_finite(
        self, rows: Sequence[Row], predictions: dict[Row, torch.Tensor], errors: Errors
    ) -> None:
        last = [row for row in rows if row.remaining_steps == 0]
        found = [(row, "prediction is", predictions[row]) for row in rows]
        found += [(row, "latents are", row.latents) for row in last]
        for (row, what, _), is_finite in zip(found, _are_finite([tensor for *_, tensor in found]), strict=True):
            if not is_finite and row not in errors:
                row.step -= 1  # the step that failed is the one to name
                errors[row] = _failure(row, Stage.DENOISE, f"the {what} not finite")

    def _forward(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        start = self._clock()
        scale = _lora_scale(rows[0])
        batch = InputBatch.make(rows, self._model, self._compositions.get(scale), self._mover.swap)
        self._compositions[scale] = batch.composition
        self._stats.add("make_batch", 1e3 * (self._clock() - start))
        self._stats.add_padding(batch.num_tokens - sum(row.num_tokens for row in rows))
        predictions = self._model.denoise_step(batch)
        self._stats.count_branches(self._model.num_branch_steps, self._model.num_skipped_branch_steps)
        return predictions

    def _step(
        self, rows: Sequence[Row], predictions: dict[Row, torch.Tensor], errors: Errors, is_retry: bool = False
    ) -> None:
        """Take the noise scheduler's step; once more, with all the room there is, where there was no memory for it.

        It is a request's own, so nobody else is in it: its rows cannot be parted, since it keeps what they share.
        """
        step = rows[0].step
        try:
            self._model.step_scheduler(rows, torch.stack([predictions[row] for row in rows]))
            return
        except Exception as error:
            has_moved = any(row.step != step for row in rows)
            if is_retry or has_moved or not is_out_of_memory(error):
                for row in rows:
                    row.step = step  # the step that failed is the one to name
                    errors[row] = _failure(row, Stage.DENOISE, "the noise scheduler failed", error)
                return
        self._make_all_room()
        self._step(rows, predictions, errors, is_retry=True)

    # ------------------------------------------------------------------ failures

    def _isolating(
        self,
        stage: Stage,
        rows: Sequence[Row],
        work: Callable[[Sequence[Row]], None],
        errors: Errors,
        is_retry: bool = False,
    ) -> None:
        """Run `work(rows)`; when it fails, run parts of it, down to the row that fails by itself.

        After running out of memory a single row is tried once more, with all the room there is.
        """
        # Rows that have ended stay until a garbage collection, which is seldom; every step would ask them all.
        self._caching.difference_update([row for row in self._caching if not row.has_caches])
        had_caches = bool(self._caching)
        try:
            work(rows)
        except EngineStoppedError:
            raise
        except Exception as error:
            self._compositions.clear()
            ran_out = is_out_of_memory(error)
            if len(rows) == 1 and (is_retry or not ran_out):
                errors[rows[0]] = _failure(rows[0], stage, str(error) or type(error).__name__, error)
                return
        else:
            return
        # Out of the handler: its traceback would keep the failed batch's tensors alive.
        if len(rows) == 1:
            self._make_all_room()
            self._isolating(stage, rows, work, errors, is_retry=True)
            return
        self._stats.num_batch_retries += 1
        part = self._make_room(stage, rows, had_caches) if ran_out else 1
        devices.empty_cache(self._device)
        for start in range(0, len(rows), part):
            self._isolating(stage, rows[start : start + part], work, errors)

    def _with_room(self, work: Callable[[], T]) -> T:
        """`work()`; once more, with all the room there is, where there was no memory for it."""
        try:
            return work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        with self.lock:  # the thread that ran a last callback may be here, in the middle of others' step
            self._make_all_room()
        return work()

    def _make_all_room(self) -> None:
        """Before the one more try that whoever cannot be parted gets."""
        self._stats.num_batch_retries += 1
        self._free_memory()

    def _make_room(self, stage: Stage, rows: Sequence[Row], had_caches: bool) -> int:
        """Throw away what can be; how many of the rows may be tried together then: all, if that has helped."""
        self._drop_caches()
        if had_caches:
            return len(rows)
        part = (len(rows) + 1) // 2
        if stage is Stage.DENOISE:
            self._step_limit.lower(sum(row.num_tokens for row in rows[:part]))
        elif stage is Stage.DECODE:
            size = rows[0].num_image_tokens
            limit = self._decode_limits.setdefault(rows[0].request.params.decoder, TokenLimit(len(rows) * size))
            limit.lower(part * size)
        return part

    def _raise_limit(self, stage: Stage, rows: Sequence[Row]) -> None:
        """A piece of work found memory at once: after some of them, more of it may be done together again."""
        if stage is Stage.DENOISE:
            self._step_limit.count_step()
        decoder = rows[0].request.params.decoder
        if stage is Stage.DECODE and decoder in self._decode_limits:
            self._decode_limits[decoder].count_step()
            if not self._decode_limits[decoder].is_lowered:
                del self._decode_limits[decoder]

    def _free_memory(self) -> None:
        """Throw away what can be made again, and give back what nobody uses."""
        self._compositions.clear()
        self._model.drop_caches()
        self._drop_caches()
        devices.empty_cache(self._device)

    def _drop_caches(self) -> None:
        """Everybody's, also where the step that failed has filled them."""
        for row in self._caching:
            row.drop_caches()
        self._caching.clear()


def _grouped(rows: Iterable[Row], key: Callable[[Row], Hashable]) -> list[list[Row]]:
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def _decodes_as(row: Row) -> tuple[str, int, int]:
    params = row.request.params
    return params.decoder, params.height, params.width


def _lora_scale(row: Row) -> float:
    return row.request.params.lora_scale


def _are_finite(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Whether each is without NaN and infinity: a sum shows it, and one copy tells for all."""
    if not tensors:
        return []
    finite: list[bool] = torch.isfinite(torch.stack([tensor.sum(dtype=torch.float32) for tensor in tensors])).tolist()
    return finite


def _move_failure(row: Row, error: Exception) -> StepFailedError:
    return _failure(row, row.stage, f"its pages could not be moved: {error}", error)


def _failure(row: Row, stage: Stage, reason: str, cause: BaseException | None = None) -> StepFailedError:
    where = f"step {row.step + 1} of {row.num_steps}" if stage is Stage.DENOISE else f"its {stage.value} stage"
    if stage is Stage.DECODE and row.num_decode_steps > 1:
        where = f"step {row.decode_step + 1} of {row.num_decode_steps} of {where}"
    error = StepFailedError(f"request {row.request.request_id!r}, row {row.index}, failed in {where}: {reason}")
    if cause is not None:
        error.__cause__ = cause
        traceback.clear_frames(cause.__traceback__)  # or whoever keeps the error would keep the step's tensors
    return error
