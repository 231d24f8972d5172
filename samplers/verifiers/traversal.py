"""Traversal verification: block verification of a tree, from its leaves to its root.

P of the root is 1. On the way down to a child c of u, P_c = min(1, P_u p_u(c) / q_u(c)). In the
order of a depth-first walk, children in the order in which they were drawn:

    at a leaf c    accept its whole path with probability P_c; the next token is drawn from p_c
    else delete c; S = sum over v of (P_u p_u(v) - q_u(v))+ at its parent u, then
                   p_u <- norm((P_u p_u - q_u)+),  P_u <- S / (S + 1 - P_u),
                   and where siblings are drawn without replacement q_u <- norm(q_u without c)

A node whose children are all deleted is a leaf. Equal siblings that were drawn with replacement are
one context: the children of all of them are those of the first. A child that was not drawn at
random has q_u = 1 at itself. Weng et al., "Traversal Verification for Speculative Tree Decoding"
(arXiv 2505.12398).

Guarantee: what is committed is distributed as p. It accepts at least as many drafts on average as
``recursive``; on a chain it is the verifier ``block``.
"""

from __future__ import annotations

import torch

from gen.core.method import Limit, method
from gen.core.registry import register
from gen.samplers.engine.host import may_be_any
from gen.samplers.engine.tree import WITH_REPLACEMENT, WITHOUT_REPLACEMENT
from gen.samplers.verifiers.recursive import excess, point, without
from gen.samplers.verifiers.tree import TreeVerifier, coins, contexts, node


@method(
    "traversal",
    sampler="speculative",
    about="traversal verification: paths are judged from the leaves of the tree to its root",
    paper="2505.12398",
    title="Traversal Verification for Speculative Tree Decoding",
    params={
        "shape": "branching",
        "draws": WITHOUT_REPLACEMENT,
        "verifier": "traversal",
        "branching": "2-2-2",
    },
    limit=Limit("rsd_c", {"branching": "1"}, {"branching": "1"}),
    example={"branching": "2-2-1"},
)
@register("verifier", "traversal")
class Traversal(TreeVerifier):
    """All drafts of a path together, from the leaves to the root."""

    def walk(self, step, tree, logp):
        b, length = tree.tokens.shape
        row = torch.arange(b, device=logp.device)
        joint = torch.zeros(b, length + 1, dtype=logp.dtype, device=logp.device)  # log P of nodes
        p, q = logp.clone(), tree.logq.to(logp.dtype, copy=True)  # logarithms too, as all below
        at = torch.full((b,), -1, dtype=torch.long, device=logp.device)
        end, found = at, torch.zeros(b, dtype=torch.bool, device=logp.device)
        visited = torch.zeros_like(tree.exists)
        parents = contexts(tree) if tree.draws == WITH_REPLACEMENT else tree.parents
        for _ in range(2 * length):  # a draft is entered once and left once
            children = tree.exists & (parents == at[:, None]) & ~visited
            child, entering = children.byte().argmax(1), children.any(1)
            entering = entering & ~found
            column = torch.where(entering, child, at).clamp_min(0)
            leaving = ~entering & ~found & (at >= 0)
            if not may_be_any(entering | leaving):
                break
            visited = visited.scatter(
                1, column[:, None], entering[:, None] | visited.gather(1, column[:, None])
            )
            ids = tree.tokens.gather(1, column[:, None])
            parent = parents.gather(1, column[:, None])[:, 0]
            p_above, q_above = node(p, parent), node(q, parent)
            random = tree.random.gather(1, column[:, None])
            q_child = torch.where(random, q_above, point(p_above, ids))
            above = node(joint, parent)
            ratio = (p_above - q_child).gather(1, ids)[:, 0]
            down = (above + ratio).clamp_max(0).nan_to_num(-torch.inf, neginf=-torch.inf)
            joint[row, column + 1] = torch.where(entering, down, node(joint, column))
            kept = coins(step, tree, column, node(joint, column).exp(), leaving)
            end, found = torch.where(kept, column, end), found | kept
            lost = leaving & ~kept
            rest = excess(above[:, None] + p_above, q_child)
            total = rest.logsumexp(1)
            less = torch.where(total[:, None] > -torch.inf, rest - total[:, None], p_above)
            p[row, parent + 1] = torch.where(lost[:, None], less, p_above)
            whole = torch.logaddexp(total, (-torch.expm1(above)).log())  # log(S + 1 - P)
            share = torch.where(whole > -torch.inf, total - whole, 0.0)
            joint[row, parent + 1] = torch.where(lost, share, above)
            if tree.draws == WITHOUT_REPLACEMENT:
                drop = lost[:, None] & random
                q[row, parent + 1] = torch.where(drop, without(q_above, ids), q_above)
            at = torch.where(entering, child, torch.where(lost, parent, at))
        return end, node(p, end)
