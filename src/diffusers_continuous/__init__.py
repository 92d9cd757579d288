"""Continuous batching for Qwen-Image inside Diffusers. Names are loaded when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import ContinuousBatchingConfig, resolve_config
    from .embedded import embedded_decoder_path, embedded_model_path
    from .engine import DiffusionEngine
    from .errors import (
        ConfigError,
        ContinuousBatchingError,
        DeadlineError,
        EngineStoppedError,
        QueueFullError,
        RequestCancelledError,
        RequestError,
        StepFailedError,
        UnsupportedModelError,
    )
    from .metrics import EngineStats, StepRecord
    from .pid import PiDDecoder, PiDScheduler, PiDTransformer2DModel
    from .pipeline import ContinuousBatchingMixin, ContinuousBatchingPipeline
    from .request import RequestMetrics, RequestOutput, RequestStatus, SamplingParams, SchedulerOutput
    from .scheduler import StepScheduler

__version__ = "0.1.0"

_MODULE_OF_NAME = {
    "ConfigError": "errors",
    "ContinuousBatchingConfig": "config",
    "ContinuousBatchingError": "errors",
    "ContinuousBatchingMixin": "pipeline",
    "ContinuousBatchingPipeline": "pipeline",
    "DeadlineError": "errors",
    "DiffusionEngine": "engine",
    "EngineStats": "metrics",
    "EngineStoppedError": "errors",
    "PiDDecoder": "pid",
    "PiDScheduler": "pid",
    "PiDTransformer2DModel": "pid",
    "QueueFullError": "errors",
    "RequestCancelledError": "errors",
    "RequestError": "errors",
    "RequestMetrics": "request",
    "RequestOutput": "request",
    "RequestStatus": "request",
    "SamplingParams": "request",
    "SchedulerOutput": "request",
    "StepFailedError": "errors",
    "StepRecord": "metrics",
    "StepScheduler": "scheduler",
    "UnsupportedModelError": "errors",
    "embedded_decoder_path": "embedded",
    "embedded_model_path": "embedded",
    "resolve_config": "config",
}

__all__ = [
    "ConfigError",
    "ContinuousBatchingConfig",
    "ContinuousBatchingError",
    "ContinuousBatchingMixin",
    "ContinuousBatchingPipeline",
    "DeadlineError",
    "DiffusionEngine",
    "EngineStats",
    "EngineStoppedError",
    "PiDDecoder",
    "PiDScheduler",
    "PiDTransformer2DModel",
    "QueueFullError",
    "RequestCancelledError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestStatus",
    "SamplingParams",
    "SchedulerOutput",
    "StepFailedError",
    "StepRecord",
    "StepScheduler",
    "UnsupportedModelError",
    "embedded_decoder_path",
    "embedded_model_path",
    "resolve_config",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULE_OF_NAME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
