"""ETE (Explore-Then-Exploit): where little is confident, also the least certain position.

    selector ``explore``           c_i >= ``conf_threshold``, or else the position of highest score;
                                   and if that is a single one, the position of highest entropy too
    block schedule ``lookahead``   the first block of ``block_length`` positions that has a masked
                                   one, and the block after it

ETE takes confident positions of the next block as well. ``explore`` takes those that are open, so
with ``lookahead`` both.

Reference: after Explore-Then-Exploit, whose constants are not published: these are ours.
Guarantee: approximate.
Parameters: ``conf_threshold`` (above 1: two positions per forward pass), ``block_length``,
``align_blocks``.
Preset: ``ete``, with blocks of 32.
"""

from __future__ import annotations

from torch import Tensor

from gen.core.method import Limit, method
from gen.core.registry import register
from gen.samplers.masked.parts.blocks import AlignedBlockParams, block_numbers, fixed
from gen.samplers.masked.parts.orders import entropy as certainty
from gen.samplers.masked.parts.selection import ThresholdParams, confident_or_best, greedy
from gen.samplers.masked.step import MaskedStep, highest


@method(
    "ete",
    about="after ETE: confident positions of this block and the next, plus an uncertain one if few"
    " are confident",
    params=greedy(selector="explore", conf_threshold=0.9, blocks="lookahead", block_length=32),
    limit=Limit("two positions per forward pass", {"conf_threshold": 1.1}),
)
@register("selector", "explore", params=ThresholdParams)
def explore(step: MaskedStep) -> Tensor:
    """Selects confident positions; if there is only one, also the least certain position, which is
    the most informative."""
    chosen = confident_or_best(step)
    rest = step.eligible & ~chosen
    return chosen | highest(-certainty(step), rest, (chosen.sum(1) < 2).long())


@register("block_schedule", "lookahead", params=AlignedBlockParams)
def lookahead(step: MaskedStep) -> tuple[Tensor, Tensor]:
    """Opens the first block that has a masked position, and the one after it."""
    current, number = fixed(step)
    following = block_numbers(step) == number[:, None] + 1
    return current | following, number
