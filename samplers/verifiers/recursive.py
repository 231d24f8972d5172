"""Recursive rejection: the children of a node are judged one after the other, each against what the
earlier ones left of the target's distribution.

At a node with target distribution p, for its children x in the order in which they were drawn, each
from a distribution q of its own given the earlier ones:

    accept x with probability min(1, p(x) / q(x)); then go on at x
    else p <- norm((p - q)+)

If no child is left the next token is drawn from what p is then. A child that was not drawn at
random has q = 1 at itself: it is accepted with probability p(x), and p loses x.

With replacement: Miao et al., "SpecInfer" (arXiv 2305.09781). Without: Jeon et al., "Recursive
Speculative Decoding" (arXiv 2402.14160), Chen et al., "Sequoia" (arXiv 2402.12374). With the most
probable tokens and one random one, judged first: Hu et al., "Towards Optimal Multi-draft
Speculative Decoding" (arXiv 2502.18779).

Guarantee: what is committed is distributed as p, however the children were drawn. On a chain it is
the verifier ``token``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.registry import register
from gen.samplers.engine.host import may_be_any
from gen.samplers.verifiers.tree import TreeVerifier, coins, node


@register("verifier", "recursive")
class Recursive(TreeVerifier):
    """Child after child, each against the residual of those before it."""

    def walk(self, step, tree, logp):
        at, p = torch.full_like(step.start, -1), logp[:, 0]  # log p, as all below
        for column in range(tree.tokens.shape[1]):
            turn = tree.exists[:, column] & (tree.parents[:, column] == at)
            if not may_be_any(turn):
                continue
            here, ids = torch.full_like(at, column), tree.tokens[:, column, None]
            q = tree.drawn_from(slice(column, column + 1), p[:, None])[:, 0]
            chance = (p - q).gather(1, ids)[:, 0].clamp_max(0).exp().nan_to_num(0.0)
            kept = coins(step, tree, here, chance, turn)
            p = torch.where((turn & ~kept)[:, None], residual(p, q), p)
            p = torch.where(kept[:, None], node(logp, here), p)
            at = torch.where(kept, here, at)
        return at, p


def excess(logp: Tensor, logq: Tensor) -> Tensor:
    """Compute log (p - q)+ of logarithms [b, V]; -inf where there is no p."""
    less = logq - logp
    # of NaN, which both at -inf give, the comparison is false
    return torch.where(less < 0, logp + (-torch.expm1(less)).log(), -torch.inf)


def residual(logp: Tensor, logq: Tensor) -> Tensor:
    """Compute log norm((p - q)+) of log-probabilities [b, V]; where it is empty, ``logp``."""
    rest = excess(logp, logq)
    total = rest.logsumexp(-1, keepdim=True)
    return torch.where(total > -torch.inf, rest - total, logp)
