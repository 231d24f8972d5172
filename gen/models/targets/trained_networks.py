"""Networks that draft for a target, with the weights of its trained drafters. Each is registered
under the name of the drafter that reads it, as a function of the target and the folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gen.core.registry import register
from gen.models.adapters import draft_models as models
from gen.models.adapters.mask_attention import MaskAttention, with_masks
from gen.models.draft_heads.eagle import EagleLayer, EagleShape
from gen.models.draft_heads.heads import MedusaHeads, hydra_of
from gen.models.draft_heads.longspec import LongSpecLayer, LongSpecShape
from gen.models.targets.trained_drafters import checked_load, projection, read_drafter

if TYPE_CHECKING:
    from gen.models.adapters.protocols import SharedModel
    from gen.models.targets.causal import CausalTarget


@register("drafting", "medusa")
def medusa(target: CausalTarget, folder: str | None) -> tuple[MedusaHeads, tuple[str, ...]]:
    """Make the heads; with them come the layers of the target that they read."""
    facts, weights = read_drafter(folder, "medusa", target)
    net = MedusaHeads(projection(target, "medusa"), int(facts.net["depth"]))
    return checked_load(net, weights, "medusa"), facts.layers


@register("drafting", "hydra")
def hydra(target: CausalTarget, folder: str | None) -> tuple[nn.Module, tuple[str, ...]]:
    """Make the heads, or the layer that drafts from entries, as ``medusa`` does."""
    facts, weights = read_drafter(folder, "hydra", target)
    net = hydra_of(facts.net, projection(target, "hydra"))
    return checked_load(net, weights, "hydra"), facts.layers


@register("drafting", "eagle")
def eagle(target: CausalTarget, folder: str | None) -> tuple[EagleLayer, tuple[str, ...]]:
    """Make the layer, as ``medusa`` does."""
    target.language_model("eagle")
    facts, weights = read_drafter(folder, "eagle", target)
    return checked_load(EagleLayer(EagleShape(**facts.net)), weights, "eagle"), facts.layers


@register("drafting", "longspec")
def longspec(target: CausalTarget, folder: str | None) -> LongSpecLayer:
    """Make the layer."""
    target.language_model("longspec")
    facts, weights = read_drafter(folder, "longspec", target)
    return checked_load(LongSpecLayer(LongSpecShape(**facts.net)), weights, "longspec")


@register("drafting", "hidden")
def hidden(target: CausalTarget, folder: str | None) -> tuple[nn.Module, int]:
    """Make the maps, and count the layers of the target before them."""
    facts, weights = read_drafter(folder, "hidden", target)
    maps = models.maps_of(target.language_model("hidden"), facts.net)
    return checked_load(maps, weights, "hidden"), int(facts.net["layer"])


@register("drafting", "flexdraft")
def flexdraft(target: CausalTarget, folder: str | None) -> SharedModel:
    """Make the target's model with attention tuned at mask tokens."""
    facts, weights = read_drafter(folder, "flexdraft", target)
    model = target.language_model("flexdraft")
    made = MaskAttention(model, int(facts.net["layers"]), int(facts.net["rank"]))
    return model.with_network(with_masks(model, checked_load(made, weights, "flexdraft")))


@register("drafting", "masked")
def masked(target: CausalTarget, folder: str | None) -> tuple[SharedModel, Tensor]:
    """Make the small model, and the ids of its masks, long [k - 1]."""
    facts, weights = read_drafter(folder, "masked", target)
    model = target.language_model("masked")
    net = checked_load(models.masked_network(model, facts.net), weights, "masked")
    masks = torch.full((int(facts.net["depth"]) - 1,), model.config.vocab_size)
    return model.with_network(net), masks.to(target.device)


@register("drafting", "prompt")
def prompt(target: CausalTarget, folder: str | None) -> tuple[SharedModel, Tensor]:
    """Make the target's model with prompt tokens, and their ids, long [k - 1]."""
    facts, weights = read_drafter(folder, "prompt", target)
    model, depth = target.language_model("prompt"), int(facts.net["depth"])
    table = model.input_embeddings.weight
    tokens = checked_load(models.PromptTokens(depth, table), weights, "prompt")
    masks = torch.arange(depth - 1, device=target.device) + len(table)
    return models.prompt_model(model, tokens), masks


def altered(
    kind: str,
    make: Callable[[SharedModel, Mapping[str, Any]], nn.Module],
    alter: Callable[[SharedModel, Any, Mapping[str, Any]], SharedModel],
) -> None:
    """Register what makes the target of the model that drafts, with the temperature of the target
    alone.

    Args:
        kind: name of the drafter.
        make: makes the network for a model and the arguments in the folder, without its weights.
        alter: makes the model that has the network, from the same and the network.
    """

    @register("drafting", kind)
    def altered_target(target: CausalTarget, folder: str | None) -> CausalTarget:
        facts, weights = read_drafter(folder, kind, target)
        model = target.language_model(kind)
        network = checked_load(make(model, facts.net), weights, kind)
        other = target.with_model(alter(model, network, facts.net))
        return other.with_params(target.sampling.unfiltered())


altered(
    "exit",
    lambda model, net: models.exit_layer(model, int(net["exit_layer"])),
    lambda model, own, net: models.exit_model(model, int(net["exit_layer"]), own),
)
altered("skip", models.repairs_of, lambda model, net, _: models.repaired_model(model, net))
altered("lora_drop", models.corrections_of, models.dropping_model)
altered("router", models.routers_of, lambda model, net, _: models.routed_model(model, net))
