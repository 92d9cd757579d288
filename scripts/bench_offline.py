"""How much faster `ContinuousBatchingPipeline` draws a list of requests than the stock pipeline called one by one.

    python scripts/bench_offline.py --requests 8 --size 128 --steps 20 --cfg 4
    python scripts/bench_offline.py --requests 8 --mixed
    python scripts/bench_offline.py --requests 1 --cfg 1
    python scripts/bench_offline.py --requests 8 --size 128 --steps 20 --cfg 4 --compile

The stock pipeline runs in a process of its own (`stock_process.py` says why), with equal weights, threads, prompts and
noise. After a warm-up and a comparison of the
pictures, stock and ours take turns; every figure is the median over the turns. Each turn has new prompts, so that no
cache of embeddings helps (the shared negative prompt is encoded once, which is what the engine does). Prints the
machine, the settings, a table, and one JSON object as the last line. With `--compile` the engine runs compiled blocks,
and every turn has a third run, of the same engine without them. The engine runs first come, first served: here
only the last picture counts, so nothing has a deadline.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import random
import resource
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import QwenImagePipeline

from benchmarking import machine, print_machine, quiet_libraries, seconds_of
from diffusers_continuous import ContinuousBatchingConfig, ContinuousBatchingPipeline, embedded_model_path
from diffusers_continuous.attention import AttentionTask, get_backend
from diffusers_continuous.batch import InputBatch
from diffusers_continuous.cli.workload import rounded
from diffusers_continuous.config import SCHEDULER_TYPES
from diffusers_continuous.futures import RequestFuture
from diffusers_continuous.request import RequestState, Row, SamplingParams
from diffusers_continuous.scheduler import StepScheduler
from stock_process import BenchRequest, StockProcess, decode_with_vae

COLORS = ("red", "green", "blue", "yellow", "purple", "orange", "pink", "white", "black", "gray")
OBJECTS = ("star", "circle", "square", "triangle", "heart", "ring", "cross", "diamond")
MIXED_SIZES = ((96, 96), (256, 256), (128, 192), (128, 128), (192, 96), (160, 160), (192, 192), (224, 128))
MAX_DIFFERENCE = 1  # of 255: other shapes of a matrix product round differently, never by more than one step


def main() -> int:
    args = _parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    quiet_libraries()
    where = machine()
    print_header(args, where)
    bench = Bench(args)
    try:
        difference = bench.largest_difference()
        print(f"pictures: differ from the stock pipeline's by at most {difference} of 255")
        if difference > MAX_DIFFERENCE:
            print("error: the two sides do not draw the same pictures, so their times say nothing", file=sys.stderr)
            return 1
        result = {**bench.run(), **where, **settings(args), "max_difference": difference}
    finally:
        bench.stock_process.close()
    print_table(result)
    print(json.dumps(rounded(result)))
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8, help="pictures per run (default: %(default)s)")
    parser.add_argument("--size", default="128", help="N or WxH in pixels (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="denoising steps (default: %(default)s)")
    parser.add_argument("--cfg", type=float, default=4.0, help="guidance scale, 1 is none (default: %(default)s)")
    parser.add_argument("--mixed", action="store_true", help="sizes from 96 to 256, every second request unguided")
    parser.add_argument("--compile", action="store_true", help="compiled blocks, and the same without them")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs, at least 3 (default: %(default)s)")
    parser.add_argument("--model", help="folder or repository (default: the embedded model)")
    parser.add_argument("--threads", type=int, help="torch threads of both sides (default: torch's own)")
    args = parser.parse_args()
    width, _, height = args.size.partition("x")
    try:
        args.width, args.height = int(width), int(height or width)
    except ValueError:
        parser.error(f"--size {args.size!r} is neither N nor WxH")
    if args.repeats < 3:
        parser.error(f"--repeats {args.repeats} is too few for a median; at least 3")
    return args


class Bench:
    """Both pipelines and what is timed of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.prompts = all_prompts()
        self.device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        source = args.model or str(embedded_model_path())
        self.stock_process = StockProcess(source, dtype, self.device, args.threads)
        self.stock = QwenImagePipeline.from_pretrained(source, dtype=dtype).to(self.device)
        self.stock.set_progress_bar_config(disable=True)
        self.ours = ContinuousBatchingPipeline.from_pretrained(source, dtype=dtype).to(self.device)
        self.engine = self.ours.init_continuous_batching(
            continuous_batching_config=ContinuousBatchingConfig(
                max_requests_per_batch=max(64, args.requests), scheduler_type="fcfs", compile=args.compile
            )
        )
        self.last_outputs: list[Any] = []

    def next_requests(self) -> list[BenchRequest]:
        """Requests with prompts that were not used before."""
        return [self._request(index, next(self.prompts)) for index in range(self.args.requests)]

    def _request(self, index: int, prompt: str) -> BenchRequest:
        args = self.args
        if not args.mixed:
            return BenchRequest(prompt, args.width, args.height, args.steps, args.cfg, index)
        width, height = MIXED_SIZES[index % len(MIXED_SIZES)]
        return BenchRequest(prompt, width, height, args.steps, args.cfg if index % 2 == 0 else 1.0, index)

    def draw_ours(self, calls: Sequence[dict[str, Any]]) -> list[Any]:
        """All calls at once."""
        self.last_outputs = list(self.ours.generate_batch(list(calls)).values())
        for output in self.last_outputs:
            if output.error is not None:
                raise output.error
        return [output.images[0] for output in self.last_outputs]

    @contextlib.contextmanager
    def uncompiled(self) -> Iterator[None]:
        """The engine runs no compiled blocks inside."""
        model = self.engine.runner._model
        compiled, model._compiled = model._compiled, None
        try:
            yield
        finally:
            model._compiled = compiled

    def largest_difference(self) -> int:
        """Warms all sides up and compares their pictures."""
        if self.args.compile:
            with self.uncompiled():
                self.draw_ours([request.arguments() for request in self.next_requests()])
        requests = self.next_requests()
        pictures, _ = self.stock_process.draw(requests)
        ours = self.draw_ours([request.arguments() for request in requests])
        return max(
            int(np.abs(np.asarray(a, np.int16) - np.asarray(b, np.int16)).max())
            for a, b in zip(pictures, ours, strict=True)
        )

    def run(self) -> dict[str, Any]:
        """All figures."""
        return {
            **self.measure_throughput(),
            **self.measure_denoising(),
            **self.measure_decoding(),
            **self.measure_batch_making(),
            **measure_scheduling(),
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def measure_throughput(self) -> dict[str, Any]:
        """Prompt to picture."""
        latencies: list[float] = []

        def stock(requests: list[BenchRequest]) -> float:
            return sum(self.stock_process.draw(requests)[1])

        def ours(requests: list[BenchRequest]) -> float:
            calls = [request.arguments() for request in requests]
            seconds = seconds_of(lambda: self.draw_ours(calls))
            latencies.extend(output.metrics.latency_s for output in self.last_outputs)
            return seconds

        sides = {"stock": stock, "ours": ours}
        if self.args.compile:
            sides["uncompiled"] = self._uncompiled_s
        start = self.engine.clock()
        turns = time_turns(self.next_requests, sides, self.args.repeats)
        steps = [step for step in self.engine.stats().recent_steps if step.start_s >= start and step.kind == "denoise"]
        compiled = {}
        if self.args.compile:
            compiled = {
                "uncompiled_throughput_ratio": turns.ratio("stock", "uncompiled"),
                "compiled_speedup": turns.ratio("uncompiled", "ours"),
            }
        return {
            "throughput_ratio": turns.ratio("stock", "ours"),
            **compiled,
            "images_per_s": self.args.requests / turns.median_s("ours"),
            "stock_images_per_s": self.args.requests / turns.median_s("stock"),
            "p50_latency_s": float(np.percentile(latencies, 50)),
            "p95_latency_s": float(np.percentile(latencies, 95)),
            "mean_rows_per_step": statistics.mean(len(step.request_ids) for step in steps),
        }

    def _uncompiled_s(self, requests: list[BenchRequest]) -> float:
        calls = [request.arguments() for request in requests]
        with self.uncompiled():
            return seconds_of(lambda: self.draw_ours(calls))

    def measure_denoising(self) -> dict[str, Any]:
        """The steps alone: embeddings go in, latents come out."""
        dtype = self.ours.transformer.dtype

        def ours(requests: list[BenchRequest]) -> float:
            calls = [
                request.latent_arguments({name: self._tensor(value, dtype) for name, value in embeds.items()})
                for request, embeds in zip(requests, self.stock_process.encode(requests), strict=True)
            ]
            return seconds_of(lambda: self.draw_ours(calls))

        turns = time_turns(self.next_requests, {"stock": self.stock_process.denoise_s, "ours": ours}, self.args.repeats)
        return turns.figures("denoise")

    def _tensor(self, value: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.from_numpy(value).to(self.device)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def measure_decoding(self) -> dict[str, Any]:
        """Latents to pixel tensors: `vae.decode` one by one against the engine's stage, rows of one size together."""

        def stock(rows: list[Row]) -> float:
            return seconds_of(lambda: [self._decode_stock(row) for row in rows])

        def measure(rows: list[Row], model: Any, make: Callable[..., InputBatch]) -> Turns:
            def decode(rows: list[Row]) -> None:
                by_size = sorted(rows, key=_row_size)
                for _, group in itertools.groupby(by_size, key=_row_size):
                    model.post_decode(list(group))

            def ours(rows: list[Row]) -> float:
                return seconds_of(lambda: decode(rows))

            copies = [copy.copy(row) for row in rows]
            return time_turns(lambda: copies, {"stock": stock, "ours": ours}, max(5, self.args.repeats))

        return self._in_a_step(self.next_requests(), measure).figures("decode")

    def _decode_stock(self, row: Row) -> torch.Tensor:
        return decode_with_vae(self.stock, row.latents[None], *_row_size(row))

    def measure_batch_making(self) -> dict[str, Any]:
        """Making a batch of the same rows again, and of new rows; and the forward over its bare matrix products."""

        def measure_making(rows: list[Row], model: Any, make: Callable[..., InputBatch]) -> tuple[float, float]:
            kept = make(rows, model).composition
            return median_ms(partial(make, rows, model, kept), 50), median_ms(partial(make, rows, model), 50)

        def measure_forward(rows: list[Row], model: Any, make: Callable[..., InputBatch]) -> tuple[float, float]:
            made = make(rows, model)
            bare = median_ms(bare_products(self.stock.transformer, made), 15)
            return median_ms(lambda: model.denoise_step(made), 15), bare

        def measure_compiled(rows: list[Row], model: Any, make: Callable[..., InputBatch]) -> float:
            made = make(rows, model)

            def uncompiled(_: Any) -> float:
                with self.uncompiled():
                    return seconds_of(lambda: model.denoise_step(made))

            sides = {"ours": lambda _: seconds_of(lambda: model.denoise_step(made)), "uncompiled": uncompiled}
            return time_turns(lambda: None, sides, 25).ratio("ours", "uncompiled")

        again, new = {}, {}
        for num_rows in (8, 64):
            small = [BenchRequest(next(self.prompts), 128, 128, 6, 4.0, index) for index in range(num_rows)]
            again[str(num_rows)], new[str(num_rows)] = self._in_a_step(small, measure_making)
        forward, bare = self._in_a_step(self.next_requests(), measure_forward)
        compiled = {}
        if self.args.compile:
            compiled["compiled_forward_ratio"] = self._in_a_step(self.next_requests(), measure_compiled)
        return {
            **compiled,
            "make_batch_ms": again,
            "make_new_batch_ms": new,
            "forward_ms": forward,
            "bare_ms": bare,
            "overhead_ratio": forward / bare,
        }

    def _in_a_step(self, requests: Sequence[BenchRequest], measure: Callable[..., Any]) -> Any:
        """`measure(rows, model, make)` where the engine makes the first batch of all of `requests`, in its thread."""
        original, found = InputBatch.make, []

        def make(rows: Sequence[Row], model: Any, previous: Any = None, swap: Any = None) -> InputBatch:
            if not found and len(rows) == len(requests):
                found.append(measure(list(rows), model, partial(original, swap=swap)))
            return original(rows, model, previous, swap)

        InputBatch.make = staticmethod(make)
        try:
            with self.engine.pause():  # so that all are there at its next step
                calls = [request.arguments() | {"output_type": "latent"} for request in requests]
                request_ids = [self.engine.add_request(**call) for call in calls]
            errors = [self.engine.get_result(request_id).error for request_id in request_ids]
        finally:
            InputBatch.make = staticmethod(original)
        if any(errors) or not found:
            raise RuntimeError(f"{len(requests)} requests did not run together: {errors}")
        return found[0]


def _row_size(row: Row) -> tuple[int, int]:
    return row.request.params.height, row.request.params.width


def bare_products(transformer: Any, batch: InputBatch) -> Callable[[], None]:
    """A function that computes the matrix products and attention of one forward of the stock model, and no more."""
    image, text = int(batch.latents.shape[0]), int(batch.composition.prompt_embeds.shape[0])
    rows = len(batch.rows)
    products = [
        (image, [transformer.img_in]),
        (text, [transformer.txt_in]),
        (rows, [transformer.time_text_embed.timestep_embedder.linear_1]),
        (rows, [transformer.time_text_embed.timestep_embedder.linear_2]),
        (rows, [transformer.norm_out.linear]),
        (image, [transformer.proj_out]),
    ]
    for block in transformer.transformer_blocks:
        attn = block.attn
        products += [
            (rows, [block.img_mod[1]]),
            (rows, [block.txt_mod[1]]),
            (image, [attn.to_q, attn.to_k, attn.to_v]),
            (text, [attn.add_q_proj, attn.add_k_proj, attn.add_v_proj]),
            (image, [attn.to_out[0]]),
            (text, [attn.to_add_out]),
            (image, [block.img_mlp.net[0].proj]),
            (image, [block.img_mlp.net[2]]),
            (text, [block.txt_mlp.net[0].proj]),
            (text, [block.txt_mlp.net[2]]),
        ]
    like = batch.latents
    weights = [torch.cat([linear.weight for linear in linears]) for _, linears in products]
    inputs = [torch.randn(n, w.shape[1]).to(like) for (n, _), w in zip(products, weights, strict=True)]
    heads, head_dim = transformer.config.num_attention_heads, transformer.config.attention_head_dim
    q, k, v = (torch.randn(batch.num_tokens, heads, head_dim).to(like) for _ in range(3))
    attend = get_backend("auto", AttentionTask(q.device, q.dtype, head_dim)).forward

    def compute() -> None:
        for x, weight in zip(inputs, weights, strict=True):
            F.linear(x, weight)
        for _ in transformer.transformer_blocks:
            attend(q, k, v, batch.layout.joint)

    return compute


def measure_scheduling(num_waiting: int = 1000) -> dict[str, Any]:
    """One decision of the slowest policy, and of each, with `num_waiting` requests waiting."""
    by_policy = {name: _decision_ms(name, num_waiting) for name in SCHEDULER_TYPES}
    return {"schedule_ms": max(by_policy.values()), "schedule_ms_by_policy": by_policy}


def _decision_ms(scheduler_type: str, num_waiting: int) -> float:
    """The slower of filling an empty batch and choosing again when it is full."""
    admitting, full = [], []
    for _ in range(20):
        scheduler = StepScheduler(ContinuousBatchingConfig(scheduler_type=scheduler_type))
        for index in range(num_waiting):
            scheduler.add_request(_waiting_request(index))
        admitting.append(seconds_of(lambda s=scheduler: s.schedule(0.0)))
        full.append(seconds_of(lambda s=scheduler: s.schedule(0.1)))
    return 1e3 * max(statistics.median(admitting), statistics.median(full))


def _waiting_request(index: int) -> RequestState:
    params = SamplingParams(
        height=128, width=128, num_inference_steps=20, true_cfg_scale=4.0, do_true_cfg=True, priority=index % 3
    )
    state = RequestState(request_id=str(index), params=params, future=RequestFuture())
    noise: Any = None
    row = Row(state, 0, 64, noise, None, 20, prompt="a red star on a blue background", negative_prompt=" ")
    state.rows = (row,)
    return state


@dataclass(frozen=True)
class Turns:
    """Seconds of every side in each turn."""

    seconds: dict[str, list[float]]

    def median_s(self, side: str) -> float:
        """Its usual time."""
        return statistics.median(self.seconds[side])

    def ratio(self, slow: str, fast: str) -> float:
        """How many times as long `slow` takes: the median of each turn's ratio."""
        return statistics.median(a / b for a, b in zip(self.seconds[slow], self.seconds[fast], strict=True))

    def figures(self, what: str) -> dict[str, float]:
        """Of stock against ours, by name."""
        return {
            f"{what}_ratio": self.ratio("stock", "ours"),
            f"stock_{what}_s": self.median_s("stock"),
            f"{what}_s": self.median_s("ours"),
        }


def time_turns(prepare: Callable[[], Any], sides: dict[str, Callable[[Any], float]], repeats: int) -> Turns:
    """Seconds that each side says it takes for what `prepare()` gives, in turn, a turn to warm up first."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats + 1):
        prepared = prepare()
        for name, side in sides.items():
            seconds[name].append(side(prepared))
    return Turns({name: times[1:] for name, times in seconds.items()})


def median_ms(run: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds of `run`, after two calls to warm up."""
    times = [seconds_of(run) for _ in range(repeats + 2)]
    return 1e3 * statistics.median(times[2:])


def all_prompts() -> Iterator[str]:
    """Every single-object scene once, in a fixed shuffled order, then again."""
    scenes = [
        f"a {color} {thing} on a {background} background"
        for color, thing, background in itertools.product(COLORS, OBJECTS, COLORS)
        if color != background
    ]
    random.Random(0).shuffle(scenes)
    return itertools.cycle(scenes)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What was asked for."""
    size = "96 to 256, mixed" if args.mixed else f"{args.width}x{args.height}"
    guidance = f"{args.cfg:g} and none in turn" if args.mixed else f"{args.cfg:g}"
    numbers = {"requests": args.requests, "size": size, "steps": args.steps, "cfg": guidance, "repeats": args.repeats}
    return {**numbers, "compile": args.compile}


def print_header(args: argparse.Namespace, where: dict[str, Any]) -> None:
    what = settings(args)
    print_machine(where)
    print("settings: " + ", ".join(f"{name} {value}" for name, value in what.items()))
    print(f"model:    {args.model or 'embedded'}")
    print("baseline: diffusers' QwenImagePipeline, one call after another, in a process of its own")


TABLE = (
    ("throughput, prompt to picture", "throughput_ratio", "x stock"),
    ("the same, blocks not compiled", "uncompiled_throughput_ratio", "x stock"),
    ("throughput by compiling", "compiled_speedup", "x not compiled"),
    ("denoising alone", "denoise_ratio", "x stock"),
    ("decoding alone", "decode_ratio", "x stock"),
    ("pictures", "images_per_s", "per s"),
    ("pictures, stock", "stock_images_per_s", "per s"),
    ("latency, median", "p50_latency_s", "s"),
    ("latency, 95th percentile", "p95_latency_s", "s"),
    ("rows per step, mean", "mean_rows_per_step", ""),
    ("making the same batch again", "make_batch_ms", "ms"),
    ("making a batch of new rows", "make_new_batch_ms", "ms"),
    ("a decision, 1,000 wait, slowest policy", "schedule_ms", "ms"),
    ("denoising forward", "forward_ms", "ms"),
    ("its products and attention", "bare_ms", "ms"),
    ("denoising forward by compiling", "compiled_forward_ratio", "x not compiled"),
    ("forward over those", "overhead_ratio", "x"),
)


def print_table(result: dict[str, Any]) -> None:
    for label, key, unit in TABLE:
        if key not in result:
            continue
        by_rows = result[key] if isinstance(result[key], dict) else {"": result[key]}
        for rows, value in by_rows.items():
            print(f"  {label + (rows and f', {rows} rows'):<38} {value:9.3f} {unit}")
    print(f"  {'peak memory of the process':<38} {result['peak_rss_bytes'] / 2**20:9.0f} MiB")


if __name__ == "__main__":
    sys.exit(main())
