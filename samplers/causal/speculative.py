"""Speculative decoding: a small model drafts a few tokens, the target judges them in one forward
pass. Any other registered drafter may draft instead of the small model (``drafter``).

The draft model draws x_i ~ q_i(. | x_<i), i = 1 .. k, from its own final distribution; the target
gives all p_i at once, and a ``verifier`` keeps the beginning of the chain and adds one token (see
``verifiers`` and ``drafting``). How long the chains are is up to a ``policy`` (see
``length_policies``).

Leviathan, Kalman & Matias, "Fast Inference from Transformers via Speculative Decoding" (arXiv
2211.17192); Chen et al. (arXiv 2302.01318); Sun et al., "Block Verification Accelerates Speculative
Decoding" (arXiv 2403.10444).

Guarantee: the tokens are distributed as the target's, whatever the draft model, its temperature and
guidance, the length of the chains and the batch. At temperature 0 they are the argmax tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from gen.core.errors import bad_value
from gen.core.registry import register, registry
from gen.samplers.causal.drafters.base import DraftSource
from gen.samplers.causal.drafters.model import ModelDrafted
from gen.samplers.engine.causal_loop import decode_causal


@register("sampler", "speculative")
@dataclass(frozen=True)
class Speculative(ModelDrafted):
    """A small model drafts, the target judges several drafts per forward pass.

    ``draft_model``: a model's name; None for the modality's own. ``num_speculative_tokens``: drafts
    per round. ``policy``: constant, heuristic or confidence. ``confidence_threshold``: of the
    policy confidence. ``draft_temperature``, ``draft_guidance``: of the distribution that drafts
    are drawn from; None is what the target has. ``verifier``: token or block. ``drafter``: model,
    or another registered one, which may need no draft model.
    """

    verifier: str = "token"
    drafter: str = "model"

    papers = ("2211.17192", "2302.01318", "2403.10444")
    reference = "plain autoregression"
    guarantee = "same_distribution"

    def __post_init__(self) -> None:
        super().__post_init__()
        if registry.get("verifier", self.verifier, "sampler.verifier").relaxed:
            exact = " or ".join(
                name for name, v in registry.table("verifier").items() if not v.relaxed
            )
            raise bad_value(
                "sampler.verifier",
                self.verifier,
                f"{exact}; relaxed ones belong to the sampler relaxed_acceptance",
            )

        lacking = [name for name in self._source().params if name not in self.__dataclass_fields__]
        if lacking:
            raise bad_value(
                "sampler.drafter",
                self.drafter,
                f"one that does not read {', '.join(lacking)}; speculative has no such parameters,"
                " speculative_jacobi and relaxed_acceptance have",
            )

    def _source(self) -> type[DraftSource]:
        return registry.get("drafter", self.drafter, "sampler.drafter")

    @property
    def drafted(self) -> bool:
        return self._source().needs_draft_model

    @property
    def timed(self) -> bool:
        return self._source().is_timed(self)

    def __call__(self, target, rng, *, draft=None, canvas=None, trace=False, callback=None):
        verifier = registry.get("verifier", self.verifier)().on(target.space, target.device)
        drafter = self._source().make(self, target, draft, verifier)
        return decode_causal(target, rng, drafter, trace=trace, callback=callback)
