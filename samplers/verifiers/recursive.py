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
        p, q = logp[:, 0].exp(), tree.logq[:, 0].to(logp.dtype).exp()
        for column in range(length):
            parent = tree.parents[:, column]
            parent = parent if first is None else representative(first, parent)
            turn = tree.exists[:, column] & (parent == at)
            if not may_be_any(turn):
                continue
            ids = tree.tokens[:, column, None]
            if tree.other_roots is not None:
                q = tree.drawn_from(column).to(p.dtype).exp()
            own = torch.zeros_like(p).scatter(1, ids, 1.0)
            drawn_from = torch.where(tree.random[:, column, None], q, own)
            chance = (p.gather(1, ids) / drawn_from.gather(1, ids))[:, 0]
            here = torch.full_like(at, column)
            kept = coins(step, tree, here, chance.clamp_max(1).nan_to_num(0.0), turn)
            lost = (turn & ~kept)[:, None]
            p = torch.where(lost, residual(p, drawn_from), p)
            if tree.draws == WITHOUT_REPLACEMENT:
                q = torch.where(lost & tree.random[:, column, None], without(q, ids), q)
            here = here if first is None else first[:, column]
            at = torch.where(kept, here, at)
            p = torch.where(kept[:, None], node(logp, here).exp(), p)
            q = torch.where(kept[:, None], node(tree.logq, here).to(p.dtype).exp(), q)
        return at, p.log()


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Compute norm((p - q)+) [b, V]; where it is empty, p."""
    rest = (p - q).clamp_min_(0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, p)


def without(q: Tensor, ids: Tensor) -> Tensor:
    """Compute norm(q without ids [b, 1]), [b, V]; zeros where nothing is left."""
    rest = q.scatter(1, ids, 0.0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, rest)
