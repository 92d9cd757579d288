"""What decoding with PiD costs and saves against the VAE: time, memory, arithmetic, and likeness to true renderings.

    python scripts/bench_pid.py
    python scripts/bench_pid.py --targets 256,512 --steps 20 --early-stop 2 --scenes 100
    python scripts/bench_pid.py --full-size
    python scripts/bench_pid.py --metrics musiq,niqe,maniqa,qalign FOLDER

A picture of S x S pixels is made in two ways: (a) the main model draws at S and its VAE decodes; (b) the main model
draws at S over the decoder's scale, stops a few steps early, and PiD decodes, at once or in chunks. Both are also
measured as decoders alone, on the same latents. Beside that stands a table by formula for the released networks.

By default this runs on the embedded models, end to end: a warm-up, then the ways in turn; every time is the median,
every ratio the median of the pairs' ratios. `--full-size` builds networks of the released sizes with random weights in
bfloat16 on an accelerator, times single steps and decodes, and adds them up. The VAE decodes in one piece, which is its
default; tiling it would need less memory and change its pictures. Memory is what is alive beside the
weights: of an accelerator's allocator, or on a CPU the largest sum of live tensors seen by watching every operation.

`--metrics` does something else: it rates the pictures of a folder with no-reference metrics of the pyiqa package.
Prints tables, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage

import pid_costs as costs
import pid_formulas
from benchmarking import machine, peak_bytes, print_machine, quiet_libraries, seconds_of
from diffusers_continuous import embedded_decoder_path, embedded_model_path
from diffusers_continuous.cli.workload import rounded
from diffusers_continuous.pid import PiDDecoder
from pid_models import BenchError, Models, Settings, load_embedded, random_models
from rate_pictures import METRICS, rate_pictures

LIKENESS_SIDE = 128  # the embedded main model's own size
TIMED_STEPS = 2  # of the schedule, so that no step is at its very end
GIB, TERA = 2**30, 1e12


def main() -> int:
    parser = _parser()
    args = parser.parse_args()
    if args.metrics:
        return rate_pictures(parser, *args.metrics)
    if args.threads:
        torch.set_num_threads(args.threads)
    quiet_libraries()
    warnings.filterwarnings("ignore", message=".*outside what this decoder was trained for")
    where = machine()
    print_header(args, where)
    formulas = pid_formulas.formula_table()
    print_formulas(formulas)
    result = {"formula": formulas, **where}
    try:
        result |= run_full_size(args) if args.full_size else run_embedded(args)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(rounded(result)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--targets", type=_read_targets, metavar="S,...", help="picture sizes (default: 512; full size: 2048,4096)")
    add("--steps", type=int, help="denoising steps (default: 20; full size: 50)")
    add("--early-stop", type=int, help="steps that PiD spares the main model (default: 2; full size: 6)")
    add("--decode-steps", type=int, default=4, help="PiD's steps (default: %(default)s)")
    add("--cfg", type=float, default=4.0, help="guidance scale of the main model (default: %(default)s)")
    add("--repeats", type=int, help="measured runs of each way (default: 5; full size: 3)")
    add("--scenes", type=int, default=20, help="held-out scenes for the likeness, 0 for none (default: %(default)s)")
    add("--model", help="the main model's folder (default: the embedded one)")
    decoder = embedded_decoder_path()
    add("--decoder", type=Path, default=decoder, help="the PiDDecoder's folder (default: the embedded one)")
    add("--threads", type=int, help="torch threads (default: torch's own)")
    add("--full-size", action="store_true", help="the released sizes with random weights, on an accelerator")
    add("--metrics", nargs=2, metavar=("NAMES", "FOLDER"), help="rate a folder's pictures: " + ",".join(METRICS))
    return parser


def _read_targets(text: str) -> tuple[int, ...]:
    try:
        targets = tuple(int(part) for part in text.split(","))
    except ValueError:
        targets = ()
    if not targets or any(target < 64 or target % 64 for target in targets):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of multiples of 64, for example 256,512")
    return targets


# ---------------------------------------------------------------------------------------------------------------------
# How it is measured
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Seconds of each run, and the largest number of bytes alive beside the weights in one."""

    times_s: tuple[float, ...]
    peak_bytes: int

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.times_s)

    def times_over(self, other: Measured) -> float:
        """The median of the runs' ratios of times."""
        return statistics.median(a / b for a, b in zip(self.times_s, other.times_s, strict=True))

    def as_json(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "peak_bytes": self.peak_bytes}


def measure(ways: dict[str, Callable[[], Any]], models: Models, repeats: int) -> dict[str, Measured | None]:
    """Each way's memory, which warms it up, then their times in turn; None for what the device cannot run."""
    peaks = {name: _peak_or_none(name, run, models) for name, run in ways.items()}
    fitting = {name: peak for name, peak in peaks.items() if peak is not None}
    times: dict[str, list[float]] = {name: [] for name in fitting}
    for _ in range(repeats):
        for name in fitting:
            times[name].append(seconds_of(ways[name]))
    return {name: Measured(tuple(times[name]), fitting[name]) if name in fitting else None for name in ways}


def _peak_or_none(name: str, run: Callable[[], Any], models: Models) -> int | None:
    """Kernels say with a plain RuntimeError that a tensor has more values than they can count, as at 4096 it may."""
    try:
        return peak_bytes(run, models.device, models.weights())
    except RuntimeError as error:
        if type(error) not in (RuntimeError, torch.OutOfMemoryError):
            raise
        print(f"{name} does not run: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


# ---------------------------------------------------------------------------------------------------------------------
# The embedded models, end to end
# ---------------------------------------------------------------------------------------------------------------------

END_TO_END = {
    "vae": "(a) drawn at S, VAE",
    "pid": "(b) drawn small, PiD",
    "pid_in_chunks": "(b) drawn small, PiD in chunks",
}
DECODERS = {
    "vae_small": "VAE, small latents -> small",
    "pid": "PiD, the same latents -> S",
    "pid_in_chunks": "PiD in chunks, the same -> S",
    "vae": "VAE, latents of S -> S",
}


def run_embedded(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that is measured on real, small models."""
    settings = Settings.of(args, steps=20, early_stop=2, repeats=5)
    models = load_embedded(args)
    found = {str(target): measure_target(models, target, settings) for target in args.targets or (512,)}
    result = {"mode": "embedded", **settings.__dict__, **ratios(found), "targets": found}
    if args.scenes:
        result["likeness"] = measure_likeness(models, args, settings)
        print_likeness(result["likeness"])
    return result


def measure_target(models: Models, target: int, settings: Settings) -> dict[str, Any]:
    """Both ways to a picture of that size, and the decoders on equal latents."""
    side = target // models.scale
    small, sigma = models.draw(side, settings, settings.early_stop)
    large, _ = models.draw(target, settings, 0)
    pid = partial(models.decode_pid, small, side, sigma, settings)
    ways = {
        "vae_small": partial(models.decode_vae, small, side),
        "pid": pid,
        "pid_in_chunks": partial(pid, in_chunks=True),
        "vae": partial(models.decode_vae, large, target),
    }
    decoders = measure(ways, models, settings.repeats)
    pid = partial(models.draw_and_decode_pid, target, settings)
    ways = {
        "vae": partial(models.draw_and_decode, target, settings),
        "pid": pid,
        "pid_in_chunks": partial(pid, in_chunks=True),
    }
    whole = measure(ways, models, settings.repeats)
    print_rows(f"end to end, S = {target}, sigma {sigma:.3f}", END_TO_END, whole)
    print_rows(f"decoding alone, S = {target}, {settings.decode_steps} steps of PiD", DECODERS, decoders)
    return {"sigma": sigma, **against_vae(whole), "end_to_end": _as_json(whole), "decoders": _as_json(decoders)}


def against_vae(whole: dict[str, Measured | None]) -> dict[str, Any]:
    """Time and memory of each other way, over those of the VAE's; None where one of the two does not run."""
    found: dict[str, Any] = {"time_ratio": {}, "memory_ratio": {}}
    base = whole["vae"]
    for name, way in whole.items():
        if name != "vae":
            runs = way is not None and base is not None
            found["time_ratio"][name] = way.times_over(base) if runs else None
            found["memory_ratio"][name] = way.peak_bytes / base.peak_bytes if runs else None
    return found


def ratios(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Time and memory of (b) over (a), by target."""
    return {
        f"{prefix}{what}_ratio": {target: item[f"{what}_ratio"][way] for target, item in found.items()}
        for prefix, way in (("", "pid"), ("chunked_", "pid_in_chunks"))
        for what in ("time", "memory")
    }


def _as_json(measured: dict[str, Measured | None]) -> dict[str, Any]:
    return {name: None if item is None else item.as_json() for name, item in measured.items()}


def measure_likeness(models: Models, args: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """PSNR and SSIM against the true renderings of held-out scenes whose small renderings were encoded.

    In float32 on the CPU. SSIM is that of Wang et al., "Image quality assessment: from error visibility to structural
    similarity", 2004: an 11 x 11 Gaussian window of deviation 1.5.
    """
    import judge_pid as judge
    from tiny_scenes import caption, render

    side = LIKENESS_SIDE
    vae = AutoencoderKLQwenImage.from_pretrained(args.model or embedded_model_path(), subfolder="vae")
    decoder = PiDDecoder.from_pretrained(args.decoder)
    decoder.set_progress_bar_config(disable=True)
    scenes = judge.held_out_scenes(args.scenes, side, side, 0)
    latents = judge.encode(vae, [render(scene, side, side) for scene in scenes])
    _, sigma = models.draw(side, settings, settings.early_stop)
    pid = partial(judge.decode_with_pid, decoder, latents, [caption(scene) for scene in scenes])
    pictures = {
        "vae_bicubic": judge.decode_and_enlarge(vae, latents),
        "pid": pid(0.0, settings.decode_steps, 0),
        "pid_early": pid(sigma, settings.decode_steps, 0),
    }
    true = [render(scene, judge.SCALE * side, judge.SCALE * side) for scene in scenes]
    figures = {
        name: {"psnr_db": judge.psnr(drawn, true), "ssim": judge.ssim(drawn, true)} for name, drawn in pictures.items()
    }
    return {"scenes": len(scenes), "sigma": sigma, **figures}


# ---------------------------------------------------------------------------------------------------------------------
# The released sizes
# ---------------------------------------------------------------------------------------------------------------------


def run_full_size(args: argparse.Namespace) -> dict[str, Any]:
    """Single steps and decodes of the released sizes, added up.

    Raises:
        BenchError: without an accelerator, or with one that is too small.
    """
    settings = Settings.of(args, steps=pid_formulas.STEPS, early_stop=pid_formulas.EARLY_STOP, repeats=3)
    weights = sum(pid_formulas.count_parameters().values()) * pid_formulas.ITEMSIZE
    device = torch.accelerator.current_accelerator(check_available=True)
    needed = f"--full-size needs an accelerator with room for {weights / GIB:.0f} GiB of weights and what runs beside"
    if device is None:
        raise BenchError(f"{needed}; there is none here. The table by formula needs none")
    if device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory < 1.2 * weights:
        total = torch.cuda.get_device_properties(device).total_memory
        raise BenchError(f"{needed}; {torch.cuda.get_device_name()} has {total / GIB:.0f} GiB")
    models = random_models(device)
    return measure_full_size(models, args.targets or pid_formulas.TARGETS, settings)


def measure_full_size(models: Models, targets: Sequence[int], settings: Settings) -> dict[str, Any]:
    """Both ways to each target, added up from a denoising step at each size and the decodes."""
    found = {}
    for target in targets:
        parts = measure_parts(models, target, settings)
        whole = add_up(parts, settings)
        print_rows(f"parts, S = {target}, random weights", PARTS, parts)
        print_rows(f"added up, S = {target}, {settings.steps} steps, {settings.early_stop} spared", END_TO_END, whole)
        found[str(target)] = {**against_vae(whole), "end_to_end": _as_json(whole), "parts": _as_json(parts)}
    return {"mode": "full-size", **settings.__dict__, **ratios(found), "targets": found}


PARTS = {
    "step": "denoising step at S",
    "small_step": "denoising step, small",
    **DECODERS,
}


def measure_parts(models: Models, target: int, settings: Settings) -> dict[str, Measured | None]:
    """A denoising step, guided, at both sizes; each decode, of random latents."""
    side = target // models.scale
    sigma = 0.2
    small, large = (_random_latents(models, size) for size in (side, target))
    few = Settings(TIMED_STEPS, 0, settings.decode_steps, settings.cfg, settings.repeats)
    pid = partial(models.decode_pid, small, side, sigma, settings)
    ways = {
        "step": partial(models.draw, target, few, 0),
        "small_step": partial(models.draw, side, few, 0),
        "vae_small": partial(models.decode_vae, small, side),
        "pid": pid,
        "pid_in_chunks": partial(pid, in_chunks=True),
        "vae": partial(models.decode_vae, large, target),
    }
    parts = measure(ways, models, settings.repeats)
    return {
        name: Measured(tuple(s / TIMED_STEPS for s in part.times_s), part.peak_bytes)
        if part is not None and name.endswith("step")
        else part
        for name, part in parts.items()
    }


def _random_latents(models: Models, side: int) -> torch.Tensor:
    channels = models.pipe.transformer.config.in_channels
    tokens = costs.image_tokens(side, side)
    return torch.randn(1, tokens, channels, device=models.device, dtype=models.pipe.vae.dtype)


def add_up(parts: dict[str, Measured | None], settings: Settings) -> dict[str, Measured | None]:
    """Whole pictures from steps and decodes; without the encoding of prompts."""
    few = settings.steps - settings.early_stop
    return {
        "vae": _sum(parts["step"], settings.steps, parts["vae"]),
        "pid": _sum(parts["small_step"], few, parts["pid"]),
        "pid_in_chunks": _sum(parts["small_step"], few, parts["pid_in_chunks"]),
    }


def _sum(step: Measured | None, count: int, decode: Measured | None) -> Measured | None:
    if step is None or decode is None:
        return None
    times = tuple(count * a + b for a, b in zip(step.times_s, decode.times_s, strict=True))
    return Measured(times, max(step.peak_bytes, decode.peak_bytes))


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------


def print_header(args: argparse.Namespace, where: dict[str, Any]) -> None:
    print_machine(where)
    print("models:   " + ("released sizes, random weights" if args.full_size else f"embedded, decoder {args.decoder}"))
    print("baseline: diffusers' QwenImagePipeline at the target size, with its VAE")


def print_rows(title: str, labels: dict[str, str], measured: dict[str, Measured | None]) -> None:
    print(f"\n{title:<40} {'seconds':>10} {'peak MiB':>10}")
    for name, label in labels.items():
        item = measured[name]
        figures = "does not run here" if item is None else f"{item.seconds:10.3f} {item.peak_bytes / 2**20:10.1f}"
        print(f"  {label:<38} {figures}")


def print_formulas(table: dict[str, Any]) -> None:
    for target in map(str, pid_formulas.TARGETS):
        settings = f"{pid_formulas.STEPS} steps, {pid_formulas.EARLY_STOP} spared"
        print(f"\n{f'by formula, S = {target}, {settings}':<40} {'TFLOP':>10} {'peak GiB':>10}")
        for group, labels in (("parts", PARTS), ("end_to_end", END_TO_END)):
            for name, label in labels.items():
                item = table[target][group][name]
                print(f"  {label:<38} {item['flops'] / TERA:10.1f} {item['peak_bytes'] / GIB:10.2f}")
    weights = ", ".join(f"{name} {count / GIB:.2f}" for name, count in table["weights_bytes"].items())
    print(f"\nweights in bfloat16, GiB: {weights}")


def print_likeness(likeness: dict[str, Any]) -> None:
    labels = {
        "vae_bicubic": "VAE, enlarged by a bicubic filter",
        "pid": "PiD, finished latents",
        "pid_early": f"PiD, latents of sigma {likeness['sigma']:.3f}",
    }
    print(f"\n{'likeness to ' + str(likeness['scenes']) + ' true renderings':<40} {'PSNR dB':>10} {'SSIM':>10}")
    for name, label in labels.items():
        print(f"  {label:<38} {likeness[name]['psnr_db']:10.2f} {likeness[name]['ssim']:10.4f}")


if __name__ == "__main__":
    sys.exit(main())
