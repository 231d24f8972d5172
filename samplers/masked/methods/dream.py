"""Dream: about the same number of positions in every step, least entropy first.

    selector ``dream``   floor(m (1 - t_s+1 / t_s)) positions in step s = 0, 1, ..., S - 1, of the m
                         that are masked, and all of them in the last step; the times t_s fall in
                         equal steps from t_0 = 1 to t_S = ``last_time``

The order is ``entropy``, without blocks; the authors' other orders are ``confidence`` and
``margin``. With as many steps as positions or more, the authors' first forward pass commits nothing
and their last one two positions; here each commits at least one, as the loop demands. Equal numbers
of positions are ``selector: schedule`` with ``schedule: linear``.

Reference: Ye et al., "Dream 7B: Diffusion Large Language Models" (arXiv 2508.15487), who draw at
temperature 0.2 and top-p 0.95. The times are those of their code.
Guarantee: approximate.
Parameters: ``steps`` (as many as positions: one position per forward pass), ``last_time``.
Preset: ``dream``. It draws tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.method import SEQUENTIAL, Limit, method
from gen.core.params import Params, number
from gen.core.registry import register
from gen.samplers.masked.parts.selection import GREEDY
from gen.samplers.masked.step import COUNTED, MaskedStep, highest, needs


@dataclass(frozen=True)
class DreamParams(Params):
    """``last_time``: time after the last step, from 0 to 1; the first step begins at 1."""

    last_time: float = number(1e-3, most=1.0)


@method(
    "dream",
    paper="2508.15487",
    title="Dream 7B: Diffusion Large Language Models",
    about="Dream: about equal numbers of positions per step, lowest entropy first; no blocks."
    " Published at temperature 0.2, top-p 0.95",
    params=GREEDY
    | {
        "selector": "dream",
        "order": "entropy",
        "steps": 512,
        "proposer": "categorical",
        "confidence_on": "shaped",
    },
    aliases={"eps": "last_time"},
    limit=Limit(SEQUENTIAL, note="as many `steps` as positions"),
)
@register("selector", "dream", params=DreamParams)
@needs(COUNTED)
def dream(step: MaskedStep) -> Tensor:
    """Selects a number of positions set by the time between two steps, highest score first."""
    steps, done = (step.steps_in_block + 1) / step.progress, step.steps_in_block
    fall = (1 - step.params.last_time) / steps
    # 1 - t_s+1 / t_s; the last step has no rule of its own
    share = fall / (1 - fall * done).clamp_min(1e-12)
    num_masked = (step.masked & step.open).sum(1)
    count = (num_masked * share + 1e-9).floor().long()
    return highest(step.score, step.eligible, torch.where(step.is_last_step, num_masked, count))
