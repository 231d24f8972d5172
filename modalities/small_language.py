"""Held-out conditions of the synthetic datasets: one tenth of every small language, decided by a
hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np


def held_out(condition: Any) -> bool:
    """Return whether a condition belongs to the tenth that training never sees."""
    return hashlib.sha256(str(condition).encode()).digest()[0] % 10 == 0


def draw_conditions(
    n: int, seed: int, draw: Callable[[np.random.Generator], Any], held: bool
) -> list[Any]:
    """Draw ``n`` conditions, all held out or none of them.

    Args:
        n: number of conditions.
        seed: seed of the generator.
        draw: one condition from a generator.
        held: keep held-out conditions; otherwise keep the others.
    """
    rng, out = np.random.default_rng(seed), []
    while len(out) < n:
        condition = draw(rng)
        if held_out(condition) == held:
            out.append(condition)
    return out
