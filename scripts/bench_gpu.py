"""What only a card can show, in one command of at most nine minutes, offline: steps of a full-size Qwen-Image.

    python scripts/bench_gpu.py                  # 60 layers in bfloat16 if they fit, random weights
    python scripts/bench_gpu.py --minutes 4      # the least important measurements are left out, and named
    python scripts/bench_gpu.py --tiny           # the same on the CPU with a tiny network, to see that it runs

A cell is one step (batch, forward, noise scheduler) of so many unguided rows of one size, with prompts of unequal
length, in one layout, with one attention backend, compiled or not; `mixed` rows are of all sizes in turn. Beside it
stands the stock `QwenImageTransformer2DModel`, called once for each row. `error` is the root mean square of the
difference to those calls over that of their results: two kernels that both are right differ by what bfloat16 rounds.
After the most important cells, eight callers at once draw pictures through the engine, VAE included (prompts are given
encoded), against the stock pipeline.

Prints a table and, as the last line, one JSON object. The exit code is 1 when a cell is wrong or fails for another
reason than memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel

from benchmarking import quiet_libraries
from diffusers_continuous import ContinuousBatchingConfig, ContinuousBatchingPipeline, devices, embedded_model_path
from diffusers_continuous.attention import AttentionTask, available_backends, choose_backend
from diffusers_continuous.batch import InputBatch
from diffusers_continuous.cli.workload import rounded
from diffusers_continuous.config import BATCH_LAYOUTS
from diffusers_continuous.memory.budget import is_out_of_memory

GIB = 2**30
WARM_UP = 2
MAX_STEPS = 10
# A cell is measured for at least three steps, and as long as it has not taken so many seconds.
CELL_S = 1.0
# What an engine run and a first compiled step may take; nothing is begun that does not fit.
ENGINE_S = {False: 75.0, True: 10.0}
COMPILE_S = 90.0
# An error that is no error: less than this, or than so many times what the stock transformer itself differs by when it
# takes several rows in one call. Rows that see each other are at 0.04 after two layers and at 0.15 after thirty.
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.03}
MAX_NOISE_RATIO = 4.0
QUERY_AND_KEY_NORMS = ("norm_added_k", "norm_added_q", "norm_k", "norm_q")
MIXED = 0  # the size of cells whose rows are of all sizes


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    text_tokens: tuple[int, ...]
    transformer: dict[str, Any]
    vae: dict[str, Any]
    engine_size: int
    engine_steps: int
    engine_requests: int


FULL = Scale(
    sizes=(512, 768, 1024),
    counts=(1, 2, 4, 8, 16),
    text_tokens=(64, 20, 180, 64, 40, 300, 30, 90),
    transformer={},
    vae={},
    engine_size=512,
    engine_steps=20,
    engine_requests=16,
)
TINY = Scale(
    sizes=(32, 48, 64),
    counts=(1, 2, 4),
    text_tokens=(4, 2, 7, 4),
    transformer={
        "num_layers": 2,
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "axes_dims_rope": (8, 12, 12),
    },
    vae={"base_dim": 8, "num_res_blocks": 1},
    engine_size=32,
    engine_steps=2,
    engine_requests=8,
)


@dataclass(frozen=True)
class Cell:
    """What is measured together; `priority` 0 is never left out while there is any time."""

    priority: int
    size: int
    rows: int
    layout: str
    backend: str
    is_compiled: bool = False

    @property
    def engine(self) -> tuple[str, str, bool]:
        """Cells with equal ones share an engine."""
        return self.layout, self.backend, self.is_compiled

    @property
    def name(self) -> str:
        """As in the table."""
        size = "mixed" if self.size == MIXED else f"{self.size}px"
        return f"{size} x {self.rows:<2} {self.layout} {self.backend}{' compiled' if self.is_compiled else ''}"


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse_arguments(argv)
    quiet_libraries()
    device = torch.device("cpu") if args.tiny else devices.best_device()
    if devices.is_host(device) and not args.tiny:
        print("error: there is no card here; --tiny runs on a CPU", file=sys.stderr)
        return 2
    bench = Bench(TINY if args.tiny else FULL, device, time.monotonic() + 60 * args.minutes, args.tiny)
    print_header(bench)
    with torch.no_grad(), devices.current(device):
        result = bench.run(with_compile=args.compile)
    for text in bench.left_out:
        print(f"left out, for want of time: {text}")
    print(json.dumps(rounded(result)))
    return 1 if bench.is_wrong else 0


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.5, help="time for everything (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a tiny network on the CPU")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave compiled cells out")
    args = parser.parse_args(argv)
    if not args.minutes > 0:
        parser.error(f"--minutes {args.minutes} must be above 0")
    return args


# ---------------------------------------------------------------------- the models


def layers_that_fit(config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> int:
    """How many of the transformer's layers leave a quarter of the free memory for everything else."""

    def num_bytes(num_layers: int) -> int:
        with torch.device("meta"):
            model = QwenImageTransformer2DModel(**{**config, "num_layers": num_layers})
        return sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize

    wanted = config.get("num_layers", 60)
    one, two = num_bytes(1), num_bytes(2)
    free, _ = devices.memory_info(device)
    return max(1, min(wanted, int((0.75 * free - one) / (two - one)) + 1))


def make_pipeline(scale: Scale, device: torch.device) -> ContinuousBatchingPipeline:
    """Random weights, made where they will be used; the embedded model's text encoder, which is not run."""
    dtype = devices.default_dtype(device)
    num_layers = layers_that_fit(scale.transformer, device, dtype)
    small = QwenImagePipeline.from_pretrained(embedded_model_path(), dtype=dtype)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            transformer = QwenImageTransformer2DModel(**{**scale.transformer, "num_layers": num_layers}).eval()
            vae = AutoencoderKLQwenImage(**scale.vae).eval()
    finally:
        torch.set_default_dtype(before)
    for name, parameter in transformer.named_parameters():
        if name.split(".")[-2] in QUERY_AND_KEY_NORMS:  # a token then looks at few others, and one too many shows
            parameter.data.fill_(2.0)
    parts = {**small.components, "transformer": transformer, "vae": vae}
    pipe = ContinuousBatchingPipeline(**parts).to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


# ---------------------------------------------------------------------- the measurements


class Bench:
    """The models, the time that is left, and everything found so far."""

    def __init__(self, scale: Scale, device: torch.device, deadline_s: float, is_tiny: bool) -> None:
        self.scale, self.device, self.is_tiny = scale, device, is_tiny
        self.deadline_s = deadline_s
        self.pipe = make_pipeline(scale, device)
        self.transformer = self.pipe.transformer
        self.dtype = self.transformer.dtype
        self.task = AttentionTask(device, self.dtype, self.transformer.config.attention_head_dim)
        self.stock_ms: dict[int, float] = {}
        self.max_error = ROUNDING[self.dtype]
        self.left_out: list[str] = []
        self.is_wrong = False
        self._engine: Any = None
        self._engine_of: tuple[str, str, bool] | None = None

    def run(self, with_compile: bool) -> dict[str, Any]:
        """Everything, most important first."""
        self.measure_stock()
        cells = sorted(self.cells(with_compile), key=lambda cell: (cell.priority, cell.engine))
        found = [self.measure_or_leave_out(cell) for cell in cells if cell.priority == 0]
        engine_run = self.run_engine()
        found += [self.measure_or_leave_out(cell) for cell in cells if cell.priority > 0]
        return {
            **machine(self),
            "stock_ms": {str(size): ms for size, ms in self.stock_ms.items()},
            "max_error": self.max_error,
            "cells": [cell for cell in found if cell is not None],
            "engine": engine_run,
            "left_out": self.left_out,
        }

    def cells(self, with_compile: bool) -> Iterator[Cell]:
        """All that could be measured on this device."""
        usable = [name for name, reason in available_backends(self.task).items() if reason is None]
        best = choose_backend(self.task)[0].name
        layouts = [layout for layout in BATCH_LAYOUTS if layout != "auto"]
        can_compile = with_compile and "compile" in {
            field.name for field in dataclasses.fields(ContinuousBatchingConfig)
        }
        for size, rows in itertools.product((*self.scale.sizes, MIXED), self.scale.counts):
            if size == MIXED and rows < 2:
                continue
            is_usual = rows in (1, 4, 8)
            for layout, backend in itertools.product(layouts, usable):
                if size == MIXED and layout == "padded":
                    continue  # its rows are of one size
                if (layout, backend) == ("packed", best):
                    priority = 0 if is_usual else 3
                else:
                    priority = 1 if rows == 4 else 4 if layout == "packed" or backend == best else 5
                yield Cell(priority, size, rows, layout, backend)
            if can_compile:
                yield Cell(2 if is_usual else 3, size, rows, "packed", best, is_compiled=True)

    # ------------------------------------------------------------------ time

    def seconds_left(self) -> float:
        """Until everything must be over."""
        return self.deadline_s - time.monotonic()

    def measure_or_leave_out(self, cell: Cell) -> dict[str, Any] | None:
        """The cell's figures, printed too; None where there is no time for it."""
        seconds = 1e-3 * self.stock_step_ms(cell) * (WARM_UP + 4) + 0.5
        if cell.is_compiled and not self.is_tiny and self._engine_of != cell.engine:
            seconds += COMPILE_S
        reserved = ENGINE_S[self.is_tiny] if cell.priority == 0 else 0.0
        if self.seconds_left() < seconds + (reserved if cell.rows > 1 else 0.0):
            self.left_out.append(cell.name)
            return None
        try:
            figures = self.measure(cell)
        except Exception as error:  # a kernel that does not work is a result
            figures = {"failed": (str(error).splitlines() or [type(error).__name__])[0]}
            self.is_wrong |= not is_out_of_memory(error)
            devices.empty_cache(self.device)
        else:
            figures["is_right"] = figures["error"] <= self.max_error
            self.is_wrong |= not figures["is_right"]
        print_cell(cell, figures)
        return {**dataclasses.asdict(cell), **figures}

    # ------------------------------------------------------------------ steps

    def row_sizes(self, cell: Cell) -> list[int]:
        """Sides of the cell's rows in pixels."""
        sizes = itertools.cycle(self.scale.sizes) if cell.size == MIXED else itertools.repeat(cell.size)
        return list(itertools.islice(sizes, cell.rows))

    def stock_step_ms(self, cell: Cell) -> float:
        """What the stock transformer takes for the cell's rows, one after another."""
        return sum(self.stock_ms[size] for size in self.row_sizes(cell))

    def measure_stock(self) -> None:
        """One call of the stock transformer for each size, and how much its result depends on who else is in it."""
        for size in self.scale.sizes:
            call = self.stock_call(self.latents(size, 0), self.prompt_embeds(0), size, 0.5)
            self.stock_ms[size] = 1e3 * statistics.median(self.times(call))
            print(f"stock, one call of {size:>4}px: {self.stock_ms[size]:8.2f} ms", flush=True)
        size = self.scale.sizes[0]
        latents = torch.cat([self.latents(size, index) for index in range(4)])
        together = self.stock_call(latents, self.prompt_embeds(0).repeat(4, 1, 1), size, 0.5)()[:1]
        alone = self.stock_call(latents[:1], self.prompt_embeds(0), size, 0.5)()
        noise = float((together - alone).float().norm() / alone.float().norm())
        self.max_error = max(self.max_error, MAX_NOISE_RATIO * noise)
        print(f"stock, four rows in one call: differs by {noise:.1e} from one row; wrong is above {self.max_error:.1e}")

    def latents(self, size: int, index: int) -> torch.Tensor:
        """(1, image tokens, channels) of noise, always the same for an index."""
        draw = torch.Generator().manual_seed(1000 * size + index)
        shape = (1, (size // 16) ** 2, self.transformer.config.in_channels)
        return torch.randn(shape, generator=draw).to(self.device, self.dtype)

    def prompt_embeds(self, index: int) -> torch.Tensor:
        """(1, text tokens, joint_attention_dim) of noise, always the same for an index."""
        draw = torch.Generator().manual_seed(index)
        tokens = self.scale.text_tokens[index % len(self.scale.text_tokens)]
        shape = (1, tokens, self.transformer.config.joint_attention_dim)
        return torch.randn(shape, generator=draw).to(self.device, self.dtype)

    def stock_call(
        self, latents: torch.Tensor, embeds: torch.Tensor, size: int, time_: float | torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        """A call of the stock transformer for rows of one size: (rows, image tokens, channels)."""
        arguments = {
            "hidden_states": latents,
            "encoder_hidden_states": embeds,
            "encoder_hidden_states_mask": None,
            "timestep": torch.as_tensor(time_, device=self.device).to(self.dtype).expand(len(latents)),
            "img_shapes": [[(1, size // 16, size // 16)]] * len(latents),
            "return_dict": False,
        }
        return lambda: self.transformer(**arguments)[0]

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Milliseconds of a step, memory beside the weights, and how far from the stock transformer's it is."""
        model = self.engine(cell).runner._model
        rows = [self.row(size, index) for index, size in enumerate(self.row_sizes(cell))]
        model.prepare_encode(rows)
        model.prepare_denoise(rows)
        error = self.error(rows, model)
        batch: InputBatch | None = None

        def step() -> None:
            nonlocal batch
            batch = InputBatch.make(rows, model, None if batch is None else batch.composition)
            for row, prediction in zip(rows, model.denoise_step(batch), strict=True):
                model.step_scheduler([row], prediction[None])

        peak = None if devices.is_host(self.device) else devices.peak_bytes(self.device, step)
        times = self.times(step)
        assert batch is not None
        step_ms = 1e3 * statistics.median(times)
        return {
            "step_ms": step_ms,
            "stock_ms": self.stock_step_ms(cell),
            "ratio": self.stock_step_ms(cell) / step_ms,
            "steps": len(times),
            "tokens": batch.num_tokens,
            "peak_bytes": peak,
            "error": error,
        }

    def error(self, rows: list[Any], model: Any) -> float:
        """The difference to the stock transformer's predictions over their size; both root mean squares."""
        batch = InputBatch.make(rows, model)
        squares = torch.zeros(2, device=self.device)
        for index, (row, prediction) in enumerate(zip(rows, model.denoise_step(batch), strict=True)):
            size = row.request.params.height
            stock = self.stock_call(row.latents[None], self.prompt_embeds(index), size, batch.timesteps[index] / 1000)()
            squares += torch.stack([(prediction - stock[0]).float().square().sum(), stock.float().square().sum()])
        difference, size_of_it = squares.tolist()
        return float((difference / size_of_it) ** 0.5)

    def row(self, size: int, index: int) -> Any:
        """A row of an unguided request that nobody waits for."""
        (row,) = self.pipe._make_request(**self.call(size, index, MAX_STEPS + 2 * WARM_UP)).rows
        return row

    def call(self, size: int, index: int, steps: int) -> dict[str, Any]:
        """Arguments of both pipelines."""
        return {
            "prompt_embeds": self.prompt_embeds(index),
            "latents": self.latents(size, index),
            "height": size,
            "width": size,
            "num_inference_steps": steps,
            "true_cfg_scale": 1.0,
        }

    def times(self, run: Callable[[], Any]) -> list[float]:
        """Seconds of some runs, the device idle before and after each."""
        for _ in range(WARM_UP):
            run()
        times: list[float] = []
        while len(times) < 3 or (sum(times) < CELL_S and len(times) < MAX_STEPS):
            devices.synchronize(self.device)
            start = time.perf_counter()
            run()
            devices.synchronize(self.device)
            times.append(time.perf_counter() - start)
        return times

    def engine(self, cell: Cell) -> Any:
        """The engine of the cell's choices, not started; the last one where they are the same."""
        if self._engine_of != cell.engine:
            self.drop_engine()
            compiled = {"compile": True} if cell.is_compiled else {}
            self._engine = self.pipe.init_continuous_batching(
                batch_layout=cell.layout, attention_backend=cell.backend, num_blocks=4096, **compiled
            )
            self._engine_of = cell.engine
        return self._engine

    def drop_engine(self) -> None:
        """So that another one can be made."""
        if self._engine is not None:
            self._engine.stop(hard_stop=True)
        self._engine = self._engine_of = None

    # ------------------------------------------------------------------ pictures

    def run_engine(self) -> dict[str, Any] | None:
        """Pictures per second of eight callers at once, against the stock pipeline."""
        scale = self.scale
        if self.seconds_left() < ENGINE_S[self.is_tiny] / 2:
            self.left_out.append("the engine run")
            return None
        self.drop_engine()
        stock = QwenImagePipeline(**{name: part for name, part in self.pipe.components.items() if name != "decoder"})
        stock.set_progress_bar_config(disable=True)
        stock_s = [
            self.seconds(lambda i=i: stock(**self.call(scale.engine_size, i, scale.engine_steps))) for i in (0, 1)
        ]
        self._engine = self.pipe.init_continuous_batching(scheduler_type="fcfs")

        def draw(index: int) -> float:
            return self.seconds(lambda: self.pipe(**self.call(scale.engine_size, index, scale.engine_steps)))

        draw(0)
        with ThreadPoolExecutor(8) as callers:
            start = time.perf_counter()
            latencies = list(callers.map(draw, range(scale.engine_requests)))
            seconds = time.perf_counter() - start
        steps = [len(step.request_ids) for step in self._engine.stats().recent_steps if step.kind == "denoise"]
        self.drop_engine()
        found = {
            "callers": 8,
            "size": scale.engine_size,
            "steps": scale.engine_steps,
            "requests": scale.engine_requests,
            "images_per_s": scale.engine_requests / seconds,
            "stock_images_per_s": 1 / stock_s[1],
            "ratio": stock_s[1] * scale.engine_requests / seconds,
            "median_latency_s": statistics.median(latencies),
            "mean_rows_per_step": statistics.mean(steps),
        }
        print(
            f"engine, 8 callers, {scale.engine_size}px, {scale.engine_steps} steps: "
            f"{found['images_per_s']:.3g} images/s, stock {found['stock_images_per_s']:.3g}: {found['ratio']:.2f}x, "
            f"latency {found['median_latency_s']:.3g} s"
        )
        return found

    def seconds(self, run: Callable[[], Any]) -> float:
        """How long it takes."""
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


# ---------------------------------------------------------------------- what is told


def machine(bench: Bench) -> dict[str, Any]:
    """Where this ran, and with what."""
    _, total = devices.memory_info(bench.device)
    return {
        "device": devices.describe(bench.device),
        "memory_bytes": total,
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "dtype": str(bench.dtype),
        "layers": len(bench.transformer.transformer_blocks),
        "auto_backend": choose_backend(bench.task)[1],
        "backends": available_backends(bench.task),
    }


def print_header(bench: Bench) -> None:
    where = machine(bench)
    print(f"device:   {where['device']}, {where['memory_bytes'] / GIB:.0f} GiB; {where['cpu_cores']} CPU cores")
    print("versions: " + ", ".join(f"{name} {where[name]}" for name in ("python", "torch", "diffusers")))
    wanted = bench.scale.transformer.get("num_layers", 60)
    why = "" if where["layers"] == wanted else f", since {wanted} do not fit"
    print(f"model:    {where['layers']} layers{why}, random weights, {where['dtype']}")
    print(f"backend:  {where['auto_backend']}")
    print("baseline: the stock transformer, one call after another")
    print(f"{'cell':<44} {'step ms':>9} {'stock ms':>9} {'ratio':>6} {'peak GiB':>9} {'error':>8}")


def print_cell(cell: Cell, figures: dict[str, Any]) -> None:
    if "failed" in figures:
        print(f"{cell.name:<44} failed: {figures['failed']}", flush=True)
        return
    peak = "-" if figures["peak_bytes"] is None else f"{figures['peak_bytes'] / GIB:.2f}"
    print(
        f"{cell.name:<44} {figures['step_ms']:9.2f} {figures['stock_ms']:9.2f} {figures['ratio']:6.2f} {peak:>9} "
        f"{figures['error']:8.1e}{'' if figures['is_right'] else '  WRONG'}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
