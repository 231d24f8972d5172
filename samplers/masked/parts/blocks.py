"""Block schedules: which positions are at work. B is ``block_length``.

    whole   all positions are one block
    fixed   blocks of B positions, one after the other

Those of one paper are in ``gen.samplers.masked.methods``. A block schedule returns the open
positions, bool [b, T], and the number of the block, [b]; a row whose number changes begins a block.
It may return a third tensor, bool [b, T]: the positions that the schedule of steps counts, where
they are more than the open ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.errors import bad_value
from gen.core.params import Params, flag, integer
from gen.core.registry import register
from gen.samplers.masked.step import MaskedStep


@dataclass(frozen=True)
class BlockParams(Params):
    """``block_length``: positions per block, at least 1 if blocks have a length."""

    block_length: int = integer(0)

    def check_chosen(self, param: str, part: str) -> None:
        if not self.block_length:
            expected = f"an integer of at least 1, where {param} is {part!r}"
            raise bad_value("sampler.block_length", self.block_length, expected)


@dataclass(frozen=True)
class AlignedBlockParams(BlockParams):
    """``align_blocks``: blocks are counted from the first token of the condition, not of the
    canvas, so that the canvas may begin inside of one."""

    align_blocks: bool = flag(False)


@register("block_schedule", "whole")
def whole(step: MaskedStep) -> tuple[Tensor, Tensor]:
    """Opens all positions as one block."""
    return torch.ones_like(step.masked), torch.zeros_like(step.rows)


def block_numbers(step: MaskedStep) -> Tensor:
    """Numbers the block of ``block_length`` positions that each position is in: [b, T]."""
    offset = step.num_prompt_tokens[:, None] if step.params.align_blocks else 0
    return (step.positions + offset) // step.params.block_length


@register("block_schedule", "fixed", params=AlignedBlockParams)
def fixed(step: MaskedStep) -> tuple[Tensor, Tensor]:
    """Opens the first block that has a masked position."""
    block = block_numbers(step)
    number = block.gather(1, step.masked.long().argmax(1)[:, None])
    return block == number, number[:, 0]
