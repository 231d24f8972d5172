"""``gen bench``: samplers side by side on the same prompts and seeds, never a speed without its
fidelity.

Repeats are interleaved (every row once, then all again, in turning order), so that a machine that
slows down slows all of them; every figure is a median. Each repeat has fresh seeds, so fidelity
counts prompts x repeats media. Other implementations may stand beside the samplers as ``--peers``
(``gen.bench.baselines.base``); they are measured in the same turns.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from gen.bench.table import REFERENCE, added, render, tabulate
from gen.cli.commands import positive, sampling_of
from gen.core.errors import GenError, bad_value

DEFAULT = "speculative_jacobi,sjd,scd_mc,maskgit,halton"
ALL = "all"
USUAL = {"prompts": 8, "repeats": 3}
QUICK = {"prompts": 2, "repeats": 1}
ORACLE = {"prompts": 96, "repeats": 1}
QUICK_ORACLE = {"prompts": 8, "repeats": 1}
UNSERVED = "no model for it"


def bench(args: argparse.Namespace, load: Callable[..., Any] | None = None) -> int:
    if args.modality == "jobs":
        from gen.bench.jobs.cost import bench_jobs

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
        from gen.bench.oracle import bench_oracle

        return bench_oracle(args)
    if load is None:
        from gen.pipeline.pipeline import load
    if args.modality != ALL:
        found = {args.modality: measured(args, load)}
    else:
        from gen.core.registry import registry

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
    from gen.jobs.progress.report import for_terminal

    sizes = positive(args.batch_sizes, "--batch-sizes")
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
        from gen.bench.baselines.base import peers_of

        variants += peers_of(args.peers, pipe, sampling_of(args, REFERENCE), several)
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


def interleaved(
    pipe: Any,
    variants: list[Variant],
    sizes: list[int],
    prompts: list[str],
    repeats: int,
    seed: int,
    errors: dict[tuple[str, int], str],
    progress: Any,
) -> list[dict[str, Any]]:
    """Every variant once per repeat and batch size, each repeat beginning with another one. Those
    in ``errors`` are left out. Those that run out of memory come into it, and those that were not
    asked for by name and refuse. Raises ``GenError`` if all of them do.
    """
    from gen.jobs.microbatch import free_memory, is_out_of_memory

    runs: list[dict[str, Any]] = []
    for repeat in range(-1, repeats):  # -1 warms up and is not counted
        items = pipe.plan(prompts, 1, seed + repeat + 1)
        for size in sizes:
            turn = (repeat + 1) % len(variants)
            for variant in variants[turn:] + variants[:turn]:
                key = variant.label, size
                progress.batch(f"{variant.label}, batch {size}", size)
                part = items[:size] if repeat < 0 else items
                try:
                    if key not in errors:
                        run = measure(pipe, part, variant, size, progress.step, check=repeat >= 0)
                        runs += (
                            [
                                {
                                    "sampler": variant.label,
                                    "batch_size": size,
                                    "repeat": repeat,
                                    **run,
                                }
                            ]
                            if repeat >= 0
                            else []
                        )
                except (GenError, OSError) as problem:
                    if variant.asked or isinstance(problem, OSError):
                        raise
                    errors[key] = str(problem)
                except Exception as problem:
                    if not is_out_of_memory(problem):
                        raise
                    errors[key] = "out of memory"
                if errors.get(key) == "out of memory":
                    free_memory()
                progress.items(1)
    if not runs:
        raise GenError(next(iter(errors.values())))
    return runs


@dataclass(frozen=True)
class Variant:
    """One line of the table: a sampler, its knobs and its law. ``base``, ``param``, ``value``: what
    it is drawn along, in a sweep.

    ``peer``: the group of one that is no sampler of this toolkit; ``make(items)``: what it does
    instead. ``serial``: it takes one item at a time; ``missing``: why there is none. ``asked``:
    whether it was named, so that what it cannot do is an error.
    """

    label: str
    spec: dict[str, Any]
    sampling: dict[str, Any]
    base: str
    param: str | None = None
    value: Any = None
    peer: str | None = None
    make: Callable[[Sequence[Any]], Any] | None = field(default=None, compare=False)
    serial: bool = False
    missing: str | None = None
    asked: bool = True


def choose(args: argparse.Namespace) -> list[Variant]:
    """The reference, then what was asked for. All of it is resolved, so a typo ends here."""
    from gen.core.sampler import resolve_sampler

    names = [n.strip() for n in (args.samplers or DEFAULT).split(",") if n.strip()]
    grid = grid_of(args.sweep)
    variants, used = [], set()
    for name in dict.fromkeys([REFERENCE, *names]):
        sampling = sampling_of(args, name)
        has = {f.name for f in fields(resolve_sampler(name, sampling)[0])}
        mine = {param: values for param, values in grid.items() if param in has}
        used |= mine.keys()
        along = next(iter(mine), None)
        for values in product(*mine.values()):
            said = dict(zip(mine, values, strict=True))
            spec = {"name": name, **said}
            base = " ".join([name, *(f"{k}={v}" for k, v in said.items() if k != along)])
            label = " ".join([name, *(f"{k}={v}" for k, v in said.items())])
            variants.append(
                Variant(
                    label,
                    spec,
                    asdict(resolve_sampler(spec, sampling)[1]),
                    base,
                    along,
                    said.get(along),
                )
            )
    for param in grid:
        if param not in used:
            raise GenError(
                f"--sweep is about {param!r}, a knob that none of {', '.join(names)} has"
            )
    return variants


def grid_of(texts: Sequence[str] | None) -> dict[str, list[Any]]:
    """``["window=4,8", "coupling=fresh,gumbel"]`` as values per knob. Raises ``GenError`` for
    anything else, and for a knob that comes twice."""
    grid: dict[str, list[Any]] = {}
    for text in texts or ():
        param, values = swept(text)
        if param in grid:
            raise GenError(
                f"--sweep came twice with the knob {param!r}; expected its values in one, such as"
                f" {param}=V,V"
            )
        grid[param] = values
    return grid


def swept(text: str) -> tuple[str, list[Any]]:
    """``window=4,8`` as a knob and its values. Raises ``GenError`` for anything else."""
    from yaml import YAMLError, safe_load

    param, _, values = text.partition("=")
    try:
        found = [safe_load(v) for v in values.split(",")]
    except YAMLError:
        found = [None]
    if not param.strip() or any(v is None or isinstance(v, (dict, list)) for v in found):
        raise bad_value("--sweep", text, "KNOB=VALUE,VALUE such as window=4,8")
    return param.strip(), list(dict.fromkeys(found))


def serves(pipe: Any, spec: dict[str, Any], sampling: dict[str, Any]) -> bool:
    """Whether the pipeline has the models for a sampler."""
    from gen.core.sampler import resolve_sampler

    try:
        sampler = resolve_sampler(spec, sampling)[0]
        pipe.model_name(sampler)
        if sampler.drafted:
            pipe.draft_name(sampler)
    except GenError:
        return False
    return True


def prompts_of(modality: Any, name: str, count: int, seed: int) -> list[str]:
    """The modality's own test prompts if it has them, else those of its packaged configs, in
    turn."""
    if hasattr(modality, "example_prompts"):
        try:
            return list(modality.example_prompts(count, seed))
        except GenError:  # a published model has none
            pass
    from gen.config.job import packaged
    from gen.config.layers import read_yaml

    known: dict[str, None] = {}
    for path in packaged().values():
        tree = read_yaml(path)
        if tree.get("modality") == name:
            known.update(dict.fromkeys(tree.get("prompts") or []))
    if not known:
        raise GenError(
            f"modality {name!r} names no prompts to measure with, and no packaged config does"
        )
    return [list(known)[i % len(known)] for i in range(count)]


def measure(
    pipe: Any, items: list[Any], variant: Variant, size: int, callback: Any, *, check: bool
) -> dict[str, Any]:
    """One pass over the items in microbatches: what it cost per item, and how many prompts came
    true; None where nothing can tell."""
    make = variant.make or (
        lambda batch: pipe.generate(
            batch, variant.spec, variant.sampling, trace=False, callback=callback
        )
    )
    seconds, stats, pairs = 0.0, [], []
    memory = _memory(getattr(pipe, "device", None))
    for first in range(0, len(items), size):
        batch = items[first : first + size]
        began = time.perf_counter()
        out = make(batch)
        seconds += time.perf_counter() - began
        stats += out.stats
        pairs += zip(out.media, batch, strict=True)
    peak = memory()  # before checkers take their own
    verdicts, unchecked = verdicts_of(pipe.modality, pairs) if check else (None, None)
    drafted = [s.draft_nfe for s in stats if s.draft_nfe is not None]
    return {
        "items": len(items),
        "seconds": seconds / len(items),
        "nfe": mean(s.nfe for s in stats),
        "draft_nfe": mean(drafted) if drafted else None,
        "tokens": sum(s.tokens for s in stats),
        "tokens_computed": mean(s.tokens_computed for s in stats),
        "peak_memory": peak,
        "acceptance_histogram": added(s.acceptance_histogram for s in stats),
        "passed": None if verdicts is None else sum(v.passed for v in verdicts),
        "valid": None if verdicts is None else sum(v.valid for v in verdicts),
        "unchecked": unchecked,
    }


def verdicts_of(
    modality: Any, pairs: Sequence[tuple[Any, Any]]
) -> tuple[list[Any] | None, str | None]:
    """What the checker says of media and their items; or None, and why nothing can tell."""
    if not hasattr(modality, "check"):
        return None, f"modality {getattr(modality, 'name', modality)!r} has no checker"
    try:
        return [modality.check(media, item.prompt) for media, item in pairs], None
    except GenError as why:
        return None, str(why)


def _memory(device: Any) -> Callable[[], int | None]:
    """Starts counting; the result says how many bytes torch held on the device at most. None off
    CUDA, where nobody counts them."""
    if getattr(device, "type", None) != "cuda":
        return lambda: None
    import torch

    torch.cuda.reset_peak_memory_stats(device)
    return lambda: torch.cuda.max_memory_allocated(device)


def tell(args: argparse.Namespace, found: Mapping[str, dict[str, Any]]) -> None:
    """Tables, the report as a file and as a line, and the page, as far as they were asked for."""
    report = {"modalities": dict(found)} if args.modality == ALL else found[args.modality]
    texts = {name: render(one["table"], args.markdown) for name, one in found.items()}
    heads = (
        (lambda name: f"## {name}\n\n" if args.markdown else f"{name}\n")
        if args.modality == ALL
        else lambda name: ""
    )
    lines = ["\n\n".join(f"{heads(name)}{text}" for name, text in texts.items())]
    if args.gallery:
        from gen.bench.curve import write_page

        tables = {name: one["table"] for name, one in found.items()}
        lines.append(
            f"gallery: {write_page(Path(args.gallery), tables, f'gen bench {args.modality}')}"
        )
    deliver(args, report, "\n".join(lines))


def deliver(args: argparse.Namespace, report: dict[str, Any], text: str) -> None:
    """Writes the report where ``--out`` says, and prints the text; with ``--json`` standard output
    has the report as one line, and the text goes to standard error."""
    if args.out:
        from gen.store.ledger import put_text

        put_text(Path(args.out), json.dumps(report, ensure_ascii=False, indent=1) + "\n")
    print(text, file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps(report, ensure_ascii=False))


def machine() -> dict[str, Any]:
    import torch

    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
