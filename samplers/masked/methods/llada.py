"""LLaDA: as many positions in every step, highest score first.

    committed   floor(m / S) + [s < m mod S] positions in step s of S, of the m positions that were
                masked when the block began

Reference: Nie et al., "Large Language Diffusion Models" (arXiv 2502.09992).
Guarantee: approximate.
Parameters: ``steps`` (as many as positions: one position per forward pass).
Preset: ``llada``, with blocks of 32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.method import SEQUENTIAL, Limit, method
from gen.core.registry import register
from gen.samplers.masked.parts.selection import fixed_blocks, greedy
from gen.samplers.masked.step import COUNTED, MaskedStep, highest, needs


@method(
    "llada",
    paper="2502.09992",
    title="Large Language Diffusion Models",
    about="LLaDA: the same number of positions in every step, the most confident first",
    params=greedy(selector="even", steps=128, **fixed_blocks()),
    limit=Limit(SEQUENTIAL, note="as many `steps` as positions"),
)
@register("selector", "even")
@needs(COUNTED)
def even(step: MaskedStep) -> Tensor:
    """Selects the same number of positions in every step; the first steps take the remainder."""
    steps = ((step.steps_in_block + 1) / step.progress).round().long()
    extra = step.steps_in_block < step.num_masked_at_start % steps
    count = step.num_masked_at_start // steps + extra
    count = torch.where(step.is_last_step, step.eligible.sum(1), count)
    return highest(step.score, step.eligible, count)
