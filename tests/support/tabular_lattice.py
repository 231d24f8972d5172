"""Models of graphs in closed form: transitions and emissions of a source are numbers of their own.

The graphs of rows differ in size, so that padding which is read changes what is decoded.
"""

from __future__ import annotations

import itertools

import torch
from tabular import _C, _logits, _Model, _scramble
from torch import Tensor

from gen.core.graphs import Graph
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.targets.lattice import LatticeTarget


class TabularLattice(_Model):
    """Implements ``gen.models.adapters.protocols.LatticeModel``.

    ``vertices``: of the smallest graph; ``sizes``: how many sizes there are.
    """

    vertices, sizes = 18, 3

    def __init__(self, *args, vertices: int | None = None, sizes: int | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.vertices, self.sizes = vertices or self.vertices, sizes or self.sizes

    def forward(self, source: Tensor, lengths: Tensor) -> Graph:
        column = torch.arange(source.shape[1])
        read = source.masked_fill(column >= lengths[:, None], -1)
        state = self._states(read)[torch.arange(len(read)), lengths - 1][:, None]
        sizes = self.vertices + (state[:, 0] % self.sizes).abs()
        vertex = torch.arange(int(sizes.max()))
        mixed = _scramble(state + (vertex + 1) * _C)
        known = vertex < sizes[:, None]
        links = _logits(mixed, len(vertex), 0.0, self.spread)
        allowed = (vertex[:, None] < vertex) & known[:, None] & known[..., None]
        links = links.masked_fill(~allowed, -1e9).log_softmax(-1)
        emissions = self.at(mixed, vertex.expand(mixed.shape)).log_softmax(-1)
        # what stands in the padding must not be read
        emissions = emissions.masked_fill(~known[..., None], 7.0)
        links = links.masked_fill(~allowed, -torch.inf)
        return Graph(links, emissions, emissions[..., :2], sizes)

    def at(self, states: Tensor, positions: Tensor) -> Tensor:
        return _logits(states, self.vocab_size, self.low, self.spread)


def open_space(positions: int, vocab_size: int, eos: int) -> TokenSpace:
    """A space whose rows may end anywhere behind their first token; the last id is the mask."""
    legal = torch.ones(positions, vocab_size, dtype=torch.bool)
    legal[:, -1] = False
    legal[0, eos] = False
    return TokenSpace((positions,), vocab_size, legal, vocab_size - 1, eos_token_id=eos)


def lattice_target(
    model: TabularLattice, space: TokenSpace, context: list[int], **sampling
) -> LatticeTarget:
    """A production target whose row i has the context ``context[i]``."""
    prompt = torch.tensor([[31 + c, 40] for c in context])
    return LatticeTarget(model, prompt, space, SamplingParams(**sampling))


def paths_of(graph: Graph, row: int, counts) -> dict[tuple[int, ...], float]:
    """The log-probability of every path of a row: its vertices between the first and the last."""
    links, size = graph.transitions[row].tolist(), int(graph.lengths[row])
    found = {}
    for n in counts:
        for inner in itertools.combinations(range(1, size - 1), n):
            path = (0, *inner, size - 1)
            found[inner] = sum(links[a][b] for a, b in itertools.pairwise(path))
    return found
