"""Estimated time of samplers (``gen bench --estimate DEVICE``), next to measured ones if wanted."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Any

from gen.bench.estimate.cost import Cost, Estimator
from gen.bench.estimate.devices import HERE, Device, find_device, write_device
from gen.bench.estimate.machine import measure_machine
from gen.bench.estimate.record import Recording, record
from gen.bench.measure import measure, prompts_of
from gen.bench.report import deliver, machine
from gen.bench.spread import noise
from gen.bench.table import NOTHING, REFERENCE, laid_out
from gen.bench.variants import Variant, choose, model_options, serves
from gen.core.checks import parse_counts
from gen.core.errors import GenError
from gen.models.load.inflate import Shape, enlarged_config, parse_sizes, require_llama

HEADS = [
    "size",
    "sampler",
    "batch",
    "forward passes",
    "ms per token",
    "tokens/s",
    "memory",
    "arithmetic",
    "launches",
    "draft",
    "loop",
    "fewer passes",
    "dearer pass",
    "rest",
    "faster",
]
MEASURED = ["measured ms per token", "estimate / measured"]


def bench_estimate(args: argparse.Namespace, load: Callable[..., Any]) -> int:
    """Carry out ``gen bench --estimate``; return the exit code."""
    said = model_options(args)
    if args.measured and (args.estimate != HERE or args.inflate):
        raise GenError(
            "--measured is given; expected it with --estimate here and without --inflate (give"
            " --model a folder of gen inflate)"
        )
    if args.model_option and not args.measured:
        raise GenError(
            "--model-option is given with --estimate, which reads a config and loads no model;"
            " expected it with --measured"
        )
    device = find_device(args.estimate)
    if device is None:
        device = measure_machine(said["device"], said["dtype"])
    dtype = args.dtype or device.dtype
    estimator = Estimator(device, dtype)
    pipe = load(args.modality, **({**said, "dtype": "float32"} if args.measured else _small(said)))
    variants = _served(pipe, args)
    configs = _configs(pipe, variants, args)
    sizes, rows = parse_counts(args.batch_sizes, "--batch-sizes"), []
    prompts = prompts_of(pipe.modality, args.modality, max(sizes), args.seed)
    items = pipe.plan(prompts, 1, args.seed)
    for size in sizes:
        taken = _measured(pipe, items[:size], variants, args) if args.measured else {}
        for variant in variants:
            recording = record(
                pipe, variant.spec, variant.sampling, items[:size], accelerator=not device.threads
            )
            for name, larger in configs.items():
                row = _row(name, variant, recording, estimator.cost(recording, larger))
                seconds = taken.get(variant.label, [])
                rows.append({
                    **row, "batch_size": size,
                    "measured": median(seconds) if seconds else None, "noise": noise(seconds),
                })  # fmt: skip
    _compare(rows)
    text = _text(rows, device, dtype, args)
    found = {
        "modality": args.modality,
        **said,
        "dtype": dtype,
        "device": write_device(device),
        "machine": machine(pipe.device),
        "estimates": rows,
    }
    deliver(args, found, text)
    return 0


def _small(said: dict[str, Any]) -> dict[str, Any]:
    """Return the options by which the zoo's model is loaded, whose passes are recorded."""
    return {**said, "model": None, "device": "cpu", "dtype": "float32", "compile": False}


def _served(pipe: Any, args: argparse.Namespace) -> list[Variant]:
    """Return the rows whose model can be estimated. Raises ``GenError`` if none is left."""
    rows, problem = [], None
    plain = argparse.Namespace(**{**vars(args), "model": pipe.model})
    for variant in choose(plain):
        try:
            if serves(pipe, variant.spec, variant.sampling):
                require_llama(pipe.model_name(variant.spec))
                rows.append(variant)
        except GenError as error:
            problem = problem or error
            if args.samplers and variant.label != REFERENCE:
                raise
    if not rows:
        raise problem or GenError("no sampler serves the model; expected --samplers that do")
    return rows


def _configs(
    pipe: Any, variants: list[Variant], args: argparse.Namespace
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return configs to estimate: by the name of the size, then by the name of the small model.

    ``--model`` names a config in place of the small model's; no weights are read.
    """
    names = dict.fromkeys(pipe.model_name(v.spec) for v in variants)
    given = args.model if not args.measured else None
    base = {name: require_llama(given or name) for name in names}
    if not args.inflate:
        label = f"{Shape.of(next(iter(base.values()))).parameters / 1e6:.1f}M"
        return {label: base}
    return {
        size: {
            name: enlarged_config(config, Shape.of(config).enlarged(parameters), 0)
            for name, config in base.items()
        }
        for size, parameters in parse_sizes(args.inflate, "--inflate").items()
    }


def _measured(
    pipe: Any, items: list[Any], variants: list[Variant], args: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the seconds per item of every variant and repeat.

    Repeats are interleaved, each beginning with another variant, after one that is not counted.
    With one thread on a CPU the clock is that of the process, as it is for the rates.
    """
    clock = "cpu_seconds" if machine()["threads"] == 1 and pipe.device.type == "cpu" else "seconds"
    seconds: dict[str, list[float]] = {variant.label: [] for variant in variants}
    for repeat in range(-1, max(1, args.repeats)):
        turn = (repeat + 1) % len(variants)
        for variant in (*variants[turn:], *variants[:turn]):
            run = measure(pipe, items, variant, len(items), None, check=False)
            if repeat >= 0:
                seconds[variant.label].append(run[clock])
    return seconds


def _row(size: str, variant: Variant, recording: Recording, cost: Cost) -> dict[str, Any]:
    tokens = recording.tokens / recording.items
    return {
        "size": size,
        "sampler": variant.label,
        "nfe": recording.nfe,
        "rounds": recording.rounds / recording.items,
        "tokens": tokens,
        "seconds": cost.seconds,
        "cost": asdict(cost),
        "waits": recording.waits,
        "uploads": recording.uploads,
    }


def _compare(rows: list[dict[str, Any]]) -> None:
    """Add ratios to the reference of the same size and batch: faster is fewer passes divided by how
    much dearer a pass and everything outside of the passes are."""
    base = {
        (r["size"], r["batch_size"]): r for r in rows if r["sampler"] == REFERENCE
    }  # not there for masked models
    for row in rows:
        reference = base.get((row["size"], row["batch_size"]))
        if reference is None:
            continue
        passes = [
            sum(r["cost"][k] for k in ("memory", "compute", "launch")) for r in (row, reference)
        ]
        row["fewer_passes"] = reference["rounds"] / row["rounds"]
        row["dearer_pass"] = passes[0] / row["rounds"] / (passes[1] / reference["rounds"])
        row["rest"] = row["seconds"] / passes[0] / (reference["seconds"] / passes[1])
        row["faster"] = reference["seconds"] / row["seconds"]


def _text(rows: list[dict[str, Any]], device: Device, dtype: str, args: argparse.Namespace) -> str:
    table = [HEADS + (MEASURED if args.measured else [])]
    for r in rows:
        share = [
            r["cost"][k] / r["seconds"] for k in ("memory", "compute", "launch", "draft", "loop")
        ]
        ratios = [
            f"{r[k]:.2f}x" if k in r else "-" for k in ("fewer_passes", "dearer_pass", "rest")
        ]
        cells = [
            r["size"],
            r["sampler"],
            str(r["batch_size"]),
            f"{r['nfe']:.1f}",
            f"{1000 * r['seconds'] / r['tokens']:.3f}",
            f"{r['tokens'] / r['seconds']:.0f}",
            *(f"{x:.0%}" for x in share),
            *ratios,
            f"{r['faster']:.2f}x" if "faster" in r else "-",
        ]
        if args.measured and r["noise"]:
            cells += [NOTHING, NOTHING]
        elif args.measured:
            cells += [
                f"{1000 * r['measured'] / r['tokens']:.3f}",
                f"{r['seconds'] / r['measured']:.2f}",
            ]
        table.append(cells)
    return "\n".join(
        [
            laid_out(table, args.markdown),
            f"device: {device.name}, {device.bandwidth / 1e9:.0f} GB/s,"
            f" {device.flops[dtype] / 1e12:.3g} TFLOP/s in {dtype},"
            f" {device.launch * 1e6:.1f} us per kernel ({device.source})",
            "faster = fewer passes / (dearer pass x rest); forward passes were measured on the"
            " built-in model, all times are estimates",
            *_why_not(rows),
            *(
                f"measured {NOTHING}: {r['noise']} ({r['sampler']} at {r['size']}, batch"
                f" {r['batch_size']})"
                for r in rows
                if args.measured and r["noise"]
            ),
        ]
    )


def _why_not(rows: list[dict[str, Any]]) -> list[str]:
    """Say where saved passes went, for rows that are less than 0.8 times as fast as their passes
    are fewer."""
    return [
        f"why not {r['fewer_passes']:.1f}x: {r['sampler']} at {r['size']}, batch"
        f" {r['batch_size']}, is {r['faster']:.2f}x as fast, since a pass costs"
        f" {r['dearer_pass']:.2f} times as much as one of the reference"
        f" ({r['cost']['compute'] / r['seconds']:.0%} of the time is arithmetic,"
        f" {r['cost']['memory'] / r['seconds']:.0%} memory) and the rest {r['rest']:.2f} times"
        for r in rows
        if "faster" in r and r["faster"] < 0.8 * r["fewer_passes"]
    ]
