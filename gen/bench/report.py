"""Reports of a benchmark: a table, all measurements as JSON, a page of curves."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gen.bench.curve import write_page
from gen.bench.table import render
from gen.core.files import put_text

ALL = "all"  # in place of a modality: each in turn


def tell(args: argparse.Namespace, found: Mapping[str, dict[str, Any]]) -> None:
    """Write the requested reports: tables, JSON as a file or a line, and the page."""
    several = args.modality == ALL or len(found) > 1
    report = {"modalities": dict(found)} if several else next(iter(found.values()))
    texts = {name: render(one["table"], args.markdown) for name, one in found.items()}
    heads = (
        (lambda name: f"## {name}\n\n" if args.markdown else f"{name}\n")
        if several
        else lambda name: ""
    )
    lines = ["\n\n".join(f"{heads(name)}{text}" for name, text in texts.items())]
    lines += dict.fromkeys(measured_on(one["machine"]) for one in found.values())
    if args.gallery:
        tables = {name: one["table"] for name, one in found.items()}
        lines.append(
            f"gallery: {write_page(Path(args.gallery), tables, f'gen bench {args.modality}')}"
        )
    deliver(args, report, "\n".join(lines))


def deliver(args: argparse.Namespace, report: dict[str, Any], text: str) -> None:
    """Write the report to ``--out`` and print the text; with ``--json`` standard output gets the
    report as one line, and standard error the text."""
    if args.out:
        put_text(Path(args.out), json.dumps(report, ensure_ascii=False, indent=1) + "\n")
    print(text, file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps(report, ensure_ascii=False))


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """Describe the machine and the device that models run on, a CPU where none is given."""
    return {
        "device": device_name(device or torch.device("cpu")),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def device_name(device: torch.device) -> str:
    """Return the name of a card or of the CPU, as its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    known = Path("/proc/cpuinfo")
    for line in known.read_text().splitlines() if known.is_file() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def measured_on(machine: Mapping[str, Any]) -> str:
    """Format the line of a report that says where it was measured."""
    return "on {device}, torch {torch}, threads {threads}".format(**machine)
