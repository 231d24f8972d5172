"""Acceptance of one node, and the largest that any rule can have.

A rule at a node knows p, q and k drafts, and accepts with some probability that the next token is
one of the drafts. Over all rules that keep the distribution p it is at most

    1 + min over sets H of tokens of p(H) - Pr(all k drafts are in H),

the value of an optimal transport problem (Sun et al., SpecTr, arXiv 2310.15141; Hu et al., arXiv
2502.18779). Where the drafts are independent, or without replacement, the best H holds the tokens
with the smallest p / q.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gen.core.errors import bad_value
from gen.samplers.engine.draft import JUDGED, RANKS, TOP_AND_RANDOM, WITH_REPLACEMENT

POINTS = 400  # of the quadrature without replacement, whose error is below 1e-5


def optimal_acceptance(p: Tensor, q: Tensor, k: int, draws: str) -> Tensor:
    """Compute the largest probability that one of k drafts is accepted.

    Args:
        p: the target's probabilities, [..., V].
        q: those of the draft model, [..., V].
        k: drafts of the node.
        draws: how they are drawn, one of ``gen.samplers.engine.draft.DRAWS`` but position_noise.

    Returns:
        The bound, [...].

    Raises:
        GenError: ``draws`` is another word, or k is not between 1 and V.
    """
    size = p.shape[-1]
    if draws not in JUDGED:
        raise bad_value("draws", draws, " or ".join(JUDGED))
    if not 1 <= k <= size:
        raise bad_value("k", k, f"1 to {size}, the tokens that there are")
    if draws == RANKS:
        return p.gather(-1, q.topk(k, -1).indices).sum(-1)
    if draws == TOP_AND_RANDOM:
        top = q.topk(k - 1, -1).indices
        left = q.scatter(-1, top, 0.0)
        left = left / left.sum(-1, keepdim=True)
        # every set with the top tokens in it, and the tokens x of p(x) < q'(x)
        return p.gather(-1, top).sum(-1) + torch.minimum(p, left).scatter(-1, top, 0.0).sum(-1)
    order = torch.where(q > 0, p / q, torch.inf).argsort(-1)
    below, inside = p.gather(-1, order).cumsum(-1), q.gather(-1, order)
    mass = inside.cumsum(-1).clamp_max(1)
    all_inside = mass**k if draws == WITH_REPLACEMENT else _without_replacement(inside, k)
    return 1 + (below - all_inside).amin(-1).clamp_max(0)


def _without_replacement(q: Tensor, k: int) -> Tensor:
    """Compute Pr(all k drafts without replacement are among the first n tokens), n = 1 .. V.

    Drafts without replacement are the first k of independent clocks that ring, with rates q. With
    R the rate of all other tokens, the first of those rings at time t with density R exp(-R t), and
    w = exp(-R t) is uniform: the probability is the mean over w that k of the first n have rung.
    """
    points, weights = np.polynomial.legendre.leggauss(POINTS)
    w = torch.as_tensor((points + 1) / 2, dtype=q.dtype, device=q.device)
    weights = torch.as_tensor(weights / 2, dtype=q.dtype, device=q.device)
    others = (q.flip(-1).cumsum(-1).flip(-1) - q).clamp_min(0)
    out = []
    for n in range(1, q.shape[-1] + 1):
        rate = others[..., n - 1, None]
        time = -w.log() / rate.clamp_min(1e-30)
        # how many of the first n have rung by then: 0 .. k - 1, or more
        counts = [torch.ones_like(time), *[torch.zeros_like(time)] * (k - 1)]
        for token in range(n):
            still = (-q[..., token, None] * time).exp()
            counts = [
                c * still + (counts[i - 1] * (1 - still) if i else 0) for i, c in enumerate(counts)
            ]
        enough = 1 - (sum(counts) * weights).sum(-1)
        out.append(torch.where(rate[..., 0] > 1e-15, enough, float(n >= k)))
    return torch.stack(out, -1)
