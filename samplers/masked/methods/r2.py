"""R2-dLLM: positions that their neighbours or their past already decide.

In this order, each rule looking at what the ones before it leave masked; l is ``low_threshold``:

    confident   c_i >= ``conf_threshold``, or else the position of highest score
    windows     all masked positions of any three in a row that the block has, at most one of them
                known, whose mean c is at least l
    runs        the position of highest c of any run of two or more that want the same token, if
                its c >= l
    history     positions for which the same token was proposed in each of the last ``history``
                steps of the block, if c_i >= l

Reference: R2-dLLM (arXiv 2604.18995).
Guarantee: approximate.
Parameters: ``conf_threshold`` and ``low_threshold`` (both above 1: one position per forward pass),
``history``.
Preset: ``r2``, with blocks of 32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.method import SEQUENTIAL, Limit, method
from gen.core.params import integer
from gen.core.registry import register
from gen.samplers.masked.parts.selection import (
    TwoThresholdParams,
    best_of_each,
    confident_or_best,
    fixed_blocks,
    greedy,
    runs_of,
    steps_unchanged,
)
from gen.samplers.masked.step import MaskedStep

WINDOW, KNOWN = 3, 1  # positions in a row, and how many of them may be known


@dataclass(frozen=True)
class RegionsParams(TwoThresholdParams):
    """``history``: number of steps for which the proposed token must stay the same."""

    history: int = integer(2, least=1)


@method(
    "r2",
    paper="2604.18995",
    title="R2-dLLM",
    about="R2-dLLM: positions that their neighbours or earlier steps already determine",
    params=greedy(
        selector="regions", conf_threshold=0.9, low_threshold=0.8, history=3, **fixed_blocks()
    ),
    limit=Limit(SEQUENTIAL, {"conf_threshold": 1.1, "low_threshold": 1.1}),
)
@register("selector", "regions", params=RegionsParams)
def regions(step: MaskedStep) -> Tensor:
    """Selects positions by the four rules of R2-dLLM."""
    confidence, low = step.confidence, step.params.low_threshold
    chosen = confident_or_best(step)
    chosen = chosen | _windows(step, step.eligible & ~chosen)
    rest = step.eligible & ~chosen
    run = runs_of(rest, step.proposed_tokens)
    length = run.new_zeros(len(run), run.shape[1] + 1).scatter_add(1, run, rest.long())
    long_run = rest & (length.gather(1, run) >= 2)
    chosen = chosen | (best_of_each(confidence, long_run, run) & (confidence >= low))
    steady = steps_unchanged(step, "regions", step.eligible) >= step.params.history
    return chosen | (step.eligible & steady & (confidence >= low))


def _windows(step: MaskedStep, masked: Tensor) -> Tensor:
    """Finds positions of ``masked`` (bool [b, T]) in windows that are mostly masked and confident
    on average: bool [b, T]."""
    if masked.shape[1] < WINDOW:
        return torch.zeros_like(masked)
    known = step.open & ~masked & (~step.masked | step.eligible)

    def slide(x: Tensor) -> Tensor:
        return x.double().unfold(1, WINDOW, 1)

    gaps = slide(masked).sum(-1)
    mean = slide(step.confidence.masked_fill(~masked, 0)).sum(-1) / gaps.clamp_min(1)
    fits = (
        (slide(masked | known).sum(-1) == WINDOW)
        & (gaps >= WINDOW - KNOWN)
        & (mean >= step.params.low_threshold)
    )
    covered = torch.zeros_like(masked)
    for offset in range(WINDOW):
        covered[:, offset : offset + fits.shape[1]] |= fits
    return covered & masked
