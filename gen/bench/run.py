"""``gen bench``: samplers side by side on the same prompts and seeds, never a speed without its
fidelity.

Repeats are interleaved (every row once, then all again, in turning order), so that a machine that
slows down slows all of them; every figure is a median. Each repeat has fresh seeds, so fidelity
counts prompts x repeats media. Other implementations may stand beside the samplers as ``--peers``
(``gen.bench.baselines.base``); they are measured in the same turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gen.bench.baselines.base import peers_of
from gen.bench.jobs.cost import bench_jobs
from gen.bench.measure import interleaved, prompts_of
from gen.bench.oracle import bench_oracle
from gen.bench.report import ALL, machine, tell
from gen.bench.table import REFERENCE, tabulate
from gen.bench.variants import DEFAULT, choose, serves
from gen.core.checks import parse_counts
from gen.core.errors import GenError, bad_value
from gen.core.registry import registry
from gen.jobs.defaults import default_sampling, requested_sampling
from gen.jobs.progress.terminal import for_terminal
from gen.pipeline import pipeline

USUAL = {"prompts": 8, "repeats": 3}
QUICK = {"prompts": 2, "repeats": 1}
ORACLE = {"prompts": 96, "repeats": 1}
QUICK_ORACLE = {"prompts": 8, "repeats": 1}
UNSERVED = "no model for it"


def bench(args: argparse.Namespace, load: Callable[..., Any] | None = None) -> int:
    if args.modality == "jobs":
        return bench_jobs(args)
    for key in ("items", "modalities"):
        if getattr(args, key, None) not in (None, False):
            raise GenError(
                f"--{key} came with gen bench {args.modality}; expected it with gen bench jobs"
            )
    usual = (
        (QUICK_ORACLE if args.quick else ORACLE) if args.oracle else QUICK if args.quick else USUAL
    )
    for key, value in usual.items():
        if getattr(args, key) is None:
            setattr(args, key, value)
        if getattr(args, key) < 1:
            raise bad_value(f"--{key}", getattr(args, key), "an integer of at least 1")
    if args.seed < 0:
        raise bad_value("--seed", args.seed, "an integer of at least 0")
    if args.out and not Path(args.out).parent.is_dir():
        raise GenError(
            f"--out is {args.out!r}, in a folder that does not exist; expected one that does"
        )
    if args.gallery and Path(args.gallery).exists() and not Path(args.gallery).is_dir():
        raise GenError(f"--gallery is {args.gallery!r}, a file; expected a folder")
    if args.oracle:
        return bench_oracle(args)
    load = load or pipeline.load
    if args.modality != ALL:
        found = {args.modality: measured(args, load)}
    else:
        if args.model:
            raise GenError(
                f"--model came with gen bench {ALL}; expected it with one modality, which is all"
                " that a model serves"
            )
        found = {
            name: measured(
                argparse.Namespace(**{**vars(args), "modality": name}), load, several=True
            )
            for name in registry.table("modality")
        }
    tell(args, found)
    return 0


def measured(
    args: argparse.Namespace, load: Callable[..., Any], several: bool = False
) -> dict[str, Any]:
    """Everything that was measured of one modality. ``several``: samplers that it has no model for
    become rows that say so."""
    sizes = parse_counts(args.batch_sizes, "--batch-sizes")
    variants = choose(args)
    said = {
        "model": args.model,
        "device": args.device or "cpu",
        "dtype": args.dtype or "float32",
        "compile": bool(args.compile),
    }
    pipe = load(args.modality, **said)
    errors: dict[tuple[str, int], str] = {}
    for v in [v for v in variants if not serves(pipe, v.spec, v.sampling)]:
        if several and args.samplers:
            errors.update({(v.label, size): UNSERVED for size in sizes})
        elif not args.samplers or v.label == REFERENCE:
            variants.remove(v)
    if several or not args.samplers:
        variants = [replace(v, asked=False) for v in variants]
    if args.peers:
        variants += peers_of(
            args.peers,
            pipe,
            default_sampling(args.modality, args.model, REFERENCE, requested_sampling(args)),
            several,
        )
    for v in variants:
        errors.update(
            {
                (v.label, size): v.missing or "batch 1 only"
                for size in sizes
                if v.missing or (v.serial and size > 1)
            }
        )
    if not variants:
        raise GenError(
            f"nothing is left to measure: the model serves none of {REFERENCE}, {DEFAULT}; expected"
            " --samplers that it serves"
        )
    prompts = prompts_of(pipe.modality, args.modality, args.prompts, args.seed)
    progress = for_terminal()
    progress.start(len(variants) * len(sizes) * (args.repeats + 1), unit="measurement")
    try:
        runs = interleaved(
            pipe, variants, sizes, prompts, args.repeats, args.seed, errors, progress
        )
    finally:
        progress.close()
    return {
        "modality": args.modality,
        **said,
        "seed": args.seed,
        "repeats": args.repeats,
        "prompts": prompts,
        "machine": machine(),
        "samplers": [
            {"label": v.label, "sampler": v.spec, "sampling": v.sampling} for v in variants
        ],
        "table": tabulate(runs, errors, variants),
        "runs": runs,
    }
