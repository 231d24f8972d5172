"""Beams of drafts.

beam              at every depth the ``beam_width`` most probable paths get ``beam_width``
                  children each; of all nodes the ``nodes`` most probable are drafted. The
                  draft trees of Li et al., "EAGLE-2" (arXiv 2406.16858). Nothing is random, so
                  that nodes may be left out
stochastic_beam   at every depth ``beam_width`` children are drawn without replacement from all
                  (path, token) pairs, with the draft model's probabilities. After RSD-S of Jeon
                  et al., "Recursive Speculative Decoding" (arXiv 2402.14160), whose stochastic
                  beam search perturbs whole paths once; here every depth draws anew, so that
                  siblings are exactly draws without replacement from the distribution at
                  their parent
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.method import Limit, method
from gen.core.params import integer
from gen.core.registry import register
from gen.samplers.causal.shapes.base import Shape
from gen.samplers.causal.shapes.best_first import BudgetParams
from gen.samplers.causal.shapes.builder import TreeBuilder
from gen.samplers.engine.draft import RANKS, WITHOUT_REPLACEMENT, node_positions


@dataclass(frozen=True)
class BeamParams(BudgetParams):
    """Parameters of beams.

    Attributes:
        beam_width: paths that go on at every depth.
    """

    beam_width: int = integer(4, least=1)


@register("shape", "beam", params=BeamParams)
class Beam(Shape):
    """The most probable paths of every depth, and of all their nodes the most probable."""

    has_budget = True
    takes = (RANKS,)

    @property
    def nodes(self) -> int:
        width, depth = self.params.beam_width, self.params.tree_depth
        return min(self.params.nodes, width + (depth - 1) * width**2)

    @property
    def depth(self) -> int:
        return self.params.tree_depth

    def grow(self, builder: TreeBuilder) -> None:
        width = min(self.params.beam_width, builder.rest.shape[-1])
        beam, total = builder.columns([-1]), torch.zeros_like(builder.rest[:, :1, 0])
        values, others = [], []
        for _ in range(self.params.tree_depth):
            builder.expand()
            found = builder.next_logq(beam).topk(width, -1)
            joint = (total[..., None] + found.values).flatten(1)  # [b, n width]
            parents = beam.repeat_interleave(width, 1)
            ids = found.indices.flatten(1)
            order = torch.argsort(joint, dim=1, descending=True, stable=True)
            joint, parents, ids = (x.gather(1, order) for x in (joint, parents, ids))
            first = builder.size
            builder.add(parents[:, :width], ids[:, :width], joint[:, :width].isfinite())
            values.append(joint[:, :width])
            others.append((parents[:, width:], ids[:, width:], joint[:, width:]))
            beam, total = builder.columns(list(range(first, builder.size))), joint[:, :width]
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

    @property
    def depth(self) -> int:
        return self.params.tree_depth

    def grow(self, builder: TreeBuilder) -> None:
        beam = builder.columns([-1])
        left = torch.zeros_like(builder.rest[:, :1, 0])
        for _ in range(self.params.tree_depth):
            builder.expand()
            first, totals = builder.size, []
            for _ in range(self.params.beam_width):
                which = self._draw(builder, left)
                before = left.gather(1, which)
                mass = builder.add(beam.gather(1, which))
                exists = builder.tree.exists[:, -1:]
                remains = torch.where(
                    exists, before + (-mass.exp()).clamp_min(-1).log1p(), -torch.inf
                )
                totals.append(torch.where(exists, before + mass, -torch.inf))
                left = left.scatter(1, which, remains)
            beam, left = builder.columns(list(range(first, builder.size))), torch.cat(totals, 1)

    def _draw(self, builder: TreeBuilder, left: Tensor) -> Tensor:
        """Draw the path [b, 1] that gets the next child, by what the paths have left [b, n]."""
        some = ~left.isneginf().all(1, keepdim=True)
        logits = torch.where(some, left, 0.0).log_softmax(-1)
        step = builder.step
        at = node_positions(step, torch.ones_like(some, dtype=torch.long), builder.size)
        return step.rng.categorical(logits[:, None], step.rows, at, "beam", step.round, some)
