"""Positions announced ahead: those that the next steps of a row commit, chosen at one step.

A selector that reads the scores and the number of the step alone (``COUNTED``) is asked for this
step and, with the same scores, for the steps after it. What it selects for all of them is the
group. While the row goes through the group, it keeps the scores of the group's first step, so that
its steps commit the group's positions in the order in which they were announced.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gen.samplers.masked.part_set import PartSet
from gen.samplers.masked.progress import next_progress
from gen.samplers.masked.step import MaskedStep, at_least_one


def announcing(parts: PartSet, params) -> PartSet:
    """Let the order announce positions for cache policies that declare ``ANNOUNCED``.

    Such a policy stores ``num_local`` [b] in the memory of the step, the steps of the row's group
    that are left after this one, and ``is_local`` bool [b], whether this step is one that an
    earlier step announced. It finds the announced positions, bool [b, T], there as ``group``.
    """
    inner = parts.order

    def order(step: MaskedStep) -> Tensor:
        memory, score = step.memory, inner(step)
        is_local = memory["is_local"][:, None]
        score = torch.where(is_local, step.recall("group_score", score), score)
        group = step.recall("group", torch.zeros_like(step.masked))
        if not bool(is_local.all()):
            ahead = announced(parts, params, step, score, memory["num_local"])
            group = torch.where(is_local, group, ahead)
        memory.update(group_score=score, group=group)
        return score

    return replace(parts, order=order)


def announced(parts: PartSet, params, step: MaskedStep, score: Tensor, num_next: Tensor) -> Tensor:
    """Find the positions that this step and the next ones of the block commit.

    Args:
        parts: parts with selector and schedule.
        params: parameters of the sampler.
        step: step with its block progress, prediction and proposal.
        score: scores that all of these steps select by, float64 [b, T].
        num_next: steps after this one, long [b].

    Returns:
        The positions, bool [b, T].
    """
    block = step.block
    assert step.proposal is not None and block is not None, "the order runs after both"
    now = replace(step, proposal=replace(step.proposal, score=score))
    group = torch.zeros_like(step.masked)
    for ahead in range(int(num_next.max()) + 1):
        is_counted = (num_next >= ahead) & now.eligible.any(1)
        group |= at_least_one(now, parts.selector(now)) & is_counted[:, None]
        masked = step.masked & ~group
        count = (masked & step.open).sum(1)
        block = next_progress(parts, params, block, count)
        now = replace(now, view=replace(step.view, masked=masked), block=block)
    return group
