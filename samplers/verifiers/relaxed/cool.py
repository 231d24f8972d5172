"""Cool-SD: acceptance raised by a factor that falls along the window.

    g(x) = (1 + r exp(-0.7 i)) p(x), i: the draft's position in the window

Reference: Cool-SD.
Guarantee: r = 0 is exact. With a draft that was not random a step is at most r off
(``gen.samplers.verifiers.relaxed.base`` has the proof).
Parameters: ``relaxation`` r.
Preset: ``cool``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gen.core.method import Limit, method
from gen.core.registry import register
from gen.samplers.verifiers.relaxed.base import Relaxed, draft_logp


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

    def credit(self, tree, logp):
        position = torch.arange(logp.shape[1], dtype=logp.dtype, device=logp.device)
        return draft_logp(tree, logp) + torch.log1p(
            self.relaxation * (-self.decay * position).exp()
        )

    def excess(self, p, q):
        return self.relaxation * p
