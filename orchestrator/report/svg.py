"""A few charts as inline SVG. Colours and fonts come from the page's style sheet, so they follow dark mode.

Classes used: `axis` `grid` `label` `value`, and for marks `main` (what the reader should look at), `other` (what it
is compared with), `faint` (raw data behind a smoothed line), `base` (a constant to compare with).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count as numbered

from markupsafe import Markup, escape

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 44, 14, 14, 36
#: A longer series is averaged down to this many points: more cannot be seen.
MOST_POINTS = 300
ROW = 34
#: Average width of a character of the labels, in user units: good enough to place text beside a bar.
CHARACTER = 6.4


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points (x, y) in order of x. `name` appears at its last point."""

    points: Sequence[tuple[float, float]]
    kind: str = "main"
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One horizontal bar; `text` stands at its end."""

    label: str
    value: float
    text: str
    kind: str = "main"


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def line_chart(lines: Sequence[Line], *, title: str, x_label: str, base: tuple[float, str] | None = None) -> Markup:
    """Lines over a common x axis. `base` is a constant to compare with, and its name."""
    assert any(line.points for line in lines), "a chart shows something"
    values = [y for line in lines for _, y in line.points] + ([base[0]] if base else [])
    first, last = _span([x for line in lines for x, _ in line.points])
    y_ticks, x_ticks = ticks(min(values), max(values)), ticks(first, last, around=False)
    x = _Scale(first, last, LEFT, WIDTH - RIGHT)
    y = _Scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [_grid(y_ticks, y), _x_axis(x_ticks, x, x_label)]
    if base is not None:
        parts.append(_base_line(y(base[0]), base[1]))
    parts += [_line(line, x, y) for line in lines if line.points]
    return _svg(title, _describe(lines, base), HEIGHT, parts)


def column_chart(
    labels: Sequence[str],
    groups: Sequence[tuple[str, Sequence[float]]],
    *,
    title: str,
    x_label: str,
    top: float | None = None,
) -> Markup:
    """Vertical bars from zero, one per label and group. The last group is drawn as `main`, others as `other`."""
    assert labels and groups, "a chart shows something"
    y_ticks = ticks(0.0, top if top is not None else max(value for _, values in groups for value in values))
    y = _Scale(0.0, y_ticks[-1], HEIGHT - BOTTOM, TOP)
    slot = (WIDTH - LEFT - RIGHT) / len(labels)
    width = min(26.0, slot * 0.78 / len(groups))
    parts = [_grid(y_ticks, y)]
    for number, (name, values) in enumerate(groups):
        kind = "main" if number == len(groups) - 1 else "other"
        for place, value in enumerate(values[: len(labels)]):
            left = LEFT + slot * (place + 0.5) + width * (number - len(groups) / 2)
            tip = f"{name}, {labels[place]}: {_number(value)}"
            parts.append(_rectangle(left + 0.5, y(value), width - 1, y(0.0) - y(value), kind, tip))
            if kind == "main":
                parts.append(_text(left + width / 2, y(value) - 5, _brief(value), "value", "middle"))
    for place, label in enumerate(labels):
        parts.append(_text(LEFT + slot * (place + 0.5), HEIGHT - BOTTOM + 15, label, "label", "middle"))
    parts.append(_text(LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 4, x_label, "label", "middle"))
    shown = "; ".join(f"{name}: {', '.join(map(_number, values))}" for name, values in groups)
    return _svg(title, f"{x_label} {labels[0]} to {labels[-1]}. {shown}.", HEIGHT, parts)


def bar_chart(bars: Sequence[Bar], *, title: str) -> Markup:
    """Horizontal bars from zero, with their labels on the left and their texts at the end."""
    assert bars, "a chart shows something"
    left = 12 + CHARACTER * max(len(bar.label) for bar in bars)
    room = WIDTH - left - 12 - CHARACTER * max(len(bar.text) for bar in bars)
    longest = max((bar.value for bar in bars), default=0.0) or 1.0
    parts = []
    for bar, number in zip(bars, numbered(), strict=False):
        top = number * ROW + 6
        length = max(1.5, room * bar.value / longest)
        parts += [
            _text(left - 10, top + 15, bar.label, "label", "end"),
            _rectangle(left, top, length, ROW - 12, bar.kind, f"{bar.label}: {bar.text}"),
            _text(left + length + 7, top + 15, bar.text, "value", "start"),
        ]
    said = "; ".join(f"{bar.label}: {bar.text}" for bar in bars)
    return _svg(title, f"{said}.", len(bars) * ROW + 2, parts)


# --- numbers --------------------------------------------------------------------------------------------------------


def ticks(low: float, high: float, *, most: int = 6, around: bool = True) -> list[float]:
    """Round values (steps of 1, 2, 2.5 or 5 times a power of ten) from `low` to `high`; `around` covers both."""
    low, high = _span((low, high))
    step = 10.0 ** math.floor(math.log10(high - low))
    step = next(
        step * factor
        for factor in (0.1, 0.2, 0.25, 0.5, 1, 2, 2.5, 5, 10)
        if (high - low) / (step * factor) <= most - 1
    )
    first, last = (
        (math.floor(low / step), math.ceil(high / step))
        if around
        else (math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9))
    )
    return [round(step * number, 12) for number in range(first, last + 1)]


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Smallest and largest; a little around them when they are the same."""
    low, high = min(values), max(values)
    margin = 0.5 if high - low < 1e-9 * max(1.0, abs(low)) else 0.0
    return low - margin * max(1.0, abs(low) * 1e-6), high + margin * max(1.0, abs(low) * 1e-6)


def thin(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most `most` points: neighbours are averaged, the first and the last stay as they are."""
    if len(points) <= most:
        return list(points)
    first, *middle, last = points
    size = math.ceil(len(middle) / (most - 2))
    groups = [middle[start : start + size] for start in range(0, len(middle), size)]
    averaged = [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
    return [first, *averaged, last]


def smooth(points: Sequence[tuple[float, float]], *, window: int) -> list[tuple[float, float]]:
    """Centred moving average over `window` points; at the ends, over as many as there are on both sides."""
    half = window // 2
    found = []
    for place, (x, _) in enumerate(points):
        reach = min(half, place, len(points) - 1 - place)
        near = points[place - reach : place + reach + 1]
        found.append((x, sum(y for _, y in near) / len(near)))
    return found


def _tick_labels(values: Sequence[float]) -> list[str]:
    """With as many decimals as the finest of them needs."""
    digits = next((d for d in range(4) if all(abs(v - round(v, d)) < 1e-9 for v in values)), 4)
    return [f"{value:,.{digits}f}" for value in values]


def _brief(value: float) -> str:
    """For the top of a narrow bar."""
    return f"{value:.0f}" if value >= 9.95 or value == 0 else f"{value:.1f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.2f}".rstrip("0")


# --- marks ----------------------------------------------------------------------------------------------------------


def _svg(title: str, description: str, height: float, parts: Sequence[Markup]) -> Markup:
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}"><desc>{}</desc>{}</svg>').format(
        WIDTH, _short(height), title, description, Markup("").join(parts)
    )


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> Markup:
    return Markup('<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>').format(
        kind, _short(x), _short(y), anchor, text
    )


def _rectangle(x: float, y: float, width: float, height: float, kind: str, tip: str) -> Markup:
    return Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}" rx="1.5"><title>{}</title></rect>').format(
        kind, _short(x), _short(y), _short(max(0.0, width)), _short(max(0.0, height)), tip
    )


def _segment(kind: str, x1: float, y1: float, x2: float, y2: float) -> Markup:
    return Markup('<line class="{}" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(kind, *map(_short, (x1, y1, x2, y2)))


def _grid(values: Sequence[float], y: _Scale) -> Markup:
    marks = []
    for number, (value, label) in enumerate(zip(values, _tick_labels(values), strict=True)):
        marks.append(_segment("axis" if number == 0 else "grid", LEFT, y(value), WIDTH - RIGHT, y(value)))
        marks.append(_text(LEFT - 7, y(value) + 4, label, "label", "end"))
    return Markup("").join(marks)


def _x_axis(values: Sequence[float], x: _Scale, label: str) -> Markup:
    named = zip(values, _tick_labels(values), strict=True)
    marks = [_text(x(value), HEIGHT - BOTTOM + 15, name, "label", "middle") for value, name in named]
    marks.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, label, "label", "middle"))
    return Markup("").join(marks)


def _base_line(y: float, name: str) -> Markup:
    return _segment("base", LEFT, y, WIDTH - RIGHT, y) + _text(WIDTH - RIGHT, y - 6, name, "label", "end")


def _line(line: Line, x: _Scale, y: _Scale) -> Markup:
    points = thin(line.points)
    path = " ".join(f"{_short(x(px))},{_short(y(py))}" for px, py in points)
    mark = Markup('<polyline class="{}" points="{}"/>').format(line.kind, path)
    if line.kind == "main":
        last_x, last_y = x(points[-1][0]), y(points[-1][1])
        mark += Markup('<circle class="main" cx="{}" cy="{}" r="3"/>').format(_short(last_x), _short(last_y))
        mark += _text(last_x - 6, last_y - 9, line.name, "value", "end")
    return mark


def _describe(lines: Sequence[Line], base: tuple[float, str] | None) -> str:
    said = [
        f"From {_number(line.points[0][1])} at {_number(line.points[0][0])} to {_number(line.points[-1][1])} "
        f"at {_number(line.points[-1][0])}."
        for line in lines
        if line.points and line.kind == "main"
    ]
    if base is not None:
        said.append(f"{escape(base[1]).striptags()}: {_number(base[0])}.")
    return " ".join(said)
