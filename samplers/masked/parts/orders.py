"""Orders: which masked places are committed first. An order gives a score per place, float64 [b,
T]; the highest go first.

    confidence   log p(x_i) of the proposed id, plus t (1 - r) Gumbel noise with t =
                 ``choice_temperature``
    top          log of the highest probability at i        margin   p(1st) - p(2nd)        entropy
                 sum p log p
    density      p(x_i), weighted by how many places around i are known: a Gaussian mean over
                 ``density_width`` places
    position     log min(p(x_i) r(x_i), 10) - l i, with r(v) = - log of how often id v comes up
                 (``TokenSpace.rarity``) and l = ``position_decay``: what says little waits, however
                 sure it is, and early places come first. PC-Sampler (arXiv 2508.13021)
    random, halton, raster, streams

``top``, ``margin`` and ``entropy`` look at the law of a place, not at what was drawn from it;
``random``, ``halton`` and ``raster`` at neither, so that with one place per step they sample
exactly from the model's law in that order. Ties go to the first place. ``margin`` and ``entropy``:
Dream (arXiv 2508.15487); ``density``: certainty density of d2Cache (arXiv 2509.23094), where it
ranks what to compute.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gen.contracts.layout_orders import halton_cells
from gen.core.errors import GenError
from gen.core.registry import register
from gen.samplers.engine.host import may_be_any, to_device
from gen.samplers.masked.step import MaskedStep

BLIND = ("random", "halton", "raster")  # those that look at no law
SAYS_ENOUGH = 10.0  # PC-Sampler's bound on p r, so that a very rare id does not outrun everything


@register("order", "confidence")
def confidence(step: MaskedStep) -> Tensor:
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
    return step.confidence_logprobs().amax(-1).double()


@register("order", "margin")
def margin(step: MaskedStep) -> Tensor:
    first, second = step.confidence_logprobs().double().exp().topk(2, -1).values.unbind(-1)
    return first - second


@register("order", "entropy")
def entropy(step: MaskedStep) -> Tensor:
    return -torch.special.entr(step.confidence_logprobs().double().exp()).sum(-1)


@register("order", "density")
def density(step: MaskedStep) -> Tensor:
    position = step.positions[0].double()
    near = torch.exp(-0.5 * ((position[:, None] - position) / step.params.density_width) ** 2)
    known = (~step.masked).double() @ near / near.sum(0)
    return step.logp + known.log()


@register("order", "position")
def position(step: MaskedStep) -> Tensor:
    """Raises ``GenError`` for a space that does not know how rare its ids are."""
    rarity = step.space.rarity
    if rarity is None:
        raise GenError(
            "sampler.order is 'position', which needs to know how rare each id is"
            " (TokenSpace.rarity); this model does not say; expected another order, such as"
            " confidence"
        )
    told = step.confidence * rarity.to(step.logp)[step.proposed_tokens]
    return told.clamp(0, SAYS_ENOUGH).log() - step.params.position_decay * step.positions


@register("order", "random")
def random(step: MaskedStep) -> Tensor:
    """One random permutation per row."""
    return step.rng.uniform(step.rows, step.positions, "order", None)


@register("order", "halton")
def halton(step: MaskedStep) -> Tensor:
    """A low-discrepancy sequence over the grid: what is committed together lies far apart (arXiv
    2503.17076)."""
    order = to_device(np.array(halton_cells(tuple(step.space.grid))), step.rows.device)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    return -rank[step.positions].double()


@register("order", "streams")
def streams(step: MaskedStep) -> Tensor:
    """Along the last axis: all of its first slice, then all of its second, and so on; confidence
    inside a slice. For codes of several streams that is coarse to fine (SoundStorm, arXiv
    2305.09636; MAGNeT, arXiv 2401.04577).
    """
    # into (0, 1), in the same order, so that a slice before always comes first
    return torch.sigmoid(confidence(step) / 8) - step.positions % step.space.grid[-1]


@register("order", "raster")
def raster(step: MaskedStep) -> Tensor:
    """First to last."""
    return -step.positions.double()
