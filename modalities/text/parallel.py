"""Exact cost of committing several positions at once, on text tasks whose answers have a known
distribution.

A is the uniform distribution over a task's right answers, p_t its marginal at position t, given the
earlier commits. If positions are committed in groups g = 1, 2, ..., independently within a group,
an answer comes out right with probability

    accuracy = sum over y in A of prod_g prod_{t in g} p_t(y_t | y of the groups before)

since a right answer was consistent at every step. In one forward pass, for lists of n different
items:

    copy, reverse, sort, "at" ops, sums, brackets   1
    replace   (1 - 1/n)^(n - 1)                     -> 1/e
    remove    (n - 1)! 2^(n - 1) / n^(n - 1)        n - 1 positions
    insert    n! 2^n / (n + 1)^(n + 1)              n + 1 positions
    shuffle   sum_k C(n, k) (a - b)^k b^(n - k) (n - k)!  -  a^n,  a = ((n - 1)! - 1) / (n! - 1), b
              = (n - 1)! / (n! - 1)

The values for replace, remove and insert are those of ParallelBench's setting (Kang et al., arXiv
2510.04767) with one position per item. Its shuffle formula is n! / n^n, which counts the original
order as right. Here, as in its metric, that order is wrong, so an item stands at its original
position with a slightly lower probability a than at any other, b. The bound behind all of them is
the total correlation: the sum of the positions' entropies less the entropy of the whole, in nats
(``total_correlation``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from gen.contracts.oracle import Board, measure
from gen.core.errors import bad_value
from gen.core.resolve import resolve_sampler
from gen.core.rng import item_key
from gen.core.sampler import Sampler
from gen.core.sampling_params import SamplingParams
from gen.modalities.text.oracle import Oracle
from gen.modalities.text.tasks import OPS, RANDOM, Task, answers, check, random_task

SIZES = {"add": 3}  # items of the measured tasks; lists and brackets have ``SIZE``
SIZE = 6
# ops with one answer are measured on this factor fewer tasks, since nothing is drawn in them
EASY = 8

# --- By counting


def grouped_accuracy(task: Task, groups: Sequence[Sequence[int]]) -> float:
    """Accuracy of a sampler that commits these groups of positions one after the other.

    Args:
        task: the task.
        groups: positions of every group.

    Raises:
        GenError: not every position of the longest answer is in exactly one group.
    """
    oracle = Oracle([task])
    if sorted(chain.from_iterable(groups)) != list(range(oracle.length)):
        raise bad_value("groups", groups, f"positions 0 to {oracle.length - 1}, each in one group")
    right = oracle.tables[0]
    canvas, chance = (
        torch.full_like(right, oracle.mask_token_id),
        torch.zeros(len(right), dtype=torch.float64),
    )
    condition = torch.zeros(len(right), 1, dtype=torch.long)
    for group in map(list, groups):
        logprobs = oracle.forward(torch.cat([condition, canvas], 1), oracle.length)
        chance += logprobs.gather(-1, right[..., None])[:, group, 0].sum(1)
        canvas[:, group] = right[:, group]
    return float(chance.exp().sum())


def one_step_accuracy(task: Task) -> float:
    """Accuracy of one forward pass for all positions."""
    return _known_figures(Oracle([task]))[0]["one_step"]


def total_correlation(task: Task) -> float:
    """Sum of the entropies of the positions less that of the answer: nats lost by drawing them
    independently.
    """
    return _known_figures(Oracle([task]))[0]["total_correlation"]


# --- In closed form


def closed_accuracy(op: str, n: int) -> float:
    """``one_step_accuracy`` for n items, in closed form.

    Raises:
        GenError: the op is unknown, or n is below 2.
    """
    _known(op, n)
    match op:
        case "replace":
            return (1 - 1 / n) ** (n - 1)
        case "remove":
            return math.factorial(n - 1) * 2 ** (n - 1) / n ** (n - 1)
        case "insert":
            return math.factorial(n) * 2**n / (n + 1) ** (n + 1)
        case "shuffle":
            return shuffle_accuracy(n, [n])
    return 1.0


def closed_correlation(op: str, n: int) -> float:
    """``total_correlation`` for n items, in closed form. Raises as ``closed_accuracy``."""
    _known(op, n)
    match op:
        case "replace":
            return n * _entropy(1 / n, 1 - 1 / n) - math.log(n)
        case "remove":
            return sum(_entropy(i / n, 1 - i / n) for i in range(1, n)) - math.log(n)
        case "insert":
            return sum(
                _entropy(1 / (n + 1), i / (n + 1), (n - i) / (n + 1)) for i in range(n + 1)
            ) - math.log(n + 1)
        case "shuffle":
            original, other = _shares(n)
            return n * _entropy(original, *[other] * (n - 1)) - math.log(math.factorial(n) - 1)
    return 0.0


def shuffle_accuracy(n: int, counts: Sequence[int]) -> float:
    """Accuracy of a shuffle of n items with these commits per forward pass, in an order that does
    not depend on the drawn items.

    As long as every drawn item is at its original position, the next are drawn from the orders of
    the m remaining items except the original one. After the first deviation they are drawn from all
    orders, which gives right answers with probability prod m! / ((m - k)! m^k).

    Raises:
        GenError: the counts do not sum to n.
    """
    _known("shuffle", n)
    if sum(counts) != n or min(counts) < 1:
        raise bad_value("counts", list(counts), f"numbers of at least 1 that sum to {n}")
    # right with a deviation so far; identical to the original so far
    done, same, left = 0.0, 1.0, n
    for k in counts:
        done *= math.perm(left, k) / left**k
        if left > 1:
            original, other = _shares(left)
            different = sum(
                math.comb(k, j)
                * (original - other) ** j
                * other ** (k - j)
                * math.perm(left - j, k - j)
                for j in range(k + 1)
            )
            done, same = done + same * (different - original**k), same * original**k
        left -= k
    return done


def _shares(n: int) -> tuple[float, float]:
    """Probabilities, in all orders of n items except the original, that an item stands at its
    original position, and at any other.
    """
    total = math.factorial(n) - 1
    return (math.factorial(n - 1) - 1) / total, math.factorial(n - 1) / total


def _entropy(*p: float) -> float:
    return -sum(x * math.log(x) for x in p if x > 0)


def _known(op: str, n: int) -> None:
    if op not in OPS:
        raise bad_value("op", op, f"one of {', '.join(OPS)}")
    if n < 2:
        raise bad_value("n", n, "at least 2")


# --- By sampling


def board(tasks: Sequence[Task], seeds: Iterable[int]) -> Board:
    """Build a board with one row per task and seed. The tasks' interpreter decides which answers
    are right.
    """
    oracle, rows = Oracle(tasks), [(task, seed) for seed in seeds for task in tasks]
    asked = [task for task, _ in rows]

    def right(tokens):
        return [
            check(task, oracle.text(ids)).passed
            for task, ids in zip(asked, tokens.tolist(), strict=True)
        ]

    known = dict(zip(oracle.tasks, _known_figures(oracle), strict=True))
    mine = {
        op: [known[t] for t in tasks if t.op == op] for op in dict.fromkeys(t.op for t in tasks)
    }
    exact = {
        op: {name: float(np.mean([figures[name] for figures in some])) for name in some[0]}
        for op, some in mine.items()
    }
    return Board(
        [t.op for t in asked],
        [item_key(str(t), s) for t, s in rows],
        lambda sampling: oracle.target(asked, sampling),
        right,
        exact,
    )


def _known_figures(oracle: Oracle) -> list[dict[str, float]]:
    """Per task: its one-step accuracy, its total correlation, its positions."""
    blank = torch.full((len(oracle.tasks), oracle.length), oracle.mask_token_id)
    distributions = oracle.forward(
        torch.cat([torch.arange(len(blank))[:, None], blank], 1), oracle.length
    )
    figures = []
    for logprobs, table in zip(distributions, oracle.tables, strict=True):
        one_step = float(logprobs.gather(1, table.T).sum(0).exp().sum())
        lost = float(torch.special.entr(logprobs.exp()).sum()) - math.log(len(table))
        figures.append(
            {"one_step": one_step, "total_correlation": lost, "positions": oracle.length}
        )
    return figures


def accuracy(
    spec: str | Mapping[str, Any] | Sampler,
    tasks: Sequence[Task],
    seeds: Iterable[int],
    sampling: Mapping[str, Any] | SamplingParams | None = None,
) -> tuple[float, float]:
    """Accuracy of a sampler, and its forward passes per answer.

    The tasks share a canvas that the longest of their answers fills. Raises as ``resolve_sampler``
    and the sampler do.

    Args:
        spec: sampler, as ``gen.core.resolve.resolve_sampler`` takes it.
        tasks: tasks to answer.
        seeds: seeds per task.
        sampling: sampling parameters.
    """
    points = measure(board(tasks, seeds), *resolve_sampler(spec, sampling)).values()
    rows = sum(p.rows for p in points)
    return sum(p.right for p in points) / rows, sum(p.nfe * p.rows for p in points) / rows


def accuracy_curve(
    spec: str | Mapping[str, Any],
    tasks: Sequence[Task],
    seeds: Iterable[int],
    param: str,
    values: Iterable[Any],
    sampling: Mapping[str, Any] | SamplingParams | None = None,
) -> list[tuple[float, float]]:
    """``accuracy`` for each value of a sampler's parameter."""
    given, seeds = {"name": spec} if isinstance(spec, str) else dict(spec), list(seeds)
    return [accuracy({**given, param: value}, tasks, seeds, sampling) for value in values]


def oracle_boards(prompts: int, repeats: int, seed: int) -> list[Board]:
    """Boards of ``gen bench --oracle``, one per number of positions.

    Args:
        prompts: tasks of every op with six items (three to add); fewer for ops with one answer.
        repeats: rows per task.
        seed: seed of the tasks.
    """
    rng = np.random.default_rng(seed)
    by_length: dict[int, list[Task]] = {}
    for op in OPS:
        for _ in range(prompts if op in RANDOM else max(1, prompts // EASY)):
            task = random_task(rng, [op], [SIZES.get(op, SIZE)])
            by_length.setdefault(max(map(len, answers(task))), []).append(task)
    return [board(tasks, range(seed, seed + repeats)) for _, tasks in sorted(by_length.items())]
