"""Every exception that this package raises on purpose, and how their texts show a value. Knows nothing else.

ContinuousBatchingError
├── RequestError             this request is wrong (also a ValueError); names the value and the limit
├── StepFailedError          this request failed while running; says in which step
├── RequestCancelledError    this request was cancelled
├── DeadlineError            this request could not be done in time, and was to fail then; names the predicted time
├── QueueFullError           no room in the queue; try again later
├── EngineStoppedError       the engine takes no (more) requests; `__cause__` is what killed it, if anything did
├── ConfigError              an option is unknown or its value impossible (also a ValueError)
└── UnsupportedModelError    the pipeline's components cannot be batched safely (also a ValueError)
"""

from __future__ import annotations

MAX_SHOWN_CHARS = 60

FLOAT16_ADVICE = "float16 overflows in Qwen-Image and gives black pictures; load with dtype=torch.bfloat16"


class ContinuousBatchingError(RuntimeError):
    """Root of all errors of this package."""


class RequestError(ContinuousBatchingError, ValueError):
    """The request itself is wrong. The text has the value and the limit. Nobody else is affected."""


class StepFailedError(ContinuousBatchingError):
    """The request failed while it ran. The text says in which stage and step; `__cause__` is what was raised there."""


class RequestCancelledError(ContinuousBatchingError):
    """The request was cancelled before it finished."""


class DeadlineError(ContinuousBatchingError):
    """The request can no longer make its deadline, and `on_hopeless="fail"`. The text has the predicted time."""


class QueueFullError(ContinuousBatchingError):
    """The waiting queue has reached `max_queue_size` rows. There will be room in `retry_after_s`, as predicted."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineStoppedError(ContinuousBatchingError):
    """The engine is stopped or dead. `__cause__` is the failure that ended it, if one did."""


class ConfigError(ContinuousBatchingError, ValueError):
    """An option is unknown or its value is not possible. The text lists what is."""


class UnsupportedModelError(ContinuousBatchingError, ValueError):
    """The model, or something attached to it, cannot keep rows apart. The text says what to use instead."""


def shorten(value: object) -> str:
    """`repr(value)` for the text of an error: at most 60 characters of it, and never an error itself."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        text = f"<{type(value).__name__}, too long to print>"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 3]}..."
