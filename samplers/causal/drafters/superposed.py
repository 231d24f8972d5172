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

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gen.core.params import Rule
from gen.core.registry import register
from gen.samplers.causal.drafters.model import ModelNodes
from gen.samplers.engine.host import may_be_any

if TYPE_CHECKING:
    from gen.models.targets.causal import CausalTarget
    from gen.samplers.engine.draft import Draft


@register("drafter", "superposed")
class Superposed(ModelNodes):
    """Drafts with a model that reads a mixture of all drafts of a depth. Parameters:
    ``draft_model``, ``draft_temperature``, ``draft_guidance``."""

    needs_draft_model = True

    def __init__(self, draft: CausalTarget):
        super().__init__(draft)
        draft.require_superposition("the drafter superposed")

    def begin(self, step, tokens):
        first = super().begin(step, tokens)
        self.logq = [first]  # of the root and of the drafts, [b, n, V] each
        return first

    def extend(self, step, tree, first):
        new = tree.exists[:, first:]
        found = self.logq[0].new_full((1, 1, 1), -torch.inf)
        if may_be_any(new):
            # a level is whole before it is asked for
            depth = tree.depth[:, -1:]
            here = tree.exists & (tree.depth == depth)
            some = here.any(1, keepdim=True)
            log_path = path_logprobs(tree, torch.cat(self.logq, 1))
            weights = torch.where(some, log_path.masked_fill(~here, -torch.inf), 0.0).softmax(-1)
            # a row without such drafts repeats its last committed token
            tokens = torch.where(some, tree.tokens, self.root)
            at = step.start[:, None] + torch.where(some, depth, 0)
            output = self.draft.predict_superposed(tokens[:, None], weights[:, None], at)
            found = torch.where(new[..., None], output.logprobs, found)
        self.logq.append(found.expand(*new.shape, self.logq[0].shape[-1]))
        return self.logq[-1]

    def count_passes(self, step, passes):
        super().count_passes(step, passes)
        del self.logq  # nobody asks any more

    rules = (
        Rule(
            "shape",
            lambda s: s.parts.shape.by_level,
            "one that grows level by level ({shape?,}) with the drafter superposed",
        ),
    )

    @classmethod
    def of(cls, sampler, target, draft):
        return cls(sampler.draft_target(target, draft))


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
