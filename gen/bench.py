"""``gen bench``: samplers side by side on the same prompts and seeds, never a speed without its fidelity.

Repeats are interleaved (every sampler once, then all again, in turning order), so that a machine that slows down slows
all of them; every figure is a median. Each repeat has fresh seeds, so fidelity counts prompts x repeats media.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean, median
from typing import Any

from gen.cli_info import columns
from gen.commands import law_of, positive
from gen.errors import GenError, bad_value

REFERENCE = "autoregressive"
DEFAULT = "speculative_jacobi,sjd,scd_mc,maskgit,halton"


def bench(args: argparse.Namespace, load: Callable[..., Any] | None = None) -> int:
    from gen.jobs import free_memory, is_out_of_memory
    from gen.ledger import put_text
    from gen.progress import for_terminal

    if load is None:
        from gen.pipeline import load
    for key, usual in (("prompts", 96 if args.oracle else 8), ("repeats", 1 if args.oracle else 3)):
        if getattr(args, key) is None:
            setattr(args, key, usual)
        if getattr(args, key) < 1:
            raise bad_value(f"--{key}", getattr(args, key), "an integer of at least 1")
    if args.seed < 0:
        raise bad_value("--seed", args.seed, "an integer of at least 0")
    target = Path(args.out) if args.out else None
    if target is not None and not target.parent.is_dir():
        raise GenError(f"--out is {args.out!r}, in a folder that does not exist; expected one that does")
    if args.gallery and Path(args.gallery).exists() and not Path(args.gallery).is_dir():
        raise GenError(f"--gallery is {args.gallery!r}, a file; expected a folder")
    if args.oracle:
        from gen.bench_oracle import bench_oracle

        return bench_oracle(args)
    sizes = positive(args.batch_sizes, "--batch-sizes")
    variants = choose(args)
    pipe = load(args.modality, model=args.model, device=args.device or "cpu", dtype=args.dtype or "float32")
    if not args.samplers:
        variants = [v for v in variants if serves(pipe, v.spec, v.law)]
    prompts = prompts_of(pipe.modality, args.modality, args.prompts, args.seed)
    runs: list[dict[str, Any]] = []
    progress = for_terminal()
    progress.start(len(variants) * len(sizes) * (args.repeats + 1), unit="measurement")
    broken: set[tuple[str, int]] = set()
    try:
        for repeat in range(-1, args.repeats):  # -1 warms up and is not counted
            items = pipe.plan(prompts, 1, args.seed + repeat + 1)
            for size in sizes:
                turn = (repeat + 1) % len(variants)
                for variant in variants[turn:] + variants[:turn]:
                    label = variant.label
                    progress.batch(f"{label}, batch {size}", size)
                    part = items[:size] if repeat < 0 else items
                    try:
                        if (label, size) not in broken:
                            run = measure(pipe, part, variant.spec, variant.law, size, progress.step, check=repeat >= 0)
                            runs += (
                                [{"sampler": label, "batch_size": size, "repeat": repeat, **run}] if repeat >= 0 else []
                            )
                    except (GenError, OSError):
                        raise
                    except Exception as problem:
                        if not is_out_of_memory(problem):
                            raise
                        broken.add((label, size))
                    if (label, size) in broken:
                        free_memory()
                    progress.items(1)
    finally:
        progress.close()
    table = tabulate(runs, broken, variants)
    if target is not None:
        said = {"modality": args.modality, "model": args.model, "device": args.device or "cpu",
                "dtype": args.dtype or "float32", "seed": args.seed, "repeats": args.repeats, "prompts": prompts,
                "machine": machine(),
                "samplers": [{"label": v.label, "sampler": v.spec, "law": v.law} for v in variants]}  # fmt: skip
        put_text(target, json.dumps({**said, "table": table, "runs": runs}, ensure_ascii=False, indent=1) + "\n")
    print(render(table, args.markdown))
    if args.gallery:
        from gen.bench_curve import write_curves

        print(f"gallery: {write_curves(Path(args.gallery), table, f'gen bench {args.modality}')}")
    return 0


@dataclass(frozen=True)
class Variant:
    """One line of the table: a sampler, its knobs and its law. ``base``, ``knob``, ``value``: of a sweep."""

    label: str
    spec: dict[str, Any]
    law: dict[str, Any]
    base: str
    knob: str | None = None
    value: Any = None


def choose(args: argparse.Namespace) -> list[Variant]:
    """The reference, then what was asked for. All of it is resolved, so a typo ends here."""
    from gen.sampling import resolve_sampler

    names = [n.strip() for n in (args.samplers or DEFAULT).split(",") if n.strip()]
    knob, values = swept(args.sweep)
    variants = []
    for name in dict.fromkeys([REFERENCE, *names]):
        law = law_of(args, name)
        sampler, _ = resolve_sampler(name, law)
        has = any(f.name == knob for f in fields(sampler))
        for value in values if has else [None]:
            spec = {"name": name, **({knob: value} if has else {})}
            label = f"{name} {knob}={value}" if has else name
            variants.append(Variant(label, spec, asdict(resolve_sampler(spec, law)[1]), name, knob if has else None, value))
    if knob and all(v.knob is None for v in variants):
        raise GenError(f"--sweep is about {knob!r}, a knob that none of {', '.join(names)} has")
    return variants


def swept(text: str | None) -> tuple[str | None, list[Any]]:
    """``window=4,8`` as a knob and its values. Raises ``GenError`` for anything else."""
    if not text:
        return None, []
    from yaml import YAMLError, safe_load

    knob, _, values = text.partition("=")
    try:
        found = [safe_load(v) for v in values.split(",")]
    except YAMLError:
        found = [None]
    if not knob.strip() or any(v is None or isinstance(v, (dict, list)) for v in found):
        raise bad_value("--sweep", text, "KNOB=VALUE,VALUE such as window=4,8")
    return knob.strip(), list(dict.fromkeys(found))


def serves(pipe: Any, spec: dict[str, Any], law: dict[str, Any]) -> bool:
    """Whether the pipeline has the models for a sampler. Only asked of samplers that the user did not name."""
    from gen.sampling import resolve_sampler

    try:
        sampler = resolve_sampler(spec, law)[0]
        pipe.model_name(sampler)
        if sampler.drafted:
            pipe.draft_name(sampler)
    except GenError:
        return False
    return True


def prompts_of(modality: Any, name: str, count: int, seed: int) -> list[str]:
    """The modality's own test prompts if it has them, else those of its packaged configs, in turn."""
    if hasattr(modality, "example_prompts"):
        return list(modality.example_prompts(count, seed))
    from gen.config import packaged
    from gen.layers import read_yaml

    known: dict[str, None] = {}
    for path in packaged().values():
        tree = read_yaml(path)
        if tree.get("modality") == name:
            known.update(dict.fromkeys(tree.get("prompts") or []))
    if not known:
        raise GenError(f"modality {name!r} names no prompts to measure with, and no packaged config does")
    return [list(known)[i % len(known)] for i in range(count)]


def measure(
    pipe: Any, items: list[Any], spec: dict, law: dict, size: int, callback: Any, *, check: bool
) -> dict[str, Any]:
    """One pass over the items in microbatches: seconds and forward calls per item, and how many prompts came true."""
    seconds, calls, verdicts = 0.0, [], []
    for first in range(0, len(items), size):
        batch = items[first : first + size]
        began = time.perf_counter()
        out = pipe.generate(batch, spec, law, trace=False, callback=callback)
        seconds += time.perf_counter() - began
        calls += [s.nfe for s in out.stats]
        if check:
            verdicts += [pipe.modality.check(m, i.prompt) for m, i in zip(out.media, batch, strict=True)]
    return {"items": len(items), "seconds": seconds / len(items), "nfe": mean(calls),
            "fulfilled": sum(v.fulfilled for v in verdicts), "valid": sum(v.valid for v in verdicts)}  # fmt: skip


def tabulate(runs: list[dict[str, Any]], broken: set[tuple[str, int]], variants: list[Variant]) -> list[dict[str, Any]]:
    """Medians per sampler and batch size, and their ratios to the reference at the same batch size.

    ``overhead``: wall speed-up / forward-call speed-up; 1 is the limit.
    """
    groups: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        groups[run["sampler"], run["batch_size"]].append(run)
    table, order = [], [v.label for v in variants]
    for label, size in sorted({*groups, *broken}, key=lambda g: (g[1], order.index(g[0]))):
        v = variants[order.index(label)]
        row: dict[str, Any] = {"sampler": label, "batch_size": size, "error": None, "base": v.base, "knob": v.knob, "value": v.value}
        if (label, size) in broken:
            table.append({**row, "error": "out of memory"})
            continue
        group = groups[label, size]
        row.update({key: median(r[key] for r in group) for key in ("nfe", "seconds")})
        media = sum(r["items"] for r in group)
        row.update({"media": media, **{k: sum(r[k] for r in group) / media for k in ("fulfilled", "valid")}})
        table.append(row)
    reference = {r["batch_size"]: r for r in table if r["sampler"] == REFERENCE and not r["error"]}
    for row in table:
        base = reference.get(row["batch_size"])
        if base and not row["error"]:
            row["fewer_calls"], row["speed_up"] = base["nfe"] / row["nfe"], base["seconds"] / row["seconds"]
            row["overhead"] = row["speed_up"] / row["fewer_calls"]
    return table


def render(table: list[dict[str, Any]], markdown: bool) -> str:
    heads = [
        "sampler",
        "batch",
        "forward calls",
        "s per item",
        "fewer calls",
        "faster",
        "overhead",
        "fulfilled",
        "media",
    ]
    rows = [heads]
    for r in table:
        if r["error"]:
            rows.append([r["sampler"], str(r["batch_size"]), r["error"], *["-"] * (len(heads) - 3)])
            continue
        ratios = [f"{r[k]:.2f}x" if k in r else "-" for k in ("fewer_calls", "speed_up")]
        overhead = f"{r['overhead']:.2f}" if "overhead" in r else "-"
        rows.append([r["sampler"], str(r["batch_size"]), f"{r['nfe']:.1f}", f"{r['seconds']:.4f}", *ratios, overhead,
                     f"{r['fulfilled']:.1%}", str(r["media"])])  # fmt: skip
    return laid_out(rows, markdown)


def laid_out(rows: list[list[str]], markdown: bool) -> str:
    """A table whose first row is its head."""
    if not markdown:
        return columns(rows)
    lines = ["| " + " | ".join(r) + " |" for r in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def machine() -> dict[str, Any]:
    import torch

    return {"platform": platform.platform(), "python": platform.python_version(), "torch": torch.__version__,
            "threads": torch.get_num_threads()}  # fmt: skip
