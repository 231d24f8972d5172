"""One of a few lengths, by a moving average of the drafts that were accepted.

    a <- (1 - w) a + w n             n: drafts of the row that were accepted in a round
    up a tier    while a > k - 0.5                     k: drafts of the tier
    down a tier  while a <= k' - 0.5 - 0.25            k': drafts of the tier below

The first ``length_warmup`` rounds keep the first tier; then every ``length_interval``-th round
chooses anew. The quarter keeps a row from going back and forth. The first tier is the largest of
at most ``num_speculative_tokens`` drafts.

The adaptive speculation of SGLang, which has one average for the batch. Here every row has its own,
so that a row's drafts do not depend on the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gen.core.errors import bad_value
from gen.core.params import Params, integer, number, text
from gen.core.registry import register
from gen.samplers.causal.length_policies.base import LengthPolicy
from gen.samplers.engine.rows import RowState

HALF, DOWN = 0.5, 0.25


@dataclass(frozen=True)
class AcceptanceAverageParams(Params):
    """Parameters of the policy.

    Attributes:
        length_tiers: drafts of a round to choose from, upwards, joined by commas.
        acceptance_weight: weight of the newest round in the average.
        length_warmup: rounds that keep the first tier.
        length_interval: rounds from one choice to the next.
    """

    length_tiers: str = text("1,3,7", "numbers of drafts, upwards, such as '1,3,7'")
    acceptance_weight: float = number(0.2, most=1)
    length_warmup: int = integer(10)
    length_interval: int = integer(5, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tiers()

    def tiers(self) -> list[int]:
        """Return the numbers of drafts."""
        parts = self.length_tiers.split(",")
        known = [int(x) for x in parts if x.strip().isdigit()]
        upwards = all(a < b for a, b in pairwise(known))
        if len(known) < len(parts) or not upwards or known[0] < 1:
            expected = "numbers of drafts, upwards and at least 1, such as '1,3,7'"
            raise bad_value("sampler.length_tiers", self.length_tiers, expected)
        return known


@register("length_policy", "acceptance_average", params=AcceptanceAverageParams)
class AcceptanceAverage(LengthPolicy):
    """Length that follows a moving average of what was accepted, row by row."""

    average = RowState(start=lambda policy: policy.length - 1.0)  # [b]
    rounds = RowState(start=0)  # int64 [b]

    def __init__(self, rows, length, params):
        tiers = params.tiers()
        first = max([k for k in tiers if k <= length], default=tiers[0])
        super().__init__(rows, first, params)
        self.tiers = np.array(tiers)
        self.average, self.rounds = np.full(rows, first - 1.0), np.zeros(rows, dtype=np.int64)

    def observe(self, drafted, accepted):
        weight, params, tiers = self.params.acceptance_weight, self.params, self.tiers
        # a round without drafts says nothing
        new = (1 - weight) * self.average + weight * accepted
        self.average = np.where(drafted > 0, new, self.average)
        self.rounds = self.rounds + (drafted > 0)
        late = self.rounds - params.length_warmup
        due = (late > 0) & (late % params.length_interval == 0) & (drafted > 0)
        at = np.searchsorted(tiers, self.lengths)
        for _ in tiers:
            down = (at > 0) & (self.average <= tiers[np.maximum(at - 1, 0)] - HALF - DOWN)
            at = at - (due & down)
        for _ in tiers:
            up = (at < len(tiers) - 1) & (self.average > tiers[at] - HALF)
            at = at + (due & up)
        self.lengths = tiers[at]
