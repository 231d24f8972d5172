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
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.method import method
from gen.core.registry import register
from gen.models.draft_heads.predictors import probe_inputs
from gen.models.targets.trained_predictors import Probe, embedded_probe
from gen.samplers.verifiers.base import num_accepted
from gen.samplers.verifiers.relaxed.base import Relaxed, draft_logp

LAYER = "model.norm"  # of Llama and its relatives: the last hidden state, after the norm


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
        folder = embedded_probe(target) if weights is None else weights
        return dataclasses.replace(self, probe=Probe.from_pretrained(folder, target))

    def decide(self, step, draft, logp):
        if not self.relaxation:
            return super().decide(step, draft, logp)
        length = draft.tokens.shape[1]
        here = logp[:, :length]
        right = self.right(step.hidden_states, here, draft.tokens)
        possible = draft_logp(draft, here) > -torch.inf
        chance = self.chance(draft, here).masked_fill(right & possible, 1.0)
        count = num_accepted(step.flip(chance, "accept", draft.exists) & draft.exists)
        return count, lambda: self.residual_at(draft, logp, count.clamp_max(length - 1))

    def right(self, states: dict[str, Tensor] | None, logp: Tensor, ids: Tensor) -> Tensor:
        """Judge the drafts of every row, long [b, L]: bool [b, L]. ``states``: hidden states [b, W,
        D] by layer, the draft of column i entered column i + 1; ``logp``: log-probabilities where
        the drafts stand, [b, L, V]."""
        assert self.probe is not None and states is not None, "attach comes first"
        length = ids.shape[1]
        hidden = states[self.probe.layer][:, 1 : length + 1]
        n = hidden.shape[1]
        inputs = probe_inputs(hidden, logp[:, :n], ids[:, :n])
        judged = self.probe.probability(inputs) > 1 - self.relaxation
        return F.pad(judged, (0, length - n))

    def excess(self, p, q):
        return (q - p).clamp_min(0) if self.relaxation else torch.zeros_like(q)
