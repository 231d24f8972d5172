"""Ancestral sampling of a graph: a path, then a token of each of its vertices (arXiv 2205.07459).

    a_{n+1} ~ E_{a_n, .} W_{n+1}(.) / W_n(a_n)      y_n ~ P(. | v_{a_n})

where W is the mass of the paths with an allowed number of tokens (``gen.samplers.lattice.paths``);
without such a limit it is 1. ``link_temperature`` t divides log E before, normalised again.

Guarantee: the distribution of path and tokens of the model's graph, given that the number of tokens
is allowed. With ``collapse``, the outputs of that distribution without equal neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.params import param
from gen.core.registry import register
from gen.samplers.lattice.base import Decoded, GraphRun, LatticeSampler, refuse_undefined


@register("sampler", "ancestral")
@dataclass(frozen=True)
class Ancestral(LatticeSampler):
    """Draw a path of the graph and the tokens of its vertices, in one forward pass.

    ``link_temperature``: divisor of the logarithm of transitions; ``temperature`` is that of
    tokens.
    """

    link_temperature: float = param(1.0, float, math.ulp(0.0), expected="a finite number above 0")

    reference = "the paths and tokens of the model's graph"

    @property
    def guarantee(self) -> str:
        exact = self.link_temperature == 1 and not self.collapse
        return "same_distribution" if exact else "approximate"

    def transitions(self, transitions: Tensor) -> Tensor:
        if self.link_temperature == 1:
            return transitions
        scaled = transitions / self.link_temperature
        total = scaled.logsumexp(-1, keepdim=True)
        return scaled - total.masked_fill(total == -torch.inf, 0.0)

    def decode(self, run: GraphRun) -> Decoded:
        vertices, counts = draw_paths(run)
        logprobs = run.output.along(vertices)
        refuse_undefined(run.target, logprobs, counts)
        rows = torch.arange(len(vertices), device=vertices.device)
        column = torch.arange(vertices.shape[1], device=vertices.device)
        active = column < counts[:, None]
        positions = column.expand(len(rows), -1)
        first = torch.zeros_like(rows)
        tokens = run.rng.categorical(logprobs, rows, positions, "token", first, active)
        return Decoded(tokens, counts)


def draw_paths(run: GraphRun) -> tuple[Tensor, Tensor]:
    """Draw a path per row: its vertices, long [B, N], and how many they are, long [B]."""
    links, after = run.links, run.links.completions()
    rows = torch.arange(len(after), device=after.device)
    here, first, alive = torch.zeros_like(rows), torch.zeros_like(rows), torch.ones_like(rows) > 0
    vertices, counts = [], torch.zeros_like(rows)
    size = after.shape[2]
    for count in range(links.most + 1):
        ahead = links.ending(count)[rows, here]
        onward = links.inner[rows, here]
        if count < links.most:
            onward = onward + after[:, count + 1]
        else:
            onward = torch.full_like(onward, -torch.inf)
        # the end is the last of L + 1 outcomes
        logprobs = torch.cat([onward, ahead[:, None]], 1).log_softmax(1)[:, None]
        position = torch.full_like(rows, count)[:, None]
        drawn = run.rng.categorical(logprobs, rows, position, "vertex", first, alive[:, None])
        alive = alive & (drawn[:, 0] < size)
        if not bool(alive.any()):
            break
        here = torch.where(alive, drawn[:, 0], here)
        vertices.append(here)
        counts = counts + alive
    empty = torch.zeros(len(rows), 0, dtype=torch.long, device=rows.device)
    return torch.stack(vertices, 1) if vertices else empty, counts
