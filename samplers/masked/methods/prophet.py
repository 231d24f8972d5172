"""Prophet: all at once when the leading tokens are far ahead.

    stop ``prophet``   the gap between the logits of the two likeliest tokens, as a mean over the
                       masked positions of the block, reaches g in the first third of the steps,
                       2 g / 3 in the second or g / 3 in the last one: all masked positions become
                       what this step proposes for them

g is ``gap_threshold``; 7.5 gives the authors' 7.5, 5 and 2.5. Gaps are those of the raw
distribution, which no temperature or filter has touched, and steps are forward passes out of
``steps``. The authors look at the answer alone: so many tokens after the words that announce it.
Here ``answer_length`` positions from ``answer_start`` on are that region, masked or not; without
(0), it is what is still masked. A position where only one token is allowed has no gap and does not
count; where no position counts, nothing stops.

Reference: Li et al., "Diffusion Language Models Know the Answer Before Decoding" (arXiv
2508.19982).
Guarantee: approximate.
Parameters: ``gap_threshold`` (one that nothing reaches: ``llada`` without blocks),
``answer_start``, ``answer_length``.
Preset: ``prophet``, without blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.method import Limit, method
from gen.core.params import Params, integer, number
from gen.core.registry import register
from gen.samplers.masked.parts.selection import greedy
from gen.samplers.masked.step import MaskedStep


@dataclass(frozen=True)
class ProphetParams(Params):
    """``gap_threshold``: in logits. ``answer_start``, ``answer_length``: region that is looked at,
    in positions."""

    gap_threshold: float = number(7.5)
    answer_start: int = integer(0)
    answer_length: int = integer(0)


@method(
    "prophet",
    paper="2508.19982",
    title="Diffusion Language Models Know the Answer Before Decoding",
    about="Prophet: the most confident positions step by step, and all once the gap between the two"
    " best tokens is large",
    params=greedy(selector="even", stop="prophet", gap_threshold=7.5, steps=128),
    limit=Limit(
        "llada",
        {"gap_threshold": 1e9},
        {"blocks": "whole"},
        "a `gap_threshold` that nothing reaches",
    ),
)
@register("stop", "prophet", params=ProphetParams)
def prophet(step: MaskedStep, canvas: Tensor) -> tuple[Tensor, Tensor]:
    """Stops when the leading tokens will not be overtaken."""
    params = step.params
    region = step.space.is_masked(canvas) & step.open
    if params.answer_length:
        region = (step.positions >= params.answer_start) & (
            step.positions < params.answer_start + params.answer_length
        )
    first, second = step.raw_logprobs().double().topk(2, -1).values.unbind(-1)
    counts = region & second.isfinite()
    gap = torch.where(counts, first - second, 0).sum(1) / counts.sum(1)
    third = (3 * step.step_index // params.steps).clamp_max(2)
    is_over = counts.any(1) & (gap >= params.gap_threshold * (3 - third) / 3)
    return is_over, step.proposed_tokens
