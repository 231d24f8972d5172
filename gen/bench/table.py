"""Table of a benchmark from its runs: medians with their spread, shares with their 95 % intervals,
ratios to the reference."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from statistics import median
from typing import Any

from gen.bench.spread import noise
from gen.core.tables import columns

REFERENCE = "autoregressive"
HEADS = [
    "sampler",
    "batch",
    "forward passes",
    "computed (padded)",
    "s per item (min-max)",
    "fewer passes",
    "faster",
    "overhead",
    "per pass",
    "MB",
    "prompt accuracy (95 %)",
    "samples",
]
OUTSIDE = "outside of passes (min-max)"  # with --overhead
# parts of the time with --overhead
PARTS = ("decoding_seconds", "pass_seconds", "draft_seconds", "outside_seconds")
NOTHING = "-"
BRIEF = 50  # letters of a reason that has room in the table


def interval(share: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of n."""
    z = 1.959964
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def tabulate(
    runs: list[dict[str, Any]], errors: dict[tuple[str, int], str], variants: Sequence[Any]
) -> list[dict[str, Any]]:
    """Make a row per sampler and batch size, by batch size and in the order of ``variants``.

    A row has the medians of forward passes, tokens computed and seconds per item over the repeats,
    the minimum and maximum of the seconds, the largest peak memory, and the sum of the acceptance
    histograms. ``mean_acceptance_length`` is tokens per forward pass. ``passed`` and its interval
    count all outputs, None where no checker exists. Ratios are to the reference at the same batch
    size, of times the median over the repeats; ``overhead`` is wall speed-up / forward-pass
    speed-up, 1 where forward passes cost the same. ``noise`` and ``speed_up_noise`` say why the
    seconds and the ratio of times are not printed (``gen.bench.spread``), None where they are.

    Args:
        runs: measurements of all repeats.
        errors: reasons of rows without a measurement.
        variants: rows of the benchmark.
    """
    groups: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        groups[run["sampler"], run["batch_size"]].append(run)
    position = {v.label: n for n, v in enumerate(variants)}
    table = []
    for label, size in sorted({*groups, *errors}, key=lambda g: (g[1], position[g[0]])):
        v = variants[position[label]]
        row: dict[str, Any] = {
            "sampler": label,
            "batch_size": size,
            "error": errors.get((label, size)),
            "base": v.base,
            "param": v.param,
            "value": v.value,
            "peer": v.peer,
            "sampling": v.sampling,
        }
        table.append(row)
        if row["error"] is None:
            row.update(summary(groups[label, size]))
    reference = {r["batch_size"]: r for r in table if r["sampler"] == REFERENCE and not r["error"]}
    for row in table:
        base = reference.get(row["batch_size"])
        if base and not row["error"]:
            row["fewer_passes"] = base["nfe"] / row["nfe"]
            row.update(speed_up(groups[REFERENCE, row["batch_size"]], groups[key_of(row)]))
            row["overhead"] = row["speed_up"] / row["fewer_passes"]
            if row.get("cpu_seconds") and base.get("cpu_seconds"):
                row["cpu_speed_up"] = base["cpu_seconds"] / row["cpu_seconds"]
    return table


def key_of(row: dict[str, Any]) -> tuple[str, int]:
    return row["sampler"], row["batch_size"]


def speed_up(
    reference: Sequence[dict[str, Any]], group: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Compare the times of two rows, repeat by repeat."""
    base = {r["repeat"]: r for r in reference}
    pairs = [(base[r["repeat"]], r) for r in group if r["repeat"] in base]
    ratios = [one["seconds"] / other["seconds"] for one, other in pairs]
    return {
        "speed_up": median(ratios),
        "speed_up_least": min(ratios),
        "speed_up_most": max(ratios),
        "speed_up_noise": noise([per_pass(one) / per_pass(other) for one, other in pairs]),
    }


def per_pass(run: dict[str, Any]) -> float:
    """Return the seconds per forward pass of a run."""
    return run["seconds"] / run["nfe"]


def summary(group: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the repeats of one row."""
    seconds, media = [r["seconds"] for r in group], sum(r["items"] for r in group)
    row: dict[str, Any] = {
        key: median(r[key] for r in group)
        for key in (
            "nfe",
            "tokens_computed",
            "positions_computed",
            "seconds",
            "cpu_seconds",
            *PARTS,
            "outside_share",
        )
        if key in group[0]
    }
    if "outside_share" in group[0]:
        shares = [r["outside_share"] for r in group]
        row.update(outside_least=min(shares), outside_most=max(shares))
    row.update(
        seconds_least=min(seconds), seconds_most=max(seconds), repeats=len(group), media=media
    )
    row["noise"] = noise([per_pass(r) for r in group])
    memory = [r["peak_memory"] for r in group if r["peak_memory"] is not None]
    row["peak_memory"] = max(memory) if memory else None
    row["mean_acceptance_length"] = sum(r["tokens"] for r in group) / sum(
        r["nfe"] * r["items"] for r in group
    )
    row["acceptance_histogram"] = added(r["acceptance_histogram"] for r in group)
    drafted = [r["draft_nfe"] for r in group if r["draft_nfe"] is not None]
    row["draft_nfe"] = median(drafted) if drafted else None
    checked = all(r["passed"] is not None for r in group)
    for key in ("passed", "valid"):
        row[key] = sum(r[key] for r in group) / media if checked else None
    row["unchecked"] = next((r["unchecked"] for r in group if r["unchecked"]), None)
    row["passed_least"], row["passed_most"] = (
        interval(row["passed"], media) if checked else (None, None)
    )
    return row


def added(histograms: Any) -> list[int]:
    """Add histograms of any lengths."""
    return [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]


def render(table: list[dict[str, Any]], markdown: bool = False) -> str:
    """Format the table, and under it the sampling parameters that its rows share, rows with other
    ones, and long reasons."""
    timed = any("outside_share" in r for r in table)
    rows = [HEADS + ([OUTSIDE] if timed else [])]
    for r in table:
        start = [r["sampler"], str(r["batch_size"])]
        if r["error"]:
            rows.append(
                [
                    *start,
                    r["error"] if len(r["error"]) <= BRIEF else "refused",
                    *[NOTHING] * (len(rows[0]) - 3),
                ]
            )
            continue

        def ratio(key, sign="x", r=r):
            return f"{r[key]:.2f}{sign}" if key in r else NOTHING

        memory = NOTHING if r["peak_memory"] is None else f"{r['peak_memory'] / 1e6:.0f}"
        rows.append(
            [
                *start,
                calls(r),
                f"{r['tokens_computed']:.0f} ({r['positions_computed']:.0f})",
                seconds(r),
                ratio("fewer_passes"),
                faster(r),
                NOTHING if r.get("speed_up_noise") else ratio("overhead", ""),
                f"{r['mean_acceptance_length']:.2f}",
                memory,
                fidelity(r),
                str(r["media"]),
                *([outside(r)] if timed else []),
            ]
        )
    why = dict.fromkeys(
        f"prompt accuracy {NOTHING}: {r['unchecked']}" for r in table if r.get("unchecked")
    )
    refused = dict.fromkeys(
        f"{r['sampler']} refused: {r['error']}" for r in table if len(r["error"] or "") > BRIEF
    )
    return "\n".join(
        [
            laid_out(rows, markdown),
            *([""] if markdown else []),
            *untimed(table),
            *distributions(table),
            *why,
            *refused,
        ]
    )


def seconds(row: dict[str, Any]) -> str:
    """Format the time of an item, unless it is noise."""
    if row["noise"]:
        return NOTHING
    return f"{row['seconds']:.4f} ({row['seconds_least']:.4f}-{row['seconds_most']:.4f})"


def faster(row: dict[str, Any]) -> str:
    """Format the ratio of times to the reference, unless it is noise."""
    if "speed_up" not in row or row["speed_up_noise"]:
        return NOTHING
    if row["sampler"] == REFERENCE:
        return f"{row['speed_up']:.2f}x"
    return f"{row['speed_up']:.2f}x ({row['speed_up_least']:.2f}-{row['speed_up_most']:.2f})"


def untimed(table: Sequence[dict[str, Any]]) -> list[str]:
    """Say why times are not printed."""
    found: dict[str, list[str]] = defaultdict(list)
    for row in (r for r in table if not r["error"]):
        for key, what in (("noise", "s per item"), ("speed_up_noise", "faster")):
            if row.get(key):
                where = f"{row['sampler']}, batch {row['batch_size']}"
                found[f"{what} {NOTHING}: {row[key]}"].append(where)
    return [f"{reason} ({'; '.join(rows)})" for reason, rows in found.items()]


def calls(row: dict[str, Any]) -> str:
    """Format the forward passes of the model, and of the draft model if any."""
    return f"{row['nfe']:.1f}" + (
        f" + {row['draft_nfe']:.1f} draft" if row["draft_nfe"] is not None else ""
    )


def outside(row: dict[str, Any]) -> str:
    """Format the share of the decoding time outside of forward passes."""
    if "outside_share" not in row:
        return NOTHING
    return f"{row['outside_share']:.1%} ({row['outside_least']:.1%}-{row['outside_most']:.1%})"


def fidelity(row: dict[str, Any]) -> str:
    if row["passed"] is None:
        return NOTHING
    return f"{row['passed']:.1%} ({row['passed_least']:.0%}-{row['passed_most']:.0%})"


def distributions(table: list[dict[str, Any]]) -> list[str]:
    """Describe the sampling parameters of the measured rows, those of most rows first."""
    said: dict[str, list[str]] = defaultdict(list)
    for row in (r for r in table if not r["error"]):
        usual = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "guidance_scale": 1.0}
        changed = {k: v for k, v in row["sampling"].items() if v != usual.get(k)}
        names = said[", ".join(f"{k} {v:g}" for k, v in changed.items()) or "the model's own"]
        if row["sampler"] not in names:
            names.append(row["sampler"])
    first, *others = sorted(said.items(), key=lambda pair: -len(pair[1])) or [
        ("the model's own", [])
    ]
    return [
        f"sampling: {first[0]}",
        *(f"sampling of {', '.join(names)}: {sampling}" for sampling, names in others),
    ]


def laid_out(rows: list[list[str]], markdown: bool) -> str:
    """Format rows as a table; the first row is the head."""
    if not markdown:
        return columns(rows)
    lines = ["| " + " | ".join(r) + " |" for r in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])
