"""Measurements in a file of JSON lines, written as they are made, so that a killed benchmark goes
on where it ended.

    {"id": "5b0c...", "setting": {"machine": ..., "source": ..., "prompts": ...}}
    {"id": "5b0c...", "what": {"sampler": ..., "batch_size": ..., "repeat": ...}, "run": {...}}

A setting is all that the measurements of a run have in common: the machine with its device, the
source code, the weights, the prompts, the seed. Measurements of another setting stay in the file
and are not used.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gen
from gen.bench.report import machine
from gen.core.errors import GenError
from gen.core.files import writing


class Records:
    """Measurements of one setting.

    Args:
        path: file of JSON lines, made with its folder where it does not exist; None for no file.
        setting: plain data that the measurements have in common.

    Attributes:
        machine: the machine of the setting; empty where it names none.
        left_out: why measurements in the file are not used; empty where all are.

    Raises:
        GenError: the file holds something else, or cannot be written.
    """

    def __init__(self, path: Path | None, setting: dict[str, Any]):
        self.path, self.id = path, digest(setting)
        self.machine: dict[str, Any] = setting.get("machine", {})
        self.left_out = ""
        self._known: dict[str, dict[str, Any]] = {}
        lines = _lines(path) if path else []
        others = [x for x in lines if x["id"] != self.id]
        for line in lines:
            if line["id"] == self.id and "run" in line:
                self._known[digest(line["what"])] = line["run"]
        if count := sum("run" in x for x in others):
            was = [x["setting"] for x in others if "setting" in x]
            keys = [k for k in setting if any(digest(x.get(k)) != digest(setting[k]) for x in was)]
            self.left_out = f"{count} measurements in {path} are not used: other {', '.join(keys)}"
        if not any(x["id"] == self.id for x in lines):
            self._append({"id": self.id, "setting": setting})

    def __len__(self) -> int:
        return len(self._known)

    def find(self, what: dict[str, Any]) -> dict[str, Any] | None:
        """Return a measurement; None where it was not made."""
        return self._known.get(digest(what))

    def add(self, what: dict[str, Any], run: dict[str, Any]) -> None:
        """Write a measurement. A line is there whole or, after a crash, not at all."""
        self._known[digest(what)] = run
        self._append({"id": self.id, "what": what, "run": run})

    def _append(self, line: dict[str, Any]) -> None:
        if self.path is None:
            return
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())


def latest(path: Path) -> tuple[dict[str, Any], list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Return the newest setting of a file, and its measurements as (what, run).

    Raises:
        GenError: the file holds something else, or no setting.
    """
    lines = _lines(path)
    settings = [line for line in lines if "setting" in line]
    if not settings:
        raise GenError(f"{path} holds no measurements; expected those of gen bench")
    mine = [x for x in lines if x["id"] == settings[-1]["id"] and "run" in x]
    return settings[-1]["setting"], [(x["what"], x["run"]) for x in mine]


def runs_file(args: argparse.Namespace) -> Path:
    """Return the file that measurements are written to as they are made: that of ``--runs``, or,
    until the benchmark is over, one beside its report or in out/bench."""
    if args.runs:
        return Path(args.runs)
    return Path(args.out).with_suffix(".jsonl") if args.out else Path("out/bench/runs.jsonl")


def opened(
    args: argparse.Namespace,
    pipe: Any,
    options: dict[str, Any],
    prompts: Any,
    note: Callable[[str], None],
    **more: Any,
) -> Records:
    """Return the measurements of a benchmark so far.

    Args:
        args: its command line.
        pipe: its pipeline.
        options: options that the model is loaded with.
        prompts: its prompts, plain data.
        note: is told what is used of the file and what is not.
        more: plain data that its measurements have in common, too.
    """
    setting = {
        "modality": args.modality, "options": options, "weights": weights(options["model"]),
        "machine": machine(pipe.device), "source": source(), "protocol": args.protocol,
        "overhead": args.overhead, "seed": args.seed, "prompts": prompts, **more,
    }  # fmt: skip
    records = Records(runs_file(args), setting)
    if records.left_out:
        note(records.left_out)
    if len(records):
        note(f"{len(records)} measurements are those of {records.path}")
    return records


def finished(args: argparse.Namespace) -> None:
    """Remove the file of a benchmark that is over, unless it was asked for by name."""
    if not args.runs:
        runs_file(args).unlink(missing_ok=True)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a file, and cut off a last one that was not written whole."""
    if not path.exists():
        return []
    with writing(path):
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:
            with path.open("rb+") as file:
                file.truncate(len(whole))
    try:
        lines = [json.loads(line) for line in whole.splitlines()]
        if all("id" in line and ("setting" in line or "run" in line) for line in lines):
            return lines
    except (ValueError, TypeError):
        pass
    raise GenError(f"{path} holds something else; expected measurements of gen bench")


def digest(data: Any) -> str:
    """Return a hash of plain data."""
    text = json.dumps(data, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def source() -> str:
    """Return a hash of the package's source code."""
    found = hashlib.sha256()
    for folder, folders, names in os.walk(Path(gen.__file__).parent, followlinks=True):
        folders.sort()
        for name in sorted(n for n in names if n.endswith(".py")):
            found.update((Path(folder) / name).read_bytes())
    return found.hexdigest()[:16]


def weights(model: str | None) -> list[Any] | None:
    """Return names, sizes and times of a model's files; None where it is no folder or file."""
    path = Path(model or "")
    if not model or not path.exists():
        return None
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in files]
