"""Items of a large job as small scripts that its page loads: ``gallery/items-00000.js`` holds those
of index 0 to 499, and so on.

A page on the disk may load scripts but read no files, so a script is a call: ``gen.items(0,
[strings], [[item], ...])``. Prompts and methods repeat, so the fields in `SHARED` are indices into
the strings of the same file. The first line of a file is a digest of its inputs and a checksum of
the rest, so an update while the job runs writes only the last file or two, and damaged ones.
"""

from __future__ import annotations

import hashlib
import json
import marshal
from collections import defaultdict
from pathlib import Path
from typing import Any
from zlib import crc32

from gen.core.errors import GenError
from gen.core.files import put_text, read_regular, writing
from gen.gallery.media import Files, Row, stamp, view
from gen.gallery.page import overrides_of

FOLDER = "gallery"
CHUNK = 500  # items of a file
EXCERPT = 200  # characters of a text
# Fields of an item, in this order; trailing empty fields are left out.
SHARED = ("prompt", "method", "modality", "status")  # positions in the strings of the file
OWN = (
    "seed",
    "passes",
    "kind",
    "source",
    "image",
    "note",
    "tar",
    "overrides",
    "passed",
    "detail",
)
KINDS = ("image", "audio", "video", "text", "file", "missing", "failed")
FIELDS = ("index", *SHARED, *OWN)
# Fields of a row that go into its item.
USED = (
    "position",
    *SHARED,
    "seed",
    "nfe",
    "file",
    "member",
    "also",
    "text",
    "error",
    "overrides",
    "shard_sha256",
    "verdict",
)
VERSION = 1  # of these files


def write_items(files: Files, rows: list[Row], whole: bool) -> list[int]:
    """Update the files of items and return their numbers. ``whole``: all items are there, so
    surplus files are deleted."""
    folder = files.folder / FOLDER
    with writing(folder):
        folder.mkdir(exist_ok=True)
    chunks: dict[int, list[Row]] = defaultdict(list)
    for position, row in enumerate(rows):
        index = row.get("index")
        row["position"] = index if isinstance(index, int) and index >= 0 else position
        chunks[row["position"] // CHUNK].append(row)
    for number, group in chunks.items():
        path = chunk_path(folder, number)
        if _made_from(path) != _digest(files, group):
            text = chunk_text(files, number, group)
            head = _digest(files, group)  # of now: previews may have been made
            put_text(path, f"{head} {crc32(text.encode()):08x}\n{text}")
    if whole:
        for path in set(folder.glob("items-*.js")) - {chunk_path(folder, n) for n in chunks}:
            path.unlink(missing_ok=True)
    return sorted(chunks)


def chunk_path(folder: Path, number: int) -> Path:
    return folder / f"items-{number:05d}.js"


def _made_from(path: Path) -> str:
    """Return the digest of the inputs of a whole file, else nothing."""
    try:
        head, _, text = read_regular(path).partition(b"\n")
    except (OSError, GenError):  # it is written again
        return ""
    digest, _, checksum = head.decode(errors="replace").rpartition(" ")
    return digest if checksum == f"{crc32(text):08x}" else ""


def _digest(files: Files, rows: list[Row]) -> str:
    """Return a digest of the inputs of `chunk_text`, as a comment."""
    made_from = [(*map(row.get, USED), stamp(files, row)) for row in rows]
    plain = marshal.dumps(
        (VERSION, made_from), 0
    )  # a fifth of the time of repr; format 0 says equal things in equal bytes
    return f"// {hashlib.sha256(plain).hexdigest()[:24]}"


def chunk_text(files: Files, number: int, rows: list[Row]) -> str:
    words: dict[str, int] = {}
    items = [_item(files, row, words) for row in rows]

    def compact(tree):
        return json.dumps(tree, ensure_ascii=False, separators=(",", ":"))

    return f"gen.items({number}, {compact(list(words))}, {compact(items)});\n"


def _item(files: Files, row: Row, words: dict[str, int]) -> list[Any]:
    v, verdict = view(files, row), row["verdict"]
    note = v.note if len(v.note) <= EXCERPT else v.note[:EXCERPT] + " …"
    item = [row["position"]]
    for name in SHARED:
        item.append(words.setdefault(str(row.get(name)), len(words)))
    item += (
        row.get("seed"),
        row.get("nfe"),
        KINDS.index(v.kind),
        v.source,
        v.image if v.image != v.source else "",
        note,
        v.tar,
        " ".join(overrides_of(row)) if "overrides" in row else "",
    )
    if verdict:
        return [*item, 1 if verdict["passed"] else -1, str(verdict.get("detail") or "")]
    while item[-1] == "":
        item.pop()
    return item
