"""``gen doctor``: what this machine can run, in one look.

Packages with native parts are tried in a process of their own: one whose extension does not load
may take the whole interpreter down with it.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from gen.cli.listings.files import zoo
from gen.core.errors import GenError
from gen.core.files import put_text, sha256
from gen.core.processes import usable_cores
from gen.core.registry import registry
from gen.core.tables import columns, plural
from gen.core.versions import gen_version, installed

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"  # of a checkout


def doctor(args: argparse.Namespace) -> int:
    """Carry out ``gen doctor``; return the exit code."""
    for flag in ("out", "device", "dtype"):
        if vars(args)[flag] is not None and not args.measure:
            raise GenError(f"--{flag} is given to gen doctor; expected it with --measure")
    report = examine()
    if args.measure:
        report["measured"] = _measured(args)
    if args.json:
        print(json.dumps(report, ensure_ascii=False, indent=2))
    else:
        print(_text(report))
    return 0 if report["usable"] else 1


def examine() -> dict[str, Any]:
    """Collect the report; ``problems`` keep gen from working, ``notes`` keep a part of it from
    working."""
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gen": gen_version(),
    }
    problems: list[str] = []
    notes: list[str] = []
    report["packages"] = _packages(problems, notes)
    if report["packages"].get("torch"):
        state = try_import("torch")
        if state != "works":
            problems.append(f"torch is {state}")
        else:
            report.update(_devices())
    report["torchaudio"] = _torchaudio(notes)
    try:
        report["registered"] = {
            kind: len(registry.table(kind))
            for kind in ("sampler", "preset", "tokenizer", "modality")
        }
    except Exception as error:  # a plugin may raise anything when imported
        problems.append(f"the registry cannot be filled: {type(error).__name__}: {error}")
    report["zoo"] = _zoo(problems, notes)
    report["writable"] = _writable(Path())
    if not report["writable"]:
        notes.append(f"{Path().absolute()} is not writable; pass --out with a writable folder")
    return {**report, "problems": problems, "notes": notes, "usable": not problems}


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the machine, and write the rates where that is asked for."""
    machine = import_module("gen.bench.estimate.machine")  # imports torch, which may be broken
    measured = asdict(machine.measure_machine(args.device or "cpu", args.dtype or "float32"))
    if args.out:
        put_text(Path(args.out), json.dumps(measured, indent=1) + "\n")
    return measured


def requirements() -> list[Requirement]:
    """Read the requirements of the installed distribution, or of the checkout that gen runs from,
    without those of extras; none where gen is a mere copy of its sources."""
    try:
        lines = requires("gen-toolkit") or []
    except PackageNotFoundError:
        project = tomllib.loads(PROJECT.read_text("utf-8")) if PROJECT.is_file() else {}
        lines = project.get("project", {}).get("dependencies", [])
    found = [Requirement(line) for line in lines]
    return [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]


def _packages(problems: list[str], notes: list[str]) -> dict[str, str | None]:
    """Find the version of every required package; absent and unsuitable ones are ``problems``."""
    table = {}
    if installed("gen-toolkit") is None and PROJECT.is_file():
        notes.append(f"gen is not installed; it runs from the checkout {PROJECT.parent}")
    for wanted in requirements():
        found = table[wanted.name] = installed(wanted.name)
        if found is None:
            problems.append(f"{wanted.name} is not installed; expected {wanted}")
        elif not wanted.specifier.contains(found, prereleases=True):
            problems.append(f"{wanted.name} is {found}; expected {wanted.specifier}")
    if not table:
        problems.append(
            "gen is not installed, so its requirements are unknown; expected: pip install -e ."
        )
    return table


def _torchaudio(notes: list[str]) -> str:
    """Say whether torchaudio works, and add a note where it does not work as a whole."""
    state = try_import("torchaudio")
    if state == "works":
        return state
    needs = "audio at a sampling rate other than the model's is refused"
    if not _runs("from gen.media.resample import resampler; resampler()"):
        notes.append(f'torchaudio is {state}; {needs}: pip install "gen-toolkit[audio]"')
    elif state != "absent":
        part = _runs("from gen.media.resample import functional; functional()")
        used = "its Python part" if part else "scipy"
        notes.append(f"torchaudio is {state}; gen resamples with {used}")
    return state


def try_import(name: str) -> str:
    """Import a module in another process: ``absent``, ``works``, or ``present but ...``."""
    if find_spec(name) is None:
        return "absent"
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {name}"], capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        return "present but does not import within 120 s"
    if done.returncode == 0:
        return "works"
    said = done.stderr.strip().splitlines()
    return (
        "present but its extension cannot load"
        f" ({said[-1] if said else f'exit code {done.returncode}'})"
    )


def _runs(code: str) -> bool:
    """Return True for code that ends without an error in another process."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, timeout=120).returncode == 0


def _devices() -> dict[str, Any]:
    import torch  # a broken torch is reported before it is imported

    devices = ["cpu"]
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        devices.append(f"cuda:{i} ({properties.name}, {properties.total_memory / 2**30:.0f} GiB)")
    if torch.backends.mps.is_available():
        devices.append("mps")
    return {"devices": devices, "cores": usable_cores(), "threads": torch.get_num_threads()}


def _zoo(problems: list[str], notes: list[str]) -> list[dict[str, Any]]:
    """Models that come with gen, with the size and the start of the sha256 of their weights."""
    from gen.models.load.locate import read_config  # imports torch, which may be broken

    table = []
    for folder in zoo():
        weights = sorted(folder.glob("*.safetensors"))
        if not weights and "frontend_class" not in read_config(folder):
            problems.append(f"zoo model {folder.name} has no weights; install gen again")
        for path in weights:
            with path.open("rb") as file:
                pointer = file.read(8).startswith(b"version ")
            if pointer:
                problems.append(f"zoo model {folder.name} is a Git LFS pointer; run git lfs pull")
            table.append(
                {
                    "model": folder.name,
                    "file": path.name,
                    "megabytes": round(path.stat().st_size / 1e6, 2),
                    "sha256": sha256(path)[:16],
                }
            )
    if not table:
        notes.append("this copy of gen contains no models; pass --model with your own")
    return table


def _writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _text(report: dict[str, Any]) -> str:
    rows = [
        ("item", "found"),
        ("gen", str(report["gen"])),
        ("python", f"{report['python']} on {report['platform']}"),
    ]
    rows += [(name, found or "absent") for name, found in report["packages"].items()]
    rows.append(("torchaudio", report["torchaudio"]))
    if "devices" in report:
        rows += [
            ("devices", ", ".join(report["devices"])),
            ("cores", f"{report['cores']} ({plural(report['threads'], 'torch thread')})"),
        ]
    rows += [
        (f"{kind}s" if kind != "modality" else "modalities", str(n))
        for kind, n in report.get("registered", {}).items()
    ]
    rows += [
        (f"model {m['model']}", f"{m['megabytes']:5.2f} MB, sha256 {m['sha256']}..., {m['file']}")
        for m in report["zoo"]
    ]
    if "measured" in report:
        found = report["measured"]
        rates = ", ".join(f"{n}: {rate / 1e9:.1f}" for n, rate in found["matmul"].items())
        rows += [
            ("measured bandwidth", f"{found['bandwidth'] / 1e9:.1f} GB/s"),
            ("measured GFLOP/s by rows", f"{rates} ({found['dtype']})"),
            ("measured time per kernel", f"{found['launch'] * 1e6:.2f} us"),
        ]
    rows.append(("working directory writable", "yes" if report["writable"] else "no"))
    lines = [
        columns(rows),
        *(f"note: {n}" for n in report["notes"]),
        *(f"problem: {p}" for p in report["problems"]),
    ]
    return "\n".join([*lines, "usable" if report["usable"] else "not usable"])
