"""The two drawings of the demo: a labelled contact sheet and a timeline of every request's steps.

Knows pictures, labels and `StepRecord`s; draws with Pillow and matplotlib and starts nothing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from PIL.Image import Image as Picture

    from diffusers_continuous import StepRecord

INK, MUTED, FRAME, PAPER = "#1f2933", "#8492a3", "#cbd2d9", "#ffffff"
ENCODE, GUIDED, UNGUIDED, DECODE = "#f0a202", "#2a6f97", "#61a5c2", "#c8553d"


@dataclass(frozen=True)
class Lane:
    """One request on the timeline."""

    request_id: str
    label: str
    is_guided: bool
    arrival_s: float
    finish_s: float


def draw_contact_sheet(pictures: Sequence[Picture], labels: Sequence[str], columns: int = 4) -> Picture:
    """All pictures at their own size, each above its label."""
    margin, line = 16, 17
    width = max(272, *(picture.width + margin for picture in pictures))
    font = ImageFont.load_default(size=13)
    texts = ["\n".join(textwrap.fill(part, 38) for part in label.split("\n")) for label in labels]
    text_height = line * max(text.count("\n") + 1 for text in texts) + margin
    bands = [
        max(picture.height for picture in pictures[i : i + columns]) + text_height
        for i in range(0, len(pictures), columns)
    ]
    sheet = Image.new("RGB", (columns * width + margin, sum(bands) + margin), PAPER)
    draw = ImageDraw.Draw(sheet)
    for index, (picture, text) in enumerate(zip(pictures, texts, strict=True)):
        left = margin + index % columns * width
        below = margin + sum(bands[: index // columns + 1]) - text_height
        corner = (left, below - picture.height)
        draw.rectangle((left - 1, corner[1] - 1, left + picture.width, below), outline=FRAME)
        sheet.paste(picture, corner)
        draw.text((left, below + 6), text, fill=INK, font=font, spacing=3)
    return sheet


def draw_timeline(lanes: Sequence[Lane], records: Sequence[StepRecord], path: Path, title: str) -> None:
    """Writes a picture of when each request's steps ran: a row per request, a bar per forward, seconds across."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    start = min(lane.arrival_s for lane in lanes)
    end = max(lane.finish_s for lane in lanes) - start
    with mpl.rc_context({"font.size": 9, "axes.edgecolor": MUTED, "text.color": INK}):
        figure = Figure(figsize=(12, 0.42 * len(lanes) + 2.9), dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        steps, load = figure.subplots(2, 1, sharex=True, height_ratios=[0.42 * len(lanes) + 0.6, 1.1])
        _draw_lanes(steps, lanes, records, start)
        _draw_load(load, records, start)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        load.set_xlim(-0.01 * end, 1.01 * end)
        load.set_xlabel("seconds since the first caller")
        figure.savefig(path)


def _draw_lanes(axes: Axes, lanes: Sequence[Lane], records: Sequence[StepRecord], start: float) -> None:
    for row, lane in enumerate(lanes):
        axes.plot([lane.arrival_s - start, lane.finish_s - start], [row, row], color=MUTED, lw=0.8, zorder=1)
        axes.plot([lane.arrival_s - start], [row], marker="|", ms=11, mew=1.6, color=INK, zorder=3)
        for kind, color in _colors(lane).items():
            spans = [
                (record.start_s - start, record.end_s - record.start_s)
                for record in records
                if record.kind == kind and lane.request_id in record.request_ids
            ]
            axes.broken_barh(spans, (row - 0.32, 0.64), facecolors=color, edgecolors=PAPER, linewidth=0.5, zorder=2)
    axes.set_yticks(range(len(lanes)), [lane.label for lane in lanes])
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=FRAME, alpha=0.6, lw=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.legend(handles=_legend(), loc="lower left", bbox_to_anchor=(0, 1.0), ncols=6, frameon=False, fontsize=8)


def _colors(lane: Lane) -> dict[str, str]:
    return {"encode": ENCODE, "denoise": GUIDED if lane.is_guided else UNGUIDED, "decode": DECODE}


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Line2D([], [], color=INK, marker="|", ms=9, mew=1.6, ls="", label="request arrives"),
        Patch(color=ENCODE, label="prompt encoded"),
        Patch(color=GUIDED, label="denoising step, guided"),
        Patch(color=UNGUIDED, label="denoising step, unguided"),
        Patch(color=DECODE, label="picture decoded"),
    ]


def _draw_load(axes: Axes, records: Sequence[StepRecord], start: float) -> None:
    """How many pictures each forward carried."""
    from matplotlib.ticker import MaxNLocator

    for record in records:
        if record.kind == "denoise":
            width = record.end_s - record.start_s
            rows = len(record.request_ids)
            axes.bar(record.start_s - start, rows, width=width, align="edge", color=MUTED, edgecolor=PAPER, lw=0.3)
    axes.set_ylabel("pictures in\none forward")
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.grid(axis="y", color=FRAME, alpha=0.6, lw=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
