"""Networks with some of their layers: shallow copies that share all parameters."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence

from torch import nn

from gen.core.errors import GenError, bad_value
from gen.models.load.networks import config_field

KEPT_LAYERS = "a share of the layers such as '1/2', or layers such as '0,2-3,7'"


def kept_layers(spelling: str, num_layers: int | None) -> tuple[int, ...]:
    """List the kept layers of a model.

    Args:
        spelling: share of the layers, spread evenly from the first to the last, or their numbers.
        num_layers: layers that the model has; None checks the spelling alone.

    Raises:
        GenError: the plan is none, or has a layer that the model lacks.
    """

    def refused(expected: str) -> GenError:
        return bad_value("sampler.kept_layers", spelling, expected)

    if share := re.fullmatch(r"([0-9]+)/([0-9]+)", spelling):
        over, under = int(share[1]), int(share[2])
        if not 0 < over <= under:
            raise refused("a share above 0 and at most 1, such as '1/2'")
        last = (num_layers or 1) - 1
        count = max(1, round((last + 1) * over / under))
        return tuple(round(n * last / max(1, count - 1)) for n in range(count))
    layers: list[int] = []
    for entry in spelling.split(","):
        match = re.fullmatch(r"\s*([0-9]+)(?:-([0-9]+))?\s*", entry)
        if match is None:
            raise refused(KEPT_LAYERS)
        layers += range(int(match[1]), int(match[2] or match[1]) + 1)
    if not layers or layers != sorted(set(layers)):
        raise refused(f"{KEPT_LAYERS}, upwards")
    if num_layers is not None and layers[-1] >= num_layers:
        raise refused(f"layers from 0 to {num_layers - 1}, which the model has")
    return tuple(layers)


def keep_layers(
    model: nn.Module, layers: Sequence[int], count: int, after: nn.Module | None = None
) -> nn.Module:
    """Make a network of some of a network's decoder layers.

    Embeddings, norms and head are those of the network. The layers keep their own numbers, by which
    they find their keys and values in a cache, and their kinds, by which they get their masks.

    Args:
        model: causal network of transformers.
        layers: numbers of the layers to keep, upwards.
        count: decoder layers that the network has.
        after: a layer of one's own behind them, whose number is not one of them.

    Raises:
        GenError: the network has no list of that many decoder layers.
    """
    name = layers_of(model, count)
    kept, numbers = nn.ModuleList(model.get_submodule(name)[n] for n in layers), list(layers)
    if after is not None:
        kept.append(after)
        parts = map(vars, after.modules())
        numbers.append(next(part["layer_idx"] for part in parts if "layer_idx" in part))
    other = replaced(model, name, kept)
    owner = other.get_submodule(name.rpartition(".")[0])
    kinds = config_field(config_field(owner, "config"), "layer_types")
    if kinds is not None:  # a network finds the kind of a layer by its index in the list
        vars(owner)["config"] = config = copy.copy(owner.config)
        vars(config)["layer_types"] = [kinds[n] for n in numbers]
    return other


def layers_of(model: nn.Module, count: int) -> str:
    """Find the name of a network's list of decoder layers.

    Args:
        model: causal network of transformers.
        count: decoder layers that the network has.

    Raises:
        GenError: the network has no list of that many decoder layers.
    """
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == count
        and any("layer_idx" in vars(part) for part in module[0].modules())
    ]
    if len(found) != 1:
        raise GenError(
            f"{type(model).__name__} has {len(found)} lists of {count} decoder layers; expected"
            " one, of which some can be skipped"
        )
    return found[0]


def replaced(module: nn.Module, name: str, new: nn.Module) -> nn.Module:
    """Copy a network without its parameters, with another module under a name."""
    return _replaced(module, name.split("."), new)


def _replaced(module: nn.Module, path: list[str], new: nn.Module) -> nn.Module:
    name, *rest = path
    other = copy.copy(module)
    modules = dict(module._modules)  # a copy of a module shares the dictionary of its parts
    before = modules[name]
    modules[name] = _replaced(before, rest, new) if rest and before is not None else new
    vars(other)["_modules"] = modules
    return other
