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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gen.core.sampling_params import has_no_distribution
from gen.samplers.engine.host import may_be_any, to_device
from gen.samplers.engine.step_context import CausalStep, StepContext

# how the children of a node are drawn from the distribution at it
WITH_REPLACEMENT = "with_replacement"  # independently of each other
WITHOUT_REPLACEMENT = "without_replacement"  # each from what the earlier ones leave, renormalised
RANKS = "ranks"  # the most probable ones, in their order: nothing is random
TOP_AND_RANDOM = "top_and_random"  # one draw from all but the k - 1 most probable, then these
POSITION = "position_noise"  # the largest log q + G, with the noise G of the position
DRAWS = (WITH_REPLACEMENT, WITHOUT_REPLACEMENT, RANKS, TOP_AND_RANDOM, POSITION)
NOTHING_DRAWN = (RANKS, POSITION)  # given the noise of positions

NODE = 1 << 32  # added to the position per node: nodes of one position have noise of their own


@dataclass
class Tree:
    """Tree of L drafts for each of b rows.

    Attributes:
        tokens: drafts, long [b, L].
        exists: drafts that a row has, bool [b, L].
        parents: column of each draft's parent, -1 for the root, long [b, L].
        depth: depth of each draft, 1 for a child of the root, long [b, L].
        logq: distribution that each draft was drawn from, given its earlier siblings:
            log-probabilities [b, L, V]. None where all were chosen, whose q are point masses.
        is_chain: whether every draft follows the one before it.
        guessed: drafts of a chain that no model made, whose q says nothing of what comes, bool [b,
            L]; None for none of them.
        failed: drafts whose model gave no distribution, bool [b, L]; None if nobody looked.
    """

    tokens: Tensor
    exists: Tensor
    parents: Tensor
    depth: Tensor
    logq: Tensor | None = None
    is_chain: bool = False
    guessed: Tensor | None = None
    failed: Tensor | None = None

    @classmethod
    def chain(cls, tokens: Tensor, exists: Tensor, logq: Tensor | None, **more: Tensor) -> Tree:
        """Make the tree whose columns follow each other; its first few exist."""
        column = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
        return cls(tokens, exists, column - 1, column + 1, logq, True, **more)

    def log_mass(self) -> Tensor:
        """Look up log q of the drafts themselves, [b, L]."""
        if self.logq is None:
            return torch.zeros_like(self.tokens, dtype=torch.float32)
        return self.logq.gather(-1, self.tokens[..., None])[..., 0]

    def drawn_from(self, columns: slice | Tensor, like: Tensor) -> Tensor:
        """Return the distributions that some drafts were drawn from.

        Args:
            columns: n columns of all rows, or one of each row, long [b].
            like: tensor of the result's type and shape.

        Returns:
            Log-probabilities [b, n, V].
        """
        if self.logq is None:
            return point(like, columns_of(self.tokens, columns))
        return columns_of(self.logq, columns).to(like.dtype)

    def select(self, columns: Tensor) -> Tree:
        """Take some columns of each row, long [b, n]: in their order, with all their ancestors."""
        row = torch.arange(len(columns), device=columns.device)[:, None]
        new_column = torch.full_like(self.parents, -1)
        new_column[row, columns] = torch.arange(columns.shape[1], device=columns.device)
        parents = self.parents[row, columns]
        parents = torch.where(parents < 0, parents, new_column.gather(1, parents.clamp_min(0)))
        others = (self.tokens, self.exists, self.depth, self.logq, self.failed)
        taken = [None if x is None else x[row, columns] for x in others]
        tokens, exists, depth, logq, failed = taken
        return Tree(tokens, exists, parents, depth, logq, failed=failed)

    def merged(self) -> Tree:
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
        return replace(self, parents=parents)

    def path(self, last: Tensor) -> Tensor:
        """List the columns from the root to a draft of each row.

        Args:
            last: column of the draft, -1 for the root, long [b].

        Returns:
            Columns, long [b, L]; 0 behind the draft.
        """
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


def columns_of(x: Tensor, columns: slice | Tensor) -> Tensor:
    """Take columns of x [b, L, ...]: those of a slice, or one of each row, long [b]."""
    if isinstance(columns, slice):
        return x[:, columns]
    if columns.is_cpu and columns.numel() == 1:
        return x.narrow(1, int(columns), 1)
    return x[torch.arange(len(columns), device=columns.device), columns][:, None]


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
    return torch.where(total.isneginf(), -torch.inf, rest - total)


def node_positions(step: StepContext, depth: Tensor, columns: Tensor | int) -> Tensor:
    """Number the noise of drafts: one number per position and column.

    Args:
        step: context of the step.
        depth: depth of the drafts, long [b, n].
        columns: their columns, long [b, n]; or the column of the first of them.

    Returns:
        Keys of the noise, long [b, n].
    """
    if isinstance(columns, int):
        columns = torch.arange(columns, columns + depth.shape[1], device=depth.device)
    return step.start[:, None] + depth - 1 + (columns + 1) * NODE


class NodeSource(Protocol):
    """Distributions that the drafts of a tree are drawn from, as a builder reads them."""

    def begin(self, step: CausalStep, tokens: Tensor) -> Tensor:
        """Return the log-probabilities [b, M, V] that each of M draft models has for the token
        after the last committed one.

        Args:
            step: context of the step.
            tokens: committed tokens of the rows, long [b, T].
        """
        ...

    def extend(self, step: CausalStep, tree: Tree, first: int) -> Tensor:
        """Return the log-probabilities [b, L - first, V] after the last columns of a tree.

        Args:
            step: context of the step.
            tree: drafts so far.
            first: first column that is asked about.
        """
        ...


class TreeBuilder:
    """Tree of drafts that grows column by column.

    A distribution that is -inf everywhere has no children: the source knows nothing there.

    Args:
        step: context of the step.
        tokens: committed tokens of the rows, long [b, T].
        source: distributions of the nodes.
        draws: how siblings are drawn, one of ``DRAWS``.
        is_chain: whether every node gets one child.

    Attributes:
        tree: drafts so far; their ``logq`` once they are finished.
        rest: distribution of the next child of the root, as each of M draft models sees it, and of
            each draft: [b, M + n, V].
        passes: times that each row asked the source, long [b]. A row counts what it would need
            alone: what the source said because other rows asked counts once the row needs it.
    """

    def __init__(
        self,
        step: CausalStep,
        tokens: Tensor,
        source: NodeSource,
        draws: str,
        is_chain: bool = False,
    ):
        self.step, self.source, self.draws = step, source, draws
        self.on_host = tokens.device.type == "cpu"
        # deepest draft of each row, plus one: none behind the end of a block that a row stops at
        self.room = to_device(step.room, tokens.device)
        none = tokens[:, :0].long()
        no = none.bool()
        self.tree = Tree(none, no, none, none, is_chain=is_chain, failed=no)
        self.rest = source.begin(step, tokens).clone()
        self.num_models = self.rest.shape[1]
        self._failed = has_no_distribution(self.rest)  # nodes without one, bool [b, M + n]
        self._drawn: list[Tensor] = []  # what the columns were drawn from, [b, n, V] each
        self._asked = 0  # drafts whose own distribution is known
        self._alone = torch.zeros_like(step.start)  # drafts of which each row asked that
        self.passes = (self.room > 1).long()

    @property
    def size(self) -> int:
        """Drafts so far."""
        return self.tree.tokens.shape[1]

    @property
    def most_depth(self) -> int:
        """Most drafts that any row has room for."""
        return self.step.positions.shape[1] - 1

    def columns(self, columns: Sequence[int]) -> Tensor:
        """Return the same columns for every row, long [b, n]."""
        row = to_device(np.array(columns, dtype=np.int64), self.rest.device)
        return row.expand(len(self.rest), -1)

    def next_logq(self, parents: Tensor) -> Tensor:
        """Return the log-probabilities [b, n, V] of the next children of nodes, long [b, n]; -1 - m
        is the root as the draft model m sees it."""
        row = torch.arange(len(parents), device=parents.device)[:, None]
        return self.rest[row, parents + self.num_models]

    def keep(self, columns: Tensor) -> None:
        """Keep some drafts, long [b, n], with all their ancestors; only where none is random."""
        assert self.draws == RANKS, "a random draft stays once its value is known"
        self.tree = self.finish().select(columns)

    def compact(self, most: int) -> None:
        """Drop drafts that a row does not have, where no row has more than ``most``."""
        if self.size > most:
            order = torch.argsort((~self.tree.exists).byte(), dim=1, stable=True)[:, :most]
            self.tree = self.finish().select(order.sort(1).values)

    def finish(self) -> Tree:
        """Return the tree with the distributions of its columns."""
        if self._drawn:
            self.tree.logq, self._drawn = torch.cat(self._drawn, 1), []
        return self.tree

    def expand(self) -> None:
        """Ask the source for the distributions after the newest drafts, in one forward pass."""
        if self._asked < self.size:
            newest = self.tree.exists[:, self._asked :]
            if self.tree.is_chain:  # alone, a row's chain ends where it has no more room
                newest = newest & (self.tree.depth[:, self._asked :] + 1 < self.room[:, None])
            self._count(newest.any(1))
            self._ask()

    def expand_for(self, nodes: Tensor) -> None:
        """Ask the source where rows need the distribution of a draft that nobody asked for.

        Args:
            nodes: the node that each row needs, long [b, 1]; -1 for the root.
        """
        if self.size:
            column = nodes.clamp_min(0)
            exists = _taken(self.tree.exists, column)[:, 0]
            self._count((nodes[:, 0] >= self._alone) & exists)
            if self._asked < self.size and may_be_any(nodes >= self._asked):
                self._ask()

    def _count(self, needed: Tensor) -> None:
        self.passes = self.passes + needed
        self._alone = torch.where(needed, self.size, self._alone)

    def _ask(self) -> None:
        logq = self.source.extend(self.step, self.tree, self._asked)
        self.rest, self._asked = torch.cat([self.rest, logq], 1), self.size
        self._failed = torch.cat([self._failed, has_no_distribution(logq)], 1)

    def withhold_top(self, parents: Tensor, count: int) -> Tensor:
        """Take the most probable children out of the distributions at some nodes.

        Args:
            parents: columns of the nodes, -1 for the root, long [b, n].
            count: children to take out.

        Returns:
            The children, long [b, n, count].
        """
        top = self.next_logq(parents).topk(count, -1).indices
        everywhere = torch.ones_like(parents, dtype=torch.bool)
        for rank in range(count):
            self._remove(parents, self.next_logq(parents), top[..., rank], everywhere)
        return top

    def add(
        self, parents: Tensor, chosen: Tensor | None = None, active: Tensor | None = None
    ) -> Tensor:
        """Add one child to each of n different nodes of every row.

        Args:
            parents: columns of the nodes, -1 for the root, long [b, n]; -1 - m for the root as the
                draft model m sees it.
            chosen: the children, long [b, n]; None to draw them.
            active: nodes that get a child, bool [b, n]; None for all.

        Returns:
            Log-probabilities of the children among what their earlier siblings left, [b, n].
        """
        tree = self.tree
        assert not may_be_any(parents >= self._asked) or not self.on_host, "expand comes first"
        above = parents.clamp_min(0)
        depth = torch.where(parents < 0, 0, _taken(tree.depth, above)) + 1
        exists = (parents < 0) | _taken(tree.exists, above)
        rest = self.next_logq(parents)
        exists = exists & (depth < self.room[:, None]) & ~rest.isneginf().all(-1)
        exists = exists if active is None else exists & active
        failed = exists & self._failed.gather(1, parents + self.num_models)
        if chosen is not None:
            ids = chosen
        elif self.draws == RANKS:
            ids = rest.argmax(-1)
        else:
            ids = self._draw(rest, depth, exists)
        logmass = rest.gather(-1, ids[..., None])[..., 0]
        if self.draws not in NOTHING_DRAWN:
            self._drawn.append(rest if chosen is None else point(rest, ids))
        if chosen is None and self.draws != WITH_REPLACEMENT:
            self._remove(parents, rest, ids, exists)
        columns = {"tokens": ids, "parents": parents.clamp_min(-1), "depth": depth}
        for name, new in {**columns, "exists": exists, "failed": failed}.items():
            setattr(tree, name, torch.cat([vars(tree)[name], new], 1))
        return logmass

    def _draw(self, rest: Tensor, depth: Tensor, exists: Tensor) -> Tensor:
        step = self.step
        if self.draws == POSITION:
            at = step.start[:, None] + depth - 1
            return step.rng.categorical(rest, step.rows, at, "token", None, exists)
        at = node_positions(step, depth, self.size)
        return step.rng.categorical(rest, step.rows, at, "draft", step.round, exists)

    def _remove(self, parents: Tensor, logq: Tensor, ids: Tensor, where: Tensor) -> None:
        """Take children, long [b, n], out of the distributions ``logq`` at their parents."""
        row = torch.arange(len(parents), device=parents.device)[:, None]
        rest = torch.where(where[..., None], without(logq, ids), logq)
        self.rest[row, parents + self.num_models] = rest


def _taken(x: Tensor, columns: Tensor) -> Tensor:
    """Take columns [b, n] of x [b, L]; zeros where there is no column at all."""
    return x.gather(1, columns) if x.shape[1] else torch.zeros_like(columns, dtype=x.dtype)
