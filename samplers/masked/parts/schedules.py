"""Schedules: the share of places still masked after a share r of the steps, float64 [b] of r [b].
All fall from 1 to 0."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gen.core.registry import register


@register("schedule", "cosine")
def cosine(r: Tensor, exponent: float) -> Tensor:
    """cos(pi r / 2): few places first, many at the end. MaskGIT's."""
    return torch.cos(math.pi / 2 * r)


@register("schedule", "linear")
def linear(r: Tensor, exponent: float) -> Tensor:
    """1 - r: as many places in every step. With as many steps as places, one at a time."""
    return 1 - r


@register("schedule", "pow")
def power(r: Tensor, exponent: float) -> Tensor:
    """1 - r ** exponent."""
    return 1 - r**exponent


@register("schedule", "arccos")
def arccos(r: Tensor, exponent: float) -> Tensor:
    """arccos(r) / (pi / 2): Halton-MaskGIT's."""
    return torch.acos(r) / (math.pi / 2)
