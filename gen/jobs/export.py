"""``gen export``: the rows of a job as one Parquet file, to look at with whatever reads tables.

The columns and their types are always the same, so that files of several jobs can be read as one
table. What has parts of its own (overrides, meta, the grid) is JSON text, and so is ``other``:
everything a row says that has no column. ``passed``, ``valid`` and ``detail`` are what ``gen
check`` found, and empty where it has not been asked. Rows are written in groups, and the file
appears under its name when it is whole.

With ``--media``, images, sounds or videos are in a column of that name, with the metadata by which
``datasets.load_dataset`` shows them; media of other or several kinds are bytes in ``media``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gen.core.errors import GenError
from gen.core.files import put, writing
from gen.media.kinds import kind_of_file
from gen.store.ledger import Row, read_plan, read_rows, read_verdicts, require_job
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
    "trace_sha256": TEXT,
    "also": PARTS,
    "search": PARTS,
    "nfe": WHOLE,
    "tokens": WHOLE,
    "tokens_computed": WHOLE,
    "positions_computed": WHOLE,
    "mean_acceptance_length": NUMBER,
    "draft_acceptance_rate": NUMBER,
    "grid": PARTS,
    "adapter": TEXT,
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
FOLDER_COLUMNS = (  # columns about files of the job folder, of no use beside a copy of the media
    "file",
    "member",
    "shard_sha256",
    "shard_bytes",
    "tokens_file",
    "also",
)
DTYPES = {TEXT: "string", WHOLE: "int64", NUMBER: "float64", FLAG: "bool", PARTS: "string"}
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
    if path.exists():
        raise GenError(f"{path} exists already; expected an unused name")
    plan, rows = read_plan(folder), export_rows(folder)
    kind = one_kind(rows) if media else None
    lost: list[str] = []
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    columns = schema(pa, media, kind)
    put(path, lambda temporary: _write(pa, temporary, folder, rows, columns, lost))
    return {
        "file": str(path),
        "rows": len(rows),
        "failed": sum(r.get("status") != "ok" for r in rows),
        "pending": len(plan["items"]) - len(rows),
        "bytes": path.stat().st_size,
        "lost": lost,
    }


def export_rows(folder: Path) -> list[Row]:
    """Read the rows of a job with the verdicts of its check."""
    verdicts = read_verdicts(folder)
    return [
        {**(v if isinstance(v := verdicts.get(r["id"]), dict) else {}), **r}
        for r in read_rows(folder)
    ]


def one_kind(rows: list[Row]) -> str | None:
    """Find the kind of all media; None of several or other kinds."""
    names = [str(r.get("member") or r["file"]) for r in rows if r.get("file")]
    kinds = {kind_of_file(name) for name in names}
    return kinds.pop() if len(kinds) == 1 else None


def schema(pa: Any, media: bool = False, kind: str | None = None) -> pyarrow.Schema:
    """Return the columns in their order; all but id may be empty.

    Args:
        pa: pyarrow.
        media: with the media themselves.
        kind: ``image``, ``audio`` or ``video``, as which ``datasets`` shows the media.
    """
    types = {
        TEXT: pa.string(),
        WHOLE: pa.int64(),
        NUMBER: pa.float64(),
        FLAG: pa.bool_(),
        PARTS: pa.string(),
    }
    fields = [pa.field(name, types[kind], nullable=name != "id") for name, kind in COLUMNS.items()]
    if kind is None:
        return pa.schema([*fields, *([pa.field("media", pa.binary())] if media else [])])
    shown = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    features = {
        **{name: {"dtype": DTYPES[k], "_type": "Value"} for name, k in COLUMNS.items()},
        kind: {"_type": kind.capitalize()},
    }
    about = json.dumps({"info": {"features": features}})
    return pa.schema([*fields, pa.field(kind, shown)], metadata={"huggingface": about})


def _write(
    pa: Any, path: Path, folder: Path, rows: list[Row], columns: Any, lost: list[str]
) -> None:
    extra = [name for name in columns.names if name not in COLUMNS]
    with (
        pa.parquet.ParquetWriter(path, columns, compression="zstd") as file,
        Members(folder) as files,
    ):
        for group in _groups(folder, rows, files, extra, lost):
            file.write_table(pa.Table.from_pylist(group, schema=columns))


def _groups(
    folder: Path, rows: list[Row], files: Members, extra: list[str], lost: list[str]
) -> Iterator[list[Row]]:
    """Yield the rows as cells, in groups that fit into memory."""
    group, size = [], 0
    for row in rows:
        cells = cells_of(folder, row)
        for name in extra:
            data = _bytes_of(files, row, lost)
            size += len(data or b"")
            named = str(row.get("member") or row.get("file"))
            whole = None if data is None else {"bytes": data, "path": Path(named).name}
            cells[name] = data if name == "media" else whole
        group.append(cells)
        if len(group) >= GROUP_ROWS or size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def cells_of(folder: Path, row: Row) -> dict[str, Any]:
    """Return the values of a row by column. Raises ``GenError`` for a value of another type than
    its column's."""
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
