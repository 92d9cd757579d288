"""Measures what every kind of step takes on this device and saves the fitted cost model as JSON.

    python scripts/calibrate_cost_model.py --output cost.json
    python scripts/calibrate_cost_model.py --model Qwen/Qwen-Image --sides 512 768 1024 --rows 1 2 4 --output h200.json

    ContinuousBatchingConfig(calibration="cost.json")

Runs the engine itself over a grid of sizes and numbers of rows, guided and not, and takes the times that the
scheduler sees, freed from what a slower stretch of the machine added to all of them. Every fourth shape is kept out of
the fit and only predicted. Prints the machine, a table of R2 and errors per kind of work, and one JSON object as the
last line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarking import machine, print_machine, quiet_libraries
from diffusers_continuous import ContinuousBatchingPipeline, embedded_decoder_path, embedded_model_path
from diffusers_continuous.cost_model import KINDS, Sample, StepCostModel, fit_curve, r_squared, sum_of_work

WORDS = ("red", "green", "blue", "yellow", "star", "circle", "heart", "ring", "above", "below", "left", "right", "of")
HELD_OUT = 4  # every fourth shape
NEIGHBOURS = 3  # visits before and after one that tell how fast the machine was then


@dataclass(frozen=True)
class Shape:
    """One point of the grid."""

    side: int
    rows: int
    is_guided: bool
    decoder: str


class Recorder:
    """Stands before the cost model of an engine and keeps what it is told."""

    def __init__(self, engine: Any) -> None:
        self.samples: dict[str, list[Sample]] = {}
        self._take = engine.runner.take_timings
        engine.runner.take_timings = self

    def __call__(self) -> list[Any]:
        timings = self._take()
        for kind, rows, ms in timings:
            self.samples.setdefault(kind, []).append(Sample(*sum_of_work(kind, rows), ms))
        return timings

    def drain(self) -> dict[str, list[Sample]]:
        samples, self.samples = self.samples, {}
        return samples


def main() -> int:
    args = _parse_arguments()
    quiet_libraries()
    pipe = load(args)
    where = machine()
    print_machine(where)
    fitted, held_out = measure(pipe, args)
    model = StepCostModel(
        {kind: fit_curve(samples) for kind, samples in fitted.items()},
        source=f"{args.model or 'the embedded model'} on {where['device']}",
    )
    model.r2 = {kind: round(r_squared(model.curves[kind], samples), 4) for kind, samples in fitted.items()}
    model.save(args.output)
    figures = {kind: kind_figures(model, kind, fitted[kind], held_out.get(kind, [])) for kind in fitted}
    print_table(figures)
    print(json.dumps({**where, "output": args.output, "shapes": len(grid(args)), "kinds": figures}))
    return 0


def load(args: argparse.Namespace) -> ContinuousBatchingPipeline:
    """The pipeline to be measured, with a PiD decoder where one is asked for."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    extra = {}
    if args.pid:
        from diffusers_continuous import PiDDecoder

        extra["decoder"] = PiDDecoder.from_pretrained(args.pid, dtype=dtype)
    source = args.model or str(embedded_model_path())
    return ContinuousBatchingPipeline.from_pretrained(source, dtype=dtype, **extra).to(device)


def grid(args: argparse.Namespace) -> list[Shape]:
    """Every size with every number of rows, guided and not; with PiD each size once more."""
    plain = itertools.product(args.sides, args.rows, (True, False), ("vae",))
    pid = itertools.product(args.sides, (1,), (True,), ("pid",)) if args.pid else ()
    return [Shape(*point) for point in (*plain, *pid)]


def measure(
    pipe: ContinuousBatchingPipeline, args: argparse.Namespace
) -> tuple[dict[str, list[Sample]], dict[str, list[Sample]]]:
    """The times of each shape and kind: those to fit, and those to be predicted only."""
    shapes = grid(args)
    random.Random(0).shuffle(shapes)
    engine = pipe.init_continuous_batching(
        max_requests_per_batch=max(args.rows), max_batch_tokens=2**30, prompt_cache_size=0, scheduler_type="fcfs"
    )
    recorder = Recorder(engine)
    engine.start()
    draw(engine, shapes[0], args.steps)  # warms up
    recorder.drain()
    visits: list[tuple[Shape, dict[str, list[Sample]]]] = []
    for number, shape in enumerate(shapes * args.repeats, 1):
        draw(engine, shape, args.steps)
        visits.append((shape, recorder.drain()))
        print(f"\r{number} of {len(shapes) * args.repeats} visits", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    engine.stop()
    found: dict[Shape, dict[str, list[Sample]]] = {shape: {} for shape in shapes}
    for (shape, kinds), slowness in zip(visits, local_slowness(visits), strict=True):
        for kind, samples in kinds.items():
            steady = [replace(sample, ms=sample.ms / slowness) for sample in samples]
            found[shape].setdefault(kind, []).extend(steady)
    fitted: dict[str, list[Sample]] = {}
    held_out: dict[str, list[Sample]] = {}
    for number, kinds in enumerate(found.values(), 1):
        for kind, samples in kinds.items():
            (held_out if number % HELD_OUT == 0 else fitted).setdefault(kind, []).extend(undisturbed(samples))
    return fitted, held_out


def local_slowness(visits: Sequence[tuple[Shape, dict[str, list[Sample]]]]) -> list[float]:
    """How much longer everything took around each visit than it usually does.

    A machine that is slower for a while must not look like a larger picture: every shape is visited once a round, and
    what its neighbours in time took is compared with what they took in the other rounds.
    """
    times = [statistics.median(sample.ms for sample in kinds["denoise"]) for _, kinds in visits]
    by_shape: dict[Shape, list[float]] = {}
    for (shape, _), ms in zip(visits, times, strict=True):
        by_shape.setdefault(shape, []).append(ms)
    ratios = [ms / statistics.median(by_shape[shape]) for (shape, _), ms in zip(visits, times, strict=True)]
    spans = (ratios[max(0, i - NEIGHBOURS) : i + NEIGHBOURS + 1] for i in range(len(ratios)))
    return [statistics.median(span) for span in spans]


def draw(engine: Any, shape: Shape, steps: int) -> None:
    """Run `shape.rows` requests together, with the same prompts at every visit."""
    prompts = _prompts(shape)
    with engine.pause():  # so that all of them are there at the next step
        ids = [
            engine.add_request(
                prompt=next(prompts),
                negative_prompt=" " if shape.is_guided else None,
                true_cfg_scale=4.0 if shape.is_guided else 1.0,
                height=shape.side,
                width=shape.side,
                num_inference_steps=steps,
                decoder=shape.decoder,
            )
            for _ in range(shape.rows)
        ]
    for request_id in ids:
        error = engine.get_result(request_id).error
        if error is not None:
            raise error


def undisturbed(samples: Sequence[Sample]) -> list[Sample]:
    """One sample for all of the same work: the lower quartile, since what disturbs a step only makes it longer."""
    groups: dict[tuple[float, float, float], list[float]] = {}
    for sample in samples:
        groups.setdefault((sample.tokens, sample.pairs, sample.sequences), []).append(sample.ms)
    return [Sample(*work, sorted(ms)[len(ms) // 4]) for work, ms in groups.items()]


def kind_figures(
    model: StepCostModel, kind: str, fitted: Sequence[Sample], held_out: Sequence[Sample]
) -> dict[str, Any]:
    """How well the curve of one kind fits."""

    def error(samples: Sequence[Sample]) -> float:
        found = [abs(model.ms(kind, s.tokens, s.pairs, s.sequences) / s.ms - 1) for s in samples]
        return round(statistics.median(found), 4) if found else 0.0

    return {
        "r2": model.r2[kind],
        "num_samples": len(fitted),
        "median_error": error(fitted),
        "held_out": len(held_out),
        "held_out_median_error": error(held_out),
        "held_out_r2": round(r_squared(model.curves[kind], held_out), 4) if len(held_out) > 2 else None,
    }


def print_table(figures: dict[str, dict[str, Any]]) -> None:
    print("| kind | R2 | samples | median error | held out | their median error | their R2 |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for kind in (kind for kind in KINDS if kind in figures):
        print(f"| {kind} | " + " | ".join(str(value) for value in figures[kind].values()) + " |")


def _prompts(shape: Shape) -> Iterator[str]:
    """Prompts of 4 to 40 words."""
    rng = random.Random(repr(shape))
    while True:
        yield " ".join(rng.choices(WORDS, k=rng.randint(4, 40)))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, help="file to write")
    parser.add_argument("--model", help="folder or repository (default: the embedded model)")
    parser.add_argument("--pid", help="folder or repository of a PiD decoder to measure too; 'embedded' is ours")
    parser.add_argument("--sides", type=int, nargs="+", default=[64, 96, 128, 192, 256], help="pixels")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    parser.add_argument("--repeats", type=int, default=5, help="visits of each shape (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=9, help="steps of each shape (default: %(default)s)")
    args = parser.parse_args()
    if args.pid == "embedded":
        args.pid = str(embedded_decoder_path())
    return args


if __name__ == "__main__":
    sys.exit(main())
