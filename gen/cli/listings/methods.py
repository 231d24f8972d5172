"""Samplers, presets and the parts that samplers are made of."""

from __future__ import annotations

import dataclasses
from typing import Any

from gen.core.docstrings import default_of, first_line
from gen.core.registry import PART_KINDS, registry
from gen.core.resolve import resolve_sampler

# kinds that ``ls parts`` lists
PARTS = (*PART_KINDS, "constraint")


def samplers() -> list[dict[str, Any]]:
    """List samplers with their parameters, guarantees, papers and presets."""
    table, named = [], presets()
    for name, cls in registry.table("sampler").items():
        params = {f.name: default_of(f) for f in dataclasses.fields(cls)}
        table.append(
            {
                "name": name,
                # a search takes the protocol of its base
                "protocol": "any" if cls.wraps else cls.protocol,
                "kinds": list(cls.kinds),
                "guarantee": _guarantee(name),
                "reference": _reference(name),
                "papers": list(cls.papers),
                "presets": [
                    {k: p[k] for k in ("name", "guarantee", "reference", "paper", "about")}
                    for p in named
                    if p["sampler"] == name
                ],
                "params": params,
                "about": first_line(cls),
            }
        )
    return table


def presets() -> list[dict[str, Any]]:
    """List presets: published methods by name."""
    return [
        {
            "name": name,
            "sampler": p.sampler,
            "guarantee": _guarantee(name),
            "reference": _reference(name),
            "paper": p.paper,
            "title": p.title,
            "limit": _limit(p.limit),
            "params": dict(p.params),
            "sampling": dict(p.sampling),
            "about": p.about,
        }
        for name, p in registry.table("preset").items()
    ]


def drafters() -> list[dict[str, Any]]:
    """List drafters, and whether each needs a draft model."""
    return [
        {
            "name": name,
            "draft_model": source.needs_draft_model,
            "draws": list(source.draws) if source.shapes else [],
            "params": _part_params("drafter", name),
            "about": first_line(source),
        }
        for name, source in registry.table("drafter").items()
    ]


def shapes() -> list[dict[str, Any]]:
    """List shapes of drafts, and how each can draw siblings."""
    return [
        {
            "name": name,
            "draws": list(shape.takes),
            "params": _part_params("shape", name),
            "about": first_line(shape),
        }
        for name, shape in registry.table("shape").items()
    ]


def verifiers() -> list[dict[str, Any]]:
    """List verifiers with their guarantees, and whether each judges trees."""
    return [
        {
            "name": name,
            "guarantee": verifier().guarantee,
            "trees": verifier.judges_trees,
            "draws": list(verifier.draws),
            "params": _part_params("verifier", name),
            "about": first_line(verifier),
        }
        for name, verifier in registry.table("verifier").items()
    ]


def _part_params(kind: str, name: str) -> dict[str, Any]:
    """Parameters that a part declares, with their defaults."""
    declared = registry.params_of(kind, name)
    return {f.name: default_of(f) for f in dataclasses.fields(declared)} if declared else {}


def parts() -> list[dict[str, Any]]:
    """List the parts that samplers are made of, with the parameters that they declare."""
    table = []
    for kind in PARTS:
        for name, obj in registry.table(kind).items():
            table.append(
                {
                    "kind": kind,
                    "name": name,
                    "params": _part_params(kind, name),
                    "about": first_line(obj),
                }
            )
    return table


def scorers() -> list[dict[str, Any]]:
    """List scorers, the rewards of searches, with the modalities whose outputs they judge."""
    return [
        {
            "name": name,
            "modalities": list(cls.modalities) or ["all"],
            "params": {f.name: default_of(f) for f in dataclasses.fields(cls)},
            "about": cls.about or first_line(cls),
        }
        for name, cls in registry.table("scorer").items()
    ]


def _guarantee(name: str) -> str:
    """Guarantee with the default parameters."""
    return resolve_sampler(name, None)[0].guarantee


def _reference(name: str) -> str:
    """Reference of the guarantee with the default parameters."""
    return resolve_sampler(name, None)[0].reference


def _limit(limit: Any) -> str:
    """Describe where a method becomes a simpler one."""
    if limit is None:
        return ""
    values = ", ".join(f"{k}: {v}" for k, v in limit.params.items())
    return f"{limit.note.replace('`', '') or values} -> {limit.equals}"
