# SPDX-License-Identifier: Apache-2.0
"""Line charts as inline SVG: sharp at any size, in the colours of the page, with the numbers on hover."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from omnitrl.report.records import format_number


Point = tuple[float, float]
MAX_POINTS = 400  # more cannot be told apart on a page, and each costs a hover title


@dataclass
class Line:
    """
    A line of a chart.

    Args:
        label (`str`):
            Its name in hover titles and the legend.
        points (`Sequence[tuple[float, float]]`):
            Finite (x, y), in the order of x.
        style (`str`):
            CSS class that gives the colour.
        spread (`Sequence[float]`, *optional*):
            Half the height of a band around the line, one number for each point.
        markers (`bool`, *optional*, defaults to `False`):
            Draw a dot at each point.
    """

    label: str
    points: Sequence[Point]
    style: str
    spread: Sequence[float] | None = None
    markers: bool = False


@dataclass
class Frame:
    """The area of a chart, and how data become its coordinates."""

    width: int
    height: int
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    left: int = 54
    right: int = 12
    top: int = 10
    bottom: int = 26

    def x(self, value: float) -> float:
        """Horizontal position of a value."""
        low, high = self.x_range
        return round(self.left + (value - low) / (high - low) * (self.width - self.left - self.right), 1)

    def y(self, value: float) -> float:
        """Vertical position of a value."""
        low, high = self.y_range
        return round(
            self.height - self.bottom - (value - low) / (high - low) * (self.height - self.top - self.bottom), 1
        )


def line_chart(
    lines: Sequence[Line],
    title: str,
    width: int = 1000,
    height: int = 340,
    band: tuple[float, float] | None = None,
    clock: Callable[[float], str] | None = None,
    tick_count: int = 6,
) -> str:
    """
    A chart as an `<svg>` element; all text in it is escaped.

    Args:
        lines (`Sequence[Line]`):
            What to draw; lines without points are left out.
        title (`str`):
            What the chart shows, for people who hear the page.
        width (`int`, *optional*, defaults to 1000):
            Width of the drawing in its own units; the page scales it.
        height (`int`, *optional*, defaults to 340):
            Height, likewise.
        band (`tuple[float, float]`, *optional*):
            Range of y to shade as healthy.
        clock (`Callable[[float], str]`, *optional*):
            Time that had passed at an x, written under the ticks and in the hover titles.
        tick_count (`int`, *optional*, defaults to 6):
            About how many ticks an axis has.

    Returns:
        `str`: the element, or `""` if there is nothing to draw.
    """
    lines = [_thin(line) for line in lines if line.points]
    if not lines:
        return ""
    frame = _frame(lines, width, height, band, clock is not None)
    parts = [f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">']
    if band is not None:
        top, bottom = frame.y(min(band[1], frame.y_range[1])), frame.y(max(band[0], frame.y_range[0]))
        parts.append(
            f'<rect class="healthy" x="{frame.left}" y="{top}" width="{width - frame.left - frame.right}" '
            f'height="{max(bottom - top, 0):.1f}"/>'
        )
    parts += _axes(frame, clock, tick_count)
    for line in lines:
        parts += _draw(line, frame, clock)
    return "".join([*parts, "</svg>"])


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers from `low` to `high`, about `count` of them, in steps of 1, 2, 2.5 or 5 times a power of ten."""
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _thin(line: Line) -> Line:
    count = len(line.points)
    if count <= MAX_POINTS:
        return line
    chosen = [round(index * (count - 1) / (MAX_POINTS - 1)) for index in range(MAX_POINTS)]
    spread = None if line.spread is None else [line.spread[index] for index in chosen]
    return Line(line.label, [line.points[index] for index in chosen], line.style, spread, line.markers)


def _frame(lines: Sequence[Line], width: int, height: int, band: tuple[float, float] | None, clocked: bool) -> Frame:
    xs = [x for line in lines for x, _ in line.points]
    ys = [y + sign * half for line in lines for (_, y), half in zip(line.points, _spread(line), strict=True)
          for sign in (-1, 1)]  # fmt: skip
    ys += list(band or ())
    x_low, x_high = min(xs), max(xs)
    y_low, y_high = min(ys), max(ys)
    margin = (y_high - y_low) * 0.06 or abs(y_high) * 0.1 or 1.0
    # Most of these numbers cannot be negative, and an axis that starts at 0 should not start below it.
    y_range = (0.0 if y_low >= 0 and y_low - margin < 0 else y_low - margin, y_high + margin)
    x_range = (x_low, x_high) if x_high > x_low else (x_low - 1, x_high + 1)
    return Frame(width, height, x_range, y_range, right=30 if clocked else 12, bottom=40 if clocked else 26)


def _spread(line: Line) -> Sequence[float]:
    return [0.0] * len(line.points) if line.spread is None else line.spread


def _axes(frame: Frame, clock: Callable[[float], str] | None, tick_count: int) -> list[str]:
    parts = []
    right, floor = frame.width - frame.right, frame.height - frame.bottom
    for tick in nice_ticks(*frame.y_range, tick_count):
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{frame.left - 7}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    for tick in nice_ticks(*frame.x_range, tick_count):
        if tick != int(tick):
            continue  # a step is a whole number
        x = frame.x(tick)
        parts.append(f'<text class="tick" x="{x}" y="{floor + 17}" text-anchor="middle">{int(tick)}</text>')
        if clock is not None:
            passed = escape(clock(tick))
            parts.append(f'<text class="tick faint" x="{x}" y="{floor + 32}" text-anchor="middle">{passed}</text>')
    return parts


def _draw(line: Line, frame: Frame, clock: Callable[[float], str] | None) -> list[str]:
    places = [(frame.x(x), frame.y(y)) for x, y in line.points]
    parts = []
    if line.spread is not None and len(places) > 1:
        pairs = list(zip(line.points, line.spread, strict=True))
        edge = [(frame.x(x), frame.y(y + half)) for (x, y), half in pairs]
        edge += [(frame.x(x), frame.y(y - half)) for (x, y), half in reversed(pairs)]
        parts.append(f'<polygon class="spread {line.style}" points="{_join(edge)}"/>')
    if len(places) > 1:
        parts.append(f'<polyline class="line {line.style}" points="{_join(places)}"/>')
    visible = line.markers or len(places) < 3
    for (x, y), (step, value) in zip(places, line.points, strict=True):
        passed = f" · {clock(step)}" if clock is not None and clock(step) else ""
        text = escape(f"{line.label}: {format_number(value)} at step {step:g}{passed}")
        kind = f"dot {line.style}" if visible else f"hover {line.style}"
        parts.append(
            f'<circle class="{kind}" cx="{x}" cy="{y}" r="{4 if visible else 7}"><title>{text}</title></circle>'
        )
    return parts


def _join(places: Sequence[Point]) -> str:
    return " ".join(f"{x},{y}" for x, y in places)
