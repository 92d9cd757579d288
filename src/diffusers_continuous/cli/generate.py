"""`diffusers-continuous generate`: many prompts through one engine, each picture written the moment it is done."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import ContinuousBatchingConfig, read_config
from . import arguments
from .arguments import ArgumentParser, diffusion_size, option_type
from .pictures import INDEX_KEY, REQUEST_KEY, PictureFolder, save_picture
from .prompts import PromptRow, rows_from_file, rows_from_prompts

if TYPE_CHECKING:
    from tqdm import tqdm

    from diffusers_continuous import DiffusionEngine, RequestOutput

DESCRIPTION = """\
Draws every prompt, many at a time, and writes each picture the moment it is done.

A line of a .txt file is a prompt. A line of a .jsonl file is an object with "prompt" and any of "negative_prompt",
"size", "steps", "cfg", "seed", "num_images", "decoder" and "early_stop"; what a line leaves out comes from the options.
Pictures are PNG files that carry their prompt, seed and settings, and their paths go to standard output."""

EPILOG = """\
exit code: 0 all drawn; 1 some request failed (the others are drawn), or the model cannot be loaded, or no engine made
for it as --engine says; 2 a mistake in the call; 130 interrupted (what was finished is kept, --resume draws the
rest)."""


def main(argv: Sequence[str]) -> int:
    """Runs the command; the exit code, 0, 1 or 130. Exits with 2 at a mistake in the call, before a model is loaded."""
    parser = _parser()
    options = parser.parse_all(argv)
    try:
        rows, config = _rows(options), _engine_config(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    try:
        folder = PictureFolder(options.output)
    except OSError as error:
        parser.error(f"--output {error}")
    jobs = plan(rows, folder, _common_settings(options, config), options.resume)
    done = len(rows) - len(jobs)
    if done:
        print(f"{done} of {len(rows)} requests are in {folder.path} already", file=sys.stderr)
    return _draw_all(jobs, options, config) if jobs else 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="diffusers-continuous generate", description=DESCRIPTION, epilog=EPILOG)
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="what to draw")
    add("--prompts-file", type=Path, metavar="FILE", help="more prompts: a .txt or .jsonl file")
    add("--model", metavar="PATH_OR_REPO", help="a Qwen-Image model (default: the embedded one)")
    add(
        "--size",
        type=option_type(arguments.read_size),
        metavar="WxH",
        help="width and height of the picture, multiples of 16 (default: the model's own size)",
    )
    add(
        "--steps",
        type=option_type(arguments.read_steps),
        default=50,
        metavar="N",
        help="denoising steps (default: %(default)s)",
    )
    add(
        "--cfg",
        type=option_type(arguments.read_cfg),
        default=4.0,
        metavar="S",
        help="guidance scale; 1 or less draws without guidance, in half the time (default: %(default)s)",
    )
    add(
        "--negative-prompt",
        metavar="TEXT",
        help="what guidance leads away from (default: a single space, as Qwen-Image is used)",
    )
    add(
        "--seed",
        type=option_type(arguments.read_seed),
        metavar="N",
        help="seed of a request's first picture, the next gets N+1 (default: a new one each; the file tells it)",
    )
    add(
        "--num-images",
        type=option_type(arguments.read_num_images),
        default=1,
        metavar="N",
        help="pictures per prompt (default: %(default)s)",
    )
    add(
        "--decoder",
        type=option_type(arguments.read_decoder),
        metavar="NAME",
        help="vae, or pid: the Pixel Diffusion Decoder, whose pictures are 4 times larger than what is denoised; "
        "--size is the picture's (default: the model's own)",
    )
    add(
        "--decoder-model",
        metavar="PATH_OR_REPO",
        help="the PiDDecoder of --decoder pid (default: the model's own, or the embedded one for the embedded model)",
    )
    add(
        "--early-stop",
        type=option_type(arguments.read_early_stop),
        default=0,
        metavar="K",
        help="leave the last K denoising steps to --decoder pid (default: %(default)s)",
    )
    add(
        "--output",
        type=Path,
        default=Path("outputs"),
        metavar="DIR",
        help="folder for the pictures; what is in it stays (default: %(default)s)",
    )
    add(
        "--max-batch",
        type=option_type(arguments.read_max_batch),
        metavar="N",
        help="most pictures in one forward (default: the engine's)",
    )
    arguments.add_engine_option(parser)
    add("--resume", action="store_true", help="skip requests whose pictures are in the folder already")
    return parser


def _rows(options: argparse.Namespace) -> list[PromptRow]:
    keys = ("negative_prompt", "size", "steps", "cfg", "seed", "num_images", "decoder", "early_stop")
    defaults = {key: getattr(options, key) for key in keys}
    rows = rows_from_prompts(options.prompts, defaults)
    if options.prompts_file is not None:
        rows += rows_from_file(options.prompts_file, defaults)
    if not rows:
        raise ValueError("nothing to draw: give a prompt or --prompts-file")
    return rows


def _engine_config(options: argparse.Namespace) -> ContinuousBatchingConfig:
    """All pictures soon, rather than most of them in time, unless the options say otherwise."""
    own = {"max_requests_per_batch": ("--max-batch", options.max_batch)}
    return read_config("--engine", options.engine, own, scheduler_type="fcfs")


@dataclass(frozen=True)
class Job:
    """A row, the key that its pictures carry, where they go, and the settings that all rows have alike."""

    row: PromptRow
    key: str
    paths: list[Path]
    common_settings: dict[str, Any]

    def metadata(self, index: int, seed: int | None, size: tuple[int, int]) -> dict[str, str]:
        """The texts of picture `index`; the size is the picture's, the seed is the one it was drawn with."""
        settings = self.row.settings() | self.common_settings | {"size": "{}x{}".format(*size)}
        return {
            "prompt": self.row.prompt,
            "negative_prompt": self.row.guidance_prompt or "",
            "seed": str(seed),
            "settings": json.dumps(settings, ensure_ascii=False),
            REQUEST_KEY: self.key,
            INDEX_KEY: str(index),
        }


def _common_settings(options: argparse.Namespace, config: ContinuousBatchingConfig) -> dict[str, Any]:
    """What changes every row's pictures: the model, and the engine's step cache where it has one."""
    model = _model_name(options.model)
    if options.decoder_model is not None:
        model += f" with {_model_name(options.decoder_model)}"
    cache = {"step_cache_threshold": config.step_cache_threshold} if config.step_cache_threshold else {}
    return {"model": model} | cache


def plan(rows: Iterable[PromptRow], folder: PictureFolder, common_settings: dict[str, Any], resume: bool) -> list[Job]:
    """A job for each row still to be drawn; its names overwrite nothing but what it left unfinished itself."""
    found = folder.pictures_by_request() if resume else {}
    repeats: Counter[str] = Counter()
    jobs = []
    for row in rows:
        settings = json.dumps(row.settings() | common_settings, sort_keys=True)
        repeats[settings] += 1  # the same row twice is two requests
        key = hashlib.sha256(f"{settings} #{repeats[settings]}".encode()).hexdigest()[:16]
        pictures = found.get(key, {})
        if len(pictures) < row.num_images:
            stem = next((_stem(path, row.num_images) for path in pictures.values()), None)
            paths = folder.paths(stem or folder.next_stem(row.prompt), row.num_images)
            jobs.append(Job(row, key, paths, common_settings))
    return jobs


def _stem(path: Path, num_images: int) -> str:
    return path.stem if num_images == 1 else path.stem.rpartition("-")[0]


def _model_name(model: str | None) -> str:
    if model is None:
        return "embedded"
    return str(Path(model).resolve()) if Path(model).exists() else model


def _draw_all(jobs: list[Job], options: argparse.Namespace, config: ContinuousBatchingConfig) -> int:
    from tqdm import tqdm

    from diffusers_continuous import ContinuousBatchingError, embedded_decoder_path

    from ..loading import EMBEDDED_MODEL, load_pipeline

    print(f"loading {options.model or EMBEDDED_MODEL}", file=sys.stderr)
    wants_pid = any(job.row.decoder == "pid" for job in jobs)
    decoder = options.decoder_model
    if decoder is None and options.model is None and wants_pid:
        decoder = str(embedded_decoder_path())
    try:
        pipe = load_pipeline(options.model, decoder)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if wants_pid and pipe.decoder is None:
        print(f"error: {options.model} has no PiDDecoder; name one with --decoder-model", file=sys.stderr)
        return 1
    total = sum((job.row.steps - job.row.early_stop) * job.row.num_images for job in jobs)
    interval = 0.1 if sys.stderr.isatty() else 5.0
    with ExitStack() as stack:
        try:
            engine = stack.enter_context(pipe.continuous_batching_context_manager(config))
        except ContinuousBatchingError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        bar = stack.enter_context(
            tqdm(
                total=total,
                unit="step",
                desc=f"{len(jobs)} request{'s' * (len(jobs) != 1)}",
                mininterval=interval,
                file=sys.stderr,
            )
        )
        run = GenerateRun(engine, bar, 1 if pipe.decoder is None else pipe.decoder.transformer.config.sr_scale)
        interrupted = run.draw(jobs, num_callers=2 * config.max_requests_per_batch)
    return run.report(jobs, interrupted)


@dataclass
class GenerateRun:
    """Submits jobs from a few threads, so that thousands of prompts do not all hold their noise in memory at once.

    `scale` is how many times the pipeline's PiDDecoder enlarges, 1 without one.
    """

    engine: DiffusionEngine
    bar: tqdm[Any]
    scale: int = 1
    failures: list[tuple[Job, str]] = field(default_factory=list)
    num_drawn: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _active: set[str] = field(default_factory=set)
    _is_stopping: bool = False

    def draw(self, jobs: Sequence[Job], num_callers: int) -> bool:
        """Draws all jobs; true when Ctrl-C cut it short, which cancels what is not finished."""
        with ThreadPoolExecutor(min(num_callers, len(jobs)), thread_name_prefix="generate") as callers:
            pending = [callers.submit(self._draw_or_note, job) for job in jobs]
            try:
                wait(pending)
            except KeyboardInterrupt:
                self._stop()
                callers.shutdown(wait=True, cancel_futures=True)
                return True
        return False

    def report(self, jobs: Sequence[Job], interrupted: bool) -> int:
        """Tells what failed and what is left; the exit code."""
        for job, message in self.failures:
            print(f"failed: {job.row.where} ({_shorten(job.row.prompt)}): {message}", file=sys.stderr)
        if interrupted:
            done = f"{self.num_drawn} of {len(jobs)} requests are done"
            print(f"interrupted: {done}; the same call with --resume draws the rest", file=sys.stderr)
            return 130
        if self.failures:
            print(f"{len(self.failures)} of {len(jobs)} requests failed, {self.num_drawn} are done", file=sys.stderr)
        return 1 if self.failures else 0

    def _stop(self) -> None:
        with self._lock:
            self._is_stopping = True
            active = list(self._active)
        for request_id in active:
            self.engine.cancel_request(request_id)

    def _draw_or_note(self, job: Job) -> None:
        try:
            self._draw(job)
        except Exception as error:  # one request's failure is told at the end and leaves the others alone
            with self._lock:
                self.failures.append((job, f"{type(error).__name__}: {error}"))

    def _draw(self, job: Job) -> None:
        request_id = self._submit(job.row)
        if request_id is None:
            return
        try:
            output = self._follow(request_id, job.row.num_images)
        finally:
            with self._lock:
                self._active.discard(request_id)
        if output.images is not None:
            self._save(job, output)
        elif output.error is not None and not self._is_stopping:
            raise output.error

    def _submit(self, row: PromptRow) -> str | None:
        """The id of the accepted request, or None when no more are wanted."""
        size = {}
        if row.size is not None:
            size = dict(zip(("width", "height"), diffusion_size(row.size, self._scale_of(row)), strict=True))
        with self._lock:
            if self._is_stopping:
                return None
            request_id = self.engine.add_request(
                prompt=row.prompt,
                negative_prompt=row.guidance_prompt,
                true_cfg_scale=row.cfg,
                num_inference_steps=row.steps,
                num_images_per_prompt=row.num_images,
                seed=row.seed,
                decoder=row.decoder,
                early_stop_steps=row.early_stop,
                streaming=True,
                **size,
            )
            self._active.add(request_id)
            return request_id

    def _scale_of(self, row: PromptRow) -> int:
        return 1 if row.decoder == "vae" else self.scale

    def _follow(self, request_id: str, num_images: int) -> RequestOutput:
        """The last output of a request, moving the bar on the way."""
        step = 0
        for output in self.engine.request_id_iter(request_id):
            self.bar.update((output.step - step) * num_images)
            step = output.step
            if output.finished:
                return output
        raise RuntimeError(f"request {request_id} ended without a result")

    def _save(self, job: Job, output: RequestOutput) -> None:
        for index, (path, picture, seed) in enumerate(zip(job.paths, output.images, output.seeds, strict=True)):
            save_picture(picture, path, job.metadata(index, seed, picture.size))
        with self._lock:
            self.num_drawn += 1
            self.bar.write("\n".join(str(path) for path in job.paths), file=sys.stdout)


def _shorten(prompt: str) -> str:
    return prompt if len(prompt) <= 60 else prompt[:57] + "..."
