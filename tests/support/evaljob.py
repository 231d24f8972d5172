"""Job folders of given media, without a model: what tests of metrics measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gen.core.files import sha256
from gen.store.ledger import MANIFEST, PLAN, parse_rows
from gen.store.sealed import plan_text, seal


def write_job(
    folder: Path,
    write: Callable[[int, Path], None],
    count: int,
    *,
    modality: str = "image",
    extension: str = "png",
    prompts: Sequence[str] = ("a red circle",),
    samplers: Sequence[str] = ("sjd",),
    meta: Callable[[int], dict[str, Any]] | None = None,
    model: str | None = None,
    shard_items: int = 4,
) -> Path:
    """Write a finished job of layout ``files`` whose media ``write(index, path)`` makes."""
    folder.mkdir(parents=True)
    items, rows = [], []
    for index in range(count):
        stem = f"{index:06d}-item"
        path = folder / f"{stem}.{extension}"
        write(index, path)
        item = {
            "id": f"{index:016x}",
            "index": index,
            "entry": 0,
            "prompt": prompts[index % len(prompts)],
            "seed": index,
            **({"meta": meta(index)} if meta else {}),
        }
        items.append({**item, "stem": stem})
        said = {
            "modality": modality,
            "model": model or "none",
            "sampler": samplers[index % len(samplers)],
            "status": "ok",
            "file": path.name,
            "sha256": sha256(path),
            "bytes": path.stat().st_size,
            "attempt": 1,
        }
        rows.append({**{k: v for k, v in item.items() if k != "entry"}, **said})
    starts = range(0, count, shard_items)
    plan = {
        "plan": 1,
        "fingerprint": "test",
        "made_with": {},
        "labels": [{}],
        "relevant": {"entries": [{"model": model, "modality": modality}]},
        "items": items,
        "shards": [[first, min(first + shard_items, count)] for first in starts],
    }
    (folder / PLAN).write_bytes(plan_text(plan))
    (folder / MANIFEST).write_bytes(b"".join(map(seal, rows)))
    return folder


def change_rows(folder: Path, change: Callable[[int, dict[str, Any]], None]) -> None:
    """Change the rows of a finished job, as a run that makes items again does."""
    rows = parse_rows(folder / MANIFEST)
    for index, row in enumerate(rows):
        change(index, row)
    (folder / MANIFEST).write_bytes(b"".join(map(seal, rows)))
