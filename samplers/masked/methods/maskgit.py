"""MaskGIT: confidence order with noise, cosine schedule.

It is the order ``confidence``, log p(x_i) + t (1 - r) Gumbel with t = ``choice_temperature``, and
the schedule ``cosine`` (``gen.samplers.masked.parts``).

    remasker ``low_confidence``   of all generated positions, the K with the lowest c are masked
                                  after the step, K being the schedule's count, so that committed
                                  ones among them are masked again, and as many more masked ones are
                                  committed in their stead

c_i is the probability now of the token at position i, or proposed for it. With order ``confidence``
and no noise on it, ``low_confidence`` is MaskGIT with the confidence of known positions left as it
is, where MaskGIT takes it for infinite.

Reference: Chang et al., "MaskGIT: Masked Generative Image Transformer" (arXiv 2202.04200).
Guarantee: approximate.
Parameters: ``steps``, ``choice_temperature``.
Presets: ``maskgit`` and ``maskgit_remask``. They draw tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.method import SEQUENTIAL, Limit, method
from gen.core.registry import register
from gen.samplers.masked.step import MaskedStep, lowest

MASKGIT = {"order": "confidence", "schedule": "cosine"}

method(
    "maskgit",
    paper="2202.04200",
    title="MaskGIT: Masked Generative Image Transformer",
    about="MaskGIT: confidence order, cosine schedule",
    params=MASKGIT,
    limit=Limit(
        SEQUENTIAL, {"schedule": "linear"}, note="`schedule: linear`, as many `steps` as positions"
    ),
)


@method(
    "maskgit_remask",
    about="MaskGIT that remasks tokens that have become unlikely",
    params=MASKGIT | {"remasker": "low_confidence"},
)
@register("remasker", "low_confidence")
def low_confidence(step: MaskedStep, count: Tensor) -> tuple[Tensor, Tensor]:
    """Lets the schedule's count hold over all generated positions, the least likely being the
    masked ones."""
    stay = step.eligible.sum(1) - count
    removed = step.remaskable & lowest(step.logp, step.eligible | step.remaskable, stay)
    return removed, torch.where(step.is_last_step, count, count + removed.sum(1))
