"""Kind ``router``: routers that choose some of the model's layers for each prompt, and low-rank
maps for the others (drafter ``router``).

    loss        divergence of the draft with drawn decisions + penalty x mean over layers of P(open)
    decision    open with the probability P(open) of layer and prompt, drawn in every step; its
                gradient is that of P(open) (straight-through)

FiRST mixes both outputs of a layer by its probability. Drawn decisions train what is decoded: one
output or the other. Their expected loss is linear in each probability, so that these end near 0 or
1. The layers themselves, and norm and head, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gen.core.errors import GenError
from gen.models.adapters.draft_models import openness, routers_of
from gen.models.adapters.layer_calls import call_layer, decoder_layers, drafted_logits
from gen.recipes.drafters.base import Kind, Net, Options
from gen.recipes.drafters.data import Batch, Teacher
from gen.recipes.drafters.losses import acceptance, mean_over


@dataclass(frozen=True)
class RouterOptions(Options):
    """Options of the kind.

    Attributes:
        penalty: price of a share 1 of the layers, in units of the loss.
        rank: rank of the maps of closed layers; 0 for none.
    """

    lr: float = 1e-2
    penalty: float = 1.0
    rank: int = 16


def decided(probability: Tensor) -> Tensor:
    """Return the decisions of decoding: 1 where a probability is above 1/2, else 0."""
    return (probability > 0.5).to(probability.dtype)


class RouterKind(Kind):
    """Routers of layers. Options: ``RouterOptions``."""

    name = "router"
    is_model = True
    options_type = RouterOptions

    def __init__(self, teacher: Teacher, options: RouterOptions):
        if options.rank < 0 or options.penalty < 0:
            raise GenError(f"options came as {options}; expected rank and penalty of at least 0")
        super().__init__(teacher, options)
        self.generator = torch.Generator().manual_seed(37)

    def arguments(self) -> dict[str, Any]:
        return {"rank": self.options.rank}

    def network(self) -> nn.Module:
        self.teacher.model.model.requires_grad_(False)
        return routers_of(self.teacher.model, self.arguments())

    def drawn(self, probability: Tensor) -> Tensor:
        """Draw decisions with probabilities [B], whose gradients they have."""
        noise = torch.rand(probability.shape, generator=self.generator).to(probability)
        return (noise < probability).to(probability) + probability - probability.detach()

    def routed(
        self, net: Net, batch: Batch, decide: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Run the routed model over sequences.

        Args:
            net: the routers.
            batch: sequences.
            decide: turns the probabilities [B] that a layer is open into decisions.

        Returns:
            Log-probabilities [B, T, V] of the first draft, and the probabilities [B, layers].
        """
        model = self.teacher.model
        ids, before = batch.inputs()
        ids = ids[:, :-1]  # nothing is drafted behind the last token
        at = torch.arange(ids.shape[1], device=ids.device)[None]
        states, found = model.embedded(ids, at.expand_as(ids)), []
        rotations = model.rotations(states, at)
        for number, layer in enumerate(decoder_layers(model)):
            logits, closed = net(number, states)
            found.append(openness(logits.float(), batch.prompt_length[:, None] - 1))
            is_open = decide(found[-1])[:, None, None].to(states.dtype)
            whole = call_layer(layer, states, at, rotations)
            states = is_open * whole + (1 - is_open) * closed
        row = torch.arange(len(ids), device=ids.device)[:, None]
        logits = drafted_logits(model, states[row, before])
        return self.logprobs(logits, self.positions(batch)), torch.stack(found, 1)

    def logq(self, net: Net, batch: Batch) -> Tensor:
        return self.routed(net, batch, decided)[0]

    def loss(self, net: Net, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        logq, probability = self.routed(net, batch, self.drawn)
        weight = self.usable(batch)
        loss = mean_over(self.divergence(batch.logp, logq.float()), weight)
        accepted = mean_over(acceptance(batch.logp, logq.detach().float()), weight)
        layers = decided(probability.detach()).sum(1).mean()
        figures = {"acceptance": accepted.item(), "layers": layers.item()}
        return loss + self.options.penalty * probability.mean(), figures
