"""The largest sum of live tensors of a piece of work, measured on any device by watching every operation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
