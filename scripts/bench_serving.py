"""How many requests the real engine serves on time when callers do not wait for each other, beside the stock pipeline.

    python scripts/bench_serving.py
    python scripts/bench_serving.py --mix dataset-c --loads 0.8 1.3 1.8 --requests 300 --schedulers slo edf fcfs
    python scripts/bench_serving.py --arrivals bursty --plot attainment.png

The mixes are those of simulate_slo.py at an eighth of the side, on the embedded model. First every request is drawn by
the stock pipeline, one after another, in a process of its own; that gives its capacity (what loads are fractions of),
the usual time of each kind of request (what deadlines are multiples of, for everybody alike), and, with its durations
laid behind one another from the same arrival times on, what first-in-first-out would have made of every load. Then the
device's cost model is calibrated, requests run alone to see how well their rest is predicted, and each scheduler serves
each load: requests are handed to the engine at their times, whether or not it keeps up. The same arrivals also go
through the simulator with the calibrated cost model. A request that fails counts as late. Latency runs from the time of
arrival.

Prints the machine, a table per load, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tqdm import tqdm

import calibrate_cost_model
import simulate_slo
from bench_offline import all_prompts
from benchmarking import machine, print_machine, quiet_libraries
from diffusers_continuous import ContinuousBatchingPipeline, embedded_model_path
from diffusers_continuous.cli.workload import (
    ARRIVALS,
    MIXES,
    SLO_SCALES,
    arrival_times,
    attainment,
    draw_kinds,
    kind_name,
    percentile,
    rounded,
    slowdowns,
)
from diffusers_continuous.config import SCHEDULER_TYPES
from diffusers_continuous.cost_model import StepCostModel, fit_curve, r_squared
from diffusers_continuous.engine import DiffusionEngine
from diffusers_continuous.errors import ContinuousBatchingError
from diffusers_continuous.request import SchedulerOutput
from simulate_slo import Arrival, VirtualEngine, make_state
from stock_process import BenchRequest, StockProcess

SHRINK = 8  # the sides of the simulator's mixes, to fit the embedded model
CFG = 4.0
SLO_SCALE = SLO_SCALES[-1]  # what engine and simulator are told
CALIBRATION_ROWS, CALIBRATION_STEPS = (1, 2, 4, 8), 9
START_DELAY_S = 0.5


@dataclass(frozen=True)
class Served:
    """How long every request took under one scheduler at one load, in order of arrival; inf for one that failed."""

    name: str
    load: float
    latencies_s: list[float]
    figures: dict[str, Any]


class Workload:
    """The requests, the same for everybody, and what the stock pipeline needs for each of them."""

    def __init__(self, mix: str, num_requests: int, arrivals: str, seed: int) -> None:
        rng = random.Random(f"serving {seed}")
        self.kinds = draw_kinds(MIXES[mix], num_requests, rng, SHRINK)
        self._times = arrival_times(arrivals, num_requests, rng)
        prompts = all_prompts()
        self.requests = [
            BenchRequest(next(prompts), side, side, steps, CFG, number)
            for number, (side, steps) in enumerate(self.kinds)
        ]
        self.stock_s: list[float] = []

    @property
    def usual_s(self) -> dict[tuple[int, int], float]:
        """What the stock pipeline takes for a request of each kind, in the middle."""
        groups: dict[tuple[int, int], list[float]] = {}
        for kind, seconds in zip(self.kinds, self.stock_s, strict=True):
            groups.setdefault(kind, []).append(seconds)
        return {kind: statistics.median(values) for kind, values in sorted(groups.items())}

    def arrival_times(self, load: float) -> list[float]:
        """Seconds from the start; the load is a fraction of what the stock pipeline can serve."""
        stretch = sum(self.stock_s) / (load * self._times[-1])
        return [stretch * at for at in self._times]


# ---------------------------------------------------------------------- the stock pipeline


def run_stock(stock: StockProcess, workload: Workload) -> None:
    """Draw everything, one after another, and keep the durations."""
    stock.draw(workload.requests[:2])
    for request in tqdm(workload.requests, desc="stock pipeline"):
        workload.stock_s += stock.draw([request])[1]


def serve_first_in_first_out(workload: Workload, load: float) -> Served:
    """The measured durations on the time line of this load."""
    now, latencies = 0.0, []
    for at, seconds in zip(workload.arrival_times(load), workload.stock_s, strict=True):
        now = max(now, at) + seconds
        latencies.append(now - at)
    return Served("stock, first in first out", load, latencies, {})


# ---------------------------------------------------------------------- the engine


def calibrate(pipe: ContinuousBatchingPipeline, workload: Workload, repeats: int, path: Path) -> StepCostModel:
    """Measure this device for the sizes of the workload, and save what was found."""
    sides = sorted({side for side, _ in workload.kinds})
    grid = SimpleNamespace(sides=sides, rows=CALIBRATION_ROWS, repeats=repeats, steps=CALIBRATION_STEPS, pid=None)
    fitted, held_out = calibrate_cost_model.measure(pipe, grid)
    samples = {kind: fitted[kind] + held_out.get(kind, []) for kind in fitted}
    model = StepCostModel({kind: fit_curve(found) for kind, found in samples.items()}, source="bench_serving.py")
    model.r2 = {kind: round(r_squared(model.curves[kind], found), 4) for kind, found in samples.items()}
    model.save(path)
    return model


class Forecasts:
    """Asks the engine, when a request has half of its steps behind it, when it will end."""

    def __init__(self, engine: DiffusionEngine) -> None:
        self._engine = engine
        self._execute = engine.runner.execute
        self.found: dict[str, tuple[float, float, float]] = {}  # now, predicted end, predicted end if alone
        engine.runner.execute = self  # type: ignore[method-assign, assignment]

    def __call__(self, output: SchedulerOutput) -> Any:
        """A step of the engine; looks at its rows before it is taken."""
        for row in output.denoise:
            if row.step == row.num_steps // 2:
                name, now = row.request.request_id, self._engine.clock()
                eta_s, rest_ms = self._engine.eta_s(name), self._engine.scheduler.cost_model.remaining_ms(row)
                self.found[name] = now, now + (eta_s or 0.0), now + rest_ms / 1e3
        return self._execute(output)

    def errors(self, finish_s: dict[str, float]) -> tuple[list[float], list[float]]:
        """Relative errors of what was predicted: of the end, and of the rest if nobody else were there."""
        pairs = [(self.found[name], end) for name, end in finish_s.items() if name in self.found]
        eta = [abs((predicted - now) / (end - now) - 1) for (now, predicted, _), end in pairs]
        alone = [abs((predicted - now) / (end - now) - 1) for (now, _, predicted), end in pairs]
        return eta, alone


def start_engine(pipe: ContinuousBatchingPipeline, scheduler: str, calibration: Path) -> DiffusionEngine:
    """A running engine that knows what it takes to draw."""
    engine = pipe.init_continuous_batching(
        scheduler_type=scheduler, calibration=str(calibration), slo_scale=SLO_SCALE, max_requests_per_batch=16
    )
    engine.start()
    return engine


def submit(engine: DiffusionEngine, request: BenchRequest, deadline_s: float) -> str:
    return engine.add_request(**request.arguments(), deadline_s=deadline_s)


def run_alone(pipe: ContinuousBatchingPipeline, workload: Workload, calibration: Path, count: int) -> dict[str, Any]:
    """Some requests of every kind, one after another: their time, and how well their second half was predicted."""
    engine = start_engine(pipe, "slo", calibration)
    forecasts = Forecasts(engine)
    finish_s: dict[str, float] = {}
    latencies: dict[str, list[float]] = {}
    for kind in workload.usual_s:
        requests = [r for r in workload.requests if (r.width, r.steps) == kind][:count]
        for request in requests:
            request_id = submit(engine, request, 1e6)
            metrics = _result(engine, request_id).metrics
            finish_s[request_id] = metrics.finish_s
            latencies.setdefault(kind_name(kind), []).append(metrics.latency_s)
    engine.stop()
    _, errors = forecasts.errors(finish_s)
    return {
        "alone_s": {name: statistics.median(values) for name, values in latencies.items()},
        "remaining_service_error_median": statistics.median(errors),
    }


def _result(engine: DiffusionEngine, request_id: str) -> Any:
    output = engine.get_result(request_id)
    if output.error is not None:
        raise output.error
    return output


def serve_engine(
    pipe: ContinuousBatchingPipeline, workload: Workload, load: float, scheduler: str, calibration: Path
) -> Served:
    """Hand every request in when its time has come, and take the results when all are in."""
    engine = start_engine(pipe, scheduler, calibration)
    forecasts = Forecasts(engine)
    usual = workload.usual_s
    start = engine.clock() + START_DELAY_S
    due = [start + at for at in workload.arrival_times(load)]
    ids: list[str | None] = []
    arrivals = zip(due, workload.kinds, workload.requests, strict=True)
    for at, kind, request in tqdm(arrivals, desc=f"{scheduler}, load {load:g}", total=len(due)):
        time.sleep(max(0.0, at - engine.clock()))
        try:
            # Its deadline counts from when it was due.
            ids.append(submit(engine, request, max(1e-3, SLO_SCALE * usual[kind] - (engine.clock() - at))))
        except ContinuousBatchingError:
            ids.append(None)
    outputs = [None if request_id is None else engine.get_result(request_id) for request_id in ids]
    stats = engine.stats()
    engine.stop()
    finish_s = {o.request_id: o.metrics.finish_s for o in outputs if o is not None and o.error is None}
    latencies = [
        finish_s[request_id] - at if request_id in finish_s else math.inf
        for at, request_id in zip(due, ids, strict=True)
    ]
    eta_errors, _ = forecasts.errors(finish_s)
    return Served(
        scheduler,
        load,
        latencies,
        {
            "num_failed": len(ids) - len(finish_s),
            "mean_rows_per_step": stats.mean_rows_per_step,
            "num_preemptions": stats.num_preemptions,
            "schedule_ms": stats.schedule_ms,
            "make_batch_ms": stats.make_batch_ms,
            "step_ms": stats.step_ms,
            "prediction_error": stats.prediction_error,
            "eta_error_median": statistics.median(eta_errors) if eta_errors else None,
        },
    )


def simulate(workload: Workload, load: float, scheduler: str, model: StepCostModel) -> Served:
    """The same arrivals and deadlines through the simulator's machine."""
    settings = SimpleNamespace(max_rows=16, max_tokens=16384, slo_scale=SLO_SCALE, steps_per_chunk=1, num_blocks=None)
    engine = VirtualEngine(settings, simulate_slo.Job(scheduler, True, load, 0), model.curves)
    usual = workload.usual_s
    states = []
    for number, (at, (side, steps)) in enumerate(zip(workload.arrival_times(load), workload.kinds, strict=True)):
        states.append(make_state(number, Arrival(at, side, steps), SLO_SCALE * usual[side, steps]))
    engine.serve(states)
    return Served(f"{scheduler}, simulated", load, [state.metrics.latency_s or 0.0 for state in states], {})


# ---------------------------------------------------------------------- results


def summary(workload: Workload, served: Served) -> dict[str, Any]:
    """Attainment and percentiles of all requests and of each kind."""
    found = slowdowns(workload.kinds, served.latencies_s, workload.usual_s)
    kinds = {name: attainment(values) for name, values in found.items()}
    finished = [latency for latency in served.latencies_s if math.isfinite(latency)]
    latency = {f"p{percent}_latency_s": percentile(finished, percent) for percent in (50, 95, 99)}
    return {"scheduler": served.name, "load": served.load, **latency, "kinds": kinds, **served.figures}


def print_table(results: Sequence[dict[str, Any]]) -> None:
    """Attainment at each multiple of the usual time, by kind, and how many times slower than alone requests were."""
    columns = [f"within {scale:g}x" for scale in SLO_SCALES] + ["p50", "p95", "p99"]
    print("| load | scheduler | requests | " + " | ".join(columns) + " |")
    print("| --- " * (3 + len(columns)) + "|")
    for result in results:
        for name, kind in result["kinds"].items():
            shares = [f"{kind[f'attainment_{scale:g}x']:.3f}" for scale in SLO_SCALES]
            slowdowns = [f"{kind[f'p{percent}_slowdown']:.1f}" for percent in (50, 95, 99)]
            print(f"| {result['load']:g} | {result['scheduler']} | {name} | " + " | ".join(shares + slowdowns) + " |")


def plot(results: Sequence[dict[str, Any]], path: str) -> None:
    """Share of all requests on time over the load, a line per scheduler."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    key = f"attainment_{SLO_SCALE:g}x"
    figure, axis = plt.subplots(figsize=(6, 4))
    for name in dict.fromkeys(result["scheduler"] for result in results):
        points = [(r["load"], r["kinds"]["all"][key]) for r in results if r["scheduler"] == name]
        axis.plot(*zip(*sorted(points), strict=True), marker="o", label=name, linestyle=":" if "sim" in name else "-")
    axis.set(
        xlabel="load / what the stock pipeline can serve", ylabel=f"share done within {SLO_SCALE:g}x", ylim=(0, 1.02)
    )
    axis.grid(alpha=0.3)
    axis.legend(loc="center right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    args = _parse_arguments()
    quiet_libraries()
    where = machine()
    print_machine(where)
    workload = Workload(args.mix, args.requests, args.arrivals, args.seed)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    source = args.model or str(embedded_model_path())
    stock = StockProcess(source, dtype, device)
    run_stock(stock, workload)
    stock.close()
    usual = {kind_name(kind): seconds for kind, seconds in workload.usual_s.items()}
    capacity = len(workload.stock_s) / sum(workload.stock_s)
    print(f"stock:    {capacity:.2f} requests/s; seconds by size and steps: {rounded(usual)}")
    pipe = ContinuousBatchingPipeline.from_pretrained(source, dtype=dtype).to(device)
    with tempfile.TemporaryDirectory() as folder:
        calibration = Path(folder) / "cost.json"
        model = calibrate(pipe, workload, args.calibration_repeats, calibration)
        alone = run_alone(pipe, workload, calibration, args.alone)
        print(f"engine:   calibrated with R2 {model.r2}; alone {rounded(alone)}")
        results = []
        for load in args.loads:
            served = [serve_first_in_first_out(workload, load)]
            for scheduler in args.schedulers:
                served.append(serve_engine(pipe, workload, load, scheduler, calibration))
                served.append(simulate(workload, load, scheduler, model))
            results += [summary(workload, each) for each in served]
    print_table(results)
    if args.plot:
        plot(results, args.plot)
    settings = {name: getattr(args, name) for name in ("mix", "requests", "arrivals", "seed")}
    facts = {"stock_requests_per_s": capacity, "stock_s": usual, "r2": model.r2, **alone}
    print(json.dumps(rounded({**where, **settings, **facts, "results": results})))
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or repository (default: the embedded model)")
    parser.add_argument("--mix", choices=sorted(MIXES), default="rfc")
    parser.add_argument("--arrivals", choices=sorted(ARRIVALS), default="poisson")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.8, 1.3, 1.8], help="of the stock's capacity")
    parser.add_argument("--requests", type=int, default=200, help="per load (default: %(default)s)")
    parser.add_argument("--schedulers", nargs="+", choices=SCHEDULER_TYPES, default=["slo"])
    parser.add_argument(
        "--calibration-repeats", type=int, default=3, help="visits of each shape (default: %(default)s)"
    )
    parser.add_argument("--alone", type=int, default=5, help="requests of each kind alone (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the workload")
    parser.add_argument("--plot", help="file to draw attainment over load into")
    args = parser.parse_args()
    if args.requests < 2:
        parser.error(f"--requests {args.requests} is too few; at least 2")
    if not all(0 < load < math.inf for load in args.loads):
        parser.error(f"--loads {args.loads} must be above 0")
    return args


if __name__ == "__main__":
    sys.exit(main())
