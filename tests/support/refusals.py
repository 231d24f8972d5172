"""Freeze which parameters samplers refuse, and in which words.

Every sampler is asked for sets of parameters: each value alone, pairs, triples, and each value over
each preset. Of the samplers in ``GRID``, whose parameters depend on each other most, every pair of
values is tried. What a set meets is None where it is taken, the warning of parameters that nothing
reads, or the sentence that refuses it.

    PYTHONPATH=. python tests/support/refusals.py --write

Write only where refusals are meant to change, and say why.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from gen.core.registry import registry
from gen.core.resolve import resolve_sampler

FILE = Path(__file__).resolve().parents[1] / "contracts" / "refusals.json"
EXAMPLES = 15  # sentences of a sampler that the file has in full, at most
MORE_EXAMPLES = 60  # of a sampler in GRID
LONGEST = 240  # characters of an example; the hash is of whole sentences
INF = float("inf")
ANY = (None, True, 0, 1, -1, 2, 0.5, 2.5, INF, float("nan"), "", "x")
KINDS = {  # parameters that name registered parts
    "coupling": "coupling",
    "init": "initialiser",
    "drafter": "drafter",
    "shape": "shape",
    "policy": "length_policy",
    "verifier": "verifier",
    "order": "order",
    "schedule": "schedule",
    "proposer": "proposer",
    "selector": "selector",
    "remasker": "remasker",
    "stop": "stop",
    "blocks": "block_schedule",
    "cache": "cache_policy",
    "aggregation": "aggregation",
}
DRAFTED: dict[str, tuple[Any, ...]] = {
    "draft_model": (None, "m", "m,n", 4),
    "num_speculative_tokens": (5, "auto", 0, True),
    "policy": ("constant", "confidence", "batch_size", "acceptance_head", "x"),
    "confidence_threshold": (0.4, 2),
    "draft_temperature": (None, 0.5, -1, "x"),
    "draft_guidance": (None, -1.5, INF, "x"),
}
GRID: dict[str, dict[str, tuple[Any, ...]]] = {
    "speculative_jacobi": {
        "coupling": ("gumbel", "fresh", "maximal", "gumbel_shared", "gumbl"),
        "window": (64, "auto", 3, 0, True),
        "init": ("uniform", "model", "table", "model_table", "x"),
        "redraft": (None, True, False, "replace", "z"),
        "scope": ("item", "call", "w"),
        "tree_width": (1, 2, 0),
        "tree_levels": (2, 1, 0),
        "keep_threshold": (1.0, 0.5, 2, True),
        "trend": (0.0, 0.1, -1, INF),
        "drafter": ("model", "layer_skip", "early_exit", "skip", "suffix", "x"),
        "drafter_weights": (None, "d", 3),
        "draft_rounds": (3, None, 0, 2.0),
        "draft_model": (None, "m", 4),
        "table": (None, "t", 5),
        "kept_layers": ("1/2", "0,1", "2/1", "x", 3),
        "exit_layer": (1, 2, 0),
    },
    "speculative": {
        **DRAFTED,
        "drafter": ("model", "prompt_lookup", "suffix", "several", "pearl", "superposed")
        + ("jacobi", "layer_skip", "eagle", "x"),
        "shape": ("chain", "branching", "best_first", "paths", "optimal", "selected", "x"),
        "draws": (None, "ranks", "without_replacement", "position_noise", "top_and_random", "x"),
        "verifier": ("token", "block", "follow", "greedy", "recursive", "k_seq", "traversal")
        + ("lantern", "x"),
        "draft_vocab": (None, 64, 0),
        "drafter_weights": (None, "d"),
        "scope": ("item", "call", "w"),
        "nodes": (16, "auto", 600, 2000, 0),
        "branching": ("3-2-1", "9-9-9-9", "0", 3),
        "paths": (4, 1, 500),
        "trunk": (0, 2),
        "acceptance_by_rank": ("0.6,0.15", "0.9,0.9", "x"),
        "kept_layers": ("1/2", "2/1"),
        "drafts_by_rows": ("1-4:5", "x"),
    },
    "relaxed_acceptance": {
        **DRAFTED,
        "verifier": ("lantern", "lantern_pp", "gsd", "cool", "typical", "distance", "judge")
        + ("lexical_unit", "token", "x"),
        "relaxation": (None, 0, 0.5, 1.5, -1, INF, True, "x"),
        "drafter": ("jacobi", "model", "exit", "pearl", "layer_skip", "suffix", "several", "x"),
        "coupling": ("gumbel_shared", "gumbel", "fresh", "maximal", "x"),
        "window": (64, "auto", 1, 0, True),
        "init": ("uniform", "repeat", "model", "table", "x"),
        "drafter_weights": (None, "d", 3),
        "verifier_weights": (None, "d", 3),
    },
}
WORDS: dict[str, tuple[Any, ...]] = {
    "window": ("auto",),
    "base": ("autoregressive", "maskgit", {"name": "sjd", "window": 0}),
    "budget": ("500 passes",),
    "mode": ("exact", "relaxed"),
    "speculate": ("none", "joint"),
    "early_stopping": ("never",),
    "agree": ("top_k", "relative"),
    "block_length": (4,),
    "filter": ("/usr",),
}


def values_of(sampler: str) -> dict[str, tuple[Any, ...]]:
    """List the values that each parameter of a sampler is tried with."""
    found = {}
    for f in sorted(fields(registry.get("sampler", sampler)), key=lambda f: f.name):
        parts = tuple(registry.table(KINDS[f.name])) if f.name in KINDS else ()
        found[f.name] = (f.default, *ANY, *parts, *WORDS.get(f.name, ()))
    for name, values in GRID.get(sampler, {}).items():
        found[name] = (*found[name], *values)
    return found


def specs_of(sampler: str) -> Iterator[dict[str, Any]]:
    """List the sets of parameters that a sampler is asked for, each with a name."""
    every, grid = values_of(sampler), GRID.get(sampler, {})
    draw = random.Random(0).random  # the one method whose numbers no version of Python changes
    yield {"name": sampler}
    yield from ({"name": sampler, k: v} for k, values in every.items() for v in values)
    for a, b in itertools.combinations(grid, 2):
        yield from ({"name": sampler, a: x, b: y} for x in grid[a] for y in grid[b])
    presets = [n for n, p in registry.table("preset").items() if p.sampler == sampler]
    for preset in presets if grid else ():
        yield from ({"name": preset, k: v} for k, values in grid.items() for v in values)
    some = grid or every
    for size, many in ((2, 300), (3, 1500), (4, 500)) if grid else ((2, 100), (3, 50)):
        for _ in range(many if len(some) >= size else 0):
            left, spec = list(some), {"name": sampler}
            for _ in range(size):
                key = left.pop(int(draw() * len(left)))
                spec[key] = some[key][int(draw() * len(some[key]))]
            yield spec


def met(spec: dict[str, Any]) -> str | None:
    """Say what a set of parameters meets: None, a warning, or the sentence that refuses it."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            resolve_sampler(spec)
        except Exception as error:  # what is no GenError is frozen as well
            return f"{type(error).__name__}: {error}"
    return " ".join(f"Warning: {w.message}" for w in warned) or None


@cache
def asked(sampler: str) -> list[tuple[str, str | None]]:
    """Ask a sampler for all its sets of parameters: each as a text, with what it met."""
    specs = {repr(spec)[1:-1]: spec for spec in specs_of(sampler)}
    return [(text, met(spec)) for text, spec in specs.items()]


def summary(sampler: str) -> dict[str, Any]:
    """Sum up what a sampler refuses: the sets that it does not take, as bits of a number in
    hexadecimal; a hash of all sentences; and some of them in full. ``params``: every parameter and
    its default."""
    rows = asked(sampler)
    refused = int("".join(str(int(is_refused(said))) for _, said in rows), 2)
    sentences = hashlib.sha256("\n".join(f"{spec}: {said}" for spec, said in rows).encode())
    said = [row for row in rows if row[1]]
    step = max(1, -(-len(said) // (MORE_EXAMPLES if sampler in GRID else EXAMPLES)))
    return {
        "sets": len(rows),
        "refused": f"{refused:x}",
        "sentences": sentences.hexdigest(),
        "examples": {spec: cut(text) for spec, text in said[::step]},
        "params": {f.name: f.default for f in fields(registry.get("sampler", sampler))},
    }


def cut(said: str | None) -> str | None:
    """Cut a sentence to that of an example."""
    return said and said[:LONGEST]


def is_refused(said: str | None) -> bool:
    """Whether what a set met is an error, and not a warning or nothing."""
    return said is not None and not said.startswith("Warning: ")


def held() -> dict[str, Any]:
    """Return the file."""
    return json.loads(FILE.read_text())


if __name__ == "__main__" and "--write" in sys.argv[1:]:
    found = {name: summary(name) for name in registry.table("sampler")}
    FILE.write_text(json.dumps(found, indent=1) + "\n")
