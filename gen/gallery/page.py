"""Contents of a gallery's page as plain values: facts, methods, prompt by prompt, traces, failures.

The templates in ``templates`` turn them into HTML and escape them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import unquote

from gen.core.errors import GenError
from gen.core.files import read_regular, slug
from gen.core.token_space import GUARANTEES
from gen.gallery.media import SMALL, Files, Row, kind_of, starts, view
from gen.gallery.searches import search_card
from gen.gallery.trace import draw_trace
from gen.media.images import image_size
from gen.media.spectrogram import HEIGHT, WIDTH
from gen.store.ledger import TRACES, trace_path
from gen.store.sealed import parse

FIRST_TRACES, FIRST_FAILURES = 12, 50  # number shown of a large job
MANY = 8  # number of prompts from which a search field is shown
COLUMNS = {
    "nfe": "forward passes",
    "mean_acceptance_length": "tokens per pass",
    "seconds": "seconds per item",
}
Values = dict[str, Any]


def facts(rows: list[Row], planned: int, large: bool) -> Values:
    """Facts of the whole job, for the head of the page."""
    failed = sum(r.get("status") != "ok" for r in rows)
    judged = [r["verdict"] for r in rows if r["verdict"]]
    count = f"{len(rows):,}"
    return {
        "modalities": [(name, slug(name)) for name in group_by(rows, "modality")],
        "count": f"{count} of {planned:,} items so far" if planned > len(rows) else count,
        "failed": f"{failed:,}",
        "large": large,
        "passed": (
            f"{sum(bool(v['passed']) for v in judged):,} of {len(judged):,}" if judged else ""
        ),
        "models": sorted({str(r["model"]) for r in rows if r.get("model")}),
    }


def filters(rows: list[Row], large: bool) -> Values:
    """Filters of the items, which need a script; empty where there is nothing to choose."""
    prompts = (len(group_by(g, "prompt")) for g in group_by(rows, "modality").values())
    fields = (("sampler", "method"), ("modality", "modality"), ("status", "status"))
    found = [(name, list(group_by(rows, key))) for name, key in fields]
    if any(r["verdict"] for r in rows):
        found.append(("verdict", ["passed", "not passed"]))
    return {
        "find": large or max(prompts, default=0) > MANY,
        "choices": [(name, values) for name, values in found if len(values) > 1],
        "views": large and len(group_by(rows, "method")) > 1,
    }


def modalities(rows: list[Row]) -> list[tuple[Values, list[Row]]]:
    """Name, number of items and methods of each modality, and its rows; one group without items
    for a job that has none yet."""
    groups = group_by(rows, "modality") or {"": []}
    return [
        (
            {
                "name": name,
                "slug": slug(name),
                "count": f"{len(group):,} item{'' if len(group) == 1 else 's'}",
                "methods": methods(group),
                "guarantees": guarantees(group),
            },
            group,
        )
        for name, group in groups.items()
    ]


def sections(files: Files, rows: list[Row]) -> list[Values]:
    """Sections of a small job: methods, comparison and traces of each modality."""
    return [
        {
            **about,
            "comparison": comparison(files, group),
            "searches": searches(files, group),
            "traces": traces(files, group),
        }
        for about, group in modalities(rows)
    ]


def methods(rows: list[Row]) -> Values:
    """Table with a line per method. Bars are relative to the largest number of their column, shares
    to one."""
    lines = []
    for method, group in group_by(rows, "method").items():
        good = [r for r in group if r.get("status") == "ok"]
        judged = [r["verdict"] for r in group if r["verdict"]]
        lines.append(
            {
                "method": method,
                "guarantee": str(next((r["guarantee"] for r in group if r.get("guarantee")), "")),
                "count": f"{len(group):,}",
                "medians": {key: _median([r.get(key) for r in good]) for key in COLUMNS},
                "share": (sum(bool(v["passed"]) for v in judged) / len(judged) if judged else None),
            }
        )
    most = {key: max((li["medians"][key] or 0 for li in lines), default=0) for key in COLUMNS}
    shares = any(li["share"] is not None for li in lines)
    for li in lines:
        cells = []
        for key, name in COLUMNS.items():
            value = li["medians"][key]
            text = f"{value:g}" if key == "nfe" and value is not None else _number(value)
            cells.append((name, text, _percent((value or 0) / (most[key] or 1)), ""))
        if shares:
            text = "–" if li["share"] is None else f"{li['share']:.0%}"
            cells.append(("passed", text, _percent(li["share"] or 0), "share"))
        li["cells"] = cells
    columns = ["items", *COLUMNS.values(), *(["passed"] if shares else [])]
    return {"columns": columns, "lines": lines}


def guarantees(rows: list[Row]) -> list[tuple[str, str]]:
    """Explanations of the guarantees on the page."""
    used = {str(r.get("guarantee")) for r in rows}
    return [(name, text) for name, text in GUARANTEES.items() if name in used]


def comparison(files: Files, rows: list[Row]) -> Values:
    """Table of outputs: a line per prompt, a column per method."""
    names = list(group_by(rows, "method"))
    lines = []
    for prompt, group in group_by(rows, "prompt").items():
        by_method = group_by(group, "method")
        cells = [(m, [_tile(files, r) for r in by_method.get(m, [])]) for m in names]
        lines.append((prompt, cells))
    return {"methods": names, "lines": lines}


def _tile(files: Files, row: Row) -> Values:
    passes = row.get("nfe")
    label = [
        f"seed {row.get('seed')}",
        *([f"{passes} passes"] if passes is not None else []),
        *overrides_of(row),
    ]
    tar = view(files, row).tar
    return {
        "status": str(row.get("status")),
        "media": media(files, row),
        "verdict": _verdict(row),
        "label": " · ".join(label),
        "tar": tar,
        "archive": Path(unquote(tar)).name,
    }


def overrides_of(row: Row) -> list[str]:
    """Parameters that a row of the input set itself: ``["window=8", "sampling.top_k=5"]``."""
    said = row.get("overrides")
    flat: list[tuple[str, Any]] = []
    for key, value in said.items() if isinstance(said, dict) else ():
        inner = value if isinstance(value, dict) else {"": value}
        flat += [
            (k if key == "sampler" and k else f"{key}.{k}".rstrip("."), v) for k, v in inner.items()
        ]
    return [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in flat]


def _verdict(row: Row) -> Values | None:
    verdict = row["verdict"]
    if not verdict:
        return None
    return {"passed": verdict["passed"], "detail": str(verdict.get("detail") or "")}


def media(files: Files, row: Row) -> Values:
    """Output of an item, or the reason where there is none."""
    v, verdict = view(files, row), _verdict(row)
    shown: Values = {
        "kind": v.kind,
        "source": v.source,
        "image": v.image,
        "note": v.note,
        "prompt": str(row.get("prompt")),
        "starts": [],  # source and mask of an edited image
    }
    if v.kind == "image":
        words = [
            row["method"],
            f"seed {row.get('seed')}",
            f"{row.get('nfe')} forward passes",
            *overrides_of(row),
            f"item {number_of(row)}",
        ]
        if verdict:
            words.append(("✓ " if verdict["passed"] else "✗ ") + verdict["detail"])
        shown["info"] = " · ".join(words)
        shown["starts"] = [(n, image, _size(files, image)) for n, image in starts(files, row)]
    if v.kind == "audio":
        shown["size"] = (WIDTH, HEIGHT)
    elif v.kind in ("image", "video") and v.image:
        shown["size"] = _size(files, v.image)
    return shown


def _size(files: Files, address: str) -> tuple[int, int, bool] | None:
    """Return width, height and True for few pixels, so that the page does not jump while images
    load; None for a file that is no image."""
    try:
        width, height = image_size(files.folder / unquote(address))
    except GenError:
        return None
    return width, height, max(width, height) <= SMALL


def traces(files: Files, rows: list[Row], most: int | None = None) -> Values:
    """Cards of the first ``most`` traced items."""
    folder = files.folder / TRACES
    linked = folder.is_symlink()
    there = (p for p in folder.glob("*.json") if not linked and not p.is_symlink())
    known = {p.stem for p in there if p.is_file()}
    drawn = [r for r in rows if r["id"] in known and r.get("status") == "ok"]
    cards, several = [], len(group_by(rows, "modality")) > 1
    for row in drawn[:most]:
        words = [
            row["method"],
            f"seed {row.get('seed')}",
            f"{row.get('nfe')} forward passes",
            f"{_number(row.get('mean_acceptance_length'))} tokens per pass",
            *overrides_of(row),
        ]
        if several:
            words.insert(0, str(row["modality"]))
        path = trace_path(files.folder, row)
        cards.append(
            {
                "name": row["id"],
                "method": row["method"],
                "prompt": str(row.get("prompt")),
                "facts": " · ".join(words),
                "media": media(files, row),
                **draw_trace(
                    _steps(path, row),
                    row.get("grid"),
                    str(path),
                    _kind(files, row),
                    row.get("tokens"),
                    _text(files, row),
                ),
            }
        )
    rest = f"The first {most} of {len(drawn):,} that were traced."
    return {"cards": cards, "more": rest if len(drawn) > len(cards) else ""}


def searches(files: Files, rows: list[Row], most: int | None = None) -> Values:
    """Cards of the first ``most`` items that a search made."""
    found, cards = [r for r in rows if r.get("search")], []
    several = len(group_by(rows, "modality")) > 1
    for row in found[:most]:
        card = search_card(files, row)
        if card is None:
            continue
        words = [
            *([str(row["modality"])] if several else []),
            row["method"],
            f"seed {row.get('seed')}",
            f"{row.get('nfe')} forward passes",
            *overrides_of(row),
        ]
        about = {"name": row["id"], "method": row["method"], "prompt": str(row.get("prompt"))}
        cards.append({**card, **about, "about": " · ".join(words)})
    rest = f"The first {most} of {len(found):,} searches."
    return {
        "cards": cards,
        "trees": any(card["tree"] for card in cards),
        "more": rest if most is not None and len(found) > most else "",
    }


def _text(files: Files, row: Row) -> str:
    """Return the text that the page shows of an item, if it shows all of one."""
    v = view(files, row)
    return v.note if v.kind == "text" and not v.note.endswith("…") else ""


def _steps(path: Path, row: Row) -> Any:
    data = read_regular(path)
    steps, wrong = parse(data)
    if "trace_sha256" in row and sha256(data).hexdigest() != row["trace_sha256"]:
        wrong = "it is not the one that its row names"
    if wrong:
        raise GenError(f"{path} is damaged: {wrong}; gen run with the same job makes it again")
    return steps


def _kind(files: Files, row: Row) -> str:
    """Return the kind of the output itself, also where a preview is shown."""
    names = [str(row.get("member") or row.get("file")), *map(str, row.get("also") or ())]
    if "member" not in row:
        names = [n for n in names if n in files.media]
    return next((kind for n in names if (kind := kind_of(n))), "")


def failures(rows: list[Row], most: int | None = None) -> Values:
    """Failed items, at most ``most``, and the number of further ones."""
    failed = [r for r in rows if r.get("status") != "ok"]
    lines = [
        {
            "method": row["method"],
            "modality": str(row.get("modality")),
            "number": str(number_of(row)),
            "prompt": str(row.get("prompt")),
            "error": str(row.get("error")),
        }
        for row in failed[:most]
    ]
    more = len(failed) - len(lines)
    return {"lines": lines, "more": f"{more:,}" if more else ""}


# --- Small parts


def group_by(rows: list[Row], key: str) -> dict[str, list[Row]]:
    """Group rows by a key, in the order in which its values first appear."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[str(row.get(key))].append(row)
    return groups


def number_of(row: Row) -> Any:
    """Return the number of an item as users see it."""
    return row.get("index", row["id"])


def _median(values: list[Any]) -> float | None:
    known = [v for v in values if isinstance(v, (int, float))]
    return median(known) if known else None


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _percent(share: float) -> str:
    return f"{100 * min(share, 1):.1f}"
