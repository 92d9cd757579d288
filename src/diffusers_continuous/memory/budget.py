"""How much memory a device has for pages. Knows devices and bytes, nothing of rows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..devices import empty_cache, is_host, memory_info, peak_bytes
from ..errors import ConfigError, EngineStoppedError

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
    if is_host(device):
        _, total = memory_info(device)
        return min(CPU_BYTES, _part(max_memory_percent, (total or CPU_BYTES) - reserved_bytes))
    needed = peak_bytes(device, lambda: _so_far_as_it_gets(work))
    empty_cache(device)
    free, _ = memory_info(device)
    return _part(max_memory_percent, free - needed - reserved_bytes)


def check_pool(device: torch.device, page_size: int, num_blocks: int) -> None:
    """Refuse a pool of no pages, and one that is larger than its device.

    Raises:
        ConfigError: with the numbers.
    """
    if num_blocks < 1:
        raise ConfigError(f"page_size={page_size}: not one page of so many bytes fits into the pool")
    _, total = memory_info(device)
    if total and num_blocks * page_size > total:
        raise ConfigError(
            f"num_blocks={num_blocks} of page_size={page_size} bytes are more than the {total} bytes of {device}"
        )


def host_bytes(cpu_offload_space: float) -> int:
    """Bytes of so many GiB of host memory; no more than the machine has, since asking for more gives none at all."""
    _, total = memory_info(torch.device("cpu"))
    return int(min(cpu_offload_space * 2**30, total or CPU_BYTES))


def is_out_of_memory(error: BaseException) -> bool:
    """True for every device's way to say that there is not enough memory."""
    is_known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_known or any(words in str(error).lower() for words in OUT_OF_MEMORY)


def _part(max_memory_percent: float, num_bytes: int) -> int:
    return max(LEAST_BYTES, int(max_memory_percent * max(0, num_bytes)))


def _so_far_as_it_gets(work: Callable[[], None]) -> None:
    try:
        work()
    except EngineStoppedError:
        raise  # ranks that stand at different places compute nothing together any more
    except Exception as error:
        if not is_out_of_memory(error):
            raise
