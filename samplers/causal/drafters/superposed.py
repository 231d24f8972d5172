"""Drafts of all branches of a tree from draft passes of one position.

The draft model is fed a mixture of the drafts of a depth, and its distribution there is that of the
children of all of them:

    input    sum over drafts x of the depth of w_x E[x]       E: embeddings, w_x in proportion to
             the probability of the path to x

A tree takes one draft pass of one position per depth, however many branches it has; ``model``
computes the whole tree in each. The price is that branches share their distribution. The inputs are
those of Shen et al., "Superposed Decoding" (arXiv 2405.18400), where the mixture decodes by itself.

The mixture is that of a whole level, so that shapes that grow level by level fit (``by_level``).

Guarantee: that of the verifier. Each draft is drawn from the distribution that is stored for it,
given all drafts before it, those of other branches too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.errors import bad_value
from gen.core.registry import register, registry
from gen.models.targets.causal import CausalTarget
from gen.samplers.causal.drafters.base import DraftSource
from gen.samplers.causal.drafters.model import ModelNodes
from gen.samplers.engine.draft import Draft
from gen.samplers.engine.step_context import CausalStep


class SuperposedNodes(ModelNodes):
    """Distributions of a draft model that reads all drafts of a depth at once.

    Args:
        draft: fresh target of the draft model.
    """

    def __init__(self, draft: CausalTarget):
        super().__init__(draft)
        draft.require_superposition("the drafter superposed")

    def begin(self, step, tokens):
        first = super().begin(step, tokens)
        self.logq = [first]  # of the root and of the drafts, [b, n, V] each
        return first

    def extend(self, step, tree, first):
        log_path = path_logprobs(tree, torch.cat(self.logq, 1))
        new = tree.exists[:, first:]
        depths = torch.where(new, tree.depth[:, first:], 0)
        found = log_path.new_full((*new.shape, self.logq[0].shape[-1]), -torch.inf)
        for depth in range(1, int(depths.max()) + 1) if depths.numel() else ():
            asked = depths == depth
            if not bool(asked.any()):
                continue
            logprobs = self._predict(step, tree, log_path, depth)
            found = torch.where(asked[..., None], logprobs, found)
        self.logq.append(found)
        return found

    def count_passes(self, step, passes):
        super().count_passes(step, passes)
        del self.logq  # nobody asks any more

    def _predict(self, step: CausalStep, tree: Draft, log_path: Tensor, depth: int) -> Tensor:
        """Return the distribution [b, 1, V] behind the mixture of the drafts of a depth."""
        here = tree.exists & (tree.depth == depth)
        some = here.any(1, keepdim=True)
        logits = torch.where(here, log_path, -torch.inf)
        weights = torch.where(some, logits, 0.0).softmax(-1)
        # a row without such drafts repeats its last committed token
        tokens = torch.where(some, tree.tokens, self.root)
        at = torch.where(some, step.start[:, None] + depth, step.start[:, None])
        return self.draft.predict_superposed(tokens[:, None], weights[:, None], at).logprobs


def path_logprobs(tree: Draft, logq: Tensor) -> Tensor:
    """Compute the log-probabilities [b, L] of the paths to the drafts of a tree, from those of the
    tokens behind its nodes, [b, L + 1, V]."""
    total = logq.new_zeros(len(tree.tokens), 1 + tree.tokens.shape[1])
    row = torch.arange(len(total), device=total.device)
    for column in range(tree.tokens.shape[1]):
        above = tree.parents[:, column] + 1
        mass = logq[row, above].gather(1, tree.tokens[:, column, None])[:, 0]
        total[:, column + 1] = total[row, above] + mass
    return total[:, 1:]


@register("drafter", "superposed")
class Superposed(DraftSource):
    """Drafts with a model that reads a mixture of all drafts of a depth. Parameters:
    ``draft_model``, ``draft_temperature``, ``draft_guidance``."""

    needs_draft_model = True

    @classmethod
    def check(cls, sampler):
        shapes = registry.table("shape")
        if not shapes[sampler.shape].by_level:
            known = ", ".join(name for name, shape in shapes.items() if shape.by_level)
            expected = f"one that grows level by level ({known}) with the drafter superposed"
            raise bad_value("sampler.shape", sampler.shape, expected)

    @classmethod
    def nodes(cls, sampler, target, draft):
        return SuperposedNodes(sampler.draft_target(target, draft))
