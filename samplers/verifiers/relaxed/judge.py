"""Judge decoding: a linear probe on the target's hidden states accepts drafts that it takes for
right, though the target would have said something else.

    s_i = sigmoid(w (h_i, log p_i(x_i), max log p_i, H(p_i)) + b)
                                      h_i: the target's last hidden state at draft i, after the norm
    accepted                          if s_i > 1 - r and p(x_i) > 0, or by the token verifier

A draft that differs from what the target would have drawn may be as good: a shuffled list has many
right orders. The token verifier rejects it wherever q(x) > p(x). The target has read the draft in
the same forward pass, and its hidden state there tells whether it was a mistake. The paper's probe
reads that alone; on a small model it separates right from wrong drafts badly, and well with log p,
its maximum and the entropy beside it. Labels come of a checker: a draft is right if the target's
greedy continuation of it passes. The weights are few (D + 4), and
``gen.recipes.text.judge_decoding`` fits them.

A probe is a folder with ``config.json``, which holds the digest of the target's weights, the
sampling parameters and the layer, and ``model.safetensors``. A probe of other weights or another
distribution is refused. A draft in the last column of a forward pass has no hidden state yet; the
token verifier judges it alone. Drafts come of a model (``model``, ``pearl``, ``layer_skip``):
Jacobi iterates carry drafts past a rejection, whose hidden states are of another past.

Reference: Bachmann et al., "Judge Decoding: Faster Speculative Sampling Requires Going Beyond Model
Alignment" (arXiv 2501.19309), which was published without labels or weights.
Guarantee: r = 0 is exact. A step is never further from p than the draft was
(``gen.samplers.verifiers.relaxed.base`` has the proof).
Parameters: ``relaxation`` r, at most 1; ``verifier_weights``.
Preset: ``judge``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gen.core.errors import GenError, unknown
from gen.core.method import method
from gen.core.registry import register
from gen.models.load.locate import read_config, readable, zoo
from gen.models.targets.causal import CausalTarget
from gen.models.targets.identity import require_trained_for, target_digest
from gen.samplers.verifiers.base import num_accepted
from gen.samplers.verifiers.relaxed.base import Relaxed, draft_logp

KIND = "gen_judge"
LAYER = "model.norm"  # of Llama and its relatives: the last hidden state, after the norm
LEAST = -20.0  # log p that stands for everything below
FACTS = {"target": str, "target_name": str, "sampling": dict, "layer": str}
RECIPE = "python -m gen.recipes.text.judge_decoding"


@dataclass(frozen=True)
class Probe:
    """Linear probe on a target's hidden states and distributions.

    Attributes:
        target: digest of the target's weights.
        target_name: name of the target, for messages.
        sampling: sampling parameters by name, those of ``DISTRIBUTION``.
        layer: name of the submodule whose output it reads.
        weight: float32 [D + 3], in the order of ``inputs_of``.
        bias: float32 [].
    """

    target: str
    target_name: str
    sampling: dict[str, float]
    layer: str
    weight: Tensor = field(repr=False, compare=False)
    bias: Tensor = field(repr=False, compare=False)

    def probability(self, inputs: Tensor) -> Tensor:
        """Compute the probability that drafts are right, from ``inputs_of`` [..., D + 3]: float32
        [...]."""
        return (inputs @ self.weight + self.bias).sigmoid()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors``, in half precision."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        tensors = {"weight": self.weight.half().cpu(), "bias": self.bias.half().cpu()}
        save_file(tensors, path / "model.safetensors")
        config = {"model_type": KIND, "target": self.target, "target_name": self.target_name}
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
            raise unknown("probe", str(folder), embedded(), "sampler.verifier_weights; no folder")
        config = read_config(path)
        known: Mapping[str, Any] = config if isinstance(config, dict) else {}
        if known.get("model_type") != KIND or any(
            not isinstance(known.get(name), kind) for name, kind in FACTS.items()
        ):
            raise GenError(
                f"sampler.verifier_weights {folder} is of kind {known.get('model_type')}; expected"
                f" {KIND} with {', '.join(FACTS)}"
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


def inputs_of(hidden: Tensor, logp: Tensor, ids: Tensor) -> Tensor:
    """Join the inputs of a probe.

    Args:
        hidden: the target's hidden states at drafts, [..., D].
        logp: the target's final log-probabilities where the drafts stand, [..., V].
        ids: the drafts, long [...].

    Returns:
        float32 [..., D + 3]: the hidden state, log p of the draft, the maximum of log p, and the
        entropy.
    """
    logp = logp.float().nan_to_num(-torch.inf, neginf=-torch.inf)
    log_p = logp.gather(-1, ids[..., None]).clamp_min(LEAST)
    most, entropy = logp.amax(-1, keepdim=True), torch.special.entr(logp.exp()).sum(-1)
    return torch.cat([hidden.float(), log_p, most.clamp_min(LEAST), entropy[..., None]], -1)


def embedded() -> list[str]:
    """List the names of the probes in the zoo."""
    known = [name for name, path in zoo().items() if read_config(path).get("model_type") == KIND]
    return known or ["none that is embedded"]


def embedded_for(target: CausalTarget) -> str:
    """Find the embedded probe of a target. Raises ``GenError`` if there is none."""
    here = target_digest(target)
    for name, path in zoo().items():
        config = read_config(path)
        if config.get("model_type") == KIND and config.get("target") == here:
            return name
    raise GenError(
        f"{target.name or 'the model'} comes without a probe; expected sampler.verifier_weights, a"
        f" folder that `{RECIPE} --out FOLDER` writes"
    )


@method(
    "judge",
    sampler="relaxed_acceptance",
    paper="2501.19309",
    title="Judge Decoding: Faster Speculative Sampling Requires Going Beyond Model Alignment",
    about="judge decoding: a probe on the target's hidden states accepts drafts that it takes for"
    " right",
    params={
        "verifier": "judge",
        "drafter": "model",
        "num_speculative_tokens": 15,
        "draft_temperature": 0.0,
    },
)
@register("verifier", "judge")
@dataclass(frozen=True)
class Judge(Relaxed):
    """Accept drafts that a trained probe takes for right. ``relaxation``: 1 minus the probability
    above which a draft is right; ``verifier_weights``: folder or name of the probe."""

    relaxation: float = 0.2
    probe: Probe | None = field(default=None, repr=False, compare=False)

    most: ClassVar[float] = 1.0
    needs_weights = True

    @property
    def hidden_layers(self) -> tuple[str, ...]:
        return () if self.probe is None else (self.probe.layer,)

    def attach(self, target, weights=None):
        if not self.relaxation:
            return self
        folder = embedded_for(target) if weights is None else weights
        return dataclasses.replace(self, probe=Probe.from_pretrained(folder, target))

    def decide(self, step, tree, logp):
        if not self.relaxation:
            return super().decide(step, tree, logp)
        length = tree.tokens.shape[1]
        possible = draft_logp(tree, logp[:, :length]) > -torch.inf
        right = self.right(step.hidden_states, logp[:, :length], tree.tokens) & possible
        chance = self.chance(tree, logp[:, :length])
        chance = torch.where(right, torch.ones_like(chance), chance)
        kept = step.flip(chance, "accept", tree.exists) & tree.exists
        return num_accepted(kept), lambda column: self.residual_at(tree, logp, column)

    def right(self, states: dict[str, Tensor] | None, logp: Tensor, ids: Tensor) -> Tensor:
        """Judge the drafts of every row.

        Args:
            states: hidden states [b, W, D] by layer; the draft of column i entered column i + 1.
            logp: log-probabilities where the drafts stand, [b, L, V].
            ids: drafts, long [b, L].

        Returns:
            bool [b, L].
        """
        assert self.probe is not None and states is not None, "attach comes first"
        length = ids.shape[1]
        hidden = states[self.probe.layer][:, 1 : length + 1]
        n = hidden.shape[1]
        inputs = inputs_of(hidden, logp[:, :n], ids[:, :n])
        if len(self.probe.weight) != inputs.shape[-1]:
            raise GenError(
                f"the probe has {len(self.probe.weight)} weights; expected {inputs.shape[-1]},"
                f" those of {self.probe.layer} and three more"
            )
        judged = self.probe.probability(inputs) > 1 - self.relaxation
        return torch.nn.functional.pad(judged, (0, length - n))

    def credit(self, tree, logp):
        return draft_logp(tree, logp)

    def excess(self, p, q):
        return (q - p).clamp_min(0) if self.relaxation else torch.zeros_like(q)
