"""Refusal of models that give no distribution where a token is drawn.

Logits that are NaN or infinite make no distribution (``gen.core.sampling_params``), and a draw
from it would be token 0 without a word. A loop learns of them with the one copy per step for which
the host waits anyway.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.core.distributions import has_no_distribution
from gen.core.errors import GenError


def failed_draws(drawn: Tensor, given: Tensor) -> Tensor:
    """Find the positions where a token, an id [b, L] or a latent [b, L, C], was drawn from no
    distribution: bool [b, L]. ``given``: log-probabilities [b, L, V] of ids; not read for
    latents."""
    return has_no_distribution(given) if drawn.ndim == 2 else ~drawn.isfinite().all(-1)


def first_failed(failed: Tensor) -> Tensor:
    """Find the first failed position of each row, bool [b, T] -> long [b]; -1 where there is
    none."""
    return torch.where(failed.any(1), failed.byte().argmax(1), -1)


def refuse_failed(target: Any, items: np.ndarray, position: np.ndarray) -> None:
    """Refuse positions without a distribution: the first of each row with an item, int64 [b] each;
    -1 where there is none. Raises ``GenError`` with the names of model, item and position."""
    if (position < 0).all():
        return
    row = int((position >= 0).argmax())
    where = f"model {target.name or type(target.model).__name__} gives no distribution for item"
    where += f" {items[row]} at position {position[row] + target.offset}"
    if target.space.channels:
        raise GenError(f"{where}: the latent is NaN or infinite there; expected finite numbers")
    guided = ", or -inf in both branches of guidance" if target.branches > 1 else ""
    names = target.sampling.looks_back
    banned = f" (or sampling.{' and '.join(names)} forbids all that are allowed)" if names else ""
    raise GenError(
        f"{where}: its logits there are NaN or +inf{guided}, or -inf for every token{banned};"
        " expected finite logits of at least one allowed token"
    )
