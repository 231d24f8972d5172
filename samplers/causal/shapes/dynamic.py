"""Trees that grow where the draft model's probabilities are large.

best_first        the next child goes to the node u with the largest value, which is the draft
                  model's probability of the path to u times what its children have left of the
                  distribution at u:

                      y ~ what is left at u;  value of the child = value(u) R(y)
                      value(u) <- value(u) (1 - R(y))

                  Without replacement this is Xiong et al., "DySpec: Faster Speculative Decoding
                  with Dynamic Token Tree Structure" (arXiv 2410.11744). With ``ranks`` the value of
                  a node is that of its most probable next child: the tree of the ``nodes`` most
                  probable paths
beam              at every depth the ``beam_width`` most probable paths get ``beam_width`` children
                  each; of all nodes the ``nodes`` most probable are drafted. The draft trees of Li
                  et al., "EAGLE-2" (arXiv 2406.16858). Nothing is random, so that nodes may be left
                  out
stochastic_beam   at every depth ``beam_width`` children are drawn without replacement from all
                  (path, token) pairs, with the draft model's probabilities. After RSD-S of Jeon et
                  al., "Recursive Speculative Decoding" (arXiv 2402.14160), whose stochastic beam
                  search perturbs whole paths once; here every depth draws anew, so that siblings
                  are exactly draws without replacement from the distribution at their parent
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.method import Limit, method
from gen.core.params import integer
from gen.core.registry import register
from gen.samplers.causal.shapes.base import BudgetParams, Shape, TreeBuilder
from gen.samplers.engine.draft import RANKS, WITHOUT_REPLACEMENT, node_positions
from gen.samplers.engine.host import may_be_any


def add_child(
    builder: TreeBuilder, left: Tensor, which: Tensor, parent: Tensor
) -> tuple[Tensor, Tensor]:
    """Add a child to one node of every row, the one ``which`` [b, 1] of n nodes, with the
    logarithms ``left`` [b, n] of their values, in the column ``parent`` [b, 1]. Returns the
    logarithms with what is left at the node, and that of the child's value, [b, 1]."""
    before = left.gather(1, which)
    mass = builder.add(parent)
    exists = builder.tree.exists[:, -1:]
    # a node without a child has nothing left to give
    remains = torch.where(exists, before + (-mass.exp()).clamp_min(-1).log1p(), -torch.inf)
    return left.scatter(1, which, remains), torch.where(exists, before + mass, -torch.inf)


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

    def grow(self, builder: TreeBuilder) -> None:
        left = torch.zeros_like(builder.rest[:, :1, 0])  # log of every node's value
        for _ in range(self.budget):
            if builder.draws == RANKS:
                builder.expand()
                value = left + builder.rest.amax(-1)
                if builder.size and not may_be_any(value > -torch.inf):
                    break  # no row knows a further child
                at = value.argmax(1, keepdim=True)
            else:
                at = left.argmax(1, keepdim=True)
                builder.expand_for(at - 1)
            left, new = add_child(builder, left, at, at - 1)
            deep = builder.tree.depth[:, -1:] >= self.params.tree_depth
            left = torch.cat([left, torch.where(deep, -torch.inf, new)], 1)


@dataclass(frozen=True)
class BeamParams(BudgetParams):
    """Parameters of beams.

    Attributes:
        beam_width: paths that go on at every depth.
    """

    beam_width: int = integer(4, least=1, each="column")


@register("shape", "beam", params=BeamParams)
class Beam(Shape):
    """The most probable paths of every depth, and of all their nodes the most probable."""

    has_budget = True
    takes = (RANKS,)

    @property
    def nodes(self) -> int:
        width, depth = self.params.beam_width, self.params.tree_depth
        return min(self.budget, width + (depth - 1) * width**2)

    def grow(self, builder: TreeBuilder) -> None:
        width = min(self.params.beam_width, builder.rest.shape[-1])
        beam, total = builder.columns([-1]), torch.zeros_like(builder.rest[:, :1, 0])
        values, others = [], []
        for _ in range(self.params.tree_depth):
            if not builder.goes_on:
                break
            builder.expand()
            found = builder.next_logq(beam).topk(width, -1)
            joint = (total[..., None] + found.values).flatten(1)  # [b, n width]
            parents = beam.repeat_interleave(width, 1)
            ids = found.indices.flatten(1)
            order = torch.argsort(joint, dim=1, descending=True, stable=True)
            joint, parents, ids = (x.gather(1, order) for x in (joint, parents, ids))
            first, total = builder.size, joint[:, :width]
            builder.add(parents[:, :width], ids[:, :width], total.isfinite())
            values.append(total)
            others.append((parents[:, width:], ids[:, width:], joint[:, width:]))
            beam = builder.columns(range(first, builder.size))
        for parents, ids, joint in others:
            builder.add(parents, ids, joint.isfinite())
            values.append(joint)
        value = torch.where(builder.tree.exists, torch.cat(values, 1), -torch.inf)
        best = torch.argsort(value, dim=1, descending=True, stable=True)[:, : self.nodes]
        builder.keep(best.sort(1).values)


@method(
    "rsd_s",
    sampler="speculative",
    about="RSD-S: every depth draws its drafts without replacement from all (path, token) pairs",
    paper="2402.14160",
    title="Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without"
    " Replacement",
    params={
        "shape": "stochastic_beam",
        "verifier": "recursive",
        "beam_width": 4,
        "tree_depth": 4,
    },
    limit=Limit("rsd_c", {"beam_width": 1, "tree_depth": 3}, {"branching": "1-1-1"}),
    example={"beam_width": 2, "tree_depth": 3},
)
@register("shape", "stochastic_beam", params=BeamParams)
class StochasticBeam(Shape):
    """Draws without replacement from all pairs of a path and a token, depth after depth."""

    takes = (WITHOUT_REPLACEMENT,)

    @property
    def nodes(self) -> int:
        return self.params.beam_width * self.params.tree_depth

    def grow(self, builder: TreeBuilder) -> None:
        beam = builder.columns([-1])
        left = torch.zeros_like(builder.rest[:, :1, 0])  # log of what every path has left
        for _ in range(self.params.tree_depth):
            if not builder.goes_on:
                break
            builder.expand()
            first, values = builder.size, []
            for _ in range(self.params.beam_width):
                which = self._draw(builder, left)
                left, value = add_child(builder, left, which, beam.gather(1, which))
                values.append(value)
            beam, left = builder.columns(range(first, builder.size)), torch.cat(values, 1)

    def _draw(self, builder: TreeBuilder, left: Tensor) -> Tensor:
        """Draw the path [b, 1] that gets the next child, by what the paths have left [b, n]."""
        some = ~left.isneginf().all(1, keepdim=True)
        logits = torch.where(some, left, 0.0).log_softmax(-1)
        step = builder.step
        at = node_positions(step, torch.ones_like(some, dtype=torch.long), builder.size)
        return step.rng.categorical(logits[:, None], step.rows, at, "beam", step.round, some)
