"""Panels of a benchmark in plain SVG: points with bars and labels between two axes, and histograms.
The module does not know the measured quantities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

WIDTH, HEIGHT, PAD, TOP = 430, 310, 60, 38
COLOURS = (
    "#2563eb",
    "#d97706",
    "#059669",
    "#dc2626",
    "#7c3aed",
    "#0891b2",
    "#be185d",
    "#4d7c0f",
    "#475569",
    "#a16207",
)
LETTER, LINE = 5.9, 12  # about the size of a label's letters
TICKS = 4  # about as many as an axis has


@dataclass(frozen=True)
class Point:
    """Point of a panel. ``bar``: lower and upper end of its error bar. ``shape``: ``circle`` or
    ``diamond``. ``tip``: text under the mouse."""

    x: float
    y: float
    label: str
    tip: str
    colour: str
    bar: tuple[float, float] | None = None
    shape: str = "circle"
    line: str | None = None  # points with the same one are joined


@dataclass(frozen=True)
class Axis:
    """Axis from ``low`` to ``high``, logarithmic or not. ``say`` formats a value."""

    low: float
    high: float
    name: str
    say: Callable[[float], str] = "{:.3g}".format
    log: bool = False

    def at(self, value: float) -> float:
        """Map a value to 0 at the low end up to 1 at the high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return at least three round values; they are evenly spaced where a logarithmic axis is
        too narrow for powers."""
        if self.log:
            for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
                powers = range(
                    math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1
                )
                found = [
                    f * 10.0**k
                    for k in powers
                    for f in factors
                    if self.low <= f * 10.0**k <= self.high
                ]
                if len(found) >= 3:
                    return found
        rough = (self.high - self.low) / TICKS
        size = 10.0 ** math.floor(math.log10(rough))
        step = min((f * size for f in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - rough))
        return [
            n * step
            for n in range(
                math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1
            )
        ]


def axis(
    values: Sequence[float],
    name: str,
    say: Callable[[float], str] = "{:.3g}".format,
    log: bool | None = None,
) -> Axis:
    """Make an axis that covers all values. ``log`` None: logarithmic if they span more than a
    factor of 5."""
    low, high = min(values), max(values)
    if log or (log is None and low > 0 and high > 5 * low):
        margin = (high / low) ** 0.07 if high > low else 1.5
        return Axis(low / margin, high * margin, name, say, True)
    margin = 0.08 * (high - low) or 0.1 * abs(high) or 1
    return Axis(max(0.0, low - margin), high + margin, name, say)


class Frame:
    """Pixels of a panel's data: ``at_x`` and ``at_y`` map a value to a pixel between the axes."""

    right, bottom = WIDTH - 0.3 * PAD, HEIGHT - PAD + 6

    def __init__(self, x: Axis, y: Axis):
        self.x, self.y = x, y

    def at_x(self, value: float) -> float:
        """Return the column of a value, in pixels."""
        return PAD + (WIDTH - 1.3 * PAD) * self.x.at(value)

    def at_y(self, value: float) -> float:
        """Return the line of a value, in pixels."""
        return self.bottom - (self.bottom - TOP) * self.y.at(value)


def panel(
    title: str,
    points: Sequence[Point],
    x: Axis,
    y: Axis,
    through: tuple[float, float] | None = None,
    note: str = "",
) -> str:
    """Draw points between two axes as an SVG.

    Args:
        title: the name over the panel.
        points: points, joined by lines where they share one.
        x: the horizontal axis.
        y: the vertical axis.
        through: a point on the line of y proportional to x; None for no such line.
        note: the name of that line.
    """
    frame = Frame(x, y)
    parts = [f'<text class="name" x="{PAD}" y="18">{escape(title)}</text>', *_ticks(frame)]
    if through is not None:
        parts.append(_diagonal(x, y, through, frame.at_x, frame.at_y, note))
    parts += [*_data(frame, points), *_axis_names(frame)]
    said = escape(f"{y.name} against {x.name}, {title}", quote=True)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{said}">{"".join(parts)}</svg>'
    )


def _ticks(frame: Frame) -> list[str]:
    """Draw the ticks of both axes with the lines of the grid."""
    parts = []
    for value in frame.x.ticks():
        at = frame.at_x(value)
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{frame.bottom + 16:.1f}"'
            f' text-anchor="middle">{escape(frame.x.say(value))}</text>'
        )
        parts.append(
            f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{frame.bottom}"/>'
        )
    for value in frame.y.ticks():
        at = frame.at_y(value)
        parts.append(
            f'<text class="tick" x="{PAD - 7}" y="{at + 4:.1f}"'
            f' text-anchor="end">{escape(frame.y.say(value))}</text>'
        )
        parts.append(
            f'<line class="grid" x1="{PAD}" x2="{frame.right:.1f}" y1="{at:.1f}" y2="{at:.1f}"/>'
        )
    return parts


def _data(frame: Frame, points: Sequence[Point]) -> list[str]:
    """Draw lines, error bars, marks and labels of the points."""
    at_x, at_y, parts = frame.at_x, frame.at_y, []
    for name in dict.fromkeys(p.line for p in points if p.line is not None):
        joined = [p for p in points if p.line == name]
        corners = " ".join(f"{at_x(p.x):.1f},{at_y(p.y):.1f}" for p in joined)
        parts.append(
            f'<polyline points="{corners}" fill="none" stroke="{joined[0].colour}"'
            ' stroke-width="2"/>'
        )
    for p in points:
        cx, cy = at_x(p.x), at_y(p.y)
        if p.bar is not None:
            least, most = (at_y(min(max(v, frame.y.low), frame.y.high)) for v in p.bar)
            parts.append(
                f'<line x1="{cx:.1f}" x2="{cx:.1f}" y1="{least:.1f}" y2="{most:.1f}"'
                f' stroke="{p.colour}" opacity="0.35"/>'
            )
        parts.append(_mark(cx, cy, p))
    for cx, cy, anchor, label in placed(
        [(at_x(p.x), at_y(p.y), p.label, p.line) for p in points],
        (PAD + 2, TOP, frame.right, frame.bottom),
    ):
        parts.append(
            f'<text class="param" x="{cx:.1f}" y="{cy:.1f}"'
            f' text-anchor="{anchor}">{escape(label)}</text>'
        )
    return parts


def _axis_names(frame: Frame) -> list[str]:
    """Draw the names of both axes."""
    middle = (TOP + frame.bottom) / 2
    return [
        f'<text class="axis" x="{(PAD + frame.right) / 2:.1f}" y="{HEIGHT - 12}"'
        f' text-anchor="middle">{escape(frame.x.name)}</text>',
        f'<text class="axis" transform="translate(12 {middle:.1f}) rotate(-90)"'
        f' text-anchor="middle">{escape(frame.y.name)}</text>',
    ]


def _mark(cx: float, cy: float, p: Point) -> str:
    tip = f"<title>{escape(p.tip)}</title>"
    if p.shape == "diamond":
        return (
            f'<path d="M{cx:.1f} {cy - 5.5:.1f} l5.5 5.5 -5.5 5.5 -5.5 -5.5z" fill="#fff"'
            f' stroke="{p.colour}" stroke-width="2">{tip}</path>'
        )
    return f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4.5" fill="{p.colour}">{tip}</circle>'


def _diagonal(
    x: Axis, y: Axis, through: tuple[float, float], at_x: Callable, at_y: Callable, note: str
) -> str:
    """Draw the part of y = c x between the axes, with its name at the upper end."""
    slope = through[1] / through[0]
    first, last = max(x.low, y.low / slope), min(x.high, y.high / slope)
    x1, y1, x2, y2 = at_x(first), at_y(first * slope), at_x(last), at_y(last * slope)
    return (
        f'<line class="rule" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/><text'
        f' class="tick" x="{0.55 * x1 + 0.45 * x2 + 6:.1f}"'
        f' y="{0.55 * y1 + 0.45 * y2 + 12:.1f}">{escape(note)}</text>'
    )


def placed(
    points: Sequence[tuple[float, float, str, str | None]], frame: tuple[float, float, float, float]
) -> list[tuple[float, float, str, str]]:
    """Choose the position of every label: x, y, anchor and text.

    A label is above, right of, left of or below its point (x, y, label, line), where it covers
    neither a point nor another label; a point without free space has none. Points of a line that
    coincide share a label, of the first and the last.
    """
    merged: list[list[Any]] = []
    for cx, cy, label, line in points:
        if (
            merged
            and line is not None
            and abs(merged[-1][0] - cx) < LINE
            and abs(merged[-1][1] - cy) < LINE
            and merged[-1][4] == line
        ):
            merged[-1][3] = label
        else:
            merged.append([cx, cy, label, label, line])
    left, top, right, bottom = frame
    taken = [(cx - 5, cy - 5, cx + 5, cy + 5) for cx, cy, *_ in points]
    found = []
    for cx, cy, first, last, _ in merged:
        label = first if first == last else f"{first} to {last}"
        width = LETTER * len(label)
        for lx, base, anchor in (
            (cx, cy - 9, "middle"),
            (cx + 9, cy + 4, "start"),
            (cx - 9, cy + 4, "end"),
            (cx, cy + 18, "middle"),
        ):
            start = {"middle": lx - width / 2, "start": lx, "end": lx - width}[anchor]
            box = (start - 2, base - LINE + 3, start + width + 2, base + 2)
            inside = (
                box[0] >= left
                and box[1] >= top - LINE
                and box[2] <= right + 12
                and box[3] <= bottom
            )
            if inside and not any(
                box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken
            ):
                taken.append(box)
                found.append((lx, base, anchor, label))
                break
    return found


def bars(title: str, counts: Sequence[int], colour: str, name: str) -> str:
    """Draw a histogram: the share of each of 0, 1, 2, ..."""
    wide, high, pad, top = 300, 180, 38, 30
    total, used = sum(counts), max((n for n, c in enumerate(counts) if c), default=0) + 1
    shares = [c / total for c in counts[:used]]
    y = axis([0.0, *shares], "", "{:.0%}".format, log=False)

    def at_y(share):
        return high - pad - (high - pad - top) * share / y.high

    step = (wide - pad - 8) / used
    parts = [f'<text class="name" x="8" y="16">{escape(title)}</text>']
    for value in y.ticks():
        parts.append(
            f'<text class="tick" x="{pad - 5}" y="{at_y(value) + 4:.1f}"'
            f' text-anchor="end">{y.say(value)}</text>'
        )
        parts.append(
            f'<line class="grid" x1="{pad}" x2="{wide - 8}" y1="{at_y(value):.1f}"'
            f' y2="{at_y(value):.1f}"/>'
        )
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 1000) if used / n <= 12)
    for n, share in enumerate(shares):
        x = pad + n * step
        parts.append(
            f'<rect x="{x + 0.1 * step:.1f}" y="{at_y(share):.1f}" width="{0.8 * step:.1f}"'
            f' height="{at_y(0) - at_y(share):.1f}" fill="{colour}"><title>{n}: {counts[n]} of'
            f" {total}</title></rect>"
        )
        if n % every == 0:
            parts.append(
                f'<text class="tick" x="{x + step / 2:.1f}" y="{high - pad + 14}"'
                f' text-anchor="middle">{n}</text>'
            )
    parts.append(
        f'<text class="axis" x="{(pad + wide) / 2:.1f}" y="{high - 6}"'
        f' text-anchor="middle">{escape(name)}</text>'
    )
    return (
        f'<svg viewBox="0 0 {wide} {high}" role="img"'
        f' aria-label="{escape(title, quote=True)}">{"".join(parts)}</svg>'
    )
