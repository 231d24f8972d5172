"""Orders: which masked places are committed first. An order gives a score per place; the highest go first.

``confidence`` looks at what was proposed; ``random``, ``halton`` and ``raster`` do not, so that with one place per step
they sample exactly from the model's law in that order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.layout_orders import halton_cells
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


@register("order", "streams")
def streams(draws, rows, positions, round, chosen_logp, temperature, grid) -> Tensor:
    """Along the last axis: all of its first slice, then all of its second, and so on; confidence inside a slice. For codes of
    several streams that is coarse to fine (SoundStorm, arXiv 2305.09636; MAGNeT, arXiv 2401.04577)."""
    score = confidence(draws, rows, positions, round, chosen_logp, temperature, grid)
    # into (0, 1), in the same order, so that a slice before always comes first
    return torch.sigmoid(score / 8) - positions % grid[-1]


@register("order", "raster")
def raster(draws, rows, positions, round, chosen_logp, temperature, grid) -> Tensor:
    """First to last."""
    return -positions.double()
