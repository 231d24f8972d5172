"""Grouped speculative decoding: a cluster of similar codes is accepted as one.

    g(x) = q(x) p(C) / q(C)

C is x and the r tokens next to it in the ranking by p, if they are as likely and look alike.

The preset is a hybrid: the rule is the paper's, the drafts are those of coupled decoding with
repetition (``coupling: gumbel_shared``, ``init: repeat``, a window of 64). The paper's scripts
draft with ``coupling: fresh``, ``init: random`` and a window of 16. They compare rows of the
language model's embedding, where gen compares vectors of the codebook.

Reference: So et al., "Grouped Speculative Decoding for Autoregressive Image Generation" (ICCV
2025).
Guarantee: r = 0 is exact. A step is never further from p than the draft was
(``gen.samplers.verifiers.relaxed.base`` has the proof).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gen.core.method import Limit, method
from gen.core.registry import register
from gen.samplers.verifiers.base import draft_logp, normalised
from gen.samplers.verifiers.relaxed.base import Relaxed


@method(
    "gsd",
    sampler="relaxed_acceptance",
    paper="ICCV 2025",
    title="Grouped Speculative Decoding for Autoregressive Image Generation",
    about="grouped speculative decoding, a hybrid: the paper's clusters of similar codes, with"
    " drafts of coupled decoding",
    params={"verifier": "gsd", "init": "repeat"},
    limit=Limit("plain autoregression", {"relaxation": 0}),
)
@register("verifier", "gsd")
@dataclass(frozen=True)
class GSD(Relaxed):
    """Credit a draft with the probability of its cluster.

    ``relaxation``: neighbours in the ranking, one half of them (rounded down) more likely than the
    draft. They count if their p differs by less than 0.15 and, where there are codes, if these
    are near: the squared distance is below a quarter of the mean one in the codebook. (The paper's
    0.5 is a quarter of the mean one of directions.)
    """

    relaxation: float = 13
    whole = True
    close: ClassVar[float] = 0.15
    near: ClassVar[float] = 0.25

    def credit(self, draft, logp):
        p, x = logp.exp().flatten(0, 1), draft.tokens.flatten()
        ids, member = self._cluster(p, ranked(p), torch.arange(len(p), device=p.device), x)
        q = draft.drawn_from(slice(None), logp).flatten(0, 1).gather(1, ids).exp()
        share = (p.gather(1, ids) * member).sum(-1) / (q * member).sum(-1)
        log_g = draft.log_mass() + share.log().view_as(draft.tokens)
        # a draft alone in its cluster has the mass p(x) to the last bit
        alone = (member.sum(-1) == 1).view_as(draft.tokens)
        return torch.where(alone, draft_logp(draft, logp), log_g)

    def residual(self, logq, logp):
        """Computes norm((p - q f)+). Here f may be below min(1, p/q), so the residual of the token
        verifier will not do."""
        log_p, q = logp.flatten(0, 1), logq.exp().flatten(0, 1)
        p, drawn, size = log_p.exp(), torch.minimum(log_p.exp(), q), q.shape[-1]
        ranking, every = ranked(p), torch.arange(q.numel(), device=q.device)
        if q.is_cpu:  # elsewhere counting the tokens that have some mass would wait for the device
            every = (q > 0).view(-1).nonzero()[:, 0]
        for at in every.split(1 << 14):
            row, x = at // size, at % size
            ids, member = self._cluster(p, ranking, row, x)
            mine, of_p, of_q = q[row, x], p[row[:, None], ids], q[row[:, None], ids]
            g = mine * (of_p * member).sum(-1) / (of_q * member).sum(-1)
            g = torch.where(member.sum(-1) == 1, drawn[row, x], torch.minimum(mine, g))
            drawn[row, x] = torch.where(mine > 0, g, mine)
        return normalised((p - drawn).clamp_min_(0), log_p).view_as(logp)

    def _cluster(
        self, p: Tensor, ranking: tuple[Tensor, Tensor], row: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Finds the candidates [m, r + 1] of the clusters of tokens x [m] under the distributions
        p[row], and which of them are in."""
        order, rank = ranking
        r, size, row, x = int(self.relaxation), p.shape[-1], row[:, None], x[:, None]
        offset = torch.arange(-(r // 2), r - r // 2 + 1, device=p.device)
        position = rank[row, x] + offset
        ids = order[row, position.clamp(0, size - 1)]
        member = (position >= 0) & (position < size)
        member &= (p[row, ids] - p[row, x]).abs() < self.close
        if self.codebook is not None:
            codes = self.codebook.float()
            n = len(codes)
            apart = (codes[ids.clamp_max(n - 1)] - codes[x.clamp_max(n - 1)]).square().sum(-1)
            mean = 2 * (codes - codes.mean(0)).square().sum(-1).mean()
            member &= (apart < self.near * mean) & (ids < n) & (x < n)
        return ids, member | (offset == 0)

    def excess(self, p, q):
        # q(x) / q(C) <= 1, so g - p is at most what r others have, each less than p(x) + 0.15
        return torch.minimum(self.relaxation * (p + self.close), 1 - p)


def ranked(p: Tensor) -> tuple[Tensor, Tensor]:
    """Ranks tokens by p: the tokens in falling order, and the rank of each, [n, V] each."""
    order = p.argsort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(p.shape[-1], device=p.device).expand_as(order)
    return order, torch.empty_like(order).scatter_(-1, order, ranks)
