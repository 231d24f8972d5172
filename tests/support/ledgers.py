"""Manifests and plans that tests write, with checksums and the keys that every row has."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gen.store.sealed import plan_text, seal

ROW = {
    "modality": "image",
    "prompt": "a prompt",
    "sampler": "autoregressive",
    "seed": 0,
    "file": "a.png",
    "sha256": "",
}


def full(row: dict[str, Any], number: int) -> dict[str, Any]:
    """A row with the keys that it lacks."""
    return {"index": number, **ROW, **row}


def lines(rows: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(seal(full(row, i)) for i, row in enumerate(rows))


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_bytes(lines(rows))


def add_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("ab") as file:
        file.write(lines(rows))


def write_verdicts(folder: Path, verdicts: dict[str, Any]) -> None:
    """The file of ``gen check``."""
    (folder / "check.json").write_bytes(seal(verdicts))


def write_plan(path: Path, items: int | list[dict[str, Any]], **keys: Any) -> None:
    """A plan of so many items, or of these, with what they lack."""
    some = [{} for _ in range(items)] if isinstance(items, int) else items
    whole = [
        {
            "id": f"{i:016x}",
            "index": i,
            "entry": 0,
            "prompt": "a prompt",
            "seed": 0,
            "stem": f"{i:06d}-a",
            **item,
        }
        for i, item in enumerate(some)
    ]
    head = {"fingerprint": "f", "relevant": {}, "labels": ["a", "b"], "shards": [], "made_with": {}}
    path.write_bytes(plan_text({**head, **keys, "items": whole}))
