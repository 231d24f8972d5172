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

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gen.core.registry import register, registry
from gen.models.adapters.layer_calls import LayerCache, drafted_logits, run_layers
from gen.models.adapters.masks import hide
from gen.samplers.causal.drafters.base import DepthNodes
from gen.samplers.causal.drafters.heads import StateNodes, kept_where_waiting
from gen.samplers.engine.rows import RowState

if TYPE_CHECKING:
    from gen.models.draft_heads.layer_maps import TransferMaps
    from gen.models.targets.causal import CausalTarget

KIND = "hidden"


@register("drafter", KIND)
class Hidden(DepthNodes, StateNodes):
    """Drafts with the target's upper layers, from states that trained maps make of one. Parameters:
    ``drafter_weights``.

    ``layer``: layers of the target before the maps.
    """

    needs_weights = True

    state = RowState()  # states that the last committed tokens were drawn from, [b, D]

    def __init__(self, target: CausalTarget, maps: TransferMaps, layer: int):
        super().__init__(target, KIND)
        self.require_slots(KIND)
        self.maps, self.layer, self.depth = maps, layer, len(maps.bias)
        self.hidden_layers = (f"model.layers.{layer - 1}",)

    def count_passes(self, step, passes):
        super().count_passes(step, passes.clamp_max(1))

    @torch.no_grad()
    def begin(self, step, tokens):
        if not self.known.any():
            self.logq = self.nothing(len(tokens), self.depth)
            return self.logq[:, :1]
        # the state's slot is that of the token before the last one
        before, index = self.target.num_prompt_tokens[:, None], self._index(tokens) + 1
        first = before + step.start[:, None] - 2
        slots = torch.minimum(first + index, before + self.target.length - 1)
        logits = drafted_logits(self.model, self._transferred(first, slots))
        at = step.start[:, None] + index - 1
        self.logq = self.logprobs(logits[..., : len(self.head)], at)
        return self.logq[:, :1]

    def _index(self, like: Tensor) -> Tensor:
        return torch.arange(self.depth, device=like.device)

    def _transferred(self, first: Tensor, slots: Tensor) -> Tensor:
        """Run the upper layers over pseudo-states of all rows, in ``slots`` long [b, k], behind the
        states in the slots ``first``, long [b, 1]: states behind the last layer, [b, k, D]."""
        upper = range(self.layer, self.model.num_layers)
        before = {layer: self.of_target(layer, len(slots)) for layer in upper}
        states = self.maps(self.state).to(self.model.output_weight.dtype)
        slot, index = torch.arange(self.target.cache.slots, device=slots.device), self._index(slots)
        hidden = (slot > first)[:, None].expand(-1, self.depth, -1)
        later = (index > index[:, None]).expand(len(slots), -1, -1)
        mask = hide(torch.cat([hidden, later], -1), states.dtype)[:, None]
        return run_layers(self.model, self.layer, states, slots, mask, LayerCache(before))

    def observe(self, step, draft, output, verdict):
        state = self.last_states(step, verdict).to(self.maps.bias.dtype)
        self.state = kept_where_waiting(step, state, self.state)
        super().observe(step, draft, output, verdict)

    @classmethod
    def of(cls, sampler, target, draft):
        return cls(target, *registry.get("drafting", KIND)(target, sampler.drafter_weights))
