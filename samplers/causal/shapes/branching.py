"""Constant branching: every node of a level has the same number of children.

    branching "3-2-1": three children of the root, two of each of them, one of each of those

Without replacement this is RSD-C of Jeon et al., "Recursive Speculative Decoding" (arXiv
2402.14160), which draws the children of a node by Gumbel-top-k. With the most probable tokens and
one random one it is the tree of Hu et al., "Towards Optimal Multi-draft Speculative Decoding"
(arXiv 2502.18779).
"""

from __future__ import annotations

from dataclasses import dataclass

from gen.core.errors import bad_value
from gen.core.method import Limit, method
from gen.core.params import Params, text
from gen.core.registry import register
from gen.samplers.causal.shapes.base import MOST_NODES, Shape
from gen.samplers.engine.tree import TOP_AND_RANDOM, WITHOUT_REPLACEMENT, TreeBuilder


@dataclass(frozen=True)
class BranchingParams(Params):
    """Parameters of constant branching.

    Attributes:
        branching: children of a node, level by level, joined by hyphens.
    """

    branching: str = text("3-2-1", "numbers of children by level, such as '3-2-1'")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.levels()

    def levels(self) -> list[int]:
        """Return the children of a node of each level."""
        parts = self.branching.split("-")
        if not all(x.isdigit() and int(x) > 0 for x in parts):
            expected = "numbers of children by level, at least 1 each, such as '3-2-1'"
            raise bad_value("sampler.branching", self.branching, expected)
        levels, nodes, total = [int(x) for x in parts], 1, 0
        for count in levels:
            nodes *= count
            total += nodes
        if total > MOST_NODES:
            expected = f"a tree of at most {MOST_NODES} drafts, not {total:,}"
            raise bad_value("sampler.branching", self.branching, expected)
        return levels


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
class Branching(Shape):
    """The same number of children at every node of a level."""

    takes = (*Shape.takes, TOP_AND_RANDOM)

    @property
    def nodes(self) -> int:
        nodes, total = 1, 0
        for count in self.params.levels():
            nodes *= count
            total += nodes
        return total

    @property
    def depth(self) -> int:
        return len(self.params.levels())

    def grow(self, builder: TreeBuilder) -> None:
        level = [-1]
        for count in self.params.levels():
            builder.expand()
            first, parents = builder.size, builder.columns(level)
            if builder.draws == TOP_AND_RANDOM:
                top = builder.withhold_top(parents, count - 1)
                builder.add(parents)
                for rank in range(count - 1):
                    builder.add(parents, top[..., rank])
            else:
                for _ in range(count):
                    builder.add(parents)
            level = list(range(first, builder.size))
