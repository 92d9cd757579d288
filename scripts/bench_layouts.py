"""Which batch layout denoises which mix of rows fastest: packed, padded, tiled, and one row after another.

    python scripts/bench_layouts.py
    python scripts/bench_layouts.py --model Qwen/Qwen-Image --device cuda --sides 256 512 1024

A mix is some rows whose sizes are multiples of half a side, every second row guided (two branches), with texts as long
as the mix says; the texts are noise, which costs what words cost. Layouts take turns, and every figure is the median
over the rounds. A step is what the engine does at a step while the same rows run together: gather the latents, run the
forward, guide. Padded is left out where it cannot be: with images of different numbers of tokens.

Peak memory is what a step needs beside weights and the rows themselves: on a CPU the largest sum of tensors that are
alive at once (scratch memory inside an operation is not seen), elsewhere what the allocator counts.

Prints the machine, a Markdown table, how much `batch_layout="auto"` gives away, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from benchmarking import machine, peak_bytes, print_machine, quiet_libraries, wait_for_device
from diffusers_continuous import ContinuousBatchingPipeline, embedded_model_path
from diffusers_continuous.batch import InputBatch
from diffusers_continuous.cli.workload import rounded
from diffusers_continuous.futures import RequestFuture
from diffusers_continuous.layouts import LAYOUTS, tile_side
from diffusers_continuous.request import RequestState, Row, SamplingParams, TextEmbeds

CAPTION, LONG = (8, 60), (5, 400)  # tokens of a text, from and to
NEGATIVE_TOKENS = 6
CFG = 4.0


@dataclass(frozen=True)
class Mix:
    """Eight rows: (height, width) in half sides plus pixels, in turn; tokens of their texts, from and to."""

    name: str
    halves: tuple[tuple[int, int], ...]
    texts: tuple[int, int] = CAPTION
    extra_pixels: tuple[int, ...] = (0,)

    def sizes(self, side: int, num_rows: int) -> list[tuple[int, int]]:
        """(height, width) of every row in pixels."""
        found = []
        for index in range(num_rows):
            height, width = self.halves[index % len(self.halves)]
            extra = self.extra_pixels[index % len(self.extra_pixels)]
            found.append((height * side // 2 + extra, width * side // 2))
        return found


SQUARE = (2, 2)
MIXES = (
    Mix("same size, equal texts", (SQUARE,), (NEGATIVE_TOKENS, NEGATIVE_TOKENS)),
    Mix("same size, similar texts", (SQUARE,), (20, 28)),
    Mix("same size, captions", (SQUARE,)),
    Mix("same size, long texts too", (SQUARE,), LONG),
    Mix("two sizes", (SQUARE, (2, 3))),
    Mix("four sizes", (SQUARE, (2, 3), (1, 2), (3, 3))),
    Mix("eight sizes", (SQUARE, (2, 3), (1, 2), (3, 3), (1, 1), (3, 4), (1, 3), (2, 5))),
    Mix("transposed", ((2, 4), (4, 2))),
    Mix("one large, many small", ((4, 4), *7 * ((1, 1),))),
    Mix("small GCD", (SQUARE,), extra_pixels=(0, 16, -16, 32)),
)


def main() -> int:
    args = _parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    quiet_libraries()
    where = machine()
    print_machine(where)
    print(f"model:    {args.model or 'embedded'} on {args.device}, attention {args.attention_backend}")
    print(f"settings: {args.rows} rows, every second one guided, {args.repeats} rounds\n")
    bench = Bench(args)
    lines = []
    print_head()
    for side in args.sides:
        for mix in MIXES:
            lines.append(bench.measure(mix, side))
            print_line(lines[-1])
    worst = max(line["auto_over_best"] for line in lines)
    print(f"\nauto: at most {worst:.3f} times the best layout's time")
    result = {**where, "rows": args.rows, "lines": [rounded(line) for line in lines], "auto_over_best": worst}
    print(json.dumps(rounded(result)))
    return 0


class Bench:
    """One transformer and what is timed of it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        source = args.model or embedded_model_path()
        self.pipe = ContinuousBatchingPipeline.from_pretrained(source, dtype=self.dtype).to(self.device)
        engine = self.pipe.init_continuous_batching(attention_backend=args.attention_backend, num_blocks=1)
        self.model = engine.runner._model

    @torch.no_grad()
    def measure(self, mix: Mix, side: int) -> dict[str, Any]:
        """All figures of one line of the table."""
        rows = self._rows(mix, side)
        auto = self._batch("auto", rows)
        batches = {name: self._batch(name, rows) for name in LAYOUTS}
        batches = {name: batch for name, batch in batches.items() if batch.layout.name == name}
        alone = [self._batch("packed", [row]) for row in rows]
        steps: dict[str, Callable[[], None]] = {name: self._step(batch) for name, batch in batches.items()}
        steps["one by one"] = lambda: [self._step(batch)() for batch in alone] and None
        times = self._times(steps)
        valid = batches["padded"].layout.joint.valid if "padded" in batches else None
        weights = list(self.pipe.transformer.parameters())
        ms = {name: 1e3 * statistics.median(times[name]) for name in steps}
        return {
            "mix": mix.name,
            "side": side,
            "image_tokens": sum(batch.latents.shape[0] for batch in alone),
            "tokens": batches["packed"].num_tokens,
            "tile": tile_side((row.request.params.height, row.request.params.width) for row in rows),
            "padding": 0.0 if valid is None else 1 - valid.float().mean().item(),
            "ms": ms,
            "speedup": {name: _median_ratio(times["one by one"], times[name]) for name in batches},
            "peak_mib": {name: peak_bytes(steps[name], self.device, weights) / 2**20 for name in batches},
            "auto": auto.layout.name,
            "auto_over_best": max(_median_ratio(times[auto.layout.name], times[name]) for name in batches),
        }

    def _rows(self, mix: Mix, side: int) -> list[Row]:
        rng = random.Random(0)
        return [
            self._row(index, height, width, rng.randint(*mix.texts))
            for index, (height, width) in enumerate(mix.sizes(side, self.args.rows))
        ]

    def _row(self, index: int, height: int, width: int, num_text_tokens: int) -> Row:
        is_guided = index % 2 == 0
        params = SamplingParams(height, width, 1, CFG if is_guided else 1.0, is_guided)
        num_image_tokens = height // 16 * (width // 16)
        request = RequestState(str(index), params, RequestFuture())
        row = Row(
            request=request,
            index=0,
            num_image_tokens=num_image_tokens,
            latents=self._noise(num_image_tokens, self.pipe.transformer.config.in_channels),
            noise_scheduler=SimpleNamespace(timesteps=torch.tensor([900.0 - 50 * index], device=self.device)),
            num_steps=1,
            text=self._text(num_text_tokens),
            negative_text=self._text(NEGATIVE_TOKENS) if is_guided else None,
        )
        request.rows = (row,)
        return row

    def _text(self, num_tokens: int) -> TextEmbeds:
        return TextEmbeds(self._noise(num_tokens, self.pipe.transformer.config.joint_attention_dim), num_tokens)

    def _noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(self.device, self.dtype)

    def _batch(self, batch_layout: str, rows: list[Row]) -> InputBatch:
        self.model.batch_layout = batch_layout
        return InputBatch.make(rows, self.model)

    def _step(self, batch: InputBatch) -> Callable[[], None]:
        def step() -> None:
            self.model.denoise_step(InputBatch.make(batch.rows, self.model, batch.composition))

        return step

    def _times(self, steps: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
        """Seconds of every step in every round; all of them once before, to warm up, and in another order each time."""
        times: dict[str, list[float]] = {name: [] for name in steps}
        names = list(steps)
        for _ in range(self.args.repeats + 1):
            for name in names:
                wait_for_device()
                start = time.perf_counter()
                steps[name]()
                wait_for_device()
                times[name].append(time.perf_counter() - start)
            names.append(names.pop(0))
        return {name: seconds[1:] for name, seconds in times.items()}


def _median_ratio(a: list[float], b: list[float]) -> float:
    """Of the rounds' ratios, which a slow moment of the machine changes least."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def print_head() -> None:
    print(f"Figures separated by / are {' / '.join(LAYOUTS)}.\n")
    print(
        "| mix | side, px | tokens | tile, px | padding | ms in turn | ms | times faster | MiB | auto | auto / best |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")


def print_line(line: dict[str, Any]) -> None:
    def each(figures: dict[str, float], digits: int) -> str:
        return " / ".join(f"{figures[name]:.{digits}f}" if name in figures else "-" for name in LAYOUTS)

    cells = (
        line["mix"],
        line["side"],
        line["tokens"],
        line["tile"],
        f"{line['padding']:.0%}",
        f"{line['ms']['one by one']:.1f}",
        each(line["ms"], 1),
        each(line["speedup"], 2),
        each(line["peak_mib"], 1),
        line["auto"],
        f"{line['auto_over_best']:.2f}",
    )
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or repository (default: the embedded model)")
    parser.add_argument("--device", help="where to run (default: an accelerator if there is one, else cpu)")
    parser.add_argument("--attention-backend", default="auto", help="(default: %(default)s)")
    parser.add_argument("--sides", type=int, nargs="+", default=[64, 128, 256], help="pixels, multiples of 32")
    parser.add_argument("--rows", type=int, default=8, help="rows of a mix (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=11, help="rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own)")
    args = parser.parse_args()
    if wrong := [side for side in args.sides if side < 64 or side % 32]:
        parser.error(f"--sides {wrong} must be multiples of 32, at least 64")
    if args.device is None:
        args.device = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    return args


if __name__ == "__main__":
    sys.exit(main())
