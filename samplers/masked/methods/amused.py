"""aMUSEd: MaskGIT with noise that falls to nothing, as diffusers' ``AmusedScheduler`` has it.

    order ``annealed``           log p(x_i) + t (1 - s / (S - 1)) Gumbel at step s = 0, 1, ..., S -
                                 1, with t = ``choice_temperature``; ``maskgit`` has t (1 - (s + 1)
                                 / S)
    schedule ``cosine_single``   cos(pi r / 2) in single precision. After two thirds of the steps it
                                 falls just short of one half, so that one position fewer stays
                                 masked there, where the number of positions is even

Reference: Patil et al., "aMUSEd: An open MUSE reproduction" (arXiv 2401.01808).
Guarantee: approximate.
Parameters: ``choice_temperature``, ``steps``.
Preset: ``amused``, with t = 2. It draws tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.method import SEQUENTIAL, Limit, method
from gen.core.registry import register
from gen.samplers.masked.parts.orders import NoiseParams, noisy
from gen.samplers.masked.step import MaskedStep


@method(
    "amused",
    paper="2401.01808",
    title="aMUSEd: An open MUSE reproduction",
    about="aMUSEd: confidence order with noise that decays to zero",
    params={
        "steps": 12,
        "order": "annealed",
        "schedule": "cosine_single",
        "choice_temperature": 2.0,
    },
    limit=Limit(
        SEQUENTIAL, {"schedule": "linear"}, note="`schedule: linear`, as many `steps` as positions"
    ),
)
@register("order", "annealed", params=NoiseParams)
def annealed(step: MaskedStep) -> Tensor:
    """Scores positions by log p(x_i), plus noise that is zero in the last step."""
    steps = (step.steps_in_block + 1) / step.progress
    return noisy(step, (steps - 1 - step.steps_in_block).clamp_min(0) / (steps - 1).clamp_min(1))


@register("schedule", "cosine_single")
def cosine_single(r: Tensor, exponent: float) -> Tensor:
    """Falls as cos(pi r / 2), in single precision."""
    return torch.cos(r.float() * torch.pi / 2).clamp_min(0).double()
