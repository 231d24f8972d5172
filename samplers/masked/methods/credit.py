"""CreditDecoding: a token that was likely in earlier steps gains.

    k(v) <- ``credit_decay`` k(v), + p(v) ** ``credit_power`` for the likeliest token v
    p(v) <- p(v) (1 + k(v)) ** ``credit_weight``, normalised

Every masked position keeps a credit k(v) per token, 0 when a block begins. ``credit`` is a proposer
and changes the distribution itself, the final one and the raw one, for everything that comes after
it in that step: confidence, order, selector, remasker. The committed token is the likeliest one of
the fused distribution, and any selector may stand behind it; the paper's is ``threshold``.

Reference: "CreditDecoding: Accelerating Parallel Decoding in Diffusion Large Language Models with
Trace Credits" (arXiv 2510.06133).
Guarantee: approximate.
Parameters: ``credit_weight`` (0: ``fast_dllm``), ``credit_decay``, ``credit_power``.
Preset: ``credit``, with blocks of 32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.method import Limit, method
from gen.core.params import Params, number
from gen.core.registry import register
from gen.samplers.masked.parts.selection import fixed_blocks, greedy
from gen.samplers.masked.step import LIKELIEST, MaskedStep, needs


@dataclass(frozen=True)
class CreditParams(Params):
    """``credit_weight``: exponent of the credit in the fused distribution. ``credit_decay``: factor
    by which a step multiplies the credit. ``credit_power``: exponent of the probability that is
    added to the credit."""

    credit_weight: float = number(0.7)
    credit_decay: float = number(0.8, most=1.0)
    credit_power: float = number(0.2)


@method(
    "credit",
    paper="2510.06133",
    title="CreditDecoding: Accelerating Parallel Decoding in Diffusion Large Language Models with"
    " Trace Credits",
    about="CreditDecoding: tokens that were likely in earlier steps gain probability",
    params=greedy(
        selector="threshold",
        proposer="credit",
        conf_threshold=0.9,
        credit_weight=0.7,
        credit_decay=0.8,
        credit_power=0.2,
        **fixed_blocks(),
    ),
    limit=Limit("fast_dllm", {"credit_weight": 0}),
)
@register("proposer", "credit", params=CreditParams)
@needs(LIKELIEST)
def credit(step: MaskedStep) -> Tensor:
    """Takes the likeliest token of the fused distribution [b, T], which replaces that of the
    step."""
    params, judged = step.params, step.confidence_logprobs()
    credits = step.recall("credit", torch.zeros_like(judged))
    credits = credits.masked_fill(step.is_first_step[:, None, None], 0) * params.credit_decay
    top, ids = judged.max(-1, keepdim=True)
    gain = (top * params.credit_power).exp().masked_fill(~step.masked[..., None], 0)
    credits = credits.scatter_add(-1, ids, gain)
    step.memory["credit"] = credits

    def fuse(logprobs: Tensor) -> Tensor:
        return (logprobs + params.credit_weight * credits.log1p()).log_softmax(-1)

    raw = step.prediction and step.prediction.raw_logprobs
    if params.confidence_on == "raw":
        fused = fuse(judged)
        step.replace_logprobs(fuse(step.logprobs), lambda: fused)
    else:
        fused_raw = None if raw is None else lambda: fuse(raw())
        step.replace_logprobs(fuse(step.logprobs), fused_raw)
    return step.confidence_logprobs().argmax(-1)
