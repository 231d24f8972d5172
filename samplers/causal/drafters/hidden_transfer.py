"""Drafts of the target's upper layers, from hidden states that linear maps make of a single one.

The state that the last committed token was drawn from is taken at a layer in the middle. Map i of
it stands for the state of the token i positions further, and the layers above turn all of them
into distributions, in one pass over k columns:

    pseudo-states   s_i = A_i h + b_i,  i = 1 .. k, at the i-th slot behind that of h
    attention       s_i sees the target's keys up to the slot of h, and s_1 .. s_i
    draft of depth i - 1 from s_i, which knows nothing of the tokens in between

    hidden    Wu et al., "Parallel Decoding via Hidden Transfer for Lossless Large Language Model
              Acceleration" (arXiv 2404.12022). There the pseudo-states stand in the target's own
              forward pass; here they take one of the layers above, for k columns

Guarantee: that of the verifier, whatever the maps. ``gen.recipes.drafters`` trains them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gen.core.errors import GenError, bad_value
from gen.core.registry import register
from gen.models.adapters.layer_calls import LayerCache, run_layers
from gen.models.adapters.masks import hide
from gen.models.adapters.protocols import SharedModel
from gen.models.targets.base import legal_at
from gen.models.targets.causal import CausalTarget
from gen.samplers.causal.drafters.base import DraftSource, Nodes
from gen.samplers.causal.drafters.heads import checked_load, unfiltered
from gen.samplers.causal.drafters.trained import language_model, read_drafter
from gen.samplers.engine.draft import Draft, Verdict
from gen.samplers.engine.host import to_device
from gen.samplers.engine.rows import RowState
from gen.samplers.engine.step_context import CausalStep

KIND = "hidden"
NORM = "model.norm"


class TransferMaps(nn.Module):
    """Linear maps from one hidden state to those of the k tokens behind it.

    Args:
        width: channels D.
        depth: number of maps k; all begin as the identity.
    """

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width).repeat(depth, 1, 1))
        self.bias = nn.Parameter(torch.zeros(depth, width))

    def forward(self, state: Tensor) -> Tensor:
        """Map states [..., D] to [..., k, D]."""
        state = state.to(self.weight.dtype)
        return torch.einsum("...d,ked->...ke", state, self.weight) + self.bias


def maps_of(model: SharedModel, net: Mapping[str, Any]) -> TransferMaps:
    """Make the maps from the arguments of a folder: ``layer`` and ``depth``.

    Raises:
        GenError: the model has no layer on either side.
    """
    layer = int(net["layer"])
    if not 0 < layer < model.num_layers:
        raise bad_value("layer", layer, f"from 1 to {model.num_layers - 1}")
    return TransferMaps(model.config.hidden_size, int(net["depth"]))


def drafted_logits(model: SharedModel, states: Tensor) -> Tensor:
    """Return the logits [..., V] of states behind the last layer."""
    head = model.output_weight
    hidden = model.model.get_submodule(NORM)(states.to(head.dtype))
    return nn.functional.linear(hidden, head)


class HiddenNodes(Nodes):
    """Distributions of pseudo-states.

    Args:
        target: the model with its items.
        maps: the maps.
        layer: layers of the target before them.
    """

    state = RowState()  # states that the last committed tokens were drawn from, [b, D]
    known = RowState(start=False)  # rows that have one, bool [b]

    def __init__(self, target: CausalTarget, maps: TransferMaps, layer: int):
        self.target, self.maps, self.layer = target, maps, layer
        self.model = language_model(target, KIND)
        if not target.cache.has_slots:
            raise GenError(
                f"the drafter {KIND} reads the keys and values of a cache, and the model has a"
                f" {type(target.cache).__name__}; expected a causal language model of transformers"
            )
        self.hidden_layers = (f"model.layers.{layer - 1}",)
        self.depth, self.width = maps.bias.shape
        self.sampling = unfiltered(target.sampling)
        self.state = maps.bias.new_zeros(target.rows, self.width).detach()
        self.known = torch.zeros(target.rows, dtype=torch.bool, device=target.device)
        self.num_passes = torch.zeros(target.items, dtype=torch.long, device=target.device)

    @property
    def nfe(self) -> list[int]:
        return self.num_passes.tolist()

    def count_passes(self, step, passes):
        self.num_passes.index_add_(0, step.rows, passes.clamp_max(1) * self.known)

    @torch.no_grad()
    def begin(self, step: CausalStep, tokens: Tensor) -> Tensor:
        size, length = self.target.legal.shape[-1], self.target.length
        if self.target.cache.layers[-1].keys is None:  # nothing has run yet
            shape = len(tokens), self.depth, size
            self.logq = self.maps.bias.new_full(shape, -torch.inf, dtype=torch.float32)
            return self.logq[:, :1]
        # the state's slot is that of the token before the last one
        first = (self.target.num_prompt_tokens + step.start - 2)[:, None]
        index = torch.arange(1, self.depth + 1, device=tokens.device)
        end = self.target.num_prompt_tokens[:, None] + length - 1
        slots = torch.minimum(first + index, end)
        logits = drafted_logits(self.model, self._transferred(first, slots))
        at = (step.start[:, None] + index - 1).clamp_max(length - 1)
        legal = legal_at(self.target.legal, at)
        self.logq = self.sampling(logits[..., :size], None, legal)
        self.logq = torch.where(self.known[:, None, None], self.logq, -torch.inf)
        return self.logq[:, :1]

    def _transferred(self, first: Tensor, slots: Tensor) -> Tensor:
        """Run the upper layers over pseudo-states of all rows.

        Args:
            first: slots of the states, long [b, 1].
            slots: slots of the pseudo-states, long [b, k].

        Returns:
            States behind the last layer, [b, k, D].
        """
        cache, rows = self.target.cache, len(slots)
        before = {
            n: (
                cache.layers[n].keys[:rows, : cache.slots].transpose(1, 2),
                cache.layers[n].values[:rows, : cache.slots].transpose(1, 2),
            )
            for n in range(self.layer, self.model.num_layers)
        }
        states = self.maps(self.state).to(self.model.output_weight.dtype)
        slot = torch.arange(cache.slots, device=slots.device)
        hidden = (slot > first)[:, None].expand(-1, self.depth, -1)
        later = torch.ones(self.depth, self.depth, dtype=torch.bool, device=slots.device).triu(1)
        hidden = torch.cat([hidden, later.expand(rows, -1, -1)], -1)
        mask = hide(hidden, states.dtype)[:, None]
        return run_layers(self.model, self.layer, states, slots, mask, LayerCache(before))

    def extend(self, step: CausalStep, tree: Draft, first: int) -> Tensor:
        depth = tree.depth[:, first:]
        row = torch.arange(len(depth), device=depth.device)[:, None]
        found = self.logq[row, depth.clamp_max(self.depth - 1)]
        return torch.where((depth < self.depth)[..., None], found, -torch.inf)

    def accept(self, step: CausalStep, verdict: Verdict) -> None:
        assert step.hidden_states is not None, "the target was asked for them"
        states, column = step.hidden_states[self.hidden_layers[0]], verdict.last_column
        row = torch.arange(len(column), device=column.device)
        state = states[row, column.clamp_max(states.shape[1] - 1)].to(self.state.dtype)
        goes_on = to_device(step.widths > 0, column.device)  # other rows wait
        self.state = torch.where(goes_on[:, None], state, self.state)
        self.known = self.known | goes_on


@register("drafter", KIND)
class Hidden(DraftSource):
    """Drafts with the target's upper layers, from states that trained maps make of one. Parameters:
    ``drafter_weights``."""

    needs_weights = True

    @classmethod
    def nodes(cls, sampler, target, draft):
        facts, weights = read_drafter(sampler.drafter_weights, KIND, target)
        maps = checked_load(maps_of(language_model(target, KIND), facts.net), weights, KIND)
        return HiddenNodes(target, maps, int(facts.net["layer"]))
