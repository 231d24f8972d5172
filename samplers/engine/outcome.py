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


def copy_to_host(
    accepted: Tensor,
    drafted: Tensor,
    tokens: Tensor,
    failed: Tensor,
    draft_failed: Tensor | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray, np.ndarray | None]:
    """Copy the outcome of a step in one transfer: the only time that a step waits for the device.

    Args:
        accepted: accepted drafts, long [b].
        drafted: drafts that there were, bool [b, L].
        tokens: tokens of the verdict, [b, W(, C)].
        failed: columns without a distribution, bool [b, W].
        draft_failed: drafts without one, bool [b, L]; None without a draft model.

    Returns:
        The same on the host, in this order; of latents no tokens.
    """
    ids = tokens if tokens.ndim == 2 else None
    if failed.device.type == "cpu":
        return (
            accepted.numpy(),
            drafted.numpy(),
            None if ids is None else ids.numpy(),
            failed.numpy(),
            None if draft_failed is None else draft_failed.numpy(),
        )
    columns = {"accepted": accepted[:, None], "drafted": drafted, "failed": failed}
    if ids is not None:
        columns["ids"] = ids
    if draft_failed is not None:
        columns["draft_failed"] = draft_failed
    joined = torch.cat([x.long() for x in columns.values()], 1).cpu().numpy()
    ends = np.cumsum([x.shape[1] for x in columns.values()])[:-1]
    found = dict(zip(columns, np.split(joined, ends, axis=1), strict=True))
    return (
        found["accepted"][:, 0],
        found["drafted"].astype(bool),
        found.get("ids"),
        found["failed"].astype(bool),
        found["draft_failed"].astype(bool) if draft_failed is not None else None,
    )
