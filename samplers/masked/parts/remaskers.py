"""Remaskers: which places that a masked sampler has filled it empties again. Places that the canvas
gave are never among them.

c_i is the probability, under the law of this step, of the id that stands at place i or is proposed
for it; b_i what it was when the id was committed; K the schedule's count of places that are masked
after step s of S; r = (s + 1) / S.

    none            nothing. What is committed stays
    low_confidence  of all places but the given ones, the K with the lowest c are masked after the
                    step, so that committed ones among them are emptied, and as many more masked
                    ones are committed in their stead. With order ``confidence`` and no noise on it,
                    that is MaskGIT (arXiv 2202.04200) with the confidence of known places left as
                    it is, where MaskGIT takes it for infinite
    secondary       of the places committed before this step, those with c_i < t r or b_i - c_i > m
                    are emptied, t being ``remask_threshold`` and m ``remask_margin``; the lowest c
                    first, at least one fewer than the step commits. The schedule's count is left
                    behind by as many, and caught up with by the next step. Liang et al., "Discrete
                    Diffusion VLA" (arXiv 2508.20072), who compare a threshold that never falls and
                    a drop; the line t r, the bound and the defaults are ours

The law is the final one, so an id that a filter such as top-k no longer leaves has c_i = 0. What a
model says of a place that it sees is worth only as much as its training taught it about those; one
that was trained on masked places alone may say anything.

Guarantee: every step fills at least one place more than it empties, so that S steps are enough; the
last step empties nothing, which is the sampler's business. The law of the whole is not the model's,
also where that of ``none`` is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.registry import register
from gen.samplers.masked.step import MaskedStep, lowest


@register("remasker", "none")
def none(step: MaskedStep, count: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(step.masked), count


@register("remasker", "low_confidence")
def low_confidence(step: MaskedStep, count: Tensor) -> tuple[Tensor, Tensor]:
    """The schedule's count holds over all generated places, the least likely being the masked
    ones."""
    stay = step.eligible.sum(1) - count
    removed = step.remaskable & lowest(step.logp, step.eligible | step.remaskable, stay)
    return removed, torch.where(step.is_last_step, count, count + removed.sum(1))


@register("remasker", "secondary")
def secondary(step: MaskedStep, count: Tensor) -> tuple[Tensor, Tensor]:
    """What falls below a rising threshold, or by more than a margin, is made again."""
    c = step.logp.exp()
    doubtful = (c < step.params.remask_threshold * step.progress[:, None]) | (
        step.committed_logp.exp() - c > step.params.remask_margin
    )
    return lowest(step.logp, step.remaskable & doubtful, count - 1), count
