"""The gallery of a job folder: one static page that opens from the disk, without a server or a network.

It reads only what lies in the folder (manifest, config, verdicts, traces, media) and refers to the media by relative
paths, so a folder can be moved, zipped or served as it is. The page is a template, ``gallery.html``, with its style and
script inside; everything that came from a user is escaped here. Traces are drawn in plain SVG, so they show without a
script; the events of every step lie beside the drawing as JSON, which the page's player replays. Sound has
its spectrogram and video its first frame in ``preview/``, made again when the medium is newer. Several modalities have a
section each.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from html import escape
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

from PIL import Image

from gen.errors import GenError, bad_value
from gen.gallery_trace import draw_trace
from gen.ledger import CHECK, CONFIG, GALLERY, MANIFEST, TEMPORARY, TRACES, companions, inside, put, put_text, read_json, read_rows, slug
from gen.media import first_frame, open_sound
from gen.spectrogram import HEIGHT, WIDTH, spectrogram_png

TEMPLATE = Path(__file__).with_name("gallery.html")
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".avif")
AUDIO = (".wav", ".mp3", ".flac", ".ogg", ".opus", ".m4a")
VIDEO = (".mp4", ".webm", ".mov")
KINDS = {"image": IMAGES, "audio": AUDIO, "video": VIDEO}
PREVIEW = "preview"  # what the page shows of a medium that is not to be seen as it is
SMALL = 160  # pixels; smaller pictures are enlarged with their pixels kept square
KNOB = re.compile(r" (?=[\w.]+=)")  # between the parts of a label
EXCERPT = 400  # characters of a text that are shown
Row = dict[str, Any]


def write_gallery(folder: Path) -> Path:
    """Writes ``index.html`` into a job folder in one step; returns its path. Raises ``GenError`` if it is no job."""
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise GenError(f"{folder} has no {MANIFEST}; expected a folder that gen run or gen sample wrote")
    config = _config(folder)
    rows = list({r["id"]: r for r in read_rows(folder)}.values())  # the last line of an item counts
    for left in (folder / PREVIEW).glob(TEMPORARY + "*"):  # of a run that was killed
        left.unlink(missing_ok=True)
    verdicts, traces = read_json(folder / CHECK), read_json(folder / TRACES)
    for name, verdict in verdicts.items():
        if not isinstance(verdict, dict) or "fulfilled" not in verdict:
            raise bad_value(f"item {name}", verdict, "a verdict with fulfilled, valid and detail", str(folder / CHECK))
    for row in rows:
        row["method"] = str(row.get("sampler"))
        row["verdict"] = verdicts.get(row["id"], row if "fulfilled" in row else None)
    _name_methods(rows)
    files = [n for n in (CONFIG, MANIFEST, CHECK, TRACES) if (folder / n).is_file()]
    parts = {
        "title": escape(str(config.get("name") or folder.resolve().name)),
        "summary": _summary(rows),
        "body": _body(folder, rows, traces, config.get("grid")),
        "failures": _failures(rows),
        "files": " ".join(f'<a href="{n}">{n}</a>' for n in files),
    }
    template = TEMPLATE.read_text(encoding="utf-8")
    # One pass, so that braces inside a prompt are never taken for a placeholder.
    put_text(folder / GALLERY, re.sub(r"\{\{(\w+)\}\}", lambda m: parts[m[1]], template))
    return folder / GALLERY


def _config(folder: Path) -> dict[str, Any]:
    from gen.layers import read_yaml

    return read_yaml(folder / CONFIG) if (folder / CONFIG).is_file() else {}


def _name_methods(rows: list[Row]) -> None:
    """What a method is called beside the others of its modality. A label says what is different in the whole job; what is the
    same in all of a modality's labels of a sampler goes without saying there, if the modality has a section of its own."""
    sections = _group(rows, "modality")
    for group in sections.values():
        if len(sections) > 1:
            words = {label: KNOB.split(label) for label in _group(group, "method")}
            for row in group:
                name, *knobs = words[row["method"]]
                twins = [w for w in words.values() if w[0] == name]
                row["method"] = " ".join([name, *(k for k in knobs if not all(k in t for t in twins))])
        models = {str(r["model"]) for r in group if r.get("model")}
        if len(models) > 1:  # then a sampler alone does not say what made a medium
            for row in group:
                name = row["method"].removesuffix(f" {row.get('model')}")
                row["method"] = f"{name} · {row.get('model')}"


# The parts of the page ---------------------------------------------------------------------------------------------


def _body(folder: Path, rows: list[Row], traces: dict[str, Any], grid: Any) -> str:
    """Methods, comparison and traces: of the one modality, or of each under its name."""
    sections = _group(rows, "modality")
    if len(sections) < 2:
        return _parts(folder, rows, traces, grid, "")
    out = ""
    for name, group in sections.items():
        about = f"{len(group)} item{'' if len(group) == 1 else 's'}"
        inner = _parts(folder, group, traces, grid, f"-{slug(name)}")
        out += f'<div class="modality" id="modality-{slug(name)}"><h2>{escape(name)} <small>{about}</small></h2>\n{inner}</div>\n'
    return out


def _parts(folder: Path, rows: list[Row], traces: dict[str, Any], grid: Any, suffix: str) -> str:
    h = "h3" if suffix else "h2"
    return (f'<section id="methods{suffix}"><{h}>Methods</{h}>{_methods(rows)}</section>\n'
            f'<section id="comparison{suffix}"><{h}>Prompt by prompt</{h}>\n{_comparison(folder, rows)}</section>\n'
            f"{_traces(folder, rows, traces, grid, suffix)}")  # fmt: skip


def _summary(rows: list[Row]) -> str:
    models = sorted({str(r["model"]) for r in rows if r.get("model")})
    names = list(_group(rows, "modality"))
    modality = escape(names[0]) if names else "none"
    if len(names) > 1:
        modality = ", ".join(f'<a href="#modality-{slug(n)}">{escape(n)}</a>' for n in names)
    failed = sum(r.get("status") != "ok" for r in rows)
    judged = [r["verdict"] for r in rows if r["verdict"]]
    facts = [
        ("modalities" if len(names) > 1 else "modality", modality),
        ("items", str(len(rows))),
        ("failed", f'<b class="no">{failed}</b>' if failed else "0"),
    ]
    if judged:
        facts.append(("fulfilled", f"{sum(bool(v['fulfilled']) for v in judged)} of {len(judged)}"))
    facts.append(("models" if len(models) > 1 else "model", escape(", ".join(models)) or "none"))
    return "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)


def _methods(rows: list[Row]) -> str:
    """One line per method. Bars are relative to the largest number of their column, shares to one."""
    lines = []
    for method, group in _group(rows, "method").items():
        good = [r for r in group if r.get("status") == "ok"]
        judged = [r["verdict"] for r in group if r["verdict"]]
        middle = lambda key: _median([r.get(key) for r in good])  # noqa: B023
        lines.append({
            "method": method, "exactness": str(next((r["exactness"] for r in group if r.get("exactness")), "")),
            "items": len(group), "nfe": middle("nfe"), "mal": middle("mean_acceptance_length"),
            "seconds": middle("seconds"), "judged": len(judged),
            "share": sum(bool(v["fulfilled"]) for v in judged) / len(judged) if judged else None,
        })  # fmt: skip
    if not lines:
        return '<p class="none">No items yet.</p>'
    columns = [("nfe", "forward calls"), ("mal", "tokens per call"), ("seconds", "seconds per item")]
    most = {key: max((li[key] or 0 for li in lines), default=0) for key, _ in columns}
    shares = any(li["share"] is not None for li in lines)
    head = "".join(f'<th scope="col" class="num">{n}</th>' for n in
                   ("items", *(n for _, n in columns), *(["fulfilled"] if shares else [])))  # fmt: skip
    body = ""
    for li in lines:
        tag = f'<small class="tag" title="exactness">{escape(li["exactness"])}</small>' if li["exactness"] else ""
        cells = f'<td data-label="items">{li["items"]}</td>'
        for key, name in columns:
            text = f"{li[key]:g}" if key == "nfe" and li[key] is not None else _number(li[key])
            cells += f'<td data-label="{name}">{_bar(text, (li[key] or 0) / (most[key] or 1))}</td>'
        if shares:
            text = "–" if li["share"] is None else f"{li['share']:.0%}"
            cells += f'<td data-label="fulfilled">{_bar(text, li["share"] or 0, "share")}</td>'
        body += f'<tr><th scope="row">{escape(li["method"])} {tag}</th>{cells}</tr>\n'
    head = f'<thead><tr><th scope="col">method</th>{head}</tr></thead>'
    return f'<table class="methods">{head}\n<tbody>{body}</tbody></table>{_key({li["exactness"] for li in lines})}'


def _key(used: set[str]) -> str:
    """What the exactness words on the page mean."""
    from gen.types import EXACTNESS

    said = "".join(f"<dt>{k}</dt><dd>{escape(v)}</dd>" for k, v in EXACTNESS.items() if k in used)
    return f'<dl class="key">{said}</dl>' if said else ""


def _comparison(folder: Path, rows: list[Row]) -> str:
    methods = list(_group(rows, "method"))
    cell = lambda row, name: f'<div role="{row}" class="head">{escape(name)}</div>'
    head = cell("columnheader", "prompt") + "".join(cell("columnheader", m) for m in methods)
    out = f'<div class="line top" role="row">{head}</div>\n'
    for prompt, group in _group(rows, "prompt").items():
        out += f'<div class="line" role="row"><h3 role="rowheader">{escape(prompt)}</h3>'
        by_method = _group(group, "method")
        for method in methods:
            tiles = "".join(_tile(folder, r) for r in by_method.get(method, []))
            out += f'<div role="cell" class="cell" data-method="{escape(method)}">{tiles or "<i>–</i>"}</div>'
        out += "</div>\n"
    return f'<div class="compare" role="table" aria-label="prompt by method" style="--n:{len(methods)}">{out}</div>'


def _tile(folder: Path, row: Row) -> str:
    seed, calls = row.get("seed"), row.get("nfe")
    label = f"seed {seed}" + (f" · {calls} calls" if calls is not None else "")
    caption = f"<figcaption>{_mark(row['verdict'])}{escape(label)}</figcaption>"
    return f'<figure class="tile">{_media(folder, row)}{caption}</figure>'


def _mark(verdict: dict[str, Any] | None) -> str:
    if not verdict:
        return ""
    detail = escape(str(verdict.get("detail") or ""))
    if verdict["fulfilled"]:
        return f'<b class="yes" title="fulfils its prompt: {detail}">✓</b> '
    return f'<b class="no" title="does not fulfil its prompt: {detail}">✗</b> '


def _media(folder: Path, row: Row) -> str:
    """The medium of an item, loaded when it comes into sight; a box that says why where there is none."""
    if row.get("status") != "ok":
        return f'<div class="box failed" title="{escape(str(row.get("error")))}">failed</div>'
    path = inside(folder, row)
    if path is None or not path.is_file():
        return f'<div class="box missing">{escape(str(row.get("file")))} is missing</div>'
    path = _shown(path, row)
    source, kind, prompt = quote(path.name), _kind(path), escape(str(row.get("prompt")))
    if kind == "image":
        facts = [row["method"], f"seed {row.get('seed')}", f"{row.get('nfe')} forward calls", f"item {row['id']}"]
        if row["verdict"]:
            facts.append(("✓ " if row["verdict"]["fulfilled"] else "✗ ") + str(row["verdict"].get("detail") or ""))
        info = escape(" · ".join(facts))
        return (f'<a class="pic" href="{source}" data-info="{info}"><img src="{source}" alt="{prompt}" loading="lazy" '
                f"{_size(path)}></a>")  # fmt: skip
    if kind == "audio":
        drawn = _preview(path, lambda: spectrogram_png(*open_sound(path)))
        seen = f'<img src="{drawn}" alt="spectrogram" loading="lazy" width="{WIDTH}" height="{HEIGHT}">' if drawn else ""
        player = f'<audio controls preload="metadata" loading="lazy" src="{source}" aria-label="{prompt}"></audio>'
        return f'<div class="sound"><div class="spectrum">{seen}</div>{player}</div>'
    if kind == "video":
        drawn = _preview(path, lambda: Image.fromarray(first_frame(path)))
        still = f' poster="{drawn}" {_size(path.parent / PREVIEW / f"{path.name}.png")}' if drawn else ""
        return (f'<div class="clip"><video controls loop muted playsinline preload="metadata" loading="lazy" src="{source}" '
                f'aria-label="{prompt}"{still}></video></div>')  # fmt: skip
    if path.suffix.lower() == ".txt":
        text = path.read_text(encoding="utf-8", errors="replace")
        return f'<a class="text" href="{source}">{escape(text[:EXCERPT])}{" …" if len(text) > EXCERPT else ""}</a>'
    return f'<a class="box" href="{source}">{escape(path.name)}</a>'


def _shown(path: Path, row: Row) -> Path:
    """The file of an item that a page can show: its own, or else one that was written beside it."""
    others = companions(path.parent, row)
    return next((p for p in (path, *others) if _kind(p) and p.is_file()), path)


def _kind(path: Path) -> str:
    return next((kind for kind, endings in KINDS.items() if path.suffix.lower() in endings), "")


def _preview(path: Path, draw: Callable[[], Image.Image]) -> str | None:
    """The address of the picture that stands for a medium, made if there is none or the medium is newer; ``None`` for one
    that cannot be read here, though the browser may."""
    folder = path.parent / PREVIEW
    picture = folder / f"{path.name}.png"
    if not picture.is_file() or picture.stat().st_mtime_ns < path.stat().st_mtime_ns:
        try:
            drawn = draw()
        except GenError:
            picture.unlink(missing_ok=True)  # of a medium that stood here before
            return None
        folder.mkdir(exist_ok=True)
        put(picture, lambda temporary: drawn.save(temporary, format="PNG"))
    return f"{PREVIEW}/{quote(picture.name)}"


def _size(path: Path) -> str:
    """Width and height, so that the page does not jump as pictures load."""
    try:
        with Image.open(path) as picture:  # reads the header alone
            width, height = picture.size
    except OSError:
        return 'class="broken"'
    return f'width="{width}" height="{height}"' + (' class="px"' if max(width, height) <= SMALL else "")


def _traces(folder: Path, rows: list[Row], traces: dict[str, Any], grid: Any, suffix: str) -> str:
    """``grid``: of rows that do not say their own."""
    drawn = [(r, traces[r["id"]]) for r in rows if r["id"] in traces and r.get("status") == "ok"]
    if not drawn:
        return ""
    cards = ""
    for row, steps in drawn:
        facts = [row["method"], f"seed {row.get('seed')}", f"{row.get('nfe')} forward calls",
                 f"{_number(row.get('mean_acceptance_length'))} tokens per call"]  # fmt: skip
        h = "h4" if suffix else "h3"
        title = f"<{h}>{escape(str(row.get('prompt')))}</{h}><p>{escape(' · '.join(facts))}</p>"
        kind = _kind(_shown(folder / str(row.get("file")), row))
        cards += draw_trace(row["id"], steps, row.get("grid") or grid, title, _media(folder, row), f"{TRACES}, item {row['id']}", kind)
    about = "Each cell is a token, coloured by the forward call that committed it. The bars count the tokens of a call."
    h = "h3" if suffix else "h2"
    return f'<section id="traces{suffix}"><{h}>How it was decoded</{h}><p class="about">{about}</p>\n{cards}</section>'


def _failures(rows: list[Row]) -> str:
    lines = "".join(
        f"<tr><th scope='row'>{escape(r['id'])}</th><td>{escape(str(r.get('prompt')))}</td>"
        f"<td>{escape(r['method'])}</td><td class='error'>{escape(str(r.get('error')))}</td></tr>\n"
        for r in rows if r.get("status") != "ok"
    )  # fmt: skip
    if not lines:
        return ""
    head = "<thead><tr><th>item</th><th>prompt</th><th>method</th><th>error</th></tr></thead>"
    table = f'<table class="failures">{head}<tbody>{lines}</tbody></table>'
    return f'<section id="failed"><h2>Failed</h2>{table}</section>'


# Small parts -------------------------------------------------------------------------------------------------------


def _group(rows: list[Row], key: str) -> dict[str, list[Row]]:
    """Rows by a key, in the order in which its values first appear."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[str(row.get(key))].append(row)
    return groups


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
