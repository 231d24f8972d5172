"""Remaskers: which committed positions are masked again. Positions that the canvas gave are never
among them.

    none   nothing. What is committed stays

Those of one paper are in ``gen.samplers.masked.methods``. A remasker returns the positions to mask,
bool [b, T], and how many to commit, [b]; it may also return tokens to put in the place of committed
ones, [b, T] (-1: none), and the rows that want another forward pass in a full block, bool [b].

A remasker sees the final distribution, so a token that a filter such as top-k no longer leaves has
probability 0. A model that was trained on masked positions alone may say anything about a position
whose token it sees.

Guarantee: approximate. Every step commits at least one position more than it masks again, so
``steps`` are enough; the loop masks nothing in the last step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.registry import register
from gen.samplers.masked.step import MaskedStep


@register("remasker", "none")
def none(step: MaskedStep, count: Tensor) -> tuple[Tensor, Tensor]:
    """Keeps what is committed."""
    return torch.zeros_like(step.masked), count
