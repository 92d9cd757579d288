"""`diffusers-continuous demo`: eight callers, one pipeline, and the stock pipeline beside it.

Eight threads call `pipe.stream` at staggered times with different prompts, sizes, step counts and guidance. The stock
pipeline then draws the same eight one after another in the same process, and every picture is compared. At last a few
latents are decoded twice, by the VAE and by PiD.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from .arguments import ArgumentParser
from .pictures import make_folder, save_picture
from .stock_call import StockCall
from .timeline import Lane, draw_contact_sheet, draw_timeline

if TYPE_CHECKING:
    from diffusers import QwenImagePipeline
    from PIL.Image import Image as Picture

    from diffusers_continuous import ContinuousBatchingPipeline, DiffusionEngine, RequestOutput, StepRecord

DESCRIPTION = """\
Eight callers at staggered times, with different prompts, sizes, step counts and guidance, on the embedded model. Writes
their pictures, contact-sheet.png, timeline.png and decoders.png (the VAE and PiD side by side), and tells the speed
against the stock pipeline called one after another."""

DECODED = (
    "a red star on a blue background",
    "a large white ring on a green background",
    "a yellow heart to the left of a purple cross on a black background",
)
DECODED_STEPS = 20
EARLY_STOP_STEPS = 2


@dataclass(frozen=True)
class Caller(StockCall):
    """One caller of the demo: what it wants, and how many seconds after the start it comes."""

    delay_s: float = field(kw_only=True)

    @property
    def settings(self) -> str:
        """Size, steps and guidance, in words for the timeline."""
        guidance = f"CFG {self.cfg:g}" if self.is_guided else "no CFG"
        return f"{self.width}x{self.height}, {self.steps} steps, {guidance}"


CALLERS = (
    Caller("a red star on a blue background", 128, 128, 30, 4.0, 0, delay_s=0.00),
    Caller("a large green circle on a white background", 96, 96, 12, 4.0, 1, delay_s=0.05),
    Caller("a yellow heart to the left of a purple square on a black background", 192, 128, 24, 4.0, 2, delay_s=0.10),
    Caller("a large white ring on a green background", 128, 192, 20, 1.0, 3, delay_s=0.15),
    Caller("an orange triangle on a purple background", 160, 160, 20, 3.0, 4, delay_s=0.20),
    Caller("a large yellow cross on a red background", 192, 192, 16, 2.0, 5, delay_s=0.30),
    Caller("a large blue diamond on a yellow background", 96, 128, 20, 4.0, 6, delay_s=0.40),
    Caller("a black square to the left of an orange circle on a green background", 128, 96, 28, 5.0, 7, delay_s=0.50),
)


def main(argv: Sequence[str]) -> int:
    """Draw for eight callers at once and write their pictures and a timeline; the exit code."""
    parser = ArgumentParser(prog="diffusers-continuous demo", description=DESCRIPTION)
    parser.add_argument("--output", type=Path, default=Path("demo-output"), metavar="DIR", help="default: %(default)s")
    folder: Path = parser.parse_all(argv).output
    try:
        make_folder(folder)
    except OSError as error:
        parser.error(f"--output {error}")

    from ..loading import EMBEDDED_MODEL, load_decoder, load_pipeline, load_stock_pipeline

    print(f"loading {EMBEDDED_MODEL}")
    pipe, stock = load_pipeline(None), load_stock_pipeline(None)
    with pipe.continuous_batching_context_manager() as engine:
        warm_up(pipe, stock)
        together = draw_together(pipe, engine)
    one_by_one = draw_one_by_one(stock)
    pipe.decoder = load_decoder(None)
    save_picture(draw_with_both_decoders(pipe), folder / "decoders.png", {})
    write_pictures(folder, together)
    draw_timeline(together.lanes, together.records, folder / "timeline.png", "Eight callers, one engine")
    report(folder, together, one_by_one)
    return 0


@dataclass(frozen=True)
class Together:
    """What the callers got, in their order, and how long it took from the first call to the last picture."""

    outputs: list[RequestOutput]
    records: list[StepRecord]
    wall_s: float

    @property
    def pictures(self) -> list[Picture]:
        """One for each caller."""
        return [output.images[0] for output in self.outputs]

    @property
    def lanes(self) -> list[Lane]:
        """The timeline's rows: from each caller's arrival to its picture, by the engine's clock."""
        return [_lane(caller, output) for caller, output in zip(CALLERS, self.outputs, strict=True)]


def _lane(caller: Caller, output: RequestOutput) -> Lane:
    times = output.metrics
    assert times.finish_s is not None  # it has its picture
    return Lane(output.request_id, caller.settings, caller.is_guided, times.arrival_s, times.finish_s)


@dataclass(frozen=True)
class OneByOne:
    """The same requests through the stock pipeline."""

    pictures: list[Picture]
    wall_s: float


def warm_up(pipe: ContinuousBatchingPipeline, stock: QwenImagePipeline) -> None:
    """Both draw one small picture, so that neither pays a first call's costs on the clock."""
    for either in (pipe, stock):
        either("a white ring on a black background", negative_prompt=" ", height=128, width=128, num_inference_steps=2)


def draw_together(pipe: ContinuousBatchingPipeline, engine: DiffusionEngine) -> Together:
    """Every caller in its own thread, each at its own time."""
    print(f"{len(CALLERS)} callers, each in its own thread; pictures as they arrive:")
    start = engine.clock()
    with ThreadPoolExecutor(len(CALLERS), thread_name_prefix="caller") as threads:
        outputs = list(threads.map(lambda caller: _call(pipe, caller, start), CALLERS))
    wall_s = engine.clock() - start
    return Together(outputs, [step for step in engine.stats().recent_steps if step.start_s >= start], wall_s)


def _call(pipe: ContinuousBatchingPipeline, caller: Caller, start: float) -> RequestOutput:
    time.sleep(max(0.0, start + caller.delay_s - time.monotonic()))
    for output in pipe.stream(**caller.arguments()):
        if output.error is not None:
            raise output.error
        if output.finished:
            print(f"  {time.monotonic() - start:5.2f} s  {caller.settings:<26} {caller.prompt}")
            return output
    raise RuntimeError("the stream ended without a result")


def draw_one_by_one(stock: QwenImagePipeline) -> OneByOne:
    """The same requests, each as soon as the one before is done."""
    start = time.monotonic()
    pictures = [stock(**caller.arguments()).images[0] for caller in CALLERS]
    return OneByOne(pictures, time.monotonic() - start)


def write_pictures(folder: Path, together: Together) -> None:
    """The pictures, each with what made it, and the contact sheet."""
    for number, (caller, picture) in enumerate(zip(CALLERS, together.pictures, strict=True), 1):
        text = {"prompt": caller.prompt, "seed": str(caller.seed), "settings": caller.settings}
        save_picture(picture, folder / f"picture-{number}.png", text)
    labels = [f"{caller.prompt}\n{caller.settings}" for caller in CALLERS]
    save_picture(draw_contact_sheet(together.pictures, labels), folder / "contact-sheet.png", {})


def draw_with_both_decoders(pipe: ContinuousBatchingPipeline) -> Picture:
    """A sheet with a row per prompt: the VAE's picture enlarged, PiD's of the same latents, PiD's of earlier ones."""
    ways: list[tuple[str, dict[str, Any]]] = [
        ("VAE, enlarged", {"decoder": "vae"}),
        ("PiD", {"decoder": "pid"}),
        (f"PiD, {EARLY_STOP_STEPS} steps earlier", {"decoder": "pid", "early_stop_steps": EARLY_STOP_STEPS}),
    ]
    inputs = [
        {"prompt": prompt, "negative_prompt": " ", "num_inference_steps": DECODED_STEPS, "seed": 0, **way}
        for prompt in DECODED
        for _, way in ways
    ]
    outputs = list(pipe.generate_batch(inputs).values())
    for output in outputs:
        if output.error is not None:
            raise output.error
    pictures = [output.images[0] for output in outputs]
    size = max(picture.size for picture in pictures)
    labels = [f"{name}\n{prompt}" for prompt in DECODED for name, _ in ways]
    return draw_contact_sheet(
        [picture.resize(size, Image.Resampling.BICUBIC) for picture in pictures], labels, len(ways)
    )


def report(folder: Path, together: Together, one_by_one: OneByOne) -> None:
    """Prints the speed of both, how far the pictures are from stock's, and where the files are."""
    count = len(CALLERS)
    ours, stock = count / together.wall_s, count / one_by_one.wall_s
    print(f"together    {together.wall_s:6.2f} s  {ours:5.2f} images/s  (the callers' delays included)")
    print(f"one by one  {one_by_one.wall_s:6.2f} s  {stock:5.2f} images/s  (the stock pipeline, no delays)")
    print(f"ratio       {ours / stock:6.2f}")
    print(f"largest difference to the stock pictures: {largest_difference(together, one_by_one)} of 255")
    print(f"pictures, contact-sheet.png, timeline.png and decoders.png are in {folder}")


def largest_difference(together: Together, one_by_one: OneByOne) -> int:
    """The largest difference of any channel of any pixel, out of 255."""
    pairs = zip(together.pictures, one_by_one.pictures, strict=True)
    return max(int(np.abs(np.asarray(a, np.int16) - np.asarray(b, np.int16)).max()) for a, b in pairs)
