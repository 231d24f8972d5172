"""Two drafts more after a round in which all were accepted, one fewer after any other; from 1 to 4
times ``num_speculative_tokens``. The rule of transformers' assisted generation."""

from __future__ import annotations

import numpy as np

from gen.core.registry import register
from gen.samplers.causal.length_policies.base import LengthPolicy


@register("length_policy", "heuristic")
class Heuristic(LengthPolicy):
    """Number of drafts that follows what was accepted, row by row."""

    def observe(self, drafted, accepted):
        self.lengths = (self.lengths + np.where(accepted == drafted, 2, -1)).clip(
            1, 4 * self.length
        )
