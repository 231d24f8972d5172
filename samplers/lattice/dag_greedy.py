"""Greedy decoding of a graph (arXiv 2205.07459).

    a_{n+1} = argmax_j E_{a_n, j}      y_n = argmax_v P(v | v_{a_n})

up to the last vertex. Vertices from which no allowed number of tokens can be reached are left out.

Guarantee: none. It is a deterministic rule that looks at one transition at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from gen.core.registry import register
from gen.samplers.lattice.base import Decoded, GraphRun, LatticeSampler
from gen.samplers.lattice.lookahead import follow


@register("sampler", "dag_greedy")
@dataclass(frozen=True)
class DagGreedy(LatticeSampler):
    """Follow the most probable transition from vertex to vertex, in one forward pass."""

    guarantee = "approximate"
    reference = "the most probable path; a deterministic rule"

    @property
    def deterministic(self) -> bool:
        return True

    def decode(self, run: GraphRun) -> Decoded:
        return follow(run, 0.0)
