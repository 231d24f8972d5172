"""Lookahead decoding of a graph (arXiv 2205.07459).

    a_{n+1} = argmax_j [ log E_{a_n, j} + beta max_v log P(v | v_j) ]      y_n = argmax_v P(. | v_j)

up to the last vertex. With beta = 0 it is ``dag_greedy``. Vertices from which no allowed number of
tokens can be reached are left out.

Guarantee: none. It is a deterministic rule that sees one vertex ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gen.core.params import param
from gen.core.registry import register
from gen.samplers.lattice.base import Decoded, GraphRun, LatticeSampler


@register("sampler", "lookahead")
@dataclass(frozen=True)
class Lookahead(LatticeSampler):
    """Follow the transition to the vertex of the best token, in one forward pass.

    ``beta``: weight of the tokens beside transitions; 0 is ``dag_greedy``.
    """

    beta: float = param(1.0, float, 0, expected="a finite number of at least 0")

    guarantee = "approximate"
    reference = "the most probable path and tokens; a deterministic rule"

    @property
    def deterministic(self) -> bool:
        return True

    def decode(self, run: GraphRun) -> Decoded:
        return follow(run, self.beta)


def follow(run: GraphRun, beta: float) -> Decoded:
    """Walk from the first vertex to the last one, one best step at a time."""
    links, graph = run.links, run.output.graph
    open_to = links.reachable()
    rows = torch.arange(len(open_to), device=open_to.device)
    final = graph.emissions[rows, graph.lengths - 1].amax(-1) if beta else 0.0
    here, alive = torch.zeros_like(rows), torch.ones_like(rows) > 0
    vertices, counts = [], torch.zeros_like(rows)
    for count in range(links.most + 1):
        end = links.ending(count)[rows, here] + beta * final
        if count < links.most:
            onward = links.inner[rows, here]
            if beta:
                onward = onward + beta * run.best_rewards(count)
            onward = onward.masked_fill(~open_to[:, count + 1], -torch.inf)
        else:
            onward = torch.full_like(links.last, -torch.inf)
        best, vertex = onward.max(1)
        alive = alive & (best > end)
        if not bool(alive.any()):
            break
        here = torch.where(alive, vertex, here)
        vertices.append(here)
        counts = counts + alive
    empty = torch.zeros(len(rows), 0, dtype=torch.long, device=rows.device)
    found = torch.stack(vertices, 1) if vertices else empty
    return Decoded(run.best_tokens(found, counts), counts)
