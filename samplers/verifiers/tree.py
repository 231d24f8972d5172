"""Verifiers of trees: which path of a tree of drafts is accepted, and which token follows it.

The target's distributions p and the drafts' q are final ones (guided, filtered). A verifier reads
one target distribution per node: paths through the same node share it. A draft that the target
cannot say is rejected; behind it there need not be a distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.samplers.engine.causal_loop import Verdict
from gen.samplers.engine.host import may_be_any
from gen.samplers.engine.step_context import StepContext
from gen.samplers.engine.tree import RANKS, Tree, node_positions
from gen.samplers.verifiers.base import ROW, Proposal, Verifier


class TreeVerifier(Verifier):
    """Rule that accepts a path of a tree and draws the token after it."""

    judges_trees = True

    def walk(self, step: StepContext, tree: Tree, logp: Tensor) -> tuple[Tensor, Tensor]:
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

    def next_token(self, step: StepContext, tree: Tree, last: Tensor, logprobs: Tensor) -> Tensor:
        """Draw the token after the accepted path.

        A bonus token, where no draft was rejected, has the noise of its position: a row without
        drafts draws the same in a batch whose other rows have some.

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
                new = step.rng.categorical(
                    logprobs[:, None], step.rows, here, purpose, turn, active
                )
                drawn = torch.where(active, new, drawn)
        return drawn

    def verify_tree(self, step: StepContext, tree: Tree, logp: Tensor) -> Verdict:
        """Accept a path and draw the token after it; arguments as in ``walk``."""
        last, logprobs = self.walk(step, tree, logp)
        count = tree.depth_of(last)
        path = tree.path(last, tree.tokens.shape[1])
        tokens = torch.cat([tree.tokens.gather(1, path), torch.zeros_like(path[:, :1])], 1)
        drawn = self.next_token(step, tree, last, logprobs)
        return Verdict(count, tokens.scatter(1, count[:, None], drawn), path)

    def verify(
        self, step: StepContext, proposal: Proposal, drafted: Tensor, logp: Tensor
    ) -> Verdict:
        """Judge a chain as the tree that it is."""
        length, width = drafted.shape[1], logp.shape[1]
        column = torch.arange(length, device=drafted.device).expand(len(drafted), -1)
        end = torch.full_like(proposal.logq[:, :1], -torch.inf)
        logq = torch.cat([proposal.logq, end], 1)
        random = proposal.kind == ROW
        tree = Tree(
            proposal.tokens, column - 1, drafted, column + 1, random, logq, RANKS, is_chain=True
        )
        # a window as long as its drafts has no position after the last one
        if width == length:
            logp = torch.cat([logp, logp[:, -1:]], 1)
            tree.exists = drafted & (column + 1 < width)
        verdict = self.verify_tree(step, tree, logp[:, : length + 1])
        tokens = torch.nn.functional.pad(verdict.tokens, (0, max(0, width - length - 1)))
        return Verdict(verdict.num_accepted, tokens[:, :width])


def coins(step: StepContext, tree: Tree, column: Tensor, p: Tensor, active: Tensor) -> Tensor:
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


def first_with_path(tree: Tree) -> Tensor:
    """Find the first column with the same tokens on its path, long [b, L].

    Paths that were drawn independently of each other may be equal: they are one context.
    """
    first, above = torch.zeros_like(tree.parents), torch.zeros_like(tree.parents)
    for column in range(tree.tokens.shape[1]):
        above[:, column] = representative(first, tree.parents[:, column])
        same = (tree.tokens == tree.tokens[:, column, None]) & (above == above[:, column, None])
        same = same[:, : column + 1] & tree.exists[:, : column + 1]
        # the column itself, where it does not exist
        found = same.byte().argmax(1)
        first[:, column] = torch.where(same.any(1), found, column)
    return first


def contexts(tree: Tree) -> Tensor:
    """Find the node that each draft follows, by ``first_with_path``: long [b, L], -1 the root."""
    first = first_with_path(tree)
    above = [representative(first, tree.parents[:, c]) for c in range(first.shape[1])]
    return torch.stack(above, 1) if above else first


def representative(first: Tensor, columns: Tensor) -> Tensor:
    """Map columns [b], -1 for the root, by ``first_with_path``."""
    return torch.where(columns < 0, columns, first.gather(1, columns.clamp_min(0)[:, None])[:, 0])


def node(x: Tensor, column: Tensor) -> Tensor:
    """Take x [b, L + 1, ...] at a draft of each row, or the root: column -1."""
    return x[torch.arange(len(x), device=x.device), column + 1]
