"""Folders of trained drafters: networks that read the hidden states of one model, or stand beside
it, and were trained to draft under its distribution.

A folder holds ``config.json``, with the kind of the drafter, the digest of its target's weights,
the sampling parameters of the distribution that it was trained for and the arguments of its
network, and ``model.safetensors``. A drafter of other weights or another distribution would draft
badly without a word, so that it is refused. ``gen.recipes.drafters`` writes such folders.

``trained_networks`` makes the networks. The target of a model that drafts with some of the
target's own layers is made here as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gen.core.errors import GenError, unknown
from gen.core.registry import register
from gen.models.adapters.protocols import LayeredModel
from gen.models.draft_heads import DRAFTER
from gen.models.load.locate import readable, zoo
from gen.models.targets.identity import DrafterFacts, require_trained_for

if TYPE_CHECKING:
    from gen.models.targets.causal import CausalTarget

Net = TypeVar("Net", bound=nn.Module)

WHERE = "sampler.drafter_weights"
RECIPE = "python -m gen.recipes.drafters"


def write_drafter(folder: str | Path, facts: DrafterFacts, weights: Mapping[str, Tensor]) -> None:
    """Write a drafter in half precision.

    Args:
        folder: folder that is made.
        facts: its facts.
        weights: tensors by name.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    halves = {k: v.detach().half().contiguous().cpu() for k, v in weights.items()}
    save_file(halves, path / "model.safetensors")
    config = {"model_type": DRAFTER, **asdict(facts)}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def read_facts(
    name: str | None, kind: str, target_name: str, where: str = WHERE
) -> tuple[Path, DrafterFacts]:
    """Find a drafter's folder and read its facts.

    Args:
        name: folder, or name of an embedded drafter; None means the embedded one of the target.
        kind: kind of the drafter.
        target_name: name of the target.
        where: parameter that names it, for messages.

    Raises:
        GenError: there is no such drafter, or it is of another kind.
    """
    asked = name or f"{target_name}-{kind}"
    path = zoo().get(asked)
    if path is None and name is not None:  # folders are never guessed
        path = Path(name).expanduser()
    if path is None or not (path / "config.json").is_file():
        if name is None:
            raise GenError(
                f"{target_name or 'the model'} comes without a drafter of kind {kind}; expected"
                f" sampler.drafter_weights, a folder that `{RECIPE} --model"
                f" {target_name or 'MODEL'} --kind {kind}` writes"
            )
        raise unknown("drafter", asked, embedded(), f"{where}; it is no folder")
    try:
        config = json.loads((path / "config.json").read_text())
        found = config.pop("model_type", None) if isinstance(config, dict) else None
        facts = None
        if found == DRAFTER:
            values: dict[str, Any] = {**config, "layers": tuple(config["layers"])}
            facts = DrafterFacts(**values)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise GenError(f"the config of drafter {asked} cannot be read: {error}") from None
    if facts is None or facts.kind != kind:
        came = found if facts is None else facts.kind
        raise GenError(f"{where} {asked} is of kind {came}; expected {kind}")
    return path, facts


def read_drafter(
    name: str | None, kind: str, target: CausalTarget, where: str = WHERE
) -> tuple[DrafterFacts, dict[str, Tensor]]:
    """Read a drafter of a target.

    Args:
        name: folder, or name of an embedded drafter; None means the one that the target was loaded
            with, or the embedded one of the target.
        kind: kind of the drafter.
        target: the model with its sampling parameters.
        where: parameter that names it, for messages.

    Returns:
        Facts, and the weights on the target's device in its dtype.

    Raises:
        GenError: there is no such drafter, it is of another kind, vocabulary, model or
            distribution, or its weights cannot be read.
    """
    name = target.drafters.get(kind) if name is None else name
    path, facts = read_facts(name, kind, target.name, where)
    size = target.legal.shape[-1]
    if facts.vocab_size != size:
        raise GenError(
            f"drafter {path} is of {facts.vocab_size} tokens; expected {size}, those of the model"
        )
    require_trained_for(f"drafter {path}", facts.target, facts.target_name, facts.sampling, target)
    with readable("drafter", path):
        weights = load_file(path / "model.safetensors")
    dtype = target.model.dtype if target.model.dtype.is_floating_point else torch.float32
    return facts, {k: v.to(target.device, dtype) for k, v in weights.items()}


def embedded() -> list[str]:
    """List the names of the drafters in the zoo."""
    drafters = (
        name
        for name, folder in zoo().items()
        if f'"{DRAFTER}"' in (folder / "config.json").read_text()
    )
    return sorted(drafters) or ["none that is embedded"]


def projection(target: CausalTarget, method: str) -> Tensor:
    """Return the weights [V, D] by which the target makes logits of its last hidden states."""
    return target.language_model(method).output_weight[: target.legal.shape[-1]]


def checked_load(net: Net, weights: dict[str, Tensor], kind: str) -> Net:
    """Load the weights of a drafter's network.

    Args:
        net: the network, which is changed.
        weights: its parameters by name; the network takes their device and dtype.
        kind: kind of the drafter, for messages.

    Raises:
        GenError: names or shapes are not those of the network.
    """
    wanted = {name: tuple(p.shape) for name, p in net.named_parameters()}
    came = {name: tuple(w.shape) for name, w in weights.items()}
    wrong = [name for name in {**wanted, **came} if wanted.get(name) != came.get(name)]
    if wrong:
        name = wrong[0]
        raise GenError(
            f"the weights of the {kind} drafter have {name} of shape {came.get(name)}; expected"
            f" {wanted.get(name)}"
        )
    like = next(iter(weights.values()))
    net.to(like.device, like.dtype)
    net.load_state_dict(weights, strict=False)  # tied weights come once
    return net.eval()


@register("drafting", "layers")
def layered_target(
    target: CausalTarget, method: str, plan: Callable[[int], Sequence[int]]
) -> CausalTarget:
    """Return the target of the same model with some of its layers.

    Args:
        target: the model with its items.
        method: name of the drafter, for messages.
        plan: numbers of the kept layers, upwards, of a model of so many layers.

    Raises:
        GenError: the model has no layers that can be left out.
    """
    model = target.model
    if not isinstance(model, LayeredModel):
        raise GenError(
            f"the drafter {method} needs a model whose layers can be left out, and"
            f" {type(model).__name__} has none; expected a causal language model of transformers"
        )
    return target.with_model(model.with_layers(plan(model.num_layers)))
