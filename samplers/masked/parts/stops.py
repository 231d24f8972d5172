"""Stops: when a row is over before every position has been decided, and what the rest becomes.

    filled   never
    end      an end (``TokenSpace.row_ends``) stands somewhere and no position left of it is masked:
             the masked positions right of it become the eos token. Those that were committed there
             before keep their tokens, which are behind the end and mean nothing

A stop returns which rows are over, bool [b], and the tokens of what such rows left masked, [b, T].
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.registry import register
from gen.samplers.masked.step import MaskedStep


@register("stop", "filled")
def filled(step: MaskedStep, canvas: Tensor) -> tuple[Tensor, Tensor]:
    """Stops when no position is masked."""
    return torch.zeros_like(step.rows, dtype=torch.bool), canvas


@register("stop", "end")
def end(step: MaskedStep, canvas: Tensor) -> tuple[Tensor, Tensor]:
    """Stops when all positions before the first end are committed. Raises ``GenError`` for a space
    without an eos token."""
    if step.space.eos_token_id is None:
        raise GenError(
            "sampler.stop is 'end', which needs an id that ends a row (TokenSpace.eos_token_id);"
            " this model has none; expected filled or prophet"
        )
    ends = step.space.is_end(canvas)
    known = (~step.space.is_masked(canvas)).long().cumprod(1).bool()
    return (ends & known).any(1), torch.full_like(canvas, step.space.eos_token_id)
