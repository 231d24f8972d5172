"""AdaBlock: blocks that end where a unit of meaning does.

    block schedule ``adaptive``   when a block begins, of the first W positions, W a quarter of the
                                  canvas, the one is looked for whose likeliest token is a delimiter
                                  (``TokenSpace.delimiters``), with the highest probability. If that
                                  is at least ``delimiter_threshold``, the block ends with it, else
                                  after ``block_length`` positions

Refused where the model's tokens have no known delimiter.

Reference: "AdaBlock-dLLM: Semantic-Aware Diffusion LLM Inference via Adaptive Block Size" (arXiv
2509.26432).
Guarantee: approximate.
Parameters: ``block_length``, ``delimiter_threshold`` (above 1: blocks ``fixed``).
Preset: ``adablock``, all positions above a confidence. The paper has ``delimiter_threshold`` 0.5
for Dream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.method import Limit, method
from gen.core.params import number
from gen.core.registry import register
from gen.samplers.masked.parts.blocks import BlockParams
from gen.samplers.masked.parts.selection import greedy
from gen.samplers.masked.step import LOGPROBS, MaskedStep, highest, needs


@dataclass(frozen=True)
class AdaptiveParams(BlockParams):
    """``delimiter_threshold``: probability of a delimiter that ends a block."""

    delimiter_threshold: float = number(0.3)


@method(
    "adablock",
    paper="2509.26432",
    title="AdaBlock-dLLM: Semantic-Aware Diffusion LLM Inference via Adaptive Block Size",
    about="AdaBlock: blocks that end at a delimiter; all positions above a confidence threshold."
    " Published delimiter_threshold: LLaDA 0.3, Dream 0.5",
    params=greedy(
        selector="threshold",
        conf_threshold=0.9,
        blocks="adaptive",
        block_length=32,
        delimiter_threshold=0.3,
    ),
    limit=Limit("fast_dllm", {"delimiter_threshold": 1.1}),
)
@register("block_schedule", "adaptive", params=AdaptiveParams)
@needs(LOGPROBS)
def adaptive(step: MaskedStep) -> tuple[Tensor, Tensor]:
    """Opens the block at work, which ends with a delimiter. Its number is the position after its
    last. Raises ``GenError`` for a space without delimiters."""
    if not step.space.delimiters:
        raise GenError(
            "sampler.blocks is 'adaptive', which needs tokens that end a unit of text"
            " (TokenSpace.delimiters); this model has none; expected fixed, or the option"
            " delimiters of a published text model"
        )
    size, position = step.params.block_length, step.positions
    start, end = (
        step.recall(f"adaptive_{name}", torch.zeros_like(step.rows)) for name in ("start", "end")
    )
    goes_on = (step.masked & (position < end[:, None])).any(1)
    first = step.masked.long().argmax(1)
    # blocks without a masked position are passed over
    begin = end + (first - end).clamp_min(0) // size * size
    logp, ids = step.confidence_logprobs().max(-1)
    window = max(1, position.shape[1] // 4)
    near = (position >= first[:, None]) & (position < first[:, None] + window)
    delimiters = step.constant("delimiters", lambda: step.space.delimiters)
    ending = step.masked & near & torch.isin(ids, delimiters)
    best = highest(logp.double(), ending, torch.ones_like(step.rows)) & (
        logp.double().exp() >= step.params.delimiter_threshold
    )
    until = torch.where(
        best.any(1), best.long().argmax(1) + 1, (begin + size).clamp_max(position.shape[1])
    )
    start, end = torch.where(goes_on, start, begin), torch.where(goes_on, end, until)
    step.memory.update(adaptive_start=start, adaptive_end=end)
    return (position >= start[:, None]) & (position < end[:, None]), end
