"""Means to know on the host what can be known without waiting for the device.

A device works through what it was given while the host goes on. A host that asks for a value
(``bool(x.any())``, ``int(x.max())``, an index that is a bool tensor, whose length nobody knows)
waits until all of it is done, and then the device waits for the host. So the parts of a method
compute what a row may need for every row, at a position per row, and the loop asks once per round.
On a CPU asking costs nothing, and what no row needs is left out.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


def may_be_any(mask: Tensor) -> bool:
    """Ask without waiting whether ``mask`` is true somewhere; off the CPU it may be."""
    if not mask.is_cpu:
        return mask.numel() > 0
    return bool(np.count_nonzero(mask.numpy()))  # less time than ``any`` with few numbers


@lru_cache(maxsize=256)
def constant(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return numbers on a device, long [n], copied there once; nobody may write to them."""
    return torch.tensor(numbers, dtype=torch.long).to(device)


def to_device(x: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device, which may still be at work when it comes."""
    return torch.from_numpy(x).to(device, non_blocking=True)
