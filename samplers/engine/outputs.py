"""Outputs of a call: what every item has committed so far, and which items have finished.

For methods that learn from finished items (``scope: call``). Everything stays on the target's
device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from gen.models.targets.causal import CausalTarget
    from gen.samplers.engine.draft import Verdict
    from gen.samplers.engine.step_context import CausalStep

ITEM, CALL = "item", "call"  # what a method learns from: the item alone, or finished ones too
NONE = -1  # no token: it matches nothing and follows nothing


class Outputs:
    """Committed tokens of all items of a call.

    Attributes:
        tokens: committed tokens of every item, ``NONE`` behind them, long [N, T].
        active: items of the last step, int64 [b].
        left: items that have finished before the last step, in plan order, int64.
    """

    def __init__(self, target: CausalTarget):
        self.space = target.space
        self.tokens = torch.full((target.items, target.length), NONE, device=target.device)
        self.active: np.ndarray = np.zeros(0, dtype=np.int64)
        self.left: np.ndarray = self.active

    def begin(self, step: CausalStep) -> np.ndarray:
        """Find the items that have finished since the last step; return ``left``."""
        self.left = np.sort(np.setdiff1d(self.active, step.items))
        self.active = step.items
        return self.left

    def accept(self, step: CausalStep, verdict: Verdict) -> None:
        """Note what a step commits, up to the end of the row."""
        length, most = self.tokens.shape[1], verdict.tokens.shape[1]
        column = torch.arange(most, device=verdict.tokens.device)
        at = step.start[:, None] + column
        known = (column <= verdict.num_accepted[:, None]) & (at < length)
        if self.space.row_ends:
            is_end = self.space.is_end(verdict.tokens) & known
            known = known & (is_end.long().cumsum(1) - is_end.long() == 0)
        lines = F.pad(self.tokens[step.rows], (0, 1), value=NONE)
        lines.scatter_(1, torch.where(known, at, length), verdict.tokens)
        self.tokens[step.rows] = lines[:, :length]
