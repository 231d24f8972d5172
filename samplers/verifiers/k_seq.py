"""k-sequential selection: k independent drafts at a node share one acceptance rule.

At a node with target distribution p and k drafts that are there, all from one distribution q:

    beta(rho) = sum over v of min(q(v), p(v) / rho)
    rho       = the smallest in [1, k] with 1 - (1 - beta)^k <= rho beta
    accept draft x with probability min(1, p(x) / (rho q(x))), one after the other
    else draw from norm(p - min(q, p / rho) (1 - (1 - beta)^k) / beta)

k is the number of paths that agree with what is accepted so far. Sun et al., "SpecTr: Fast
Speculative Decoding via Optimal Transport" (arXiv 2310.15141).

Guarantee: what is committed is distributed as p, if the paths were drawn independently of each
other. It accepts at least 1 - 1/e times as often as the best rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.registry import register
from gen.samplers.engine.draft import WITH_REPLACEMENT
from gen.samplers.engine.host import may_be_any
from gen.samplers.verifiers.tree import TreeVerifier, coins, node

BISECTIONS = 60


@register("verifier", "k_seq")
class KSeq(TreeVerifier):
    """The rule of SpecTr for paths that were drawn independently of each other."""

    draws = (WITH_REPLACEMENT,)

    def walk(self, step, tree, logp):
        at = torch.full_like(step.start, -1)

        def enter():
            """Read the distributions at the rows' nodes, and the rule for their drafts."""
            drafts = tree.exists & (tree.parents == at[:, None])
            p, alive = node(logp, at), drafts.sum(1)
            q = tree.drawn_from(drafts.byte().argmax(1), p[:, None])[:, 0].exp()
            return p.exp(), q, alive, smallest_factor(p.exp(), q, alive)

        p, q, alive, rho = enter()
        for column in range(tree.tokens.shape[1]):
            turn = tree.exists[:, column] & (tree.parents[:, column] == at)
            if not may_be_any(turn):
                continue
            here, ids = torch.full_like(at, column), tree.tokens[:, column, None]
            chance = (p.gather(1, ids) / (rho * q.gather(1, ids)))[:, 0]
            kept = coins(step, tree, here, chance.clamp_max(1).nan_to_num(0.0), turn)
            # a sibling may be accepted whose equal was not: the first of them has the children
            equal = tree.exists & (tree.parents == at[:, None]) & (tree.tokens == ids)
            at = torch.where(kept, equal.byte().argmax(1), at)
            if may_be_any(kept):
                p, q, alive, rho = enter()
        common = torch.minimum(q, p / rho)
        beta = common.sum(1, keepdim=True)
        share = torch.where(beta > 0, (1 - (1 - beta) ** alive[:, None]) / beta, 0)
        rest = (p - common * share).clamp_min_(0)
        total = rest.sum(1, keepdim=True)
        rest = torch.where((alive[:, None] > 0) & (total > 0), rest / total, p)
        return at, rest.log()


def smallest_factor(p: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Find the rho of the module's rule, [b, 1], for p and q [b, V] and k drafts, long [b]."""
    most = k.clamp_min(1)[:, None].to(p.dtype)
    low, high = torch.ones_like(most), most.clone()
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        beta = torch.minimum(q, p / middle).sum(1, keepdim=True)
        enough = 1 - (1 - beta) ** most <= middle * beta
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high
