"""Traversal verification: block verification of a tree, from its leaves to its root.

P of the root is 1. On the way down to a child c of u, P_c = min(1, P_u p_u(c) / q_u(c)). In the
order of a depth-first walk, children in the order in which they were drawn:

    at a leaf c    accept its whole path with probability P_c; the next token is drawn from p_c
    else delete c; S = sum over v of (P_u p_u(v) - q_u(v))+ at its parent u, then
                   p_u <- norm((P_u p_u - q_u)+),  P_u <- S / (S + 1 - P_u),
                   and where siblings are drawn without replacement q_u <- norm(q_u without c)

A node whose children are all deleted is a leaf. A child that was not drawn at random has q_u = 1 at
itself. Weng et al., "Traversal Verification for Speculative Tree Decoding" (arXiv 2505.12398).

Guarantee: what is committed is distributed as p. It accepts at least as many drafts on average as
``recursive``; on a chain it is the verifier ``block``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.registry import register
from gen.samplers.engine.tree import WITHOUT_REPLACEMENT, Tree
from gen.samplers.verifiers.recursive import without
from gen.samplers.verifiers.tree import TreeVerifier, coins, node


@register("verifier", "traversal")
class Traversal(TreeVerifier):
    """All drafts of a path together, from the leaves to the root."""

    def walk(self, step, tree, logp):
        b, length = tree.tokens.shape
        row = torch.arange(b, device=logp.device)
        joint = torch.ones(b, length + 1, dtype=logp.dtype, device=logp.device)  # P of every node
        p, q = logp.exp(), tree.logq.to(logp.dtype).exp()
        end = torch.full((b,), -1, dtype=torch.long, device=logp.device)
        found = torch.zeros(b, dtype=torch.bool, device=logp.device)
        for column, entering in zip(*visits(tree), strict=True):
            at = column.clamp_min(0)[:, None]
            there = (column >= 0) & tree.exists.gather(1, at)[:, 0] & ~found
            ids, parent = tree.tokens.gather(1, at), tree.parents.gather(1, at)[:, 0]
            p_above, q_above = node(p, parent), node(q, parent)
            own = torch.zeros_like(p_above).scatter(1, ids, 1.0)
            random = tree.random.gather(1, at)
            q_child, above = torch.where(random, q_above, own), node(joint, parent)
            ratio = (p_above.gather(1, ids) / q_child.gather(1, ids))[:, 0]
            down = (above * ratio).clamp_max(1).nan_to_num(0.0)
            joint[row, column + 1] = torch.where(there & entering, down, node(joint, column))
            leaving = there & ~entering
            kept = self._flip(step, tree, column, node(joint, column), leaving)
            end, found = torch.where(kept, column, end), found | kept
            lost = leaving & ~kept
            rest = torch.where(above[:, None] > 0, above[:, None] * p_above - q_child, 0)
            rest = rest.clamp_min_(0)
            total = rest.sum(1)
            less = torch.where(total[:, None] > 0, rest / total[:, None], p_above)
            p[row, parent + 1] = torch.where(lost[:, None], less, p_above)
            share = total + 1 - above
            share = torch.where(share > 0, total / share, 1.0)
            joint[row, parent + 1] = torch.where(lost, share, above)
            if tree.draws == WITHOUT_REPLACEMENT:
                drop = lost[:, None] & random
                q[row, parent + 1] = torch.where(drop, without(q_above, ids), q_above)
        return end, node(p, end).log()

    def _flip(self, step, tree: Tree, column: Tensor, chance: Tensor, active: Tensor) -> Tensor:
        """Flip the coins of the drafts in ``column`` [b]."""
        kept = torch.zeros_like(active)
        every = range(tree.tokens.shape[1])
        for one in column[active].unique().tolist() if column.is_cpu else every:
            kept = kept | coins(step, tree, one, chance, active & (column == one))
        return kept


def visits(tree: Tree) -> tuple[Tensor, Tensor]:
    """List the steps of a depth-first walk through each tree.

    Returns:
        The column of each step, -1 where a row has no more, long [2 L, b]; and whether the walk
        comes down to it, bool [2 L, b], or leaves it.
    """
    parents, exists = tree.parents.tolist(), tree.exists.tolist()
    length, steps = tree.tokens.shape[1], []
    for row_parents, row_exists in zip(parents, exists, strict=True):
        children: dict[int, list[int]] = {}
        for column in range(length):
            if row_exists[column]:
                children.setdefault(row_parents[column], []).append(column)
        line: list[tuple[int, bool]] = []
        todo = [(column, True) for column in reversed(children.get(-1, []))]
        while todo:
            column, entering = todo.pop()
            line.append((column, entering))
            if entering:
                todo.append((column, False))
                todo += [(child, True) for child in reversed(children.get(column, []))]
        steps.append(line + [(-1, False)] * (2 * length - len(line)))
    device = tree.tokens.device
    columns = torch.tensor([[c for c, _ in line] for line in steps], device=device)
    entering = torch.tensor([[e for _, e in line] for line in steps], device=device)
    return columns.T, entering.T
