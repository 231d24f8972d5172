"""``gen export``: the rows of a job as one Parquet file, to look at with whatever reads tables.

The columns and their types are always the same, so that files of several jobs can be read as one
table. What has parts of its own (overrides, meta, the grid) is JSON text, and so is ``other``:
everything a row says that has no column. ``passed``, ``valid`` and ``detail`` are what ``gen
check`` found, and empty where it has not been asked. Rows are written in groups, and the file
appears under its name when it is whole.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gen.core.errors import GenError
from gen.core.files import put, writing
from gen.store.ledger import CHECK, Row, read_json, read_plan, read_rows, require_job
from gen.store.shard_reader import Members

if TYPE_CHECKING:
    import pyarrow

TEXT, WHOLE, NUMBER, FLAG, PARTS = "text", "whole number", "number", "flag", "parts"
COLUMNS = {
    "id": TEXT,
    "index": WHOLE,
    "modality": TEXT,
    "prompt": TEXT,
    "seed": WHOLE,
    "sampler": TEXT,
    "model": TEXT,
    "status": TEXT,
    "error": TEXT,
    "guarantee": TEXT,
    "file": TEXT,
    "member": TEXT,
    "sha256": TEXT,
    "bytes": WHOLE,
    "shard_sha256": TEXT,
    "shard_bytes": WHOLE,
    "tokens_file": TEXT,
    "beside_sha256": TEXT,
    "also": PARTS,
    "nfe": WHOLE,
    "tokens": WHOLE,
    "tokens_computed": WHOLE,
    "positions_computed": WHOLE,
    "mean_acceptance_length": NUMBER,
    "draft_acceptance_rate": NUMBER,
    "grid": PARTS,
    "overrides": PARTS,
    "input_id": TEXT,
    "meta": PARTS,
    "source_sha256": TEXT,
    "decoded_with": PARTS,
    "attempt": WHOLE,
    "seconds": NUMBER,
    "batch": WHOLE,
    "worker": TEXT,
    "passed": FLAG,
    "valid": FLAG,
    "detail": TEXT,
    "other": PARTS,
}
FITS = {
    TEXT: lambda v: isinstance(v, str),
    FLAG: lambda v: isinstance(v, bool),
    WHOLE: lambda v: isinstance(v, int) and not isinstance(v, bool) and -(2**63) <= v < 2**63,
    NUMBER: lambda v: isinstance(v, int | float) and not isinstance(v, bool),
}
GROUP_ROWS, GROUP_BYTES = (
    4096,
    64 << 20,
)  # rows of a group at most, and bytes of media after which one is written


def export_parquet(folder: str | Path, path: str | Path, *, media: bool = False) -> dict[str, Any]:
    """Write all finished items of a job, failed ones too, in the order of the plan. ``media``: with
    the files themselves, as a column of bytes.

    Returns ``file``, ``rows``, ``failed``, ``pending`` (items that are not finished yet), ``bytes``
    (of the file) and ``lost``: the ids of items whose output is missing or altered, which have no
    bytes in the column. Raises ``GenError`` without pyarrow, and for rows that do not fit the
    columns.
    """
    pa = _pyarrow()
    folder, path = require_job(folder), Path(path)
    if path.is_dir():
        raise GenError(
            f"{path} is a folder; expected the name of a file, such as {path / 'items.parquet'}"
        )
    plan, verdicts = read_plan(folder), read_json(folder / CHECK)
    rows = [
        {**(v if isinstance(v := verdicts.get(r["id"]), dict) else {}), **r}
        for r in read_rows(folder)
    ]
    lost: list[str] = []
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    put(path, lambda temporary: _write(pa, temporary, folder, rows, media, lost))
    return {
        "file": str(path),
        "rows": len(rows),
        "failed": sum(r.get("status") != "ok" for r in rows),
        "pending": len(plan["items"]) - len(rows),
        "bytes": path.stat().st_size,
        "lost": lost,
    }


def schema(pa: Any, media: bool = False) -> pyarrow.Schema:
    """Return the columns in their order; all but id may be empty."""
    types = {
        TEXT: pa.string(),
        WHOLE: pa.int64(),
        NUMBER: pa.float64(),
        FLAG: pa.bool_(),
        PARTS: pa.string(),
    }
    fields = [pa.field(name, types[kind], nullable=name != "id") for name, kind in COLUMNS.items()]
    return pa.schema([*fields, *([pa.field("media", pa.binary())] if media else [])])


def _write(
    pa: Any, path: Path, folder: Path, rows: list[Row], media: bool, lost: list[str]
) -> None:
    columns = schema(pa, media)
    with (
        pa.parquet.ParquetWriter(path, columns, compression="zstd") as file,
        Members(folder) as files,
    ):
        for group in _groups(folder, rows, files if media else None, lost):
            file.write_table(pa.Table.from_pylist(group, schema=columns))


def _groups(
    folder: Path, rows: list[Row], files: Members | None, lost: list[str]
) -> Iterator[list[Row]]:
    """Yield the rows as cells, in groups that fit into memory."""
    group, size = [], 0
    for row in rows:
        cells = _cells(folder, row)
        if files is not None:
            cells["media"] = _bytes_of(files, row, lost)
            size += len(cells["media"] or b"")
        group.append(cells)
        if len(group) >= GROUP_ROWS or size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _cells(folder: Path, row: Row) -> dict[str, Any]:
    """Raises ``GenError`` for a value of another type than its column's."""
    other = {k: v for k, v in row.items() if k not in COLUMNS}
    cells = {}
    for name, kind in COLUMNS.items():
        value = (other or None) if name == "other" else row.get(name)
        if value is not None and kind == PARTS:
            value = json.dumps(value, ensure_ascii=False, sort_keys=True)
        elif value is not None and not FITS[kind](value):
            raise GenError(
                f"{name} of item {row['id']} in {folder} is {value!r}; expected a {kind}"
            )
        cells[name] = value
    return cells


def _bytes_of(files: Members, row: Row, lost: list[str]) -> bytes | None:
    if row.get("status") != "ok":
        return None
    with files.path(row) as path:
        data = path.read_bytes() if path else b""
    if hashlib.sha256(data).hexdigest() == row.get("sha256"):
        return data
    lost.append(row["id"])
    return None


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet  # optional: the extra "parquet"
    except ImportError:
        raise GenError(
            "a Parquet file needs the package pyarrow; install it with: pip install"
            ' "gen-toolkit[parquet]"'
        ) from None
    return pyarrow


def export(args: argparse.Namespace) -> int:
    """Carry out ``gen export DIR --parquet FILE``; return 1 if requested media are missing or
    altered."""
    found = export_parquet(args.folder, args.parquet, media=args.media)
    failed = f", {found['failed']} of them failed" if found["failed"] else ""
    pending = f"; {found['pending']} items are still pending" if found["pending"] else ""
    print(f"{found['file']}: {found['rows']} rows{failed}, {found['bytes']} bytes{pending}")
    if found["lost"]:
        more = f" and {len(found['lost']) - 3} more" if len(found["lost"]) > 3 else ""
        print(
            f"gen: the media of {', '.join(found['lost'][:3])}{more} are missing or altered and"
            " have no bytes in the file; gen run makes them again",
            file=sys.stderr,
        )
    return 1 if found["lost"] else 0
