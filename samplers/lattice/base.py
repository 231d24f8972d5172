"""Base of the samplers of models of graphs: one forward pass, then tokens from its graph.

``collapse`` drops a token that equals the one before it, as the released decoders of DA-Transformer
do. It loses legitimate repeats such as "seven seven", so it is off by default.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gen.core.distributions import has_no_distribution
from gen.core.errors import GenError
from gen.core.params import flag
from gen.core.rng import RNG
from gen.core.sampler import Sampler
from gen.core.stats import SampleOutput
from gen.models.targets.lattice import GraphOutput, LatticeTarget, Written
from gen.samplers.engine.failed import first_failed, refuse_failed
from gen.samplers.engine.stats import StatsRecorder
from gen.samplers.lattice.paths import Links


class Decoded(NamedTuple):
    """Tokens of B rows.

    Attributes:
        tokens: long [B, N].
        counts: how many of them each row has, long [B].
    """

    tokens: Tensor
    counts: Tensor


class GraphRun(NamedTuple):
    """What a sampler of graphs decides with.

    Attributes:
        output: forward pass.
        links: links of the graphs, with the allowed numbers of tokens.
        target: target of the items.
        rng: random numbers by item and position.
    """

    output: GraphOutput
    links: Links
    target: LatticeTarget
    rng: RNG

    def best_rewards(self, position: int) -> Tensor:
        """Return the log-probability of the best token of every vertex as token of a position,
        [B, L]; -inf for a vertex that none is allowed for."""
        best = self.output.at(position).amax(-1)
        return best.masked_fill(best.isnan(), -torch.inf)

    def best_tokens(self, vertices: Tensor, counts: Tensor) -> Tensor:
        """Return the most probable token of every vertex of paths, long [B, N].

        Args:
            vertices: vertices of the paths, long [B, N].
            counts: length of each path, long [B].
        """
        logprobs = self.output.along(vertices)
        refuse_undefined(self.target, logprobs, counts)
        return logprobs.argmax(-1)


@dataclass(frozen=True)
class LatticeSampler(Sampler):
    """Base of samplers that decode the graph of one forward pass; see the module.

    ``collapse``: drop a token that equals the one before it.
    """

    collapse: bool = flag(False)

    protocol = "lattice"
    papers = ("2205.07459",)

    @abstractmethod
    def decode(self, run: GraphRun) -> Decoded:
        """Decide the tokens of all rows."""

    def transitions(self, transitions: Tensor) -> Tensor:
        """Return the transitions that paths are decoded with, [B, L, L]; the model's own."""
        return transitions

    def __call__(self, target, rng, *, draft=None, canvas=None, trace=False, callback=None):
        began, eos = time.perf_counter(), target.vertex_space.eos_token_id
        if self.collapse and eos is None:
            raise GenError(
                "sampler.collapse shortens outputs, and the token space has one length; expected"
                " false, or a space with an eos token"
            )
        allowed = target.counts(canvas)
        output = target.predict()
        graph = output.graph
        links = Links.of(self.transitions(graph.transitions), graph.lengths, allowed)
        tokens, counts = self.decode(GraphRun(output, links, target, rng))
        if self.collapse:
            tokens, counts = collapsed(tokens, counts)
        written = target.write(tokens, counts, graph)
        whole = written.tokens
        if callback is not None:
            total = whole.numel()
            info = {"step": 1, "done": total, "total": total}
            callback({**info, "tokens": whole.clone(), "known": torch.ones_like(whole).bool()})
        return _finished(output, written, trace, time.perf_counter() - began)


def _finished(output: GraphOutput, written: Written, trace: bool, seconds: float) -> SampleOutput:
    """Count the forward pass that made tokens."""
    tokens, made, more = written
    rows, steps = tokens.shape
    recorder = StatsRecorder(rows, trace)
    items = torch.arange(rows).numpy()
    computed, positions = output.num_computed_tokens + more, output.num_computed_positions
    recorder.add(items, computed.cpu(), positions + int(more.max()), made.cpu())
    every = range(steps)
    for row in range(rows if trace else 0):
        recorder.add_trace(row, every, (), dict(zip(every, tokens[row].tolist(), strict=True)))
    return recorder.output(tokens, seconds)


def collapsed(tokens: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Drop every token that equals the one before it.

    Args:
        tokens: long [B, N].
        counts: how many of them each row has, long [B].
    """
    column = torch.arange(tokens.shape[1], device=tokens.device)
    fresh = torch.ones_like(tokens, dtype=torch.bool)
    fresh[:, 1:] = tokens[:, 1:] != tokens[:, :-1]
    kept = fresh & (column < counts[:, None])
    order = (~kept).long().argsort(dim=1, stable=True)
    return tokens.gather(1, order), kept.sum(1)


def refuse_undefined(target: LatticeTarget, logprobs: Tensor, counts: Tensor) -> None:
    """Refuse tokens without a distribution.

    Args:
        target: target whose model was asked.
        logprobs: log-probabilities [B, N, V] of the positions of rows.
        counts: positions that each row has, long [B].

    Raises:
        GenError: one of them has no distribution.
    """
    column = torch.arange(logprobs.shape[1], device=logprobs.device)
    failed = has_no_distribution(logprobs) & (column < counts[:, None])
    if failed.shape[1]:
        rows = torch.arange(len(failed)).numpy()
        refuse_failed(target, rows, first_failed(failed).cpu().numpy())
