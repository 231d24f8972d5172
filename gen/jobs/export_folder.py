"""``gen export --dataset``: media and ``metadata.jsonl``, the layout that ``load_dataset`` shows as
images, sounds or videos.

The file ``metadata.jsonl`` has a row per medium with ``file_name``, prompt, seed and what else the
manifest says; parts with keys of their own are JSON texts. It is written last, so a folder that
has it is whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gen.core.errors import GenError
from gen.core.files import put, put_text, writing
from gen.jobs.export import FOLDER_COLUMNS, cells_of, export_rows, one_kind
from gen.store.ledger import Row, require_job
from gen.store.shard_reader import Members

METADATA = "metadata.jsonl"


def export_dataset(folder: str | Path, out: str | Path) -> dict[str, Any]:
    """Write the media of all finished items with their metadata.

    Args:
        folder: a job folder.
        out: a new or empty folder.

    Returns:
        ``folder``, ``kind`` (``image``, ``audio`` or ``video``), ``rows``, and ``lost``: the ids
        of items whose output is missing or altered.

    Raises:
        GenError: a folder that holds something, or media of other or several kinds.
    """
    folder, out = require_job(folder), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise GenError(f"{out} exists already; expected an unused name, or an empty folder")
    rows = [r for r in export_rows(folder) if r.get("status") == "ok"]
    kind = one_kind(rows)
    if kind is None:
        raise GenError(
            f"{folder} holds {_kinds_in_words(rows)}; expected images alone, sounds alone or videos"
            " alone (gen export --parquet --media takes all)"
        )
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    lost: list[str] = []
    lines: list[dict[str, Any]] = []
    with Members(folder) as files:
        for row in rows:
            name = Path(row.get("member") or row["file"]).name
            with files.path(row) as source:
                data = source.read_bytes() if source else b""
            if hashlib.sha256(data).hexdigest() != row.get("sha256"):
                lost.append(row["id"])
                continue
            _write(out / name, data)
            said = {k: v for k, v in cells_of(folder, row).items() if k not in FOLDER_COLUMNS}
            lines.append({"file_name": name, **said})
    kept = [k for k in lines[0] if any(line[k] is not None for line in lines)] if lines else []
    text = "".join(
        json.dumps({k: line[k] for k in kept}, ensure_ascii=False) + "\n" for line in lines
    )
    put_text(out / METADATA, text)
    return {"folder": str(out), "kind": kind, "rows": len(lines), "lost": lost}


def _write(path: Path, data: bytes) -> None:
    put(path, lambda temporary: temporary.write_bytes(data))


def _kinds_in_words(rows: Sequence[Row]) -> str:
    names = (str(row.get("member") or row["file"]) for row in rows if row.get("file"))
    found = sorted({Path(name).suffix for name in names})
    return f"media that end in {' and '.join(found)}" if found else "no finished media"
