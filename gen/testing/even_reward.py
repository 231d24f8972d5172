"""Reward of the searches among the specs of the contract tests."""

from __future__ import annotations

import numpy as np
import torch


class EvenEvaluator:
    """Evaluator of searches in the contract: the reward of a row is the share of its known ids that
    are even, or of its known latents whose mean is positive, whatever the scorer."""

    def scores(self, scorer, tokens, items, known=None) -> np.ndarray:
        good = tokens.mean(-1) > 0 if tokens.is_floating_point() else tokens % 2 == 0
        even = good.double()
        known = torch.ones_like(even) if known is None else known.double()
        return ((even * known).sum(1) / known.sum(1).clamp(min=1)).cpu().numpy()

    def answers(self, tokens, items) -> list[tuple[int, ...]]:
        ids = (tokens > 0).flatten(1) if tokens.is_floating_point() else tokens
        return [tuple(row) for row in ids.tolist()]
