"""Measurements of samplers, interleaved: forward passes, wall time, memory, prompt accuracy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

import torch

from gen.bench.overhead import PassClock
from gen.bench.records import Records
from gen.bench.table import added
from gen.bench.variants import Variant
from gen.config.layers import read_yaml
from gen.config.packaged import packaged
from gen.contracts.condition import Condition
from gen.core.errors import GenError
from gen.core.memory import free_memory, is_out_of_memory


def interleaved(
    pipe: Any,
    variants: list[Variant],
    sizes: list[int],
    prompts: list[str],
    repeats: int,
    seed: int,
    errors: dict[tuple[str, int], str],
    progress: Any,
    overhead: bool = False,
    records: Records | None = None,
) -> list[dict[str, Any]]:
    """Measure every variant once per repeat and batch size; each repeat begins with another one.

    Variants in ``errors`` are left out. Variants that run out of memory are added to it, and those
    that refuse and were not requested by name. ``overhead``: forward passes are timed.
    ``records``: measurements so far, which are not made again; new ones are added at once.

    Raises:
        GenError: no variant is left.
    """
    runs: list[dict[str, Any]] = []
    records = Records(None, {}) if records is None else records
    for repeat in range(-1, repeats):  # -1 warms up and is not counted
        items = pipe.plan(prompts, 1, seed + repeat + 1)
        for size in sizes:
            turn = (repeat + 1) % len(variants)
            for variant in variants[turn:] + variants[:turn]:
                key = variant.label, size
                progress.batch(f"{variant.label}, batch {size}", size)
                counted = range(repeats) if repeat < 0 else [repeat]
                known = [records.find(described(variant, size, n)) for n in counted]
                if key not in errors and not all(known):
                    part = items[:size] if repeat < 0 else items
                    more = {"check": repeat >= 0, "overhead": overhead}
                    run = attempted(pipe, part, variant, size, progress, errors, **more)
                    if run is not None and repeat >= 0:
                        known = [run]
                        records.add(described(variant, size, repeat), run)
                if key not in errors and repeat >= 0:
                    what = {"sampler": variant.label, "batch_size": size, "repeat": repeat}
                    runs.append({**what, **known[0]})
                progress.items(1)
    if not runs:
        raise GenError(next(iter(errors.values())))
    return runs


def attempted(
    pipe: Any,
    items: list[Any],
    variant: Variant,
    size: int,
    progress: Any,
    errors: dict[tuple[str, int], str],
    **how: bool,
) -> dict[str, Any] | None:
    """Measure once; None where the reason that it cannot be done is added to ``errors``."""
    try:
        return measure(pipe, items, variant, size, progress.step, **how)
    except (GenError, OSError) as problem:
        if variant.asked or isinstance(problem, OSError):
            raise
        errors[variant.label, size] = str(problem)
    except Exception as problem:
        if not is_out_of_memory(problem):
            raise
        errors[variant.label, size] = "out of memory"
    if errors[variant.label, size] == "out of memory":
        free_memory()
    return None


def described(variant: Variant, size: int, repeat: int) -> dict[str, Any]:
    """Describe a measurement by what tells it from others of its benchmark."""
    return {
        "sampler": variant.label,
        "spec": variant.spec,
        "sampling": variant.sampling,
        "peer": variant.peer,
        "batch_size": size,
        "repeat": repeat,
    }


def prompts_of(modality: Any, name: str, count: int, seed: int) -> list[str]:
    """Return the test prompts of a modality if it has them, else those of its packaged configs, in
    turn."""
    try:
        return list(modality.example_prompts(count, seed))
    except GenError:  # a published model has none
        pass
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
    pipe: Any,
    items: list[Any],
    variant: Variant,
    size: int,
    callback: Any,
    *,
    check: bool,
    overhead: bool = False,
) -> dict[str, Any]:
    """Decode the items once in microbatches: cost per item, and the number of outputs that match
    their prompts; None where no checker exists.

    With ``overhead`` also the parts of the time (``gen.bench.overhead``), without the callback.
    """
    clock = PassClock() if overhead and variant.make is None else None

    def generate(batch: list[Any]) -> Any:
        if clock is not None:
            return clock.run(pipe, variant, batch)
        spec, sampling = variant.spec, variant.sampling
        return pipe.generate(batch, spec, sampling, trace=False, callback=callback)

    make = variant.make or generate
    seconds, busy, stats, pairs = 0.0, 0.0, [], []
    memory = _memory(pipe.device)
    for first in range(0, len(items), size):
        batch = items[first : first + size]
        began, ran = time.perf_counter(), time.process_time()
        out = make(batch)
        seconds, busy = (
            seconds + time.perf_counter() - began,
            busy + time.process_time() - ran,
        )
        stats += out.stats
        pairs += zip(out.media, batch, strict=True)
    peak = memory()  # before checkers take their own
    verdicts, unchecked = verdicts_of(pipe.modality, pairs) if check else (None, None)
    drafted = [s.draft_nfe for s in stats if s.draft_nfe is not None]
    return {
        "items": len(items),
        "seconds": seconds / len(items),
        "cpu_seconds": busy / len(items),
        "nfe": mean(s.nfe for s in stats),
        "draft_nfe": mean(drafted) if drafted else None,
        "tokens": sum(s.tokens for s in stats),
        "tokens_computed": mean(s.tokens_computed for s in stats),
        "positions_computed": mean(s.positions_computed for s in stats),
        "peak_memory": peak,
        "acceptance_histogram": added(s.acceptance_histogram for s in stats),
        "passed": None if verdicts is None else sum(v.passed for v in verdicts),
        "valid": None if verdicts is None else sum(v.valid for v in verdicts),
        "unchecked": unchecked,
        **({} if clock is None else clock.per_item(len(items))),
    }


def verdicts_of(
    modality: Any, pairs: Sequence[tuple[Any, Any]]
) -> tuple[list[Any] | None, str | None]:
    """Return the checker's verdicts on outputs and their items; or None, and the reason."""
    try:
        return [modality.judge(m, x.given or Condition(text=x.prompt)) for m, x in pairs], None
    except GenError as why:
        return None, str(why)


def _memory(device: torch.device) -> Callable[[], int | None]:
    """Start counting memory. The result returns the peak of torch's bytes on the device; None
    without CUDA, which alone counts them."""
    if device.type != "cuda":
        return lambda: None
    torch.cuda.reset_peak_memory_stats(device)
    return lambda: torch.cuda.max_memory_allocated(device)
