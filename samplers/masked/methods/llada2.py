"""LLaDA2: ahead of the schedule where it is confident; what has become unlikely is edited.

    selector ``scheduled_threshold``   c_i >= ``conf_threshold`` if these are as many as the
                                       schedule says, else that many, highest score first. With S =
                                       ``block_steps`` that many is floor(B / S) + [s < B mod S], B
                                       = ``block_length``, as in ``diffusers``
    remasker ``edit``                  nothing is masked: a committed token of the block with a
                                       probability below that of the likeliest token v becomes v
                                       where p_i(v) > ``edit_threshold``. A full block gets further
                                       forward passes until one edits nothing, at most
                                       ``max_post_steps``, and with ``block_steps`` only where those
                                       are not used up

``edit`` is LLaDA2.1, as in ``diffusers``, which makes one further forward pass more. It changes
positions only inside the block at work.

Reference: "LLaDA2.0: Scaling Up Diffusion Language Models to 100B" (arXiv 2512.15745).
Guarantee: approximate.
Parameters: ``conf_threshold``, ``block_length``, ``edit_threshold`` (1: no edits),
``max_post_steps``.
Preset: ``llada2``, with blocks of 32 counted from the first token of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.method import Limit, method
from gen.core.params import Params, integer, number
from gen.core.registry import register
from gen.samplers.masked.parts.selection import (
    PATIENT,
    ThresholdParams,
    confident,
    fixed_blocks,
    greedy,
)
from gen.samplers.masked.step import ON_HOST, MaskedStep, highest, needs


@dataclass(frozen=True)
class ScheduledThresholdParams(ThresholdParams):
    """``block_length``: positions per block, which share ``block_steps``."""

    block_length: int = integer(0)


@dataclass(frozen=True)
class EditParams(Params):
    """``edit_threshold``: probability above which a token replaces another one.
    ``max_post_steps``: maximum number of forward passes after a block is full."""

    edit_threshold: float = number(0.5)
    max_post_steps: int = integer(16)


@register("selector", "scheduled_threshold", params=ScheduledThresholdParams)
def scheduled_threshold(step: MaskedStep) -> Tensor:
    """Selects confident positions, and never fewer than the schedule."""
    size, steps = step.params.block_length, step.params.block_steps
    chosen, count = confident(step), step.quota
    if steps:
        count = size // steps + (step.steps_in_block < size % steps)
    scheduled = highest(step.score, step.eligible, count)
    return torch.where((chosen.sum(1) >= count)[:, None], chosen, scheduled)


@method(
    "llada2",
    paper="2512.15745",
    title="LLaDA2.0: Scaling Up Diffusion Language Models to 100B",
    about="LLaDA2.1: more positions than scheduled if confident; edits tokens that have become"
    " unlikely",
    params=greedy(
        selector="scheduled_threshold",
        conf_threshold=0.7,
        remasker="edit",
        edit_threshold=0.5,
        max_post_steps=16,
        align_blocks=True,
        **PATIENT,
        **fixed_blocks(),
    ),
    aliases={"num_inference_steps": "block_steps"},
    limit=Limit("llada2", {"edit_threshold": 1}, {"remasker": "none"}, "`edit_threshold: 1`"),
)
@register("remasker", "edit", params=EditParams)
@needs(ON_HOST)  # the loop asks which rows stay
def edit(step: MaskedStep, count: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Replaces tokens that have become unlikely."""
    top, ids = step.confidence_logprobs().max(-1)
    likely = top.double().exp() > step.params.edit_threshold
    doubtful = step.remaskable & (ids != step.canvas) & likely
    num_masked = (step.masked & step.open).sum(1)
    is_full = num_masked == 0  # a forward pass for the sake of edits alone
    calls = step.recall("edits", torch.zeros_like(num_masked))
    calls = calls.masked_fill(step.is_first_step, 0) + is_full
    step.memory["edits"] = calls
    again = (num_masked == count) & (calls < step.params.max_post_steps)
    again &= ~is_full | doubtful.any(1)
    if step.params.block_steps:
        again &= is_full | ~step.is_last_step
    if step.params.edit_threshold >= 1:  # no probability is above that
        again = torch.zeros_like(again)
    return torch.zeros_like(doubtful), count, torch.where(doubtful, ids, -1), again
