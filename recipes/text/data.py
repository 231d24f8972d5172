"""Training tasks of the text recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gen.modalities.small_language import held_out
from gen.modalities.text import tasks as text_tasks

# factors on the frequency of the harder ops
WEIGHTS = {
    "sort": 4,
    "reverse": 2,
    "insert at": 3,
    "remove at": 3,
    "replace at": 3,
    "add": 3,
    "close": 2,
}


def drawn(
    n: int,
    seed: int,
    only: Sequence[str] = text_tasks.OPS,
    weights: Mapping[str, int] = WEIGHTS,
) -> list[tuple[text_tasks.Task, tuple[str, ...]]]:
    """Draw ``n`` tasks, none of them held out, each with one of its right answers.

    Args:
        n: number of tasks.
        seed: seed of the generator.
        only: ops to draw from.
        weights: factors on the frequency of ops; 1 for those without.
    """
    rng, out = np.random.default_rng(seed), []
    ops = [op for op in only for _ in range(weights.get(op, 1))]
    while len(out) < n:
        task = text_tasks.random_task(rng, ops)
        if not held_out(task):
            out.append((task, text_tasks.draw_answer(task, rng)))
    return out
