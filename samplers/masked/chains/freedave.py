"""FreeDave: the tokens of static decoding, in fewer forward passes. The model drafts for itself and
verifies all drafts at once.

    static    S(x): the k masked positions with the highest score under p(. | x);  x_i = argmax log
              p_i(. | x) + G_i for i in S(x), G_i the noise of position i, one forward pass per step
    drafts    the same rule applied to p(. | x) for the steps after, as if the distribution stayed
    accept    as long as the distribution at the drafted canvas has the same positions next and the
              same tokens at them

Wu & Zhang, "Free Draft-and-Verification" (arXiv 2510.00294), who draft and verify at temperature 0,
one row at a time. Above it, noise of the step would make drafts and distributions that agree give
different tokens; noise of the position gives the same ones. Then the order must read marginals
alone: a token of high noise would otherwise come early and be taken for a likely one.

Guarantee: the tokens of ``num_drafts`` 1, which is static decoding, and never more forward passes.
With ``tokens_per_step`` 1 that is sequential decoding and has its distribution. More positions per
step are drawn independently of each other (guarantee ``approximate``), which loses the
distribution, with drafts as much as without. The distributions must be equal: half-precision matrix
products may differ with the size of the batch, and where two tokens or two positions are as good as
tied, so may the tokens.

Cost: ``num_drafts`` canvases per forward pass and row, the time of one where the device has room
for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gen.core.params import integer
from gen.core.registry import register
from gen.samplers.engine.draft import Draft
from gen.samplers.engine.step_context import StepContext
from gen.samplers.masked.chains.chain import ChainSampler
from gen.samplers.verifiers.base import num_accepted


@register("sampler", "freedave")
@dataclass(frozen=True)
class FreeDave(ChainSampler):
    """Return the tokens of one position per step, in fewer forward passes.

    Drafts of the coming steps are accepted while they are what the step itself would have given.

    Attributes:
        num_drafts: canvases per row and forward pass; 1 is the reference itself.
        order: confidence (or top), margin, entropy, random, halton or raster.
        confidence_on: raw or shaped.
        tokens_per_step: positions that the reference commits per forward pass.
    """

    tokens_per_step: int = integer(1, least=1)

    papers = ("2510.00294",)

    @property
    def guarantee(self) -> str:
        """Same tokens with one token per step, else approximate."""
        return "same_tokens" if self.tokens_per_step == 1 else "approximate"

    @property
    def width(self) -> int:
        """k, positions per step."""
        return self.tokens_per_step

    def draft(self, step: StepContext, logprobs: Tensor) -> Tensor:
        """Draw with the noise of the position; see ``ChainSampler.draft``."""
        return step.categorical(logprobs, "token", step.valid, shared=True)

    def judge(self, step: StepContext, drafts: Draft, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Accept drafts that are the tokens of static decoding."""
        tokens = step.categorical(logprobs, "token", step.valid, shared=True)
        same = (tokens == drafts.tokens) & step.valid
        steps = same.view(len(same), same.shape[1] // self.width, self.width)
        accepted = num_accepted(steps.all(-1))
        return accepted, accepted.new_full(accepted.shape, -1)
