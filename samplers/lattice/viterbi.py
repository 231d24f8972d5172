"""Viterbi decoding of a graph (Shao et al., arXiv 2210.05193).

For every number of tokens n, the path a of n vertices with the most probable transitions

    S_n = max_a  sum_{i=0..n-1} log E_{a_i, a_{i+1}} + log E_{a_n, L-1},      a_0 = 0

and of these the n with the largest S_n / n^beta. The tokens are the most probable ones of its
vertices.

Guarantee: with ``length_penalty`` 0, the most probable path of all allowed numbers of tokens; for
one number of tokens it is that for any penalty. Otherwise none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gen.core.params import param
from gen.core.registry import register
from gen.samplers.lattice.base import Decoded, GraphRun, LatticeSampler
from gen.samplers.lattice.paths import best_paths


def length_penalty(default: float) -> Any:
    """Declare the exponent of the number of tokens that scores are divided by."""
    return param(default, float, 0, expected="a finite number of at least 0")


@dataclass(frozen=True)
class PathSampler(LatticeSampler):
    """Base of samplers that choose one path; subclasses say what vertices add to its score."""

    length_penalty: float = length_penalty(1.0)
    max_length: int | None = param(None, int, 1, also=(None,), expected="an integer of at least 1")

    guarantee = "approximate"
    aliases = {"beta": "length_penalty"}

    @property
    def deterministic(self) -> bool:
        return True

    def rewards(self, run: GraphRun) -> tuple[list[Tensor], Tensor]:
        """Return what vertices add as token n, [B, L] each, and what the first one adds, [B]."""
        nothing = torch.zeros_like(run.links.last)
        return [nothing] * run.links.most, nothing[:, 0]

    def decode(self, run: GraphRun) -> Decoded:
        run = limited(run, self.max_length)
        scores, paths = best_paths(run.links, *self.rewards(run))
        run.links.require_path(scores.amax(1) > -torch.inf)
        counts = penalised(scores, self.length_penalty).argmax(1)
        vertices = paths[torch.arange(len(paths), device=paths.device), counts]
        return Decoded(run.best_tokens(vertices, counts), counts)


@register("sampler", "viterbi")
@dataclass(frozen=True)
class Viterbi(PathSampler):
    """Find the most probable path of every length and choose a length, in one forward pass.

    ``length_penalty``: exponent of the number of tokens that scores are divided by. ``max_length``:
    largest number of tokens; None for that of the graph.
    """

    papers = ("2210.05193", "2205.07459")
    reference = "the most probable path; a deterministic rule"


def limited(run: GraphRun, most: int | None) -> GraphRun:
    """Return the run with at most so many tokens; None for those of the graph."""
    if most is None or most >= run.links.most:
        return run
    links = run.links
    return run._replace(links=type(links)(links.inner, links.last, links.allowed[:, : most + 1]))


def penalised(scores: Tensor, penalty: float) -> Tensor:
    """Divide the scores of numbers of tokens 0..N, [..., N + 1], by n^penalty."""
    numbers = torch.arange(scores.shape[-1], device=scores.device).clamp(min=1)
    return scores / numbers.double() ** penalty
