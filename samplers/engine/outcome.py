"""Outcome of a step of the causal loop, as the host knows it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass
class Outcome:
    """Outcome of a step as the host knows it.

    Attributes:
        num_accepted: accepted drafts, int64 [b].
        drafted: drafts that there were, bool [b, L].
        token_ids: tokens of the verdict, int64 [b, W]; None for latents.
        num_drafted: drafts of each row, int64 [b].
        num_committed: tokens to commit, int64 [b].
        num_columns: columns that are a row's own, int64 [b]; those behind fill the window up to
            that of other rows.
        failed: columns without a distribution, bool [b, W].
        draft_failed: drafts without one, bool [b, L]; None without a draft model.
        ended: rows that commit the eos token or are stopped, bool [b]; None without eos tokens.
    """

    num_accepted: np.ndarray
    drafted: np.ndarray
    token_ids: np.ndarray | None
    num_drafted: np.ndarray
    num_committed: np.ndarray
    num_columns: np.ndarray
    failed: np.ndarray
    draft_failed: np.ndarray | None = None
    ended: np.ndarray | None = None


@dataclass
class Columns:
    """What the host reads of a step, of which each is [b, n].

    Attributes:
        counts: accepted drafts, or tokens to commit, long [b, 1].
        drafted: drafts that there were, bool [b, L].
        failed: columns without a distribution, bool [b, W].
        token_ids: tokens of the verdict, long [b, W]; None for latents.
        draft_failed: drafts without a distribution, bool [b, L]; None without a draft model.
    """

    counts: Tensor
    drafted: Tensor
    failed: Tensor
    token_ids: Tensor | None
    draft_failed: Tensor | None

    def joined(self) -> Tensor:
        """Join all columns, long [b, n], so that they are copied at once."""
        return torch.cat([x.long() for x in vars(self).values() if x is not None], 1)

    def to_host(self, joined: Tensor | None = None) -> dict[str, np.ndarray | None]:
        """Copy them to the host: the only time that a step waits for the device. ``joined``: what
        the method of that name returned; None to join them."""
        known = {name: x for name, x in vars(self).items() if x is not None}
        if self.counts.is_cpu and joined is None:
            found = {name: x.numpy() for name, x in known.items()}
        else:
            joined = self.joined() if joined is None else joined
            ends = np.cumsum([x.shape[1] for x in known.values()])[:-1]
            parts = np.split(joined.cpu().numpy(), ends, axis=1)
            types = {torch.bool: np.bool_, torch.long: np.int64}
            found = {
                name: part.astype(types[x.dtype], copy=False)
                for (name, x), part in zip(known.items(), parts, strict=True)
            }
        return {name: found.get(name) for name in vars(self)}
