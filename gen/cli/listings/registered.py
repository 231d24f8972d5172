"""Modalities, tokenizers, constraints, layouts and families of checkpoints."""

from __future__ import annotations

import dataclasses
from typing import Any

from gen.contracts.checkpoint import options_of
from gen.core.docstrings import default_of, first_line
from gen.core.registry import registry


def modalities() -> list[dict[str, Any]]:
    """List modalities."""
    return [
        {
            "name": name,
            "files": list(dict.fromkeys((cls.extension, *cls.formats))),
            "default_sampling": dict(cls.default_sampling),
            "about": first_line(cls),
        }
        for name, cls in registry.table("modality").items()
    ]


def tokenizers() -> list[dict[str, Any]]:
    """List tokenizers."""
    return _plain("tokenizer")


def layouts() -> list[dict[str, Any]]:
    """List layouts."""
    return _plain("layout")


def constraints() -> list[dict[str, Any]]:
    """List kinds of constraints, the keys of ``structured``; ``params``: keys beside them."""
    return [
        {
            "name": name,
            "params": {f.name: default_of(f) for f in dataclasses.fields(cls)[1:]},
            "about": first_line(cls),
        }
        for name, cls in registry.table("constraint").items()
    ]


def families() -> list[dict[str, Any]]:
    """List the families that published checkpoints are recognised as. ``tested``: the checkpoint
    that a family's loader was tested on."""
    return [
        {
            "name": name,
            "modalities": list(cls.modalities),
            "protocols": list(cls.protocols),
            "kind": cls.kind,
            "options": {
                k: default
                for modality in reversed(cls.modalities)
                for k, default in options_of(cls.serving(modality)).items()
            },
            "tested": cls.tested,
            "about": first_line(cls),
        }
        for name, cls in registry.table("checkpoint").items()
    ]


def metrics() -> list[dict[str, Any]]:
    """List the metrics of ``gen eval``; ``needs`` says that one compares with a reference."""
    return [
        {
            "name": name,
            "media": list(cls.media) or ["all"],
            "needs": "reference" if cls.reference else "",
            "params": {f.name: default_of(f) for f in dataclasses.fields(cls)},
            "about": first_line(cls),
        }
        for name, cls in registry.table("metric").items()
    ]


def _plain(kind: str) -> list[dict[str, Any]]:
    return [{"name": name, "about": first_line(obj)} for name, obj in registry.table(kind).items()]
