"""Relaxed verifiers whose credit g(x) is a formula of p, q and the position of a draft x.

cool          g(x) = (1 + r exp(-0.7 i)) p(x), i: the draft's position in the window. Cool-SD
distance      g(x) = p(x) + what the tokens within r of x have; for tokens that are ordered bins,
              such as those of actions. Wang et al., "Spec-VLA" (arXiv 2507.22424)
lexical_unit  g(x_i) = q(x_i) if q(x_j) > 1 - r for all j <= i and p(x_i) > 0, else p(x_i): a run of
              drafts that the drafter is sure of is committed as it is, and what follows is verified
              as by ``token``. Drafts that an initialiser made up are verified: no model was sure of
              them. In the paper one model drafts and commits and nothing verifies; here the target
              reads the run in its next forward pass and forbids what its filters leave out. Sun et
              al., "Lexical Unit Decoding" (arXiv 2405.15208)
typical       g(x) = q(x) if r p(x) > min(0.09, 0.3 exp(-H(p))) and that is more than p(x), else
              p(x); H is the entropy, and the paper's rule is r = 1. Cai et al., "Medusa" (arXiv
              2401.10774)

Guarantee: r = 0 is exact. A step is never further from p than the draft was; with ``cool`` and a
draft that was not random it is at most r off (``gen.samplers.verifiers.relaxed.base`` has the
proof).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.method import Limit, method
from gen.core.registry import register
from gen.samplers.verifiers.base import draft_logp
from gen.samplers.verifiers.relaxed.base import Relaxed


@method(
    "cool",
    sampler="relaxed_acceptance",
    about="Cool-SD: acceptance raised by a factor that falls along the window",
    params={"verifier": "cool", "init": "repeat"},
    limit=Limit("plain autoregression", {"relaxation": 0}),
)
@register("verifier", "cool")
@dataclass(frozen=True)
class Cool(Relaxed):
    """Credit a draft with a multiple of its probability. ``relaxation``: how much more the first
    draft of a window is credited with; later ones less and less."""

    relaxation: float = 6.0
    decay: ClassVar[float] = 0.7

    def credit(self, draft, logp):
        position = torch.arange(logp.shape[1], dtype=logp.dtype, device=logp.device)
        factor = self.relaxation * (-self.decay * position).exp()
        return draft_logp(draft, logp) + factor.log1p()

    def excess(self, p, q):
        return self.relaxation * p


@method(
    "distance",
    sampler="relaxed_acceptance",
    paper="2507.22424",
    title="Spec-VLA",
    about="distance acceptance: the probability of bins near the draft is added to the draft",
    params={"verifier": "distance", "init": "repeat"},
    limit=Limit("plain autoregression", {"relaxation": 0}),
)
@register("verifier", "distance")
@dataclass(frozen=True)
class Distance(Relaxed):
    """Credit a draft with the probability of the bins around it. ``relaxation``: distance, in bins,
    up to which a token counts as the draft. The paper's 9 is for 256 bins."""

    relaxation: float = 1
    whole = True

    def credit(self, draft, logp):
        reach, size = int(self.relaxation), logp.shape[-1]
        offset = torch.arange(1, reach + 1, device=logp.device)
        at = draft.tokens[..., None] + torch.cat([-offset, offset])
        mass = logp.gather(-1, at.clamp(0, size - 1)).exp()
        around = torch.where((at >= 0) & (at < size), mass, 0).sum(-1)
        return torch.logaddexp(draft_logp(draft, logp), around.log())

    def excess(self, p, q):
        reach = int(self.relaxation)
        return F.pad(p, (reach, reach)).unfold(-1, 2 * reach + 1, 1).sum(-1) - p


@method(
    "lexical_units",
    sampler="relaxed_acceptance",
    paper="2405.15208",
    title="Decoding at the Speed of Thought: Harnessing Parallel Decoding of Lexical Units",
    about="lexical units: a run of drafts above a probability is committed without verification",
    params={"verifier": "lexical_unit", "drafter": "model"},
    limit=Limit("plain autoregression", {"relaxation": 0}),
)
@register("verifier", "lexical_unit")
@dataclass(frozen=True)
class LexicalUnit(Relaxed):
    """Accept a run of drafts that the drafter is sure of. ``relaxation``: 1 minus the probability
    that a draft has to exceed."""

    relaxation: float = 0.1
    most: ClassVar[float] = 1.0

    def credit(self, draft, logp):
        log_p, log_q = draft_logp(draft, logp), draft.log_mass()
        if not self.relaxation or draft.logq is None:  # chosen drafts have no probability
            return log_p
        sure = log_q.exp() > 1 - self.relaxation
        sure = sure if draft.guessed is None else sure & ~draft.guessed
        run = sure.long().cumprod(1).bool() & (log_p > -torch.inf)
        return torch.where(run, torch.maximum(log_p, log_q), log_p)

    def excess(self, p, q):
        return torch.where(q > 1 - self.relaxation, (q - p).clamp_min(0), 0)


@method(
    "typical",
    sampler="relaxed_acceptance",
    paper="2401.10774",
    title="Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
    about="typical acceptance: drafts of typical probability are accepted",
    params={"verifier": "typical", "init": "repeat"},
    limit=Limit("plain autoregression", {"relaxation": 0}),
)
@register("verifier", "typical")
@dataclass(frozen=True)
class Typical(Relaxed):
    """Accept drafts that are typical of p. ``relaxation``: how many times less likely than
    Medusa's rule asks for they may be."""

    relaxation: float = 8.0
    epsilon: ClassVar[float] = 0.09
    delta: ClassVar[float] = 0.3

    def credit(self, draft, logp):
        log_p = draft_logp(draft, logp)
        typical = self.relaxation * log_p.exp() > self.threshold(logp.exp())
        return torch.where(typical, torch.maximum(log_p, draft.log_mass()), log_p)

    def threshold(self, p: Tensor) -> Tensor:
        """Probability above which a token is typical: [..., V] -> [...]."""
        entropy = torch.special.entr(p).sum(-1)
        return (self.delta * (-entropy).exp()).clamp_max(self.epsilon)

    def excess(self, p, q):
        typical = self.relaxation * p > self.threshold(p)[..., None]
        return torch.where(typical, (q - p).clamp_min(0), 0)
