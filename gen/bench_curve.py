"""The picture of a benchmark: fidelity against forward calls, one panel per sampler along the knob that was swept.

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

WIDTH, HEIGHT, PAD = 430, 300, 52
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")


def interval(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of n."""
    z = 1.959964
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def write_curves(folder: Path, table: list[dict[str, Any]], title: str, by: str = "batch_size", heads: dict[Any, str] | None = None) -> Path:
    """Writes ``index.html`` with one drawing per batch size, or per value of another column ``by``, in the order of ``heads``, which say what
    each of them is; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    heads = heads or {n: f"batch {n}" for n in sorted({r[by] for r in table if not r["error"]})}
    groups = {head: [r for r in table if not r["error"] and r[by] == n] for n, head in heads.items()}
    body = "\n".join(f"<h2>{escape(head)}</h2>\n{draw(rows)}" for head, rows in groups.items() if rows)
    page = folder / "index.html"
    put_text(page, PAGE.format(title=escape(title), body=body))
    return page


def draw(rows: list[dict[str, Any]]) -> str:
    """Panels with common axes, x forward calls per item, y the share of fulfilled prompts: one per sampler that was swept, with
    the others in words; or one of all if none was."""
    swept = [r for r in rows if r.get("knob")]
    shown = swept or rows
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in shown:
        groups[row["base"] if swept else "samplers"].append(row)
    calls = [r["nfe"] for r in shown]
    pad = 0.08 * (max(calls) - min(calls)) or 1
    low = max(0.0, min(interval(r["fulfilled"], r["media"])[0] for r in shown) - 0.02)
    frame = (max(0.0, min(calls) - pad), max(calls) + pad, low, 1 + 0.06 * (1 - low))
    panels = "".join(_panel(name, points, frame, COLOURS[i % len(COLOURS)]) for i, (name, points) in enumerate(groups.items()))
    rest = "".join(f"<li>{escape(_said(r))}</li>" for r in rows if swept and not r.get("knob"))
    return f'<div class="panels">{panels}</div>' + (f"<p>Beside them:</p><ul>{rest}</ul>" if rest else "")


def _said(row: dict[str, Any]) -> str:
    least, most = interval(row["fulfilled"], row["media"])
    return f"{row['sampler']}: {row['nfe']:.1f} calls, {row['fulfilled']:.1%} of {row['media']} ({least:.1%} to {most:.1%})"


def _panel(name: str, rows: list[dict[str, Any]], frame: tuple[float, float, float, float], colour: str) -> str:
    left, right, low, high = frame
    x = lambda calls: PAD + (WIDTH - 1.3 * PAD) * (calls - left) / (right - left)
    y = lambda share: HEIGHT - PAD - (HEIGHT - 1.6 * PAD) * (share - low) / (high - low)
    parts = [f'<text class="name" x="{PAD}" y="18">{escape(name)}</text>']
    for i in range(5):
        calls, share = left + (right - left) * i / 4, low + (1 - low) * i / 4
        parts.append(f'<text class="tick" x="{x(calls):.1f}" y="{HEIGHT - PAD + 18}" text-anchor="middle">{calls:.0f}</text>')
        parts.append(f'<text class="tick" x="{PAD - 8}" y="{y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>')
        parts.append(f'<line class="grid" x1="{PAD}" x2="{WIDTH - 0.3 * PAD:.1f}" y1="{y(share):.1f}" y2="{y(share):.1f}"/>')
    if rows[0].get("knob"):
        line = " ".join(f"{x(r['nfe']):.1f},{y(r['fulfilled']):.1f}" for r in rows)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for row in rows:
        (least, most), cx, cy = interval(row["fulfilled"], row["media"]), x(row["nfe"]), y(row["fulfilled"])
        parts.append(f'<line x1="{cx:.1f}" x2="{cx:.1f}" y1="{y(least):.1f}" y2="{y(most):.1f}" stroke="{colour}" opacity="0.3"/>')
        parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4" fill="{colour}"><title>{escape(_said(row))}</title></circle>')
    for number, (cx, cy, label) in enumerate(_labels([(x(r["nfe"]), y(r["fulfilled"]), str(r["value"] if r.get("knob") else r["sampler"])) for r in rows])):
        above = cy - 9 if number % 2 == 0 else cy + 18
        parts.append(f'<text class="knob" x="{cx:.1f}" y="{above:.1f}" text-anchor="middle">{escape(label)}</text>')
    said = f"forward calls per item, by {rows[0]['knob']}" if rows[0].get("knob") else "forward calls per item"
    parts.append(f'<text class="axis" x="{WIDTH / 2}" y="{HEIGHT - 14}" text-anchor="middle">{escape(said)}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="fidelity against forward calls, {escape(name)}">{"".join(parts)}</svg>'


def _labels(points: list[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Points with their labels; those that follow each other and lie on top of each other share one, of the first and the last."""
    found: list[list] = []
    for cx, cy, label in points:
        if found and abs(found[-1][0] - cx) < 12 and abs(found[-1][1] - cy) < 12:
            found[-1][3] = label
        else:
            found.append([cx, cy, label, label])
    return [(cx, cy, first if first == last else f"{first} to {last}") for cx, cy, first, last in found]


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 940px; margin: 2rem auto; padding: 0 1rem; color: #1f2937; background: #fff }}
h1 {{ font-size: 1.4rem }} h2 {{ font-size: 1rem; font-weight: 600; margin-top: 2rem }}
svg {{ width: 100%; height: auto }} .grid {{ stroke: #e5e7eb }} .tick, .knob {{ font-size: 11px; fill: #6b7280 }}
.axis {{ font-size: 12px; fill: #374151 }} .name {{ font-size: 14px; font-weight: 600; fill: #1f2937 }}
.panels {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(380px, 1fr)); gap: 1rem }}
</style>
<h1>{title}</h1>
<p>Share of prompts that the checker finds fulfilled, against forward calls per item. Bars are 95 % intervals; labels are the
value of the knob.</p>
{body}
</html>
"""
