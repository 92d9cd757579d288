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
import gc
import importlib.util
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)

import pid_costs as costs
from bench_offline import machine, rounded
from diffusers_continuous import embedded_model_path
from diffusers_continuous.pid import PiDDecoder, PiDScheduler, PiDTransformer2DModel

ROOT = Path(__file__).parents[1]
DEFAULT_DECODER = Path(embedded_model_path()).with_name("tiny-pid")
PROMPT = "a red star to the left of a white ring on a blue background"
METRICS = ("maniqa", "musiq", "niqe", "qalign")
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
NUM_CHUNKS = 8  # in the rows called "in chunks"
LIKENESS_SIDE = 128  # the embedded main model's own size
TIMED_STEPS = 2  # of the schedule, so that no step is at its very end

# The released networks as they are used.
FULL_TARGETS = (2048, 4096)
FULL_STEPS, FULL_EARLY_STOP, FULL_DECODE_STEPS = 50, 6, 4
FULL_TEXT_TOKENS, FULL_CAPTION_TOKENS = 64, 300
FULL_ENCODED_TOKENS = 530  # what Gemma reads for a caption: its instruction, about 230, and the 300
ITEMSIZE = 2  # bytes of a bfloat16
GIB, TERA = 2**30, 1e12


def main() -> int:
    parser = _parser()
    args = parser.parse_args()
    if args.metrics:
        return rate_pictures(parser, *args.metrics)
    if args.threads:
        torch.set_num_threads(args.threads)
    _quiet()
    where = machine()
    print_header(args, where)
    formulas = formula_table()
    print_formulas(formulas)
    result = {"formula": formulas, **where}
    try:
        result |= run_full_size(args) if args.full_size else run_embedded(args)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(rounded(result)))
    return 0


class BenchError(RuntimeError):
    """What was asked for cannot be measured here; the text says what is missing."""


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
    add("--decoder", type=Path, default=DEFAULT_DECODER, help="the PiDDecoder's folder (default: the embedded one)")
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


def _quiet() -> None:
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*outside what this decoder was trained for")


# ---------------------------------------------------------------------------------------------------------------------
# What runs
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """How pictures are drawn."""

    steps: int
    early_stop: int
    decode_steps: int
    cfg: float
    repeats: int

    @staticmethod
    def of(args: argparse.Namespace, steps: int, early_stop: int, repeats: int) -> Settings:
        """What was asked for, else these defaults.

        Raises:
            BenchError: if nothing would be drawn or measured.
        """
        steps = steps if args.steps is None else args.steps
        early_stop = early_stop if args.early_stop is None else args.early_stop
        repeats = repeats if args.repeats is None else args.repeats
        if not 0 <= early_stop < steps:
            raise BenchError(f"--early-stop {early_stop} must leave at least one of --steps {steps}")
        if repeats < 3:
            raise BenchError(f"--repeats {repeats} is too few for a median; at least 3")
        return Settings(steps, early_stop, args.decode_steps, args.cfg, repeats)


@dataclass(frozen=True)
class Models:
    """The stock pipeline, a PiDDecoder, and the prompt in the form that each takes."""

    pipe: QwenImagePipeline
    decoder: PiDDecoder
    prompt: dict[str, Any]
    caption: dict[str, Any]

    @property
    def device(self) -> torch.device:
        return self.pipe.device

    @property
    def scale(self) -> int:
        """How many times larger than the VAE's PiD's pictures are."""
        return int(self.decoder.transformer.config.sr_scale)

    def weights(self) -> list[torch.Tensor]:
        """Every parameter and buffer."""
        modules = [*self.pipe.components.values(), *self.decoder.components.values()]
        modules = [module for module in modules if isinstance(module, torch.nn.Module)]
        return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]

    def draw(self, side: int, settings: Settings, early_stop: int) -> tuple[torch.Tensor, float]:
        """Packed latents of a square picture some steps before the end, and their noise level."""
        done = settings.steps - early_stop

        def stop(pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            pipe._interrupt = index + 1 >= done
            return {}

        latents = self._call(side, settings, output_type="latent", callback_on_step_end=stop)
        return latents, float(self.pipe.scheduler.sigmas[done])

    def draw_and_decode(self, side: int, settings: Settings) -> Any:
        """The main model's own picture."""
        return self._call(side, settings)

    def _call(self, side: int, settings: Settings, **options: Any) -> Any:
        generator = torch.Generator().manual_seed(0)
        return self.pipe(
            **self.prompt,
            true_cfg_scale=settings.cfg,
            height=side,
            width=side,
            num_inference_steps=settings.steps,
            generator=generator,
            **options,
        ).images

    @torch.no_grad()
    def decode_vae(self, latents: torch.Tensor, side: int) -> Any:
        """Packed latents to a picture: the lines of the stock pipeline's `__call__` after its last step."""
        vae = self.pipe.vae
        latents = self.pipe._unpack_latents(latents, side, side, self.pipe.vae_scale_factor).to(vae.dtype)
        shape = (1, vae.config.z_dim, 1, 1, 1)
        mean = torch.tensor(vae.config.latents_mean).view(shape).to(latents.device, latents.dtype)
        inverse_std = 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(latents.device, latents.dtype)
        images = vae.decode(latents / inverse_std + mean, return_dict=False)[0][:, :, 0]
        return self.pipe.image_processor.postprocess(images)

    def decode_pid(
        self, latents: torch.Tensor, side: int, sigma: float, settings: Settings, in_chunks: bool = False
    ) -> Any:
        """Packed latents of a `side` x `side` picture to one that is larger by the scale."""
        return self.decoder(
            latents.float(),
            **self.caption,
            sigma=sigma,
            height=side,
            width=side,
            num_inference_steps=settings.decode_steps,
            generator=torch.Generator(self.device).manual_seed(1),  # noise of this size takes a CPU long
            max_bytes=self.chunk_bytes(side * self.scale) if in_chunks else None,
        ).images

    def chunk_bytes(self, target: int) -> int:
        """What a step needs when the pixel stage is done in NUM_CHUNKS parts."""
        net = self.decoder.transformer
        chunk = max(1, (target // net.config.patch_size) ** 2 // NUM_CHUNKS)
        return net.estimate_decode_bytes(target, target, 1, net.dtype, chunk)

    def draw_and_decode_pid(self, target: int, settings: Settings, in_chunks: bool = False) -> Any:
        """A picture of the target size by way of a small latent."""
        side = target // self.scale
        latents, sigma = self.draw(side, settings, settings.early_stop)
        return self.decode_pid(latents, side, sigma, settings, in_chunks)


def load_embedded(args: argparse.Namespace) -> Models:
    """The models of the folders, on the best device here.

    Raises:
        BenchError: if there is no decoder.
    """
    if not (args.decoder / "model_index.json").is_file():
        raise BenchError(f"no PiDDecoder in {args.decoder}: name a folder with --decoder, or train one")
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    pipe = QwenImagePipeline.from_pretrained(args.model or embedded_model_path(), dtype=dtype).to(device)
    decoder = PiDDecoder.from_pretrained(args.decoder, dtype=dtype).to(device)
    for each in (pipe, decoder):
        each.set_progress_bar_config(disable=True)
    return Models(pipe, decoder, {"prompt": PROMPT, "negative_prompt": " "}, {"prompt": PROMPT})


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
            times[name].append(_seconds(ways[name]))
    return {name: Measured(tuple(times[name]), fitting[name]) if name in fitting else None for name in ways}


def _seconds(run: Callable[[], Any]) -> float:
    gc.collect()
    start = time.perf_counter()
    run()
    _wait_for_device()
    return time.perf_counter() - start


def _wait_for_device() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _peak_or_none(name: str, run: Callable[[], Any], models: Models) -> int | None:
    """Kernels say with a plain RuntimeError that a tensor has more values than they can count, as at 4096 it may."""
    try:
        return peak_bytes(run, models)
    except RuntimeError as error:
        if type(error) not in (RuntimeError, torch.OutOfMemoryError):
            raise
        print(f"{name} does not run: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def peak_bytes(run: Callable[[], Any], models: Models) -> int:
    """The most bytes alive beside the weights while it runs."""
    gc.collect()
    if models.device.type == "cpu":
        with _watcher()(ignored=models.weights()) as watch:
            run()
        return int(watch.peak)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    run()
    _wait_for_device()
    return int(torch.accelerator.max_memory_allocated() - before)


def _watcher() -> Any:
    """The class with which the tests, too, add up live tensors."""
    spec = importlib.util.spec_from_file_location("pid_memory", ROOT / "tests" / "pid_memory.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PeakBytes


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
    settings = Settings.of(args, steps=FULL_STEPS, early_stop=FULL_EARLY_STOP, repeats=3)
    weights = sum(count_parameters().values()) * ITEMSIZE
    device = torch.accelerator.current_accelerator(check_available=True)
    needed = f"--full-size needs an accelerator with room for {weights / GIB:.0f} GiB of weights and what runs beside"
    if device is None:
        raise BenchError(f"{needed}; there is none here. The table by formula needs none")
    if device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory < 1.2 * weights:
        total = torch.cuda.get_device_properties(device).total_memory
        raise BenchError(f"{needed}; {torch.cuda.get_device_name()} has {total / GIB:.0f} GiB")
    models = random_models(device)
    return measure_full_size(models, args.targets or FULL_TARGETS, settings)


def random_models(
    device: torch.device,
    transformer: dict[str, Any] | None = None,
    vae: dict[str, Any] | None = None,
    pid: dict[str, Any] | None = None,
) -> Models:
    """Networks with random weights in bfloat16, and random prompts; of the released sizes unless options are given."""
    with default_dtype(torch.bfloat16), torch.device(device):
        main_model = QwenImageTransformer2DModel(**{"num_layers": 60, **(transformer or {})}).eval()
        vae_model = AutoencoderKLQwenImage(**(vae or {})).eval()
        pid_model = PiDTransformer2DModel(**(pid or {})).eval()
        texts = [torch.randn(1, FULL_TEXT_TOKENS, main_model.config.joint_attention_dim) for _ in range(2)]
        mask = torch.ones(1, FULL_TEXT_TOKENS, dtype=torch.long)
    caption = torch.randn(1, pid_model.config.txt_max_length, pid_model.config.txt_embed_dim, device=device)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(embedded_model_path(), subfolder="scheduler")
    pipe = QwenImagePipeline(scheduler, vae_model, None, None, main_model)
    decoder = PiDDecoder(pid_model, PiDScheduler())
    for each in (pipe, decoder):
        each.set_progress_bar_config(disable=True)
    prompt = {"prompt_embeds": texts[0], "prompt_embeds_mask": mask}
    prompt |= {"negative_prompt_embeds": texts[1], "negative_prompt_embeds_mask": mask}
    return Models(pipe, decoder, prompt, {"prompt_embeds": caption})


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New weights are made in that dtype, so that no float32 copy of them must fit."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


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
# By formula
# ---------------------------------------------------------------------------------------------------------------------


@cache
def full_size_networks() -> dict[str, torch.nn.Module]:
    """The released networks without weights: a configuration and a count of parameters each."""
    with torch.device("meta"):
        return {
            "transformer": QwenImageTransformer2DModel(num_layers=60),
            "vae_decoder": AutoencoderKLQwenImage(),
            "pid": PiDTransformer2DModel(),
        }


def count_parameters() -> dict[str, int]:
    """Parameters of each released network; of the VAE, its decoder's."""
    networks = full_size_networks()
    networks = {**networks, "vae_decoder": networks["vae_decoder"].decoder}
    return {name: sum(parameter.numel() for parameter in net.parameters()) for name, net in networks.items()}


def formula_table() -> dict[str, Any]:
    """Arithmetic and bytes of the released networks, by target size."""
    config = {name: net.config for name, net in full_size_networks().items()}
    weights = {name: count * ITEMSIZE for name, count in count_parameters().items()}
    table: dict[str, Any] = {str(target): _formulas(config, target) for target in FULL_TARGETS}
    return {**table, "weights_bytes": weights}


def _formulas(config: dict[str, Any], target: int) -> dict[str, Any]:
    pid = config["pid"]
    small = target // pid.sr_scale
    step, small_step = (
        2 * costs.transformer_flops(config["transformer"], costs.image_tokens(side, side), FULL_TEXT_TOKENS)
        for side in (target, small)
    )
    vae, decode, chunked = costs.vae_flops(config["vae_decoder"], target, target), *_pid_flops(pid, target)
    bytes_ = _formula_bytes(config, target, small)
    caption, few = costs.caption_flops(FULL_ENCODED_TOKENS), FULL_STEPS - FULL_EARLY_STOP
    whole = {
        "vae": {"flops": FULL_STEPS * step + vae, "peak_bytes": max(bytes_["step"], bytes_["vae"])},
        "pid": {"flops": few * small_step + caption + decode, "peak_bytes": max(bytes_["small_step"], bytes_["pid"])},
        "pid_in_chunks": {
            "flops": few * small_step + caption + chunked,
            "peak_bytes": max(bytes_["small_step"], bytes_["pid_in_chunks"]),
        },
    }
    flops = {"step": step, "small_step": small_step, "pid": decode, "pid_in_chunks": chunked, "vae": vae}
    flops["vae_small"] = costs.vae_flops(config["vae_decoder"], small, small)
    return {
        "end_to_end": whole,
        "parts": {name: {"flops": flops[name], "peak_bytes": bytes_[name]} for name in PARTS},
        "flops_ratio": whole["pid"]["flops"] / whole["vae"]["flops"],
        "memory_ratio": whole["pid"]["peak_bytes"] / whole["vae"]["peak_bytes"],
        "chunked_memory_ratio": whole["pid_in_chunks"]["peak_bytes"] / whole["vae"]["peak_bytes"],
    }


def _pid_flops(pid: Any, target: int) -> tuple[int, int]:
    """A decode at once, and in chunks."""
    patches = (target // pid.patch_size) ** 2
    adapter, heads = costs.pid_adapter_flops(pid, patches), costs.pid_heads_flops(pid, patches)
    step, chunked = (costs.pid_step_flops(pid, patches, FULL_CAPTION_TOKENS, in_chunks) for in_chunks in (False, True))
    return adapter + heads + FULL_DECODE_STEPS * step, adapter + FULL_DECODE_STEPS * chunked


def _formula_bytes(config: dict[str, Any], target: int, small: int) -> dict[str, int]:
    from diffusers_continuous.pid.memory import estimate_decode_bytes

    pid = config["pid"]
    chunk = (target // pid.patch_size) ** 2 // NUM_CHUNKS
    step = partial(costs.transformer_bytes, config["transformer"], text_tokens=FULL_TEXT_TOKENS, itemsize=ITEMSIZE)
    return {
        "step": step(costs.image_tokens(target, target)),
        "small_step": step(costs.image_tokens(small, small)),
        "vae": costs.vae_bytes(config["vae_decoder"], target, target, ITEMSIZE),
        "vae_small": costs.vae_bytes(config["vae_decoder"], small, small, ITEMSIZE),
        "pid": estimate_decode_bytes(pid, target, target, 1, ITEMSIZE, None),
        "pid_in_chunks": estimate_decode_bytes(pid, target, target, 1, ITEMSIZE, chunk),
    }


# ---------------------------------------------------------------------------------------------------------------------
# No-reference metrics
# ---------------------------------------------------------------------------------------------------------------------


def rate_pictures(parser: argparse.ArgumentParser, names: str, folder: str) -> int:
    """Rates the pictures of a folder; the exit code."""
    metrics = names.split(",")
    unknown = [name for name in metrics if name not in METRICS]
    if unknown:
        parser.error(f"metric {unknown[0]!r} is not known; choose from {', '.join(METRICS)}")
    pictures = sorted(path for path in Path(folder).glob("*") if path.suffix.lower() in PICTURE_SUFFIXES)
    if not pictures:
        parser.error(f"{folder} has no pictures ({', '.join(PICTURE_SUFFIXES)})")
    if importlib.util.find_spec("pyiqa") is None:
        parser.error("--metrics needs the pyiqa package: pip install pyiqa (it downloads each metric's weights)")
    import pyiqa

    result = {name: _rate(pyiqa, name, pictures) for name in metrics}
    for name, rated in result.items():
        better = "lower" if rated.get("lower_is_better") else "higher"
        what = rated["error"] if "error" in rated else f"{rated['mean']:.4f} on average; {better} is better"
        print(f"  {name:<8} {what}")
    print(json.dumps(rounded({"mode": "metrics", "folder": folder, "pictures": len(pictures), "metrics": result})))
    return 0 if all("error" not in rated for rated in result.values()) else 1


def _rate(pyiqa: Any, name: str, pictures: Sequence[Path]) -> dict[str, Any]:
    """One metric of every picture, or why it cannot be had (its weights are downloaded when first used)."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        metric = pyiqa.create_metric(name, device=device)
    except (OSError, ImportError) as error:
        return {"error": f"not available: {type(error).__name__}: {error}"}
    with torch.no_grad():
        scores = {path.name: float(metric(str(path))) for path in pictures}
    return {"mean": statistics.mean(scores.values()), "lower_is_better": bool(metric.lower_better), "scores": scores}


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------


def print_header(args: argparse.Namespace, where: dict[str, Any]) -> None:
    print(f"machine:  {where['device']}, {where['cpu_cores']} cores, {where['torch_threads']} torch threads")
    print(f"load:     {where['load_average']:.1f} before the start; 0 would be a machine of our own")
    print(
        "versions: " + ", ".join(f"{name} {where[name]}" for name in ("python", "torch", "diffusers", "transformers"))
    )
    print("models:   " + ("released sizes, random weights" if args.full_size else f"embedded, decoder {args.decoder}"))
    print("baseline: diffusers' QwenImagePipeline at the target size, with its VAE")


def print_rows(title: str, labels: dict[str, str], measured: dict[str, Measured | None]) -> None:
    print(f"\n{title:<40} {'seconds':>10} {'peak MiB':>10}")
    for name, label in labels.items():
        item = measured[name]
        figures = "does not run here" if item is None else f"{item.seconds:10.3f} {item.peak_bytes / 2**20:10.1f}"
        print(f"  {label:<38} {figures}")


def print_formulas(table: dict[str, Any]) -> None:
    for target in map(str, FULL_TARGETS):
        settings = f"{FULL_STEPS} steps, {FULL_EARLY_STOP} spared"
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
