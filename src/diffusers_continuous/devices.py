"""What differs between cuda, npu, mps, xpu and the CPU; whoever has to know it asks here. Knows no model and no row.

Work is queued on the device's current stream and nowhere else, so what was asked for first is done first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .extras import import_extra


def load_device(device: str | torch.device) -> torch.device:
    """The device of that name, once PyTorch knows its kind: an `npu` is a package of its own.

    Raises:
        ImportError: when the package is missing, naming the extra that installs it.
        RuntimeError: PyTorch's own, for a kind that nobody knows.
    """
    if str(device).partition(":")[0] == "npu":
        import_extra("torch_npu", "torch_npu", "npu")
    return torch.device(device)


def best_device() -> torch.device:
    """An accelerator if PyTorch has one here, else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def describe(device: torch.device) -> str:
    """The kind of device and, where it has one, its product name."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name is None else f"{device.type} ({name(device)})"


def default_dtype(device: torch.device) -> torch.dtype:
    """What a model is loaded in when nobody says: bfloat16, which a CPU is slow in."""
    return torch.float32 if is_host(device) else torch.bfloat16


def is_host(device: torch.device) -> bool:
    """True for a CPU: tensors lie in the machine's own memory, and a call returns when its work is done."""
    return device.type == "cpu"


def broadcasts_masks(device: torch.device) -> bool:
    """False for an npu, whose attention wants a row of the mask for every query."""
    return device.type != "npu"


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """NVIDIA's number for what a card can do, (8, 0) for Ampere; None for every other device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


# ---------------------------------------------------------------------- work


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make it the current device of this thread, for the body."""
    make_current = None if is_host(device) else getattr(torch.get_device_module(device), "device", None)
    return contextlib.nullcontext() if make_current is None else make_current(device)


def synchronize(device: torch.device) -> None:
    """Wait until everything that was queued on the device is done."""
    if not is_host(device):
        torch.get_device_module(device).synchronize(*_which(device))


# ---------------------------------------------------------------------- memory


def upload(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Tensors of the host on the device, all in one copy, for which nobody waits where the host can pin memory."""
    if is_host(device):
        return list(tensors)
    # Wide elements first, so that every part starts where its dtype may.
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].itemsize)
    data = torch.cat([tensors[i].contiguous().flatten().view(torch.uint8) for i in order])
    data = (data.pin_memory() if is_pinning_useful(device) else data).to(device, non_blocking=True)
    parts = data.split([tensors[i].nbytes for i in order])
    there = {i: part.view(tensors[i].dtype).view(tensors[i].shape) for i, part in zip(order, parts, strict=True)}
    return [there[i] for i in range(len(tensors))]


def is_pinning_useful(device: torch.device) -> bool:
    """True where copies need pinned host memory to be fast and to run beside the host: not where memory is shared."""
    return device.type not in ("cpu", "mps")


def memory_info(device: torch.device) -> tuple[int, int]:
    """Bytes that are free for everybody, and all bytes of the device; 0 and 0 on a machine that does not tell."""
    if is_host(device):
        try:
            page = os.sysconf("SC_PAGE_SIZE")
            return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):
            return 0, 0
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return total - torch.mps.driver_allocated_memory(), total
    free, total = torch.get_device_module(device).mem_get_info(device)
    return free, total


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """Bytes that `work()` allocates at most at one time, beside what is allocated already. A CPU does not count them.

    On mps, which keeps no peak, as many as PyTorch has taken from the system for it.
    """
    module = torch.get_device_module(device)
    if device.type == "mps":
        module.empty_cache()
        before = module.driver_allocated_memory()
        work()
        return int(module.driver_allocated_memory() - before)
    before = module.memory_allocated(device)
    module.reset_peak_memory_stats(device)
    work()
    return int(module.max_memory_allocated(device) - before)


def peak_reserved_bytes(device: torch.device) -> int | None:
    """The most bytes of the device that PyTorch has held so far; None for a CPU, where it does not count them.

    On mps, which keeps no peak, those that it holds now. `peak_bytes` starts the count anew.
    """
    if is_host(device):
        return None
    module = torch.get_device_module(device)
    return int(module.driver_allocated_memory() if device.type == "mps" else module.max_memory_reserved(device))


def empty_cache(device: torch.device) -> None:
    """Give back what PyTorch has taken from the device and does not use."""
    if not is_host(device):
        torch.get_device_module(device).empty_cache()


def _which(device: torch.device) -> tuple[torch.device, ...]:
    """What functions of a device's module are told; there is only one mps."""
    return () if device.type == "mps" else (device,)
