"""Up to ``num_speculative_tokens`` drafts, but none after a draft whose own probability q(x) is
below ``confidence_threshold``. The doubtful draft itself is submitted."""

from __future__ import annotations

from dataclasses import dataclass

from gen.core.params import Params, number
from gen.core.registry import register
from gen.samplers.causal.length_policies.base import LengthPolicy


@dataclass(frozen=True)
class ConfidenceParams(Params):
    """Parameters of the policy.

    Attributes:
        confidence_threshold: probability of a draft below which drafting ends.
    """

    confidence_threshold: float = number(0.4, most=1)


@register("length_policy", "confidence", params=ConfidenceParams)
class Confidence(LengthPolicy):
    """Stop after the first draft that the draft model itself finds unlikely."""

    needs_probability = True
    stops_early = True

    def stop(self, mass, logprobs):
        return mass < self.params.confidence_threshold
