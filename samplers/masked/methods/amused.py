"""aMUSEd's way through MaskGIT's steps (Patil et al., arXiv 2401.01808), as diffusers'
``AmusedScheduler`` has it: the preset ``amused``.

It differs from ``maskgit`` in two details. The noise on confidences falls from t at the first step
to 0 at the last, t (1 - s / (S - 1)) at step s = 0, 1, ..., S - 1, where ``maskgit`` has t (1 - (s
+ 1) / S), with t = 2. And the share of masked places is reckoned in single precision: after two
thirds of the steps it falls just short of one half, so that one place fewer stays masked there,
where the number of places is even.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.registry import register
from gen.core.sampler import Preset
from gen.samplers.masked.parts.orders import noisy
from gen.samplers.masked.step import MaskedStep


@register("order", "annealed")
def annealed(step: MaskedStep) -> Tensor:
    """log p(x_i) of the proposed id, plus t (1 - s / (S - 1)) Gumbel noise with t =
    ``choice_temperature``."""
    steps = (step.steps_in_block + 1) / step.progress
    return noisy(step, (steps - 1 - step.steps_in_block).clamp_min(0) / (steps - 1).clamp_min(1))


@register("schedule", "cosine_single")
def cosine_single(r: Tensor, exponent: float) -> Tensor:
    """cos(pi r / 2) in single precision."""
    return torch.cos(r.float() * torch.pi / 2).clamp_min(0).double()


register("preset", "amused")(
    Preset(
        "amused",
        "masked_iterative",
        {"steps": 12, "order": "annealed", "schedule": "cosine_single", "choice_temperature": 2.0},
        about="aMUSEd: confidence order, noise that falls to nothing",
        paper="2401.01808",
    )
)
