"""Distance acceptance: bins near the draft count as it.

    g(x) = p(x) + what the tokens within r of x have

It is for tokens that are ordered bins, such as those of actions.

Reference: Wang et al., "Spec-VLA" (arXiv 2507.22424).
Guarantee: r = 0 is exact. A step is never further from p than the draft was
(``gen.samplers.verifiers.relaxed.base`` has the proof).
Parameters: ``relaxation`` r, a whole number.
Preset: ``distance``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gen.core.method import Limit, method
from gen.core.registry import register
from gen.samplers.verifiers.relaxed.base import Relaxed, draft_logp


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

    def credit(self, tree, logp):
        reach, size = int(self.relaxation), logp.shape[-1]
        offset = torch.arange(1, reach + 1, device=logp.device)
        at = tree.tokens[..., None] + torch.cat([-offset, offset])
        mass = logp.gather(-1, at.clamp(0, size - 1)).exp()
        return torch.logaddexp(
            draft_logp(tree, logp), torch.where((at >= 0) & (at < size), mass, 0).sum(-1).log()
        )

    def excess(self, p, q):
        reach = int(self.relaxation)
        return torch.nn.functional.pad(p, (reach, reach)).unfold(-1, 2 * reach + 1, 1).sum(-1) - p
