"""Selectors: which places a masked decoder commits now. These remember nothing;
``selectors_history`` has those that do.

c_i is the probability of the id that is proposed for place i and H_i the entropy of its law, both
under the law that ``confidence_on`` names. Among the empty places of the block at work:

    schedule             as many as the schedule says, highest score first (``masked_iterative``)
    even                 floor(m / S) + [s < m mod S] in step s of S, of the m places that were
                         empty when the block began. LLaDA (arXiv 2502.09992)
    threshold            c_i >= t. Fast-dLLM (arXiv 2505.22618)
    factor               the n surest, n the largest with (n + 1)(1 - c_(n)) < f, c_(n) the n-th
                         highest confidence. Fast-dLLM, section 3.3
    entropy_bound        the k of highest score, k the largest with sum H - max H <= g over them: a
                         bound on what they say about each other. EB-Sampler (arXiv 2505.24857)
    entropy              H_i <= g. How dParallel (arXiv 2509.26488) decodes
    local                c_i >= t (anchors), and c_i >= l within ``radius`` places of one. LocalLeap
                         (arXiv 2510.07081)
    runs                 c_i >= t, and in each run of empty places that follow each other the surest
                         one, if its c >= l. The hierarchical decoder of dInfer (arXiv 2510.08666)
    explore              c_i >= t or else the best place; and if that is a single one, the place of
                         highest entropy too. After ETE (Explore-Then-Exploit), whose constants are
                         not published: these are ours
    scheduled_threshold  c_i >= t if these are as many as the schedule says, else that many, highest
                         score first. LLaDA2 (arXiv 2512.15745). With S = ``block_steps`` that many
                         is floor(B / S) + [s < B mod S], B = ``block_length``, as in ``diffusers``

t is ``conf_threshold``, l ``low_threshold``, f ``factor`` and g ``entropy_bound``. A threshold is
reached by what is equal to it. Where a rule takes nothing, the loop commits the one place of
highest score; so a t above 1, an f or a g of 0 mean one place per call (a g of 0: and all that are
certain), and a t of 0 one call per block. Distances and runs go along the sequence, also on a grid,
as in the papers. Neighbours of other blocks count for nothing.

Guarantee: none about the law, but for one place per call (``masked_iterative``). Of ties, the first
place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.registry import register
from gen.samplers.masked.iterative import fixed, numbered
from gen.samplers.masked.parts.orders import entropy as certainty
from gen.samplers.masked.step import MaskedStep, highest, ranked


def sure(step: MaskedStep) -> Tensor:
    """Places that may be committed and whose confidence reaches ``conf_threshold``: bool [b, T]."""
    return step.eligible & (step.confidence >= step.params.conf_threshold)


def sure_or_best(step: MaskedStep) -> Tensor:
    """Those, or else the one place of highest score."""
    found = sure(step)
    return torch.where(
        found.any(1, keepdim=True),
        found,
        highest(step.score, step.eligible, torch.ones_like(step.rows)),
    )


def runs_of(among: Tensor, ids: Tensor | None = None) -> Tensor:
    """Numbers the runs of places in ``among`` (bool [b, T]) that follow each other, and hold the
    same id if ``ids`` are given, from 1 on: long [b, T]. What is said of the other places means
    nothing."""
    begins = among.clone()
    same = among[:, :-1] if ids is None else among[:, :-1] & (ids[:, 1:] == ids[:, :-1])
    begins[:, 1:] &= ~same
    return begins.long().cumsum(1)


def best_of_each(value: Tensor, among: Tensor, group: Tensor) -> Tensor:
    """In each ``group`` (long [b, T], at most T), of the places in ``among`` the first of highest
    value: bool [b, T]."""
    total = value.shape[1]
    position = torch.arange(total, device=value.device).expand_as(group)
    value = value.masked_fill(~among, -torch.inf)
    top = value.new_full((len(value), total + 1), -torch.inf).scatter_reduce(
        1, group, value, "amax"
    )
    at = among & (value == top.gather(1, group))
    first = position.new_full((len(value), total + 1), total).scatter_reduce(
        1, group, torch.where(at, position, total), "amin"
    )
    return at & (position == first.gather(1, group))


@register("selector", "even")
def even(step: MaskedStep) -> Tensor:
    """The same number in every step, the first ones having what is left over; highest score
    first."""
    steps = ((step.steps_in_block + 1) / step.progress).round().long()
    count = step.num_masked_at_start // steps + (
        step.steps_in_block < step.num_masked_at_start % steps
    )
    return highest(
        step.score, step.eligible, torch.where(step.is_last_step, step.eligible.sum(1), count)
    )


@register("selector", "threshold")
def threshold(step: MaskedStep) -> Tensor:
    """All that are sure enough."""
    return sure(step)


@register("selector", "factor")
def factor(step: MaskedStep) -> Tensor:
    """The more places, the surer the last of them."""
    number = ranked(step.confidence, step.eligible) + 1
    return step.eligible & ((number + 1) * (1 - step.confidence) < step.params.factor)


@register("selector", "entropy_bound")
def entropy_bound(step: MaskedStep) -> Tensor:
    """As long as what the places could say about each other stays small."""
    order = ranked(step.score, step.eligible).argsort(1)
    eligible = step.eligible.gather(1, order)
    bits = -certainty(step).gather(1, order).masked_fill(~eligible, 0)
    fits = eligible & (bits.cumsum(1) - bits.cummax(1).values <= step.params.entropy_bound)
    return torch.zeros_like(fits).scatter(1, order, fits.long().cumprod(1).bool())


@register("selector", "entropy")
def entropy(step: MaskedStep) -> Tensor:
    """All whose law leaves little choice."""
    return step.eligible & (-certainty(step) <= step.params.entropy_bound)


@register("selector", "local")
def local(step: MaskedStep) -> Tensor:
    """Around a sure place, less is asked. Anchors are places of this step, not what earlier ones
    committed."""
    anchor, radius = sure(step), step.params.radius
    near = (
        torch.nn.functional.max_pool1d(anchor.double()[:, None], 2 * radius + 1, 1, radius)[:, 0]
        > 0
    )
    return anchor | (step.eligible & near & (step.confidence >= step.params.low_threshold))


@register("selector", "runs")
def runs(step: MaskedStep) -> Tensor:
    """One place of every gap between known ones, so that gaps are halved everywhere at once."""
    best = best_of_each(step.confidence, step.eligible, runs_of(step.eligible))
    return sure(step) | (best & (step.confidence >= step.params.low_threshold))


@register("selector", "explore")
def explore(step: MaskedStep) -> Tensor:
    """What is sure; where that is next to nothing, also the least certain place, which tells the
    most. ETE takes sure places of the block after this one as well: it takes those that are open,
    so with ``blocks`` = ``lookahead`` both."""
    found = sure_or_best(step)
    rest = step.eligible & ~found
    return found | highest(-certainty(step), rest, (found.sum(1) < 2).long())


@register("selector", "scheduled_threshold")
def scheduled_threshold(step: MaskedStep) -> Tensor:
    """Ahead of the schedule where the model is sure, never behind it."""
    found, count, size, steps = (
        sure(step),
        step.quota,
        step.params.block_length,
        step.params.block_steps,
    )
    if steps:
        count = size // steps + (step.steps_in_block < size % steps)
    return torch.where(
        (found.sum(1) >= count)[:, None], found, highest(step.score, step.eligible, count)
    )


@register("block_schedule", "lookahead")
def lookahead(step: MaskedStep) -> tuple[Tensor, Tensor]:
    """The first block of ``block_length`` places that has an empty one, and the one after it."""
    here, number = fixed(step)
    after = numbered(step) == number[:, None] + 1
    return here | after, number
