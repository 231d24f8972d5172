"""Rows whose prompts have different lengths, which end after different passes. Not a test."""

from __future__ import annotations

from typing import Any

import torch

from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.stats import SampleOutput
from gen.core.token_space import TokenSpace
from gen.models.targets.causal import CausalTarget

V, T = 24, 16


def decode_ragged(
    adapter: Any, spec: Any, rows: int = 5, seed: int = 0, space: TokenSpace | None = None
) -> SampleOutput:
    """Decode up to five rows with guidance from an adapter of ``V`` tokens."""
    sampler, sampling = resolve_sampler(spec, {"guidance_scale": 2.0})
    prompt = (torch.arange(rows * 4).view(rows, 4) + seed) % V
    target = CausalTarget(
        adapter,
        prompt,
        space or TokenSpace.codes((T,), 16, V),
        sampling,
        prompt.flip(1),
        torch.tensor([2, 4, 3, 4, 4])[:rows],
        torch.tensor([4, 4, 2, 4, 3])[:rows],
    )
    return sampler(target, CounterRNG(range(rows)))
