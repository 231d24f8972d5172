"""ReMDM: committed positions are masked and made again.

    remasker ``remdm``       in the last eighth of the block's steps, or its last step but one, the
                             ``remask_count`` committed positions of the block with the lowest b,
                             and as many more are committed. As written for LLaDA
    remasker ``remdm_cap``   each committed position of the block with probability s =
                             min(``remask_rate``, (1 - a') / a), a and a' being the shares of the
                             block that are known before and after the step, and as many more are
                             committed. The rule ``cap``

b_i is the probability of the token at position i when it was committed. ReMDM for LLaDA inserts
forward passes of its own, which commit as many positions as they mask; here every forward pass gets
on, and more of them take more ``steps``. ``remdm_cap`` draws how many are masked and keeps the
schedule's count, where the paper draws both.

Reference: Wang et al., "Remasking Discrete Diffusion Models with Inference-Time Scaling" (arXiv
2503.00307).
Guarantee: approximate.
Parameters: ``remask_count`` (0: ``llada``), ``remask_rate`` (0: nothing is masked again).
Preset: ``remdm``, with blocks of 32.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gen.core.method import Limit, method
from gen.core.params import Params, integer, number
from gen.core.registry import register
from gen.samplers.masked.parts.selection import fixed_blocks, greedy, recommit
from gen.samplers.masked.step import MaskedStep, lowest


@dataclass(frozen=True)
class RemdmParams(Params):
    """``remask_count``: positions that one step remasks."""

    remask_count: int = integer(1)


@dataclass(frozen=True)
class RemdmCapParams(Params):
    """``remask_rate``: largest probability that a step remasks a position."""

    remask_rate: float = number(0.1, most=1.0)


@method(
    "remdm",
    paper="2503.00307",
    title="Remasking Discrete Diffusion Models with Inference-Time Scaling",
    about="ReMDM for LLaDA: remasks the least likely positions late in a block",
    params=greedy(selector="even", remasker="remdm", remask_count=4, steps=128, **fixed_blocks()),
    limit=Limit("llada", {"remask_count": 0}),
)
@register("remasker", "remdm", params=RemdmParams)
def remdm(step: MaskedStep, count: Tensor) -> tuple[Tensor, Tensor]:
    """Masks, late in a block, the positions that were the least likely when committed."""
    # the block has (steps_in_block + 1) / progress steps
    next_progress = step.progress * (step.steps_in_block + 2) / (step.steps_in_block + 1)
    late = (8 * step.progress >= 7) | (next_progress >= 1 - 1e-9)
    spare = (step.eligible.sum(1) - count).clamp_max(step.params.remask_count)
    return recommit(
        step, lowest(step.committed_logp, step.remaskable & late[:, None], spare), count
    )


@register("remasker", "remdm_cap", params=RemdmCapParams)
def remdm_cap(step: MaskedStep, count: Tensor) -> tuple[Tensor, Tensor]:
    """Masks any position, with a probability that the schedule bounds."""
    left = step.eligible.sum(1) - count
    num_committed = step.remaskable.sum(1).clamp_min(1)
    chance = (left.double() / num_committed).clamp_max(step.params.remask_rate)
    drawn = step.rng.uniform(step.rows, step.positions, "remask", step.step_index)
    return recommit(step, lowest(drawn, step.remaskable & (drawn < chance[:, None]), left), count)
