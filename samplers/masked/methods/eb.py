"""EB-Sampler: a bound on the entropy of the positions committed in one step.

    committed   the k positions of highest score, k the largest with sum H - max H <=
                ``entropy_bound`` over them, H_i the entropy of p_i: a bound on what they say about
                each other

Reference: Ben-Hamu et al., "Accelerated Sampling from Masked Diffusion Models via Entropy Bounded
Unmasking" (arXiv 2505.24857).
Guarantee: approximate.
Parameters: ``entropy_bound``, in nats (0: one position per forward pass, and all that are certain).
Preset: ``eb``, with blocks of 32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.method import SEQUENTIAL, Limit, method
from gen.core.registry import register
from gen.samplers.masked.parts.orders import entropy as certainty
from gen.samplers.masked.parts.selection import EntropyParams, fixed_blocks, greedy
from gen.samplers.masked.step import MaskedStep, ranked


@method(
    "eb",
    paper="2505.24857",
    title="Accelerated Sampling from Masked Diffusion Models via Entropy Bounded Unmasking",
    about="EB-Sampler: as many positions per step as a bound on their joint entropy allows",
    params=greedy(selector="entropy_bound", order="entropy", entropy_bound=0.001, **fixed_blocks()),
    limit=Limit(
        SEQUENTIAL,
        {"entropy_bound": 0},
        note="`entropy_bound: 0`; certain positions come together",
    ),
)
@register("selector", "entropy_bound", params=EntropyParams)
def entropy_bound(step: MaskedStep) -> Tensor:
    """Selects positions while a bound on their mutual information holds."""
    order = ranked(step.score, step.eligible).argsort(1)
    eligible = step.eligible.gather(1, order)
    nats = -certainty(step).gather(1, order).masked_fill(~eligible, 0)
    fits = eligible & (nats.cumsum(1) - nats.cummax(1).values <= step.params.entropy_bound)
    return torch.zeros_like(fits).scatter(1, order, fits.long().cumprod(1).bool())
