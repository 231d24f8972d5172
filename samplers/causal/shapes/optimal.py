"""Static tree that is best for measured acceptance rates by rank.

With a_r the probability that the child of rank r is accepted, the expected number of accepted nodes
of the best tree of m nodes and depth l is

    V(m, l) = 1 + max over m_1 + m_2 + ... = m - 1 of sum over r of a_r V(m_r, l - 1)

by dynamic programming over the ranks. Chen et al., "Sequoia: Scalable, Robust, and Hardware-aware
Speculative Decoding" (arXiv 2402.12374).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

from gen.core.errors import bad_value
from gen.core.method import Limit, method
from gen.core.params import text
from gen.core.registry import register
from gen.samplers.causal.shapes.base import Shape
from gen.samplers.causal.shapes.best_first import BudgetParams
from gen.samplers.engine.tree import WITHOUT_REPLACEMENT, TreeBuilder
from gen.samplers.engine.window import AUTO

Levels = tuple[tuple[tuple[int, ...], ...], ...]
MOST_NODES = 128  # the time to plan grows with its square


@dataclass(frozen=True)
class OptimalParams(BudgetParams):
    """Parameters of the static tree.

    Attributes:
        acceptance_by_rank: probability that the child of each rank is accepted, joined by commas.
    """

    acceptance_by_rank: str = text("0.6,0.15,0.07,0.04,0.02", "numbers such as '0.6,0.2,0.1'")

    def rates(self) -> tuple[float, ...]:
        """Return the acceptance rate of each rank."""
        try:
            rates = tuple(float(x) for x in self.acceptance_by_rank.split(","))
        except ValueError:
            rates = ()
        if not rates or not all(0 < x < 1 for x in rates) or sum(rates) > 1:
            raise bad_value(
                "sampler.acceptance_by_rank",
                self.acceptance_by_rank,
                "numbers between 0 and 1 whose sum is at most 1, such as '0.6,0.2,0.1'",
            )
        return rates

    def check_chosen(self, param: str, part: str) -> None:
        self.rates()
        if self.nodes != AUTO and int(self.nodes) > MOST_NODES:
            raise bad_value("sampler.nodes", self.nodes, f"1 to {MOST_NODES} with {param} {part}")


@method(
    "sequoia",
    sampler="speculative",
    about="Sequoia: the static tree that is best for given acceptance rates by rank",
    paper="2402.12374",
    title="Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding",
    params={"shape": "optimal", "draws": WITHOUT_REPLACEMENT, "verifier": "recursive"},
    limit=Limit(
        "rsd_c",
        {"acceptance_by_rank": "0.9", "nodes": 3, "tree_depth": 3},
        {"branching": "1-1-1"},
    ),
    example={"nodes": 6, "tree_depth": 3},
)
@register("shape", "optimal", params=OptimalParams)
class Optimal(Shape):
    """The static tree that accepts most for given acceptance rates by rank."""

    has_budget = True

    @property
    def nodes(self) -> int:
        return sum(len(rank) for level in self._plan() for rank in level)

    @property
    def depth(self) -> int:
        return self.params.tree_depth

    def _plan(self) -> Levels:
        return plan(self.params.rates(), self.params.nodes, self.params.tree_depth)

    def grow(self, builder: TreeBuilder) -> None:
        for level in self._plan():
            builder.expand()
            for parents in level:
                builder.add(builder.columns(parents))


@lru_cache(maxsize=64)
def plan(rates: tuple[float, ...], nodes: int, depth: int) -> Levels:
    """Plan the best tree.

    Args:
        rates: acceptance rate of each rank.
        nodes: drafts.
        depth: drafts of a path at most.

    Returns:
        For every level and rank, the columns of the nodes that have a child of that rank; -1 is
        the root, and children are numbered in this order.
    """

    @cache
    def best(size: int, depth: int, rank: int) -> tuple[float, int]:
        """Expected accepted nodes of ``size`` drafts below a node from a rank on, and how many of
        them the child of that rank has, itself counted."""
        if size == 0 or depth == 0 or rank == len(rates):
            return 0.0, 0
        options = (
            (
                rates[rank] * (1 + best(first - 1, depth - 1, 0)[0])
                + best(size - first, depth, rank + 1)[0],
                first,
            )
            for first in range(1, size + 1)
        )
        return max(options)

    levels: list[tuple[tuple[int, ...], ...]] = []
    level, drafts = [(nodes, depth, -1)], 0  # drafts below each node, their depth, its column
    while level:
        by_rank: list[list[tuple[int, int, int]]] = [[] for _ in rates]
        for size, left, column in level:
            for rank in range(len(rates)):
                first = best(size, left, rank)[1]
                if not first:
                    break
                by_rank[rank].append((column, first - 1, left - 1))
                size -= first
        below, groups = [], []
        for group in filter(None, by_rank):
            groups.append(tuple(column for column, _, _ in group))
            for _, size, left in group:
                below.append((size, left, drafts))
                drafts += 1
        if groups:
            levels.append(tuple(groups))
        level = below
    return tuple(levels)
