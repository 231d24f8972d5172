"""Masks that are added to the scores of attention."""

from __future__ import annotations

import torch
from torch import Tensor


def hide(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Make a mask to add to scores: the smallest number where ``hidden`` (bool), 0 elsewhere."""
    return hidden.to(dtype) * torch.finfo(dtype).min
