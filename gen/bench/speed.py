"""SPEED-Bench's protocol, ``gen bench MODALITY --protocol speed``: every speculative sampler on one
footing.

    acceptance length   tokens per forward pass of the target, the bonus token included
    category            of the prompt (``Modality.category``): as many prompts of each
    entropy             thirds of the prompts by the mean entropy of the target's distributions
                        along its own output: low, mixed, high
    concurrency         items decoded together

Throughput is measured category by category and concurrency by concurrency, after a round that is
not counted; repeats are interleaved as in ``gen.bench.run``. Acceptance lengths are pooled over
concurrency levels, which do not change them.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from gen.bench.measure import described, prompts_of
from gen.bench.records import Records, finished, opened
from gen.bench.report import ALL, deliver, measured_on
from gen.bench.spread import noise
from gen.bench.table import NOTHING, REFERENCE, laid_out
from gen.bench.variants import Variant, choose, model_options, serves
from gen.core.checks import parse_counts
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.jobs.progress.terminal import for_terminal

ENTROPIES = ("low", "mixed", "high")
POOL = 40  # prompts that are looked at for every one that is wanted
FOOTING = [
    "sampler", "concurrency", "tokens per pass", "draft passes per pass", "tokens/s", "faster",
]  # fmt: skip
REFUSED = ("oracle", "peers", "gallery")  # flags of the usual protocol


@dataclass(frozen=True)
class Cost:
    """Cost of one item of a measurement.

    Attributes:
        sampler, size, category, entropy, repeat: what was measured.
        nfe, draft_nfe: forward passes of the target and of the draft model.
        tokens: tokens up to the eos token.
        seconds: wall time of the batch, divided by its items.
    """

    sampler: str
    size: int
    category: str
    entropy: str
    repeat: int
    nfe: int
    draft_nfe: int
    tokens: int
    seconds: float


def bench_speed(args: argparse.Namespace, load: Callable[..., Any]) -> int:
    """Carry out the protocol; return the exit code.

    Raises:
        GenError: a flag belongs to the usual protocol, or the modality's models take no drafts.
    """
    given = [flag for flag in REFUSED if getattr(args, flag)]
    if given or args.modality == ALL:
        what = f"--{given[0]}" if given else f"gen bench {ALL}"
        raise GenError(f"{what} is given with --protocol speed; expected --protocol usual with it")
    sizes = parse_counts(args.batch_sizes, "--batch-sizes")
    asked = args.samplers is not None
    args.samplers = args.samplers or ",".join(speculative_names())
    said = model_options(args)
    pipe = load(args.modality, **said)
    variants = [v for v in choose(args) if asked or serves(pipe, v.spec, v.sampling)]
    if not variants or variants[0].label != REFERENCE:
        raise GenError(
            f"--protocol speed compares with {REFERENCE}, which the model does not support;"
            " expected a causal model"
        )
    groups = by_category(pipe.modality, args.modality, args.prompts, args.seed)
    records = opened(args, pipe, said, groups, for_terminal().note)
    costs = measured(pipe, variants, sizes, groups, args.repeats, args.seed, records)
    report = {
        "protocol": "speed", "modality": args.modality, **said, "seed": args.seed,
        "repeats": args.repeats, "prompts": groups, "machine": records.machine,
        "samplers": [{"label": v.label, "sampler": v.spec} for v in variants],
        "table": footing(costs), "acceptance": lengths(costs), "throughput": throughput(costs),
        "noise": noises(costs),
    }  # fmt: skip
    deliver(args, report, f"{render(report, args.markdown)}\n\n{measured_on(records.machine)}")
    finished(args)
    return 0


def speculative_names() -> list[str]:
    """List the samplers that the protocol compares: those that draft, and keep the distribution."""
    presets = [n for n, p in registry.table("preset").items() if p.sampler == "speculative"]
    return ["speculative_jacobi", "speculative", *presets]


def by_category(modality: Any, name: str, count: int, seed: int) -> dict[str, list[str]]:
    """Choose prompts: ``count`` of every category, as far as there are that many."""
    groups: dict[str, list[str]] = defaultdict(list)
    for prompt in prompts_of(modality, name, POOL * count, seed):
        group = groups[modality.category(prompt)]
        if len(group) < count:
            group.append(prompt)
    return dict(sorted(groups.items()))


def measured(
    pipe: Any,
    variants: Sequence[Variant],
    sizes: Sequence[int],
    groups: dict[str, list[str]],
    repeats: int,
    seed: int,
    records: Records | None = None,
) -> list[Cost]:
    """Measure every sampler once per repeat, concurrency and category, in rotating order; what
    ``records`` has is not measured again."""
    costs: list[Cost] = []
    records = Records(None, {}) if records is None else records
    for repeat in range(-1, repeats):  # -1 warms up and is not counted
        plans = {c: pipe.plan(prompts, 1, seed + repeat + 1) for c, prompts in groups.items()}
        buckets = {} if repeat < 0 else known_buckets(pipe, variants[0], plans, repeat, records)
        turn = (repeat + 1) % len(variants)
        for size in sizes:
            for variant in (*variants[turn:], *variants[:turn]):
                for category, items in plans.items():
                    counted = range(repeats) if repeat < 0 else [repeat]
                    what = [{**described(variant, size, n), "category": category} for n in counted]
                    known = [records.find(one) for one in what]
                    if not all(known):
                        part = items[:size] if repeat < 0 else items
                        known = [{"costs": decoded(pipe, variant, part, size)}]
                        if repeat >= 0:
                            records.add(what[0], known[0])
                    for n, cost in enumerate(known[0]["costs"] if repeat >= 0 else ()):
                        labels = variant.label, size, category, buckets[category, n], repeat
                        costs.append(Cost(*labels, *cost))
    return costs


def decoded(
    pipe: Any, variant: Variant, items: Sequence[Any], size: int
) -> list[tuple[int, int, int, float]]:
    """Decode items, ``size`` at a time.

    Returns:
        Forward passes of target and draft model, tokens and seconds of every item.
    """
    found = []
    for first in range(0, len(items), size):
        batch = items[first : first + size]
        began = time.perf_counter()
        stats = pipe.generate(batch, variant.spec, variant.sampling).stats
        seconds = (time.perf_counter() - began) / len(batch)
        found += [(s.nfe, s.draft_nfe or 0, s.tokens, seconds) for s in stats]
    return found


def known_buckets(
    pipe: Any,
    reference: Variant,
    plans: dict[str, list[Any]],
    repeat: int,
    records: Records,
) -> dict[tuple[str, int], str]:
    """Return the buckets of ``entropy_buckets``, those of ``records`` where it has them."""
    what = {"buckets of repeat": repeat}
    known = records.find(what)
    if known is None:
        found = entropy_buckets(pipe, reference, plans)
        known = {"buckets": [[*key, bucket] for key, bucket in found.items()]}
        records.add(what, known)
    return {(category, n): bucket for category, n, bucket in known["buckets"]}


def entropy_buckets(
    pipe: Any, reference: Variant, plans: dict[str, list[Any]]
) -> dict[tuple[str, int], str]:
    """Sort the items by the entropy of the target along its own output, in thirds.

    Returns:
        Bucket of every category and number of an item.
    """
    entropy = {}
    for category, items in plans.items():
        out = pipe.generate(items, reference.spec, reference.sampling)
        target = pipe.target(*pipe.resolve(reference.spec, reference.sampling), items)
        tokens = out.tokens.flatten(1).to(target.device)
        at = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
        before = torch.cat([tokens[:, :1], tokens[:, :-1]], 1)
        logp = target.predict(before, at).logprobs.double()
        each = -(logp.exp() * logp.clamp_min(-1e9)).sum(-1)
        for n, s in enumerate(out.stats):
            entropy[category, n] = float(each[n, : s.tokens].mean())
    order = sorted(entropy, key=lambda key: entropy[key])
    return {key: ENTROPIES[3 * n // len(order)] for n, key in enumerate(order)}


# --- the tables


def footing(costs: Sequence[Cost]) -> list[dict[str, Any]]:
    """Make a row per concurrency and sampler, over all categories."""
    rows = []
    for (size, label), group in grouped(costs, "size", "sampler").items():
        tokens, nfe = (sum(getattr(c, key) for c in group) for key in ("tokens", "nfe"))
        rows.append({
            "sampler": label, "concurrency": size, "acceptance_length": tokens / nfe,
            "draft_passes": sum(c.draft_nfe for c in group) / nfe,
            "tokens_per_second": _speed(group), "noise": noise([*_per_pass(group).values()]),
        })  # fmt: skip
    groups = grouped(costs, "size", "sampler")
    for row in rows:
        size, label = row["concurrency"], row["sampler"]
        base, mine = (groups[size, one] for one in (REFERENCE, label))
        row["faster"] = row["tokens_per_second"] / _speed(base)
        plain, other = _per_pass(base), _per_pass(mine)
        row["faster_noise"] = noise([plain[n] / other[n] for n in plain.keys() & other.keys()])
    return rows


def lengths(costs: Sequence[Cost]) -> dict[str, dict[str, float]]:
    """Compute the acceptance length of every sampler, by category and by entropy."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for axis in ("category", "entropy"):
        for (label, one), group in grouped(costs, "sampler", axis).items():
            found[label][one] = sum(c.tokens for c in group) / sum(c.nfe for c in group)
    return dict(found)


def throughput(costs: Sequence[Cost]) -> dict[str, dict[str, dict[int, float]]]:
    """Compute tokens per second of every sampler, by category and concurrency."""
    return _by_domain(costs, _speed)


def noises(costs: Sequence[Cost]) -> dict[str, dict[str, dict[int, str | None]]]:
    """Say where the tokens per second of ``throughput`` are noise, and why."""
    return _by_domain(costs, lambda group: noise([*_per_pass(group).values()]))


def _by_domain(costs: Sequence[Cost], of: Callable[[list[Cost]], Any]) -> dict[str, Any]:
    found: dict[str, dict[str, dict[int, Any]]] = {}
    for (label, one, size), group in grouped(costs, "sampler", "category", "size").items():
        found.setdefault(label, {}).setdefault(one, {})[size] = of(group)
    return found


def _per_pass(costs: Iterable[Cost]) -> dict[int, float]:
    """Seconds per forward pass of the target, by repeat."""
    repeats = grouped(costs, "repeat").items()
    return {n: sum(c.seconds for c in g) / sum(c.nfe for c in g) for (n,), g in repeats}


def _speed(costs: Iterable[Cost]) -> float:
    """Tokens per second: the median over the repeats."""
    repeats = grouped(costs, "repeat").values()
    return median(sum(c.tokens for c in g) / sum(c.seconds for c in g) for g in repeats)


def grouped(costs: Iterable[Cost], *keys: str) -> dict[tuple, list[Cost]]:
    """Group measurements by some of their fields, in the order of their first ones."""
    found: dict[tuple, list[Cost]] = defaultdict(list)
    for cost in costs:
        found[tuple(vars(cost)[key] for key in keys)].append(cost)
    return found


def render(report: dict[str, Any], markdown: bool = False) -> str:
    """Format the two tables of a report."""
    labels = [one["label"] for one in report["samplers"]]
    rank = {label: n for n, label in enumerate(labels)}
    rows = [FOOTING]
    for r in sorted(report["table"], key=lambda r: (r["concurrency"], rank[r["sampler"]])):
        rows.append([
            r["sampler"], str(r["concurrency"]), f"{r['acceptance_length']:.2f}",
            f"{r['draft_passes']:.2f}" if r["draft_passes"] else NOTHING,
            NOTHING if r["noise"] else f"{r['tokens_per_second']:.0f}",
            NOTHING if r["faster_noise"] else f"{r['faster']:.2f}x",
        ])  # fmt: skip
    categories = list(report["prompts"])
    buckets = [b for b in ENTROPIES if any(b in by for by in report["acceptance"].values())]
    heads = [
        "sampler",
        *(f"{c} (tokens/s)" for c in categories),
        *(f"{b} entropy" for b in buckets),
    ]
    domains = [heads]
    for label in labels:
        length, speed = report["acceptance"][label], report["throughput"][label]
        cells = []
        for c in categories:
            why = report["noise"][label][c]
            speeds = [NOTHING if why[n] else f"{s:.0f}" for n, s in speed[c].items()]
            cells.append(f"{length[c]:.2f} ({', '.join(speeds)})")
        domains.append([label, *cells, *(f"{length[b]:.2f}" for b in buckets)])
    sizes = ", ".join(map(str, dict.fromkeys(r["concurrency"] for r in report["table"])))
    about = f"tokens per pass by category, with tokens/s at concurrency {sizes}; and by entropy"
    reasons = [
        f"{what} {NOTHING}: {r[key]} ({r['sampler']}, concurrency {r['concurrency']})"
        for r in report["table"]
        for key, what in (("noise", "tokens/s"), ("faster_noise", "faster"))
        if r[key]
    ]
    tables = [laid_out(rows, markdown), *reasons, about, laid_out(domains, markdown)]
    return "\n\n".join(tables)
