"""PC-Sampler: rare tokens and early positions first.

    score   log min(p(x_i) r(x_i), 10) - l i

r(v) is minus the log of how often token v comes up (``TokenSpace.rarity``), l is
``position_decay``. What says little waits, however confident it is, and early positions come first.

Reference: "PC-Sampler: Position-Aware Calibration of Decoding Bias in Masked Diffusion Models"
(arXiv 2508.13021).
Guarantee: approximate.
Parameters: ``position_decay``.
Preset: ``pc``, without blocks; for models that say how rare their tokens are.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gen.core.errors import GenError
from gen.core.method import SEQUENTIAL, Limit, method
from gen.core.params import Params, number
from gen.core.registry import register
from gen.samplers.masked.parts.selection import greedy
from gen.samplers.masked.step import MaskedStep

# the paper's bound on p r, so that a very rare token does not outrun everything
BOUND = 10.0


@dataclass(frozen=True)
class PositionParams(Params):
    """``position_decay``: nats by which the score falls from one position to the next."""

    position_decay: float = number(0.0)


@method(
    "pc",
    paper="2508.13021",
    title="PC-Sampler: Position-Aware Calibration of Decoding Bias in Masked Diffusion Models",
    about="PC-Sampler: rare tokens and early positions first; no blocks; for models with token"
    " frequencies",
    params=greedy(selector="even", order="position", position_decay=0.25, steps=256),
    limit=Limit(SEQUENTIAL, note="as many `steps` as positions"),
)
@register("order", "position", params=PositionParams)
def position(step: MaskedStep) -> Tensor:
    """Scores positions by confidence, rarity and position. Raises ``GenError`` for a space that
    does not say how rare its tokens are."""
    rarity = step.space.rarity
    if rarity is None:
        raise GenError(
            "sampler.order is 'position', which needs the frequencies of token ids"
            " (TokenSpace.rarity); this model does not say; expected the option token_counts of a"
            " published text model, or another order, such as confidence"
        )
    table = step.constant("rarity", lambda: rarity).to(step.logp)
    surprise = step.confidence * table[step.proposed_tokens]
    return surprise.clamp(0, BOUND).log() - step.params.position_decay * step.positions
