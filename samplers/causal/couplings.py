"""Couplings: one round of Jacobi. They verify the previous iterate and turn it into the next one.

Every position past the last committed one holds a draft x_j drawn from a distribution q_j (the
distribution at that position in the previous round, or the tail initialiser's). A round computes
the distributions p_j given the current drafts. Couplings differ in how the next draft, which must
be distributed as p_j, depends on the previous one:

    fresh          x_j' ~ p_j, drawn anew                                     SJD (arXiv 2410.01699)
    maximal        x_j' = x_j with probability min(1, p/q), else residual     SCD-MC; keeps as many
                   drafts as can be kept
    gumbel_shared  x_j' = argmax log p_j + G_j, G_j fixed per position        SCD-GS; verified with
                   independent coins
    gumbel         the same drafts; accepted as long as x_j' = x_j            Gumbel fixed point
                   (arXiv 2002.09928)

In all of them q_j := p_j for every draft that is carried on, kept or not: then x_j ~ q_j holds at
its verification, and the token verifier is exact. ``gumbel`` commits what sequential sampling with
the same noise gives, token for token.

Where rows may end, the next iterate is drawn from p_j given that it is not the end, and q_j is that
distribution (``without_ends``). A drafted end would say nothing: where it is right, its row is over
whether it was drafted or not; where it is wrong, what the model makes of the positions behind it is
worth nothing.

What is committed is up to a verifier that judges drafts one by one (``verifiers``), ``token``
unless another is given. The next iterate is not: past the first rejection the exact rule holds
whatever the verifier, so x_j ~ q_j stays true.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gen.core.distributions import LOGITS_CHUNK
from gen.core.registry import register
from gen.samplers.engine.draft import Draft, Verdict, resized
from gen.samplers.engine.host import may_be_any
from gen.samplers.verifiers.base import TOKEN, Token, num_accepted, recovered

if TYPE_CHECKING:
    from gen.samplers.engine.step_context import CausalStep


class Coupling:
    """Jacobi step: it verifies the previous iterate and draws the next one.

    Attributes:
        guarantee: what the coupling does to the distribution.
        compares: whether it looks at the distribution that a draft came from.
        keeps_noise: whether all drafts of a position have the same noise, that of the position.
    """

    guarantee = "same_distribution"
    compares = True
    keeps_noise = False

    def __init__(self, verifier: Token = TOKEN, keep_threshold: float = 1.0):
        self.verifier, self.keep_threshold = verifier, keep_threshold

    def step(self, step: CausalStep, draft: Draft, logp: Tensor, following: Tensor) -> Verdict:
        """Verify drafts and draw the next iterate.

        Args:
            step: context of the step.
            draft: the chain of L drafts.
            logp: log-probabilities [b, W, V] of the target, W >= L.
            following: those that the next iterate is drawn from, [b, W, V].

        Returns:
            Accepted drafts, and tokens [b, W]: the accepted drafts, the token after them, then the
            next iterate.
        """
        raise NotImplementedError


class _Verified(Coupling):
    """Coupling with a verifier up to the first rejection, and ``redraft`` after it."""

    def step(self, step, draft, logp, following):
        exists, length = draft.exists, draft.tokens.shape[1]
        p, free = logp[:, :length], logp[:, length:]
        chance = self.verifier.chance(draft, p)
        kept = step.flip(chance, "accept", exists) & exists
        accepted = num_accepted(kept)
        column, last = torch.arange(length, device=logp.device), accepted[:, None]
        # 1. Past the first rejection, the next iterate
        past = column > last
        new = self.redraft(step, draft, exists & past, kept, chance, following[:, :length])
        ids = torch.where(past, new, draft.tokens)
        # 2. At the first rejection the residual, never p itself
        rejected = exists & (column == last)
        if may_be_any(rejected):
            at = accepted.clamp_max(length - 1)
            residual = self.verifier.residual_at(draft, p, at)
            ids = torch.where(rejected, recovered(step, at, rejected.any(1), residual), ids)
        # 3. The position without a draft, if the window has one; its noise was not used before
        if following is not logp:
            all_kept = (accepted == length)[:, None, None]
            free = torch.where(all_kept, free, following[:, length:])
        undrafted = step.categorical(free, "token", step.valid[:, length:], length, shared=True)
        return Verdict(accepted, torch.cat([ids, undrafted], 1))

    def redraft(self, step, draft, past, kept, chance, following) -> Tensor:
        """Draw the next iterate [b, L] from ``following`` [b, L, V], where ``past`` (bool [b, L]):
        beyond the first rejection. ``kept``: what the coins of probability ``chance`` said."""
        raise NotImplementedError


@register("coupling", "fresh")
class Fresh(_Verified):
    """Coupling that draws everything past the first rejection anew; but for confident drafts, where
    the ``keep_threshold`` is below 1."""

    def redraft(self, step, draft, past, kept, chance, following):
        if self.keep_threshold >= 1:
            return step.categorical(following, "redraft", past)
        is_confident = TOKEN.chance(draft, following) > self.keep_threshold
        new = step.categorical(following, "redraft", past & ~is_confident)
        return torch.where(is_confident, draft.tokens, new)


@register("coupling", "maximal")
class Maximal(_Verified):
    """Coupling that uses the token verifier's coin and residual past the first rejection too."""

    def redraft(self, step, draft, past, kept, chance, following):
        kept = self._exact(step, draft, past, kept, chance, following)
        moved, new = past & ~kept, []
        # a few positions at a time: no further distribution is held
        many = max(1, LOGITS_CHUNK[following.is_cpu] // following[:, 0].numel())
        for first in range(0, following.shape[1], many):
            here = slice(first, first + many)
            p, turn = following[:, here], moved[:, here]
            if may_be_any(turn):
                rest = TOKEN.residual(draft.drawn_from(here, p), p)
                new.append(step.categorical(rest, "residual", turn, first))
            else:
                new.append(draft.tokens[:, here])
        return torch.where(kept, draft.tokens, torch.cat(new, 1))

    def _exact(self, step, draft, past, kept, chance, following):
        """Flip coins of the probability e that is exact for the next iterate, and that agree as
        often as can be with those of another, f, which another verifier or an end made differ: a
        yes stays with probability min(1, e / f), a no becomes one with (e - f)+ / (1 - f)."""
        exact = TOKEN.chance(draft, following)
        stay = torch.where(exact >= chance, 1.0, exact / chance)
        turn = torch.where(exact > chance, (exact - chance) / (1 - chance), 0.0)
        return step.flip(torch.where(kept, stay, turn), "keep", past) & past


@register("coupling", "gumbel_shared")
class GumbelShared(_Verified):
    """Coupling whose drafts share the noise of their position; coins and residuals do not."""

    keeps_noise = True

    def redraft(self, step, draft, past, kept, chance, following):
        return step.categorical(following, "token", past, shared=True)


@register("coupling", "gumbel")
class Gumbel(Coupling):
    """Commits through the first position whose token changed: that token is itself right, all below
    it being so."""

    guarantee = "same_tokens"
    compares = False
    keeps_noise = True

    def step(self, step, draft, logp, following):
        ids = step.categorical(logp, "token", step.valid, shared=True)
        accepted = num_accepted((ids[:, : draft.tokens.shape[1]] == draft.tokens) & draft.exists)
        if following is not logp:
            past = torch.arange(ids.shape[1], device=ids.device) > accepted[:, None]
            past = past & step.valid
            new = step.categorical(following, "token", past, shared=True)
            ids = torch.where(past, new, ids)
        return Verdict(accepted, ids)


def without_ends(logprobs: Tensor, ends: Sequence[int]) -> Tensor:
    """The distribution [..., V], log-probabilities or a bool for what is legal, given that it is
    no end; itself where there is nothing else."""
    if not ends:
        return logprobs
    rest, is_legal = logprobs.clone(), logprobs.dtype == torch.bool
    for end in ends:  # a few, and an index on the device would be copied there
        rest[..., end] = False if is_legal else -torch.inf
    if is_legal:
        return torch.where(rest.any(-1, keepdim=True), rest, logprobs)
    total = rest.logsumexp(-1, keepdim=True)
    nothing, rest = total.isneginf(), rest.sub_(total)
    return torch.where(nothing, logprobs, rest) if may_be_any(nothing) else rest


def risen(logp: Tensor, before: Tensor, is_known: Tensor, trend: float) -> Tensor:
    """Raise what rose since the target was last asked: log norm(p (p / before) ** trend) [b, W, V];
    p where it is not known what it said ``before`` [b, n, V]. Tokens without mass before or now
    keep what they have."""
    before, is_known = (resized(x, logp.shape[1]) for x in (before, is_known))
    rise = torch.where(logp.isfinite() & before.isfinite(), logp - before, 0.0)
    moved = (logp + trend * rise).log_softmax(-1)
    return torch.where(is_known[..., None], moved, logp)
