"""Benchmark command, ``gen bench``: samplers side by side on the same prompts and seeds, speed
always with fidelity.

Repeats are interleaved (every row once, then all again, in rotating order), so that a machine that
slows down slows all of them; every figure is a median. Each repeat has fresh seeds, so fidelity
counts prompts x repeats outputs. ``--peers`` adds other implementations
(``gen.bench.baselines.base``), which are measured in the same rotation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gen.bench.baselines.base import peers_of
from gen.bench.estimate.command import bench_estimate
from gen.bench.inflated import inflated
from gen.bench.jobs.cost import bench_jobs
from gen.bench.measure import interleaved, prompts_of
from gen.bench.oracle import bench_oracle
from gen.bench.records import finished, opened
from gen.bench.report import ALL, tell
from gen.bench.search import bench_search
from gen.bench.speed import bench_speed
from gen.bench.table import REFERENCE, tabulate
from gen.bench.variants import DEFAULT, Variant, choose, model_options, serves
from gen.core.checks import check_int, parse_counts
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.jobs.defaults import requested_sampling
from gen.jobs.progress.terminal import for_terminal
from gen.models.load.inflate import parse_sizes
from gen.pipeline import pipeline

USUAL = {"prompts": 8, "repeats": 3}
INFLATED = {"prompts": 1, "repeats": 3}
QUICK = {"prompts": 2, "repeats": 1}
ORACLE = {"prompts": 96, "repeats": 1}
QUICK_ORACLE = {"prompts": 8, "repeats": 1}
UNSERVED = "no model for it"


def bench(args: argparse.Namespace, load: Callable[..., Any] | None = None) -> int:
    """Carry out ``gen bench``; return the exit code. ``load`` replaces the usual loader."""
    if args.modality == "jobs":
        return bench_jobs(args)
    for key in ("items", "modalities"):
        if vars(args).get(key) not in (None, False):
            raise GenError(
                f"--{key} is given to gen bench {args.modality}; expected it with gen bench jobs"
            )
    usual = INFLATED if args.inflate and not args.estimate else USUAL
    if args.oracle:
        usual = QUICK_ORACLE if args.quick else ORACLE
    elif args.quick:
        usual = QUICK
    amounts = {k: usual[k] if vars(args)[k] is None else vars(args)[k] for k in usual}
    for key, value in amounts.items():
        check_int(f"--{key}", value, 1)
    args = argparse.Namespace(**{**vars(args), **amounts})
    check_int("--seed", args.seed, 0)
    if args.out and not Path(args.out).parent.is_dir():
        raise GenError(
            f"--out is {args.out!r}, in a folder that does not exist; expected one that does"
        )
    if args.gallery and Path(args.gallery).exists() and not Path(args.gallery).is_dir():
        raise GenError(f"--gallery is {args.gallery!r}, a file; expected a folder")
    _require_flags_fit(args)
    if args.estimate:
        return bench_estimate(args, load or pipeline.load)
    if args.protocol == "speed":
        return bench_speed(args, load or pipeline.load)
    if args.protocol == "search":
        return bench_search(args, load or pipeline.load)
    if args.oracle:
        return bench_oracle(args)
    load = load or pipeline.load
    if args.inflate:
        sizes = parse_sizes(args.inflate, "--inflate")
        found = {f"{args.modality} {size}": enlarged(args, load, n) for size, n in sizes.items()}
    elif args.modality != ALL:
        found = {args.modality: measured(args, load)}
    else:
        if args.model or args.model_option:
            raise GenError(
                f"--model or --model-option is given to gen bench {ALL}; expected it with one"
                " modality, which is all that a model serves"
            )
        found = {
            name: measured(
                argparse.Namespace(**{**vars(args), "modality": name}), load, several=True
            )
            for name in registry.table("modality")
        }
    tell(args, found)
    finished(args)
    return 0


def _require_flags_fit(args: argparse.Namespace) -> None:
    """Refuse flags that say nothing together. Raises ``GenError``."""
    is_usual = args.protocol == "usual" and not args.oracle
    if args.runs and (args.estimate or args.oracle or args.protocol == "search"):
        raise GenError(
            "--runs is given; expected it without --estimate, --oracle and --protocol search"
        )
    if args.overhead and (args.estimate or not is_usual):
        raise GenError(
            "--overhead is given; expected it without --estimate, --oracle and --protocol"
        )
    if args.measured and not args.estimate:
        raise GenError("--measured is given without --estimate; expected --estimate here")
    if (args.inflate or args.estimate) and (not is_usual or args.modality == ALL):
        raise GenError(
            "--inflate or --estimate is given; expected one modality, and neither --protocol nor"
            " --oracle"
        )


def enlarged(args: argparse.Namespace, load: Callable[..., Any], size: int) -> dict[str, Any]:
    """Measure inflated models of one modality and return the report."""
    pipe = load(args.modality, **model_options(args))
    variants = [v for v in choose(args) if args.samplers or serves(pipe, v.spec, v.sampling)]
    if not args.samplers:
        variants = [replace(v, asked=False) for v in variants]
    with inflated(load, pipe, variants, size) as (load_larger, parameters):
        return {**measured(args, load_larger, inflated=parameters), "inflated": parameters}


def measured(
    args: argparse.Namespace,
    load: Callable[..., Any],
    several: bool = False,
    inflated: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Measure one modality and return the report.

    Args:
        args: command line.
        load: function that loads a pipeline.
        several: samplers without a model for it become rows with that reason.
        inflated: parameters of the models by name, where they are enlargements.
    """
    sizes = parse_counts(args.batch_sizes, "--batch-sizes")
    variants = choose(args)
    said = model_options(args)
    pipe = load(args.modality, **said)
    variants, errors = _measurable(args, pipe, variants, sizes, several)
    prompts = prompts_of(pipe.modality, args.modality, args.prompts, args.seed)
    progress = for_terminal()
    records = opened(args, pipe, said, prompts, progress.note, inflated=inflated)
    progress.start(len(variants) * len(sizes) * (args.repeats + 1), unit="measurement")
    try:
        runs = interleaved(
            pipe,
            variants,
            sizes,
            prompts,
            args.repeats,
            args.seed,
            errors,
            progress,
            args.overhead,
            records,
        )
    finally:
        progress.close()
    return {
        "modality": args.modality,
        **said,
        "seed": args.seed,
        "repeats": args.repeats,
        "prompts": prompts,
        "machine": records.machine,
        "samplers": [
            {"label": v.label, "sampler": v.spec, "sampling": v.sampling} for v in variants
        ],
        "table": tabulate(runs, errors, variants),
        "runs": runs,
    }


def _measurable(
    args: argparse.Namespace,
    pipe: Any,
    variants: list[Variant],
    sizes: list[int],
    several: bool,
) -> tuple[list[Variant], dict[tuple[str, int], str]]:
    """Return the rows that the pipeline serves, peers included, and for rows and batch sizes that
    cannot be measured the reason. Raises ``GenError`` if no row is left."""
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
            pipe.defaults.complete(REFERENCE, requested_sampling(args))[1],
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
            f"nothing is left to measure: the model supports none of {REFERENCE}, {DEFAULT};"
            " expected --samplers that it supports"
        )
    return variants, errors
