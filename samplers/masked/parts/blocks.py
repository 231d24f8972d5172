"""Block schedules: which places are at work. ``whole`` and ``fixed`` are in ``masked_iterative``,
``lookahead`` in ``selectors``. B is ``block_length``.

    adaptive  a block ends where a unit of what is said does. When one begins, of the first W
              places, W a quarter of the canvas, the one is looked for whose likeliest id is a
              delimiter (``TokenSpace.delimiters``), most surely so: if that probability is at least
              ``delimiter_threshold``, the block ends with it, else after B places. AdaBlock (arXiv
              2509.26432). Without delimiters it is ``fixed``
    sliding   a window from the first empty place to the B-th one, which moves on with every call.
              Deferred commitment decoding (arXiv 2601.02076), whose window has a greatest length,
              too, and goes on in smaller pieces for models with causal blocks

What a sliding window has left behind is final. There are no blocks there to share ``steps`` among,
so the schedule counts the whole canvas, and commits less than it says where the window is too
narrow: then calls come on top. A window that holds every empty place is ``whole``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.registry import register
from gen.samplers.masked.step import LOGPROBS, MaskedStep, highest, needs


@register("block_schedule", "adaptive")
@needs(LOGPROBS)
def adaptive(step: MaskedStep) -> tuple[Tensor, Tensor]:
    """Blocks as long as what they say. A block's number is the place after its last."""
    size, position = step.params.block_length, step.positions
    start, end = (
        step.recall(f"adaptive_{name}", torch.zeros_like(step.rows)) for name in ("start", "end")
    )
    going = (step.masked & (position < end[:, None])).any(1)
    first = step.masked.long().argmax(1)
    begin = (
        end + (first - end).clamp_min(0) // size * size
    )  # blocks that have nothing to do are passed over
    sure, ids = step.confidence_logprobs().max(-1)
    near = (position >= first[:, None]) & (
        position < first[:, None] + max(1, position.shape[1] // 4)
    )
    ending = (
        step.masked
        & near
        & torch.isin(ids, torch.tensor(step.space.delimiters, dtype=ids.dtype, device=ids.device))
    )
    best = highest(sure.double(), ending, torch.ones_like(step.rows)) & (
        sure.double().exp() >= step.params.delimiter_threshold
    )
    until = torch.where(
        best.any(1), best.long().argmax(1) + 1, (begin + size).clamp_max(position.shape[1])
    )
    start, end = torch.where(going, start, begin), torch.where(going, end, until)
    step.memory.update(adaptive_start=start, adaptive_end=end)
    return (position >= start[:, None]) & (position < end[:, None]), end


@register("block_schedule", "sliding")
def sliding(step: MaskedStep) -> tuple[Tensor, Tensor, Tensor]:
    """The first ``block_length`` empty places, and what is known between them."""
    upto = step.masked.long().cumsum(1)
    before = upto - step.masked.long()
    return (
        (upto > 0) & (before < step.params.block_length),
        torch.zeros_like(step.rows),
        torch.ones_like(step.masked),
    )
