"""Schedules: the share of positions that is still masked after a share r of the steps.

A schedule takes r, float64 [b], and ``exponent``, and returns the share, float64 [b]. All fall from
1 to 0. The loop rounds the number of masked positions down, unless the schedule declares
``ROUNDED_UP``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.params import Params, number
from gen.core.registry import register
from gen.samplers.masked.step import ROUNDED_UP, needs


@dataclass(frozen=True)
class PowerParams(Params):
    """``exponent``: power of the schedule; above 1, few positions come first."""

    exponent: float = number(2.0, least=1e-9)


@register("schedule", "cosine")
def cosine(r: Tensor, exponent: float) -> Tensor:
    """Falls as cos(pi r / 2): few positions first, many at the end. MaskGIT's."""
    return torch.cos(math.pi / 2 * r)


@register("schedule", "linear")
def linear(r: Tensor, exponent: float) -> Tensor:
    """Falls as 1 - r: the same number of positions in every step."""
    return 1 - r


@register("schedule", "pow", params=PowerParams)
def power(r: Tensor, exponent: float) -> Tensor:
    """Falls as 1 - r ** exponent."""
    return 1 - r**exponent


@register("schedule", "arccos")
@needs(ROUNDED_UP)
def arccos(r: Tensor, exponent: float) -> Tensor:
    """Falls as arccos(r) / (pi / 2): Halton-MaskGIT's, which rounds down how many are known."""
    # in single precision, as published: a third of the positions may come out one short
    known = 1 - torch.acos(r.float()) / (math.pi / 2)
    return 1 - known.double()
