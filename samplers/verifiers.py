"""Verifiers: which drafts are accepted, and which token follows them.

The token verifier (Leviathan et al. 2023, Chen et al. 2023): with p the law and q the law the draft x was drawn from,

    accept x with probability min(1, p(x) / q(x));   at the first rejection draw from  (p - q)+ / sum (p - q)+

Exact: if x ~ q, what is committed is distributed as p. Both laws are final (guided, filtered); the residual is not
warped again, and where it is empty (p = q up to rounding) it falls back to p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROW, UNIFORM, POINT = 0, 1, 2


@dataclass
class Proposal:
    """Drafts and the law each was drawn from. ``tokens`` [b, L]; ``kind`` [b, L]: ROW (``logq`` [b, L, V] holds its law),
    UNIFORM (over the position's legal ids) or POINT (not random). Uniform and point laws are never stored as rows."""

    tokens: Tensor
    kind: Tensor
    logq: Tensor
    legal: Tensor  # bool [b, L, V]

    def log_mass(self) -> Tensor:
        """log q(x) of the drafts: [b, L]."""
        row = self.logq.gather(-1, self.tokens[..., None])[..., 0]
        uniform = -self.legal.sum(-1).to(row.dtype).log()
        return torch.where(self.kind == ROW, row, torch.where(self.kind == UNIFORM, uniform, torch.zeros_like(row)))

    def mass(self, at: Tensor) -> Tensor:
        """q of the drafts selected by ``at`` (bool [b, L]): [n, V]."""
        kind, legal, tokens = self.kind[at], self.legal[at], self.tokens[at]
        out = self.logq[at].exp()
        uniform = legal.to(out.dtype) / legal.sum(-1, keepdim=True)
        point = torch.zeros_like(out).scatter_(-1, tokens[:, None], 1.0)
        kind = kind[:, None]
        return torch.where(kind == ROW, out, torch.where(kind == UNIFORM, uniform, point))


def acceptance(proposal: Proposal, logp: Tensor) -> Tensor:
    """min(1, p(x) / q(x)) for every draft: [b, L]."""
    log_p = logp.gather(-1, proposal.tokens[..., None])[..., 0]
    return (log_p - proposal.log_mass()).clamp_max(0).exp()


def residual(proposal: Proposal, logp: Tensor, at: Tensor) -> Tensor:
    """log of (p - q)+ normalised: [n, V] for the n drafts selected by ``at`` (bool [b, L]); ``logp`` [b, W, V], W >= L."""
    p = logp[:, : at.shape[1]][at]
    rest = (p.exp() - proposal.mass(at)).clamp_min(0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, (rest / total).log(), p)


def leading(kept: Tensor) -> Tensor:
    """How many columns are true before the first false one: bool [b, L] -> long [b]."""
    return kept.long().cumprod(1).sum(1)
