"""Prophet: all at once when the leading tokens are far ahead.

    stop ``prophet``   the gap between the logits of the two likeliest tokens, as a mean over a
                       region, reaches g while r < 0.33, 2 g / 3 while r < 0.67, or g / 3 after
                       that: all masked positions of the canvas become what this step proposes for
                       them

r is the number of forward passes, this one included, out of ``steps``. g is ``gap_threshold``; 7.5
gives the authors' 7.5, 5 and 2.5. Gaps are those of the raw distribution, which no temperature or
filter has touched. The authors look at the answer alone: five tokens after the words that announce
it, masked or not; without those words they never stop. Here the region is ``answer_length``
positions from ``answer_start`` on; without (0), it is what is still masked in the canvas. A
position where only one token is allowed has no gap and does not count; where no position counts,
nothing stops.

Reference: Li et al., "Diffusion Language Models Know the Answer Before Decoding" (arXiv
2508.19982).
Guarantee: approximate.
Parameters: ``gap_threshold`` (one that nothing reaches: ``llada``),
``answer_start``, ``answer_length``.
Preset: ``prophet``, with blocks of 32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.method import Limit, method
from gen.core.params import Params, integer, number
from gen.core.registry import register
from gen.samplers.masked.parts.selection import fixed_blocks, greedy
from gen.samplers.masked.step import MaskedStep

PHASES = 0.33, 0.67  # shares of the steps from which less of a gap is enough


@dataclass(frozen=True)
class ProphetParams(Params):
    """``gap_threshold``: in logits. ``answer_start``, ``answer_length``: region of the answer,
    in positions."""

    gap_threshold: float = number(7.5)
    answer_start: int = integer(0)
    answer_length: int = integer(0)


@method(
    "prophet",
    paper="2508.19982",
    title="Diffusion Language Models Know the Answer Before Decoding",
    about="Prophet: the most confident positions in every step; all remaining ones once the gap"
    " between the two best tokens is large",
    params=greedy(selector="even", stop="prophet", gap_threshold=7.5, steps=128, **fixed_blocks()),
    limit=Limit("llada", {"gap_threshold": 1e9}, note="a `gap_threshold` that nothing reaches"),
)
@register("stop", "prophet", params=ProphetParams)
def prophet(step: MaskedStep, canvas: Tensor) -> tuple[Tensor, Tensor]:
    """Stops when the mean gap between the two best tokens is large."""
    params = step.params
    region = step.space.is_masked(canvas)
    if params.answer_length:
        region = (step.positions >= params.answer_start) & (
            step.positions < params.answer_start + params.answer_length
        )
    first, second = step.raw_logprobs().double().topk(2, -1).values.unbind(-1)
    counts = region & second.isfinite()
    gap = torch.where(counts, first - second, 0).sum(1) / counts.sum(1)
    share = (step.step_index + 1) / params.steps
    phase = (share >= PHASES[0]).long() + (share >= PHASES[1])
    is_over = counts.any(1) & (gap >= params.gap_threshold * (3 - phase) / 3)
    return is_over, step.proposed_tokens
