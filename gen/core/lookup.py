"""Rows of a batch: entries of tensors looked up row by row, and how many rows a pass has."""

from __future__ import annotations

import torch
from torch import Tensor


def legal_at(legal: Tensor, positions: Tensor) -> Tensor:
    """Look ``legal`` bool [T, V] up at positions [B, L]: [B, L, V], a view where all rows of the
    table are one. A row that is over may stand behind the last position; it gets that one's."""
    if legal.stride(0) == 0:
        return legal[0].expand(*positions.shape, -1)
    return legal[positions.clamp_max(len(legal) - 1)]


def take(x: Tensor, index: Tensor) -> Tensor:
    """Take x [B, S, ...] at index [B, L] -> [B, L, ...]."""
    if len(x) == len(index) == 1:  # a copy of whole blocks
        return x.index_select(1, index[0])
    if x.ndim == 2 and len(x) == len(index):  # takes less time
        return x.gather(1, index)
    return x[torch.arange(len(x), device=x.device)[:, None], index]


def bucket(rows: int, room: int) -> int:
    """Return the rows that a pass of ``rows`` computes: all that there is room for, or a half, a
    quarter, ... of them."""
    while room // 2 >= rows:
        room //= 2
    return room
