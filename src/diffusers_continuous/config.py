"""What a user may choose about continuous batching, and nothing about how it is done."""

from __future__ import annotations

import difflib
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from .errors import ConfigError, ContinuousBatchingError, shorten

SCHEDULER_TYPES = ("edf", "fcfs", "least_slack", "slo")
ON_HOPELESS = ("fail", "run_last")
BATCH_LAYOUTS = ("auto", "packed", "padded", "tiled")
PARALLELISMS = ("cp", "tp")


@dataclass(frozen=True)
class ContinuousBatchingConfig:
    """How one engine forms its batches. Frozen; `resolve_config` hands back a changed copy.

    Attributes:
        max_requests_per_batch: Most images (rows) that denoise together. A call with `num_images_per_prompt=3` is
            three rows.
        max_batch_tokens: Most tokens (image and text, both guidance branches) in one forward, and most tokens of
            prompts, padding among them, that are encoded together. A row or a prompt that is larger runs alone.
        max_queue_size: Most rows that may wait; one more raises `QueueFullError`. 0 means no limit.
        scheduler_type: The policy; with each, a lower `priority` goes first, and a row of a higher number waits as long
            as rows of lower ones keep coming, but for the rare step that `"slo"` gives to the oldest late row.
            `"slo"`: as many requests on time as can be. `"edf"`: by deadline. `"least_slack"`: by deadline less the
            predicted remaining time. These three pause what runs for what is more urgent. `"fcfs"`: by arrival, and
            what runs stays.
        steps_per_chunk: Steps between two decisions about who runs, at least 1; `"auto"` takes as many as keep
            deciding below 1 % of the time.
        slo_scale: The deadline of a request that names none, in multiples of its predicted time alone.
        on_hopeless: What `"slo"` does with a request that can no longer be on time. `"run_last"`: it runs after those
            that can. `"fail"`: it ends at once with a `DeadlineError`.
        calibration: File of `scripts/calibrate_cost_model.py` for this device and model. Without one, durations are
            learned while running.
        batch_layout: How the tokens of a batch lie in memory; pictures are the same in each. `"packed"`: one sequence
            without padding. `"padded"`: texts padded to the longest, for rows of one number of image tokens; a batch
            of others is packed. `max_batch_tokens` does not count the padding. `"tiled"`: images cut into squares whose
            side is the greatest common divisor of all heights and widths in the batch. `"auto"`: packed, which
            `scripts/bench_layouts.py` found to be the fastest for every mix of rows, or within 5 % of the fastest.
            With a step cache, every batch is packed.
        attention_backend: `"auto"` picks by device; else a name of `attention.available_backends()`.
        compile: Compile the transformer's repeated blocks when the engine is made: once for batches of every shape,
            which takes tens of seconds. Attention and decoders, PiD too, run as they are. A float32 picture is then the
            same alone or in a crowd up to rounding, not to the last bit. While anything hangs on the blocks that
            compiled ones would pass over (LoRA, offloading, quantisation, hooks), they run uncompiled, with a warning.
        prompt_cache_size: Most prompts whose embeddings are kept for the next request that uses them.
        step_cache_threshold: Relative change of the transformer's first block below which a denoising step takes over
            what all later blocks did in the last full step, for each row and guidance branch by itself. 0 switches it
            off; 0.05 to 0.15 are usual. Pictures then differ from the stock pipeline's, and a request that was paused,
            which loses what it kept, from its own run alone.
        page_size: Bytes of a page of the pool that keeps the state of accepted requests between their steps: latents,
            prompt embeddings, PiD's picture. A multiple of 16.
        num_blocks: Pages of that pool. None makes it as large as `max_memory_percent` says.
        max_memory_percent: Part, from 0 to 1, that the pool gets of the device's memory that stays free beside the
            largest step; on a CPU part of the machine's memory, at most 4 GiB, which are only taken as they are used.
        cpu_offload_space: GiB of host memory for paused requests when the pool is full, at most what the machine has;
            0 switches that off, and newcomers wait.
        max_decode_bytes: Most bytes that one step of a decoder of several steps (PiD) may need beside its weights; a
            larger one is done in chunks of patches. 0 means no limit.
        max_phase_s: With `enable_model_cpu_offload` only: longest time in seconds that a finished picture or a new
            prompt waits for the denoising batch to drain before the components are swapped.
        parallel: Spreads the transformer over n processes, each with a device of its own: `{"tp": n}`, by diffusers'
            tensor-parallel plan. The engine is in rank 0; the others call `pipe.follow_continuous_batching`.
            `{"cp": n}`, context parallelism, is refused: its plans cannot run packed rows.
    """

    max_requests_per_batch: int = 32
    max_batch_tokens: int = 16384
    max_queue_size: int = 0
    scheduler_type: str = "slo"
    steps_per_chunk: int | str = 1
    slo_scale: float = 3.0
    on_hopeless: str = "run_last"
    calibration: str | None = None
    batch_layout: str = "auto"
    attention_backend: str = "auto"
    compile: bool = False
    prompt_cache_size: int = 128
    step_cache_threshold: float = 0.0
    page_size: int = 65536
    num_blocks: int | None = None
    max_memory_percent: float = 0.5
    cpu_offload_space: float = 4.0
    max_decode_bytes: int = 0
    max_phase_s: float = 30.0
    parallel: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("max_requests_per_batch", 1),
            ("max_batch_tokens", 1),
            ("max_queue_size", 0),
            ("prompt_cache_size", 0),
            ("max_decode_bytes", 0),
            ("page_size", 16),
            ("num_blocks", 1),
        ):
            value = getattr(self, name)
            if name == "num_blocks" and value is None:
                continue
            if not _is_whole(value, least):
                raise _must_be(name, value, f"a whole number of at least {least}, below 2**63")
        if not isinstance(self.compile, bool):
            raise _must_be("compile", self.compile, "True or False")
        if self.page_size % 16:
            raise _must_be("page_size", self.page_size, "a multiple of 16")
        if not _is_number(self.max_memory_percent) or not 0 < self.max_memory_percent <= 1:
            raise _must_be("max_memory_percent", self.max_memory_percent, "a number above 0, at most 1")
        if not _is_number(self.cpu_offload_space) or not 0 <= self.cpu_offload_space < math.inf:
            raise _must_be("cpu_offload_space", self.cpu_offload_space, "a finite number of GiB, 0 or more")
        if not _is_number(self.max_phase_s) or not self.max_phase_s > 0:
            raise _must_be("max_phase_s", self.max_phase_s, "a number of seconds above 0")
        if not _is_number(self.step_cache_threshold) or not 0 <= self.step_cache_threshold < 1:
            raise _must_be("step_cache_threshold", self.step_cache_threshold, "a number from 0 to below 1")
        if not _is_number(self.slo_scale) or not 0 < self.slo_scale < math.inf:
            raise _must_be("slo_scale", self.slo_scale, "a finite number above 0")
        steps = self.steps_per_chunk
        if steps != "auto" and not _is_whole(steps, 1):
            raise _must_be("steps_per_chunk", steps, "a whole number of at least 1, below 2**63, or 'auto'")
        if self.calibration is not None and not isinstance(self.calibration, str | os.PathLike):
            raise _must_be("calibration", self.calibration, "a path")
        check_known("scheduler_type", self.scheduler_type, SCHEDULER_TYPES)
        check_known("on_hopeless", self.on_hopeless, ON_HOPELESS)
        check_known("batch_layout", self.batch_layout, BATCH_LAYOUTS)
        if not isinstance(self.attention_backend, str):
            raise _must_be("attention_backend", self.attention_backend, "a name")
        if self.parallel is not None:
            _check_parallel(self.parallel)
            if self.step_cache_threshold:
                raise ConfigError("step_cache_threshold decides in each process for itself; set it to 0 with parallel")
            if self.compile:
                raise ConfigError("compile=True cannot be used with parallel: compiled blocks need whole weights")


def _must_be(name: str, value: object, what: str) -> ConfigError:
    return ConfigError(f"{name}={shorten(value)} must be {what}")


def _is_whole(value: object, least: int) -> bool:
    """True for a whole number of at least `least` and of 64 bits; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63


def _is_number(value: object) -> bool:
    """True for what can be counted with: not for a whole number that no float can hold."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)


def _check_parallel(parallel: object) -> None:
    if not isinstance(parallel, Mapping) or len(parallel) != 1:
        raise _must_be("parallel", parallel, '{"tp": n} or {"cp": n}')
    for name, num_ranks in parallel.items():
        check_known("parallel", name, PARALLELISMS)
        if not _is_whole(num_ranks, 2):
            raise _must_be("parallel", parallel, "over a whole number of processes, at least 2, below 2**63")


def check_known(
    what: str, value: object, known: Iterable[str], error: type[ContinuousBatchingError] = ConfigError
) -> None:
    """Raise an error that lists what is known, and the nearest name, unless `value` is one of `known`."""
    known = sorted(known)
    if value in known:
        return
    near = difflib.get_close_matches(value, known, n=1) if isinstance(value, str) else []
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise error(f"{what}={shorten(value)} is not known; choose from {known}{hint}")


def resolve_config(
    config: ContinuousBatchingConfig | dict[str, Any] | None = None, **changes: Any
) -> ContinuousBatchingConfig:
    """Hand back a validated config: the defaults, changed by `config`, changed by `changes`.

    Raises:
        ConfigError: for an unknown option or an impossible value.
    """
    known = [field.name for field in fields(ContinuousBatchingConfig)]
    if config is not None and not isinstance(config, ContinuousBatchingConfig | dict):
        raise ConfigError(
            f"a config is a ContinuousBatchingConfig or a dict of its fields, not {type(config).__name__}"
        )
    chosen = config if isinstance(config, dict) else {name: getattr(config, name) for name in known if config}
    options = {**chosen, **changes}
    for name in options:
        check_known("option", name, known)
    return ContinuousBatchingConfig(**options)


def read_config(
    option: str, words: Iterable[str], own: Mapping[str, tuple[str, Any]], **defaults: Any
) -> ContinuousBatchingConfig:
    """Hand back the config that the options of a command ask for.

    Args:
        option: What the option for all fields is called, for messages.
        words: What it was given, NAME=VALUE each, with the value in JSON, else a text.
        own: For fields with an option of their own, what that is called and its value, None where it was not given.
        defaults: Of fields whose defaults are others here.

    Raises:
        ConfigError: for what is no NAME=VALUE, an unknown field, an impossible value, and two values of one field.
    """
    given = {name: (f"{its_option}={value}", value) for name, (its_option, value) in own.items() if value is not None}
    try:
        for word in words:
            name, equals, text = word.partition("=")
            if not equals:
                raise ConfigError(f"{word!r} is not NAME=VALUE")
            value = _read_value(text)
            if name in given and given[name][1] != value:
                raise ConfigError(f"{word} contradicts {given[name][0]}")
            given[name] = (word, value)
        return resolve_config(defaults | {name: value for name, (_, value) in given.items()})
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def _read_value(text: str) -> Any:
    if text in ("True", "False", "None"):  # as in the Python that our documents show
        return {"True": True, "False": False, "None": None}[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
