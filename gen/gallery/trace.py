"""Drawings of decoding traces: the token grid coloured by step, in plain SVG, with its events as
JSON for the player."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from math import ceil, prod, sqrt
from typing import Any

from markupsafe import Markup

from gen.core.errors import GenError, bad_value

# Dark indigo over teal to yellow: lightness rises evenly in OKLCH, so equal distances in time look
# equal, also in grey.
RAMP = (
    (58, 39, 112),
    (66, 75, 156),
    (43, 119, 176),
    (31, 161, 173),
    (82, 199, 154),
    (177, 216, 100),
    (242, 221, 90),
)
GAP = 1  # cells between two planes, such as the frames of a video
ACROSS = 128  # cells beside each other before planes begin a new line
ROW = 64  # cells of a line where the grid of an output other than an image is unknown
FEWEST = 8  # bars that a chart has room for, so that a single one does not fill it
BAND = 96  # steps of sound beside each other


def colour(step: int, steps: int) -> str:
    """Return the colour of a step, counted from 1."""
    at = (step - 1) / max(steps - 1, 1) * (len(RAMP) - 1)
    low = min(int(at), len(RAMP) - 2)
    pairs = zip(RAMP[low], RAMP[low + 1], strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (at - low)):02x}" for a, b in pairs)


def replay(steps: list[dict[str, Any]]) -> dict[int, int]:
    """Map each position to the step, counted from 1, that committed its final token."""
    at: dict[int, int] = {}
    for number, step in enumerate(steps, 1):
        for position in step.get("removed", ()):
            at.pop(int(position), None)
        at.update({int(position): number for position in step["committed"]})
    return at


@dataclass(frozen=True)
class Layout:
    """Drawing positions of a trace: ``planes`` of ``rows`` by ``columns`` cells.

    Attributes:
        across: planes beside each other.
        turned: positions run down the columns, not along the rows.
        count: number of positions.
    """

    planes: int
    rows: int
    columns: int
    across: int
    count: int
    turned: bool = False

    def cell(self, position: int) -> tuple[int, int]:
        """Return the column and the row of a position in the whole drawing."""
        plane, rest = divmod(position, self.rows * self.columns)
        x, y = divmod(rest, self.rows) if self.turned else divmod(rest, self.columns)[::-1]
        line, at = divmod(plane, self.across)
        return x + at * (self.columns + GAP), y + line * (self.rows + GAP)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the drawing, in cells."""
        lines = ceil(self.planes / self.across)
        return self.across * (self.columns + GAP) - GAP, lines * (self.rows + GAP) - GAP


def layout(grid: Any, length: int, where: str, kind: str = "image") -> Layout:
    """Choose the drawing of a token grid.

    A grid of three axes is a row of frames; a grid of sound, motion or actions, [T, Q], has a
    column per step and a row per code stream. Without a grid, an image is drawn as a square, or
    nearly one, and all else as one line that wraps. ``kind`` is that of the output.
    """
    if grid is None:
        columns = ceil(sqrt(length)) if kind == "image" else min(length, ROW)
        rows = ceil(length / columns)
        return Layout(1, rows, columns, 1, rows * columns if kind == "image" else length)
    sizes = [grid] if isinstance(grid, int) else list(grid)
    if not sizes or not all(isinstance(n, int) and n > 0 for n in sizes) or prod(sizes) < length:
        raise bad_value("grid", grid, f"sizes that hold the {length} positions of {where}")
    if len(sizes) == 1:
        return layout(None, sizes[0], where, kind)
    if len(sizes) == 2 and kind != "image" and sizes[0] >= sizes[1]:
        lines = ceil(sizes[0] / BAND)
        return Layout(lines, sizes[1], ceil(sizes[0] / lines), 1, prod(sizes), turned=True)
    *outer, rows, columns = [1, 1, *sizes]
    planes = prod(outer)
    lines = ceil(planes / max(1, ACROSS // (columns + GAP)))
    return Layout(planes, rows, columns, ceil(planes / lines), prod(sizes))


def draw_trace(
    steps: Any,
    grid: Any,
    where: str,
    kind: str = "image",
    own: int | None = None,
    text: str = "",
) -> dict[str, Any]:
    """Draw the tokens and the steps of one trace, for its card.

    Args:
        steps: the trace as its file holds it, a list of steps.
        grid: sizes of the token grid; None where they are not known.
        where: the file of the trace, for the message.
        kind: kind of the output, such as ``audio``.
        own: tokens of the output itself, its end included; what was committed behind them fills
            the row and is not counted.
        text: the output, if it is one; its words are named where each is a token.

    Returns:
        ``grid`` and ``chart``, drawings of numbers as markup; ``events`` for the player; the number
        of ``steps``; and ``wide``, for a card that needs the width of the page.

    Raises:
        GenError: for a file that holds no trace.
    """
    final, events, length = _read_steps(steps, where)
    plan = layout(grid, length, where, kind)
    filling = set(sorted(final)[own:]) if own else set()
    final = {p: step for p, step in final.items() if p not in filling}
    for event in events:
        event["c"] = [pair for pair in event["c"] if pair[0] not in filling]
    counts = [len(event["c"]) for event in events]
    names = _names(final, events, text.split())
    wide = kind != "image" or plan.planes > 1
    return {
        "grid": Markup(_token_grid(plan, final, len(steps), wide, names)),
        "chart": Markup(_chart(counts)),
        "events": events,
        "steps": len(steps),
        "wide": wide,
    }


def _read_steps(steps: Any, where: str) -> tuple[dict[int, int], list[dict[str, Any]], int]:
    """Return the step that decided each position, the events for the player, and the number of
    positions. Raises ``GenError`` for anything but a list of steps."""
    try:
        if not isinstance(steps, list):
            raise TypeError(f"a {type(steps).__name__}")
        final = replay(steps)
        events = []
        for step in steps:
            committed = [
                # latents have no token id
                [int(p), None if isinstance(value, list) else int(value)]
                for p, value in step["committed"].items()
            ]
            removed = [int(p) for p in step.get("removed", ())]
            events.append({"w": _ranges(step["window"]), "c": committed, "r": removed})
        ends = [
            *final,
            *(b for e in events for _, b in e["w"]),
            *(p for e in events for p in e["r"]),
        ]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise GenError(
            f"{where} is not a trace ({type(error).__name__}: {error}); "
            "expected a list of steps with window and committed"
        ) from error
    return final, events, max(ends, default=0) + 1


def _names(final: dict[int, int], events: list[dict[str, Any]], words: list[str]) -> dict[int, str]:
    """Say of each position which token it is and which pass committed it."""
    tokens = {p: token for event in events for p, token in event["c"]}
    positions = sorted(final)
    said = dict(zip(positions, words, strict=True)) if len(words) == len(positions) else {}
    return {
        p: ", ".join(
            [
                *([repr(said[p])] if p in said else []),
                f"position {p}",
                *([f"token {tokens[p]}"] if tokens.get(p) is not None else []),
                f"pass {final[p]}",
            ]
        )
        for p in positions
    }


def _token_grid(
    plan: Layout, final: dict[int, int], count: int, wide: bool, names: dict[int, str]
) -> str:
    """Draw a cell per position, coloured by the step that decided it, of ``count``."""
    cells = ""
    for p in range(plan.count):
        x, y = (n + 0.05 for n in plan.cell(p))
        done = (
            f'data-step="{final[p]}" fill="{colour(final[p], count)}"'
            if p in final
            else 'class="off"'
        )
        title = f"<title>{escape(names[p])}</title>" if p in names else ""
        cells += (
            f'<rect data-p="{p}" x="{x:.2f}" y="{y:.2f}" width=".9" height=".9" {done}>'
            f"{title}</rect>"
        )
    width, height = plan.size
    # a short line does not become a banner
    most = f' style="max-width:{1.6 * width:g}rem"' if wide else ""
    return (
        f'<svg class="grid"{most} viewBox="0 0 {width} {height}" role="img" aria-label="the step at'
        f' which each of {len(final)} tokens was committed, of {count}">{cells}</svg>'
    )


def _chart(counts: list[int]) -> str:
    """Draw tokens committed per step in the colours of the grid; the chart is its legend."""
    n, most = len(counts), max(counts, default=0)
    top = max(most, 6)  # one token per forward pass must not fill the chart
    wide = 0.86 if n < 120 else 1
    bars = "".join(
        f'<rect data-n="{c}" x="{i}" y="{top - c}" width="{wide}" height="{c}"'
        f' fill="{colour(i + 1, n)}"/>'
        for i, c in enumerate(counts)
    )
    said = (
        f"at most {most} token{'' if most == 1 else 's'} in one pass, {sum(counts)} in {n} passes"
    )
    ramp = ", ".join(colour(1 + i, len(RAMP)) for i in range(len(RAMP)))
    return (
        f'<div class="most">{said}</div>'
        f'<svg class="bars" viewBox="0 0 {max(n, FEWEST)} {top}" preserveAspectRatio="none"'
        f' role="img" aria-label="tokens committed by each of {n} forward passes">{bars}</svg>'
        f'<div class="ramp" style="background:linear-gradient(90deg, {ramp})"></div>'
        f'<div class="ends"><span>step 1</span><span>{n}</span></div>'
    )


def _ranges(positions: list[int]) -> list[list[int]]:
    """Join positions to ranges: ``[3, 4, 5, 9]`` -> ``[[3, 5], [9, 9]]``."""
    out: list[list[int]] = []
    for p in sorted(map(int, positions)):
        if out and p == out[-1][1] + 1:
            out[-1][1] = p
        else:
            out.append([p, p])
    return out
