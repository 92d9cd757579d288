"""Attention that keeps the rows of a packed batch apart, by name.

A backend is one method, `forward(q, k, v, rows)`, and one fact, `isolates_rows`. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ..config import check_known
from ..errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch

    from ..models.interface import JointRows


class AttentionBackend(Protocol):
    """Softmax attention inside each row, nothing across rows."""

    name: str
    isolates_rows: bool

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: JointRows) -> torch.Tensor:
        """(tokens, heads, head_dim) each -> (tokens, heads * head_dim); scale 1/sqrt(head_dim), no mask, no dropout."""
        ...


def _sdpa() -> AttentionBackend:
    from .sdpa import SDPABackend

    return SDPABackend()


ATTENTION_BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"sdpa": _sdpa}


def available_backends() -> dict[str, str | None]:
    """Every backend's name with None when it can be used here, else the reason why not."""
    found: dict[str, str | None] = {}
    for name, load in ATTENTION_BACKENDS.items():
        try:
            load()
            found[name] = None
        except ImportError as error:
            found[name] = str(error)
    return found


def get_backend(name: str) -> AttentionBackend:
    """Load a backend; `"auto"` is `sdpa`, which runs on every device.

    Raises:
        ConfigError: for an unknown name, listing the known ones.
        UnsupportedModelError: for a backend that lets rows see each other.
    """
    check_known("attention_backend", name, ("auto", *ATTENTION_BACKENDS))
    backend = ATTENTION_BACKENDS["sdpa" if name == "auto" else name]()
    if not backend.isolates_rows:
        raise UnsupportedModelError(f"attention_backend={name!r} cannot keep the rows of a batch apart")
    return backend
