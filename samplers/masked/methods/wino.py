"""WINO: wide in, and out again what its neighbours alone would not have said.

    selector ``wide_in``   c_i >= ``conf_threshold``, highest c first, at most 7/10 of the masked
                           positions of the block, but 5 to 20
    remasker ``wino``      committed positions of the block with l_i < ``remask_threshold``, lowest
                           first, at most one fewer than the step commits; l_i is the probability of
                           the token at i had position i been masked

The paper's shadow block puts the masked copies behind the sequence with attention of their own, in
which they see each other. Here each is a canvas of its own in the same batched forward pass, which
any masked model can do and which costs a canvas per committed position.

The bound is the paper's: a step gets on by at least one position. The released code bounds by the
step before instead, to one fewer than that one committed, and takes nothing back where this step
commits a single position. It need not get on.

Reference: "Wide-In, Narrow-Out: Revokable Decoding for Efficient and Effective DLLMs" (arXiv
2507.18578).
Guarantee: approximate.
Parameters: ``conf_threshold``, ``remask_threshold`` (0: nothing is masked again).
Preset: ``wino``, with blocks of 128; the paper has a ``conf_threshold`` per task
(``docs/masked.md``). ``steps`` is so large that the schedule never asks for more
than one position.
"""

from __future__ import annotations

from torch import Tensor

from gen.core.method import Limit, method
from gen.core.registry import register
from gen.samplers.masked.parts.selection import (
    PATIENT,
    RemaskThresholdParams,
    ThresholdParams,
    confident,
    fixed_blocks,
    greedy,
)
from gen.samplers.masked.step import LEFT_OUT_LOGP, MaskedStep, highest, lowest, needs

SHARE, LEAST, MOST = (7, 10), 5, 20  # positions that one step commits at most


@register("selector", "wide_in", params=ThresholdParams)
def wide_in(step: MaskedStep) -> Tensor:
    """Selects confident positions, up to a share of the masked ones."""
    count = step.eligible.sum(1)
    limit = (count * SHARE[0] // SHARE[1]).clamp(LEAST, MOST)
    return highest(step.confidence, confident(step), limit)


@method(
    "wino",
    paper="2507.18578",
    title="Wide-In, Narrow-Out: Revokable Decoding for Efficient and Effective DLLMs",
    about="WINO: commits many positions, remasks those that the other tokens do not confirm;"
    " blocks of 128. Published conf_threshold: 0.6 (GSM8K), 0.5 (ARC, Countdown), 0.7 (MATH,"
    " HumanEval, Sudoku), 0.8 (MBPP)",
    params=greedy(
        selector="wide_in",
        conf_threshold=0.6,
        remasker="wino",
        remask_threshold=0.9,
        **fixed_blocks(128),
        **PATIENT,
    ),
    limit=Limit("wino", {"remask_threshold": 0}, {"remasker": "none"}, "`remask_threshold: 0`"),
)
@register("remasker", "wino", params=RemaskThresholdParams)
@needs(LEFT_OUT_LOGP)
def wino(step: MaskedStep, count: Tensor) -> tuple[Tensor, Tensor]:
    """Masks tokens that the other tokens alone do not confirm."""
    doubtful = step.remaskable & (step.left_out_logp.exp() < step.params.remask_threshold)
    return lowest(step.left_out_logp, doubtful, count - 1), count
