"""Orders: which masked positions are committed first. An order gives a score per position, float64
[b, T]; the highest go first.

    confidence   log p(x_i) of the proposed token, plus t (1 - r) Gumbel noise with t =
                 ``choice_temperature``. MaskGIT (arXiv 2202.04200)
    top          log of the highest probability at i
    margin       p(1st) - p(2nd). Dream (arXiv 2508.15487)
    entropy      sum p log p. Dream
    density      p(x_i), weighted by how many positions around i are known: a Gaussian mean over
                 ``density_width`` positions. Certainty density of d2Cache (arXiv 2509.23094), where
                 it ranks what to compute
    random, halton, halton_rolled, raster, streams

``top``, ``margin`` and ``entropy`` look at the distribution of a position, not at what was drawn
from it; ``random``, ``halton``, ``halton_rolled`` and ``raster`` at neither, so that with one
position per step they sample exactly from the model's distribution in that order. Ties go to the
first position. Orders of one paper are in ``gen.samplers.masked.methods``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gen.contracts.layout_orders import halton_cells
from gen.core.params import Params, number
from gen.core.registry import register
from gen.samplers.engine.host import may_be_any
from gen.samplers.masked.step import MaskedStep

# orders that look at no distribution
BLIND = ("random", "halton", "halton_rolled", "raster")


@dataclass(frozen=True)
class NoiseParams(Params):
    """``choice_temperature``: scale of the Gumbel noise on confidences."""

    choice_temperature: float = number(4.5)


@dataclass(frozen=True)
class DensityParams(Params):
    """``density_width``: standard deviation of the Gaussian weights, in positions."""

    density_width: float = number(10.0, least=1e-9)


@register("order", "confidence", params=NoiseParams)
def confidence(step: MaskedStep) -> Tensor:
    """Scores positions by log p(x_i) of the proposed token, plus noise that decreases."""
    return noisy(step, 1 - step.progress)


def noisy(step: MaskedStep, share: Tensor) -> Tensor:
    """log p(x_i), plus t s Gumbel noise with t = ``choice_temperature`` and s the ``share`` [b] of
    each row."""
    temperature = step.params.choice_temperature * share
    if not step.params.choice_temperature or not may_be_any(temperature > 0):
        return step.logp
    noise = -torch.log(
        -torch.log(step.rng.uniform(step.rows, step.positions, "confidence", step.step_index))
    )
    return step.logp + temperature[:, None] * noise


@register("order", "top")
def top(step: MaskedStep) -> Tensor:
    """Scores positions by the log-probability of the likeliest token."""
    return step.confidence_logprobs().amax(-1).double()


@register("order", "margin")
def margin(step: MaskedStep) -> Tensor:
    """Scores positions by the gap between the probabilities of the two best tokens."""
    first, second = step.confidence_logprobs().double().exp().topk(2, -1).values.unbind(-1)
    return first - second


@register("order", "entropy")
def entropy(step: MaskedStep) -> Tensor:
    """Scores positions by negative entropy: certain positions come first."""
    return -torch.special.entr(step.confidence_logprobs().double().exp()).sum(-1)


@register("order", "density", params=DensityParams)
def density(step: MaskedStep) -> Tensor:
    """Scores positions by log p(x_i) plus the log share of committed positions nearby."""
    position = step.positions[0].double()
    near = torch.exp(-0.5 * ((position[:, None] - position) / step.params.density_width) ** 2)
    known = (~step.masked).double() @ near / near.sum(0)
    return step.logp + known.log()


@register("order", "random")
def random(step: MaskedStep) -> Tensor:
    """Random permutation per row."""
    return step.rng.uniform(step.rows, step.positions, "order", None)


@register("order", "halton")
def halton(step: MaskedStep) -> Tensor:
    """Low-discrepancy sequence over the grid: positions committed together lie far apart (arXiv
    2503.17076)."""
    return -halton_rank(step).double()


@register("order", "halton_rolled")
def halton_rolled(step: MaskedStep) -> Tensor:
    """Halton sequence that begins at a random cell for every item."""
    num_cells = step.space.length
    first = step.rng.uniform(step.rows, step.positions[:, :1] * 0, "roll", None)
    return -((halton_rank(step) + (first * num_cells).long()) % num_cells).double()


def halton_rank(step: MaskedStep) -> Tensor:
    """Number of each position in the Halton sequence over the grid: [b, T]."""
    cells = tuple(step.space.grid)
    return step.constant("halton", lambda: np.argsort(halton_cells(cells)))[step.positions]


@register("order", "streams", params=NoiseParams)
def streams(step: MaskedStep) -> Tensor:
    """Along the last axis: all of its first slice, then all of its second, and so on; confidence
    inside a slice. For codes of several streams that is coarse to fine (SoundStorm, arXiv
    2305.09636; MAGNeT, arXiv 2401.04577).
    """
    # into (0, 1), in the same order, so that a slice before always comes first
    return torch.sigmoid(confidence(step) / 8) - step.positions % step.space.grid[-1]


@register("order", "raster")
def raster(step: MaskedStep) -> Tensor:
    """Scores positions from the first to the last."""
    return -step.positions.double()
