"""What the benchmarks do alike: say where they run, keep libraries quiet, time a call, watch its memory.

It knows nothing of what is measured.
"""

from __future__ import annotations

import gc
import logging
import os
import platform
import time
from collections.abc import Callable, Iterable
from typing import Any

import diffusers
import torch
import transformers
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def quiet_libraries() -> None:
    """From here on diffusers, transformers and this package log errors only, and loading shows no progress bar."""
    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    logging.getLogger("diffusers_continuous").setLevel(logging.ERROR)


def machine() -> dict[str, Any]:
    """Where this runs: device, cores, torch's threads, the load average, and versions."""
    is_cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if is_cuda else _cpu_name(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],  # above the number of cores, something else ran here too
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "CPU"


def print_machine(where: dict[str, Any]) -> None:
    """The first lines of a benchmark, from `machine()`."""
    spin = f", OMP_WAIT_POLICY={os.environ['OMP_WAIT_POLICY']}" if "OMP_WAIT_POLICY" in os.environ else ""
    print(f"machine:  {where['device']}, {where['cpu_cores']} cores, {where['torch_threads']} torch threads{spin}")
    print(f"load:     {where['load_average']:.1f} before the start; 0 would be a machine of our own")
    packages = ("python", "torch", "diffusers", "transformers")
    print("versions: " + ", ".join(f"{name} {where[name]}" for name in packages))


def seconds_of(run: Callable[[], Any]) -> float:
    """Seconds that one call takes, until the device has nothing left to do."""
    gc.collect()
    start = time.perf_counter()
    run()
    wait_for_device()
    return time.perf_counter() - start


def wait_for_device() -> None:
    """Until an accelerator, if there is one, has done everything that it was given."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def peak_bytes(run: Callable[[], Any], device: torch.device, weights: Iterable[torch.Tensor]) -> int:
    """The most bytes alive beside the weights, and beside what an accelerator held before, during one call."""
    gc.collect()
    if device.type == "cpu":
        with PeakBytes(ignored=list(weights)) as watch:
            run()
        return int(watch.peak)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    run()
    wait_for_device()
    return int(torch.accelerator.max_memory_allocated() - before)


class PeakBytes(TorchDispatchMode):
    """Adds up the storages that operations under it bring to life (and `inputs`); `peak` is the largest sum seen."""

    def __init__(self, inputs: Iterable[torch.Tensor] = (), ignored: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._ignored = {self._key(tensor) for tensor in ignored}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.largest = 0
        for tensor in inputs:
            self._add(tensor)
        self._count()

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return StorageWeakRef(tensor.untyped_storage()).cdata

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference.cdata not in self._ignored:
            self._live[reference.cdata] = (reference, storage.nbytes())
            self.largest = max(self.largest, storage.nbytes())

    def _count(self) -> None:
        self._live = {key: item for key, item in self._live.items() if not item[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        self._count()
        return result
