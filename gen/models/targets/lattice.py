"""Target of models of graphs: sources of a batch of items, and one forward pass.

The sampling parameters make a distribution of what a vertex emits at a position, as of any logits.
Transitions are the model's. The eos token is no token of a vertex: a row ends with the last vertex.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.graphs import Graph
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.protocols import LatticeModel, SpokenLatticeModel
from gen.models.targets.canvas_rule import AnyOrderTarget


@dataclass
class GraphOutput:
    """Outcome of the forward pass of a target for B rows.

    Attributes:
        graph: transitions, emissions, states and lengths; the first two in float64.
        num_computed_tokens: words of the source and vertices of every row, long [B].
        num_computed_positions: the same with padding.
        target: target of the pass.
    """

    graph: Graph
    num_computed_tokens: Tensor
    num_computed_positions: int
    target: LatticeTarget

    @cached_property
    def uniform(self) -> Tensor:
        """Log-probabilities [B, L, V] of all vertices where all positions allow the same tokens."""
        return self.target.emitted(self.graph.emissions, self.target.words[0])

    def at(self, position: int) -> Tensor:
        """Return the log-probabilities [B, L, V] of all vertices as token of a position."""
        if self.target.is_uniform:
            return self.uniform
        return self.target.emitted(self.graph.emissions, self.target.words[position])

    def along(self, vertices: Tensor) -> Tensor:
        """Return the log-probabilities [B, n, V] of the vertices, long [B, n], of the first n
        positions."""
        index = vertices[..., None].expand(-1, -1, self.graph.emissions.shape[-1])
        emissions = self.graph.emissions.gather(1, index)
        return self.target.emitted(emissions, self.target.words[: vertices.shape[1]])


class Written(NamedTuple):
    """Tokens of B items, made of what the vertices of their paths emit.

    Attributes:
        tokens: long [B, T].
        made: how many of them were decided, long [B].
        num_computed_tokens: positions that were computed for it, beside the graph, long [B].
    """

    tokens: Tensor
    made: Tensor
    num_computed_tokens: Tensor


class LatticeTarget(AnyOrderTarget):
    """Target of one forward pass. All rows are in it, so that none can take another item.

    Attributes:
        vertex_space: space of what vertices emit; that of the tokens.
        words: tokens that vertices may emit at each position, bool [T, V].
        is_uniform: True where these are the same at all positions.

    Raises:
        GenError: guidance, which two graphs have no rule for.
    """

    model: LatticeModel

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.vertex_space, emitted = self._vertices()
        self.words = emitted.clone()
        if self.vertex_space.eos_token_id is not None:
            self.words[:, self.vertex_space.eos_token_id] = False
        self.is_uniform = bool((self.words == self.words[:1]).all())

    def _vertices(self) -> tuple[TokenSpace, Tensor]:
        """Return the space of what vertices emit, and what it allows, bool [T, V]."""
        return self.space, self.legal

    def _require_controls(self, space: TokenSpace, sampling: SamplingParams) -> None:
        if sampling.guided:
            raise GenError(
                f"sampling.guidance_scale is {sampling.guidance_scale}, and a graph has no vertex"
                " that another graph could guide; expected 1"
            )
        super()._require_controls(space, sampling)

    def predict(self) -> GraphOutput:
        """Run the forward pass.

        Raises:
            GenError: transitions or emissions that are no numbers.
        """
        graph = self.model.forward(self.prompt, self.prompt_length)
        graph = graph._replace(
            transitions=graph.transitions.double(), emissions=graph.emissions.double()
        )
        for name, values in (("transitions", graph.transitions), ("emissions", graph.emissions)):
            failed = values.isnan().flatten(1).any(1)
            if bool(failed.any()):
                raise GenError(
                    f"model {self.name or type(self.model).__name__} gives no {name} for item"
                    f" {int(failed.nonzero()[0])}: they are NaN; expected log-probabilities"
                )
        positions = self.prompt.shape[1] + graph.transitions.shape[1]
        return GraphOutput(graph, self.prompt_length + graph.lengths, positions, self)

    def emitted(self, emissions: Tensor, allowed: Tensor) -> Tensor:
        """Apply the sampling parameters to emissions [B, n, V], of tokens bool [V] or [n, V]."""
        return self._logprobs(emissions, allowed)

    def counts(self, canvas: Tensor | None = None) -> Tensor:
        """Return how many tokens rows may have: bool [B, T + 1].

        A row has all T tokens, or ends where the space allows the eos token from there on.

        Args:
            canvas: tokens long [B, T], masked, or the eos token where rows have ended; None for
                masked everywhere.

        Raises:
            GenError: the canvas holds other tokens.
        """
        steps, eos = len(self.words), self.vertex_space.eos_token_id
        emitted = self._vertices()[1]
        some = self.words.any(1).long().cumprod(0).bool()
        fits = torch.cat([some.new_ones(1), some])
        ends = torch.zeros(steps + 1, dtype=torch.bool, device=self.device)
        ends[steps] = True
        if eos is not None:
            ends[:steps] = emitted[:, eos].flip(0).long().cumprod(0).flip(0).bool()
        allowed = (fits & ends).expand(self.items, -1)
        if canvas is None:
            return allowed
        canvas = canvas.to(self.device)
        masked = self.space.is_masked(canvas)
        if eos is None or bool((~masked & (canvas != eos)).any()):
            raise GenError(
                "the canvas holds tokens, and the vertices of a graph have no positions to put"
                " them at; expected a canvas that is masked, with eos tokens behind"
            )
        most = masked.long().cumprod(1).sum(1, keepdim=True)
        return allowed & (torch.arange(steps + 1, device=self.device) <= most)

    def write(self, words: Tensor, counts: Tensor, graph: Graph) -> Written:
        """Make the tokens of all items: the words, then the eos token.

        Args:
            words: what the vertices of the paths emit, long [B, N].
            counts: how many each row has, long [B].
            graph: graphs of the rows.
        """
        eos = self.space.eos_token_id
        tokens = self.blank() + (0 if eos is None else eos)
        written = torch.arange(words.shape[1], device=words.device) < counts[:, None]
        tokens[:, : words.shape[1]][written] = words[written]
        # the eos token that ends a row counts as one of its tokens
        return Written(tokens, (counts + 1).clamp(max=tokens.shape[1]), torch.zeros_like(counts))


class SpokenLatticeTarget(LatticeTarget):
    """Target of a translator of speech: vertices emit words, and tokens say how they sound.

    The sampling parameters are about words. A second network computes the sound of all words at
    once from the states of their vertices.

    Raises:
        GenError: sampling parameters about single tokens, which are no words.
    """

    model: SpokenLatticeModel

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.bias is not None:
            raise GenError(
                "the sampling parameters name tokens, and vertices emit words that are spoken;"
                " expected no biased or banned tokens"
            )

    def _vertices(self) -> tuple[TokenSpace, Tensor]:
        return self.model.words, self.model.words.legal.to(self.device)

    def counts(self, canvas: Tensor | None = None) -> Tensor:
        if canvas is not None:
            raise GenError(
                "the canvas has positions of speech, and a graph of words has none to put tokens"
                " at; expected no canvas"
            )
        return super().counts()

    def write(self, words: Tensor, counts: Tensor, graph: Graph) -> Written:
        """Make the tokens of all items: the sound of the words (``SpokenLatticeModel.speak``)."""
        tokens = self.model.speak(graph, words, counts)
        made = torch.full_like(counts, tokens.shape[1])
        # the predictor has a position per word and one per slot
        return Written(tokens, made, counts * (1 + self.model.slots))


def graph_target(model: LatticeModel, *args, **kwargs) -> LatticeTarget:
    """Make the target of a model of graphs; arguments as of ``Target``."""
    kind = SpokenLatticeTarget if isinstance(model, SpokenLatticeModel) else LatticeTarget
    return kind(model, *args, **kwargs)
