"""Page of a benchmark: fidelity against forward passes and wall time, wall time against forward
passes, accepted drafts.

The page is static, in plain SVG, like the job galleries. Every share has its 95 % interval
(Wilson), because eight images alone show no difference; every wall time has the minimum and the
maximum of its repeats.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from gen.bench.plots import COLOURS, Axis, Point, axis, bars, panel
from gen.bench.table import REFERENCE, interval, untimed
from gen.core.files import put_text

CALLS, SECONDS, SHARE = "forward passes per item", "seconds per item", "prompt accuracy"
Rows = list[dict[str, Any]]
Marks = dict[str, tuple[str, str]]


def write_page(folder: Path, tables: Mapping[str, Rows], title: str) -> Path:
    """Write ``index.html`` with the plots of every modality, one group per batch size, and return
    its path."""
    body = []
    for name, table in tables.items():
        measured, marks = [r for r in table if not r["error"]], marks_of(table)
        body += [f"<h2>{escape(name)}</h2>"] if len(tables) > 1 else []
        for size in sorted({r["batch_size"] for r in measured}):
            body.append(
                section(f"batch {size}", [r for r in measured if r["batch_size"] == size], marks)
            )
        body += unmeasured(table)
    return put_page(folder, title, ABOUT, "\n".join(body))


def write_curves(folder: Path, table: Rows, title: str, by: str, heads: Mapping[Any, str]) -> Path:
    """Write ``index.html`` with a plot of prompt accuracy against forward passes for each value of
    a column.

    Args:
        folder: folder of the page.
        table: rows of the benchmark.
        title: title of the page.
        by: the column.
        heads: heading of each value of the column, in the order of the plots.

    Returns:
        Path of the page.
    """
    groups = {
        head: [r for r in table if not r["error"] and r[by] == n] for n, head in heads.items()
    }

    def drawn(rows):
        return (
            f'<div class="panels">{curves(rows, "nfe", CALLS, marks_of(table))}</div>{beside(rows)}'
        )

    body = [f"<h2>{escape(head)}</h2>\n{drawn(rows)}" for head, rows in groups.items() if rows]
    return put_page(folder, title, ABOUT_CURVES, "\n".join(body))


def section(head: str, rows: Rows, marks: Marks) -> str:
    """Draw all plots of one batch size."""
    checked = [r for r in rows if r["passed"] is not None]
    panels = (
        [curves(checked, "nfe", CALLS, marks), curves(checked, "seconds", SECONDS, marks)]
        if checked
        else []
    )
    panels += [against_calls(rows, marks), legend(rows, marks)]
    said = (
        ""
        if checked
        else (
            "<p>Nothing tells whether these media pass the checker:"
            f" {escape(rows[0]['unchecked'] or '')}</p>"
        )
    )
    drafts = [
        bars(
            r["sampler"],
            r["acceptance_histogram"],
            marks[r["base"]][0],
            "drafts accepted in a pass",
        )
        for r in rows
        if sum(r["acceptance_histogram"])
    ]
    drawn = (
        "<h4>Accepted drafts, share of forward passes</h4><div"
        f' class="small">{"".join(drafts)}</div>'
        if drafts
        else ""
    )
    said += "".join(f"<p>{escape(reason)}</p>" for reason in untimed(rows))
    return f'<h3>{escape(head)}</h3>{said}<div class="panels">{"".join(panels)}</div>{drawn}'


def curves(rows: Rows, key: str, name: str, marks: Marks) -> str:
    """Draw panels of prompt accuracy against a column, with common axes: one per swept sampler, or
    one of all samplers if none was swept."""
    swept = [r for r in rows if r.get("param")]
    shown = swept or rows
    low = max(0.0, min(interval(r["passed"], r["media"])[0] for r in shown) - 0.02)
    y = Axis(low, 1 + 0.06 * (1 - low), SHARE, "{:.0%}".format)
    x = axis([r[key] for r in shown], name)
    found = []
    for title in dict.fromkeys(r["base"] if swept else "" for r in shown):
        mine = [r for r in shown if not swept or r["base"] == title]
        param = f", by {mine[0]['param']}" if swept else ""
        found.append(
            panel(
                title or f"{SHARE} against {name}",
                [_share(r, key, marks) for r in mine],
                Axis(x.low, x.high, name + param, x.say, x.log),
                y,
            )
        )
    return "".join(found)


def against_calls(rows: Rows, marks: Marks) -> str:
    """Draw wall time against forward passes, both logarithmic, with the line on which a forward
    pass costs as much as the reference's."""
    points = [
        Point(
            r["nfe"],
            r["seconds"],
            "" if r.get("param") else r["sampler"],
            _said(r),
            marks[r["base"]][0],
            (r["seconds_least"], r["seconds_most"]),
            marks[r["base"]][1],
            r["base"] if r.get("param") else None,
        )
        for r in rows
    ]
    base = next((r for r in rows if r["sampler"] == REFERENCE), None)
    least = [base["seconds"] * min(r["nfe"] for r in rows) / base["nfe"]] if base else []
    x = axis([r["nfe"] for r in rows], CALLS, log=True)
    y = axis(
        [*least, *(r[key] for r in rows for key in ("seconds_least", "seconds_most"))],
        SECONDS,
        log=True,
    )
    return panel(
        "wall time against forward passes",
        points,
        x,
        y,
        (base["nfe"], base["seconds"]) if base else None,
        "overhead 1",
    )


def marks_of(table: Rows) -> Marks:
    """Choose a colour and a shape for every sampler; peers have diamonds."""
    found: Marks = {}
    for peer in (False, True):
        for n, base in enumerate(
            dict.fromkeys(r["base"] for r in table if bool(r.get("peer")) == peer)
        ):
            found[base] = COLOURS[(n + 4 * peer) % len(COLOURS)], "diamond" if peer else "circle"
    return found


def legend(rows: Rows, marks: Marks) -> str:
    def shown(r):
        return (
            f'<i class="{marks[r["base"]][1]}" style="--c:'
            f' {marks[r["base"]][0]}"></i>{escape(_said(r))}'
        )

    return f'<ul class="legend">{"".join(f"<li>{shown(r)}</li>" for r in rows)}</ul>'


def beside(rows: Rows) -> str:
    """Describe the rows that no panel shows."""
    rest = [r for r in rows if not r.get("param")] if any(r.get("param") for r in rows) else []
    return (
        "<p>Not shown in the panels:</p>"
        f"<ul>{''.join(f'<li>{escape(_said(r))}</li>' for r in rest)}</ul>"
        if rest
        else ""
    )


def unmeasured(table: Rows) -> list[str]:
    """List the rows without a measurement, with the reasons."""
    reasons: dict[str, list[str]] = {}
    for r in table:
        if r["error"]:
            reasons.setdefault(r["error"], []).append(f"{r['sampler']} (batch {r['batch_size']})")
    return [
        f"<p>Not measured, {escape(error)}: {escape(', '.join(names))}.</p>"
        for error, names in reasons.items()
    ]


def _share(row: dict[str, Any], key: str, marks: Marks) -> Point:
    colour, shape = marks[row["base"]]
    label = str(row["value"]) if row.get("param") else row["sampler"]
    return Point(
        row[key],
        row["passed"],
        label,
        _said(row),
        colour,
        interval(row["passed"], row["media"]),
        shape,
        row["base"] if row.get("param") else None,
    )


def _said(row: dict[str, Any]) -> str:
    text = f"{row['sampler']}: {row['nfe']:.1f} passes"
    if "seconds" in row:
        text += f", {row['seconds']:.4f} s"
    if row["passed"] is None:
        return text
    least, most = interval(row["passed"], row["media"])
    return f"{text}, {row['passed']:.1%} of {row['media']} ({least:.0%}-{most:.0%})"


def put_page(folder: Path, title: str, about: str, body: str) -> Path:
    """Write ``index.html`` with plots and return its path; ``about`` and ``body`` are HTML."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "index.html"
    put_text(page, PAGE.format(title=escape(title), about=about, body=body))
    return page


ABOUT_CURVES = """Prompt accuracy, against forward passes per item.
Bars are 95 % intervals; labels are the value of the parameter."""
ABOUT = """Medians over repeats. Bars of shares are 95 % intervals, those of wall time the least
and the most of the repeats. On the line
<em>overhead 1</em> a forward pass costs what it costs plain autoregression: above it saved passes
are not saved time. Diamonds are other
implementations. A label that would cover something is left out; the list has all of them."""
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 940px; margin: 2rem auto; padding: 0 1rem;
color: #1f2937; background: #fff }}
h1 {{ font-size: 1.4rem }} h2 {{ font-size: 1.15rem; font-weight: 600; margin-top: 2.5rem }}
h3, h4 {{ font-size: 1rem; font-weight: 600; margin-top: 2rem }}
svg {{ width: 100%; height: auto }} .grid {{ stroke: #e5e7eb }}
.rule {{ stroke: #9ca3af; stroke-dasharray: 5 4 }}
.tick, .param {{ font-size: 11px; fill: #6b7280 }} .param {{ fill: #374151 }}
.axis {{ font-size: 12px; fill: #374151 }}
.name {{ font-size: 13px; font-weight: 600; fill: #1f2937 }}
.panels {{ display: grid;
grid-template-columns: repeat(auto-fit, minmax(min(380px, 100%), 1fr)); gap: 1rem }}
.small {{ display: grid;
grid-template-columns: repeat(auto-fill, minmax(min(260px, 100%), 1fr)); gap: 1rem }}
.legend {{ list-style: none; padding: 0; margin: 1.6rem 0 0; font-size: 12.5px }}
.legend li {{ padding-left: 19px; text-indent: -19px }}
.legend i {{ display: inline-block; width: 9px; height: 9px; margin-right: 10px; text-indent: 0 }}
.legend .circle {{ background: var(--c); border-radius: 50% }}
.legend .diamond {{ border: 2px solid var(--c); transform: rotate(45deg) scale(.8) }}
</style>
<h1>{title}</h1>
<p>{about}</p>
{body}
</html>
"""
