"""The Pixel Diffusion Decoder (PiD): a latent, its noise level and a caption become a picture 4 or 8 times larger.

    tables -> layers, adapter -> modeling      the network
    memory                                     what a step needs, in bytes, and how to make it need less
    scheduling                                 the few-step rule of the students, the solver of the teachers
    text_encoding                              captions to what the network reads
    checkpoints -> conversion                  which official files exist, and how to read one
    pipeline                                   all of it, callable

Knows nothing of requests, engines and pipelines of other models. Names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapter import LatentFeatures
    from .checkpoints import CHECKPOINTS, Checkpoint, find_checkpoint
    from .modeling import PiDTransformer2DModel
    from .pipeline import PiDDecoder
    from .scheduling import PiDScheduler

_MODULE_OF_NAME = {
    "CHECKPOINTS": "checkpoints",
    "Checkpoint": "checkpoints",
    "LatentFeatures": "adapter",
    "PiDDecoder": "pipeline",
    "PiDScheduler": "scheduling",
    "PiDTransformer2DModel": "modeling",
    "find_checkpoint": "checkpoints",
}

__all__ = [
    "CHECKPOINTS",
    "Checkpoint",
    "LatentFeatures",
    "PiDDecoder",
    "PiDScheduler",
    "PiDTransformer2DModel",
    "find_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULE_OF_NAME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
