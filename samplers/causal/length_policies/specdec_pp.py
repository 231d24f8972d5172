"""Stop where a trained head expects a rejection among the drafts so far.

    stop after draft n where  1 - c_1 c_2 ... c_n > rejection_threshold,  n >= least_drafts
    c_i = sigmoid(head(h_i, log q_i(x_i), H(q_i)))

h_i is the draft model's last hidden state that q_i was made of, so a draft needs no further forward
pass to be judged. The head is residual blocks x + SiLU(W x) and a linear layer. It is trained by
``gen.recipes.acceptance_head`` to predict min(1, p(x_i) / q_i(x_i)), the probability that draft i
is accepted once those before it are. The paper's head reads the hidden state that has read the
draft.

Whether draft n + 1 is drawn depends on the first n alone, and draft n itself is submitted however
doubtful it is: the distribution stays that of the verifier.

Reference: Huang et al., "SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths"
(arXiv 2405.19715). The preset ``specdec_pp`` has the policy ``joint_confidence``, which needs no
training.
Guarantee: that of the verifier.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gen.core.errors import bad_value
from gen.core.params import Params, integer, number, text
from gen.core.registry import register, registry
from gen.models.draft_heads.predictors import acceptance_inputs
from gen.samplers.causal.length_policies.policies import JointConfidence

RECIPE = "python -m gen.recipes.acceptance_head MODALITY --out FOLDER"


@dataclass(frozen=True)
class AcceptanceHeadParams(Params):
    """Parameters of the policy.

    Attributes:
        acceptance_head: folder of a trained head.
        rejection_threshold: probability of a rejection above which drafting ends.
        least_drafts: minimum number of drafts.
    """

    acceptance_head: str = text("", "a folder with a trained head")
    rejection_threshold: float = number(0.3, most=1)
    least_drafts: int = integer(2, least=1)


@register("length_policy", "acceptance_head", params=AcceptanceHeadParams)
class AcceptanceHead(JointConfidence):
    """Stop where a trained head expects a rejection among the drafts so far."""

    needs_weights = True

    def attach(self, target, draft):
        folder = self.params.acceptance_head
        if not folder:
            expected = f"a folder that `{RECIPE}` writes"
            raise bad_value("sampler.acceptance_head", folder, expected)
        self.net, self.layer = registry.get("drafting", "acceptance_head")(folder, target, draft)
        draft.require_hidden_states((self.layer,), "sampler.policy acceptance_head")

    def read(self, states):
        self._hidden = states[self.layer][:, -1]

    @torch.no_grad()
    def log_chance(self, mass, logprobs):
        return F.logsigmoid(self.net(acceptance_inputs(self._hidden, mass, logprobs)))
