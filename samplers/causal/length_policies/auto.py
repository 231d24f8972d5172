"""As many drafts as make the time per token least (``gen.samplers.engine.window``)."""

from __future__ import annotations

import numpy as np

from gen.samplers.causal.length_policies.base import LengthPolicy
from gen.samplers.engine.window import AutoWidth


class AutoLength(LengthPolicy):
    """Draft length one below the positions of a step, of which ``auto`` knows how many pay; none at
    all if drafting does not."""

    def __init__(self, auto: AutoWidth, rows: int):
        super().__init__(rows, auto.width - 1)
        self.auto = auto

    def over(self, width, starts, tokens):
        self.auto.observe(width, starts, tokens)
        if self.auto.width - 1 != self.length:
            self.length = self.auto.width - 1
            self.lengths = np.full_like(self.lengths, self.length)

    @property
    def most(self):
        return self.length
