"""When a time may be printed: the rule of every table with times.

Repeats of a measurement are noise if there are fewer than three, or if the upper quartile of what
they took is more than 15 % above the lower one. What differs between repeats for a reason that is
counted, the number of forward passes, is divided out before. A ratio is the median of the ratios of
each repeat, whose two measurements were made one shortly after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

REPEATS = 3
STEADY = 1.15


def noise(values: Sequence[float]) -> str | None:
    """Return why the median of positive values says nothing; None where it does."""
    if len(values) < REPEATS:
        return f"{len(values)} of {REPEATS} repeats that a time needs"
    low, high = np.quantile(values, (0.25, 0.75))
    if high > STEADY * low:
        return f"the middle half of the repeats differs by {high / low - 1:.0%}"
    return None
