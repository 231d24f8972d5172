"""Drafts of the target itself, of whose layers a router chooses some for each prompt.

    router of layer l   p_t = sigmoid(w_l x_t + b_l), x_t the layer's input at a prompt's token
    decision            open if the mean of p_t over the prompt without its last token (of a prompt
                        of one token: p_t) is above 1/2
    open                y = layer(x), at the prompt and behind it, with keys and values of its own
    closed              y = x + B A x, a trained map of rank r; r = 0: y = x

Decisions are made layer after layer while the prompt is computed, and hold for all drafts of the
row. With all layers open the draft is the target itself.

Jain et al., "FiRST: Finetuning Router-Selective Transformers for Input-Adaptive Latency Reduction"
(arXiv 2410.12513). There what is left decodes by itself, and LoRA adapters in all layers make up
for those that are skipped; here it drafts, the target's layers stay as they are, and the map of a
closed layer is all that makes up for it.

Guarantee: that of the verifier, whatever the routers. ``gen.recipes.drafters`` trains them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gen.core.registry import register
from gen.models.adapters.protocols import SharedModel
from gen.models.adapters.wrapped_layers import WrappedLayer, with_wrapped
from gen.samplers.causal.drafters.altered import altered_target
from gen.samplers.causal.drafters.model import ModelDrafts
from gen.samplers.causal.drafters.skip import Repair

KIND = "router"
OPEN = 1.0  # bias that routers begin with

# number of a layer and its input [B, L, D] -> logits of its router [B, L], output if closed
Routing = Callable[[int, Tensor], tuple[Tensor, Tensor]]


class Routers(nn.Module):
    """Routers of all layers, and maps for closed ones.

    Args:
        width: channels D.
        layers: number of layers.
        rank: rank of the maps; 0 for none.
    """

    def __init__(self, width: int, layers: int, rank: int):
        super().__init__()
        gates = [nn.Linear(width, 1) for _ in range(layers)]
        for gate in gates:
            nn.init.zeros_(gate.weight)
            nn.init.constant_(gate.bias, OPEN)
        self.gates = nn.ModuleList(gates)
        self.maps = nn.ModuleList(Repair(width, rank) for _ in range(layers if rank else 0))

    def forward(self, number: int, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the router's logits [B, L] of a layer's input [B, L, D], and the layer's output
        [B, L, D] if it is closed."""
        gate = self.gates[number]
        logits = gate(states.to(next(gate.parameters()).dtype))[..., 0]
        return logits, self.maps[number](states) if len(self.maps) else states


def routers_of(model: SharedModel, net: Mapping[str, Any]) -> Routers:
    """Make the routers from the arguments of a folder: ``rank``."""
    torch.manual_seed(0)
    return Routers(model.config.hidden_size, model.num_layers, int(net["rank"]))


def openness(logits: Tensor, starts: Tensor) -> Tensor:
    """Return the mean of a router's probabilities over the prompts, [B].

    Args:
        logits: of slots 0 .. S - 1, [B, S].
        starts: slot of the last token of each prompt, long [B, 1].
    """
    slot = torch.arange(logits.shape[1], device=logits.device)
    prompt = slot < starts.clamp_min(1)
    return torch.where(prompt, logits.sigmoid(), 0).sum(1) / prompt.sum(1)


class RoutedLayer(WrappedLayer):
    """A layer that is open or closed for each row.

    Args:
        layer: the decoder layer.
        number: its number.
        route: maps the layer's input [B, L, D] to the router's logits and the output if closed.
    """

    def __init__(
        self, layer: nn.Module, number: int, route: Callable[[Tensor], tuple[Tensor, Tensor]]
    ):
        super().__init__(layer, number)
        self.route = route

    def states(self, call):
        states, cache = call.states, call.cache
        name, starts = f"router {self.number}", cache.starts.to(states.device)
        logits, closed = self.route(states)
        if bool((call.positions.to(states.device) < starts.clamp_min(1)).any()):
            known = cache.note(name, logits[..., None])
        else:
            known = cache.noted(name)
        is_open = openness(known[..., 0], starts) > 0.5
        if not bool(is_open.any()):
            return closed
        return torch.where(is_open[:, None, None], call.run(call.mask), closed)


def routed_model(model: SharedModel, routers: Routing) -> SharedModel:
    """Make the model whose layers have routers."""
    return with_wrapped(model, lambda layer, n: RoutedLayer(layer, n, partial(routers, n)))


@register("drafter", KIND)
class Router(ModelDrafts):
    """Drafts with those of the target's own layers that trained routers choose for the prompt.
    Parameters: ``drafter_weights``, and those of the drafter model without ``draft_model``."""

    needs_draft_model = False
    needs_weights = True

    @classmethod
    def draft_of(cls, sampler, target, draft):
        folder = sampler.drafter_weights
        return altered_target(
            folder, KIND, target, routers_of, lambda model, net, _: routed_model(model, net)
        )
