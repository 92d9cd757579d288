"""The drawings of the demo and of the Space: a labelled contact sheet, and timelines of every request's steps.

Knows pictures, labels and `StepRecord`s; draws with Pillow and matplotlib, and as plain SVG what is drawn anew every
second. Starts nothing.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Iterator, Sequence
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

# Pixels of the live timeline: its width, the part of it for labels, the height of a lane, of the load below.
LIVE_WIDTH, LIVE_LABELS, LIVE_LANE, LIVE_LOAD = 900, 226, 20, 34


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


def draw_live_timeline(
    lanes: Sequence[Lane], records: Sequence[StepRecord], start_s: float, end_s: float, is_now: bool
) -> str:
    """`draw_timeline` from `start_s` to `end_s` as SVG, in milliseconds: a row per request, a bar per forward.

    A request under way has `end_s` for its lane's `finish_s`; `is_now` says that `end_s` is the present. Text takes
    the colour of the page around it.
    """
    axis = _LiveAxis(start_s, end_s, "now" if is_now else "last step")
    shown = [record for record in records if record.end_s > start_s]
    height = LIVE_LANE * (len(lanes) + 1) + LIVE_LOAD + 36
    parts = [_live_legend(), axis.grid(LIVE_LANE, height - 18)]
    for row, lane in enumerate(lanes, 1):
        parts.append(_live_lane(lane, LIVE_LANE * row, axis, shown))
    parts.append(_live_load([record for record in shown if record.kind == "denoise"], axis, height - 20))
    name = f"The steps of {len(lanes)} requests in the last {end_s - start_s:.0f} seconds"
    return (
        f'<svg viewBox="0 0 {LIVE_WIDTH} {height}" width="100%" font-size="12" fill="currentColor" role="img" '
        f'aria-label="{name}">{"".join(parts)}</svg>'
    )


@dataclass(frozen=True)
class _LiveAxis:
    """Engine seconds to pixels from the left."""

    start_s: float
    end_s: float
    end_label: str

    def __call__(self, time_s: float) -> float:
        share = (max(time_s, self.start_s) - self.start_s) / (self.end_s - self.start_s)
        return LIVE_LABELS + share * (LIVE_WIDTH - LIVE_LABELS)

    def spans(self, records: Iterable[StepRecord]) -> Iterator[tuple[float, float]]:
        """Left and right of each record's bar, with a thin gap after it; bars too thin to be told apart are one."""
        left = right = None
        for record in records:
            begin, end = self(record.start_s), self(record.end_s)
            if left is not None and right is not None:
                if end - left < 3 and begin - right < 1:
                    right = end
                    continue
                yield left, max(left + 0.5, right - 0.7)
            left, right = begin, end
        if left is not None and right is not None:
            yield left, max(left + 0.5, right - 0.7)

    def grid(self, top: float, bottom: float) -> str:
        """A line and a label at every round number of seconds before the end."""
        every = next(step for step in (1, 2, 5, 10, 20, 60, 300, 1200, 1e9) if (self.end_s - self.start_s) / step <= 8)
        parts = []
        ago = 0.0
        while ago <= self.end_s - self.start_s:
            x = self(self.end_s - ago)
            label = f"-{ago:g} s" if ago else self.end_label
            anchor = "middle" if ago else "end"
            parts.append(
                f'<path d="M{x:.1f} {top}V{bottom}" stroke="{FRAME}" stroke-opacity=".5"/>'
                f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="{anchor}" fill="{MUTED}">{label}</text>'
            )
            ago += every
        return "".join(parts)


def _live_lane(lane: Lane, top: int, axis: _LiveAxis, records: Sequence[StepRecord]) -> str:
    left, right = axis(lane.arrival_s), axis(lane.finish_s)
    middle = top + LIVE_LANE // 2
    parts = [
        f'<text x="0" y="{middle + 4}">{html.escape(lane.label)}</text>',
        f'<path d="M{left:.1f} {middle}H{right:.1f}" stroke="{MUTED}"/>',
    ]
    for kind, color in _colors(lane).items():
        mine = [record for record in records if record.kind == kind and lane.request_id in record.request_ids]
        bars = "".join(f"M{a:.1f} {top + 3}H{b:.1f}v{LIVE_LANE - 6}H{a:.1f}z" for a, b in axis.spans(mine))
        parts.append(f'<path d="{bars}" fill="{color}"/>')
    if lane.arrival_s >= axis.start_s:
        parts.append(f'<path d="M{left:.1f} {top + 1}v{LIVE_LANE - 2}" stroke="currentColor" stroke-width="2"/>')
    return "".join(parts)


def _live_load(steps: Sequence[StepRecord], axis: _LiveAxis, floor: float) -> str:
    """How many pictures each forward carried, standing on `floor`."""
    most = max((len(step.request_ids) for step in steps), default=1)
    bars = "".join(
        f"M{axis(step.start_s):.1f} {floor:g}v{-LIVE_LOAD * len(step.request_ids) / most:.1f}"
        f"H{axis(step.end_s):.1f}V{floor:g}z"
        for step in steps
    )
    return (
        f'<path d="{bars}" fill="{MUTED}"/><text x="0" y="{floor - 12:g}">pictures in one forward</text>'
        f'<text x="{LIVE_LABELS - 8}" y="{floor - LIVE_LOAD + 9:g}" text-anchor="end">{most}</text>'
        f'<text x="{LIVE_LABELS - 8}" y="{floor:g}" text-anchor="end">0</text>'
    )


def _live_legend() -> str:
    parts = []
    x = float(LIVE_LABELS)
    entries = [(ENCODE, "prompt encoded"), (GUIDED, "step, guided"), (UNGUIDED, "step, unguided"), (DECODE, "decoded")]
    for color, label in entries:
        parts.append(f'<rect x="{x:g}" y="3" width="12" height="10" fill="{color}"/>')
        parts.append(f'<text x="{x + 17:g}" y="12">{label}</text>')
        x += 40 + 6.6 * len(label)
    return "".join(parts)
