"""A page on which everybody shares one engine: pictures on their way, their place in the queue, the engine's timeline.

`python space_app.py` serves it with the embedded model; the environment variables MODEL_ID and PID_ID name others (a
folder or a hub repository), and ENGINE_OPTIONS sets its engine's config (`compile=true,slo_scale=2`). It is also the
`app_file` of a Hugging Face Space; the README says how.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import html
import io
import json
import math
import os
import re
import secrets
import sys
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # before the import, which would tell a server of itself

import gradio as gr

from diffusers_continuous import ContinuousBatchingConfig, ContinuousBatchingError, RequestCancelledError
from diffusers_continuous.cli.arguments import ArgumentParser, integer_reader, option_type, read_size
from diffusers_continuous.cli.pictures import save_picture
from diffusers_continuous.cli.timeline import Lane, draw_live_timeline
from diffusers_continuous.config import read_config
from diffusers_continuous.loading import EMBEDDED_MODEL, load_decoder, load_pipeline

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

    from diffusers_continuous import ContinuousBatchingPipeline, RequestOutput
    from diffusers_continuous.streams import AsyncRequestStream

MAX_VISITORS = 256  # who may draw at once; whoever finds no place waits in the engine's queue, which knows the clock
MAX_STEPS = 100
MAX_SEED = 2**53 - 1  # a browser knows no larger whole numbers
NUM_KEPT_PICTURES = 1000
NUM_GALLERY_PICTURES = 24
NUM_LANES = 10
TIMELINE_SPANS_S = (2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60, 80, 100, 120, 160, 200, 300)
POLL_S = 0.4  # how often a visitor without news is told the place in the queue
UPDATE_S = 0.05  # shortest time between two updates of one visitor
TIMELINE_S = 0.5  # shortest time between two drawings of the timeline, however many look

VAE, PID, BOTH = "VAE", "PiD", "VAE beside PiD"
DECODERS = {VAE: ("vae",), PID: ("pid",), BOTH: ("vae", "pid")}
DECODER_NAMES = {"vae": "VAE", "pid": "PiD"}

TITLE = "Continuous batching for Qwen-Image"
EXPLANATION = """Everybody who has this page open shares one engine: the next denoising step of <em>all</em> pictures
runs as one forward, a newcomer joins between two steps, and each picture is the one that it would have been alone.
Draw in two windows at once and watch the steps below."""
SHAPES = [
    "a red star on a blue background",
    "a large white ring on a green background",
    "a yellow heart to the left of a purple cross on a black background",
    "an orange diamond on a purple background",
]
SCENES = [
    "a cat asleep on a red sofa, morning light",
    "a fox in the snow, long shadows, film photograph",
    'a bakery window with a sign that says "Fresh bread"',
    "a lighthouse at dawn, watercolour",
]

FONTS = ["system-ui", "sans-serif"]
THEME = gr.themes.Base(
    primary_hue="sky", neutral_hue="slate", radius_size="sm", font=FONTS, font_mono=["ui-monospace", "monospace"]
)
CSS = """
.html-container { padding: 0 !important }
.head h1 { margin: 0 0 .2rem; font-size: 1.5rem }
.head p { margin: 0; max-width: 75rem }
.stage { display: flex; flex-wrap: wrap; justify-content: center; gap: 1.5rem; min-height: 30rem; align-items: center }
.stage figure { margin: 0; display: flex; flex-direction: column; gap: .4rem; max-width: 100% }
.stage .frame { position: relative; overflow: hidden; width: 100%; border-radius: 6px;
  background: var(--background-fill-secondary); outline: 1px solid var(--border-color-primary) }
.stage img { display: block; width: 100%; height: 100% }
.stage img.small { image-rendering: pixelated }
.stage img.preview { filter: blur(6px); transform: scale(1.04) }
.stage .bar { height: 4px; border-radius: 2px; background: var(--border-color-primary); overflow: hidden }
.stage .bar i { display: block; height: 100%; background: var(--color-accent) }
.stage figcaption { font-size: .9rem; font-variant-numeric: tabular-nums; min-height: 2.6em }
.stage figcaption small { font-size: inherit; opacity: .75 }
.stage .empty { opacity: .6 }
.beside { display: flex; align-items: end; padding-bottom: 1.4rem }
.timeline { min-height: 15rem }
.timeline p { margin: 0 0 .3rem; font-size: .9rem; font-variant-numeric: tabular-nums }
.timeline { overflow-x: auto }
.timeline svg { display: block; min-width: 40rem; font-variant-numeric: tabular-nums }
#gallery .grid-wrap { min-height: 0; height: auto }
"""


@dataclass(frozen=True)
class Order:
    """What one click asks for."""

    prompt: str
    negative_prompt: str | None
    width: int
    height: int
    steps: int
    cfg: float
    seed: int
    decoders: tuple[str, ...]
    early_stop_steps: int
    deadline_s: float | None
    priority: int

    def call_arguments(self, decoder: str) -> dict[str, Any]:
        """The pipeline's arguments for the picture of one decoder."""
        return {
            "prompt": self.prompt,
            "negative_prompt": self.negative_prompt,
            "true_cfg_scale": self.cfg,
            "width": self.width,
            "height": self.height,
            "num_inference_steps": self.steps,
            "seed": self.seed,
            "decoder": decoder,
            "early_stop_steps": self.early_stop_steps if decoder == "pid" else 0,
            "deadline_s": self.deadline_s,
            "priority": self.priority,
        }

    def metadata(self, decoder: str) -> dict[str, str]:
        """The texts that the picture's file carries."""
        settings = self.call_arguments(decoder)
        texts = {name: str(settings.pop(name) or "") for name in ("prompt", "negative_prompt")}
        return {**texts, "seed": str(settings.pop("seed")), "settings": json.dumps(settings)}


@dataclass(eq=False)
class Drawing:
    """One picture of an order: its number on the page, its stream, and the newest that came out of it."""

    number: int
    order: Order
    decoder: str
    stream: AsyncRequestStream
    output: RequestOutput | None = None
    preview: Picture | None = None
    size: tuple[int, int] | None = None
    path: Path | None = None

    @property
    def is_finished(self) -> bool:
        """True once nothing more will come."""
        return self.output is not None and self.output.finished


class Space:
    """The engine that all visitors share, who of them is drawing, and what was drawn lately.

    Everything but pictures and submission runs on the server's asyncio loop, so nothing here needs a lock.

    Args:
        pipe: Draws for everybody; its engine is started here.
        folder: Where finished pictures go. The oldest are deleted.
        config: The engine's.
    """

    def __init__(self, pipe: ContinuousBatchingPipeline, folder: Path, config: ContinuousBatchingConfig) -> None:
        self.pipe = pipe
        self.folder = folder
        self.side = pipe.default_sample_size * pipe.vae_scale_factor
        self.engine = pipe.init_continuous_batching(config)
        self.engine.start()
        self._warm_up()
        self._drawings: dict[str | None, list[Drawing]] = {}  # by session
        self._lanes: dict[str, Lane] = {}  # by request id, oldest first; `finish_s` is infinite before the end
        self._kept: deque[Path] = deque()
        self._num_drawings = 0
        self._timeline = ""
        self._timeline_s = -math.inf

    def _warm_up(self) -> None:
        """Previews fit themselves to the VAE first, which takes a while: not while a visitor waits."""
        with self.pipe.stream(SHAPES[0], true_cfg_scale=1.0, num_inference_steps=8) as stream:
            for output in stream:
                if output.preview:
                    break

    @property
    def decoders(self) -> list[str]:
        """The choices of a visitor."""
        return [VAE] if self.pipe.decoder is None else list(DECODERS)

    @property
    def pid_scale(self) -> int:
        """How many times larger PiD's pictures are; 1 without one."""
        return 1 if self.pipe.decoder is None else self.pipe.decoder.transformer.config.sr_scale

    @property
    def sizes(self) -> list[str]:
        """Sizes that suit the model; any other multiple of 16 may be typed in, up to `max_pixels`."""
        small, usual, large = (round(self.side * part / 16) * 16 for part in (0.75, 1, 1.5))
        sides = [(usual, usual), (small, small), (large, usual), (usual, large), (large, large)]
        return [f"{width}x{height}" for width, height in sides]

    @property
    def max_pixels(self) -> int:
        """Largest picture that the model is asked for, so that one visitor does not hold up all others."""
        return (2 * self.side) ** 2

    # ------------------------------------------------------------------ drawing

    async def draw(
        self,
        prompt: str,
        negative_prompt: str,
        size: str,
        steps: int,
        cfg: float,
        is_seed_random: bool,
        seed: int | None,
        decoder: str,
        early_stop_steps: int,
        deadline_s: float | None,
        priority: int | None,
        gallery: list[tuple[str, str]],
        request: gr.Request,
    ) -> AsyncGenerator[tuple[Any, ...], None]:
        """Yields stage, seed, gallery pictures twice (kept and shown) and Cancel button, until the pictures are there.

        Closing it cancels what is not finished.

        Raises:
            gr.Error: when the order is refused or fails.
        """
        try:
            order = self.check(
                prompt=prompt,
                negative_prompt=negative_prompt,
                size=size,
                steps=steps,
                cfg=cfg,
                seed=secrets.randbelow(2**32) if is_seed_random else seed,
                decoder=decoder,
                early_stop_steps=early_stop_steps,
                deadline_s=deadline_s,
                priority=priority,
            )
            arrival_s = self.engine.clock()
            streams = await asyncio.to_thread(self._open, order)
        except (ContinuousBatchingError, ValueError) as error:
            raise _page_error(error) from error
        drawings = self._begin(order, streams, arrival_s)
        mine = self._drawings.setdefault(request.session_hash, [])
        mine.extend(drawings)
        try:
            async with contextlib.aclosing(self._follow(drawings)) as news:
                async for _ in news:
                    yield self.stage(drawings), order.seed, gr.skip(), gr.skip(), gr.Button(interactive=True)
        finally:
            for drawing in drawings:
                mine.remove(drawing)
            if not mine:
                self._drawings.pop(request.session_hash, None)
        done = [(str(each.path), _caption(each)) for each in drawings if each.path is not None]
        still_kept = [(path, caption) for path, caption in gallery if Path(path).exists()]
        gallery = [*done, *still_kept][:NUM_GALLERY_PICTURES]
        shown = gr.Gallery(gallery, visible=bool(gallery))
        yield self.stage(drawings), order.seed, gallery, shown, gr.Button(interactive=False)
        for drawing in drawings:
            if drawing.output is not None and drawing.output.images is None and not _is_cancelled(drawing.output):
                raise _page_error(drawing.output.error)

    def check(
        self,
        *,
        prompt: str,
        negative_prompt: str,
        size: str,
        steps: int,
        cfg: float,
        seed: int | None,
        decoder: str,
        early_stop_steps: int,
        deadline_s: float | None,
        priority: int | None,
    ) -> Order:
        """What the page limits beyond what the pipeline checks itself.

        Raises:
            ValueError: with the value and the limit.
        """
        if not prompt.strip():
            raise ValueError("The prompt is empty: say what to draw.")
        width, height = read_size(size)
        if width * height > self.max_pixels:
            side = 2 * self.side
            raise ValueError(f"size {size} is too large for this page: at most {side}x{side}, or as many pixels")
        if seed is None:
            raise ValueError("The seed is empty: give a whole number, or tick the box for a new one each time.")
        if "pid" in DECODERS[decoder] and early_stop_steps >= steps:
            raise ValueError(
                f"{early_stop_steps} of {steps} steps left to PiD is too much: leave it {steps - 1} at most"
            )
        return Order(
            prompt=prompt,
            negative_prompt=(negative_prompt or " ") if cfg > 1 else None,
            width=width,
            height=height,
            steps=integer_reader("steps", 1, MAX_STEPS)(steps),
            cfg=cfg,
            seed=integer_reader("seed", 0, MAX_SEED)(seed),
            decoders=DECODERS[decoder],
            early_stop_steps=early_stop_steps,
            deadline_s=deadline_s or None,
            priority=priority or 0,
        )

    def _open(self, order: Order) -> list[AsyncRequestStream]:
        """Queue a request per decoder; all or none."""
        streams: list[AsyncRequestStream] = []
        try:
            for decoder in order.decoders:
                streams.append(self.pipe.astream(**order.call_arguments(decoder)))
        except BaseException:
            for stream in streams:
                self.engine.cancel_request(stream.request_id)
            raise
        return streams

    def _begin(self, order: Order, streams: Sequence[AsyncRequestStream], arrival_s: float) -> list[Drawing]:
        drawings = []
        for decoder, stream in zip(order.decoders, streams, strict=True):
            self._num_drawings += 1
            drawing = Drawing(self._num_drawings, order, decoder, stream)
            drawings.append(drawing)
            is_guided = order.negative_prompt is not None
            self._lanes[stream.request_id] = Lane(stream.request_id, _label(drawing), is_guided, arrival_s, math.inf)
        return drawings

    async def _follow(self, drawings: Sequence[Drawing]) -> AsyncGenerator[None, None]:
        """Yields when there is something new to tell, until all are finished; closing it cancels the others."""
        waits = {asyncio.ensure_future(anext(drawing.stream)): drawing for drawing in drawings}
        try:
            yield
            while waits:
                done, _ = await asyncio.wait(waits, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    drawing = waits.pop(task)
                    await self._take(drawing, task.result())
                    if not drawing.is_finished:
                        waits[asyncio.ensure_future(anext(drawing.stream))] = drawing
                if waits:
                    yield
                    await asyncio.sleep(UPDATE_S)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            for drawing in drawings:
                await drawing.stream.aclose()
                self._end(drawing)

    async def _take(self, drawing: Drawing, output: RequestOutput) -> None:
        """Make pictures in threads: a preview waits for the step that is running, a large file takes a while."""
        drawing.output = output
        if output.images is not None:
            picture = output.images[0]
            drawing.path = await asyncio.to_thread(self._save, drawing, picture)
            drawing.size = picture.size
        elif not output.finished:
            previews = await asyncio.to_thread(lambda: output.preview)
            drawing.preview = previews[0] if previews else drawing.preview

    def _save(self, drawing: Drawing, picture: Picture) -> Path:
        order = drawing.order
        words = re.sub(r"[\W_]+", "-", order.prompt.lower()).strip("-")[:40]
        secret = secrets.token_hex(8)  # nobody finds another visitor's picture by guessing
        path = self.folder / f"{words or 'picture'}-{order.seed}-{drawing.decoder}-{secret}.png"
        save_picture(picture, path, order.metadata(drawing.decoder))
        return path

    def _end(self, drawing: Drawing) -> None:
        """The lane ends, and what is too old to be shown or kept goes."""
        request_id, output = drawing.stream.request_id, drawing.output
        finish_s = None if output is None else output.metrics.finish_s
        lane = self._lanes[request_id]
        self._lanes[request_id] = dataclasses.replace(lane, finish_s=finish_s or self.engine.clock())
        for lane in [lane for lane in self._lanes.values() if lane.finish_s < math.inf][:-NUM_LANES]:
            del self._lanes[lane.request_id]
        if drawing.path is not None:
            self._kept.append(drawing.path)
        while len(self._kept) > NUM_KEPT_PICTURES:
            self._kept.popleft().unlink(missing_ok=True)

    async def cancel(self, request: gr.Request) -> None:
        """Cancel what the visitor is drawing; `draw` tells it."""
        for drawing in self._drawings.get(request.session_hash, ()):
            self.engine.cancel_request(drawing.stream.request_id)

    # ------------------------------------------------------------------ what is shown

    def stage(self, drawings: Sequence[Drawing]) -> str:
        """The pictures of an order on their way, as HTML."""
        return f'<div class="stage">{"".join(self._figure(drawing) for drawing in drawings)}</div>'

    def _figure(self, drawing: Drawing) -> str:
        order, output = drawing.order, drawing.output
        scale = max(1, round(400 / max(order.width, order.height)))  # whole pixels stay crisp
        shown = min(1.0, 640 / (scale * max(order.width, order.height))) * scale
        width = round(order.width * shown)
        share = 100 if drawing.path else 100 * output.step / output.num_steps if output is not None else 0
        return (
            f'<figure style="width:{width}px"><div class="frame" style="aspect-ratio:{order.width}/{order.height}">'
            f'{_image(drawing, width)}</div><div class="bar"><i style="width:{share:.0f}%"></i></div>'
            f"<figcaption><strong>{DECODER_NAMES[drawing.decoder]}</strong> #{drawing.number}, seed {order.seed}<br>"
            f"<small>{html.escape(self._standing(drawing))}</small></figcaption></figure>"
        )

    def _standing(self, drawing: Drawing) -> str:
        """How far a request is, in words."""
        output, request_id = drawing.output, drawing.stream.request_id
        if output is not None and output.finished:
            return _ending(drawing, output)
        position, eta_s = self.engine.position(request_id), self.engine.eta_s(request_id)
        step = 0 if output is None else output.step
        if position:
            where = f"number {position} in the queue" if not step else f"paused after step {step}, number {position}"
        elif output is None or not step:
            where = "starting"
        elif step < output.num_steps:
            where = f"step {step} of {output.num_steps}"
        else:
            where = "decoding"
        return where if eta_s is None else f"{where}, about {max(eta_s, 0.1):.1f} s left"

    async def timeline(self) -> str:
        """The engine's numbers and the steps of its last requests, as HTML."""
        now = self.engine.clock()
        if now - self._timeline_s >= TIMELINE_S:
            self._timeline, self._timeline_s = self._draw_timeline(now), now
        return self._timeline

    def _draw_timeline(self, now: float) -> str:
        stats = self.engine.stats()
        lanes = list(self._lanes.values())[-NUM_LANES:]
        if self.engine.is_stopped:
            return _block("timeline", f"The engine has stopped: {self.engine.fatal_error or 'it was told to'}")
        if not lanes:
            return _block("timeline", "The engine is idle. Its steps will be drawn here.")
        num_under_way = sum(lane.finish_s == math.inf for lane in self._lanes.values())
        is_busy = num_under_way > 0
        end_s = now if is_busy else max(lane.finish_s for lane in lanes)
        lanes = [dataclasses.replace(lane, finish_s=min(lane.finish_s, end_s)) for lane in lanes]
        longest_s = max(lane.finish_s - lane.arrival_s for lane in lanes)
        wanted_s = min(end_s - lanes[0].arrival_s, 3 * longest_s)
        span_s = next((span for span in TIMELINE_SPANS_S if span >= wanted_s), TIMELINE_SPANS_S[-1])
        start_s = end_s - span_s
        lanes = [lane for lane in lanes if lane.finish_s > start_s]
        steps = [record for record in stats.recent_steps if record.end_s > start_s]
        rows = [len(record.request_ids) for record in steps if record.kind == "denoise"]
        text = (
            f"<strong>The engine</strong> under way: {num_under_way}, waiting: {stats.num_waiting} &middot; "
            f"in one forward lately: {sum(rows) / max(1, len(rows)):.1f} &middot; "
            f"drawn: {stats.num_by_status.get('finished', 0)}, on time: {stats.num_on_time}"
        )
        return f'<div class="timeline"><p>{text}</p>{draw_live_timeline(lanes, steps, start_s, end_s, is_busy)}</div>'


def _label(drawing: Drawing) -> str:
    order = drawing.order
    guidance = "no CFG" if order.negative_prompt is None else f"CFG {order.cfg:g}"
    size = f"{order.width}x{order.height}"
    return f"#{drawing.number} {size}, {order.steps} steps, {guidance}, {DECODER_NAMES[drawing.decoder]}"


def _caption(drawing: Drawing) -> str:
    return f"{DECODER_NAMES[drawing.decoder]} #{drawing.number}, seed {drawing.order.seed}: {drawing.order.prompt}"


def _is_cancelled(output: RequestOutput) -> bool:
    return isinstance(output.error, RequestCancelledError)


def _ending(drawing: Drawing, output: RequestOutput) -> str:
    if drawing.size is not None:
        lateness = "" if output.metrics.is_on_time else ", after its deadline"
        return f"{drawing.size[0]}x{drawing.size[1]}, drawn in {output.metrics.latency_s:.1f} s{lateness}"
    if _is_cancelled(output):
        return f"cancelled after step {output.step} of {output.num_steps}"
    return str(output.error)


def _image(drawing: Drawing, shown_width: int) -> str:
    if drawing.path is not None and drawing.size is not None:
        kind = "small" if drawing.size[0] < shown_width else "large"
        source = f"gradio_api/file={drawing.path}"
    elif drawing.preview is not None:
        kind = "preview"
        data = io.BytesIO()
        drawing.preview.save(data, format="PNG")
        source = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    else:
        return ""
    alt = html.escape(drawing.order.prompt, quote=True)
    return f'<img class="{kind}" src="{source}" alt="{alt}" decoding="sync">'


def _block(name: str, text: str) -> str:
    return f'<div class="{name}"><p class="empty">{html.escape(text)}</p></div>'


def _page_error(error: BaseException | None) -> gr.Error:
    return gr.Error(html.escape(str(error), quote=False), title="Not drawn", duration=20, print_exception=False)


# ---------------------------------------------------------------------- the page


def build(space: Space) -> gr.Blocks:
    """The page. `serve` shows it."""
    is_embedded = space.side < 256
    with gr.Blocks(title=TITLE, fill_width=True) as page:
        gr.HTML(f'<div class="head"><h1>{TITLE}</h1><p>{EXPLANATION}</p></div>')
        kept = gr.State([])
        with gr.Row():
            with gr.Column(scale=4, min_width=380):
                examples = SHAPES if is_embedded else SCENES
                prompt = gr.Textbox(examples[0], label="Prompt", max_lines=3, elem_id="prompt")
                with gr.Row():
                    generate = gr.Button("Generate", variant="primary", elem_id="generate")
                    cancel = gr.Button("Cancel", variant="stop", interactive=False, elem_id="cancel")
                gr.Examples(examples, prompt, label="Examples")
                decoder = gr.Radio(
                    space.decoders,
                    value=space.decoders[-1],
                    label="Decoder",
                    info=f"PiD turns the latents straight into a picture {space.pid_scale} times larger.",
                    visible=len(space.decoders) > 1,
                )
                with gr.Row():
                    size = gr.Dropdown(
                        space.sizes, value=space.sizes[0], label="Size", allow_custom_value=True, min_width=130
                    )
                    seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=MAX_SEED, min_width=130)
                    is_seed_random = gr.Checkbox(True, label="New each time", min_width=110, elem_classes="beside")
                with gr.Row():
                    steps = gr.Slider(1, MAX_STEPS, 20, step=1, label="Steps", min_width=170)
                    cfg = gr.Slider(1, 10, 4, step=0.5, label="Guidance", min_width=170)
                with gr.Accordion("More", open=False):
                    negative_prompt = gr.Textbox(label="Negative prompt", placeholder="what guidance leads away from")
                    early_stop_steps = gr.Slider(
                        0, 10, 2, step=1, label="Steps left to PiD", info="The last denoising steps, which it replaces."
                    )
                    with gr.Row():
                        deadline_s = gr.Number(
                            0, label="Deadline in seconds", info="0: three times what it takes alone."
                        )
                        priority = gr.Number(0, label="Priority", info="Lower runs first.", precision=0)
            with gr.Column(scale=7, min_width=480):
                stage = gr.HTML(_block("stage", "Your picture will appear here, step by step."), elem_id="stage")
                timeline = gr.HTML(_block("timeline", ""), elem_id="timeline")
        gallery = gr.Gallery(
            visible=False,
            elem_id="gallery",
            label="Your pictures",
            columns=8,
            fit_columns=False,
            height="auto",
            object_fit="contain",
            format="png",
        )
        gr.on(
            [generate.click, prompt.submit],
            space.draw,
            inputs=[
                prompt,
                negative_prompt,
                size,
                steps,
                cfg,
                is_seed_random,
                seed,
                decoder,
                early_stop_steps,
                deadline_s,
                priority,
                kept,
            ],
            outputs=[stage, seed, kept, gallery, cancel],
            show_progress="hidden",
            api_name="draw",
        )
        cancel.click(space.cancel, queue=False, show_progress="hidden", api_visibility="private")
        gr.Timer(1).tick(
            space.timeline, outputs=timeline, queue=False, show_progress="hidden", api_visibility="private"
        )
    return page


def serve(
    space: Space, host: str | None = None, port: int | None = None, prevent_thread_lock: bool = False
) -> gr.Blocks:
    """Serve the page; without a host and a port gradio chooses, by GRADIO_SERVER_NAME and GRADIO_SERVER_PORT."""
    gr.set_static_paths(space.folder)
    page = build(space)
    page.queue(default_concurrency_limit=MAX_VISITORS, max_size=MAX_VISITORS)
    page.launch(
        server_name=host,
        server_port=port,
        max_threads=MAX_VISITORS,
        share=False,
        max_file_size="1kb",  # the page takes no files, but Gradio's upload route is open
        theme=THEME,
        css=CSS,
        footer_links=["api", "gradio"],
        run_history=False,
        prevent_thread_lock=prevent_thread_lock,
    )
    return page


def load(model: str | None, pid: str | None) -> ContinuousBatchingPipeline:
    """The pipeline of a folder or hub repository with that PiDDecoder; embedded ones where None is given.

    Raises:
        OSError: names what cannot be loaded, and why.
        ValueError: the decoder is none for this model.
    """
    pipe = load_pipeline(model)
    if pid is not None or model is None:
        pipe.decoder = load_decoder(pid)
    return pipe


def engine_config() -> ContinuousBatchingConfig:
    """What ENGINE_OPTIONS asks for. A visitor has two rows waiting at most."""
    words = filter(None, os.environ.get("ENGINE_OPTIONS", "").split(","))
    return read_config("ENGINE_OPTIONS", words, {}, max_queue_size=2 * MAX_VISITORS)


def main(argv: Sequence[str]) -> int:
    parser = ArgumentParser(prog="space_app.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--host", metavar="NAME", help="address to listen on (default: GRADIO_SERVER_NAME or 127.0.0.1)"
    )
    parser.add_argument(
        "--port",
        type=option_type(integer_reader("port", 1, 65535)),
        metavar="N",
        help="default: GRADIO_SERVER_PORT or the first free one from 7860",
    )
    options = parser.parse_all(argv)
    model, pid = os.environ.get("MODEL_ID") or None, os.environ.get("PID_ID") or None
    print(f"loading {model or EMBEDDED_MODEL}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="space-") as folder:
        try:
            config = engine_config()
            space = Space(load(model, pid), Path(folder), config)
        except (OSError, ValueError) as error:
            print(f"error: MODEL_ID={model!r}, PID_ID={pid!r}: {error}", file=sys.stderr)
            return 1
        serve(space, options.host, options.port)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
