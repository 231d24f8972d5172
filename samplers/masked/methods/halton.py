"""Halton scheduler: positions that are committed together lie far apart.

    order ``halton_rolled``  a low-discrepancy sequence over the grid, begun at another cell for
                             every item (``gen.samplers.masked.parts.orders``)
    schedule ``arccos``      floor(N (1 - arccos(r) / (pi / 2))) positions are known after a share r
                             of the steps, at least one more than before
    proposer ``sharpening``  draws from p ** k, normalised, with k rising in equal steps from
                             ``sharpness_start`` in the first of S steps to ``sharpness_end`` in the
                             last one: a temperature that falls to 1 / ``sharpness_end``

Reference: Besnier et al., "Halton Scheduler For Masked Generative Image Transformer" (arXiv
2503.17076). Roll and sharpness are those of their README, which takes 32 steps and guides with w =
2, that is ``guidance_scale`` 3.
Guarantee: approximate; with one position per forward pass and proposer ``categorical``, the model's
distribution in that order.
Parameters: ``steps``, ``order``, ``sharpness_start``, ``sharpness_end`` (both 1: ``categorical``).
Preset: ``halton``. It draws tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gen.core.method import SEQUENTIAL, Limit, method
from gen.core.params import Params, number
from gen.core.registry import register
from gen.samplers.masked.parts.proposers import categorical
from gen.samplers.masked.step import MaskedStep


@dataclass(frozen=True)
class SharpeningParams(Params):
    """``sharpness_start``, ``sharpness_end``: exponent of the probabilities in the first step and
    in the last one."""

    sharpness_start: float = number(1.0, least=1e-9)
    sharpness_end: float = number(1.2, least=1e-9)


@method(
    "halton",
    paper="2503.17076",
    title="Halton Scheduler For Masked Generative Image Transformer",
    about="Halton scheduler: low-discrepancy order. Published at 32 steps, guidance 3",
    params={
        "order": "halton_rolled",
        "schedule": "arccos",
        "proposer": "sharpening",
    },
    limit=Limit(
        SEQUENTIAL,
        {"schedule": "linear", "proposer": "categorical"},
        note="`schedule: linear`, `proposer: categorical`, as many `steps` as positions: then the"
        " model's distribution in that order",
    ),
)
@register("proposer", "sharpening", params=SharpeningParams)
def sharpening(step: MaskedStep) -> Tensor:
    """Draws a token from a distribution that sharpens from step to step: [b, T]."""
    start, end = step.params.sharpness_start, step.params.sharpness_end
    steps = (step.steps_in_block + 1) / step.progress
    share = step.steps_in_block / (steps - 1).clamp_min(1)
    exponent = (start + (end - start) * share)[:, None, None].to(step.logprobs)
    raw = step.prediction and step.prediction.raw_logprobs
    step.replace_logprobs((step.logprobs * exponent).log_softmax(-1), raw)
    return categorical(step)
