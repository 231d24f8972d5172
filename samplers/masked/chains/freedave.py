"""FreeDave: the tokens of static decoding, in fewer forward calls. The model drafts for itself and
is asked again about all drafts at once.

    static    S(x): the k empty places with the highest score under p(. | x);  x_i = argmax log
              p_i(. | x) + G_i for i in S(x), G_i the noise of place i, one call per step
    drafts    the same rule applied to p(. | x) for the steps after, as if the law stayed what it is
    keep      as long as the law at the drafted canvas has the same places in turn and the same ids
              at them

Wu & Zhang, "Free Draft-and-Verification" (arXiv 2510.00294), who draft and verify at temperature 0,
one row at a time. Above it, noise of the step would make drafts and laws that agree give different
ids; noise of the place gives the same ones. That the order looks at marginals alone is then needed:
an id of high noise would otherwise come early and be taken for a likely one.

Guarantee: what ``num_drafts`` 1 gives, which is static decoding, token for token, and never in more
calls; with ``tokens_per_step`` 1, that is sequential decoding, whose law it has. More places per
step are drawn independently of each other (exactness ``none``), which loses the law, with drafts as
much as without. What must be equal is the law: half-precision matrix products may differ with the
size of the batch, and where two ids or two places are as good as tied, so may the tokens.

Cost: ``num_drafts`` canvases per call and row, one call in time where the device has room for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gen.core.registry import register
from gen.samplers.masked.chains.chain import ChainSampler, at_least_one
from gen.samplers.verifiers.base import num_accepted


@register("sampler", "freedave")
@dataclass(frozen=True)
class FreeDave(ChainSampler):
    """The tokens of one place per step in fewer calls: drafts of the coming steps, kept while they
    are what the step itself would have given.

    ``num_drafts``: canvases per row and call; 1 is the reference itself. ``order``: confidence (or
    top), margin, entropy, random, halton or raster. ``confidence_on``: raw or shaped.
    ``tokens_per_step``: places that the reference commits per call.
    """

    tokens_per_step: int = 1

    papers = ("2510.00294",)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one("tokens_per_step", self.tokens_per_step)

    @property
    def guarantee(self) -> str:
        return "same_tokens" if self.tokens_per_step == 1 else "approximate"

    @property
    def width(self) -> int:
        return self.tokens_per_step

    def draft(self, step, logprobs):
        return step.categorical(logprobs, "token", step.valid, shared=True)

    def judge(self, step, drafts, logprobs) -> tuple[Tensor, Tensor]:
        same = (
            step.categorical(logprobs, "token", step.valid, shared=True) == drafts.tokens
        ) & step.valid
        accepted = num_accepted(
            same.view(len(same), same.shape[1] // self.width, self.width).all(-1)
        )
        return accepted, accepted.new_full(accepted.shape, -1)
