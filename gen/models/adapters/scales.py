"""Adapter of the built-in next-scale models (``gen.models.nets.grid_scales``)."""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.models.adapters.base import ModelAdapter
from gen.models.adapters.slot_cache import SlotCache
from gen.models.nets.grid_scales import GridScalesModel


class GridScalesState:
    """Conditions of rows, and one cache per part of the trunk and pass; see ``ScalesState``.

    Attributes:
        prompt: words, long [B, P].
        caches: caches of the parts that a pass runs, by whether it refines; absent before its first
            call.
        origin: state that these rows were selected from, and their numbers in it, long [B]; it
            reads the condition for all of them. None for a state that ``begin`` made.
    """

    def __init__(self, prompt: Tensor, origin: tuple[GridScalesState, Tensor] | None = None):
        self.prompt, self.origin = prompt, origin
        self.caches: dict[bool, list[SlotCache]] = {}

    def select(self, rows: Tensor) -> GridScalesState:
        """Return the state of some rows, long [n], which may repeat."""
        return GridScalesState(self.prompt[rows], (self, rows))


class ScalesLM(ModelAdapter):
    """Next-scale model with a KV cache; see ``ScalesModel``.

    A scale of a Markov model takes the slots right behind the condition, so that the next one
    writes over it.
    """

    passes = ("fill", "refine")
    model: GridScalesModel
    leak = False

    def __init__(self, model: GridScalesModel):
        self.model, self.config = model.eval(), model.config
        self.quantize, self.vocab_size = model.quantize, model.config.codes
        self.markov, self.refines = model.config.markov, model.refines
        self.prefix_length: int = model.config.prefix_length

    @property
    def output_heads(self) -> list[torch.nn.Linear]:
        """See ``ModelAdapter``."""
        return [self.model.head, *([self.model.refine_head] if self.refines else [])]

    def begin(self, prompt: Tensor, lengths: Tensor) -> GridScalesState:
        """Make the state of new rows; see ``ScalesModel``.

        Raises:
            GenError: conditions that are not of ``prefix_length`` words.
        """
        width, shortest = prompt.shape[1], int(lengths.min())
        if {width, shortest} != {self.prefix_length}:
            raise GenError(
                f"the conditions have {shortest} to {width} words; expected {self.prefix_length},"
                " as the model was trained"
            )
        return GridScalesState(prompt)

    @torch.no_grad()
    def fill(self, state: GridScalesState, maps: Tensor, scale: int) -> Tensor:
        """Compute the logits [B, n_k, V] of a scale; see ``ScalesModel``."""
        return self._run(state, self.model.embed_maps(maps.to(self.dtype), scale), scale, False)

    @torch.no_grad()
    def refine(
        self, state: GridScalesState, maps: Tensor, ids: Tensor, hidden: Tensor, scale: int
    ) -> Tensor:
        """Compute the logits [B, n_k, V] of a partly known scale; see ``ScalesModel``.

        Raises:
            GenError: the model has no such pass.
        """
        if not self.refines:
            raise GenError(
                "the model fills scales and does not refine them; expected one with tail_layers"
            )
        own = self.quantize.own(ids, hidden, scale)
        inputs = self.model.embed_refined(maps.to(self.dtype), own.to(self.dtype), hidden, scale)
        return self._run(state, inputs, scale, True)

    def _run(self, state: GridScalesState, inputs: Tensor, scale: int, refine: bool) -> Tensor:
        """Run a pass over a scale [B, n_k, C], together with the condition if it is the first."""
        width, prefix, sizes = inputs.shape[1], self.prefix_length, self.quantize.lengths
        first = prefix + (0 if self.markov else sum(sizes[:scale]))
        slots = torch.arange(first, first + width, device=inputs.device)
        columns = self.model.columns([scale], inputs.device)
        last = slots[-1:].expand(width)
        if not self._copied(state, refine):
            condition = torch.arange(prefix, device=inputs.device)
            inputs = torch.cat([self.model.embed_words(state.prompt), inputs], 1)
            slots, columns = torch.cat([condition, slots]), torch.cat([condition, columns])
            last = torch.cat([condition[-1:].expand(prefix), last])
        states = self._through(state, inputs, (slots, columns, last), refine)
        return self.model.logits(states[:, -width:], refine)

    def _copied(self, state: GridScalesState, refine: bool) -> bool:
        """Return True if a state has the caches of a pass, copied from its origin at need.

        The origin reads the condition if no pass has, so that rows that repeat share it.
        """
        if refine not in state.caches and state.origin is not None:
            origin, rows = state.origin
            if not self._copied(origin, refine):
                condition = torch.arange(self.prefix_length, device=rows.device)
                words, last = self.model.embed_words(origin.prompt), condition[-1:]
                at = condition, condition, last.expand(self.prefix_length)
                self._through(origin, words, at, refine)
            state.caches[refine] = [cache.of_rows(rows) for cache in origin.caches[refine]]
        return refine in state.caches

    def _through(
        self,
        state: GridScalesState,
        inputs: Tensor,
        at: tuple[Tensor, Tensor, Tensor],
        refine: bool,
    ) -> Tensor:
        """Run the layers of a pass over inputs [B, L, C], whose keys and values stay.

        Args:
            state: state of the rows.
            inputs: embedded words and maps.
            at: slot, position id and last visible slot of each of them, long [L] each.
            refine: whether the pass refines.
        """
        sizes, (slots, columns, last) = self.quantize.lengths, at
        if refine not in state.caches:
            room = self.prefix_length + (max(sizes) if self.markov else sum(sizes))
            tail = self.config.tail_layers
            layers = [self.config.num_hidden_layers - tail] + [tail] * self.refines
            state.caches[refine] = [SlotCache(count, room) for count in layers]
        caches, rows = state.caches[refine], len(inputs)
        masks = [
            cache.at(slots.expand(rows, -1), self.dtype, last.expand(rows, -1)) for cache in caches
        ]
        return self.model.run(inputs, columns, masks[0][0, 0], caches, refine)
