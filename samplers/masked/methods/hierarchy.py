"""Hierarchical decoding of dInfer: gaps between known positions are halved everywhere at once.

    selector ``runs``              c_i >= ``conf_threshold``, and in each run of adjacent masked
                                   positions the one of highest c, if its c >= ``low_threshold``
    remasker ``below_threshold``   committed positions of the block with c_i < ``remask_threshold``,
                                   lowest first, at most one fewer than are masked. Where they are
                                   as many as the step commits or more, one more than they are is
                                   committed

The preset uses the selector alone. ``below_threshold`` is after dInfer's remasking and not the same
rule: c_i is the probability of the token that stands at a committed position, where dInfer reads
that of the likeliest token there, and may give such a position a new token in the same step.

Reference: "dInfer: An Efficient Inference Framework for Diffusion Language Models" (arXiv
2510.08666).
Guarantee: approximate.
Parameters: ``conf_threshold`` and ``low_threshold`` (both above 1: one position per forward pass),
``remask_threshold`` (0: nothing is masked again).
Preset: ``hierarchy``, with blocks of 32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.method import SEQUENTIAL, Limit, method
from gen.core.registry import register
from gen.samplers.masked.parts.selection import (
    RemaskThresholdParams,
    TwoThresholdParams,
    best_of_each,
    confident,
    fixed_blocks,
    greedy,
    runs_of,
)
from gen.samplers.masked.step import MaskedStep, lowest


@method(
    "hierarchy",
    paper="2510.08666",
    title="dInfer: An Efficient Inference Framework for Diffusion Language Models",
    about="dInfer's hierarchical decoder: the most confident position of every masked gap, and all"
    " positions above a threshold",
    params=greedy(selector="runs", conf_threshold=0.9, low_threshold=0.4, **fixed_blocks()),
    limit=Limit(SEQUENTIAL, {"conf_threshold": 1.1, "low_threshold": 1.1}),
)
@register("selector", "runs", params=TwoThresholdParams)
def runs(step: MaskedStep) -> Tensor:
    """Selects one position of every gap between known ones, and all confident positions."""
    best = best_of_each(step.confidence, step.eligible, runs_of(step.eligible))
    return confident(step) | (best & (step.confidence >= step.params.low_threshold))


@register("remasker", "below_threshold", params=RemaskThresholdParams)
def below_threshold(step: MaskedStep, count: Tensor) -> tuple[Tensor, Tensor]:
    """Masks every token whose probability falls below a threshold."""
    doubtful = step.remaskable & (step.logp.exp() < step.params.remask_threshold)
    removed = lowest(step.logp, doubtful & ~step.is_last_step[:, None], step.eligible.sum(1) - 1)
    return removed, torch.maximum(count, removed.sum(1) + 1)
