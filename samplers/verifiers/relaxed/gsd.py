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
Parameters: ``relaxation`` r, a whole number.
Preset: ``gsd``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gen.core.method import Limit, method
from gen.core.registry import register
from gen.samplers.verifiers.base import normalised
from gen.samplers.verifiers.relaxed.base import Relaxed, draft_logp


def _possible(q: Tensor) -> tuple[Tensor, Tensor]:
    """Lists rows and tokens [m] that q [n, V] has some mass on; off the CPU all of them, since
    counting them would wait for the device."""
    if q.device.type == "cpu":
        rows, tokens = (q > 0).nonzero(as_tuple=True)
        return rows, tokens
    n, size = q.shape
    return torch.arange(n, device=q.device).repeat_interleave(size), torch.arange(
        size, device=q.device
    ).repeat(n)


@method(
    "gsd",
    sampler="relaxed_acceptance",
    paper="ICCV 2025",
    title="Grouped Speculative Decoding for Autoregressive Image Generation",
    about=(
        "grouped speculative decoding, a hybrid: the paper's clusters of similar codes, with"
        " drafts of coupled decoding"
    ),
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

    def credit(self, tree, logp):
        b, length, size = logp.shape
        p, tokens = logp.exp().reshape(-1, size), tree.tokens.reshape(-1)
        row = torch.arange(len(p), device=p.device)
        ids, member = self._cluster(p, self._ranking(p), row, tokens)
        q = tree.drawn_from(slice(None), logp).reshape(-1, size).gather(1, ids).exp()
        share = (p.gather(1, ids) * member).sum(-1) / (q * member).sum(-1)
        # a draft alone in its cluster has the mass p(x) to the last bit
        log_g = tree.log_mass() + share.view(b, length).log()
        return torch.where(member.sum(-1).view(b, length) == 1, draft_logp(tree, logp), log_g)

    def residual(self, logq, logp):
        """Computes norm((p - q f)+). Here f may be below min(1, p/q), so the residual of the token
        verifier will not do."""
        log_p, q = logp.flatten(0, 1), logq.exp().flatten(0, 1)
        p, drawn = log_p.exp(), torch.minimum(log_p.exp(), q)
        ranking = self._ranking(p)
        for row, x in zip(*(i.split(1 << 14) for i in _possible(q)), strict=True):
            ids, member = self._cluster(p, ranking, row, x)
            mine = q[row, x]
            g = (
                mine
                * (p[row[:, None], ids] * member).sum(-1)
                / (q[row[:, None], ids] * member).sum(-1)
            )
            g = torch.where(member.sum(-1) == 1, drawn[row, x], torch.minimum(mine, g))
            drawn[row, x] = torch.where(mine > 0, g, mine)
        return normalised((p - drawn).clamp_min_(0), log_p).view_as(logp)

    def _ranking(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """Ranks tokens by p: the tokens in falling order, and the rank of each, [n, V] each."""
        order = p.argsort(dim=-1, descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(
            -1, order, torch.arange(p.shape[-1], device=p.device).expand_as(order)
        )
        return order, rank

    def _cluster(
        self, p: Tensor, ranking: tuple[Tensor, Tensor], row: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Finds the candidates [m, r + 1] of the clusters of tokens x [m] under the distributions
        p[row], and which of them are in."""
        order, rank = ranking
        r = int(self.relaxation)
        offset = torch.arange(-(r // 2), r - r // 2 + 1, device=p.device)
        position = rank[row, x][:, None] + offset
        ids = order[row[:, None], position.clamp(0, p.shape[-1] - 1)]
        member = (
            (position >= 0)
            & (position < p.shape[-1])
            & ((p[row[:, None], ids] - p[row, x][:, None]).abs() < self.close)
        )
        if self.codebook is not None:
            codes = self.codebook.float()
            n = len(codes)
            apart = (
                (codes[ids.clamp_max(n - 1)] - codes[x.clamp_max(n - 1)][:, None]).square().sum(-1)
            )
            mean = 2 * (codes - codes.mean(0)).square().sum(-1).mean()
            member &= (apart < self.near * mean) & (ids < n) & (x < n)[:, None]
        return ids, member | (offset == 0)

    def excess(self, p, q):
        # q(x) / q(C) <= 1, so g - p is at most what r others have, each less than p(x) + 0.15
        return torch.minimum(self.relaxation * (p + self.close), 1 - p)
