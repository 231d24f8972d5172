"""Folders of trained networks that predict what becomes of drafts: acceptance heads, selectors of
trees and probes of judges. Each belongs to one target and one distribution, as drafters do
(``trained_drafters``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors.torch import load_file, save_file
from torch import Tensor

from gen.core.errors import GenError, unknown
from gen.core.registry import register
from gen.models.draft_heads.predictors import AcceptanceNet, Action, SelectorNet
from gen.models.load.locate import read_config, readable, zoo
from gen.models.targets.causal import CausalTarget
from gen.models.targets.identity import DrafterFacts, require_trained_for, target_digest
from gen.models.targets.trained_drafters import read_drafter, read_facts

ACCEPTANCE_HEAD, SELECTOR, PROBE = "acceptance_head", "tree_selector", "gen_judge"
SELECTOR_WHERE = "sampler.tree_selector"
FACTS = {"target": str, "target_name": str, "sampling": dict, "layer": str}
PROBE_RECIPE = "python -m gen.recipes.text.judge_decoding"
COSTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # draft costs whose rates a folder states


def head_facts(target: CausalTarget, draft: CausalTarget, layer: str, blocks: int) -> DrafterFacts:
    """State the facts of a head."""
    net = {"draft": target_digest(draft), "blocks": blocks}
    return DrafterFacts.of(ACCEPTANCE_HEAD, target, (layer,), net)


@register("drafting", "acceptance_head")
def read_head(folder: str, target: CausalTarget, draft: Any) -> tuple[AcceptanceNet, str]:
    """Read a head of a target and its draft model.

    Returns:
        The network, and the layer of the draft model that it reads.

    Raises:
        GenError: there is no such head, it is of other models or another distribution, or it cannot
            be read.
    """
    facts, weights = read_drafter(folder, ACCEPTANCE_HEAD, target, "sampler.acceptance_head")
    here = target_digest(draft)
    if facts.net.get("draft") != here:
        raise GenError(
            f"head {folder} reads a draft model with weights {facts.net.get('draft')}; expected"
            f" {here} ({draft.name or 'the draft model'})"
        )
    with readable("head", folder):
        width = weights["out.weight"].shape[1] - 2
        net = AcceptanceNet(width, int(facts.net["blocks"])).to(draft.device)
        net.load_state_dict({name: x.float() for name, x in weights.items()})
    return net.eval().requires_grad_(False), facts.layers[0]


def selector_facts(
    target: CausalTarget,
    drafter: str,
    draft: Any,
    actions: tuple[Action, ...],
    rates: Sequence[float],
    width: int,
) -> DrafterFacts:
    """State the facts of a selector, whose ``rates`` are those of ``COSTS``."""
    net: dict[str, Any] = {"drafter": drafter, "draft": draft_digest(draft), "width": width}
    net |= {"actions": actions, "rates": list(rates)}
    return DrafterFacts.of(SELECTOR, target, net=net)


def draft_digest(draft: Any) -> str:
    """Digest the weights of a draft model; empty for a drafter without one."""
    return target_digest(draft) if isinstance(draft, CausalTarget) else ""


@register("drafting", "tree_actions")
@lru_cache(maxsize=16)
def actions_of(folder: str) -> tuple[Action, ...]:
    """Read the actions of a selector. Raises ``GenError`` where there is none."""
    path, facts = read_facts(folder, SELECTOR, "", SELECTOR_WHERE)
    with readable("selector", path):
        return tuple((int(n), int(k), int(length)) for n, k, length in facts.net["actions"])


@register("drafting", "tree_selector")
def read_selector(
    folder: str, drafter: str, target: CausalTarget, draft: Any, cost: float
) -> tuple[SelectorNet, float]:
    """Read the network of a selector, and the tokens that a round has to commit for the time of a
    pass of the target.

    Args:
        folder: its folder.
        drafter: name of the drafter that it is to choose for.
        target: the model with its sampling parameters.
        draft: target of the draft model; None for a drafter without one.
        cost: time of a pass of the drafter, in passes of the target.

    Raises:
        GenError: there is no such selector, it is of another model, distribution or drafter, or it
            cannot be read.
    """
    facts, weights = read_drafter(folder, SELECTOR, target, SELECTOR_WHERE)
    came = facts.net.get("drafter"), facts.net.get("draft")
    wanted = drafter, draft_digest(draft)
    if came != wanted:
        said, expected = (
            f"the drafter {name}" + (f" with a model of weights {digest}" if digest else "")
            for name, digest in (came, wanted)
        )
        raise GenError(f"selector {folder} was trained for {said}; expected {expected}")
    with readable("selector", folder):
        net = SelectorNet(len(facts.net["actions"]), int(facts.net["width"]))
        net.load_state_dict({name: x.float() for name, x in weights.items()})
        rates = [float(rate) for rate in facts.net["rates"]]
    rate = float(np.interp(cost, COSTS, rates))
    return net.to(target.device).eval().requires_grad_(False), rate


@dataclass(frozen=True)
class Probe:
    """Linear probe on a target's hidden states and distributions.

    Attributes:
        target: digest of the target's weights.
        target_name: name of the target, for messages.
        sampling: sampling parameters by name, those of ``DISTRIBUTION``.
        layer: name of the submodule whose output it reads.
        weight: float32 [D + 3], in the order of ``probe_inputs``.
        bias: float32 [].
    """

    target: str
    target_name: str
    sampling: dict[str, float]
    layer: str
    weight: Tensor = field(repr=False, compare=False)
    bias: Tensor = field(repr=False, compare=False)

    def probability(self, inputs: Tensor) -> Tensor:
        """Compute the probability that drafts are right, float32 [...], from ``probe_inputs``
        [..., D + 3]. Raises ``GenError`` where they are not as many as the weights."""
        if len(self.weight) != inputs.shape[-1]:
            raise GenError(
                f"the probe has {len(self.weight)} weights; expected {inputs.shape[-1]}, those of"
                f" {self.layer} and three more"
            )
        return (inputs @ self.weight + self.bias).sigmoid()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors``, in half precision."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        tensors = {"weight": self.weight.half().cpu(), "bias": self.bias.half().cpu()}
        save_file(tensors, path / "model.safetensors")
        config = {"model_type": PROBE, "target": self.target, "target_name": self.target_name}
        config |= {"sampling": self.sampling, "layer": self.layer}
        (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")

    @classmethod
    def from_pretrained(cls, folder: str | Path, target: CausalTarget) -> Self:
        """Load the probe of a target.

        Args:
            folder: folder, or name of an embedded probe.
            target: the model that it reads.

        Raises:
            GenError: there is no such probe, it is of another model or distribution, or it cannot
                be read.
        """
        path = zoo().get(str(folder)) or Path(folder).expanduser()
        if not (path / "config.json").is_file():
            raise unknown(
                "probe", str(folder), embedded_probes(), "sampler.verifier_weights; no folder"
            )
        config = read_config(path)
        known: Mapping[str, Any] = config if isinstance(config, dict) else {}
        if known.get("model_type") != PROBE or any(
            not isinstance(known.get(name), kind) for name, kind in FACTS.items()
        ):
            raise GenError(
                f"sampler.verifier_weights {folder} is of kind {known.get('model_type')}; expected"
                f" {PROBE} with {', '.join(FACTS)}"
            )
        facts = {name: known[name] for name in FACTS}
        require_trained_for(
            f"probe {path}", facts["target"], facts["target_name"], facts["sampling"], target
        )
        with readable("probe", path):
            tensors = load_file(path / "model.safetensors")
            weight, bias = tensors["weight"].float(), tensors["bias"].float()
        if weight.ndim != 1 or bias.ndim:
            shapes = f"{tuple(weight.shape)} and {tuple(bias.shape)}"
            raise GenError(f"probe {path} has shapes {shapes}; expected (D + 3,) and ()")
        return cls(**facts, weight=weight.to(target.device), bias=bias.to(target.device))


def embedded_probes() -> list[str]:
    """List the names of the probes in the zoo."""
    known = [name for name, path in zoo().items() if read_config(path).get("model_type") == PROBE]
    return known or ["none that is embedded"]


def embedded_probe(target: CausalTarget) -> str:
    """Find the embedded probe of a target. Raises ``GenError`` if there is none."""
    here = target_digest(target)
    for name, path in zoo().items():
        config = read_config(path)
        if config.get("model_type") == PROBE and config.get("target") == here:
            return name
    raise GenError(
        f"{target.name or 'the model'} comes without a probe; expected sampler.verifier_weights, a"
        f" folder that `{PROBE_RECIPE} --out FOLDER` writes"
    )
