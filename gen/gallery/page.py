"""Parts of a gallery's page as HTML: facts, methods, prompt by prompt, traces, failures. All text
from users is escaped."""

from __future__ import annotations

import json
from collections import defaultdict
from html import escape
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import unquote

from PIL import Image

from gen.core.errors import GenError
from gen.core.files import slug
from gen.core.token_space import GUARANTEES
from gen.gallery.media import SMALL, Files, Row, kind_of, view
from gen.gallery.trace import draw_trace
from gen.media.spectrogram import HEIGHT, WIDTH
from gen.store.ledger import TRACES
from gen.store.sealed import parse

FIRST_TRACES, FIRST_FAILURES = 12, 50  # number shown of a large job
MANY = 8  # number of prompts from which a search field is shown


def sections(files: Files, rows: list[Row]) -> str:
    """Sections of a small job: methods, comparison and traces, of each modality under its name."""

    def parts(group: list[Row], suffix: str) -> str:
        h = "h3" if suffix else "h2"
        return (
            f"{methods_section(group, suffix)}"
            f'<section id="comparison{suffix}"><{h}>Prompt by'
            f" prompt</{h}>\n{comparison(files, group)}</section>\n"
            f"{traces(files, group, suffix)}"
        )

    return by_modality(rows, parts)


def by_modality(rows: list[Row], parts: Any) -> str:
    """Write ``parts(rows, suffix)`` of a single modality, or of each in a block with its name."""
    groups = group_by(rows, "modality")
    if len(groups) < 2:
        return parts(rows, "")
    out = ""
    for name, group in groups.items():
        out += (
            f'<div class="modality" id="modality-{slug(name)}"'
            f' data-modality="{escape(name)}"><h2>{escape(name)} '
            f"<small>{_items(group)}</small></h2>\n{parts(group, f'-{slug(name)}')}</div>\n"
        )
    return out


def summary(rows: list[Row], planned: int, large: bool) -> str:
    models = sorted({str(r["model"]) for r in rows if r.get("model")})
    names = list(group_by(rows, "modality"))
    modality = escape(names[0]) if names else "none"
    if len(names) > 1:
        modality = ", ".join(f'<a href="#modality-{slug(n)}">{escape(n)}</a>' for n in names)
    failed = sum(r.get("status") != "ok" for r in rows)
    judged = [r["verdict"] for r in rows if r["verdict"]]
    number = f'<b class="no">{failed:,}</b>' if failed else "0"
    facts = [
        ("modalities" if len(names) > 1 else "modality", modality),
        (
            "items",
            (
                f"{len(rows):,} of {planned:,} items so far"
                if planned > len(rows)
                else f"{len(rows):,}"
            ),
        ),
        ("failed", f'<a href="#status=failed">{number}</a>' if failed and large else number),
    ]
    if judged:
        facts.append(("passed", f"{sum(bool(v['passed']) for v in judged):,} of {len(judged):,}"))
    facts.append(("models" if len(models) > 1 else "model", escape(", ".join(models)) or "none"))
    return "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)


def filters(rows: list[Row], large: bool) -> str:
    """Filters of the items, which need a script; empty where there is nothing to choose."""
    fields = ""
    if (
        large
        or max((len(group_by(g, "prompt")) for g in group_by(rows, "modality").values()), default=0)
        > MANY
    ):
        what = "Find in prompts"
        fields += (
            f'<input class="find" type="search" name="q" placeholder="{what}" aria-label="{what}">'
        )
    for name, key in (("sampler", "method"), ("modality", "modality"), ("status", "status")):
        values = list(group_by(rows, key))
        if len(values) > 1:
            options = "".join(f'<option value="{escape(v)}">{escape(v)}</option>' for v in values)
            fields += (
                f'<label>{name} <select name="{name}"><option'
                f' value="">all</option>{options}</select></label>'
            )
    return f'<form class="filters" hidden>{fields}<output></output></form>' if fields else ""


def methods_section(rows: list[Row], suffix: str) -> str:
    h = "h3" if suffix else "h2"
    return (
        f'<section id="methods{suffix}"><{h}>Methods</{h}>{methods(rows)}{_key(rows)}</section>\n'
    )


def all_methods(rows: list[Row]) -> str:
    """Methods of a large job in one section: a table, or one per modality."""
    groups = group_by(rows, "modality")
    if len(groups) < 2:
        return methods_section(rows, "")

    def head(name, group):
        return f'<h3 id="modality-{slug(name)}">{escape(name)} <small>{_items(group)}</small></h3>'

    tables = "".join(head(name, group) + methods(group) for name, group in groups.items())
    return f'<section id="methods"><h2>Methods</h2>{tables}{_key(rows)}</section>\n'


def methods(rows: list[Row]) -> str:
    """Table with a line per method. Bars are relative to the largest number of their column, shares
    to one."""
    lines = []
    for method, group in group_by(rows, "method").items():
        good = [r for r in group if r.get("status") == "ok"]
        judged = [r["verdict"] for r in group if r["verdict"]]

        def middle(key, good=good):
            return _median([r.get(key) for r in good])

        lines.append(
            {
                "method": method,
                "guarantee": str(next((r["guarantee"] for r in group if r.get("guarantee")), "")),
                "items": len(group),
                "nfe": middle("nfe"),
                "mal": middle("mean_acceptance_length"),
                "seconds": middle("seconds"),
                "judged": len(judged),
                "share": (sum(bool(v["passed"]) for v in judged) / len(judged) if judged else None),
            }
        )
    if not lines:
        return '<p class="none">No items yet.</p>'
    columns = [
        ("nfe", "forward passes"),
        ("mal", "tokens per pass"),
        ("seconds", "seconds per item"),
    ]
    most = {key: max((li[key] or 0 for li in lines), default=0) for key, _ in columns}
    shares = any(li["share"] is not None for li in lines)
    head = "".join(
        f'<th scope="col" class="num">{n}</th>'
        for n in ("items", *(n for _, n in columns), *(["passed"] if shares else []))
    )
    body = ""
    for li in lines:
        tag = (
            f'<small class="tag" title="guarantee">{escape(li["guarantee"])}</small>'
            if li["guarantee"]
            else ""
        )
        cells = f'<td data-label="items">{li["items"]:,}</td>'
        for key, name in columns:
            text = f"{li[key]:g}" if key == "nfe" and li[key] is not None else _number(li[key])
            cells += f'<td data-label="{name}">{_bar(text, (li[key] or 0) / (most[key] or 1))}</td>'
        if shares:
            text = "–" if li["share"] is None else f"{li['share']:.0%}"
            cells += f'<td data-label="passed">{_bar(text, li["share"] or 0, "share")}</td>'
        body += (
            f'<tr data-method="{escape(li["method"])}"><th scope="row">{escape(li["method"])}'
            f" {tag}</th>{cells}</tr>\n"
        )
    head = f'<thead><tr><th scope="col">method</th>{head}</tr></thead>'
    return f'<table class="methods">{head}\n<tbody>{body}</tbody></table>'


def _key(rows: list[Row]) -> str:
    """Explain the guarantees on the page."""
    used = {str(r.get("guarantee")) for r in rows}
    said = "".join(f"<dt>{k}</dt><dd>{escape(v)}</dd>" for k, v in GUARANTEES.items() if k in used)
    return f'<dl class="key">{said}</dl>' if said else ""


def comparison(files: Files, rows: list[Row]) -> str:
    names = list(group_by(rows, "method"))
    head = '<div role="columnheader" class="head">prompt</div>' + "".join(
        f'<div role="columnheader" class="head" data-method="{escape(m)}">{escape(m)}</div>'
        for m in names
    )
    out = f'<div class="line top" role="row">{head}</div>\n'
    for prompt, group in group_by(rows, "prompt").items():
        out += f'<div class="line" role="row"><h3 role="rowheader">{escape(prompt)}</h3>'
        by_method = group_by(group, "method")
        for method in names:
            tiles = "".join(_tile(files, r) for r in by_method.get(method, []))
            out += (
                '<div role="cell" class="cell"'
                f' data-method="{escape(method)}">{tiles or "<i>–</i>"}</div>'
            )
        out += "</div>\n"
    return (
        '<div class="compare" role="table" aria-label="prompt by method"'
        f' style="--n:{len(names)}">{out}</div>'
    )


def _tile(files: Files, row: Row) -> str:
    seed, passes = row.get("seed"), row.get("nfe")
    label = [
        f"seed {seed}",
        *([f"{passes} passes"] if passes is not None else []),
        *overrides_of(row),
    ]
    tar = view(files, row).tar
    link = f' · <a href="{tar}">{escape(Path(unquote(tar)).name)}</a>' if tar else ""
    caption = f"<figcaption>{_mark(row['verdict'])}{escape(' · '.join(label))}{link}</figcaption>"
    return (
        '<figure class="tile"'
        f' data-status="{escape(str(row.get("status")))}">{media(files, row)}{caption}</figure>'
    )


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


def _mark(verdict: dict[str, Any] | None) -> str:
    if not verdict:
        return ""
    detail = escape(str(verdict.get("detail") or ""))
    if verdict["passed"]:
        return f'<b class="yes" title="passes: {detail}">✓</b> '
    return f'<b class="no" title="does not pass: {detail}">✗</b> '


def media(files: Files, row: Row) -> str:
    """Output of an item, loaded when it is scrolled into view; a box with the reason where there is
    none."""
    v, prompt = view(files, row), escape(str(row.get("prompt")))
    note = escape(v.note)
    if v.kind == "failed":
        return f'<div class="box failed" title="{note}">failed</div>'
    if v.kind == "missing":
        return f'<div class="box missing">{note}</div>'
    if v.kind == "image":
        facts = [
            row["method"],
            f"seed {row.get('seed')}",
            f"{row.get('nfe')} forward passes",
            *overrides_of(row),
            f"item {number_of(row)}",
        ]
        if row["verdict"]:
            facts.append(
                ("✓ " if row["verdict"]["passed"] else "✗ ")
                + str(row["verdict"].get("detail") or "")
            )
        info = escape(" · ".join(facts))
        return (
            f'<a class="pic" href="{v.source}" data-info="{info}"><img src="{v.image}"'
            f' alt="{prompt}" loading="lazy" {_size(files, v.image)}></a>'
        )
    if v.kind == "audio":
        seen = (
            f'<img src="{v.image}" alt="spectrogram" loading="lazy" width="{WIDTH}"'
            f' height="{HEIGHT}">'
            if v.image
            else ""
        )
        player = (
            f'<audio controls preload="metadata" loading="lazy" src="{v.source}"'
            f' aria-label="{prompt}"></audio>'
        )
        return f'<div class="sound"><div class="spectrum">{seen}</div>{player}</div>'
    if v.kind == "video":
        still = f' poster="{v.image}" {_size(files, v.image)}' if v.image else ""
        return (
            '<div class="clip"><video controls loop muted playsinline preload="metadata"'
            f' loading="lazy" src="{v.source}" aria-label="{prompt}"{still}></video></div>'
        )
    tag, link = ("a", f' href="{v.source}"') if v.source else ("div", "")
    return f'<{tag} class="{"text" if v.kind == "text" else "box"}"{link}>{note}</{tag}>'


def _size(files: Files, address: str) -> str:
    """Return width and height, so that the page does not jump while images load."""
    try:
        with Image.open(files.folder / unquote(address)) as image:  # reads the header alone
            width, height = image.size
    except OSError:
        return 'class="broken"'
    return f'width="{width}" height="{height}"' + (
        ' class="px"' if max(width, height) <= SMALL else ""
    )


def traces(files: Files, rows: list[Row], suffix: str = "", most: int | None = None) -> str:
    """Cards of the first ``most`` traced items; empty without traces."""
    folder = files.folder / TRACES
    known = {p.stem for p in folder.glob("*.json")}
    drawn = [r for r in rows if r["id"] in known and r.get("status") == "ok"]
    cards, several = "", len(group_by(rows, "modality")) > 1
    for row in drawn[:most]:
        facts = [
            row["method"],
            f"seed {row.get('seed')}",
            f"{row.get('nfe')} forward passes",
            f"{_number(row.get('mean_acceptance_length'))} tokens per pass",
            *overrides_of(row),
        ]
        if several:
            facts.insert(0, str(row["modality"]))
        h = "h4" if suffix else "h3"
        title = f"<{h}>{escape(str(row.get('prompt')))}</{h}><p>{escape(' · '.join(facts))}</p>"
        path, kind = folder / f"{row['id']}.json", _kind(files, row)
        cards += draw_trace(
            row["id"],
            _steps(path),
            row.get("grid"),
            title,
            media(files, row),
            str(path),
            kind,
            row["method"],
        )
    if not cards:
        return ""
    about = (
        "Each cell is a token, coloured by the forward pass that committed it. The bars count the"
        " tokens of a call."
    )
    if len(drawn) > len(drawn[:most]):
        about += f" The first {most} of {len(drawn):,} that were traced."
    h = "h3" if suffix else "h2"
    return (
        f'<section id="traces{suffix}" class="traces"><{h}>How it was decoded</{h}><p'
        f' class="about">{about}</p>\n{cards}</section>'
    )


def _steps(path: Path) -> Any:
    steps, wrong = parse(path.read_bytes())
    if wrong:
        raise GenError(f"{path} is damaged: {wrong}; remove it and resume")
    return steps


def _kind(files: Files, row: Row) -> str:
    """Return the kind of the output itself, also where a preview is shown."""
    names = [str(row.get("member") or row.get("file")), *map(str, row.get("also") or ())]
    if "member" not in row:
        names = [n for n in names if n in files.media]
    return next((kind for n in names if (kind := kind_of(n))), "")


def failures(rows: list[Row], most: int | None = None) -> str:
    failed = [r for r in rows if r.get("status") != "ok"]
    lines = "".join(
        f"<tr data-method='{escape(r['method'])}' data-modality='{escape(str(r.get('modality')))}'>"
        f"<th scope='row'>{escape(str(number_of(r)))}</th><td>{escape(str(r.get('prompt')))}</td>"
        f"<td>{escape(r['method'])}</td><td class='error'>{escape(str(r.get('error')))}</td></tr>\n"
        for r in failed[:most]
    )
    if not lines:
        return ""
    head = "<thead><tr><th>item</th><th>prompt</th><th>method</th><th>error</th></tr></thead>"
    more = len(failed) - len(failed[:most])
    rest = (
        f'<p class="more">and {more:,} more: <a href="#status=failed">all that failed</a></p>'
        if more
        else ""
    )
    return (
        '<section id="failed"><h2>Failed</h2><table'
        f' class="failures">{head}<tbody>{lines}</tbody></table>{rest}</section>'
    )


# --- Small parts


def group_by(rows: list[Row], key: str) -> dict[str, list[Row]]:
    """Group rows by a key, in the order in which its values first appear."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[str(row.get(key))].append(row)
    return groups


def _items(rows: list[Row]) -> str:
    return f"{len(rows):,} item{'' if len(rows) == 1 else 's'}"


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


def _bar(text: str, share: float, kind: str = "") -> str:
    bar = f'<span class="bar {kind}"><i style="width:{100 * min(share, 1):.1f}%"></i></span>'
    return f'{bar}<span class="n">{text}</span>'
