"""Measurements on an accelerator, saved one by one.

    python -m gen.bench.card --out DIR                        CUDA, 8 minutes
    python -m gen.bench.card --out DIR --device cpu --quick   a minute of a CPU

It runs from a checkout on PYTHONPATH, and needs PyTorch and transformers; neither diffusers nor
omegaconf. What is worth most comes first, each within a bound of its own. The results are written
after every measurement, and the same command goes on where a run ended. Another card, other
versions and other sources have a file of their own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

import gen
from gen.bench.card.plan import KINDS, Measurement, full, quick
from gen.bench.card.tables import tables
from gen.bench.report import machine
from gen.core.errors import GenError
from gen.core.files import put_text, slug, sweep_temporaries
from gen.core.memory import free_memory
from gen.core.versions import installed

ROOMS = ("gen", "samplers", "tokenizers", "modalities")


def driver(field: str) -> str | None:
    """Ask the driver for a field of the first card; None without one."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.splitlines()[0]


def about(device: str, is_quick: bool) -> dict[str, Any]:
    """Describe what is measured: the card, the versions, the sources."""
    root, digest = Path(gen.__file__).parents[1], hashlib.sha256()
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            digest.update(path.read_bytes())
    on_card = device.startswith("cuda")
    return {
        "card": torch.cuda.get_device_name(device) if on_card else f"CPU {platform.machine()}",
        "driver": driver("driver_version") if on_card else None,
        "cuda": torch.version.cuda,
        "transformers": installed("transformers"),
        "sources": digest.hexdigest()[:16],
        "quick": is_quick,
        **machine(),
    }


class Results:
    """Results by name, in a file that is whole after every one of them.

    Args:
        folder: folder of the file; it is made.
        said: what is measured; another gets another file.
    """

    def __init__(self, folder: Path, said: Mapping[str, Any]):
        folder.mkdir(parents=True, exist_ok=True)
        sweep_temporaries(folder)  # of runs that were killed
        digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:8]
        self.path = folder / f"{slug(said['card'])}-{digest}.json"
        self.said, self.made = said, {}
        if self.path.exists():
            self.made = json.loads(self.path.read_text(encoding="utf-8"))["results"]

    def put(self, name: str, result: dict[str, Any]) -> None:
        """Add a result and write all."""
        self.made[name] = result
        put_text(self.path, json.dumps({"about": self.said, "results": self.made}, indent=1) + "\n")


@contextmanager
def bound(seconds: float) -> Iterator[None]:
    """Raise ``TimeoutError`` inside after so many seconds."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"it took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(plan: Sequence[Measurement], results: Results, device: str, minutes: float) -> int:
    """Measure what has no result yet, then what failed, and return how many are left."""
    deadline, parts = time.monotonic() + 60 * minutes, {}
    todo = [m for m in plan if results.made.get(m.name, {}).get("failed", True)]
    todo.sort(key=lambda m: m.name in results.made)
    for number, one in enumerate(todo):
        began = time.monotonic()
        if began >= deadline:
            return len(todo) - number
        where, method, most = KINDS[one.kind]
        failed = False
        try:
            with bound(min(most, deadline - began)):
                if where not in parts:
                    parts[where] = resolve_name(where)(device)
                found = getattr(parts[where], method)(**one.args)
        except GenError as problem:  # that a device refuses the option is a result
            found, failed = {"refused": str(problem)}, not one.args.get("option")
        except TimeoutError as problem:
            if time.monotonic() >= deadline:
                return len(todo) - number
            found, failed = {"error": str(problem)}, True
        except Exception as problem:  # one that fails must not take the others with it
            found, failed = {"error": f"{type(problem).__name__}: {problem}"}, True
        free_memory()
        seconds = round(time.monotonic() - began, 1)
        clock = driver("clocks.sm") if device.startswith("cuda") else None
        result = {"kind": one.kind, "args": one.args, "found": found, "failed": failed}
        results.put(one.name, {**result, "seconds": seconds, "clock": clock})
        print(f"{one.name}: {'failed' if failed else 'done'}, {seconds} s", flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out the command; return 1 where a measurement failed or is left."""
    parser = argparse.ArgumentParser("python -m gen.bench.card", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", required=True, help="folder of the results")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (default: cuda)")
    parser.add_argument("--minutes", type=float, default=8, help="of the run (default: 8)")
    parser.add_argument("--quick", action="store_true", help="small models, few items")
    parser.add_argument("--only", default="", help=f"one of {', '.join(KINDS)}")
    args = parser.parse_args(argv)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise GenError(f"--device is {args.device}, and PyTorch sees none; expected --device cpu")
    results = Results(Path(args.out), about(args.device, args.quick))
    plan = [m for m in (quick() if args.quick else full()) if args.only in ("", m.kind)]
    left = run(plan, results, args.device, args.minutes)
    made = list(results.made.values())
    clocks = sorted({result["clock"] for result in made if result["clock"]})
    text = tables({**results.said, "SM clock": " ".join(clocks) or None}, made)
    put_text(results.path.with_suffix(".md"), text + "\n")
    failed = sum(result["failed"] for result in made)
    print(f"\n{text}\n\nresults: {results.path}; {failed} failed, {left} are left")
    return 1 if left or failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GenError as error:
        sys.exit(f"error: {error}")
