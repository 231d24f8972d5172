"""Selectors: which positions are committed now, bool [b, T].

c_i is the probability of the token that is proposed for position i, under the distribution that
``confidence_on`` names. Among the masked positions of the block at work:

    schedule   as many as the schedule says, highest score first
    threshold  c_i >= ``conf_threshold``. Fast-dLLM (arXiv 2505.22618)

Selectors of one paper are in ``gen.samplers.masked.methods``. Where a selector takes nothing, the
loop commits the position of highest score; so a threshold above 1 means one position per forward
pass, and a threshold of 0 one forward pass per block.

Guarantee: approximate, but for one position per forward pass (``masked_iterative``).
"""

from __future__ import annotations

from torch import Tensor

from gen.core.registry import register
from gen.samplers.masked.parts.selection import ThresholdParams, confident
from gen.samplers.masked.step import COUNTED, MaskedStep, highest, needs


@register("selector", "schedule")
@needs(COUNTED)
def schedule(step: MaskedStep) -> Tensor:
    """Selects as many positions as the schedule sets, highest score first."""
    return highest(step.score, step.eligible, step.quota)


@register("selector", "threshold", params=ThresholdParams)
def threshold(step: MaskedStep) -> Tensor:
    """Selects all confident positions."""
    return confident(step)
