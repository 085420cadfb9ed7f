"""Small charts as SVG: medians joined by lines, with bars from the least to the most.

panel          panel          each its own scale; x are equal steps, whatever the numbers below them
| \\_  _/      |    ___
|   \\/        | __/
+--------      +--------
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

__all__ = ["Panel", "Point", "Series", "draw"]

COLOURS = ("#1f6fb4", "#d1622b", "#3a8f4d", "#8a56a8")
WIDTH, HEIGHT = 380, 300  # of a panel, in pixels
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 28, 48  # what its axes leave free
LINE = 15  # a line of the legend
HEAD = 30  # above the panels


@dataclass(frozen=True)
class Point:
    """A median and its range. One that is not finite is not drawn."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True)
class Series:
    """A line: a point for every tick of its panel."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Panel:
    """Axes with the lines between them."""

    title: str
    x: str
    ticks: tuple[str, ...]
    series: tuple[Series, ...]
    from_zero: bool = True


def draw(title: str, panels: Sequence[Panel]) -> str:
    """The panels side by side, as the text of an SVG file."""
    width, height = WIDTH * len(panels), HEAD + HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(width / 2, 20, title, "middle", size=15),
    ]
    for number, panel in enumerate(panels):
        parts += [f'<g transform="translate({number * WIDTH} {HEAD})">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def nice_ticks(low: float, high: float) -> list[float]:
    """About five round numbers from at or below `low` to at or above `high`.

    >>> nice_ticks(0.0, 87.0), nice_ticks(0.91, 0.97)
    ([0.0, 20.0, 40.0, 60.0, 80.0, 100.0], [0.9, 0.92, 0.94, 0.96, 0.98])
    """
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 4))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * 5 >= span)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]


def _panel(panel: Panel) -> list[str]:
    ends = [end for series in panel.series for point in series.points for end in (point.low, point.high)]
    finite = [end for end in ends if math.isfinite(end)] or [0.0, 1.0]
    ticks = nice_ticks(0.0 if panel.from_zero else min(finite), max(finite))
    top = TOP + LINE * len(panel.series) if len(panel.series) > 1 else TOP

    def x_of(index: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (index + 0.5) / len(panel.ticks)

    def y_of(value: float) -> float:
        share = (min(value, ticks[-1]) - ticks[0]) / (ticks[-1] - ticks[0])
        return HEIGHT - BOTTOM - (HEIGHT - top - BOTTOM) * share

    parts = [_text(WIDTH / 2, 14, panel.title, "middle"), _text(WIDTH / 2, HEIGHT - 10, panel.x, "middle")]
    for tick in ticks:
        parts.append(_line(LEFT, y_of(tick), WIDTH - RIGHT, y_of(tick), "#dddddd"))
        parts.append(_text(LEFT - 6, y_of(tick) + 4, f"{tick:,.6g}", "end"))
    parts += [_text(x_of(i), HEIGHT - BOTTOM + 18, label, "middle") for i, label in enumerate(panel.ticks)]
    for number, series in enumerate(panel.series):
        colour = COLOURS[number % len(COLOURS)]
        places = [(x_of(i), p) for i, p in enumerate(series.points) if math.isfinite(p.middle)]
        for (x, point), (next_x, next_point) in pairwise(places):
            parts.append(_line(x, y_of(point.middle), next_x, y_of(next_point.middle), colour, width=2))
        for x, point in places:
            parts.append(_line(x, y_of(point.low), x, y_of(point.high), colour))
            parts.append(f'<circle cx="{x:.1f}" cy="{y_of(point.middle):.1f}" r="3.5" fill="{colour}"/>')
        if len(panel.series) > 1:
            parts.append(_text(LEFT, TOP + 4 + LINE * number, f"● {series.name}", "start", colour=colour))
    return parts


def _line(x: float, y: float, to_x: float, to_y: float, colour: str, width: float = 1.0) -> str:
    ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width:g}"/>'


def _text(x: float, y: float, text: str, anchor: str, *, size: int = 12, colour: str = "#222222") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{colour}">{escape(text)}</text>'
