"""Paths that are drawn independently of each other, after a common trunk if there is one.

trunk 0:   K paths from the root (Sun et al., "SpecTr", arXiv 2310.15141)
trunk n:   a chain of n drafts, then K paths from its end: more drafts are worth most where draft
           model and target begin to differ (Thomas et al., "Dynamic Delayed Tree Expansion", arXiv
           2602.16994)
branch_below p: the trunk ends earlier, in every row by itself, at the first node whose likeliest
           draft is less probable than p. The shape ``selected`` has the paper's network, which
           chooses all three lengths

Several draft models take turns: path i is drawn from model i mod M. With a path for each model the
tree is that of Miao et al., "SpecInfer" (arXiv 2305.09781).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.method import Limit, method
from gen.core.params import Params, integer, number
from gen.core.registry import register
from gen.samplers.causal.shapes.base import Shape
from gen.samplers.causal.shapes.builder import TreeBuilder
from gen.samplers.engine.draft import WITH_REPLACEMENT


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

    paths: int = integer(4, least=1)
    path_length: int = integer(4, least=1)
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
class Paths(Shape):
    """Paths that are drawn independently of each other, behind a common trunk."""

    takes = (WITH_REPLACEMENT,)
    parts_models = True

    @property
    def nodes(self) -> int:
        return self.params.trunk + self.params.paths * self.params.path_length

    @property
    def depth(self) -> int:
        return self.params.trunk + self.params.path_length

    def grow(self, builder: TreeBuilder) -> None:
        tip = self._grow_trunk(builder)
        first = builder.size
        for path in range(self.params.paths):
            builder.add(tip - path % builder.num_models)  # several models see a root each
        tips = list(range(first, builder.size))
        for _ in range(self.params.path_length - 1):
            builder.expand()
            first = builder.size
            builder.add(builder.columns(tips))
            tips = list(range(first, builder.size))

    def _grow_trunk(self, builder: TreeBuilder) -> Tensor:
        """Add the drafts before the paths part; return the last of every row, long [b, 1].

        Columns of a trunk that has ended stay empty, so that a row's paths have the same columns,
        and with them the same noise, whatever the other rows do.
        """
        tip = builder.columns([-1])
        goes_on = torch.ones_like(tip, dtype=torch.bool)
        least = self.params.branch_below
        for _ in range(self.params.trunk):
            if least:
                goes_on = goes_on & (builder.next_logq(tip).amax(-1).exp() >= least)
            builder.add(tip, active=goes_on)
            builder.expand()
            tip = torch.where(goes_on, builder.size - 1, tip)
        return tip
