"""KLASS: confident positions whose distribution no longer moves.

    committed   positions i with c_i >= ``conf_threshold``, and KL(p_i now || p_i one step before) <
                ``kl_threshold`` in each of the last ``history`` steps; nothing in a block's first
                ``history`` - 1 steps

The distribution of the step before is remembered across blocks, while the steps without a stable
position are counted anew in every block, both as in the authors' code. Where nothing is stable,
they commit the schedule's count; here the loop commits one position.

Reference: Kim et al., "KLASS: KL-Guided Fast Inference in Masked Diffusion Models" (arXiv
2511.05664).
Guarantee: approximate.
Parameters: ``conf_threshold``, ``kl_threshold`` (0: one position per forward pass), ``history``.
Preset: ``klass``, with blocks of 64. The paper has thresholds per task (``docs/masked.md``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.method import SEQUENTIAL, Limit, method
from gen.core.params import integer, number
from gen.core.registry import register
from gen.samplers.masked.parts.selection import ThresholdParams, confident, fixed_blocks, greedy
from gen.samplers.masked.step import MaskedStep


@dataclass(frozen=True)
class KlassParams(ThresholdParams):
    """``kl_threshold``: largest KL divergence of a stable position between two steps, in nats.
    ``history``: number of steps for which it must hold."""

    kl_threshold: float = number(0.01)
    history: int = integer(2, least=1)


@method(
    "klass",
    paper="2511.05664",
    title="KLASS: KL-Guided Fast Inference in Masked Diffusion Models",
    about="KLASS: confident positions whose distribution has become stable; blocks of 64. Published"
    " conf_threshold and kl_threshold: LLaDA 0.6 and 0.015 (GSM8K), 0.6 and 0.01 (MATH), 0.9 and"
    " 0.01 (HumanEval); Dream 0.9 and 0.001",
    params=greedy(
        selector="klass", conf_threshold=0.9, kl_threshold=0.01, history=2, **fixed_blocks(64)
    ),
    limit=Limit(SEQUENTIAL, {"kl_threshold": 0}),
)
@register("selector", "klass", params=KlassParams)
def klass(step: MaskedStep) -> Tensor:
    """Selects positions that are confident and stable."""
    logprobs = step.confidence_logprobs()
    # in the first step nothing is close to what came before
    before = step.recall("klass_logprobs", torch.full_like(logprobs, -torch.inf))
    p = logprobs.double().exp()
    moved = torch.where(p > 0, p * (logprobs.double() - before.double()), 0).sum(-1).clamp_min(0)
    count = step.recall("klass_stable", torch.zeros_like(step.canvas))
    stable = torch.where(
        step.fresh, torch.where(moved < step.params.kl_threshold, count + 1, 0), count
    )
    step.memory.update(
        klass_logprobs=torch.where(step.fresh[..., None], logprobs, before), klass_stable=stable
    )
    has_history = step.steps_in_block >= step.params.history - 1
    return confident(step) & (stable >= step.params.history) & has_history[:, None]
