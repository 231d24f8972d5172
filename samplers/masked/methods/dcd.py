"""Deferred commitment decoding: a window over the first masked positions.

    block schedule ``sliding``   a window from the first masked position to the ``block_length``-th
                                 one, which moves on with every forward pass

Positions that a sliding window has left behind are final. There are no blocks to share ``steps``
among, so the schedule counts the whole canvas, and commits less than it says where the window is
too narrow: then forward passes come on top. A window that holds every masked position is ``whole``.

Reference: deferred commitment decoding (arXiv 2601.02076), whose window has a greatest length, too,
and goes on in smaller pieces for models with causal blocks.
Guarantee: approximate.
Parameters: ``block_length``; ``conf_threshold`` of the preset's selector (above 1: one position per
forward pass).
Preset: ``dcd``, all positions above a confidence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.method import SEQUENTIAL, Limit, method
from gen.core.registry import register
from gen.samplers.masked.parts.blocks import BlockParams
from gen.samplers.masked.parts.selection import greedy
from gen.samplers.masked.step import MaskedStep


@method(
    "dcd",
    paper="2601.02076",
    title="Deferred Commitment Decoding",
    about="deferred commitment: positions above a threshold, in a window of the first masked ones",
    params=greedy(selector="threshold", conf_threshold=0.9, blocks="sliding", block_length=32),
    limit=Limit(SEQUENTIAL, {"conf_threshold": 1.1}),
)
@register("block_schedule", "sliding", params=BlockParams)
def sliding(step: MaskedStep) -> tuple[Tensor, Tensor, Tensor]:
    """Opens the first ``block_length`` masked positions, and the known ones between them."""
    count = step.masked.long().cumsum(1)
    before = count - step.masked.long()
    return (
        (count > 0) & (before < step.params.block_length),
        torch.zeros_like(step.rows),
        torch.ones_like(step.masked),
    )
