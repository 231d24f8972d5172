"""Samplers whose tokens are those of ``autoregressive``. Not a test."""

from __future__ import annotations

from typing import Any

from gen.core.registry import registry
from gen.core.resolve import resolve_sampler

SCORES = {"best_of"}  # compares whole outputs of a pipeline, which ``generate`` has not
TABLES = ("table", "model_table")  # initialisers
TREES = ("branching", "paths")


def specs() -> dict[str, Any]:
    """Every sampler of causal models whose tokens are those of ``autoregressive`` and that needs
    nothing trained: samplers, presets, drafters and initialisers."""
    found: dict[str, Any] = {}
    for name in [*registry.table("sampler"), *registry.table("preset")]:
        sampler = resolve_sampler(name)[0]
        causal = sampler.protocol == "causal" and "codes" in sampler.kinds
        if causal and sampler.guarantee == "same_tokens" and name not in SCORES:
            found[name] = name
    follow = {"name": "speculative", "verifier": "follow", "num_speculative_tokens": 4}
    for name, drafter in registry.table("drafter").items():
        if not drafter.needs_weights and drafter.shapes and not drafter.several:
            found[f"follow-{name}"] = {**follow, "drafter": name}
    for shape in TREES:
        found[f"follow-{shape}"] = {"name": "speculative", "verifier": "follow", "shape": shape}
    for name in registry.table("initialiser"):
        empty = {"table": "empty"} if name in TABLES else {}
        found[f"jacobi-{name}"] = {
            "name": "speculative_jacobi", "window": 6, "init": name, **empty
        }  # fmt: skip
    return found


SPECS = specs()


def drafted_by(spec: Any, model: str) -> Any:
    """A spec with the name of a draft model, where its sampler takes one."""
    if not resolve_sampler(spec)[0].drafted:
        return spec
    return {**({"name": spec} if isinstance(spec, str) else spec), "draft_model": model}
