"""Typical acceptance: drafts that the model itself finds likely pass.

    g(x) = q(x) if r p(x) > min(0.09, 0.3 exp(-H(p))) and that is more than p(x), else p(x)

The paper's rule is r = 1; H is the entropy.

Reference: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
Heads" (arXiv 2401.10774).
Guarantee: r = 0 is exact. A step is never further from p than the draft was
(``gen.samplers.verifiers.relaxed.base`` has the proof).
Parameters: ``relaxation`` r.
Preset: ``typical``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gen.core.method import Limit, method
from gen.core.registry import register
from gen.samplers.verifiers.relaxed.base import Relaxed, draft_logp


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

    def credit(self, tree, logp):
        log_p = draft_logp(tree, logp)
        typical = self.relaxation * log_p.exp() > self.threshold(logp.exp())
        return torch.where(typical, torch.maximum(log_p, tree.log_mass()), log_p)

    def threshold(self, p: Tensor) -> Tensor:
        """Probability above which a token is typical: [..., V] -> [...]."""
        entropy = torch.special.entr(p).sum(-1)
        return (self.delta * (-entropy).exp()).clamp_max(self.epsilon)

    def excess(self, p, q):
        return torch.where(
            self.relaxation * p > self.threshold(p)[..., None], (q - p).clamp_min(0), 0
        )
