"""Sampling parameters that were given as flags of a command."""

from __future__ import annotations

import argparse
from typing import Any

from gen.core.method import Preset
from gen.core.registry import registry
from gen.core.sampling_params import SAMPLING_FIELDS

DEFAULT_SAMPLER = "speculative_jacobi"
# logits processors are functions, which no command line can write
SAMPLING_FLAGS = tuple(name for name in SAMPLING_FIELDS if name != "logits_processor")


def requested_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Collect the sampling parameters that were given as flags."""
    return {k: getattr(args, k) for k in SAMPLING_FLAGS if getattr(args, k) is not None}


def preset_sampling(sampler: str) -> dict[str, Any]:
    """Look up the sampling parameters that a preset implies; none for a plain sampler."""
    preset: Preset | None = registry.table("preset").get(sampler)
    return dict(preset.sampling) if preset is not None else {}
