"""Couplings: one round of Jacobi. They verify the previous iterate and turn it into the next one.

Every position past the last committed one holds a draft x_j drawn from a law q_j (the law at that position in the
previous round, or the tail initialiser's). A round computes the laws p_j given the current drafts. Couplings differ in
how the next draft, which must be distributed as p_j, depends on the previous one:

    fresh          x_j' ~ p_j, drawn anew                                     SJD (arXiv 2410.01699)
    maximal        x_j' = x_j with probability min(1, p/q), else residual     SCD-MC; keeps as many drafts as can be kept
    gumbel_shared  x_j' = argmax log p_j + G_j, G_j fixed per position        SCD-GS; verified with independent coins
    gumbel         the same drafts; accepted as long as x_j' = x_j            Gumbel fixed point (arXiv 2002.09928)

In all of them q_j := p_j for every draft that is carried on, kept or not: then x_j ~ q_j holds at its verification, and
the token verifier is exact. ``gumbel`` commits what sequential sampling with the same noise gives, token for token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.registry import register
from gen.samplers.loop import Round
from gen.samplers.verifiers import Proposal, acceptance, leading, residual


class Coupling:
    """``step`` takes the proposal (L drafts), which of them are drafts [b, L] and the law [b, W, V], W >= L; it returns the
    accepted count [b] and ids [b, W]: accepted drafts, the token after them, then the next iterate."""

    exactness = "law"

    def step(self, now: Round, proposal: Proposal, drafted: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class _Verified(Coupling):
    """The token verifier up to the first rejection, ``redraft`` after it."""

    def step(self, now, proposal, drafted, logp):
        length = drafted.shape[1]
        kept = now.flip(acceptance(proposal, logp[:, :length]), "accept", drafted) & drafted
        accepted = leading(kept)
        # the place without a draft, if the window has one; its noise has not been used before
        undrafted = now.categorical(logp[:, length:], "token", now.valid[:, length:], length, shared=True)
        past = torch.arange(length, device=logp.device) > accepted[:, None]
        ids = torch.where(past, self.redraft(now, proposal, drafted & past, kept, logp[:, :length]), proposal.tokens)
        # at the first rejection: the residual, never p itself
        rejected = drafted & (torch.arange(length, device=logp.device) == accepted[:, None])
        row = rejected.any(1)
        if bool(row.any()):
            rest = logp.new_zeros(len(row), 1, logp.shape[-1])
            rest[row, 0] = residual(proposal, logp, rejected)
            drawn = now.categorical(rest, "residual", row[:, None], accepted.clamp_max(now.positions.shape[1] - 1))
            ids = torch.where(rejected, drawn, ids)
        return accepted, torch.cat([ids, undrafted], 1)

    def redraft(self, now, proposal, past, kept, logp) -> Tensor:
        """The next iterate [b, L] where ``past`` (bool [b, L]): beyond the first rejection."""
        raise NotImplementedError


@register("coupling", "fresh")
class Fresh(_Verified):
    """Everything past the first rejection is drawn anew."""

    def redraft(self, now, proposal, past, kept, logp):
        return now.categorical(logp, "redraft", past)


@register("coupling", "maximal")
class Maximal(_Verified):
    """The verifier's coin and residual are used past the first rejection too."""

    def redraft(self, now, proposal, past, kept, logp):
        moved = past & ~kept
        law = logp.clone()
        law[moved] = residual(proposal, logp, moved)
        return torch.where(kept, proposal.tokens, now.categorical(law, "residual", moved))


@register("coupling", "gumbel_shared")
class GumbelShared(_Verified):
    """Drafts share the noise of their position; coins and residuals are independent of it."""

    def redraft(self, now, proposal, past, kept, logp):
        return now.categorical(logp, "token", past, shared=True)


@register("coupling", "gumbel")
class Gumbel(Coupling):
    """Commits through the first position whose token changed: that token is itself right, all below it being so."""

    exactness = "sample"

    def step(self, now, proposal, drafted, logp):
        ids = now.categorical(logp, "token", now.valid, shared=True)
        same = (ids[:, : proposal.tokens.shape[1]] == proposal.tokens) & drafted
        return leading(same), ids
