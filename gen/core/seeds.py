"""Seeds of items: sample j of a prompt has the seed ``seed + j``."""

from __future__ import annotations


def sample_seeds(used: dict[str, int], condition: str, count: int, seed: int) -> range:
    """Return the seeds of ``count`` samples of a condition.

    Args:
        used: how many seeds each condition has had in this call. A condition that comes again goes
            on with fresh seeds; its entry is updated.
        condition: canonical prompt.
        count: number of samples.
        seed: first seed of a condition.
    """
    first = used.get(condition, 0)
    used[condition] = first + count
    return range(seed + first, seed + first + count)
