"""Drafts of a layer that sees the last tokens, and all others in the target's own cache.

It keeps nothing between steps: its window is made anew of the last tokens, and whatever stands
before is read where the target wrote it, in the keys and values of its last layer. Before the first
pass of a row there are none, and nothing is drafted. Branches of a tree see the window and their
own path.

    longspec    Yang et al., "LongSpec: Long-Context Lossless Speculative Decoding with Efficient
                Drafting and Verification" (arXiv 2502.17421)

Guarantee: that of the verifier, whatever the weights. ``gen.recipes.drafters`` trains them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.errors import GenError
from gen.core.registry import register
from gen.models.adapters.layer_calls import KeysValues
from gen.models.adapters.protocols import SharedModel
from gen.models.load.locate import config_field
from gen.models.targets.base import legal_at
from gen.models.targets.causal import CausalTarget
from gen.samplers.causal.drafters.base import DraftSource, Nodes
from gen.samplers.causal.drafters.heads import checked_load, unfiltered
from gen.samplers.causal.drafters.longspec_layer import LongSpecLayer, LongSpecShape
from gen.samplers.causal.drafters.trained import language_model, read_drafter, require_one_width
from gen.samplers.engine.draft import Verdict
from gen.samplers.engine.host import to_device
from gen.samplers.engine.rows import RowState
from gen.samplers.engine.step_context import CausalStep

KIND = "longspec"


def layer_shape(model: SharedModel, inner: int, window: int) -> LongSpecShape:
    """Return the sizes of the layer of a model.

    Args:
        model: the target's model.
        inner: channels of the MLP.
        window: slots of the window.

    Raises:
        GenError: the model's embeddings are of another width than what its head reads.
    """
    config, width = model.config, require_one_width(model, KIND)
    heads = config.num_attention_heads
    dim = config_field(config, "head_dim") or config.hidden_size // heads
    return LongSpecShape(width, heads, config.num_key_value_heads, dim, inner, window)


class LongSpecNodes(Nodes):
    """Distributions of the layer.

    Args:
        target: the model with its items.
        layer: the layer.
    """

    known = RowState(start=False)  # rows whose tokens the target has read, bool [b] on the host

    def __init__(self, target: CausalTarget, layer: LongSpecLayer):
        self.target, self.layer = target, layer
        self.model = language_model(target, KIND)
        if not target.cache.has_slots:
            raise GenError(
                f"the drafter {KIND} reads the keys and values of a cache, and the model has a"
                f" {type(target.cache).__name__}; expected a causal language model of transformers"
            )
        self.head = self.model.output_weight[: target.legal.shape[-1]]
        self.sampling = unfiltered(target.sampling)
        self.known = np.zeros(target.rows, dtype=bool)
        self.num_passes = torch.zeros(target.items, dtype=torch.long, device=target.device)

    @property
    def nfe(self) -> list[int]:
        return self.num_passes.tolist()

    def count_passes(self, step, passes):
        self.num_passes.index_add_(0, step.rows, passes * to_device(self.known, passes.device))

    @torch.no_grad()
    def begin(self, step, tokens):
        if not self.known.any():
            return self._nothing(len(tokens), 1)
        self.root = self.target.num_prompt_tokens + step.start - 1  # slot of the last token
        window = self.layer.shape.window
        back = torch.arange(1 - window, 1, device=tokens.device)
        self.slots = self.root[:, None] + back  # of the window, long [b, W]
        before = self.target.num_prompt_tokens[:, None]
        given = self.target.prompt[: len(tokens)]
        prompt = given.gather(1, self.slots.clamp(0, given.shape[1] - 1))
        own = tokens.gather(1, (self.slots - before).clamp(0, tokens.shape[1] - 1))
        ids = torch.where(self.slots < before, prompt, own)
        x, rotations = self._embedded(ids, self.slots.clamp_min(0))
        self.near = self.layer.keys(x, rotations)
        self.far = self._of_target(len(tokens))
        slot = torch.arange(self.far[0].shape[2], device=tokens.device)
        self.sees_far = (slot < self.root[:, None])[:, None]
        self.paths = tokens.new_zeros(len(tokens), 1, 0, dtype=torch.bool)
        turned = rotations[0][:, -1:], rotations[1][:, -1:]
        at = self.root[:, None], self.paths, step.start[:, None]
        logq = self._logprobs(x[:, -1:], turned, *at)
        known = to_device(self.known, logq.device)[:, None, None]
        return torch.where(known, logq, -torch.inf)

    @torch.no_grad()
    def extend(self, step, tree, first):
        parents, depth = tree.parents[:, first:] + 1, tree.depth[:, first:]
        count = parents.shape[1]
        if not self.known.any():
            return self._nothing(*parents.shape)
        row = torch.arange(len(parents), device=parents.device)[:, None]
        last = self.target.num_prompt_tokens[:, None] + self.target.length - 1
        slots = torch.minimum(self.root[:, None] + depth, last)
        x, rotations = self._embedded(tree.tokens[:, first:], slots)
        keys, values = self.layer.keys(x, rotations)
        self.near = torch.cat([self.near[0], keys], 2), torch.cat([self.near[1], values], 2)
        self.slots = torch.cat([self.slots, slots], 1)
        # a draft sees the drafts that its parent sees, and itself
        wider = F.pad(self.paths, (0, count))
        own = torch.zeros_like(wider[:, :1]).expand(-1, count, -1).clone()
        own[:, range(count), range(first, first + count)] = True
        path = wider[row, parents] | own
        self.paths = torch.cat([wider, path], 1)
        return self._logprobs(x, rotations, slots, path, step.start[:, None] + depth)

    def accept(self, step: CausalStep, verdict: Verdict) -> None:
        self.known = self.known | (step.widths > 0)

    def _nothing(self, *shape: int) -> Tensor:
        size = self.head.shape[0]
        return self.head.new_full((*shape, size), -torch.inf, dtype=torch.float32)

    def _of_target(self, rows: int) -> KeysValues:
        """Return the keys and values [b, G, S, d] of the target's last layer, without those of
        guidance and of drafts."""
        written: Any = self.target.cache.layers[-1]
        keys, values = written.keys[:rows], written.values[:rows]
        used = self.target.cache.slots
        return keys[:, :used].transpose(1, 2), values[:, :used].transpose(1, 2)

    def _embedded(self, ids: Tensor, slots: Tensor) -> tuple[Tensor, KeysValues]:
        """Return the embeddings [b, n, D] of tokens at slots, and the rotations of the slots."""
        x = self.model.embedded(ids, slots)
        return x, self.model.rotations(x, slots)

    def _logprobs(
        self, x: Tensor, rotations: KeysValues, slots: Tensor, path: Tensor, positions: Tensor
    ) -> Tensor:
        """Return the log-probabilities [b, n, V] behind tokens.

        Args:
            x: embeddings [b, n, D].
            rotations: those of their slots.
            slots: long [b, n].
            path: drafts that each of them attends to, bool [b, n, L].
            positions: grid positions that the distributions are about, long [b, n].
        """
        window = self.layer.shape.window
        near = (self.slots[:, None] > slots[..., None] - window) & (self.slots[:, None] >= 0)
        near[..., window:] &= path[..., : near.shape[-1] - window]
        far = self.sees_far.expand(-1, x.shape[1], -1)
        hidden = self.layer.output(x, rotations, self.near, near, self.far, far)
        logits = F.linear(hidden, self.head.to(hidden.dtype))
        at = positions.clamp_max(self.target.length - 1)
        return self.sampling(logits, None, legal_at(self.target.legal, at))


@register("drafter", KIND)
class LongSpec(DraftSource):
    """Drafts with a trained layer over a window and the target's own keys and values. Parameters:
    ``drafter_weights``."""

    needs_weights = True

    @classmethod
    def nodes(cls, sampler, target, draft):
        language_model(target, KIND)
        facts, weights = read_drafter(sampler.drafter_weights, KIND, target)
        layer = LongSpecLayer(LongSpecShape(**facts.net))
        return LongSpecNodes(target, checked_load(layer, weights, KIND))
