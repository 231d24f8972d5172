"""Static trees: which nodes of a level get children is known before anything is drafted.

chain       drafts that follow each other
branching   every node of a level has the same number of children; "3-2-1": three children of the
            root, two of each of them, one of each of those. Without replacement this is RSD-C of
            Jeon et al., "Recursive Speculative Decoding" (arXiv 2402.14160), which draws the
            children of a node by Gumbel-top-k. With the most probable tokens and one random one it
            is the tree of Hu et al., "Towards Optimal Multi-draft Speculative Decoding" (arXiv
            2502.18779)
optimal     the tree that is best for measured acceptance rates by rank. With a_r the probability
            that the child of rank r is accepted, the expected number of accepted nodes of the best
            tree of m nodes and depth l is

                V(m, l) = 1 + max over m_1 + m_2 + ... = m - 1 of sum over r of a_r V(m_r, l - 1)

            by dynamic programming over the ranks. Chen et al., "Sequoia: Scalable, Robust, and
            Hardware-aware Speculative Decoding" (arXiv 2402.12374)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

from gen.core.errors import bad_value
from gen.core.method import Limit, method
from gen.core.params import Params, text
from gen.core.registry import register
from gen.samplers.causal.shapes.base import MOST_NODES, Shape
from gen.samplers.causal.shapes.best_first import BudgetParams
from gen.samplers.causal.shapes.builder import TreeBuilder
from gen.samplers.engine.draft import TOP_AND_RANDOM, WITHOUT_REPLACEMENT
from gen.samplers.engine.window import AUTO

# for every level its turns, and for every turn the columns of the nodes that get a child in it: -1
# is the root, and children are numbered in this order
Levels = tuple[tuple[tuple[int, ...], ...], ...]
MOST_PLANNED = 128  # drafts; the time to plan grows with its square


class Static(Shape):
    """Tree whose nodes are known beforehand."""

    def levels(self) -> Levels:
        """Return the columns of the nodes that get children."""
        raise NotImplementedError

    @property
    def nodes(self) -> int:
        return sum(len(turn) for level in self.levels() for turn in level)

    @property
    def depth(self) -> int:
        return len(self.levels())

    def grow(self, builder: TreeBuilder) -> None:
        for level in self.levels():
            builder.expand()
            for parents in level:
                builder.add(builder.columns(parents))


@register("shape", "chain")
class Chain(Static):
    """Drafts that follow each other. Parameter: ``num_speculative_tokens``."""

    is_chain = True

    def __init__(self, params: object, length: int = 5):
        super().__init__(params)
        self.length = length

    def levels(self) -> Levels:
        return tuple(((column - 1,),) for column in range(self.length))

    def grow(self, builder: TreeBuilder) -> None:
        for level in self.levels()[: builder.most_depth]:
            builder.expand()
            builder.add(builder.columns(level[0]))


@dataclass(frozen=True)
class BranchingParams(Params):
    """Parameters of constant branching.

    Attributes:
        branching: children of a node, level by level, joined by hyphens.
    """

    branching: str = text("3-2-1", "numbers of children by level, such as '3-2-1'")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.counts()

    def counts(self) -> list[int]:
        """Return the children of a node of each level."""
        parts = self.branching.split("-")
        if not all(x.isdigit() and int(x) > 0 for x in parts):
            expected = "numbers of children by level, at least 1 each, such as '3-2-1'"
            raise bad_value("sampler.branching", self.branching, expected)
        counts, nodes, total = [int(x) for x in parts], 1, 0
        for count in counts:
            nodes *= count
            total += nodes
        if total > MOST_NODES:
            expected = f"a tree of at most {MOST_NODES} drafts, not {total:,}"
            raise bad_value("sampler.branching", self.branching, expected)
        return counts


@method(
    "mdsd",
    sampler="speculative",
    about="multi-draft speculative decoding: the most probable tokens and one random one, which is"
    " judged first",
    paper="2502.18779",
    title="Towards Optimal Multi-draft Speculative Decoding",
    params={
        "shape": "branching",
        "draws": TOP_AND_RANDOM,
        "verifier": "recursive",
        "branching": "3-2-1",
    },
    limit=Limit("rsd_c", {"branching": "1-1-1"}, {"branching": "1-1-1"}),
    example={"branching": "2-2-1"},
)
@method(
    "rsd_c",
    sampler="speculative",
    about="RSD-C: as many children at every node of a level, drawn without replacement",
    paper="2402.14160",
    title="Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without"
    " Replacement",
    params={
        "shape": "branching",
        "draws": WITHOUT_REPLACEMENT,
        "verifier": "recursive",
        "branching": "2-2-2",
    },
    example={"branching": "2-2-1"},
)
@register("shape", "branching", params=BranchingParams)
class Branching(Static):
    """The same number of children at every node of a level."""

    takes = (*Shape.takes, TOP_AND_RANDOM)

    def levels(self) -> Levels:
        levels, above, size = [], (-1,), 0
        for count in self.params.counts():
            levels.append((above,) * count)
            above = tuple(range(size, size + count * len(above)))
            size += len(above)
        return tuple(levels)

    def grow(self, builder: TreeBuilder) -> None:
        if builder.draws != TOP_AND_RANDOM:
            super().grow(builder)
            return
        for level in self.levels():
            builder.expand()
            parents = builder.columns(level[0])
            top = builder.withhold_top(parents, len(level) - 1)
            builder.add(parents)
            for rank in range(len(level) - 1):
                builder.add(parents, top[..., rank])


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
        if self.nodes != AUTO and int(self.nodes) > MOST_PLANNED:
            raise bad_value("sampler.nodes", self.nodes, f"1 to {MOST_PLANNED} with {param} {part}")


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
class Optimal(Static):
    """The static tree that accepts most for given acceptance rates by rank."""

    has_budget = True

    @property
    def depth(self) -> int:
        return self.params.tree_depth

    def levels(self) -> Levels:
        return plan(self.params.rates(), self.params.nodes, self.params.tree_depth)


@lru_cache(maxsize=64)
def plan(rates: tuple[float, ...], nodes: int, depth: int) -> Levels:
    """Plan the best tree.

    Args:
        rates: acceptance rate of each rank.
        nodes: drafts.
        depth: drafts of a path at most.

    Returns:
        Its levels, whose turns are the ranks.
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
