"""Sampling parameters that were given as flags of a command."""

from __future__ import annotations

import argparse
from typing import Any

from gen.core.registry import registry
from gen.core.sampler import Preset

DEFAULT_SAMPLER = "speculative_jacobi"
SAMPLING_FLAGS = ("guidance_scale", "temperature", "top_k", "top_p", "min_p")


def requested_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Collect the sampling parameters that were given as flags."""
    return {k: getattr(args, k) for k in SAMPLING_FLAGS if getattr(args, k) is not None}


def preset_sampling(sampler: str) -> dict[str, Any]:
    """Look up the sampling parameters that a preset implies; none for a plain sampler."""
    preset: Preset | None = registry.table("preset").get(sampler)
    return dict(preset.sampling) if preset is not None else {}
