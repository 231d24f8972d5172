"""Drafts of all depths in one forward pass, at mask tokens behind the committed ones.

The draft model reads the tokens that were committed since its last pass and k - 1 mask tokens
behind them; its distribution at the last token is that of the first draft, and those at the masks
are those of the further ones. They know nothing of the drafts between, so that the joint
distribution of the drafts is a product. Keys and values of masks are written over by what is
committed there.

    masked       a small model with attention to what stands before. Cheng et al., "DEER: Draft with
                 Diffusion, Verify with Autoregressive Models" (arXiv 2512.15176), whose drafter is
                 a masked model with attention to all positions and drafts in one denoising step
    prompt       the target itself with trained embeddings for the masks, one for each depth. Chen
                 et al., "Hardware-Aware Parallel Prompt Decoding" (arXiv 2405.18628). There the
                 prompt tokens stand in the target's own forward pass; here a draft costs one pass
                 of the target, so that it saves steps and no arithmetic
    dual_stream  the target itself, trained to be causal and masked at once
                 (``gen.recipes.text.dual``): its masks see what stands before them and the masks
                 between, as WeDLM's dual stream trains them. Draft j is from mask j, a prediction
                 of the mask's own position; the first one from the last token, which knows better.
                 The pass that drafts is counted as a draft pass. With masks behind every draft it
                 is the one that verifies the drafts before (``one_pass``)

Guarantee: that of the verifier, whatever the weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gen.core.registry import register, registry
from gen.models.targets.mask_tokens import mask_token
from gen.samplers.causal.drafters.base import DepthNodes
from gen.samplers.causal.drafters.model import DraftModel

if TYPE_CHECKING:
    from gen.models.adapters.protocols import SharedModel
    from gen.models.targets.causal import CausalTarget
    from gen.samplers.engine.step_context import CausalStep

MASKED, PROMPT = "masked", "prompt"
MOST = 32  # masks of a dual stream behind the last token


class ParallelNodes(DraftModel, DepthNodes):
    """Distributions of a draft model at mask tokens, whose ids ``masks``, long [k - 1], stand
    behind the last token."""

    def __init__(self, draft: CausalTarget, masks: Tensor):
        super().__init__(draft)
        self.masks = masks

    def count_passes(self, step, passes):
        super().count_passes(step, passes.clamp_max(1))

    def begin(self, step: CausalStep, tokens: Tensor) -> Tensor:
        given, at = self.unseen(step, tokens)
        self.known = step.starts
        # a mask beyond the last position repeats the one before it
        room = self.draft.length - 1 - step.start[:, None]
        index = torch.arange(1, len(self.masks) + 1, device=tokens.device)
        index = torch.minimum(index, room)
        ids = torch.where(index > 0, self.masks[index.clamp_min(1) - 1], given[:, -1:])
        inputs = torch.cat([given, ids], 1)
        positions = torch.cat([at, step.start[:, None] + index], 1)
        logprobs = self.draft.predict(inputs, positions).logprobs
        self.logq = logprobs[:, -1 - len(self.masks) :]
        return self.logq[:, :1]


def draft_target(target: CausalTarget, model: SharedModel) -> CausalTarget:
    """Make the target of a draft model that takes mask tokens.

    It has no constraint: masks are no tokens that one could read, and the verifier refuses what
    the constraint forbids.
    """
    free = target.with_space(replace(target.space, constraint=None))
    return free.with_model(model).with_params(target.sampling.unfiltered())


@register("drafter", MASKED)
class Masked(ParallelNodes):
    """Drafts of all depths in one pass of a small model over mask tokens. Parameters:
    ``drafter_weights``."""

    needs_weights = True

    @classmethod
    def of(cls, sampler, target, draft):
        model, masks = registry.get("drafting", MASKED)(target, sampler.drafter_weights)
        return cls(draft_target(target, model), masks)


@register("drafter", PROMPT)
class Prompt(ParallelNodes):
    """Drafts of all depths in one pass of the target over trained prompt tokens. Parameters:
    ``drafter_weights``."""

    needs_weights = True

    @classmethod
    def of(cls, sampler, target, draft):
        model, masks = registry.get("drafting", PROMPT)(target, sampler.drafter_weights)
        return cls(draft_target(target, model), masks)


@register("drafter", "dual_stream")
class DualStream(ParallelNodes):
    """Drafts with mask tokens of a target that was trained to be causal and masked at once."""

    needs_weights = True  # those of the target

    def begin(self, step: CausalStep, tokens: Tensor) -> Tensor:
        first = super().begin(step, tokens)
        # mask 1 is about the same position as the last token, which knows better
        nothing = torch.full_like(first, -torch.inf)
        self.logq = torch.cat([first, self.logq[:, 2:], nothing], 1)
        return first

    @classmethod
    def of(cls, sampler, target, draft):
        mask = mask_token(target, "dual_stream", sampler.drafter_weights)
        masks = torch.full((min(MOST, max(1, target.length - 1)),), mask, device=target.device)
        return cls(draft_target(target, target.language_model("dual_stream")), masks)
