"""Coherent contextual decoding (CCD): positions that are ranked high early, and still are.

    committed   positions that were among the ``buffer_size`` of highest score in each of the last
                ``history`` steps, this one included, with the same token proposed each time

A block's first step begins anew. The number of steps is left open (CCD-DS in the paper); that the
authors' buffer grows late in decoding is left out.

Reference: "Beyond Confidence: Adaptive and Coherent Decoding for Diffusion Language Models" (arXiv
2512.02044).
Guarantee: approximate.
Parameters: ``buffer_size`` (1: one position per forward pass), ``history``.
Preset: ``ccd``, without blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.method import SEQUENTIAL, Limit, method
from gen.core.params import integer
from gen.core.registry import register
from gen.samplers.masked.parts.selection import HistoryParams, greedy, steps_unchanged
from gen.samplers.masked.step import MaskedStep, highest


@dataclass(frozen=True)
class CoherentParams(HistoryParams):
    """``buffer_size``: positions that are compared from step to step."""

    buffer_size: int = integer(4, least=1)


@method(
    "ccd",
    paper="2512.02044",
    title="Beyond Confidence: Adaptive and Coherent Decoding for Diffusion Language Models",
    about="CCD: positions that keep a top score and their token for several steps; no blocks",
    params=greedy(selector="coherent", order="entropy", history=2, buffer_size=4),
    limit=Limit(SEQUENTIAL, {"buffer_size": 1}),
)
@register("selector", "coherent", params=CoherentParams)
def coherent(step: MaskedStep) -> Tensor:
    """Selects positions that stay among the best with the same token."""
    size = torch.full_like(step.rows, step.params.buffer_size)
    top = highest(step.score, step.eligible, size)
    return top & (steps_unchanged(step, "coherent", top) >= step.params.history)
