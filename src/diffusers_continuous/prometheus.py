"""One engine's figures for Prometheus. Needs the extra `metrics`; an engine that nobody exports pays nothing.

Gauges and counters are read from `engine.stats()` when Prometheus asks; histograms are told of each step and each
ending. Names that vLLM-Omni has are vLLM-Omni's.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .engine import DiffusionEngine
from .metrics import EngineStats, StepRecord
from .request import RequestMetrics, RequestStatus, Stage

# From the embedded model's steps on a CPU to a queue of large pictures.
REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
STEP_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SLACK_SECONDS = (-300.0, -60.0, -20.0, -5.0, -1.0, 0.0, 1.0, 5.0, 20.0, 60.0, 300.0)
STEP_ROWS = (1, 2, 4, 8, 16, 32, 64)
STEP_TOKENS = (64, 256, 1024, 4096, 16384, 65536)

# As vLLM names the ways in which a request ends.
FINISHED_REASONS = {RequestStatus.FINISHED: "stop", RequestStatus.CANCELLED: "abort", RequestStatus.FAILED: "error"}


class EngineExporter(Collector):
    """Exports an engine's figures, for the whole life of the engine.

    Args:
        engine: Observed from now on; it can have one exporter.
        model_name: The label `model_name` of every figure.
        prefix: What every name starts with, before a colon.
    """

    def __init__(self, engine: DiffusionEngine, model_name: str, prefix: str = "diffusers_continuous") -> None:
        self._engine = engine
        self._model_name = model_name
        self._prefix = prefix
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self._queue_wait = self._histogram("request_queue_wait_s", "From arrival to the first step", REQUEST_SECONDS)
        self._latency = self._histogram("e2e_request_latency_s", "From arrival to the pictures", REQUEST_SECONDS)
        self._slack = self._histogram("slack_at_finish_s", "Deadline less finish of finished requests", SLACK_SECONDS)
        self._rows = self._histogram("rows_per_step", "Pictures in a denoising step", STEP_ROWS)
        self._tokens = self._histogram("tokens_per_step", "Tokens in a denoising step", STEP_TOKENS)
        step_help = "Seconds of a denoising step, by how many tokens it has at most"
        steps = self._histogram("step_s", step_help, STEP_SECONDS, ["tokens"])
        names = [*map(str, STEP_TOKENS), "more"]
        self._steps = [steps.labels(model_name=model_name, tokens=name) for name in names]
        engine.observe(self)

    def _histogram(self, name: str, text: str, buckets: Iterable[float], labels: Iterable[str] = ()) -> Histogram:
        histogram = Histogram(
            f"{self._prefix}:{name}", text, ["model_name", *labels], registry=self._registry, buckets=tuple(buckets)
        )
        return histogram if labels else histogram.labels(model_name=self._model_name)

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    # ------------------------------------------------------------------ told by the engine

    def on_step(self, record: StepRecord) -> None:
        """Count a piece of work."""
        if record.kind != Stage.DENOISE.value:
            return
        self._rows.observe(len(record.request_ids))
        self._tokens.observe(record.num_tokens)
        self._steps[bisect_left(STEP_TOKENS, record.num_tokens)].observe(record.duration_ms / 1e3)

    def on_ending(self, status: RequestStatus, metrics: RequestMetrics) -> None:
        """Count an ending."""
        if metrics.queue_wait_s is not None:
            self._queue_wait.observe(metrics.queue_wait_s)
        if status is not RequestStatus.FINISHED or metrics.latency_s is None or metrics.finish_s is None:
            return
        self._latency.observe(metrics.latency_s)
        if math.isfinite(metrics.deadline_s):
            self._slack.observe(metrics.deadline_s - metrics.finish_s)

    # ------------------------------------------------------------------ read when asked

    def collect(self) -> Iterator[Metric]:
        """The gauges and counters as they are now."""
        stats = self._engine.stats()
        gauges = {
            "num_requests_running": (
                "Requests with a picture in the batch or being decoded",
                stats.num_running_requests,
            ),
            "num_requests_waiting": ("Requests that wait for a place, or make way", stats.num_waiting_requests),
            "num_rows_running": ("Pictures in the batch", stats.num_running),
            "num_rows_waiting": ("Pictures that wait for a place", stats.num_waiting),
            "num_blocks": ("Pages for the state of requests", stats.num_blocks),
            "num_used_blocks": ("Pages that have an owner", stats.num_used_blocks),
            "num_swapped_out_rows": ("Pictures whose state is in host memory", stats.num_swapped_out_rows),
        }
        for name, (text, value) in gauges.items():
            yield self._family(GaugeMetricFamily, name, text, value)
        counters = {
            "image_count": ("Pictures that were decoded", stats.num_decoded_rows),
            "step_tokens": ("Tokens of all denoising steps", stats.num_step_tokens),
            "padding_tokens": ("Tokens of padding that were computed beside them", stats.num_padding_tokens),
            "preemptions": ("Pictures that made way for others", stats.num_preemptions),
            "batch_retries": ("Batches that failed and were run again in parts", stats.num_batch_retries),
            "step_cache_queries": ("Steps of guidance branches", stats.num_branch_steps),
            "step_cache_hits": ("Those that took the step cache", stats.num_skipped_branch_steps),
        }
        for name, (text, value) in counters.items():
            yield self._family(CounterMetricFamily, name, text, value)
        yield self._by_label("requests_success", "Requests that ended", "finished_reason", _endings(stats))
        num_late = stats.num_by_status.get(RequestStatus.FINISHED.value, 0) - stats.num_on_time
        outcomes = {"met": stats.num_on_time, "missed": num_late}
        yield self._by_label("slo_requests", "Finished requests, by their deadline", "outcome", outcomes)
        swapped = {"out": stats.swapped_out_bytes, "in": stats.swapped_in_bytes}
        yield self._by_label("swap_bytes", "State moved to host memory and back", "direction", swapped)

    def _family(
        self, kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, value: float
    ) -> Metric:
        family = kind(f"{self._prefix}:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _by_label(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._model_name, key], value)
        return family


def _endings(stats: EngineStats) -> dict[str, int]:
    return {reason: stats.num_by_status.get(status.value, 0) for status, reason in FINISHED_REASONS.items()}
