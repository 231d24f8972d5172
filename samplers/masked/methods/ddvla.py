"""Discrete Diffusion VLA: secondary remasking below a rising threshold.

    remasker ``secondary``   of the positions committed before this step, those with c_i < t r or
                             b_i - c_i > m are masked again, t being ``remask_threshold``, m
                             ``remask_margin`` and r the share of the steps that is over; the lowest
                             c first, at least one fewer than the step commits

c_i is the probability of the token at position i now, b_i what it was when it was committed. The
schedule's count is left behind by as many, and caught up with by the next step. The paper compares
a threshold that never falls and a drop; the line t r, the bound and the defaults are ours.

Reference: Liang et al., "Discrete Diffusion VLA: Bringing Discrete Diffusion to Action Decoding in
Vision-Language-Action Policies" (arXiv 2508.20072).
Guarantee: approximate.
Parameters: ``remask_threshold`` and ``remask_margin`` (0 and 1: ``maskgit``).
Preset: ``ddvla``. It draws tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gen.core.method import Limit, method
from gen.core.params import number
from gen.core.registry import register
from gen.samplers.masked.parts.selection import RemaskThresholdParams
from gen.samplers.masked.step import MaskedStep, lowest


@dataclass(frozen=True)
class SecondaryParams(RemaskThresholdParams):
    """``remask_margin``: drop of a token's probability from which it may be remasked."""

    remask_margin: float = number(0.3, most=1.0)


@method(
    "ddvla",
    paper="2508.20072",
    title="Discrete Diffusion VLA: Bringing Discrete Diffusion to Action Decoding in"
    " Vision-Language-Action Policies",
    about="Discrete Diffusion VLA: confidence order, secondary remasking",
    params={
        "order": "confidence",
        "schedule": "cosine",
        "remasker": "secondary",
    },
    limit=Limit("maskgit", {"remask_threshold": 0, "remask_margin": 1}),
)
@register("remasker", "secondary", params=SecondaryParams)
def secondary(step: MaskedStep, count: Tensor) -> tuple[Tensor, Tensor]:
    """Masks tokens whose probability falls below a rising threshold, or by more than a margin."""
    p = step.logp.exp()
    doubtful = (p < step.params.remask_threshold * step.progress[:, None]) | (
        step.committed_logp.exp() - p > step.params.remask_margin
    )
    return lowest(step.logp, step.remaskable & doubtful, count - 1), count
