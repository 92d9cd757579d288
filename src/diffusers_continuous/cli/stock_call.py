"""One call that the stock pipeline and ours take alike, for what draws with both: the demo and the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StockCall:
    """One picture to draw: its size in pixels, denoising steps, guidance scale (1 or less: none) and seed."""

    prompt: str
    width: int
    height: int
    steps: int
    cfg: float
    seed: int

    @property
    def is_guided(self) -> bool:
        """Whether there is a second, negative branch."""
        return self.cfg > 1

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of both pipelines' `__call__`, with a new CPU generator."""
        import torch

        return {
            "prompt": self.prompt,
            "negative_prompt": " " if self.is_guided else None,
            "true_cfg_scale": self.cfg,
            "width": self.width,
            "height": self.height,
            "num_inference_steps": self.steps,
            "generator": torch.Generator().manual_seed(self.seed),
        }
