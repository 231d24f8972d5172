"""Drafts of the target itself, with a trained network in, behind or in the place of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from gen.models.adapters.protocols import SharedModel
from gen.models.targets.causal import CausalTarget
from gen.models.targets.trained_drafters import language_model, read_drafter
from gen.samplers.causal.drafters.heads import checked_load, unfiltered


def altered_target(
    folder: str | None,
    kind: str,
    target: CausalTarget,
    make: Callable[[SharedModel, Mapping[str, Any]], nn.Module],
    alter: Callable[[SharedModel, Any, Mapping[str, Any]], SharedModel],
) -> CausalTarget:
    """Return the target of the model that drafts, with the temperature of the target alone.

    Args:
        folder: folder of the trained network.
        kind: name of the drafter.
        target: the model that is drafted for.
        make: makes the network for a model and the arguments in the folder, without its weights.
        alter: makes the model that has the network, from the same and the network.

    Raises:
        GenError: there is no such folder, it is of another drafter, model or distribution, or its
            network is none of this model.
    """
    facts, weights = read_drafter(folder, kind, target)
    model = language_model(target, kind)
    network = checked_load(make(model, facts.net), weights, kind)
    other = target.with_model(alter(model, network, facts.net))
    return other.with_params(unfiltered(target.sampling))
