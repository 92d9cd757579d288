"""How much memory a device has for pages. Knows devices and bytes, nothing of rows."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

# Most of a CPU's pool, and all of it where the machine does not tell how much memory it has. Address space beyond what
# the machine has, though nothing is in it, would make `fork` fail.
CPU_BYTES = 4 * 2**30
# However little memory is left, the pool gets so much: without one nothing could run. PiD's largest picture fits.
LEAST_BYTES = 256 * 2**20
# What allocators say in a plain RuntimeError.
OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")


def pool_bytes(
    device: torch.device, max_memory_percent: float, work: Callable[[], None], reserved_bytes: int = 0
) -> int:
    """What the pool may take: a part of what stays free beside `work()`, the largest step, and `reserved_bytes`.

    These are for what the rows of a batch keep outside of the pool. What a decoder of several steps keeps beside its
    picture (PiD's features of the latents) is not counted; most of it goes when a row is sent to host memory.

    On a CPU, whose memory is taken only as it is used, a part of what the machine has, at most `CPU_BYTES`; `work` is
    not run.
    """
    if device.type == "cpu":
        return min(CPU_BYTES, _part(max_memory_percent, _machine_bytes() - reserved_bytes))
    needed = _peak_bytes(device, work)
    free, _ = torch.get_device_module(device).mem_get_info(device)
    return _part(max_memory_percent, free - needed - reserved_bytes)


def is_out_of_memory(error: BaseException) -> bool:
    """True for every device's way to say that there is not enough memory."""
    is_known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_known or any(words in str(error).lower() for words in OUT_OF_MEMORY)


def _part(max_memory_percent: float, num_bytes: int) -> int:
    return max(LEAST_BYTES, int(max_memory_percent * max(0, num_bytes)))


def _machine_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return CPU_BYTES


def _peak_bytes(device: torch.device, work: Callable[[], None]) -> int:
    """Bytes that `work()` allocates at most at one time; so far as it gets, where there is not enough."""
    module = torch.get_device_module(device)
    before = module.memory_allocated(device)
    module.reset_peak_memory_stats(device)
    try:
        work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    peak: int = module.max_memory_allocated(device) - before
    module.empty_cache()
    return peak
