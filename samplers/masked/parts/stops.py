"""Stops: when a row is over before every place has been decided, and what the rest becomes.
``filled`` (``masked_iterative``) is never.

    end      the id that ends a row (``TokenSpace.end_id``) stands somewhere and nothing is empty
             left of it: the empty places right of it become the end too. Those that were committed
             there before keep their ids, which are behind the end and mean nothing
    prophet  the gap between the logits of the two likeliest ids, as a mean over the block's places
             that are still empty, reaches g in the first third of the steps, 2 g / 3 in the second
             or g / 3 in the last one: all empty places become what this call proposes for them.
             Prophet (arXiv 2508.19982)

g is ``gap_threshold``; 7.5 gives the authors' 7.5, 5 and 2.5. Gaps are those of the raw law, which
no temperature or filter has touched, and steps are forward calls out of ``steps``. Prophet looks at
the answer alone: so many ids after the words that announce it, and does nothing where it is not
told them. Here a region is said by its places, ``answer_length`` of them from ``answer_start`` on,
filled or empty; without (0), it is what is still empty. A place where only one id may stand has no
gap and does not count; where no place counts, nothing stops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.registry import register
from gen.samplers.masked.step import MaskedStep


@register("stop", "end")
def end(step: MaskedStep, canvas: Tensor) -> tuple[Tensor, Tensor]:
    """Nothing can come before the end any more. Raises ``GenError`` for a space without an end."""
    if step.space.eos_token_id is None:
        raise GenError(
            "sampler.stop is 'end', which needs an id that ends a row (TokenSpace.end_id); there is"
            " none here; expected filled or prophet"
        )
    ends = canvas == step.space.eos_token_id
    known = (~step.space.is_masked(canvas)).long().cumprod(1).bool()
    return (ends & known).any(1), torch.full_like(canvas, step.space.eos_token_id)


@register("stop", "prophet")
def prophet(step: MaskedStep, canvas: Tensor) -> tuple[Tensor, Tensor]:
    """The ids that lead will not be overtaken."""
    params = step.params
    region = step.space.is_masked(canvas) & step.open
    if params.answer_length:
        region = (step.positions >= params.answer_start) & (
            step.positions < params.answer_start + params.answer_length
        )
    first, second = step.raw_logprobs().double().topk(2, -1).values.unbind(-1)
    counts = region & second.isfinite()
    gap = torch.where(counts, first - second, 0).sum(1) / counts.sum(1)
    third = (3 * step.step_index // params.steps).clamp_max(2)
    return counts.any(1) & (gap >= params.gap_threshold * (3 - third) / 3), step.proposed_tokens
