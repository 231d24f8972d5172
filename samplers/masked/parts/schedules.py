"""Schedules: the share of positions that is still masked after a share r of the steps.

A schedule takes r, float64 [b], and ``exponent``, and returns the share, float64 [b]. All fall from
1 to 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.params import Params, number
from gen.core.registry import register


@dataclass(frozen=True)
class PowerParams(Params):
    """``exponent``: above 1, few positions first."""

    exponent: float = number(2.0, least=1e-9)


@register("schedule", "cosine")
def cosine(r: Tensor, exponent: float) -> Tensor:
    """Falls as cos(pi r / 2): few positions first, many at the end. MaskGIT's."""
    return torch.cos(math.pi / 2 * r)


@register("schedule", "linear")
def linear(r: Tensor, exponent: float) -> Tensor:
    """Falls as 1 - r: as many positions in every step."""
    return 1 - r


@register("schedule", "pow", params=PowerParams)
def power(r: Tensor, exponent: float) -> Tensor:
    """Falls as 1 - r ** exponent."""
    return 1 - r**exponent


@register("schedule", "arccos")
def arccos(r: Tensor, exponent: float) -> Tensor:
    """Falls as arccos(r) / (pi / 2): Halton-MaskGIT's."""
    return torch.acos(r) / (math.pi / 2)
