"""How the tiny models are trained: Muon, the average of the weights, and a loop that can be stopped and resumed.

Knows no model and no data. What a step sees depends on the seed and the step's number only, and schedules count steps,
so a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

logger = logging.getLogger(__name__)

CHECKPOINT_EVERY_S = 120.0
LOG_EVERY_STEPS = 50


@torch.no_grad()
def orthogonalize(matrices: torch.Tensor, num_iterations: int = 5) -> torch.Tensor:
    """The nearest semi-orthogonal matrices of a (n, rows, columns) stack, by Newton-Schulz iteration."""
    x = (matrices / (torch.linalg.matrix_norm(matrices, keepdim=True) + 1e-7)).bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.mT if is_tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalized updates.

    `torch.optim.Muon` takes matrices only and walks over them one at a time; this one also takes convolution kernels
    (as matrices of their output channels) and updates all parameters of one shape together.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, num_iterations: int = 5
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "num_iterations": num_iterations})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    by_shape.setdefault(param.shape, []).append(param)
            for params in by_shape.values():
                self._update(params, group)

    def _update(self, params: list[nn.Parameter], group: dict) -> None:
        gradients = [param.grad for param in params]
        buffers = [self.state[param].setdefault("momentum", torch.zeros_like(param)) for param in params]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        directions = torch._foreach_lerp(gradients, buffers, group["momentum"])
        stacked = torch.stack([direction.flatten(1) for direction in directions])
        updates = orthogonalize(stacked, group["num_iterations"])
        scale = group["lr"] * math.sqrt(max(1.0, stacked.shape[1] / stacked.shape[2]))
        for param, update in zip(params, updates, strict=True):
            param.add_(update.view_as(param), alpha=-scale)


class WeightAverage:
    """An exponential moving average of parameters; the horizon grows with the step until `decay` is reached."""

    def __init__(self, params: Iterable[nn.Parameter], decay: float) -> None:
        self.params = list(params)
        self.decay = decay
        self.values = [param.detach().clone() for param in self.params]

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (step + 1) / (step + 10))
        torch._foreach_lerp_(self.values, [param.detach() for param in self.params], 1 - decay)

    @torch.no_grad()
    def copy_to_params(self) -> None:
        torch._foreach_copy_(self.params, self.values)


class SharedGradients:
    """Averages gradients over worker processes through shared memory.

    One worker per core with one thread each: two threads in one process would wait for each other after every
    operation, which costs more than one exchange per step, most of all where something else runs as well.
    """

    def __init__(self, num_workers: int, num_values: int) -> None:
        self.buffer = torch.zeros(num_workers, num_values + 1).share_memory_()
        self.barrier = torch.multiprocessing.get_context("spawn").Barrier(num_workers)

    def average(self, rank: int, params: list[nn.Parameter], wants_stop: bool) -> bool:
        """Replaces every gradient by the mean over the workers; True if any of them wants to stop."""
        for param in params:
            if param.grad is None:  # the last block's text output leads nowhere
                param.grad = torch.zeros_like(param)
        gradients = [param.grad for param in params]
        torch.cat([gradient.flatten() for gradient in gradients], out=self.buffer[rank, :-1])
        self.buffer[rank, -1] = float(wants_stop)
        self.barrier.wait()
        mean = self.buffer.mean(0)
        self.barrier.wait()
        for gradient, values in zip(gradients, mean[:-1].split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(values.view_as(gradient))
        return bool(mean[-1] > 0)


class Trainer:
    """Runs numbered steps on a module, logs, and keeps a checkpoint it continues from."""

    def __init__(
        self,
        module: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        ema: WeightAverage,
        checkpoint: Path,
        max_grad_norm: float = math.inf,
        rank: int = 0,
        shared: SharedGradients | None = None,
    ) -> None:
        self.module = module
        self.optimizers = optimizers
        self.base_lrs = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        self.ema = ema
        self.checkpoint = checkpoint
        self.max_grad_norm = max_grad_norm
        self.rank = rank
        self.shared = shared
        self.step = 0

    def run(
        self,
        num_steps: int,
        loss_of_step: Callable[[int], tuple[torch.Tensor, dict[str, float]]],
        lr_scale: Callable[[float], float],
        max_minutes: float,
    ) -> bool:
        """True if all steps are done, False if the time ran out (a checkpoint is left in both cases)."""
        self._restore()
        started = last_saved = time.monotonic()
        sums: dict[str, float] = {}
        is_stopped = False
        with tqdm(total=num_steps, initial=self.step, mininterval=30, disable=self.rank > 0) as progress:
            while self.step < num_steps and not is_stopped:
                self._set_lr(lr_scale(self.step / num_steps) * min(1.0, (self.step + 1) / 100))
                elapsed = time.monotonic() - started
                figures, is_stopped = self._train_step(loss_of_step, elapsed > 60 * max_minutes)
                for name, value in figures.items():
                    sums[name] = sums.get(name, 0.0) + value / LOG_EVERY_STEPS
                progress.update()
                if self.step % LOG_EVERY_STEPS == 0:
                    text = " ".join(f"{name} {value:.4f}" for name, value in sums.items())
                    logger.info("step %d %.0f s %s", self.step, elapsed, text)
                    sums = {}
                if time.monotonic() - last_saved > CHECKPOINT_EVERY_S:
                    self._save()
                    last_saved = time.monotonic()
        self._save()
        return self.step == num_steps

    def _train_step(
        self, loss_of_step: Callable[[int], tuple[torch.Tensor, dict[str, float]]], wants_stop: bool
    ) -> tuple[dict[str, float], bool]:
        torch.manual_seed(self.step * 1000 + self.rank)
        loss, figures = loss_of_step(self.step)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.shared is not None:
            wants_stop = self.shared.average(self.rank, self.ema.params, wants_stop)
        nn.utils.clip_grad_norm_(self.module.parameters(), self.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        self.ema.update(self.step)
        self.step += 1
        return figures, wants_stop

    def _set_lr(self, scale: float) -> None:
        for optimizer, base_lrs in zip(self.optimizers, self.base_lrs, strict=True):
            for group, base_lr in zip(optimizer.param_groups, base_lrs, strict=True):
                group["lr"] = base_lr * scale

    def _save(self) -> None:
        if self.rank > 0:
            return
        state = {
            "step": self.step,
            "module": self.module.state_dict(),
            "ema": self.ema.values,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.rename(self.checkpoint)

    def _restore(self) -> None:
        if not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint, weights_only=True)
        self.step = state["step"]
        self.module.load_state_dict(state["module"])
        self.ema.values = state["ema"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        logger.info("continuing from step %d", self.step)


def cosine_decay(hold: float, floor: float) -> Callable[[float], float]:
    """The learning rate's factor at a share of the training: 1 up to `hold`, then half a cosine down to `floor`."""

    def scale(progress: float) -> float:
        falling = max(0.0, (progress - hold) / (1 - hold))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * falling))

    return scale


def start_logging(level: int) -> None:
    """Time and message of everything from `level` up."""
    logging.basicConfig(level=level, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
