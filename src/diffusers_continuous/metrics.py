"""What the engine did and how long it took. Knows numbers and request ids; no torch, no scheduling rule."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .request import RequestMetrics, RequestStatus, Row, Stage

# Steps and requests that are remembered for `recent_steps` and the latency figures.
NUM_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One piece of work on the device. `request_ids` and `steps` have an entry per row; times are engine seconds."""

    kind: str
    start_s: float
    end_s: float
    request_ids: tuple[str, ...]
    steps: tuple[int, ...]
    num_tokens: int

    @property
    def duration_ms(self) -> float:
        """How long it took."""
        return 1e3 * (self.end_s - self.start_s)


class StatsObserver(Protocol):
    """Is told what the recorder counts, at the moment it happens, by the engine's threads; must be quick."""

    def on_step(self, record: StepRecord) -> None:
        """A piece of work was done on the device."""
        ...

    def on_ending(self, status: RequestStatus, metrics: RequestMetrics) -> None:
        """A request ended."""
        ...


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Means are over everything since the start; zeros mean that it has not happened yet.

    Attributes:
        num_running, num_waiting: Rows in the batch and in the queue now.
        num_running_requests, num_waiting_requests: Requests with a row in the batch or being decoded now, and those
            without one, which wait for the first time or make way.
        num_by_status: Requests that ended, by how: "finished", "cancelled", "failed".
        schedule_ms, make_batch_ms, step_ms, encode_ms, decode_ms: Mean milliseconds of one decision, one batch built,
            one denoising step (batch building included), one encoding, one decoding.
        queue_wait_s, first_step_latency_s, latency_s: Of the requests that finished lately, in order of finishing.
        num_branch_steps, num_skipped_branch_steps: Steps of guidance branches, and how many of them took the step cache
            in place of most of the network.
        num_step_tokens, num_padding_tokens: Tokens of all denoising steps, and of the padding that was computed beside
            them.
        num_on_time: Requests that finished by their deadline.
        num_preemptions: How often a running row made way for others and waited again.
        prediction_error: Median relative error of the predicted durations lately, by kind of work.
        num_batch_retries: Batches that failed as a whole and were run again in parts, and single rows, after they ran
            out of memory.
        max_batch_tokens: Most tokens in a forward; less than configured after a batch has run out of memory, until so
            many steps went well that it is back, an eighth at a time.
        max_decode_tokens: Most image tokens decoded together, by decoder; only of one that has run out of memory with
            several pictures, until as many went well again.
        num_blocks, num_used_blocks: Pages of the pool on the device, and how many have an owner.
        num_swapped_out_rows: Rows whose state is in host memory now.
        swapped_out_bytes, swapped_in_bytes: What went there, and came back, since the start.
        recent_steps: The last steps, oldest first.
    """

    num_running: int
    num_waiting: int
    num_running_requests: int
    num_waiting_requests: int
    num_steps: int
    num_step_tokens: int
    num_padding_tokens: int
    num_by_status: dict[str, int]
    num_on_time: int
    num_preemptions: int
    prediction_error: dict[str, float]
    mean_rows_per_step: float
    mean_tokens_per_step: float
    schedule_ms: float
    make_batch_ms: float
    step_ms: float
    encode_ms: float
    decode_ms: float
    num_batch_retries: int
    max_batch_tokens: int
    max_decode_tokens: dict[str, int]
    num_blocks: int
    num_used_blocks: int
    num_swapped_out_rows: int
    swapped_out_bytes: int
    swapped_in_bytes: int
    num_encoded_rows: int
    num_decoded_rows: int
    num_branch_steps: int
    num_skipped_branch_steps: int
    queue_wait_s: tuple[float, ...]
    first_step_latency_s: tuple[float, ...]
    latency_s: tuple[float, ...]
    recent_steps: tuple[StepRecord, ...]


@dataclass(slots=True)
class _Sum:
    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Count one more value."""
        self.total += value
        self.count += 1

    @property
    def mean(self) -> float:
        """0 before the first value."""
        return self.total / self.count if self.count else 0.0


@dataclass(slots=True)
class StatsRecorder:
    """Collects what `EngineStats` shows. Written by the loop's thread, read by any."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sums: dict[str, _Sum] = field(default_factory=dict)
    _rows: Counter[str] = field(default_factory=Counter)
    _endings: Counter[str] = field(default_factory=Counter)
    _steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED))
    _requests: deque[RequestMetrics] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED))
    _branch_steps: tuple[int, int] = (0, 0)
    _swapped_bytes: tuple[int, int] = (0, 0)
    num_batch_retries: int = 0
    num_on_time: int = 0
    num_padding_tokens: int = 0
    observer: StatsObserver | None = None

    def add(self, name: str, value: float) -> None:
        """Add one value to the mean called `name`."""
        with self._lock:
            self._sums.setdefault(name, _Sum()).add(value)

    def add_step(self, stage: Stage, rows: Sequence[Row], start_s: float, end_s: float, num_tokens: int) -> None:
        """Remember one piece of device work; call it after the rows' `step` has moved on."""
        record = StepRecord(
            kind=stage.value,
            start_s=start_s,
            end_s=end_s,
            request_ids=tuple(row.request.request_id for row in rows),
            steps=tuple(row.step for row in rows),
            num_tokens=num_tokens,
        )
        with self._lock:
            self._steps.append(record)
            self._rows[record.kind] += sum(stage is not Stage.DECODE or row.image is not None for row in rows)
            self._sums.setdefault(record.kind, _Sum()).add(record.duration_ms)
            if stage is Stage.DENOISE:
                self._sums.setdefault("rows", _Sum()).add(len(rows))
                self._sums.setdefault("tokens", _Sum()).add(num_tokens)
        if self.observer is not None:
            self.observer.on_step(record)

    def add_padding(self, num_tokens: int) -> None:
        """Count tokens that a forward computed for nobody."""
        with self._lock:
            self.num_padding_tokens += num_tokens

    def count_branches(self, num_branch_steps: int, num_skipped_branch_steps: int) -> None:
        """Both totals so far."""
        with self._lock:
            self._branch_steps = num_branch_steps, num_skipped_branch_steps

    def count_swaps(self, swapped_out_bytes: int, swapped_in_bytes: int) -> None:
        """Both totals so far."""
        with self._lock:
            self._swapped_bytes = swapped_out_bytes, swapped_in_bytes

    def add_ending(self, status: RequestStatus, metrics: RequestMetrics) -> None:
        """Count a request that ended."""
        with self._lock:
            self._endings[status.value] += 1
            if status is RequestStatus.FINISHED:
                self._requests.append(metrics)
                self.num_on_time += bool(metrics.is_on_time)
        if self.observer is not None:
            self.observer.on_ending(status, metrics)

    def snapshot(
        self,
        num_running: int,
        num_waiting: int,
        num_requests: tuple[int, int],
        num_preemptions: int,
        prediction_error: dict[str, float],
        memory: dict[str, int],
        max_batch_tokens: int,
        max_decode_tokens: dict[str, int],
    ) -> EngineStats:
        """Everything so far; `num_requests` are those that run and wait, `memory` the figures of the pool by name."""
        with self._lock:

            def mean(name: str) -> float:
                """0 for what has not happened yet."""
                return self._sums[name].mean if name in self._sums else 0.0

            def times(name: str) -> tuple[float, ...]:
                """Seconds, of the latest requests that have come so far."""
                return tuple(t for m in self._requests if (t := getattr(m, name)) is not None)

            return EngineStats(
                num_running=num_running,
                num_waiting=num_waiting,
                num_running_requests=num_requests[0],
                num_waiting_requests=num_requests[1],
                num_steps=self._sums["rows"].count if "rows" in self._sums else 0,
                num_step_tokens=int(self._sums["tokens"].total) if "tokens" in self._sums else 0,
                num_padding_tokens=self.num_padding_tokens,
                num_by_status=dict(self._endings),
                num_on_time=self.num_on_time,
                num_preemptions=num_preemptions,
                prediction_error=prediction_error,
                mean_rows_per_step=mean("rows"),
                mean_tokens_per_step=mean("tokens"),
                schedule_ms=mean("schedule"),
                make_batch_ms=mean("make_batch"),
                step_ms=mean(Stage.DENOISE.value),
                encode_ms=mean(Stage.ENCODE.value),
                decode_ms=mean(Stage.DECODE.value),
                num_batch_retries=self.num_batch_retries,
                max_batch_tokens=max_batch_tokens,
                max_decode_tokens=max_decode_tokens,
                **memory,
                swapped_out_bytes=self._swapped_bytes[0],
                swapped_in_bytes=self._swapped_bytes[1],
                num_encoded_rows=self._rows[Stage.ENCODE.value],
                num_decoded_rows=self._rows[Stage.DECODE.value],
                num_branch_steps=self._branch_steps[0],
                num_skipped_branch_steps=self._branch_steps[1],
                queue_wait_s=times("queue_wait_s"),
                first_step_latency_s=times("first_step_latency_s"),
                latency_s=times("latency_s"),
                recent_steps=tuple(self._steps),
            )
