"""Exact speculation for masked models: drafts from the model's own earlier distributions, verified
by the rule of speculative decoding.

    order      S(x): the masked position with the highest score under p(. | x)
    drafts     y_1, y_2, ... ~ q at the positions that q orders next; q = p(. | an earlier canvas)
    accept y_j if S(x, y_<j) is its position, and then with probability min(1, p(y_j) / q(y_j)), p
               the distribution there given y_<j
    else       another position is next: a token from p at that position. The same position: a
               recovered token from norm((p - q)+)

That is any-subset speculative decoding (Guo & Ermon, arXiv 2504.20456; preset ``assd``) for models
that are not told an order. There the order is fixed beforehand and one forward pass judges a whole
chain; here every prefix of the chain is a canvas of its own in one batched forward pass, and the
order may follow from the distribution. Then a draft's position has to be checked before its token
is looked at. Keeping drafts at positions that are not next would not be sequential decoding in that
order. At temperature 0 this is FreeDave (``freedave``).

The token that ends a chain needs no forward pass of its own: the next chain begins with it and is
drafted from the distribution that it came from.

Guarantee: the distribution of sequential decoding in the order, one position per step. Tokens that
one forward pass commits are not independent of each other, but distributed as the model has them.
Forward passes: at most one per token. ``verifier``: ``token`` is the rule above, ``block`` judges
the drafts of a chain together and accepts more of them (``gen.samplers.verifiers.base``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.method import Preset
from gen.core.params import Rule, part
from gen.core.registry import register, registry
from gen.samplers.engine.draft import Draft
from gen.samplers.engine.step_context import StepContext
from gen.samplers.masked.chains.chain import ChainSampler
from gen.samplers.verifiers.base import recovered


@register("sampler", "exact_speculative")
@dataclass(frozen=True)
class ExactSpeculative(ChainSampler):
    """Sample from the distribution of one position per step, in fewer forward passes.

    Drafts from an earlier distribution are accepted or corrected one after the other.

    Attributes:
        num_drafts: canvases per row and forward pass; 1 is sequential decoding.
        order: confidence (or top), margin, entropy, random, halton or raster.
        confidence_on: raw or shaped.
        verifier: token or block.
    """

    verifier: str = part("token", "verifier")

    papers = ("2504.20456",)
    guarantee = "same_distribution"

    rules = (
        Rule(
            "verifier",
            lambda s: not s.parts.verifier.relaxed,
            "{verifier?}; relaxed ones would not keep the distribution",
        ),
    )

    def draft(self, step: StepContext, logprobs: Tensor) -> Tensor:
        """Draw with random numbers of the step; see ``ChainSampler.draft``."""
        return step.categorical(logprobs, "draft", step.valid)

    def judge(self, step: StepContext, drafts: Draft, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Accept drafts by the verifier, and draw a recovered token after them."""
        rule = registry.get("verifier", self.verifier)()
        accepted, residual = rule.decide(step, drafts, logprobs)
        rejected = accepted < step.valid.sum(1)
        if not bool(rejected.any()):
            return accepted, torch.full_like(accepted, -1)
        column = accepted.clamp_max(step.valid.shape[1] - 1)
        tokens = recovered(step, column, rejected, residual())[:, 0]
        return accepted, torch.where(rejected, tokens, -1)


register("preset", "assd")(
    Preset(
        "assd",
        "exact_speculative",
        {"order": "random"},
        about="Any-subset speculative decoding: exact, in random order",
        paper="2504.20456",
    )
)
