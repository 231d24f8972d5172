"""LocalLeap: a lower threshold around confident positions.

    committed   anchors, c_i >= ``conf_threshold``, and positions with c_i >= ``low_threshold``
                within ``radius`` positions of an anchor

Anchors are positions of this step, not what earlier ones committed.

Reference: "Accelerating Diffusion LLM Inference via Local Determinism Propagation" (arXiv
2510.07081).
Guarantee: approximate.
Parameters: ``conf_threshold`` (above 1: one position per forward pass), ``low_threshold``,
``radius``.
Preset: ``localleap``, with blocks of 32.
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
    confident,
    fixed_blocks,
    greedy,
)
from gen.samplers.masked.step import MaskedStep


@dataclass(frozen=True)
class LocalParams(TwoThresholdParams):
    """``radius``: positions on either side of an anchor."""

    radius: int = integer(4)


@method(
    "localleap",
    paper="2510.07081",
    title="Accelerating Diffusion LLM Inference via Local Determinism Propagation",
    about="LocalLeap: a lower threshold around confident positions",
    params=greedy(
        selector="local", conf_threshold=0.9, low_threshold=0.75, radius=4, **fixed_blocks()
    ),
    limit=Limit(SEQUENTIAL, {"conf_threshold": 1.1}),
)
@register("selector", "local", params=LocalParams)
def local(step: MaskedStep) -> Tensor:
    """Selects confident anchors, and less confident positions around them."""
    anchor, radius = confident(step), step.params.radius
    spread = torch.nn.functional.max_pool1d(anchor.double()[:, None], 2 * radius + 1, 1, radius)
    near = spread[:, 0] > 0
    return anchor | (step.eligible & near & (step.confidence >= step.params.low_threshold))
