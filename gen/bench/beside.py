"""Times of samplers beside each other on one item, ``gen demo``: warm, interleaved, and only where
they are no noise (``gen.bench.spread``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from gen.bench.measure import measure
from gen.bench.spread import noise
from gen.bench.variants import Variant

REPEATS = 3


def seconds_beside(
    pipe: Any, variants: Sequence[Variant], items: list[Any]
) -> dict[str, list[float]]:
    """Decode the items with every sampler once per repeat; each repeat begins with another one.

    Args:
        pipe: pipeline that serves all samplers.
        variants: the samplers; another one decodes with the network of the first.
        items: planned items, which are decoded together.

    Returns:
        Seconds per item of every repeat, by sampler. Those of a first one, in which all but the
        first sampler warm up, are not among them.
    """
    rows = list(variants)
    found: dict[str, list[float]] = {row.label: [] for row in rows}
    for repeat in range(-1, REPEATS):
        turn = (repeat + 1) % len(rows)
        for row in rows[1:] if repeat < 0 else rows[turn:] + rows[:turn]:
            run = measure(pipe, items, row, len(items), None, check=False)
            if repeat >= 0:
                found[row.label].append(run["seconds"])
    return found


def relative(seconds: Mapping[str, Sequence[float]]) -> tuple[dict[str, str], str | None]:
    """Format times in relation to those of the first sampler, repeat by repeat.

    Returns:
        Times by name, none where one is noise; and why, None where none is.
    """
    base, *_ = seconds.values()
    times: dict[str, str] = {}
    for name, mine in seconds.items():
        ratios = [own / other for own, other in zip(mine, base, strict=True)]
        if reason := noise(ratios):
            return {}, f"{reason} ({name})"
        width = f" ({min(ratios):.2f}-{max(ratios):.2f})" if mine is not base else ""
        times[name] = f"time {median(ratios):.2f}{width}"
    return times, None
