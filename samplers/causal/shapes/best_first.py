"""Best-first growth under a budget of drafts: the next child goes where it is likeliest to be
accepted.

Every node u has a value, the draft model's probability of the path to u times what its children
have left of the distribution at u. The node with the largest value gets the next child:

    y ~ what is left at u;  value of the child = value(u) R(y);  value(u) <- value(u) (1 - R(y))

Without replacement this is Xiong et al., "DySpec: Faster Speculative Decoding with Dynamic Token
Tree Structure" (arXiv 2410.11744). With ``ranks`` the value of a node is that of its most probable
next child: the tree of the ``nodes`` most probable paths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gen.core.method import Limit, method
from gen.core.params import Params, integer, integer_or
from gen.core.registry import register
from gen.samplers.causal.shapes.base import Shape
from gen.samplers.causal.shapes.builder import TreeBuilder
from gen.samplers.engine.draft import RANKS, WITHOUT_REPLACEMENT
from gen.samplers.engine.host import may_be_any
from gen.samplers.engine.window import AUTO


@dataclass(frozen=True)
class BudgetParams(Params):
    """Parameters of trees with a budget.

    Attributes:
        nodes: drafts of a round; auto for as many as make the time per token least.
        tree_depth: drafts of a path at most.
    """

    nodes: int | str = integer_or(16, AUTO, least=1)
    tree_depth: int = integer(8, least=1)


@method(
    "dyspec",
    sampler="speculative",
    about="DySpec: a budget of drafts, each at the node where it is likeliest to be accepted",
    paper="2410.11744",
    title="DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure",
    params={"shape": "best_first", "draws": WITHOUT_REPLACEMENT, "verifier": "recursive"},
    limit=Limit("rsd_c", {"nodes": 1}, {"branching": "1"}),
    example={"nodes": 6, "tree_depth": 3},
)
@register("shape", "best_first", params=BudgetParams)
class BestFirst(Shape):
    """The next child at the node where it is likeliest to be accepted."""

    by_level = False
    has_budget = True

    takes = (WITHOUT_REPLACEMENT, RANKS)

    @property
    def nodes(self) -> int:
        return self.params.nodes

    @property
    def depth(self) -> int:
        return self.params.tree_depth

    def grow(self, builder: TreeBuilder) -> None:
        b, device = builder.rest.shape[0], builder.rest.device
        dtype = builder.rest.dtype
        left = torch.zeros(b, 1, dtype=dtype, device=device)  # log of every node's value
        for _ in range(self.params.nodes):
            if builder.draws == RANKS:
                builder.expand()
                value = left + builder.rest.amax(-1)
                if builder.size and not may_be_any(value > -torch.inf):
                    break  # no row knows a further child
                at = value.argmax(1, keepdim=True)
            else:
                at = left.argmax(1, keepdim=True)
                builder.expand_for(at - 1)
            before = left.gather(1, at)
            mass = builder.add(at - 1)
            exists = builder.tree.exists[:, -1:]
            remains = (-mass.exp()).clamp_min(-1).log1p()
            # a node without a child has nothing left to give
            remains = torch.where(exists, before + remains, -torch.inf)
            new = torch.where(exists, before + mass, -torch.inf)
            deep = builder.tree.depth[:, -1:] >= self.params.tree_depth
            left = left.scatter(1, at, remains)
            left = torch.cat([left, torch.where(deep, -torch.inf, new)], 1)
