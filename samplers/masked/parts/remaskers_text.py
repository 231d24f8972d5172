"""Remaskers of diffusion language models. ``remaskers`` has the others, the letters, and what all
of them must keep.

b_i is what the probability of the id at place i was when it was committed, c_i what it is now, and
l_i what it would be had place i been empty. F are the places of the block that earlier steps
committed, M its empty ones, k how many of those the selector commits.

    edit              nothing is emptied: an id of F with c_i below that of the likeliest id v
                      becomes v where p_i(v) > e, e being ``edit_threshold``. A full block gets
                      further calls until one edits nothing, at most ``max_post_steps``, and with
                      ``block_steps`` only where those are not used up. LLaDA2.1, as in
                      ``diffusers``, which makes one further call more
    wino              those of F with l_i < t, t being ``remask_threshold``; the lowest first, at
                      most k - 1. WINO (arXiv 2507.18578), whose selector is ``wide_in``: c_i >=
                      ``conf_threshold``, the surest first, at most 7/10 of M, but 5 to 20
    hierarchy_remask  those of F with c_i < t; the lowest first, at most |M| - 1. Where they are k
                      or more, one more than they are is committed
    rcr               of F with b and M with c, the lowest are empty after the step, as many as the
                      selector leaves empty, so that as many more are committed as are emptied. MDPO
                      (arXiv 2508.13148), running confidence
    remdm             in the last eighth of the block's steps, or its last step but one, the
                      ``remask_count`` places of F with the lowest b, and as many more are
                      committed. ReMDM (arXiv 2503.00307) as written for LLaDA
    remdm_cap         each of F with probability s = min(``remask_rate``, (1 - a') / a), a and a'
                      being the shares of the block that are known before and after the step, and as
                      many more are committed. ReMDM, the rule ``cap``

Where the papers do otherwise: ReMDM for LLaDA inserts calls of its own, which commit as many places
as they empty; here every call gets on, and who wants more of them says more ``steps``.
``remdm_cap`` draws how many are emptied and keeps the schedule's count, where the paper draws both.
WINO's shadow block puts the empty copies behind the sequence with attention of their own; here each
is a canvas of its own in the same batched call, which any masked model can do and which costs a
canvas per committed place.

At e of at least 1, t = 0, ``remask_count`` = 0 and ``remask_rate`` = 0 they are ``none``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.registry import register
from gen.samplers.masked.parts.selectors import sure
from gen.samplers.masked.step import LEFT_OUT_LOGP, MaskedStep, highest, lowest, needs

SHARE, LEAST, MOST = (7, 10), 5, 20  # wide_in: places committed at most


@register("selector", "wide_in")
def wide_in(step: MaskedStep) -> Tensor:
    """All that are sure enough, up to a share of what is empty."""
    count = step.eligible.sum(1)
    return highest(step.confidence, sure(step), (count * SHARE[0] // SHARE[1]).clamp(LEAST, MOST))


@register("remasker", "edit")
def edit(step: MaskedStep, count: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What has become unlikely is written over."""
    top, ids = step.confidence_logprobs().max(-1)
    doubtful = (
        step.remaskable & (ids != step.canvas) & (top.double().exp() > step.params.edit_threshold)
    )
    empty = (step.masked & step.open).sum(1)
    after = empty == 0  # a call for the sake of edits alone
    calls = step.recall("edits", torch.zeros_like(empty)).masked_fill(step.is_first_step, 0) + after
    step.memory["edits"] = calls
    again = (empty == count) & (calls < step.params.max_post_steps) & (~after | doubtful.any(1))
    if step.params.block_steps:
        again &= after | ~step.is_last_step
    if step.params.edit_threshold >= 1:  # no probability is above that
        again = torch.zeros_like(again)
    return torch.zeros_like(doubtful), count, torch.where(doubtful, ids, -1), again


@register("remasker", "wino")
@needs(LEFT_OUT_LOGP)
def wino(step: MaskedStep, count: Tensor) -> tuple[Tensor, Tensor]:
    """What its neighbours alone would not have said."""
    doubtful = step.remaskable & (step.left_out_logp.exp() < step.params.remask_threshold)
    return lowest(step.left_out_logp, doubtful, count - 1), count


@register("remasker", "hierarchy_remask")
def hierarchy_remask(step: MaskedStep, count: Tensor) -> tuple[Tensor, Tensor]:
    """What falls below a threshold, however many these are."""
    doubtful = step.remaskable & (step.logp.exp() < step.params.remask_threshold)
    removed = lowest(step.logp, doubtful & ~step.is_last_step[:, None], step.eligible.sum(1) - 1)
    return removed, torch.maximum(count, removed.sum(1) + 1)


@register("remasker", "rcr")
def rcr(step: MaskedStep, count: Tensor) -> tuple[Tensor, Tensor]:
    """The schedule's count holds over all generated places, by what they were worth when they
    came."""
    worth = torch.where(step.masked, step.logp, step.committed_logp)
    removed = step.remaskable & lowest(
        worth, step.eligible | step.remaskable, step.eligible.sum(1) - count
    )
    return _made_up_for(step, removed, count)


@register("remasker", "remdm")
def remdm(step: MaskedStep, count: Tensor) -> tuple[Tensor, Tensor]:
    """Late in a block, the places that were the least sure when they came."""
    after_next = (
        step.progress * (step.steps_in_block + 2) / (step.steps_in_block + 1)
    )  # r of the next step: the block's steps are (since + 1) / r
    late = (8 * step.progress >= 7) | (after_next >= 1 - 1e-9)
    spare = (step.eligible.sum(1) - count).clamp_max(step.params.remask_count)
    return _made_up_for(
        step, lowest(step.committed_logp, step.remaskable & late[:, None], spare), count
    )


@register("remasker", "remdm_cap")
def remdm_cap(step: MaskedStep, count: Tensor) -> tuple[Tensor, Tensor]:
    """Any place, with a probability that the schedule bounds."""
    left = step.eligible.sum(1) - count
    chance = (left.double() / step.remaskable.sum(1).clamp_min(1)).clamp_max(
        step.params.remask_rate
    )
    drawn = step.rng.uniform(step.rows, step.positions, "remask", step.step_index)
    return _made_up_for(
        step, lowest(drawn, step.remaskable & (drawn < chance[:, None]), left), count
    )


def _made_up_for(step: MaskedStep, removed: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """As many more committed as are emptied; in the last step, neither."""
    return removed, torch.where(step.is_last_step, count, count + removed.sum(1))
