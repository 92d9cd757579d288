"""Attention that keeps the rows of a batch apart, by name, and which backend can be used where.

A backend is one method, `forward(q, k, v, rows)`, and one fact, `isolates_rows`. What it needs is written down beside
its name, so that it is loaded only where it can run. Knows nothing of models.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .. import devices
from ..config import check_known
from ..errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    import torch

    from ..models.interface import JointRows

logger = logging.getLogger(__name__)


class AttentionBackend(Protocol):
    """Softmax attention inside each row, nothing across rows."""

    name: str
    isolates_rows: bool

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: JointRows) -> torch.Tensor:
        """(tokens, heads, head_dim) each -> (tokens, heads * head_dim); scale 1/sqrt(head_dim), no mask, no dropout."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionTask:
    """What a backend is wanted for: where q, k and v lie, and what they are made of."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int

    def __str__(self) -> str:
        return f"{self.device.type}, {_name(self.dtype)}, head_dim {self.head_dim}"


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """How a backend is loaded, and what its kernels take.

    Attributes:
        load: Imports and makes it; raises `ImportError` with a text that says what to install.
        device_types: Kinds of device; empty for all.
        dtypes: Names of dtypes; empty for all.
        max_head_dim: 0 for any.
        head_dim_multiple: `head_dim` must be one of it.
        min_capability: NVIDIA compute capability.
    """

    load: Callable[[torch.device], AttentionBackend]
    device_types: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    max_head_dim: int = 0
    head_dim_multiple: int = 1
    min_capability: tuple[int, int] = (0, 0)

    def misfits(self, task: AttentionTask) -> Iterator[str]:
        """Everything about the task that the kernels do not take."""
        if self.device_types and task.device.type not in self.device_types:
            yield f"it runs on {_either(self.device_types)}, not on {task.device.type}"
            return
        capability = devices.compute_capability(task.device)
        if capability is not None and capability < self.min_capability:
            needed, found = (".".join(map(str, number)) for number in (self.min_capability, capability))
            yield f"it needs compute capability {needed}, this card has {found}"
        if self.dtypes and _name(task.dtype) not in self.dtypes:
            yield f"it takes {_either(self.dtypes)}, not {_name(task.dtype)}"
        if self.max_head_dim and task.head_dim > self.max_head_dim:
            yield f"it takes a head_dim of at most {self.max_head_dim}, not {task.head_dim}"
        if task.head_dim % self.head_dim_multiple:
            yield f"it takes a head_dim that is a multiple of {self.head_dim_multiple}, not {task.head_dim}"


def _sdpa(device: torch.device) -> AttentionBackend:
    from .sdpa import SDPABackend

    return SDPABackend()


def _torch_varlen(device: torch.device) -> AttentionBackend:
    from .torch_varlen import TorchVarlenBackend

    return TorchVarlenBackend()


def _flash(device: torch.device) -> AttentionBackend:
    from .flash import FlashBackend

    return FlashBackend(device)


def _npu(device: torch.device) -> AttentionBackend:
    from .npu import NPUBackend

    return NPUBackend()


_HALF = ("float16", "bfloat16")

ATTENTION_BACKENDS: dict[str, BackendSpec] = {
    "flash": BackendSpec(_flash, ("cuda",), _HALF, 256, 8, (8, 0)),
    "npu": BackendSpec(_npu, ("npu",), (*_HALF, "float32"), 512, 16),
    "sdpa": BackendSpec(_sdpa),
    "torch_varlen": BackendSpec(_torch_varlen, ("cuda",), _HALF, 256, 8, (8, 0)),
}
# What `attention_backend="auto"` tries on a kind of device, best first; then sdpa, which runs everywhere.
_PREFERRED = {"cuda": ("flash", "torch_varlen"), "npu": ("npu",)}


def available_backends(task: AttentionTask) -> dict[str, str | None]:
    """Every backend's name with None when it can be used for the task, else everything that is in the way."""
    return {name: _load(spec, task)[1] for name, spec in ATTENTION_BACKENDS.items()}


def get_backend(name: str, task: AttentionTask) -> AttentionBackend:
    """Load a backend for a task; `"auto"` is the first of the device's preferred ones that can be used, and logs why.

    Raises:
        ConfigError: for an unknown name, listing the known ones; for one that cannot be used here, saying why and, when
            a package is missing, which extra installs it.
        UnsupportedModelError: for a backend that lets rows see each other.
    """
    check_known("attention_backend", name, ("auto", *ATTENTION_BACKENDS))
    if name == "auto":
        backend, why = choose_backend(task)
        _tell_once(why)
        return backend
    found, reason = _load(ATTENTION_BACKENDS[name], task)
    if found is None:
        raise ConfigError(f"attention_backend={name!r} cannot be used: {reason}")
    if not found.isolates_rows:
        raise UnsupportedModelError(f"attention_backend={name!r} cannot keep the rows of a batch apart")
    return found


def choose_backend(task: AttentionTask) -> tuple[AttentionBackend, str]:
    """What `attention_backend="auto"` is for a task, and a sentence that says why."""
    passed_over: list[str] = []
    for name in (*_PREFERRED.get(task.device.type, ()), "sdpa"):
        backend, reason = _load(ATTENTION_BACKENDS[name], task)
        if backend is not None:
            others = "".join(f"; not {other}" for other in passed_over)
            return backend, f"attention_backend='auto' is {name} ({task}){others}"
        passed_over.append(f"{name}: {reason}")
    raise AssertionError("sdpa runs everywhere")


def _load(spec: BackendSpec, task: AttentionTask) -> tuple[AttentionBackend | None, str | None]:
    """The backend, or everything that is in the way."""
    reasons = list(spec.misfits(task))
    try:
        backend = spec.load(task.device)
    except ImportError as error:
        return None, "; ".join([str(error), *reasons])
    return (None, "; ".join(reasons)) if reasons else (backend, None)


@functools.cache
def _tell_once(text: str) -> None:
    logger.info("%s", text)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
