"""Distributions as log-probabilities: their dtype, how many numbers are worked on at a time, and
what marks logits that make none."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# Numbers of the distribution that are worked on at a time: temporaries are as large as that. Keyed
# by "the logits are on a CPU".
LOGITS_CHUNK = {True: 1 << 15, False: 1 << 22}


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of log-probabilities: float64 for float64 logits, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def has_no_distribution(logprobs: Tensor) -> Tensor:
    """Find the positions whose logits make no distribution: [..., V] -> bool [...].

    Args:
        logprobs: log-probabilities as ``SamplingParams`` makes them.
    """
    if logprobs.is_cpu and logprobs.ndim > 1:  # a few numbers, for which numpy takes less time
        return torch.from_numpy(np.isnan(logprobs.numpy()[..., 0]))
    return logprobs[..., 0].isnan()
