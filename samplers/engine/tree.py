"""Trees of drafts: their nodes, the distributions that the nodes were drawn from, and the noise of
each node.

Column j of a tree is a draft; it follows column ``parents[j]``, or the root, which is the last
committed token. A parent stands before its children, and siblings stand in the order in which they
were drawn. A chain is the tree whose columns follow each other.

Verifiers read three facts: which distribution a draft was drawn from, in which order siblings were
drawn, and whether they were drawn with replacement. A tree that states one of them wrongly changes
the distribution of what is committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gen.samplers.engine.causal_loop import CausalStep
from gen.samplers.engine.host import may_be_any, to_device
from gen.samplers.engine.step_context import StepContext

# how the children of a node are drawn from the distribution at it
WITH_REPLACEMENT = "with_replacement"  # independently of each other
WITHOUT_REPLACEMENT = "without_replacement"  # each from what the earlier ones leave, renormalised
RANKS = "ranks"  # the most probable ones, in their order: nothing is random
TOP_AND_RANDOM = "top_and_random"  # one draw from all but the k - 1 most probable, then these
POSITION = "position_noise"  # the largest log q + G, with the noise G of the position
DRAWS = (WITH_REPLACEMENT, WITHOUT_REPLACEMENT, RANKS, TOP_AND_RANDOM, POSITION)

NODE = 1 << 32  # added to the position per node: nodes of one position have noise of their own


@dataclass
class Tree:
    """Tree of L drafts for each of b rows.

    Attributes:
        tokens: drafts, long [b, L].
        parents: column of each draft's parent, -1 for the root, long [b, L].
        exists: drafts that a row has, bool [b, L].
        depth: depth of each draft, 1 for a child of the root, long [b, L].
        random: drafts that were drawn at random; the others were chosen, bool [b, L].
        logq: distribution that the random children of the root and of each draft were drawn from,
            log-probabilities [b, L + 1, V].
        draws: one of ``DRAWS``.
        is_chain: whether every draft follows the one before it.
        other_roots: distributions at the root of all draft models but the first, where there are
            several, [b, M - 1, V].
        models: number of the draft model that each column was drawn from.
    """

    tokens: Tensor
    parents: Tensor
    exists: Tensor
    depth: Tensor
    random: Tensor
    logq: Tensor
    draws: str
    is_chain: bool = False
    other_roots: Tensor | None = None
    models: tuple[int, ...] = ()

    def drawn_from(self, column: int) -> Tensor:
        """Return the log-probabilities [b, V] that a draft was drawn from, if it is random."""
        parent = self.parents[:, column]
        logq = self.logq[torch.arange(len(parent), device=parent.device), parent + 1]
        if self.other_roots is None or not self.models[column]:
            return logq
        at_root = self.other_roots[:, self.models[column] - 1]
        return torch.where(parent[:, None] < 0, at_root, logq)

    def select(self, columns: Tensor) -> Tree:
        """Take some columns of each row, long [b, n]: in their order, with all their ancestors."""
        row = torch.arange(len(columns), device=columns.device)[:, None]
        new_column = torch.full_like(self.parents, -1)
        new_column[row, columns] = torch.arange(columns.shape[1], device=columns.device)
        parents = self.parents[row, columns]
        parents = torch.where(parents < 0, parents, new_column.gather(1, parents.clamp_min(0)))
        nodes = torch.cat([torch.zeros_like(columns[:, :1]), columns + 1], 1)
        taken = (x[row, columns] for x in (self.tokens, self.exists, self.depth, self.random))
        tokens, exists, depth, random = taken
        return Tree(tokens, parents, exists, depth, random, self.logq[row, nodes], self.draws)

    def path(self, last: Tensor, length: int) -> Tensor:
        """List the columns from the root to a draft of each row.

        Args:
            last: column of the draft, -1 for the root, long [b].
            length: columns of the list.

        Returns:
            Columns, long [b, length]; 0 behind the draft.
        """
        path = torch.zeros(len(last), length + 1, dtype=torch.long, device=last.device)
        for _ in range(length):
            # the root's depth of 0 is written to the last column, which is cut off
            depth = self.depth_of(last)
            where = torch.where(depth > 0, depth - 1, length)
            path.scatter_(1, where[:, None], last.clamp_min(0)[:, None])
            last = torch.where(last < 0, last, self._parent_of(last))
        return path[:, :length]

    def depth_of(self, column: Tensor) -> Tensor:
        """Look up the depth of a draft of each row, long [b]; -1, the root, has depth 0."""
        depth = self.depth.gather(1, column.clamp_min(0)[:, None])[:, 0]
        return torch.where(column < 0, 0, depth)

    def _parent_of(self, column: Tensor) -> Tensor:
        return self.parents.gather(1, column.clamp_min(0)[:, None])[:, 0]


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
    """Distributions that the drafts of a tree are drawn from, as a builder reads them.

    Attributes:
        other_roots: after ``begin``, the distributions [b, M - 1, V] of further draft models there;
            None where there is one.
    """

    other_roots: Tensor | None

    def begin(self, step: CausalStep, tokens: Tensor) -> Tensor:
        """Return the log-probabilities [b, V] of the token after the last committed one.

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
        self.step, self.source = step, source
        self.on_host = tokens.device.type == "cpu"
        # deepest draft of each row, plus one: none behind the end of a block that a row stops at
        self.room = to_device(step.room, tokens.device)
        root = source.begin(step, tokens)[:, None]
        none = tokens[:, :0].long()
        no = none.bool()
        others = source.other_roots
        self.tree = Tree(none, none, no, none, no, root, draws, is_chain, others)
        # distribution of the next child of the root and of each draft, [b, n + 1, V]
        self.rest = root.clone()
        self._asked = 0  # drafts whose own distribution is known
        self._alone = torch.zeros_like(step.start)  # drafts of which each row asked that
        self.passes = (self.room > 1).long()

    @property
    def size(self) -> int:
        """Drafts so far."""
        return self.tree.tokens.shape[1]

    @property
    def num_models(self) -> int:
        """Draft models that the source asks."""
        return 1 if self.tree.other_roots is None else 1 + self.tree.other_roots.shape[1]

    @property
    def most_depth(self) -> int:
        """Most drafts that any row has room for."""
        return self.step.positions.shape[1] - 1

    def columns(self, columns: Sequence[int]) -> Tensor:
        """Return the same columns for every row, long [b, n]."""
        row = to_device(np.array(columns, dtype=np.int64), self.rest.device)
        return row.expand(len(self.rest), -1)

    def next_logq(self, parents: Tensor) -> Tensor:
        """Return the log-probabilities [b, n, V] of the next children of nodes, long [b, n]."""
        return _rows(self.rest, parents + 1)

    def keep(self, columns: Tensor) -> None:
        """Keep some drafts, long [b, n], with all their ancestors; only where none is random."""
        assert self.tree.draws == RANKS, "a random draft stays once its value is known"
        self.tree = self.finish().select(columns)

    def compact(self, most: int) -> None:
        """Drop drafts that a row does not have, where no row has more than ``most``."""
        if self.size > most:
            order = torch.argsort((~self.tree.exists).byte(), dim=1, stable=True)[:, :most]
            self.tree = self.finish().select(order.sort(1).values)

    def finish(self) -> Tree:
        """Return the tree; nodes whose own distribution nobody asked for get one without mass."""
        tree = self.tree
        more = self.size + 1 - tree.logq.shape[1]
        if more > 0:
            none = tree.logq.new_full((len(tree.logq), more, tree.logq.shape[2]), -torch.inf)
            tree.logq = torch.cat([tree.logq, none], 1)
        return tree

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
        self.tree.logq = torch.cat([self.tree.logq, logq], 1)
        self.rest, self._asked = torch.cat([self.rest, logq], 1), self.size

    def withhold_top(self, parents: Tensor, count: int) -> Tensor:
        """Take the most probable children out of the distributions at some nodes.

        Args:
            parents: columns of the nodes, -1 for the root, long [b, n].
            count: children to take out.

        Returns:
            The children, long [b, n, count].
        """
        top = self.next_logq(parents).topk(count, -1).indices
        for rank in range(count):
            self._remove(parents, top[..., rank], torch.ones_like(parents, dtype=torch.bool))
        row = torch.arange(len(parents), device=parents.device)[:, None]
        self.tree.logq = self.tree.logq.clone()
        self.tree.logq[row, parents + 1] = self.next_logq(parents)
        return top

    def add(
        self,
        parents: Tensor,
        chosen: Tensor | None = None,
        active: Tensor | None = None,
        models: Sequence[int] = (),
    ) -> Tensor:
        """Add one child to each of n different nodes of every row.

        Args:
            parents: columns of the nodes, -1 for the root, long [b, n].
            chosen: the children, long [b, n]; None to draw them.
            active: nodes that get a child, bool [b, n]; None for all.
            models: draft model that each child is drawn from, n numbers; () for the first one.

        Returns:
            Log-probabilities of the children among what their earlier siblings left, [b, n].
        """
        tree, first, n = self.tree, self.size, parents.shape[1]
        assert not may_be_any(parents >= self._asked) or not self.on_host, "expand comes first"
        above = parents.clamp_min(0)
        depth = torch.where(parents < 0, 0, _taken(tree.depth, above)) + 1
        exists = (parents < 0) | _taken(tree.exists, above)
        rest = self.next_logq(parents)
        if any(models):
            rest = self._at_other_roots(rest, parents, models)
        exists = exists & (depth < self.room[:, None]) & ~rest.isneginf().all(-1)
        exists = exists if active is None else exists & active
        random = torch.full_like(exists, chosen is None and tree.draws != RANKS)
        if chosen is not None:
            ids = chosen
        elif tree.draws == RANKS:
            ids = rest.argmax(-1)
        else:
            ids = self._draw(rest, depth, first, exists)
        logmass = rest.gather(-1, ids[..., None])[..., 0]
        if chosen is None and tree.draws != WITH_REPLACEMENT:
            self._remove(parents, ids, exists)
        columns = {"tokens": ids, "parents": parents, "exists": exists, "depth": depth}
        for name, new in {**columns, "random": random}.items():
            setattr(tree, name, torch.cat([vars(tree)[name], new], 1))
        tree.models += tuple(models) or (0,) * n
        assert tree.tokens.shape[1] == first + n
        return logmass

    def _at_other_roots(self, rest: Tensor, parents: Tensor, models: Sequence[int]) -> Tensor:
        """Replace distributions [b, n, V] by those of other draft models where the parent is the
        root."""
        assert self.tree.other_roots is not None and self.tree.draws == WITH_REPLACEMENT
        at_root = self.tree.other_roots.unbind(1)
        others = torch.stack([at_root[max(model - 1, 0)] for model in models], 1)
        other = (parents < 0) & self.columns(models).bool()
        return torch.where(other[..., None], others, rest)

    def _draw(self, rest: Tensor, depth: Tensor, first: int, exists: Tensor) -> Tensor:
        step = self.step
        if self.tree.draws == POSITION:
            at = step.start[:, None] + depth - 1
            return step.rng.categorical(rest, step.rows, at, "token", None, exists)
        at = node_positions(step, depth, first)
        return step.rng.categorical(rest, step.rows, at, "draft", step.round, exists)

    def _remove(self, parents: Tensor, ids: Tensor, where: Tensor) -> None:
        """Take drawn children, long [b, n], out of the distributions at their parents."""
        row = torch.arange(len(parents), device=parents.device)[:, None]
        before = self.rest[row, parents + 1]
        rest = before.scatter(-1, ids[..., None], -torch.inf)
        total = rest.logsumexp(-1, keepdim=True)
        rest = torch.where(total.isneginf(), -torch.inf, rest - total)
        self.rest[row, parents + 1] = torch.where(where[..., None], rest, before)


def _taken(x: Tensor, columns: Tensor) -> Tensor:
    """Take columns [b, n] of x [b, L]; zeros where there is no column at all."""
    return x.gather(1, columns) if x.shape[1] else torch.zeros_like(columns, dtype=x.dtype)


def _rows(x: Tensor, nodes: Tensor) -> Tensor:
    """Take nodes [b, n] of x [b, L, V]: [b, n, V]."""
    return x[torch.arange(len(x), device=x.device)[:, None], nodes]
