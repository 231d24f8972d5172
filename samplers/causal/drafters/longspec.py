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

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.registry import register, registry
from gen.samplers.causal.drafters.heads import StateNodes, with_drafts

if TYPE_CHECKING:
    from gen.models.adapters.layer_calls import KeysValues
    from gen.models.draft_heads.longspec import LongSpecLayer
    from gen.models.targets.causal import CausalTarget

KIND = "longspec"


@register("drafter", KIND)
class LongSpec(StateNodes):
    """Drafts with a trained layer over a window and the target's own keys and values. Parameters:
    ``drafter_weights``."""

    needs_weights = True

    def __init__(self, target: CausalTarget, layer: LongSpecLayer):
        super().__init__(target, KIND)
        self.require_slots(KIND)
        self.layer, self.window = layer, layer.shape.window

    @torch.no_grad()
    def begin(self, step, tokens):
        if not self.known.any():
            return self.nothing(len(tokens), 1)
        before, given = self.target.num_prompt_tokens[:, None], self.target.prompt[: len(tokens)]
        self.root = before + step.start[:, None] - 1  # slot of the last token
        # slots of the window, and then of drafts, long [b, W + L]
        self.slots = self.root + torch.arange(1 - self.window, 1, device=tokens.device)
        prompt = given.gather(1, self.slots.clamp(0, given.shape[1] - 1))
        own = tokens.gather(1, (self.slots - before).clamp(0, tokens.shape[1] - 1))
        ids = torch.where(self.slots < before, prompt, own)
        x, (cos, sin) = self._embedded(ids, self.slots.clamp_min(0))
        self.near = self.layer.keys(x, (cos, sin))
        self.far = self.of_target(-1, len(tokens))
        slot = torch.arange(self.far[0].shape[2], device=tokens.device)
        self.sees_far = (slot < self.root)[:, None]
        self.paths = tokens.new_zeros(len(tokens), 1, 0, dtype=torch.bool)
        last = cos[:, -1:], sin[:, -1:]
        return self._logq(x[:, -1:], last, self.root, self.paths, step.start[:, None])

    @torch.no_grad()
    def extend(self, step, tree, first):
        parents, depth = tree.parents[:, first:] + 1, tree.depth[:, first:]
        if not self.known.any():
            return self.nothing(*parents.shape)
        last = self.target.num_prompt_tokens[:, None] + self.target.length - 1
        slots = torch.minimum(self.root + depth, last)
        x, rotations = self._embedded(tree.tokens[:, first:], slots)
        keys, values = self.layer.keys(x, rotations)
        self.near = torch.cat([self.near[0], keys], 2), torch.cat([self.near[1], values], 2)
        self.slots = torch.cat([self.slots, slots], 1)
        path, self.paths = with_drafts(self.paths, parents)
        return self._logq(x, rotations, slots, path, step.start[:, None] + depth)

    def _embedded(self, ids: Tensor, slots: Tensor) -> tuple[Tensor, KeysValues]:
        """Return the embeddings [b, n, D] of tokens at slots, and the rotations of the slots."""
        x = self.model.embedded(ids, slots)
        return x, self.model.rotations(x, slots)

    def _logq(
        self, x: Tensor, rotations: KeysValues, slots: Tensor, path: Tensor, positions: Tensor
    ) -> Tensor:
        """Return the log-probabilities [b, n, V] of grid positions, long [b, n], behind tokens with
        embeddings ``x`` [b, n, D] and the rotations of their slots, long [b, n]. ``path``: drafts
        that each of them attends to, bool [b, n, L]."""
        near = (self.slots[:, None] > slots[..., None] - self.window) & (self.slots[:, None] >= 0)
        near[..., self.window :] &= path
        far = self.sees_far.expand(-1, x.shape[1], -1)
        hidden = self.layer.output(x, rotations, self.near, near, self.far, far)
        return self.logprobs(F.linear(hidden, self.head.to(hidden.dtype)), positions)

    @classmethod
    def of(cls, sampler, target, draft):
        return cls(target, registry.get("drafting", KIND)(target, sampler.drafter_weights))
