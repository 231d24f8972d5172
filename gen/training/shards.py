"""Shards of tokens: safetensors files that appear whole or not at all, and their manifest.

A shard ``tokens-00012.safetensors`` holds ``tokens`` int32 [sum of lengths], ``lengths`` int32 [N],
and ``given`` int32 [N, slots] where media stand in the conditions. Its header says which sources it
is of, which conditions they have, and what was left out. What is there of a shard that is not
finished lies in ``part-00012.safetensors``. ``plan.json`` says what is encoded and how;
``manifest.json`` appears last, when all is done.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gen.core.errors import GenError
from gen.core.files import put, put_text, sha256

PLAN, MANIFEST = "plan.json", "manifest.json"
FORMAT = 1


@dataclass
class Shard:
    """Tokens of some sources.

    Attributes:
        tokens: long [T] of every sample.
        sources: name of every sample's source.
        conditions: parts of every sample's condition, or None.
        given: long [slots], tokens of the medium in every sample's condition; empty without media.
        skipped: sources that were left out, with the reason.
        read: number of sources that were read, in order.
    """

    tokens: list[Tensor] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    conditions: list[dict[str, Any] | None] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    read: int = 0


def shard_path(folder: Path, number: int) -> Path:
    """Return the file of a shard."""
    return folder / f"tokens-{number:05d}.safetensors"


def part_path(folder: Path, number: int) -> Path:
    """Return the file of the part of a shard that is there before the rest."""
    return folder / f"part-{number:05d}.safetensors"


def write_shard(path: Path, shard: Shard, mark: str) -> None:
    """Write a shard. ``mark``: fingerprint of the plan. Raises ``GenError`` if it cannot."""
    flat = torch.cat([*shard.tokens, torch.zeros(0, dtype=torch.long)]).to(torch.int32)
    tensors = {"tokens": flat, "lengths": torch.tensor(list(map(len, shard.tokens))).int()}
    if shard.given:
        tensors["given"] = torch.stack(shard.given).int()
    head = {
        "plan": mark,
        "digest": _digest(*tensors.values()),
        "sources": shard.sources,
        "conditions": shard.conditions,
        "skipped": shard.skipped,
        "read": shard.read,
    }
    data = save(tensors, {"gen": json.dumps(head, ensure_ascii=False)})
    put(path, lambda temporary: temporary.write_bytes(data))


def read_shard(path: Path, mark: str) -> Shard | None:
    """Read a shard; None if it is missing, damaged or of another plan."""
    try:
        with safe_open(path, "pt") as file:
            head = json.loads((file.metadata() or {})["gen"])
            flat, lengths = file.get_tensor("tokens"), file.get_tensor("lengths")
            given = [file.get_tensor("given")] if "given" in file.keys() else []  # noqa: SIM118
        said = (head["skipped"], head.get("read", 0))
        rows = (head["sources"], head["conditions"], [row.long() for t in given for row in t])
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    if head.get("plan") != mark or head.get("digest") != _digest(flat, lengths, *given):
        return None
    tokens = list(flat.long().split(lengths.tolist()))
    return Shard(tokens, *rows, *said)


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(np.ascontiguousarray(tensor.numpy()).tobytes())
    return digest.hexdigest()[:16]


def fingerprint(plan: dict[str, Any]) -> str:
    """Return a digest of a plan."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]


def open_folder(folder: Path, plan: dict[str, Any]) -> str:
    """Write the plan into a new or empty folder, or find the same one there. It replaces the plan
    of an encoding that was never finished; the shards of that one are not read.

    Returns:
        What was replaced; empty for nothing.

    Raises:
        GenError: the folder holds something else, or another encoding that is finished.
    """
    if folder.is_file():
        raise GenError(f"out is {str(folder)!r}, which is a file; expected a folder")
    path = folder / PLAN
    if path.is_file():
        there = read_json(path)
        if there == plan:
            return ""
        changed = sorted(k for k in {*there, *plan} if there.get(k) != plan.get(k))
        if (folder / MANIFEST).is_file():
            raise GenError(
                f"{folder} holds tokens of another encoding, which differs in"
                f" {', '.join(changed)}; expected a new or empty folder"
            )
        put_text(path, json.dumps(plan, ensure_ascii=False, indent=1) + "\n")
        return f"{folder} held an unfinished encoding, which differs in {', '.join(changed)}: anew"
    if folder.is_dir() and any(folder.iterdir()):
        raise GenError(f"{folder} is not empty and holds no tokens; expected a new or empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GenError(f"cannot write {folder}: {error.strerror or error}") from None
    put_text(path, json.dumps(plan, ensure_ascii=False, indent=1) + "\n")
    return ""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ``GenError`` if it cannot be read."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GenError(f"{path} cannot be read: {error}") from None
    if not isinstance(tree, dict):
        raise GenError(f"{path} holds no JSON object; expected one")
    return tree


def write_manifest(folder: Path, about: dict[str, Any], shards: Sequence[Shard]) -> dict[str, Any]:
    """Write the manifest of finished shards and return it.

    Args:
        folder: folder of the shards.
        about: what the manifest says first, such as modality and frontend.
        shards: all shards, in order.
    """
    files = [shard_path(folder, i) for i in range(len(shards))]
    stale = {*folder.glob("tokens-*.safetensors"), *folder.glob("part-*.safetensors")} - {*files}
    for path in stale:  # of an encoding that was replaced before it was finished
        path.unlink()
    copies = about.get("copies", 1)
    manifest = {
        "format": FORMAT,
        **about,
        "samples": sum(len(s.tokens) for s in shards) // copies,
        "tokens": sum(len(t) for s in shards for t in s.tokens),
        "captioned": sum(c is not None for s in shards for c in s.conditions) // copies,
        "skipped": {name: reason for s in shards for name, reason in s.skipped.items()},
        "shards": [
            {
                "file": path.name,
                "samples": len(shard.tokens),
                "sha256": sha256(path),
                "sources": shard.sources,
            }
            for path, shard in zip(files, shards, strict=True)
        ],
    }
    put_text(folder / MANIFEST, json.dumps(manifest, ensure_ascii=False, indent=1) + "\n")
    return manifest


def read_folder(folder: str | Path) -> tuple[dict[str, Any], list[Shard]]:
    """Read the manifest and all shards of a folder of tokens.

    Raises:
        GenError: no such folder, an encoding that is not finished, or a damaged shard.
    """
    root = Path(folder)
    if not (root / MANIFEST).is_file():
        begun = (root / PLAN).is_file()
        raise GenError(
            f"{folder} holds {'an unfinished encoding' if begun else 'no tokens'}; expected the"
            " folder of a finished gen encode"
        )
    manifest = read_json(root / MANIFEST)
    mark, shards = str(manifest.get("plan")), []
    for row in manifest["shards"]:
        shard = read_shard(root / row["file"], mark)
        if shard is None:
            raise GenError(
                f"{root / row['file']} is missing or damaged; the same gen encode makes it again"
            )
        shards.append(shard)
    return manifest, shards
