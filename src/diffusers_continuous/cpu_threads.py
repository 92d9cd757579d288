"""The threads in which PyTorch computes on a CPU. Knows the OpenMP runtime that PyTorch brings along, and nothing else.

Every thread that computes gets a team of helpers from OpenMP, and keeps it for life. Whoever loaded the model and now
waits for pictures has such a team beside the engine's; together they are more threads than cores, and then OpenMP lets
helpers sleep between operations instead of spinning for a moment. Waking them takes as long as a small operation does.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

OMP_PAUSE_SOFT = 1  # omp_pause_resource_t of OpenMP 5.0: what is given up comes back when it is needed


def release_helpers() -> None:
    """Give up the helpers of the calling thread, which get made again when it next computes. Costs microseconds.

    Does nothing where PyTorch does not use GNU's OpenMP: others share one set of threads, or stop them all.
    """
    pause = _pause()
    if pause is not None:
        pause(OMP_PAUSE_SOFT)


@lru_cache(maxsize=1)
def _pause() -> Callable[[int], int] | None:
    for folder in (Path(torch.__file__).parent / "lib", Path(torch.__file__).parents[1] / "torch.libs"):
        for library in sorted(folder.glob("libgomp*.so*")):
            try:
                function: Callable[[int], int] = ctypes.CDLL(str(library)).omp_pause_resource_all
            except (OSError, AttributeError) as error:
                logger.debug("%s cannot give up threads: %s", library, error)
            else:
                return function
    return None
