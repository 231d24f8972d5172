"""Parts of speculative decoding: drafters, shapes of drafts, verifiers."""

from __future__ import annotations

import dataclasses
from typing import Any

from gen.cli.listings.text import default_of, first_line
from gen.core.registry import registry


def drafters() -> list[dict[str, Any]]:
    """List the drafters: how siblings can be drawn from what they know, and their parameters."""
    return [
        {
            "name": name,
            "draft model": source.needs_draft_model,
            "draws": list(source.draws if source.shapes else ()),
            "params": _params("drafter", name),
            "about": first_line(source),
        }
        for name, source in registry.table("drafter").items()
    ]


def shapes() -> list[dict[str, Any]]:
    """List the shapes of drafts: how siblings can be drawn, and their parameters."""
    return [
        {
            "name": name,
            "draws": list(shape.takes),
            "params": _params("shape", name),
            "about": first_line(shape),
        }
        for name, shape in registry.table("shape").items()
    ]


def verifiers() -> list[dict[str, Any]]:
    """List the verifiers: their guarantee, the drafts that they judge, and their parameters."""
    return [
        {
            "name": name,
            "guarantee": "approximate" if verifier.relaxed else verifier.guarantee,
            "trees": verifier.judges_trees,
            "draws": list(verifier.draws),
            "params": _params("verifier", name),
            "about": first_line(verifier),
        }
        for name, verifier in registry.table("verifier").items()
    ]


def _params(kind: str, name: str) -> dict[str, Any]:
    """Defaults of the parameters that a part declares, by name."""
    declared = registry.params_of(kind, name)
    fields = dataclasses.fields(declared) if declared else ()
    return {f.name: default_of(f) for f in fields}
