"""Progress of a search that makes several runs one after the other."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.core.sampler import Callback, Sampler


class Progress:
    """Tells the callback of a search how far its runs are.

    Forward passes are counted over all runs, and every run is the same share of the whole. No
    position counts as decided, since the choice may fall on any candidate.

    Args:
        callback: callback of the search, or None.
        runs: runs there may be.
    """

    def __init__(self, callback: Callback | None, runs: int):
        self.callback, self.runs = callback, runs
        self.run, self.step, self.unit = -1, 0, 0
        self.tokens: Any = None  # of the newest candidate of each item, [N, T(, C)]

    def next(self, owners: np.ndarray) -> Callback | None:
        """Return the callback of the next run; None where nobody listens.

        Args:
            owners: item of each particle of the run, int64 [n]; the first run has all items.
        """
        self.run += 1
        if self.callback is None:
            return None
        items, first = np.unique(owners, return_index=True)

        def report(info: dict[str, Any]) -> None:
            self._report(info, torch.from_numpy(items), torch.from_numpy(first))

        return report

    def watch(self, sampler: Sampler, owners: np.ndarray) -> Any:
        """Return a sampler whose call is the next run; see ``next``."""
        return partial(sampler, callback=self.next(owners))

    def _report(self, info: dict[str, Any], items: Tensor, first: Tensor) -> None:
        """Call the callback with what a run has told of its particles."""
        device = info["tokens"].device
        rows = info["tokens"][first.to(device)]
        if self.tokens is None:
            self.tokens, self.unit = rows, info["total"]
        tokens = self.tokens.clone()  # the listener may have kept the last ones
        tokens[items.to(device)] = rows
        self.tokens = tokens
        self.step += 1
        share = info["done"] / max(1, info["total"])
        assert self.callback is not None, "nobody else is told"
        self.callback(
            {
                "step": self.step,
                "done": int(self.unit * (self.run + share)),
                "total": self.unit * self.runs,
                "tokens": tokens,
                "known": torch.zeros(tokens.shape[:2], dtype=torch.bool, device=device),
            }
        )
