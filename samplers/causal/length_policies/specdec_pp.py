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
Parameters: ``acceptance_head``, ``rejection_threshold``, ``least_drafts``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gen.core.errors import GenError, bad_value
from gen.core.params import Params, integer, number, text
from gen.core.registry import register
from gen.models.load.locate import readable
from gen.models.targets.causal import CausalTarget
from gen.models.targets.identity import target_digest
from gen.models.targets.trained_drafters import DrafterFacts, read_drafter
from gen.samplers.causal.length_policies.base import LengthPolicy

KIND = "acceptance_head"
LEAST = -20.0  # log q that stands for everything below
RECIPE = "python -m gen.recipes.acceptance_head MODALITY --out FOLDER"


class AcceptanceNet(nn.Module):
    """Network of the head.

    Args:
        width: channels D of the draft model's hidden states.
        blocks: residual blocks.
    """

    def __init__(self, width: int, blocks: int = 2):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width + 2, width + 2) for _ in range(blocks))
        self.out = nn.Linear(width + 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [...] of inputs [..., D + 2] (``inputs_of``)."""
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.out(x)[..., 0]


def inputs_of(hidden: Tensor, mass: Tensor, logq: Tensor) -> Tensor:
    """Join the inputs of a head.

    Args:
        hidden: hidden states that the drafts' distributions come from, [..., D].
        mass: q(x) of the drafts, [...].
        logq: log-probabilities, [..., V].

    Returns:
        float32 [..., D + 2].
    """
    log_mass = mass.float().log().clamp_min(LEAST)
    entropy = torch.special.entr(logq.float().exp()).sum(-1)
    return torch.cat([hidden.float(), log_mass[..., None], entropy[..., None]], -1)


def acceptance_label(logp: Tensor, logq: Tensor, ids: Tensor) -> Tensor:
    """Compute min(1, p(x) / q(x)) of tokens.

    Args:
        logp: log-probabilities of the target, [..., V].
        logq: log-probabilities that the tokens were drawn from, [..., V].
        ids: the tokens, long [...].

    Returns:
        [...].
    """
    log_p, log_q = (x.gather(-1, ids[..., None])[..., 0] for x in (logp, logq))
    return (log_p - log_q).clamp_max(0).exp()


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
class AcceptanceHead(LengthPolicy):
    """Stop where a trained head expects a rejection among the drafts so far."""

    needs_probability = True
    stops_early = True
    needs_weights = True

    def attach(self, target, draft):
        folder = self.params.acceptance_head
        if not folder:
            expected = f"a folder that `{RECIPE}` writes"
            raise bad_value("sampler.acceptance_head", folder, expected)
        self.net, self.layer = read_head(folder, target, draft)
        draft.require_hidden_states((self.layer,), "sampler.policy acceptance_head")

    def begin(self):
        self._log_kept: Tensor | None = None  # log of c_1 ... c_n, [b]
        self._count = 0

    def read(self, states):
        self._hidden = states[self.layer][:, -1]

    @torch.no_grad()
    def stop(self, mass, logprobs):
        log_c = F.logsigmoid(self.net(inputs_of(self._hidden, mass, logprobs)))
        self._log_kept = log_c if self._log_kept is None else self._log_kept + log_c
        self._count += 1
        if self._count < self.params.least_drafts:
            return None
        return -torch.expm1(self._log_kept) > self.params.rejection_threshold


def facts_of(target: CausalTarget, draft: CausalTarget, layer: str, blocks: int) -> DrafterFacts:
    """State the facts of a head."""
    net = {"draft": target_digest(draft), "blocks": blocks}
    return DrafterFacts.of(KIND, target, (layer,), net)


def read_head(folder: str, target: CausalTarget, draft: Any) -> tuple[AcceptanceNet, str]:
    """Read a head of a target and its draft model.

    Returns:
        The network, and the layer of the draft model that it reads.

    Raises:
        GenError: there is no such head, it is of other models or another distribution, or it cannot
            be read.
    """
    facts, weights = read_drafter(folder, KIND, target, "sampler.acceptance_head")
    here = target_digest(draft)
    if facts.net.get("draft") != here:
        raise GenError(
            f"head {folder} reads a draft model with weights {facts.net.get('draft')}; expected"
            f" {here} ({draft.name or 'the draft model'})"
        )
    with readable("head", folder):
        width = weights["out.weight"].shape[1] - 2
        net = AcceptanceNet(width, int(facts.net["blocks"])).to(draft.device)
        net.load_state_dict({name: x.float() for name, x in weights.items()})
    return net.eval().requires_grad_(False), facts.layers[0]
