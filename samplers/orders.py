"""Orders: which masked places are committed first. An order gives a score per place; the highest go first.

``confidence`` looks at what was proposed; ``random``, ``halton`` and ``raster`` do not, so that with one place per step
they sample exactly from the model's law in that order.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from gen.registry import register


@register("order", "confidence")
def confidence(draws, rows, positions, round, chosen_logp, temperature, grid) -> Tensor:
    """log p(x) + temperature * Gumbel noise. float [b, T]"""
    if not bool((temperature > 0).any()):
        return chosen_logp
    noise = -torch.log(-torch.log(draws.uniform(rows, positions, "confidence", round)))
    return chosen_logp + temperature[:, None] * noise


@register("order", "random")
def random(draws, rows, positions, round, chosen_logp, temperature, grid) -> Tensor:
    """One random permutation per row."""
    return draws.uniform(rows, positions, "order", None)


@register("order", "halton")
def halton(draws, rows, positions, round, chosen_logp, temperature, grid) -> Tensor:
    """A low-discrepancy sequence over the grid: what is committed together lies far apart (arXiv 2503.17076)."""
    order = torch.tensor(halton_cells(tuple(grid)), device=positions.device)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    return -rank[positions].double()


@register("order", "raster")
def raster(draws, rows, positions, round, chosen_logp, temperature, grid) -> Tensor:
    """First to last."""
    return -positions.double()


@cache
def halton_cells(grid: tuple[int, ...]) -> tuple[int, ...]:
    """Every cell of the grid once, in the order in which the Halton sequence (bases 2, 3, 5, ...) first visits it."""
    bases, total = (2, 3, 5, 7)[: len(grid)], 1
    for size in grid:
        total *= size
    seen: dict[int, None] = {}
    i = 0
    while len(seen) < total:
        i += 1
        cell = 0
        for base, size in zip(bases, grid, strict=True):
            cell = cell * size + int(_radical_inverse(i, base) * size)
        seen.setdefault(cell)
    return tuple(seen)


def _radical_inverse(i: int, base: int) -> float:
    """The digits of i in that base, mirrored at the point: in [0, 1)."""
    x, scale = 0.0, 1.0
    while i:
        i, digit = divmod(i, base)
        scale /= base
        x += digit * scale
    return x
