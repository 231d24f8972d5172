"""Lexical units: a run of drafts that the drafter is sure of is committed as it is.

    g(x_i) = q(x_i) if q(x_j) > 1 - r for all j <= i and p(x_i) > 0, else p(x_i)

The run ends at the first draft of a smaller probability; it and what follows are verified as by the
verifier ``token``. Only drafts that were drawn from a distribution have a probability: those that
an initialiser made up are verified. In the paper one model drafts and commits and nothing verifies;
here the target reads the run in its next forward pass and forbids what its filters leave out.

Reference: Sun et al., "Lexical Unit Decoding" (arXiv 2405.15208).
Guarantee: r = 0 is exact. A step is never further from p than the draft was
(``gen.samplers.verifiers.relaxed.base`` has the proof).
Parameters: ``relaxation`` r, at most 1.
Preset: ``lexical_units``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gen.core.method import Limit, method
from gen.core.registry import register
from gen.samplers.engine.tree import Tree
from gen.samplers.verifiers.relaxed.base import Relaxed, draft_logp


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

    def credit(self, tree, logp):
        log_p, log_q = draft_logp(tree, logp), tree.log_mass()
        run = self.sure(tree).long().cumprod(1).bool() & (log_p > -torch.inf)
        return torch.where(run, torch.maximum(log_p, log_q), log_p)

    def sure(self, tree: Tree) -> Tensor:
        """Find the drafts above the probability, bool [b, L]."""
        if not self.relaxation or tree.logq is None:
            return torch.zeros_like(tree.tokens, dtype=torch.bool)
        sure = tree.log_mass().exp() > 1 - self.relaxation
        return sure if tree.guessed is None else sure & ~tree.guessed

    def excess(self, p, q):
        return torch.where(q > 1 - self.relaxation, (q - p).clamp_min(0), 0)
