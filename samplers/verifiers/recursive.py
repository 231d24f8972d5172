"""Recursive rejection: the children of a node are judged one after the other, each against what the
earlier ones left of the target's distribution.

At a node with target distribution p and draft distribution q, for its children x in the order in
which they were drawn:

    accept x with probability min(1, p(x) / q(x)); then go on at x
    else p <- norm((p - q)+), and where siblings are drawn without replacement
         q <- norm(q without x)

With replacement each child may come from a distribution of its own, as that of one of several
draft models does.

If no child is left the next token is drawn from what p is then. A child that was not drawn at
random has q = 1 at itself: it is accepted with probability p(x), and p loses x.

With replacement: Miao et al., "SpecInfer" (arXiv 2305.09781). Without: Jeon et al., "Recursive
Speculative Decoding" (arXiv 2402.14160), Chen et al., "Sequoia" (arXiv 2402.12374). With the most
probable tokens and one random one, judged first: Hu et al., "Towards Optimal Multi-draft
Speculative Decoding" (arXiv 2502.18779).

Guarantee: what is committed is distributed as p, for every way to draw the children that
``draws`` names. On a chain it is the verifier ``token``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.registry import register
from gen.samplers.engine.host import may_be_any
from gen.samplers.engine.tree import (
    RANKS,
    TOP_AND_RANDOM,
    WITH_REPLACEMENT,
    WITHOUT_REPLACEMENT,
)
from gen.samplers.verifiers.tree import (
    TreeVerifier,
    coins,
    first_with_path,
    node,
    representative,
)


@register("verifier", "recursive")
class Recursive(TreeVerifier):
    """Child after child, each against the residual of those before it."""

    draws = (RANKS, WITH_REPLACEMENT, WITHOUT_REPLACEMENT, TOP_AND_RANDOM)
    takes_several = True

    def walk(self, step, tree, logp):
        b, length = tree.tokens.shape
        first = first_with_path(tree) if tree.draws == WITH_REPLACEMENT else None
        at = torch.full((b,), -1, dtype=torch.long, device=logp.device)
        p, q = logp[:, 0], tree.logq[:, 0].to(logp.dtype)  # their logarithms, as all below
        for column in range(length):
            parent = tree.parents[:, column]
            parent = parent if first is None else representative(first, parent)
            turn = tree.exists[:, column] & (parent == at)
            if not may_be_any(turn):
                continue
            ids = tree.tokens[:, column, None]
            if tree.other_roots is not None:
                q = tree.drawn_from(column).to(p.dtype)
            drawn_from = torch.where(tree.random[:, column, None], q, point(p, ids))
            chance = (p - drawn_from).gather(1, ids)[:, 0].clamp_max(0).exp().nan_to_num(0.0)
            here = torch.full_like(at, column)
            kept = coins(step, tree, here, chance, turn)
            lost = (turn & ~kept)[:, None]
            p = torch.where(lost, residual(p, drawn_from), p)
            if tree.draws == WITHOUT_REPLACEMENT:
                q = torch.where(lost & tree.random[:, column, None], without(q, ids), q)
            here = here if first is None else first[:, column]
            at = torch.where(kept, here, at)
            p = torch.where(kept[:, None], node(logp, here), p)
            q = torch.where(kept[:, None], node(tree.logq, here).to(p.dtype), q)
        return at, p


def point(logp: Tensor, ids: Tensor) -> Tensor:
    """Return the log of a distribution [b, V] that is 1 at ids [b, 1]; ``logp`` [b, V] gives the
    type."""
    return torch.full_like(logp, -torch.inf).scatter(1, ids, 0.0)


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


def without(logq: Tensor, ids: Tensor) -> Tensor:
    """Compute log norm(q without ids [b, 1]), [b, V]; -inf where nothing is left.

    What is left of a sharp distribution has less mass than the type can tell from 0, and the next
    sibling was drawn from it all the same: probabilities would lose it.
    """
    rest = logq.scatter(1, ids, -torch.inf)
    total = rest.logsumexp(-1, keepdim=True)
    return torch.where(total > -torch.inf, rest - total, rest)
