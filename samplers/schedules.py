"""Schedules: the share of places still masked after a share r of the steps. All fall from 1 to 0."""

from __future__ import annotations

import math

from gen.registry import register


@register("schedule", "cosine")
def cosine(r: float, exponent: float) -> float:
    """cos(pi r / 2): few places first, many at the end. MaskGIT's."""
    return math.cos(math.pi / 2 * r)


@register("schedule", "linear")
def linear(r: float, exponent: float) -> float:
    """1 - r: as many places in every step. With as many steps as places, one at a time."""
    return 1 - r


@register("schedule", "pow")
def power(r: float, exponent: float) -> float:
    """1 - r ** exponent."""
    return 1 - r**exponent


@register("schedule", "arccos")
def arccos(r: float, exponent: float) -> float:
    """arccos(r) / (pi / 2): Halton-MaskGIT's."""
    return math.acos(min(1.0, r)) / (math.pi / 2)
