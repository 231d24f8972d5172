"""Drafts of a model that is causal and masked at once: the target itself, at mask tokens.

    draft    the last committed token and k masks behind it, in one forward pass of the target: the
             first draft is from the distribution at the token, which is the target's own, and draft
             j from that at mask j, a prediction of the mask's own position
    verify   as for any other drafter

The target has to be trained for both (``gen.recipes.text.dual``): its masks see what stands before
them and the masks between, as WeDLM's dual stream trains them. The pass that drafts is one of the
target and counted as a draft pass. With masks behind every draft it is the one that verifies the
drafts before: the drafter ``streaming`` (``gen.samplers.causal.drafters.one_pass``).

Guarantee: that of the verifier, whatever the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.registry import register
from gen.models.targets.mask_tokens import mask_token
from gen.models.targets.trained_drafters import language_model
from gen.samplers.causal.drafters.parallel import ParallelNodes, draft_target
from gen.samplers.engine.step_context import CausalStep

MOST = 32  # masks behind the last token


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
        if sampler.drafter_weights is not None:
            raise GenError(
                f"sampler.drafter_weights is {sampler.drafter_weights!r}, and the drafter"
                " dual_stream is the target itself; expected None"
            )
        mask = mask_token(target, "dual_stream")
        masks = torch.full((min(MOST, max(1, target.length - 1)),), mask, device=target.device)
        return cls(draft_target(target, language_model(target, "dual_stream")), masks)
