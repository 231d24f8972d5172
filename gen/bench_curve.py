"""The picture of a benchmark: fidelity against forward calls, one curve per sampler along the knob that was swept.

A static page in plain SVG, like the job galleries. Every point carries its 95 % interval (Wilson), so that nobody reads a
difference into eight pictures.
"""

from __future__ import annotations

import math
from collections import defaultdict
from html import escape
from pathlib import Path
from typing import Any

from gen.ledger import put_text

WIDTH, HEIGHT, PAD = 640, 380, 54
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")


def interval(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of n."""
    z = 1.959964
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def write_curves(folder: Path, table: list[dict[str, Any]], title: str) -> Path:
    """Writes ``index.html`` with one drawing per batch size; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = sorted({r["batch_size"] for r in table if not r["error"]})
    body = "\n".join(f"<h2>batch {n}</h2>\n{draw([r for r in table if r['batch_size'] == n and not r['error']])}" for n in sizes)
    page = folder / "index.html"
    put_text(page, PAGE.format(title=escape(title), body=body))
    return page


def draw(rows: list[dict[str, Any]]) -> str:
    """One SVG: x forward calls per item, y the share of fulfilled prompts."""
    most = max(r["nfe"] for r in rows) * 1.05
    bounds = [interval(r["fulfilled"], r["media"]) for r in rows]
    low = max(0.0, min(b[0] for b in bounds) - 0.02)
    x = lambda calls: PAD + (WIDTH - 2 * PAD) * calls / most
    y = lambda share: HEIGHT - PAD - (HEIGHT - 2 * PAD) * (share - low) / (1 - low)
    parts = []
    for i in range(5):
        calls, share = most * i / 4, low + (1 - low) * i / 4
        parts.append(f'<text class="tick" x="{x(calls):.1f}" y="{HEIGHT - PAD + 18}" text-anchor="middle">{calls:.0f}</text>')
        parts.append(f'<text class="tick" x="{PAD - 8}" y="{y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>')
        parts.append(f'<line class="grid" x1="{PAD}" x2="{WIDTH - PAD}" y1="{y(share):.1f}" y2="{y(share):.1f}"/>')
    groups: dict[str, list[tuple[dict, tuple[float, float]]]] = defaultdict(list)
    for row, bound in zip(rows, bounds, strict=True):
        groups[row.get("base") or row["sampler"]].append((row, bound))
    legend = []
    for number, (name, points) in enumerate(groups.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(f"{x(r['nfe']):.1f},{y(r['fulfilled']):.1f}" for r, _ in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for row, (least, top) in points:
            cx, cy = x(row["nfe"]), y(row["fulfilled"])
            said = f"{row['sampler']}: {row['nfe']:.1f} calls, {row['fulfilled']:.1%} of {row['media']} ({least:.1%} to {top:.1%})"
            parts.append(f'<line x1="{cx:.1f}" x2="{cx:.1f}" y1="{y(least):.1f}" y2="{y(top):.1f}" stroke="{colour}" opacity="0.35"/>')
            parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4" fill="{colour}"><title>{escape(said)}</title></circle>')
            if row.get("value") is not None:
                parts.append(f'<text class="knob" x="{cx + 6:.1f}" y="{cy - 6:.1f}">{escape(str(row["value"]))}</text>')
        knob = next((f" by {r['knob']}" for r, _ in points if r.get("knob")), "")
        legend.append(f'<span><i style="background:{colour}"></i>{escape(name + knob)}</span>')
    axes = (f'<text class="axis" x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">forward calls per item</text>'
            f'<text class="axis" transform="translate(14 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">prompts fulfilled</text>')  # fmt: skip
    return (f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="fidelity against forward calls">{axes}{"".join(parts)}</svg>'
            f'<p class="legend">{"".join(legend)}</p>')  # fmt: skip


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 760px; margin: 2rem auto; padding: 0 1rem; color: #1f2937; background: #fff }}
h1 {{ font-size: 1.4rem }} h2 {{ font-size: 1rem; font-weight: 600; margin-top: 2rem }}
svg {{ width: 100%; height: auto }} .grid {{ stroke: #e5e7eb }} .tick, .knob {{ font-size: 11px; fill: #6b7280 }}
.axis {{ font-size: 12px; fill: #374151 }} .legend span {{ margin-right: 1.2em; white-space: nowrap }}
.legend i {{ display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin-right: .4em }}
</style>
<h1>{title}</h1>
<p>Share of prompts that the checker finds fulfilled, against forward calls per item. Bars are 95 % intervals; labels are the
value of the knob.</p>
{body}
</html>
"""
