"""Exact speculation for masked models: drafts from older laws of the model itself, kept by the rule
of speculative decoding.

    order     S(x): the empty place with the highest score under p(. | x)
    drafts    y_1, y_2, ... ~ q at the places that q puts next; q = p(. | an earlier canvas)
    keep y_j  if S(x, y_<j) is its place, and then with probability min(1, p(y_j) / q(y_j)), p the
              law there given y_<j
    else      another place in turn: an id from p at that place. The same place: an id from norm((p
              - q)+)

That is any-subset speculative decoding (Guo & Ermon, arXiv 2504.20456; preset ``assd``) for models
that are not told an order: theirs is fixed beforehand and one call judges a whole chain, here every
prefix of the chain is a canvas of its own in one batched call, and the order may follow from the
law. Then a draft's place has to be asked about before its id is looked at. Keeping drafts at places
whose turn it is not is not sequential decoding in that order. At temperature 0 this is FreeDave
(``freedave``).

The id that ends a chain needs no call of its own: the next chain starts with it and is drafted from
the law that it came from.

Guarantee: the law of sequential decoding in the order, one place per step; ids of places that one
call fills are not independent, but distributed as the model has them. Calls: at most one per token.
``verifier``: ``token`` is the rule above, ``block`` judges the drafts of a chain together and keeps
more of them (see ``verifiers``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.errors import bad_value
from gen.core.registry import register, registry
from gen.core.sampler import Preset
from gen.samplers.masked.chains.chain import ChainSampler
from gen.samplers.verifiers.base import first_rejected, resample_rejected


@register("sampler", "exact_speculative")
@dataclass(frozen=True)
class ExactSpeculative(ChainSampler):
    """The law of one place per step in fewer calls: drafts from the law before, accepted or
    corrected one after the other.

    ``num_drafts``: canvases per row and call; 1 is sequential decoding. ``order``: confidence (or
    top), margin, entropy, random, halton or raster. ``confidence_on``: raw or shaped. ``verifier``:
    token or block.
    """

    verifier: str = "token"

    papers = ("2504.20456",)
    guarantee = "same_distribution"

    def __post_init__(self) -> None:
        super().__post_init__()
        if registry.get("verifier", self.verifier, "sampler.verifier").relaxed:
            exact = " or ".join(
                name for name, v in registry.table("verifier").items() if not v.relaxed
            )
            raise bad_value(
                "sampler.verifier", self.verifier, f"{exact}; relaxed ones would not keep the law"
            )

    def draft(self, step, logprobs):
        return step.categorical(logprobs, "draft", step.valid)

    def judge(self, step, drafts, logprobs) -> tuple[Tensor, Tensor]:
        accepted, residual = registry.get("verifier", self.verifier)().decide(
            step, drafts, step.valid, logprobs
        )
        rejected = first_rejected(step.valid, accepted)
        if not bool(rejected.any()):
            return accepted, torch.full_like(accepted, -1)
        ids = resample_rejected(step, drafts.tokens, rejected, residual(rejected))
        return accepted, torch.where(rejected, ids, -1).amax(1)


register("preset", "assd")(
    Preset(
        "assd",
        "exact_speculative",
        {"order": "random"},
        about="Any-subset speculative decoding: exact, in random order",
        paper="2504.20456",
    )
)
