"""Running confidence remasking (RCR): everything is filled in, the least likely is masked again.

    remasker ``rcr``   of the committed positions with b and the masked ones with c, the lowest are
                       masked after the step, as many as the selector leaves masked, so that as many
                       more are committed as are masked again

b_i is the probability of the token at position i when it was committed, c_i that of the token which
is proposed now. Only positions of the block at work are masked again. The authors keep the running
confidence of the whole row, so that with blocks they mask positions of earlier blocks as well;
without blocks, as in the preset, the two are one rule.

Reference: "MDPO: Overcoming the Training-Inference Divide of Masked Diffusion Language Models"
(arXiv 2508.13148).
Guarantee: approximate.
Preset: ``rcr``, with the schedule ``linear`` and without blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.method import method
from gen.core.registry import register
from gen.samplers.masked.parts.selection import greedy, recommit
from gen.samplers.masked.step import MaskedStep, lowest


@method(
    "rcr",
    paper="2508.13148",
    title="MDPO: Overcoming the Training-Inference Divide of Masked Diffusion Language Models",
    about="running confidence: commits all positions, then remasks the least likely of them",
    params=greedy(selector="schedule", schedule="linear", remasker="rcr", steps=64),
)
@register("remasker", "rcr")
def rcr(step: MaskedStep, count: Tensor) -> tuple[Tensor, Tensor]:
    """Lets the schedule's count hold over all generated positions, by their probability when they
    were committed."""
    confidence = torch.where(step.masked, step.logp, step.committed_logp)
    stay = step.eligible.sum(1) - count
    removed = step.remaskable & lowest(confidence, step.eligible | step.remaskable, stay)
    return recommit(step, removed, count)
