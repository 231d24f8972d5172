"""Proposers: which token each masked position would get, ids [b, T]."""

from __future__ import annotations

from torch import Tensor

from gen.core.registry import register
from gen.samplers.masked.step import LIKELIEST, MaskedStep, needs


@register("proposer", "categorical")
def categorical(step: MaskedStep) -> Tensor:
    """Draws a token from the distribution of every masked position, with random numbers of the
    position and the step: [b, T]."""
    return step.rng.categorical(
        step.logprobs, step.rows, step.positions, "propose", step.step_index, step.masked
    )


@register("proposer", "argmax")
@needs(LIKELIEST)
def argmax(step: MaskedStep) -> Tensor:
    """Takes the likeliest token."""
    return step.logprobs.argmax(-1)
