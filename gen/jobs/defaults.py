"""Defaults of a request: the sampler, and the sampling parameters of the user over those of the
preset over those of the modality."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from gen.contracts.checkpoint import family_of, published
from gen.contracts.modality import kind_of, suggested_sampling
from gen.core.registry import registry
from gen.core.sampler import Preset, resolve_sampler
from gen.models.load.locate import model_kind

DEFAULT_SAMPLER = "speculative_jacobi"
SAMPLING_FLAGS = ("guidance_scale", "temperature", "top_k", "top_p", "min_p")


def requested_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Collect the sampling parameters that were given as flags."""
    return {k: getattr(args, k) for k in SAMPLING_FLAGS if getattr(args, k) is not None}


def preset_sampling(sampler: str) -> dict[str, Any]:
    """Look up the sampling parameters that a preset implies; none for a plain sampler."""
    preset: Preset | None = registry.table("preset").get(sampler)
    return dict(preset.sampling) if preset is not None else {}


def default_sampling(
    modality_name: str, model: str | None, sampler: str, requested: Mapping[str, Any]
) -> dict[str, Any]:
    """Merge the sampling parameters of a request with their defaults.

    Args:
        modality_name: a registered modality.
        model: zoo name, folder or hub id; None for the modality's own model.
        sampler: a sampler or preset.
        requested: parameters that the user named; they win.

    Returns:
        The parameters of the modality or the model's family, under those of the preset, under
        ``requested``.
    """
    modality = registry.get("modality", modality_name, "the command line")
    implied = preset_sampling(sampler)
    files = published(model) if model else None
    if files is not None:
        return {**family_of(files, modality_name).sampling, **implied, **requested}
    kind = model_kind(model) if model else kind_of(resolve_sampler(sampler)[0], modality)
    return {**suggested_sampling(modality, kind), **implied, **requested}
