"""How many requests meet their deadlines under each policy: the real scheduler on a virtual clock, no torch.

    python scripts/simulate_slo.py                                            # the RFC's mix, one row at a time
    python scripts/simulate_slo.py --mix dataset-c --device h200 --batching both --plot attainment.png
    python scripts/simulate_slo.py --device my-calibration.json --arrivals trace.jsonl

Runs `StepScheduler` with its policies and its cost model, and lets every step take what the device's curves say. Beside
the policies: "fifo", one request after another as a pipeline without an engine runs them, and "clairvoyant", an offline
schedule that knows all arrivals: requests are accepted shortest first as long as earliest-deadline-first keeps all that
were accepted. Loads are fractions of what the device can serve one request at a time. Prints the settings, a table of
attainment, and one JSON object as the last line.

Devices are published step times (`published_step_times.json` names the sources; times of encoding and decoding there
are assumed), "small" (a step of 16 ms and 5 more for each row), or a file of `calibrate_cost_model.py`. A trace has one
JSON object per line: {"arrival_s": 0.5, "side": 512, "steps": 20}.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusers_continuous.cli.workload import ARRIVALS, MIXES, arrival_times, draw_kinds
from diffusers_continuous.config import ContinuousBatchingConfig
from diffusers_continuous.cost_model import Curve, Sample, StepCostModel, fit_curve, kind_of, r_squared
from diffusers_continuous.futures import RequestFuture
from diffusers_continuous.memory.block_pool import BlockPool, PageLedger, Where
from diffusers_continuous.request import RequestState, Row, SamplingParams, SchedulerOutput, Stage
from diffusers_continuous.scheduler import StepScheduler

PUBLISHED = Path(__file__).with_name("published_step_times.json")
POLICIES = ("fifo", "fcfs", "edf", "least_slack", "slo")
NUM_TEXT_TOKENS = 32  # of each branch
TOKENS_PER_BLOCK = 256  # of a row's image, in the pool
NUM_HOST_BLOCKS = 2**20


@dataclass(frozen=True)
class Arrival:
    """One request of the workload."""

    arrival_s: float
    side: int
    steps: int

    @property
    def num_image_tokens(self) -> int:
        return (self.side // 16) ** 2


@dataclass(frozen=True)
class Text:
    """Stands for encoded text."""

    num_tokens: int = NUM_TEXT_TOKENS


@dataclass(frozen=True)
class Job:
    """One simulation to run."""

    policy: str
    is_batching: bool
    load: float
    seed: int


# ---------------------------------------------------------------------- devices and workloads


def device_curves(name: str) -> tuple[dict[str, Curve], str, float]:
    """The curves of a device, where they come from, and how well they fit what was published."""
    if name == "small":
        tokens = Arrival(0.0, 1024, 1).num_image_tokens * 2 + 2 * NUM_TEXT_TOKENS
        return {"encode": Curve(), "denoise": Curve(16.0, 5.0 / tokens), "decode": Curve()}, "16 + 5 ms per row", 1.0
    published = json.loads(PUBLISHED.read_text())
    if name not in published:
        model = StepCostModel.load(name)
        return model.curves, model.source, model.r2.get("denoise", math.nan)
    facts = published[name]
    steps = [_step_sample(*point) for point in facts["steps"]]
    curve = fit_curve(steps)
    decodes = [Sample((side // 16) ** 2, (side // 16) ** 4, 0, 1e3 * s) for side, s in facts["decode_s"]]
    curves = {"encode": Curve(1e3 * facts["encode_s"]), "denoise": curve, "decode": fit_curve(decodes)}
    return curves, facts["source"], r_squared(curve, steps)


def _step_sample(side: int, rows: int, seconds: float) -> Sample:
    """A guided step of so many rows of one size, which cannot tell what a row takes from what its tokens take."""
    tokens = 2 * ((side // 16) ** 2 + NUM_TEXT_TOKENS)
    return Sample(rows * tokens, rows * tokens * tokens / 2, 0, 1e3 * seconds)


def make_state(number: int, arrival: Arrival, deadline_s: float | None = None) -> RequestState:
    """A guided request of one picture, which is nothing but numbers."""
    params = SamplingParams(arrival.side, arrival.side, arrival.steps, 4.0, True, deadline_s=deadline_s)
    state = RequestState(str(number), params, RequestFuture())
    nothing: Any = None
    prompt = "x" * (4 * (NUM_TEXT_TOKENS - 8))
    row = Row(state, 0, arrival.num_image_tokens, nothing, None, arrival.steps, prompt=prompt, negative_prompt=prompt)
    state.rows = (row,)
    state.metrics.arrival_s = arrival.arrival_s
    return state


def read_trace(path: str) -> list[dict[str, Any]]:
    """The requests of a trace file, in its own order."""
    return [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]


def arrivals_of(args: argparse.Namespace, model: StepCostModel, load: float, seed: int) -> list[Arrival]:
    """The workload: random, or from a trace whose times are stretched to the load."""
    rng = random.Random(f"{seed} {load}")
    if args.arrivals in ARRIVALS:
        sizes = draw_kinds(MIXES[args.mix], args.requests, rng)
        times = arrival_times(args.arrivals, args.requests, rng)
    else:
        lines = sorted(read_trace(args.arrivals), key=lambda line: line["arrival_s"])
        sizes, times = [(line["side"], line["steps"]) for line in lines], [line["arrival_s"] for line in lines]
    work_s = sum(model.standalone_ms(make_state(0, Arrival(0.0, *size))) for size in sizes) / 1e3
    span_s = times[-1] - times[0]
    stretch = work_s / (load * span_s) if span_s else 1.0  # who come all at once do so at every load
    return [Arrival(stretch * (t - times[0]), *size) for t, size in zip(times, sizes, strict=True)]


# ---------------------------------------------------------------------- machines


class VirtualEngine:
    """The engine's loop with a number for a clock and, for a device, a cost model that is always right."""

    def __init__(self, args: argparse.Namespace, job: Job, curves: dict[str, Curve]) -> None:
        self.truth = StepCostModel(curves)
        config = ContinuousBatchingConfig(
            scheduler_type=job.policy,
            max_requests_per_batch=args.max_rows if job.is_batching else 1,
            max_batch_tokens=args.max_tokens,
            slo_scale=args.slo_scale,
            steps_per_chunk=args.steps_per_chunk,
        )
        self.scheduler = StepScheduler(config, cost_model=StepCostModel(curves))
        self.has_pool = args.num_blocks is not None
        if self.has_pool:
            self.scheduler.memory = PageLedger(BlockPool(args.num_blocks), BlockPool(NUM_HOST_BLOCKS))
        self.now = 0.0
        self.num_steps = self.num_rows = self.num_swaps = 0
        self.schedule_s: list[float] = []
        self.etas: dict[str, tuple[float, float]] = {}  # at half of the steps: when, and what was promised

    def serve(self, states: Sequence[RequestState]) -> None:
        """Run to the end; sets `finish_s` of every request."""
        coming = deque(states)
        while coming or self.scheduler.has_requests():
            while coming and coming[0].metrics.arrival_s <= self.now:
                self.add(coming.popleft())
            start = time.perf_counter()
            output = self.scheduler.schedule(self.now)
            self.schedule_s.append(time.perf_counter() - start)
            if output.is_empty:
                self.now = coming[0].metrics.arrival_s
                continue
            self.execute(output)
            for state in self.scheduler.update_from_output(output, {}):
                state.metrics.finish_s = self.now

    def add(self, state: RequestState) -> None:
        """Hand a request in; with a pool, its rows need pages of it while they run."""
        for row in state.rows if self.has_pool else ():
            row.num_blocks = math.ceil(row.num_image_tokens / TOKENS_PER_BLOCK)
        self.scheduler.check_pages(state)
        self.scheduler.add_request(state)

    def execute(self, output: SchedulerOutput) -> None:
        """Let the clock and the rows go on. Moving pages takes no time: latents are small beside what a step reads."""
        self.num_swaps += sum(move.where is Where.HOST for move in output.moves)
        if output.encode:
            self.now += self.truth.rows_ms("encode", output.encode) / 1e3
        for row in output.encode:
            row.text = row.negative_text = Text()  # type: ignore[assignment]
        for row in output.decode:
            self.now += self.truth.rows_ms(kind_of(Stage.DECODE, row), (row,)) / 1e3
            row.image = object()  # type: ignore[assignment]
        if output.denoise:
            self.now += self.truth.rows_ms("denoise", output.denoise) / 1e3
            self.num_steps += 1
            self.num_rows += len(output.denoise)
        for row in output.denoise:
            row.step += 1
            if row.step == row.num_steps // 2 and row.row_id % 16 == 0:
                self.etas[row.request.request_id] = self.now, self.scheduler.eta(row.request, self.now)


def serve_fifo(states: Sequence[RequestState], model: StepCostModel, max_rows: int) -> None:
    """Whole requests, in order of arrival; with `max_rows`, those of the same shape that wait share a call."""
    now, queue = 0.0, deque(states)
    while queue:
        head = queue.popleft()
        now = max(now, head.metrics.arrival_s)
        together, left = [head], []
        while queue and queue[0].metrics.arrival_s <= now and len(together) < max_rows:
            state = queue.popleft()
            is_alike = (state.params.height, state.num_steps) == (head.params.height, head.num_steps)
            (together if is_alike else left).append(state)
        queue.extendleft(reversed(left))
        rows = [row for state in together for row in state.rows]
        now += (model.rows_ms("encode", rows) + head.num_steps * model.rows_ms("denoise", rows)) / 1e3
        now += sum(model.rows_ms("decode", (row,)) for row in rows) / 1e3
        for state in together:
            state.metrics.finish_s = now


def clairvoyant(jobs: Sequence[tuple[float, float, float]]) -> set[int]:
    """Indices of (release, deadline, work) that are accepted, the shortest tried first, one machine, preemptive."""
    kept: list[tuple[float, float, float]] = []
    accepted = set()
    for index in sorted(range(len(jobs)), key=lambda i: jobs[i][2]):
        at = bisect.bisect(kept, jobs[index])
        kept.insert(at, jobs[index])
        if _is_feasible_around(kept, at):
            accepted.add(index)
        else:
            del kept[at]
    return accepted


def _is_feasible_around(kept: Sequence[tuple[float, float, float]], at: int) -> bool:
    """Does earliest deadline first keep everybody in the busy stretch that holds `kept[at]`?"""
    start = _busy_start(kept, at)
    now, ready = kept[start][0], []
    index, release = start, kept[at][0]
    while ready or index < len(kept):
        while index < len(kept) and (kept[index][0] <= now or not ready):
            if not ready and kept[index][0] >= now and index > start:
                if kept[index][0] > release and now >= release:
                    return True  # idle: what comes later does not feel the newcomer
                now = max(now, kept[index][0])
            heapq.heappush(ready, [kept[index][1], kept[index][2]])
            index += 1
        deadline, work = ready[0]
        until = kept[index][0] if index < len(kept) else math.inf
        if now + work <= until:
            heapq.heappop(ready)
            now += work
            if now > deadline + 1e-9:
                return False
        else:
            ready[0][1] -= until - now
            now = until
    return True


def _busy_start(kept: Sequence[tuple[float, float, float]], at: int) -> int:
    """Index of a release at or before `at` before which the machine is idle."""
    step = 64
    while True:
        start = max(0, at - step)
        busy_until, first = -math.inf, start
        for index in range(start, at + 1):
            if kept[index][0] >= busy_until:
                first, busy_until = index, kept[index][0]
            busy_until += kept[index][2]
        if start == 0 or first > start:
            return first
        step *= 2


# ---------------------------------------------------------------------- runs


def run(args: argparse.Namespace, job: Job) -> dict[str, Any]:
    """One policy at one load."""
    curves, _, _ = device_curves(args.device)
    model = StepCostModel(curves)
    states = [make_state(i, a) for i, a in enumerate(arrivals_of(args, model, job.load, job.seed))]
    work_s = [model.standalone_ms(state) / 1e3 for state in states]
    start = time.perf_counter()
    extra: dict[str, float] = {}
    if job.policy == "fifo":
        serve_fifo(states, model, args.max_rows if job.is_batching else 1)
    elif job.policy == "clairvoyant":
        limits = [
            (s.metrics.arrival_s, s.metrics.arrival_s + args.slo_scale * w, w)
            for s, w in zip(states, work_s, strict=True)
        ]
        accepted = clairvoyant(limits)
        for index, state in enumerate(states):
            state.metrics.finish_s = state.metrics.arrival_s if index in accepted else math.inf
    else:
        engine = VirtualEngine(args, job, curves)
        engine.serve(states)
        extra = _figures(engine, {state.request_id: state for state in states})
    ratios = [(s.metrics.latency_s or 0.0) / w for s, w in zip(states, work_s, strict=True)]
    by_class: dict[str, list[float]] = {}
    for state, ratio in zip(states, ratios, strict=True):
        by_class.setdefault(f"{state.params.height}/{state.num_steps}", []).append(ratio)
    return {
        "policy": job.policy,
        "batching": job.is_batching,
        "load": job.load,
        "seed": job.seed,
        **{f"attainment_{scale:g}x": _share(ratios, scale) for scale in sorted({1.5, 2.0, args.slo_scale})},
        "attainment": _share(ratios, args.slo_scale),
        "by_class": {name: _share(values, args.slo_scale) for name, values in sorted(by_class.items())},
        "p50_slowdown": statistics.median(ratios),
        "wall_s": time.perf_counter() - start,
        **extra,
    }


def _share(ratios: Sequence[float], scale: float) -> float:
    return sum(ratio <= scale + 1e-9 for ratio in ratios) / len(ratios)


def _figures(engine: VirtualEngine, states: dict[str, RequestState]) -> dict[str, float]:
    errors = [
        abs((promised - at) / (states[name].metrics.finish_s - at) - 1)  # type: ignore[operator]
        for name, (at, promised) in engine.etas.items()
    ]
    times = sorted(engine.schedule_s)
    return {
        "mean_rows_per_step": engine.num_rows / engine.num_steps,
        "num_preemptions": float(engine.scheduler.num_preemptions),
        "num_swaps": float(engine.num_swaps),
        "schedule_ms_mean": 1e3 * statistics.fmean(times),
        "schedule_ms_p99": 1e3 * times[int(0.99 * len(times))],
        "eta_error_median": statistics.median(errors) if errors else 0.0,
    }


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """Every policy at every load, with one row at a time, with batches, or both."""
    ways = {"one": [False], "many": [True], "both": [False, True]}[args.batching]
    jobs = [
        Job(policy, way, load, seed)
        for policy, way, load, seed in itertools.product(args.policies, ways, args.loads, range(args.seeds))
    ]
    if args.clairvoyant:
        jobs += [Job("clairvoyant", False, load, seed) for load in args.clairvoyant for seed in range(args.seeds)]
    return jobs


def averaged(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the seeds."""
    groups: dict[tuple[str, bool, float], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["policy"], result["batching"], result["load"]), []).append(result)
    means = []
    for group in groups.values():
        mean = {k: v for k, v in group[0].items() if k in ("policy", "batching", "load")}
        for key in (k for k, v in group[0].items() if isinstance(v, float) and k != "load"):
            mean[key] = round(statistics.fmean(result[key] for result in group), 4)
        names = {name for result in group for name in result["by_class"]}
        mean["by_class"] = {
            name: round(statistics.fmean(r["by_class"][name] for r in group if name in r["by_class"]), 4)
            for name in sorted(names)
        }
        means.append(mean)
    return means


def print_table(means: Sequence[dict[str, Any]]) -> None:
    """Attainment: policies by loads."""
    loads = sorted({mean["load"] for mean in means})
    print("| policy | rows | " + " | ".join(f"load {load:g}" for load in loads) + " |")
    print("| --- | --- |" + " --- |" * len(loads))
    for policy, batching in dict.fromkeys((mean["policy"], mean["batching"]) for mean in means):
        found = {m["load"]: m["attainment"] for m in means if (m["policy"], m["batching"]) == (policy, batching)}
        cells = [f"{found[load]:.3f}" if load in found else "" for load in loads]
        print(f"| {policy} | {'many' if batching else 'one'} | " + " | ".join(cells) + " |")


def plot(means: Sequence[dict[str, Any]], path: str, title: str) -> None:
    """Attainment over load, a line per policy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ways = sorted({mean["batching"] for mean in means})
    figure, axes = plt.subplots(1, len(ways), figsize=(6 * len(ways), 4), squeeze=False, sharey=True)
    for axis, batching in zip(axes[0], ways, strict=True):
        for policy in dict.fromkeys(mean["policy"] for mean in means if mean["batching"] == batching):
            line = sorted(
                (m["load"], m["attainment"]) for m in means if (m["policy"], m["batching"]) == (policy, batching)
            )
            axis.plot(*zip(*line, strict=True), marker="o", label=policy)
        axis.set(xlabel="load / serial capacity", title="batches" if batching else "one row at a time", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
        axis.legend()
    axes[0][0].set_ylabel("share of requests on time")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    args = _parse_arguments()
    _, source, r2 = device_curves(args.device)
    workload = f"trace {args.arrivals}" if args.mix is None else f"mix {args.mix}, {args.arrivals} arrivals"
    print(f"device {args.device} ({source}), R2 {r2:.3f}")
    print(f"{workload}, {args.requests} requests, {args.seeds} seeds, deadline {args.slo_scale:g}x alone")
    jobs = jobs_of(args)
    with ProcessPoolExecutor(args.jobs) as pool:
        results = list(pool.map(run, itertools.repeat(args, len(jobs)), jobs))
    means = averaged(results)
    print_table(means)
    if args.plot:
        plot(means, args.plot, f"{workload}, on {args.device}")
    settings = {k: v for k, v in vars(args).items() if k not in ("plot", "jobs")}
    print(json.dumps({"settings": settings, "source": source, "r2": r2, "results": means}))
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mix", choices=sorted(MIXES), default="rfc", help="sizes and steps, where no trace says them")
    parser.add_argument("--device", default="a3", help="a published device, 'small' or a calibration file")
    parser.add_argument("--arrivals", default="poisson", help="poisson, bursty, or a trace file")
    parser.add_argument("--requests", type=int, default=10_000, help="how many, where no trace says it (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.5, 0.8, 1.0, 1.3, 2.0])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--batching", choices=["one", "many", "both"], default="one", help="rows in a step")
    parser.add_argument("--clairvoyant", type=float, nargs="*", default=[], help="loads with the offline reference")
    parser.add_argument("--slo-scale", type=float, default=3.0)
    parser.add_argument("--steps-per-chunk", type=int, default=1)
    parser.add_argument("--max-rows", type=int, default=32, help="most rows of a batch")
    parser.add_argument("--max-tokens", type=int, default=65536, help="most tokens of a batch")
    parser.add_argument(
        "--num-blocks", type=int, help=f"pages of {TOKENS_PER_BLOCK} tokens in the pool (default: enough)"
    )
    parser.add_argument("--jobs", type=int, default=None, help="processes (default: one per core)")
    parser.add_argument("--plot", help="file for a picture of the table; needs matplotlib")
    args = parser.parse_args()
    if args.arrivals not in ARRIVALS and not Path(args.arrivals).is_file():
        parser.error(f"--arrivals {args.arrivals!r} is neither poisson nor bursty nor a file")
    if args.arrivals not in ARRIVALS:
        args.mix, args.requests = None, len(read_trace(args.arrivals))
        if not args.requests:
            parser.error(f"--arrivals {args.arrivals!r}: there is no request in it")
    return args


if __name__ == "__main__":
    sys.exit(main())
