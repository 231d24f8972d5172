"""Models that draft for a target: its own network, with trained maps in, behind or in the place of
its layers. They share all other parameters with it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from gen.core.errors import GenError, bad_value
from gen.models.adapters.layer_calls import decoder_layers
from gen.models.adapters.layer_plans import keep_layers, kept_layers, layers_of, replaced
from gen.models.adapters.protocols import SharedModel
from gen.models.adapters.wrapped_layers import WrappedLayer, with_wrapped
from gen.models.draft_heads.layer_maps import Corrections, Repairs, Routers, TransferMaps
from gen.models.draft_heads.longspec import LongSpecShape
from gen.models.load.networks import config_field

# number of a layer and its input [B, L, D] -> logits of its router [B, L], output if closed
Routing = Callable[[int, Tensor], tuple[Tensor, Tensor]]


def exit_layer(model: SharedModel, layers: int) -> nn.Module:
    """Make the layer behind the first ones, with the weights of the network's last layer.

    Args:
        model: the target's model.
        layers: layers before the exit.

    Raises:
        GenError: the model has no layer behind these.
    """
    if not 0 < layers < model.num_layers:
        raise bad_value("exit_layer", layers, f"from 1 to {model.num_layers - 1}")
    found = cast(nn.ModuleList, model.model.get_submodule(layers_of(model.model, model.num_layers)))
    # its keys and values have the slots of the layer that it stands for
    own = copy.deepcopy(found[layers])
    own.load_state_dict(found[-1].state_dict())
    return own.requires_grad_(True)


def exit_model(model: SharedModel, layers: int, own: nn.Module) -> SharedModel:
    """Make the model of the first layers and a layer behind them (``exit_layer``)."""
    return model.with_network(keep_layers(model.model, range(layers), model.num_layers, own))


def repairs_of(model: SharedModel, net: Mapping[str, Any]) -> Repairs:
    """Make the maps from the arguments of a folder: ``kept_layers`` and ``rank``.

    Raises:
        GenError: the plan has a layer that the model lacks.
    """
    kept = kept_layers(net["kept_layers"], model.num_layers)
    skipped = tuple(n for n in range(model.num_layers) if n not in kept)
    torch.manual_seed(0)
    return Repairs(model.config.hidden_size, int(net["rank"]), skipped)


def repaired_model(model: SharedModel, repairs: Repairs) -> SharedModel:
    """Make the model with maps in the place of layers."""
    own = dict(repairs.maps.items())
    layers = [own.get(str(n), layer) for n, layer in enumerate(decoder_layers(model))]
    name = layers_of(model.model, model.num_layers)
    return model.with_network(replaced(model.model, name, nn.ModuleList(layers)))


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


def dropped_layers(num_layers: int, every: int) -> tuple[int, ...]:
    """Number the layers that are dropped between full tokens.

    Raises:
        GenError: there are none.
    """
    found = tuple(n for n in range(num_layers) if every > 0 and n % every)
    if not found:
        raise GenError(
            f"every came as {every}, which drops none of {num_layers} layers; expected at least 2,"
            " and a model of at least 2 layers"
        )
    return found


def corrections_of(model: SharedModel, net: Mapping[str, Any]) -> Corrections:
    """Make the maps from the arguments of a folder: ``every``, ``rank`` and ``alpha``."""
    torch.manual_seed(0)
    dropped = dropped_layers(model.num_layers, int(net["every"]))
    return Corrections(model.config.hidden_size, int(net["rank"]), float(net["alpha"]), dropped)


class DroppedLayer(WrappedLayer):
    """A layer that runs at full tokens.

    Args:
        layer: the decoder layer.
        number: its number.
        correct: maps the layer's input [B, L, D] to what is added to the last full token's output.
        cycle: tokens from one full token to the next.
    """

    def __init__(
        self, layer: nn.Module, number: int, correct: Callable[[Tensor], Tensor], cycle: int
    ):
        super().__init__(layer, number)
        self.correct, self.cycle = correct, cycle

    def _is_full(self, positions: Tensor, starts: Tensor) -> Tensor:
        """Tell which positions [B, L] are those of full tokens, bool."""
        return (positions < starts) | ((positions - starts) % self.cycle == 0)

    def states(self, call):
        states, cache, mask = call.states, call.cache, call.mask
        name, starts = f"output {self.number}", cache.starts.to(states.device)
        positions = call.positions.to(states.device)
        full = self._is_full(positions, starts)
        if bool(full.any()):
            whole = call.run(self._full_alone(mask, full, starts, cache))
            outputs = cache.note(name, whole)
        else:
            whole, outputs = None, cache.noted(name)
        slots = self._last_full(positions, starts, mask, cache)
        row = torch.arange(len(states), device=states.device)[:, None]
        between = outputs[row, slots] + self.correct(states)
        return between if whole is None else torch.where(full[..., None], whole, between)

    def _full_alone(self, mask: Tensor, full: Tensor, starts: Tensor, cache: Any) -> Tensor:
        """Hide the slots of other tokens in a mask [B, 1, L, S]."""
        slot = torch.arange(mask.shape[-1], device=mask.device)
        # drafts of a tree have slots above those of positions
        seen = self._is_full(slot, starts).scatter(1, cache.positions.to(mask.device), full)
        return torch.where(seen[:, None, None], mask, torch.finfo(mask.dtype).min)

    def _last_full(self, positions: Tensor, starts: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """Find the slot of the last full token at or before each position, long [B, L]."""
        behind = starts + (positions - starts) // self.cycle * self.cycle
        at = torch.where(positions < starts, positions, behind)
        own = cache.positions.to(positions.device)
        if positions.shape[1] == 1 or torch.equal(own, positions):
            return at
        # of a tree, where it may be a draft on the same branch
        count = own.shape[1]
        seen = mask[:, 0].gather(-1, own[:, None].expand(-1, count, -1)) == 0
        found = seen & (positions[:, None] == at[..., None])
        drafted = own.gather(1, found.long().argmax(-1))
        return torch.where(found.any(-1), drafted, at)


def dropping_model(
    model: SharedModel, corrections: Callable[[int, Tensor], Tensor], net: Mapping[str, Any]
) -> SharedModel:
    """Make the model whose layers are dropped, with the arguments of a folder: ``every`` and
    ``cycle``."""
    dropped, cycle = dropped_layers(model.num_layers, int(net["every"])), int(net["cycle"])

    def wrap(layer: nn.Module, number: int) -> nn.Module:
        if number not in dropped:
            return layer
        return DroppedLayer(layer, number, partial(corrections, number), cycle)

    return with_wrapped(model, wrap)


def maps_of(model: SharedModel, net: Mapping[str, Any]) -> TransferMaps:
    """Make the maps from the arguments of a folder: ``layer`` and ``depth``.

    Raises:
        GenError: the model has no layer on either side.
    """
    layer = int(net["layer"])
    if not 0 < layer < model.num_layers:
        raise bad_value("layer", layer, f"from 1 to {model.num_layers - 1}")
    return TransferMaps(model.config.hidden_size, int(net["depth"]))


def require_one_width(model: SharedModel, method: str) -> int:
    """Return the channels of a model's embeddings, which are those that its head reads.

    Args:
        model: the target's model.
        method: name of the drafter, for messages.

    Raises:
        GenError: the embeddings are of another width than what the head reads.
    """
    width, read = model.input_embeddings.weight.shape[1], model.output_weight.shape[1]
    if width != read:
        raise GenError(
            f"the drafter {method} needs embeddings as wide as what the head reads, and the model"
            f" has {width} and {read} channels"
        )
    return width


def longspec_shape(model: SharedModel, inner: int, window: int) -> LongSpecShape:
    """Return the sizes of the layer of a model.

    Args:
        model: the target's model.
        inner: channels of the MLP.
        window: slots of the window.

    Raises:
        GenError: the model's embeddings are of another width than what its head reads.
    """
    config, width = model.config, require_one_width(model, "longspec")
    heads = config.num_attention_heads
    dim = config_field(config, "head_dim") or config.hidden_size // heads
    return LongSpecShape(width, heads, config.num_key_value_heads, dim, inner, window)


def masked_network(model: SharedModel, net: Mapping[str, Any]) -> nn.Module:
    """Make a small network of the target's architecture with one mask token more.

    Args:
        model: the target's model.
        net: ``width`` and ``layers`` of the small one.
    """
    config, width = copy.deepcopy(model.config), int(net["width"])
    config.hidden_size, config.num_hidden_layers = width, int(net["layers"])
    config.head_dim = min(32, width)
    config.num_attention_heads = config.num_key_value_heads = max(1, width // 32)
    config.intermediate_size = max(32, width * 8 // 3 // 32 * 32)
    config.vocab_size = model.config.vocab_size + 1
    config.tie_word_embeddings = True
    made: Any = type(model.model)(config)
    made.tie_weights()
    return made


class PromptTokens(nn.Module):
    """Embeddings of the mask tokens of k - 1 depths.

    Args:
        depth: drafts k.
        embedding: the target's embeddings [V, D], whose mean the tokens begin at.
    """

    def __init__(self, depth: int, embedding: Tensor):
        super().__init__()
        mean = embedding.detach().mean(0)
        self.vectors = nn.Parameter(mean.repeat(depth - 1, 1))

    def forward(self) -> Tensor:
        """Return the embeddings, [k - 1, D]."""
        return self.vectors


def prompt_model(model: SharedModel, tokens: PromptTokens) -> SharedModel:
    """Make the target's model with further ids for prompt tokens, those behind its vocabulary."""
    network, table = model.model, model.input_embeddings
    name = next(name for name, module in network.named_modules() if module is table)
    rows = torch.cat([table.weight, tokens.vectors.to(table.weight)]).detach()
    extended = nn.Embedding.from_pretrained(rows).eval()
    return model.with_network(replaced(network, name, extended))
