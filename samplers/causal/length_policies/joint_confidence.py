"""Stop where a rejection among the drafts so far has become likely.

    stop after draft n where  1 - c_1 c_2 ... c_n > rejection_threshold,  n >= least_drafts

c_i estimates the probability that draft i is accepted if those before it are. The paper trains a
head of the draft model for it. Here it is a probability that the draft model has: of the draft, or
of its most probable token. Draft n itself is submitted.

Reference: Huang et al., "SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths"
(arXiv 2405.19715), whose code has a threshold of 0.3 and between 2 and 20 drafts.
Guarantee: that of the verifier.
Parameters: ``rejection_threshold`` (0: ``least_drafts`` drafts; 1: as many as there may be),
``confidence_of``, ``least_drafts``.
Preset: ``specdec_pp``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gen.core.method import method
from gen.core.params import Params, choice, integer, number
from gen.core.registry import register
from gen.samplers.causal.length_policies.base import LengthPolicy


@dataclass(frozen=True)
class JointConfidenceParams(Params):
    """Parameters of the policy.

    Attributes:
        rejection_threshold: probability of a rejection above which drafting ends.
        confidence_of: probability that stands for a draft's acceptance, that of the draft or of the
            most probable token.
        least_drafts: minimum number of drafts.
    """

    rejection_threshold: float = number(0.3, most=1)
    confidence_of: str = choice("draft", ("draft", "most_probable"))
    least_drafts: int = integer(2, least=1)


@method(
    "specdec_pp",
    sampler="speculative",
    about="SpecDec++: drafting stops where a rejection has become likely; probabilities of the"
    " draft model stand for the paper's trained head",
    paper="2405.19715",
    title="SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths",
    params={"policy": "joint_confidence", "num_speculative_tokens": 20},
)
@register("length_policy", "joint_confidence", params=JointConfidenceParams)
class JointConfidence(LengthPolicy):
    """Stop where the drafts so far are unlikely to be all accepted."""

    needs_probability = True
    stops_early = True

    def begin(self):
        self._log_kept: Tensor | None = None  # log of c_1 ... c_n, [b]
        self._count = 0

    def stop(self, mass, logprobs):
        of_draft = self.params.confidence_of == "draft"
        log_c = mass.log() if of_draft else logprobs.amax(-1)
        self._log_kept = log_c if self._log_kept is None else self._log_kept + log_c
        self._count += 1
        if self._count < self.params.least_drafts:
            return None
        return 1 - self._log_kept.exp() > self.params.rejection_threshold
