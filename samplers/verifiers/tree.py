"""Verifiers of trees: which path of a tree of drafts is accepted, and which token follows it.

The target's distributions p and the drafts' q are final ones (guided, filtered). A verifier reads
one target distribution per node: paths through the same node share it, and of equal siblings the
first one has all children (``Draft.merged``). A draft that the target cannot say is rejected;
behind it there need not be a distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.samplers.engine.draft import Draft, Verdict, node_positions
from gen.samplers.engine.host import may_be_any
from gen.samplers.engine.step_context import StepContext
from gen.samplers.verifiers.base import Verifier


class TreeVerifier(Verifier):
    """Rule that accepts a path of a tree and draws the token after it."""

    judges_trees = True

    def walk(self, step: StepContext, tree: Draft, logp: Tensor) -> tuple[Tensor, Tensor]:
        """Accept a path.

        Args:
            step: context of the step, whose positions are those of the root and the drafts.
            tree: L drafts.
            logp: log-probabilities [b, L + 1, V] of the target after the root and each draft.

        Returns:
            Last accepted column, -1 for the root, long [b]; and the log-probabilities [b, V] that
            the token after it is drawn from.
        """
        raise NotImplementedError

    def verify(self, step: StepContext, tree: Draft, logp: Tensor) -> Verdict:
        last, logprobs = self.walk(step, tree, logp)
        path, count = tree.path(last), tree.depth_of(last)[:, None]
        tokens = torch.cat([tree.tokens.gather(1, path), torch.zeros_like(count)], 1)
        tokens.scatter_(1, count, next_token(step, tree, last, logprobs))
        return Verdict(count[:, 0], tokens, None if tree.is_chain else path)


def next_token(step: StepContext, tree: Draft, last: Tensor, logprobs: Tensor) -> Tensor:
    """Draw the token after the accepted path.

    A bonus token, where no draft was rejected, has the noise of its position: a row without drafts
    draws the same in a batch whose other rows have some.

    Args:
        step: context of the step.
        tree: drafts of the step.
        last: last accepted column, -1 for the root, long [b].
        logprobs: distribution of the token, log-probabilities [b, V].

    Returns:
        Tokens, long [b, 1].
    """
    here = (step.start + tree.depth_of(last))[:, None]
    has_children = (tree.exists & (tree.parents == last[:, None])).any(1, keepdim=True)
    drawn = torch.zeros_like(here)
    for purpose, turn, active in (
        ("residual", step.round, has_children),
        ("token", None, ~has_children),
    ):
        if may_be_any(active):
            new = step.rng.categorical(logprobs[:, None], step.rows, here, purpose, turn, active)
            drawn = torch.where(active, new, drawn)
    return drawn


def coins(step: StepContext, tree: Draft, column: Tensor, p: Tensor, active: Tensor) -> Tensor:
    """Flip the coin of one draft of each row.

    Args:
        step: context of the step.
        tree: drafts of the step.
        column: the draft of each row, long [b].
        p: probability of the coin, [b].
        active: rows that need it, bool [b].

    Returns:
        Coins that came up, bool [b].
    """
    column = column[:, None]
    key = node_positions(step, tree.depth.gather(1, column), column)
    flipped = step.rng.flip(p[:, None], step.rows, key, "accept", step.round, active[:, None])
    return flipped[:, 0] & active


def node(x: Tensor, column: Tensor) -> Tensor:
    """Take x [b, L + 1, ...] at a draft of each row, or the root: column -1."""
    return x[torch.arange(len(x), device=x.device), column + 1]
