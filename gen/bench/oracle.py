"""Oracle benchmark, ``gen bench MODALITY --oracle``: masked samplers on models with a known
distribution, so that every error is the sampler's.

The result is accuracy against forward passes, per case. Contenders come from the registry: every
masked sampler and preset, and every selector in each sampler that takes one. Each is measured along
its dial: of the numeric parameters that it reads, the one with the widest range of forward passes.
The modality defines the cases (``Modality.oracle_bench``).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from gen.bench.curve import write_curves
from gen.bench.report import deliver, machine
from gen.bench.table import laid_out
from gen.bench.variants import grid_of
from gen.contracts.oracle import Board, measure
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.jobs.defaults import preset_sampling, requested_sampling
from gen.jobs.progress.terminal import for_terminal

CHOSEN = (
    "selector"  # a part that is measured by itself: the parameter, and the kind in the registry
)
WHOLE, REAL = (
    (1, 2, 3, 4, 6, 8),
    (
        0.1,
        0.2,
        0.3,
        0.5,
        0.7,
        0.9,
        1.5,
        3.0,
        6.0,
    ),
)  # values of a dial: counts; probabilities, nats


NO_MODEL_FLAGS = {  # what they must be with --oracle
    "model": None,
    "model_option": None,
    "dtype": None,
    "device": None,
    "compile": None,
    "peers": None,
    "batch_sizes": "1,8",
}


def contenders(names: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Return the contenders: label -> spec for ``resolve_sampler``.

    They are the named samplers and presets, or all masked ones that decode tokens without a draft
    model; samplers with a selector are repeated with every selector.

    Raises:
        GenError: a named sampler cannot be measured.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in names or [*registry.table("sampler"), *registry.table("preset")]:
        sampler, _ = resolve_sampler(name)
        if sampler.protocol != "masked" or "codes" not in sampler.kinds or sampler.drafted:
            if names:
                raise GenError(
                    f"--samplers names {name!r}, which the oracle cannot measure; expected masked"
                    " samplers of ids without a draft model"
                )
            continue
        found[name] = {"name": name}
        if name in registry.table("sampler") and any(f.name == CHOSEN for f in fields(sampler)):
            for part in registry.table(CHOSEN):
                if part != getattr(sampler, CHOSEN):
                    found[f"{name} {CHOSEN}={part}"] = {"name": name, CHOSEN: part}
    return found


def dial(
    spec: dict[str, Any], sampling: dict[str, Any], probe: Board
) -> tuple[str | None, list[Any]]:
    """Choose the parameter that a sampler is measured along, and its values; none if no parameter
    changes its number of forward passes in the probe's hardest case.

    Raises:
        GenError: the sampler cannot decode the probe.
    """
    hardest = min(
        probe.exact, key=lambda case: probe.exact[case]["one_step"]
    )  # where answers are certain, only blocks cost calls
    best, width, values = None, 0.0, []
    for param in _read_while_decoding(spec, sampling, probe):
        if param in spec:
            continue
        allowed = _ladder(spec, sampling, param)
        calls = []
        for value in (allowed[0], allowed[-1]) if len(allowed) > 1 else ():
            sampler, params = resolve_sampler({**spec, param: value}, sampling)
            calls.append(measure(probe, sampler, params)[hardest].nfe)
        if calls and max(calls) - min(calls) > width:
            best, width, values = param, max(calls) - min(calls), allowed
    return best, values


def _ladder(spec: dict[str, Any], sampling: dict[str, Any], param: str) -> list[Any]:
    """List values of a parameter that a sampler accepts, smallest first, with its own value."""
    own = getattr(resolve_sampler(spec, sampling)[0], param)
    found = []
    for value in sorted({*(WHOLE if isinstance(own, int) else REAL), own}):
        try:
            resolve_sampler({**spec, param: value}, sampling)
        except GenError:
            continue
        found.append(value)
    return found


def _read_while_decoding(spec: dict[str, Any], sampling: dict[str, Any], probe: Board) -> list[str]:
    """List the numeric parameters that a sampler or its parts read while decoding."""
    sampler, params = resolve_sampler(spec, sampling)
    numeric = [f.name for f in fields(sampler) if type(getattr(sampler, f.name)) in (int, float)]
    seen: set[str] = set()

    class Watched(type(sampler)):
        def __getattribute__(self, name: str):
            seen.add(name)
            return super().__getattribute__(name)

    watched = Watched(**{f.name: getattr(sampler, f.name) for f in fields(sampler)})
    seen.clear()  # of the checks that every parameter goes through
    measure(probe, watched, params)
    return [name for name in numeric if name in seen]


def table_of(
    boards: Sequence[Board],
    probe: Board,
    specs: dict[str, dict[str, Any]],
    sampling_of: Callable[[str], dict[str, Any]],
    sweep: tuple[str | None, list[Any]],
    progress: Any,
) -> list[dict[str, Any]]:
    """Measure a row per contender, value of its dial and case, in the format of
    ``gen.bench.curve``.

    Values that change nothing are left out; contenders that cannot decode these boards have an
    error. ``sweep`` is a parameter and values instead of the dial.
    """
    table: list[dict[str, Any]] = []
    for label, spec in specs.items():
        progress.batch(label, 1)
        row = {
            "base": label,
            "batch_size": None,
            "media": 0,
            "error": None,
            "param": None,
            "value": None,
        }
        try:
            table += [
                {**row, **r} for r in _rows_of(label, spec, sampling_of, boards, probe, sweep)
            ]
        except GenError as problem:
            table.append({**row, "sampler": label, "case": None, "error": str(problem)})
        progress.items(1)
    return table


def _rows_of(
    label: str,
    spec: dict[str, Any],
    sampling_of: Callable[[str], dict[str, Any]],
    boards: Sequence[Board],
    probe: Board,
    sweep: tuple[str | None, list[Any]],
) -> list[dict[str, Any]]:
    """Measure one contender along its dial: a row per value that changes anything and case."""
    sampling = sampling_of(spec["name"])
    sampler, _ = resolve_sampler(spec, sampling)
    if sweep[0] is None:
        param, values = dial(spec, sampling, probe)
    elif any(f.name == sweep[0] for f in fields(sampler)) and sweep[0] not in spec:
        param, values = sweep
    else:
        param, values = None, []
    rows: list[dict[str, Any]] = []
    last = None
    for value in values or [None]:
        full = {**spec, param: value} if param else spec
        sampler, params = resolve_sampler(full, sampling)
        points = {
            case: point
            for board in boards
            for case, point in measure(board, sampler, params).items()
        }
        if points != last:
            shown = f"{value:g}" if type(value) in (int, float) else value
            rows += [
                {
                    "sampler": f"{label} {param}={shown}" if param else label,
                    "case": case,
                    "param": param,
                    "value": value,
                    "media": point.rows,
                    "nfe": point.nfe,
                    "right": point.right,
                    "passed": point.accuracy,
                }
                for case, point in points.items()
            ]
        last = points
    return rows


def bench_oracle(args: argparse.Namespace) -> int:
    """Carry out ``gen bench --oracle``. Raises ``GenError`` for flags that are about a model."""
    sweep = _checked_sweep(args)
    requested = requested_sampling(args)
    specs = contenders(
        [n.strip() for n in args.samplers.split(",") if n.strip()] if args.samplers else None
    )

    def sampling_of(name):
        return {**preset_sampling(name), **requested}

    for spec in specs.values():
        resolve_sampler(spec, sampling_of(spec["name"]))
    if sweep[0] is not None and not any(
        f.name == sweep[0] for spec in specs.values() for f in fields(resolve_sampler(spec)[0])
    ):
        raise GenError(
            f"--sweep names {sweep[0]!r}, a parameter that none of {', '.join(specs)} has"
        )
    modality = registry.get("modality", args.modality, "the command line")()
    began = time.perf_counter()
    boards = modality.oracle_bench(args.prompts, args.repeats, args.seed)
    probe = min(
        modality.oracle_bench(16, 1, args.seed),
        key=lambda board: min(known["one_step"] for known in board.exact.values()),
    )
    progress = for_terminal()
    progress.start(len(specs), unit="sampler")
    try:
        table = table_of(boards, probe, specs, sampling_of, sweep, progress)
    finally:
        progress.close()
    exact = {case: known for board in boards for case, known in board.exact.items()}
    report = {
        "modality": args.modality,
        "oracle": True,
        "seed": args.seed,
        "prompts": args.prompts,
        "repeats": args.repeats,
        "sampling": requested,
        "machine": machine(),
        "seconds": time.perf_counter() - began,
        "cases": exact,
        "table": table,
    }
    lines = [render(table, exact, args.markdown)]
    if args.gallery:
        lines.append(f"gallery: {_write_gallery(args, table, exact)}")
    deliver(args, report, "\n".join(lines))
    return 0


def _checked_sweep(args: argparse.Namespace) -> tuple[str | None, list[Any]]:
    """Return the parameter of ``--sweep`` and its values; (None, []) without one.

    Raises:
        GenError: for flags that are about a model, and for a grid of several parameters.
    """
    for key, default in NO_MODEL_FLAGS.items():
        value = vars(args)[key]
        if value != default:
            flag = f"--{key.replace('_', '-')}"
            raise GenError(
                f"{flag} is {value!r}, with --oracle; expected nothing, because the"
                " oracle replaces the model"
            )
    grid = grid_of(args.sweep)
    if len(grid) > 1:
        raise GenError(
            f"--sweep has the parameters {', '.join(grid)}, with --oracle; expected one, since a"
            " sampler is plotted along one parameter"
        )
    return next(iter(grid.items()), (None, []))


def _write_gallery(
    args: argparse.Namespace, table: list[dict[str, Any]], exact: dict[str, dict[str, float]]
) -> Path:
    """Draw one panel per case, the hardest first."""
    hardest_first = sorted(exact.items(), key=lambda case: case[1]["one_step"])
    heads = {
        case: f"{case}: one forward pass is right {known['one_step']:.1%} of the time"
        for case, known in hardest_first
    }
    title = f"gen bench {args.modality} --oracle"
    return write_curves(Path(args.gallery), table, title, "case", heads)


def render(table: list[dict[str, Any]], exact: dict[str, dict[str, float]], markdown: bool) -> str:
    """Format forward passes and accuracy per case. Cases that one forward pass always gets right
    share a column, with the worst of them."""
    hard = [case for case, known in exact.items() if known["one_step"] < 1 - 1e-9]
    easy = [case for case in exact if case not in hard]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in table:
        found.setdefault(row["sampler"], {})[row["case"]] = row

    def cell(row):
        return f"{row['nfe']:.1f} {row['passed']:.1%}"

    rows = [["passes and accuracy", *hard, *(["other cases"] if easy else [])]]
    rows.append(
        [
            "known: one pass",
            *(f"1.0 {exact[case]['one_step']:.1%}" for case in hard),
            *(["1.0 100.0%"] if easy else []),
        ]
    )
    left_out = [
        f"{label}: {cases[None]['error']}" for label, cases in found.items() if None in cases
    ]
    for label, cases in found.items():
        if None in cases:
            continue
        worst = min((cases[case] for case in easy), key=lambda row: row["passed"], default=None)
        rows.append(
            [label, *(cell(cases[case]) for case in hard), *([cell(worst)] if worst else [])]
        )
    return "\n".join([laid_out(rows, markdown), *left_out])
