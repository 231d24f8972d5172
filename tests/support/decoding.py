"""Decoding with a drafter alone, without the sampler that makes one. Not a test."""

from __future__ import annotations

from typing import Any

from gen.core.rng import RNG
from gen.core.stats import SampleOutput
from gen.models.targets.causal import CausalTarget
from gen.samplers.engine.causal_loop import CausalRun, Drafter


def decode_causal(target: CausalTarget, rng: RNG, drafter: Drafter, **more: Any) -> SampleOutput:
    """Decode every item of a target; ``more``: trace and callback of the run."""
    run = CausalRun(target, rng, drafter, **more)
    while not run.is_over:
        run.step()
    return run.output()
