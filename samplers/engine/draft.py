"""Trees of drafts: their nodes, the distribution that each was drawn from, and its noise.

Column j of a tree is a draft; it follows column ``parents[j]``, or the root, which is the last
committed token. A parent stands before its children, and siblings stand in the order in which they
were drawn. A chain is the tree whose columns follow each other.

Every column has the distribution q that it was drawn from, given what stands before it: its path
and its earlier siblings. Drawn without replacement, a sibling has what the earlier ones left; one
that was chosen has the point mass; siblings of several models have each their own. So verifiers
need not know how siblings were drawn: p <- norm((p - q)+) holds for all of them. A tree that states
a q wrongly changes the distribution of what is committed.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.samplers.engine.host import may_be_any
from gen.samplers.engine.step_context import StepContext

# how the children of a node are drawn from the distribution at it
WITH_REPLACEMENT = "with_replacement"  # independently of each other
WITHOUT_REPLACEMENT = "without_replacement"  # each from what the earlier ones leave, renormalised
RANKS = "ranks"  # the most probable ones, in their order: nothing is random
TOP_AND_RANDOM = "top_and_random"  # one draw from all but the k - 1 most probable, then these
POSITION = "position_noise"  # the largest log q + G, with the noise G of the position
JUDGED = (RANKS, WITH_REPLACEMENT, WITHOUT_REPLACEMENT, TOP_AND_RANDOM)  # by their distributions
DRAWS = (WITH_REPLACEMENT, WITHOUT_REPLACEMENT, RANKS, TOP_AND_RANDOM, POSITION)
NOTHING_DRAWN = (RANKS, POSITION)  # given the noise of positions

NODE = 1 << 32  # added to the position per node: nodes of one position have noise of their own


class Draft:
    """L drafts of each of b rows: a chain, or a tree.

    Args:
        tokens: drafts, long [b, L], or latents [b, L, C].
        exists: drafts that a row has, bool [b, L]; of a chain its first few.
        logq: distribution that each draft was drawn from, given its earlier siblings:
            log-probabilities [b, L, V]. None where all were chosen, whose q are point masses.
        parents: column of each draft's parent, -1 for the root, long [b, L]. None for a chain,
            whose parent is the column before.
        depth: depth of each draft, 1 for a child of the root, long [b, L]; None to count it.
        is_chain: whether the columns follow each other; None where ``parents`` says so.
        guessed: drafts of a chain that no model made, whose q says nothing of what comes, bool [b,
            L]; None for none of them.
        failed: drafts whose model gave no distribution, bool [b, L]; None without a draft model.
        num_drafts: number of drafts; the columns behind them are mask tokens, which give
            distributions and are never accepted. None where all columns are drafts.
        positions: grid positions at which the tokens stand, long [b, L], of a model whose
            distribution at a column is about the column's own position, such as one at mask tokens.
            Columns that a row has not come last. None means that every token stands before the
            position that its column's distribution is about, by its depth.
    """

    def __init__(
        self,
        tokens: Tensor,
        exists: Tensor,
        logq: Tensor | None = None,
        *,
        parents: Tensor | None = None,
        depth: Tensor | None = None,
        is_chain: bool | None = None,
        guessed: Tensor | None = None,
        failed: Tensor | None = None,
        num_drafts: int | None = None,
        positions: Tensor | None = None,
    ):
        self.tokens, self.exists, self.logq = tokens, exists, logq
        self.is_chain = parents is None if is_chain is None else is_chain
        self.guessed, self.failed = guessed, failed
        self.num_drafts, self.positions = num_drafts, positions
        if parents is not None:
            self.parents = parents
        if depth is not None:
            self.depth = depth

    @classmethod
    def none(cls, tokens: Tensor, exists: Tensor) -> Draft:
        """Make a draft without a column, of rows like ``tokens`` [b, T(, C)] and ``exists``."""
        return cls(tokens[:, :0], exists[:, :0])

    @cached_property
    def parents(self) -> Tensor:
        """Columns of the parents, long [b, L]; of a chain they are made when somebody asks."""
        batch, length = self.tokens.shape[:2]
        return torch.arange(-1, length - 1, device=self.tokens.device).expand(batch, -1)

    @cached_property
    def depth(self) -> Tensor:
        """Depths of the drafts, long [b, L]."""
        if self.is_chain:
            return self.parents + 2
        return tree_positions(torch.zeros_like(self.parents[:, 0]), self.parents)[:, 1:]

    def log_mass(self) -> Tensor:
        """Look up log q of the drafts themselves, [b, L]."""
        if self.logq is None:
            return torch.zeros_like(self.tokens, dtype=torch.float32)
        return self.logq.gather(-1, self.tokens[..., None])[..., 0]

    def drawn_from(self, columns: slice | Tensor, like: Tensor) -> Tensor:
        """Return the distributions that n drafts, columns of all rows, or one of each row, long
        [b], were drawn from: log-probabilities [b, n, V] of the type and shape of ``like``."""
        if self.logq is None:
            return point(like, columns_of(self.tokens, columns))
        return columns_of(self.logq, columns).to(like.dtype)

    def select(self, columns: Tensor) -> Draft:
        """Take some columns of each row, long [b, n]: in their order, with all their ancestors."""
        row = torch.arange(len(columns), device=columns.device)[:, None]
        new_column = torch.full_like(self.parents, -1)
        new_column[row, columns] = torch.arange(columns.shape[1], device=columns.device)
        parents = self.parents[row, columns]
        parents = torch.where(parents < 0, parents, new_column.gather(1, parents.clamp_min(0)))
        tokens, exists, depth = (x[row, columns] for x in (self.tokens, self.exists, self.depth))
        logq = None if self.logq is None else self.logq[row, columns]
        failed = None if self.failed is None else self.failed[row, columns]
        return Draft(tokens, exists, logq, parents=parents, depth=depth, failed=failed)

    def merged(self) -> Draft:
        """Let the children of equal siblings follow the first of these.

        Siblings that were drawn with replacement may be equal: they are one context, whose drafts
        are judged one after the other.
        """
        tokens, parents = self.tokens, self.parents
        equal = (tokens[:, :, None] == tokens[:, None]) & self.exists[:, None]
        for _ in range(tokens.shape[1]):  # a level is right after each turn
            siblings = parents[:, :, None] == parents[:, None]
            first = (equal & siblings).byte().argmax(2)
            follow = torch.where(parents < 0, parents, first.gather(1, parents.clamp_min(0)))
            if not may_be_any(follow != parents):
                break
            parents = follow
        merged = copy(self)
        merged.parents = parents
        return merged

    def path(self, last: Tensor) -> Tensor:
        """List the columns from the root to a draft of each row, long [b], -1 for the root:
        columns, long [b, L]; 0 behind the draft."""
        length = self.tokens.shape[1]
        path = torch.zeros(len(last), length + 1, dtype=torch.long, device=last.device)
        for _ in range(length):
            # the root's depth of 0 is written to the last column, which is cut off
            depth = self.depth_of(last)
            where = torch.where(depth > 0, depth - 1, length)
            path.scatter_(1, where[:, None], last.clamp_min(0)[:, None])
            above = self.parents.gather(1, last.clamp_min(0)[:, None])[:, 0]
            last = torch.where(last < 0, last, above)
        return path[:, :length]

    def depth_of(self, column: Tensor) -> Tensor:
        """Look up the depth of a draft of each row, long [b]; -1, the root, has depth 0."""
        depth = self.depth.gather(1, column.clamp_min(0)[:, None])[:, 0]
        return torch.where(column < 0, 0, depth)


@dataclass
class Verdict:
    """Outcome of verifying a draft.

    Attributes:
        num_accepted: accepted drafts, long [b]; with ``path``, columns whose keys are kept.
        tokens: [b, W(, C)]; the accepted drafts, and in column ``num_accepted`` the token that
            follows them: the recovered token after a rejection, else the bonus token.
        path: numbers of the accepted drafts of a tree, from the root on, long [b, L]; None for a
            chain, whose accepted drafts are its first ones.
        num_committed: tokens to commit, 0 or more, long [b], of a method that verifies no drafts;
            None means the accepted drafts and the token that follows them.
        columns: column of the forward pass that each token is from, long [b, W]; None means the
            column with its number, or that of ``path``.
    """

    num_accepted: Tensor
    tokens: Tensor
    path: Tensor | None = None
    num_committed: Tensor | None = None
    columns: Tensor | None = None

    @property
    def last_column(self) -> Tensor:
        """Columns of the pass that the last tokens were drawn behind, long [b]: 0 for the root."""
        column = self.num_accepted
        if self.path is None:
            return column
        last = self.path.gather(1, (column - 1).clamp_min(0)[:, None])[:, 0]
        return torch.where(column > 0, last + 1, 0)


def columns_of(x: Tensor, columns: slice | Tensor) -> Tensor:
    """Take columns of x [b, L, ...]: those of a slice, or one of each row, long [b]."""
    if isinstance(columns, slice):
        return x[:, columns]
    index = columns.view(-1, *[1] * (x.ndim - 1)).expand(-1, 1, *x.shape[2:])
    return x.gather(1, index)


def resized(x: Tensor, length: int) -> Tensor:
    """Cut x [b, n, ...], or pad a copy with zeros, to [b, length, ...]."""
    if x.shape[1] >= length:
        return x[:, :length]
    return F.pad(x, (0, 0) * (x.ndim - 2) + (0, length - x.shape[1]))


def point(like: Tensor, ids: Tensor) -> Tensor:
    """Return the logarithm of distributions, ``like`` [..., V], that are 1 at ids [...]."""
    return torch.full_like(like, -torch.inf).scatter_(-1, ids[..., None], 0.0)


def without(logq: Tensor, ids: Tensor) -> Tensor:
    """Compute log norm(q without ids [...]) of log-probabilities [..., V]; -inf where nothing is
    left.

    What is left of a sharp distribution has less mass than the type can tell from 0, and the next
    sibling is drawn from it all the same: probabilities would lose it.
    """
    rest = logq.scatter(-1, ids[..., None], -torch.inf)
    total = rest.logsumexp(-1, keepdim=True)
    return rest.sub_(total.masked_fill_(total.isneginf(), 0.0))


def node_positions(step: StepContext, depth: Tensor, columns: Tensor | int) -> Tensor:
    """Number the noise of drafts of a depth, long [b, n], in columns, long [b, n], or from a column
    on: one number per position and column, long [b, n]."""
    if isinstance(columns, int):
        columns = torch.arange(columns, columns + depth.shape[1], device=depth.device)
    return step.start[:, None] + depth - 1 + (columns + 1) * NODE


def tree_positions(start: Tensor, parents: Tensor) -> Tensor:
    """Number the grid positions whose distributions follow the root and each draft, long [B, L +
    1], by the drafts' depth. ``start``: committed tokens of each row, long [B]; ``parents``: draft
    that each one follows, long [B, L], -1 for the root; a parent stands before its children."""
    depth = torch.zeros(len(parents), parents.shape[1] + 1, dtype=torch.long, device=start.device)
    for column in range(parents.shape[1]):
        depth[:, column + 1] = depth.gather(1, parents[:, column, None] + 1)[:, 0] + 1
    return start[:, None] + depth
