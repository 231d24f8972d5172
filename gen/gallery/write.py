"""Gallery of a job folder: a static page that opens from the disk, without a server or a network.

The gallery reads only files of the folder (manifest, journals, plan, config, verdicts, traces,
outputs) and refers to the outputs by relative paths, so a folder can be moved, zipped or served as
it is. A small job is one page, with a section for each modality. The page of a large job holds the
facts and loads the items, 100 at a time, from small scripts beside it (`gen.gallery.items`). The
page is the template ``templates/gallery.html``, which escapes every value. Traces are drawn in
plain SVG, so they show without a script; the events of every step are stored beside the drawing as
JSON, which the page's player replays.

The gallery may be written repeatedly while the job runs, by several processes at once: every file
appears whole, and files that would not change are left alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from zlib import crc32

from gen.config.yaml_text import load_yaml
from gen.core.condition_parts import KINDS as MEDIA_PARTS
from gen.core.errors import GenError, bad_value, shown
from gen.core.files import TEMPORARY, put_text, sweep_temporaries
from gen.core.processes import is_dead
from gen.gallery.items import FIELDS, KINDS, SHARED, write_items
from gen.gallery.items import FOLDER as ITEMS
from gen.gallery.media import (
    EXCERPT,
    PREVIEW,
    SMALL,
    Files,
    Row,
    preview_of,
    preview_sheet,
    preview_start,
)
from gen.gallery.page import (
    FIRST_FAILURES,
    FIRST_TRACES,
    facts,
    failures,
    filters,
    group_by,
    guarantees,
    modalities,
    searches,
    sections,
    traces,
)
from gen.gallery.render import render
from gen.media.given import is_data_uri
from gen.store.ledger import (
    CHECK,
    CONFIG,
    GALLERY,
    MANIFEST,
    PLAN,
    is_job,
    read_plan,
    read_rows,
    read_verdicts,
)

__all__ = ["EXCERPT", "PAGE", "preview_of", "preview_sheet", "preview_start", "write_gallery"]
PAGE = 200  # items that one page shows whole
TURNS = 3  # attempts to write a page while the manifest changes
PARAM = re.compile(r" (?=[\w.]+=)")  # between the parts of a label
CHECKSUM = re.compile(r"#.*, checksum ([0-9a-f]{8})\n")  # of the rest of a config
NAME = re.compile(r"^name:.*(?:\n[ \t].*)*", re.MULTILINE)  # of a job, in its config


def write_gallery(folder: Path) -> Path:
    """Update ``index.html`` and the files it loads, and return its path.

    Raises:
        GenError: the folder holds no job, or malformed verdicts or traces.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).is_file() and not (folder / PLAN).is_file():
        raise GenError(
            f"{folder} has no {MANIFEST}; expected a folder that gen run or gen sample wrote"
        )
    for _ in range(TURNS):  # so that of several writers the last one leaves the newest page
        before = _version(folder)
        _write(folder)
        if _version(folder) == before:
            break
    return folder / GALLERY


def _version(folder: Path) -> Any:
    try:
        stat = (folder / MANIFEST).stat()
    except OSError:  # none, or a link that leads nowhere
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _write(folder: Path) -> None:
    rows = _rows(folder)
    planned = len(read_plan(folder)["items"]) if is_job(folder) else 0
    planned = max(len(rows), planned)
    large = planned > PAGE
    for left in (*folder.glob(f"{TEMPORARY}*-{GALLERY}"), *(folder / ITEMS).glob(f"{TEMPORARY}*")):
        if is_dead("-".join(left.name.removeprefix(TEMPORARY).split("-")[:3])):
            left.unlink(missing_ok=True)
    if len(rows) == planned:  # no preview is to come
        sweep_temporaries(folder / PREVIEW)
    files = Files(folder)
    contents = (_large if large else _small)(files, rows, planned)
    page = render(
        "gallery",
        title=_title(_name(folder) or folder.resolve().name, rows),
        facts=facts(rows, planned, large),
        filters=filters(rows, large),
        files=[n for n in (CONFIG, PLAN, MANIFEST, CHECK) if (folder / n).is_file()],
        large=large,
        **contents,
    )
    put_text(folder / GALLERY, page)


def _small(files: Files, rows: list[Row], planned: int) -> dict[str, Any]:
    return {"groups": sections(files, rows), "failures": failures(rows)}


def _large(files: Files, rows: list[Row], planned: int) -> dict[str, Any]:
    chunks = write_items(files, rows, whole=len(rows) >= planned)
    return {
        "groups": [about for about, _ in modalities(rows)],
        "guarantees": guarantees(rows),
        "manifest": MANIFEST,
        "about": {
            "chunks": chunks,
            "items": len(rows),
            "planned": planned,
            "small": SMALL,
            "fields": FIELDS,
            "shared": SHARED,
            "kinds": KINDS,
        },
        "searches": searches(files, rows, most=FIRST_TRACES),
        "traces": traces(files, rows, most=FIRST_TRACES),
        "failures": failures(rows, FIRST_FAILURES),
    }


def _rows(folder: Path) -> list[Row]:
    """Read the rows; add ``method``, the sampler's name on the page, and ``verdict``, if any, and
    the media of conditions to ``prompt``."""
    rows, verdicts = read_rows(folder), read_verdicts(folder)
    for name, verdict in verdicts.items():
        if not isinstance(verdict, dict) or "passed" not in verdict:
            raise bad_value(
                f"item {name}",
                verdict,
                "a verdict with passed, valid and detail",
                str(folder / CHECK),
            )
    for row in rows:
        row["prompt"] = _prompt(row)
        row["method"] = str(row.get("sampler"))
        row["verdict"] = verdicts.get(row["id"], row if "passed" in row else None)
    _name_methods(rows)
    return rows


def _prompt(row: Row) -> str:
    """Return the prompt of a row with the names of the media in its condition."""
    stated = row.get("condition") or {}
    media = [medium for part in MEDIA_PARTS for medium in stated.get(part) or ()]
    names = [Path(medium).name for medium in media if not is_data_uri(medium)]
    return " · ".join(filter(None, [str(row.get("prompt")), *names]))


def _title(name: str, rows: list[Row]) -> str:
    """Put the modality before the name of a job that has one: ``action/fast``."""
    several = {str(r.get("modality")) for r in rows}
    modality = several.pop() if len(several) == 1 else ""
    return f"{modality}/{name}" if modality and modality not in name else name


def _name(folder: Path) -> str:
    """Read the name of the job. Only its lines of the config are parsed, because a config may hold
    thousands of prompts."""
    path = folder / CONFIG
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        found = NAME.search(text)
        tree = load_yaml(found[0]) if found else {}
    except (GenError, UnicodeDecodeError) as error:
        raise GenError(f"{path} is not a valid job file: {' '.join(str(error).split())}") from error
    said = CHECKSUM.match(text)
    if said and said[1] != f"{crc32(text[said.end() :].encode()):08x}":
        raise GenError(
            f"{path} is not as it was written: its checksum does not fit; gen run with the same job"
            " writes it again"
        )
    if not isinstance(tree, dict):
        raise GenError(f"{path} is not a valid job file: its name is {shown(tree)}")
    return str(tree.get("name") or "")


def _name_methods(rows: list[Row]) -> None:
    """Name each method as it differs from the others of its modality.

    A label holds the parameters that differ in the whole job. Where the modality has a section of
    its own, parameters that all its labels of a sampler share are left out.
    """
    groups = group_by(rows, "modality")
    for group in groups.values():
        if len(groups) > 1:
            words = {label: PARAM.split(label) for label in group_by(group, "method")}
            names = {
                label: " ".join([name, *_telling(name, params, words)])
                for label, (name, *params) in words.items()
            }
            for row in group:
                row["method"] = names[row["method"]]
        models = {str(r["model"]) for r in group if r.get("model")}
        if len(models) > 1:  # then a sampler's name alone does not identify a method
            for row in group:
                name = row["method"].removesuffix(f" {row.get('model')}")
                row["method"] = f"{name} · {row.get('model')}"


def _telling(name: str, params: list[str], words: dict[str, list[str]]) -> list[str]:
    """Return the parameters that some other label of this sampler lacks."""
    twins = [w for w in words.values() if w[0] == name]
    return [k for k in params if not all(k in t for t in twins)]
