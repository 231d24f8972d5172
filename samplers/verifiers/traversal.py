"""Traversal verification: block verification of a tree, from its leaves to its root.

P of the root is 1. On the way down to a child c of u, drawn from q_c given its earlier siblings,
P_c = min(1, P_u p_u(c) / q_c(c)). In the order of a depth-first walk, children in the order in
which they were drawn:

    at a leaf c    accept its whole path with probability P_c; the next token is drawn from p_c
    else delete c; S = sum over v of (P_u p_u(v) - q_c(v))+ at its parent u, then
                   p_u <- norm((P_u p_u - q_c)+),  P_u <- S / (S + 1 - P_u)

A node whose children are all deleted is a leaf. A child that was not drawn at random has q_c = 1 at
itself. Weng et al., "Traversal Verification for Speculative Tree Decoding" (arXiv 2505.12398).

Guarantee: what is committed is distributed as p. It accepts at least as many drafts on average as
``recursive``; on a chain it is the verifier ``block``.
"""

from __future__ import annotations

import torch

from gen.core.method import Limit, method
from gen.core.registry import register
from gen.samplers.engine.draft import WITHOUT_REPLACEMENT
from gen.samplers.engine.host import may_be_any
from gen.samplers.verifiers.recursive import excess
from gen.samplers.verifiers.tree import TreeVerifier, coins, node


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
        row = torch.arange(len(logp), device=logp.device)
        joint, p = torch.zeros_like(logp[..., 0]), logp.clone()  # log P and log p of the nodes
        at = end = torch.full_like(step.start, -1)
        found, visited = torch.zeros_like(at, dtype=torch.bool), torch.zeros_like(tree.exists)
        for _ in range(2 * tree.tokens.shape[1]):  # a draft is entered once and left once
            children = tree.exists & (tree.parents == at[:, None]) & ~visited
            entering = children.any(1) & ~found
            leaving = ~entering & ~found & (at >= 0)
            if not may_be_any(entering | leaving):
                break
            column = torch.where(entering, children.byte().argmax(1), at).clamp_min(0)
            visited[row, column] |= entering
            u = tree.parents[row, column]
            q, p_u, joint_u = tree.drawn_from(column, logp[:, :1])[:, 0], node(p, u), node(joint, u)
            ratio = (p_u - q).gather(1, tree.tokens[row, column, None])[:, 0]
            down = (joint_u + ratio).clamp_max(0).nan_to_num(-torch.inf, neginf=-torch.inf)
            here = torch.where(entering, down, node(joint, column))
            joint[row, column + 1] = here
            kept = coins(step, tree, column, here.exp(), leaving)
            end, found, lost = torch.where(kept, column, end), found | kept, leaving & ~kept
            rest = excess(joint_u[:, None] + p_u, q)
            total = rest.logsumexp(1)
            less = torch.where(total[:, None] > -torch.inf, rest - total[:, None], p_u)
            p[row, u + 1] = torch.where(lost[:, None], less, p_u)
            whole = torch.logaddexp(total, (-torch.expm1(joint_u)).log())  # log(S + 1 - P)
            share = torch.where(whole > -torch.inf, total - whole, 0.0)
            joint[row, u + 1] = torch.where(lost, share, joint_u)
            at = torch.where(entering, column, torch.where(lost, u, at))
        return end, node(p, end)
