"""Progress of a row in its block, and how many positions the schedule commits in a step."""

from __future__ import annotations

import torch
from torch import Tensor

from gen.samplers.masked.part_set import PartSet
from gen.samplers.masked.step import BlockProgress


def progress_of(
    parts: PartSet, params, count: Tensor, at_start: Tensor, index: Tensor, steps: Tensor
) -> dict[str, Tensor]:
    """Compute the fields of ``BlockProgress`` that a step's number decides.

    Args:
        parts: parts with the schedule.
        params: parameters of the sampler.
        count: positions of the block that are masked before the step, long [b].
        at_start: positions that were masked when the block began, long [b].
        index: steps of the block before this one, long [b].
        steps: steps that the block is given, float64 [b].
    """
    progress = ((index + 1) / steps).clamp_max(1)
    is_last_step = progress >= 1
    share = torch.where(is_last_step, 0.0, parts.schedule(progress, params.exponent))
    stay = at_start * share
    stay = (stay - 1e-9).ceil() if parts.masks_rounded_up else (stay + 1e-9).floor()
    stay = stay.long()
    stay = torch.where(share > 0, stay.clamp_min(1), stay)
    return {
        "steps_in_block": index,
        "num_masked_at_start": at_start,
        "steps": steps,
        "progress": progress,
        "is_last_step": is_last_step,
        "quota": (count - torch.minimum(stay, count - 1)).clamp_min(0),
    }


def next_progress(parts: PartSet, params, block: BlockProgress, count: Tensor) -> BlockProgress:
    """Progress one step later in the same block, with ``count`` [b] positions still masked."""
    later = progress_of(
        parts, params, count, block.num_masked_at_start, block.steps_in_block + 1, block.steps
    )
    return BlockProgress(block.open, torch.zeros_like(block.is_first_step), **later)
