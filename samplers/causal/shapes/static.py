"""Static trees: which nodes get children is known before anything is drafted.

chain       drafts that follow each other
branching   every node of a level has the same number of children; "3-2-1": three children of the
            root, two of each of them, one of each of those. Without replacement this is RSD-C of
            Jeon et al., "Recursive Speculative Decoding" (arXiv 2402.14160), which draws the
            children of a node by Gumbel-top-k. With the most probable tokens and one random one it
            is the tree of Hu et al., "Towards Optimal Multi-draft Speculative Decoding" (arXiv
            2502.18779)
paths       K paths that are drawn independently of each other from the root (Sun et al., "SpecTr",
            arXiv 2310.15141); behind a chain of ``trunk`` drafts, if there is one: more drafts are
            worth most where draft model and target begin to differ (Thomas et al., "Dynamic Delayed
            Tree Expansion", arXiv 2602.16994). With ``branch_below`` p the trunk ends earlier, in
            every row by itself, at the first node whose likeliest draft is less probable than p;
            the shape ``selected`` has the paper's network, which chooses all three lengths. Several
            draft models take turns: path i is drawn from model i mod M. With a path for each model
            the tree is that of Miao et al., "SpecInfer" (arXiv 2305.09781)
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

import torch

from gen.core.errors import bad_value
from gen.core.method import Limit, method
from gen.core.params import Params, integer, number, text
from gen.core.registry import register
from gen.samplers.causal.shapes.base import MOST_NODES, BudgetParams, Shape, TreeBuilder
from gen.samplers.engine.draft import TOP_AND_RANDOM, WITH_REPLACEMENT, WITHOUT_REPLACEMENT
from gen.samplers.engine.window import AUTO

# column of the parent of every draft, -1 for the root. Levels follow each other, and inside of a
# level its turns, in each of which a node gets one child at most
Parents = tuple[int, ...]
Levels = list[list[list[int]]]  # the parents of every level's turns
MOST_PLANNED = 128  # drafts; the time to plan grows with its square


@lru_cache(maxsize=64)
def levels_of(parents: Parents) -> Levels:
    """Split the columns of a tree into levels and turns."""
    depth, levels = {-1: 0}, []
    for column, parent in enumerate(parents):
        depth[column] = depth[parent] + 1
        if depth[column] > len(levels):
            levels.append([[]])
        if parent in levels[-1][-1]:
            levels[-1].append([])
        levels[-1][-1].append(parent)
    return levels


class Static(Shape):
    """Tree whose nodes are known beforehand."""

    def parents(self) -> Parents:
        """Return the parents of the drafts of a round."""
        raise NotImplementedError

    @property
    def nodes(self) -> int:
        return len(self.parents())

    def grow(self, builder: TreeBuilder) -> None:
        # alone, a chain ends where no row has room; a tree has its columns, and with them its noise
        most = builder.most_depth if self.is_chain else None
        for level in levels_of(self.parents())[:most]:
            if not builder.goes_on:
                break
            builder.expand()
            for turn in level:
                builder.add(builder.columns(turn))


@register("shape", "chain")
class Chain(Static):
    """Drafts that follow each other. Parameter: ``num_speculative_tokens``."""

    is_chain = True

    def __init__(self, params: object, length: int = 5):
        super().__init__(params)
        self.length = length

    @classmethod
    def of(cls, sampler, target):
        return cls(None, int(sampler.num_speculative_tokens))

    def parents(self) -> Parents:
        return tuple(range(-1, self.length - 1))


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

    def parents(self) -> Parents:
        parents, above = [], [-1]
        for count in self.params.counts():
            parents += above * count
            above = list(range(len(parents) - count * len(above), len(parents)))
        return tuple(parents)

    def grow(self, builder: TreeBuilder) -> None:
        if builder.draws != TOP_AND_RANDOM:
            super().grow(builder)
            return
        for level in levels_of(self.parents()):
            builder.expand()
            parents = builder.columns(level[0])
            top = builder.withhold_top(parents, len(level) - 1)
            builder.add(parents)
            for rank in range(len(level) - 1):
                builder.add(parents, top[..., rank])


@dataclass(frozen=True)
class PathParams(Params):
    """Parameters of independent paths.

    Attributes:
        paths: number of paths.
        path_length: drafts of each path, behind the trunk.
        trunk: drafts before the paths part.
        branch_below: probability of the likeliest next draft below which the paths part before the
            trunk's end; 0 for a trunk of fixed length.
    """

    paths: int = integer(4, least=1, each="column")
    path_length: int = integer(4, least=1, each="column")
    trunk: int = integer(0)
    branch_below: float = number(0.0, most=1.0)


@method(
    "delayed",
    sampler="speculative",
    about="delayed branching: a chain of drafts, then independent paths from its end;"
    " branch_below ends the chain early, and the shape selected trains what chooses",
    paper="2602.16994",
    title="Dynamic Delayed Tree Expansion For Improved Multi-Path Speculative Decoding",
    params={"shape": "paths", "verifier": "traversal", "trunk": 2, "paths": 4, "path_length": 3},
    limit=Limit("rsd_c", {"trunk": 0, "paths": 1, "path_length": 1}, {"branching": "1"}),
    example={"trunk": 1, "paths": 2, "path_length": 2},
)
@method(
    "spectr",
    sampler="speculative",
    about="SpecTr: independent paths, accepted by k-sequential selection",
    paper="2310.15141",
    title="SpecTr: Fast Speculative Decoding via Optimal Transport",
    params={"shape": "paths", "verifier": "k_seq", "paths": 8, "path_length": 8},
    limit=Limit("rsd_c", {"paths": 1, "path_length": 3}, {"branching": "1-1-1"}),
    example={"paths": 2, "path_length": 3},
)
@register("shape", "paths", params=PathParams)
class Paths(Static):
    """Paths that are drawn independently of each other, behind a common trunk."""

    takes = (WITH_REPLACEMENT,)
    parts_models = True

    def parents(self) -> Parents:
        trunk, paths = self.params.trunk, self.params.paths
        behind = range(trunk, trunk + paths * (self.params.path_length - 1))
        return (*range(-1, trunk - 1), *[trunk - 1] * paths, *behind)

    def grow(self, builder: TreeBuilder) -> None:
        # Columns of a trunk that has ended stay empty, so that a row's paths have the same columns,
        # and with them the same noise, whatever the other rows do
        tip, least = builder.columns([-1]), self.params.branch_below
        goes_on = torch.ones_like(tip, dtype=torch.bool)
        for depth, level in enumerate(levels_of(self.parents())):
            if depth > self.params.trunk and not builder.goes_on:
                break
            builder.expand()
            if depth < self.params.trunk:
                if least:
                    goes_on = goes_on & (builder.next_logq(tip).amax(-1).exp() >= least)
                builder.add(tip, active=goes_on)
                tip = torch.where(goes_on, builder.size - 1, tip)
            elif depth == self.params.trunk:
                for path in range(self.params.paths):
                    builder.add(tip - path % builder.num_models)  # several models see a root each
            else:
                builder.add(builder.columns(level[0]))


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

    def parents(self) -> Parents:
        return plan(self.params.rates(), self.budget, self.params.tree_depth)


@lru_cache(maxsize=64)
def plan(rates: tuple[float, ...], nodes: int, depth: int) -> Parents:
    """Plan the best tree of ``nodes`` drafts, paths of at most ``depth``, with an acceptance rate
    for each rank. Returns its parents; the turns of a level are the ranks."""

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

    parents: list[int] = []
    level = [(nodes, depth, -1)]  # drafts below each node, their depth, its column
    while level:
        below = []
        for rank in range(len(rates)):
            for i, (size, left, column) in enumerate(level):
                first = best(size, left, rank)[1]
                if first:
                    level[i] = (size - first, left, column)
                    below.append((first - 1, left - 1, len(parents)))
                    parents.append(column)
        level = below
    return tuple(parents)
