"""Kind ``hidden``: linear maps to the hidden states of the next tokens in the middle of the model
(drafter ``hidden``).

With the state that token t is drawn from, map k gives what the upper layers make token t + 1 + k
of. They stay as they are, and so do the keys and values of the tokens that are known: the maps are
all that is trained, on the model's distributions behind them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gen.core.errors import GenError
from gen.models.adapters.draft_models import maps_of
from gen.models.adapters.layer_calls import LayerCache, drafted_logits, run_layers
from gen.models.adapters.slot_cache import hide
from gen.recipes.drafters.base import DepthOptions, Kind, Net
from gen.recipes.drafters.data import Batch, Teacher
from gen.recipes.drafters.kind_exit import sequence_states
from gen.recipes.drafters.losses import acceptance, mean_over

DECAY = 0.8


@dataclass(frozen=True)
class HiddenOptions(DepthOptions):
    """Options of the kind.

    Attributes:
        depth: number of maps k.
        layer: layers of the model before them; 0 for half of them.
        groups: positions of a sequence that a step trains on.
    """

    depth: int = 4
    layer: int = 0
    groups: int = 12


class HiddenTransfer(Kind):
    """Linear maps of a hidden state. Options: ``HiddenOptions``."""

    name = "hidden"
    options_type = HiddenOptions

    def __init__(self, teacher: Teacher, options: HiddenOptions):
        if options.depth < 1 or options.groups < 1:
            raise GenError(f"options came as {options}; expected depth and groups above 0")
        self.layer = options.layer or teacher.model.num_layers // 2
        super().__init__(teacher, options)
        self.generator = torch.Generator().manual_seed(31)

    def layers(self, teacher: Teacher) -> tuple[str, ...]:
        return (f"model.layers.{self.layer - 1}",)

    def arguments(self) -> dict[str, Any]:
        return {"layer": self.layer, "depth": self.options.depth}

    def network(self) -> nn.Module:
        self.teacher.model.model.requires_grad_(False)
        return maps_of(self.teacher.model, self.arguments())

    def transferred(self, net: Net, batch: Batch, anchors: Tensor, depth: int) -> Tensor:
        """Return the distributions of drafts.

        Args:
            net: the maps.
            batch: sequences.
            anchors: positions t of the last committed tokens, long [B, A].
            depth: drafts n behind each.

        Returns:
            Log-probabilities [B, A, n, V] of tokens t + 1 .. t + n.
        """
        model = self.teacher.model
        states, before = sequence_states(batch, self.teacher.layers[0])
        states, cache = states.to(model.dtype), LayerCache()
        every = torch.arange(states.shape[1], device=states.device)
        with torch.no_grad():
            run_layers(model, self.layer, states, every[None], cache=cache)
        row = torch.arange(len(states), device=states.device)[:, None]
        first = before.gather(1, anchors)  # slots of the states
        made = net(states[row, first])[:, :, :depth].to(model.dtype).flatten(1, 2)
        offset = torch.arange(1, depth + 1, device=states.device)
        last = model.max_positions  # what stands behind the last position is not read
        slots = (first[..., None] + offset).flatten(1)
        slots = slots if last is None else slots.clamp_max(last - 1)
        later = every > first.repeat_interleave(depth, 1)[..., None]
        own = torch.ones(depth, depth, device=states.device).tril()
        own = torch.block_diag(*[own] * anchors.shape[1]).bool()
        hidden = torch.cat([later, ~own.to(states.device).expand(len(states), -1, -1)], -1)
        mask = hide(hidden, made.dtype)[:, None]
        out = run_layers(model, self.layer, made, slots, mask, LayerCache(cache.made))
        logits = drafted_logits(model, out)
        at = (anchors[..., None] + offset).flatten(1)
        return self.logprobs(logits, at).unflatten(1, (-1, depth))

    def usable(self, batch: Batch) -> Tensor:
        weight = batch.weight.clone()
        weight[:, 0] = 0  # before the first forward pass there is no state
        return weight

    def logq(self, net: Net, batch: Batch) -> Tensor:
        anchors = self.positions(batch)[:, :-1]
        first = self.transferred(net, batch, anchors, 1)[:, :, 0]
        return torch.cat([torch.full_like(first[:, :1], -torch.inf), first], 1)

    def loss(self, net: Net, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        depth, total = self.options.depth, batch.tokens.shape[1]
        drawn = torch.rand(batch.weight.shape, generator=self.generator).to(batch.weight.device)
        order = drawn + (1 - batch.weight)  # positions before the eos token first
        anchors = order[:, :-1].argsort(1)[:, : self.options.groups]
        made = self.transferred(net, batch, anchors, depth).float()
        row = torch.arange(len(anchors), device=anchors.device)[:, None]
        losses, figures = [], {}
        for k in range(depth):
            at = anchors + 1 + k
            stands = at.clamp_max(total - 1)
            logp, weight = batch.logp[row, stands], batch.weight[row, stands] * (at < total)
            losses.append(DECAY**k * mean_over(self.divergence(logp, made[:, :, k]), weight))
            accepted = mean_over(acceptance(logp, made[:, :, k].detach()), weight)
            figures[f"acceptance {k}"] = accepted.item()
        return torch.stack(losses).sum() / sum(DECAY**k for k in range(depth)), figures
