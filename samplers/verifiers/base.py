"""Verifiers: which drafts are accepted, and which token follows them.

With p_i the distribution at draft i and q_i the distribution it was drawn from, both final (guided,
filtered):

    token   accept x_i with probability min(1, p_i(x_i) / q_i(x_i)); at the first rejection draw
            from norm((p_i - q_i)+)
    block   P_0 = 1, P_i = min(1, P_i-1 p_i(x_i) / q_i(x_i)); S_i = sum (P_i p_i+1 - q_i+1)+; h_i =
            S_i / (S_i + 1 - P_i) before the last draft, h_n = P_n at it. Accept up to the last i
            whose own coin, of probability h_i, says yes; then draw from norm((P_i p_i+1 - q_i+1)+)

After the last draft the next token is drawn from p itself. Leviathan et al. (arXiv 2211.17192) and
Chen et al. (arXiv 2302.01318); Sun et al., "Block Verification Accelerates Speculative Decoding"
(arXiv 2403.10444).

Guarantee: if every x_i ~ q_i given the tokens before it, what is committed is distributed as p.
``block`` accepts at least as many drafts on average as any other rule that looks at one chain, so
at least as many as ``token``. It holds too where the chain ended because of the drafts in it
(``length_policies``): each i above is a node of a tree of unequal depths.

A residual is never warped again, and where it is empty (p = q up to rounding) it falls back to p.

Behind a draft that the target cannot say there need not be a distribution: the tokens before that
position have no mass, and all log-probabilities there may be NaN. No draft is accepted there, and
such a p says nothing about the drafts before it.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.models.targets.causal import CausalTarget
from gen.samplers.engine.draft import (
    RANKS,
    TOP_AND_RANDOM,
    WITH_REPLACEMENT,
    WITHOUT_REPLACEMENT,
    Draft,
    Verdict,
    columns_of,
)
from gen.samplers.engine.host import may_be_any
from gen.samplers.engine.step_context import StepContext


def num_accepted(kept: Tensor) -> Tensor:
    """Count the columns that are true before the first false one: bool [b, L] -> long [b]."""
    if kept.is_cpu:
        return torch.from_numpy(np.logical_and.accumulate(kept.numpy(), 1).sum(1))
    return kept.long().cumprod(1).sum(1)


def normalised(rest: Tensor, logp: Tensor) -> Tensor:
    """Normalise a residual [..., V], which is written over, and take its log; where it is empty,
    return ``logp`` [..., V]."""
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest.div_(total).log_(), logp)


def recovered(step: StepContext, column: Tensor, rejected: Tensor, logprobs: Tensor) -> Tensor:
    """Draw the recovered tokens [b, 1] of rejected drafts.

    Args:
        step: context of the step.
        column: column of the rejected draft, long [b].
        rejected: rows that have one, bool [b]; the others draw for nothing.
        logprobs: log of the residual [b, V].
    """
    return step.categorical(logprobs[:, None], "residual", rejected[:, None], column)


class Verifier:
    """Rule that accepts the beginning of a path of drafts and draws the token after it.

    Attributes:
        guarantee: what the rule does to the distribution.
        relaxed: whether it trades the distribution for acceptance; it then has ``relaxation``.
        judges_trees: whether it judges trees as well as chains.
        draws: ways to draw the drafts that the rule is right for (``gen.samplers.engine.draft``):
            all of them, but for drafts whose noise the target's own tokens share.
        needs_greedy: whether it requires temperature 0.
        needs_weights: whether it reads trained weights (``attach``).
        hidden_layers: layers of the target whose hidden states it reads
            (``StepContext.hidden_states``).
    """

    guarantee = "same_distribution"
    relaxed: ClassVar[bool] = False
    judges_trees: ClassVar[bool] = False
    draws: ClassVar[tuple[str, ...]] = (
        RANKS,
        WITH_REPLACEMENT,
        WITHOUT_REPLACEMENT,
        TOP_AND_RANDOM,
    )
    needs_greedy: ClassVar[bool] = False
    needs_weights: ClassVar[bool] = False

    @property
    def hidden_layers(self) -> tuple[str, ...]:
        return ()

    def on(self, space: TokenSpace, device: torch.device | str = "cpu") -> Verifier:
        """Make the verifier for these tokens.

        Raises:
            GenError: the tokens lack what it needs.
        """
        return self

    def attach(self, target: CausalTarget, weights: str | None = None) -> Verifier:
        """Make the verifier for a model.

        Args:
            target: the model with its tokens.
            weights: folder or name of trained weights, where it reads some; None means those that
                are embedded for the model.

        Raises:
            GenError: the model or its tokens lack what it needs, or the weights are not its.
        """
        return self.on(target.space, target.device)

    def verify(self, step: StepContext, tree: Draft, logp: Tensor) -> Verdict:
        """Accept a path of drafts and draw the token after it.

        Args:
            step: context of the step, whose positions are those of the root and the drafts.
            tree: L drafts: a chain, or a tree if the rule ``judges_trees``.
            logp: log-probabilities [b, W, V] of the target after the root and each draft, W > L;
                of a chain W may be L, where no row has its last draft accepted.

        Returns:
            The accepted drafts; tokens [b, W] are right up to the token after them.
        """
        accepted, residual = self.decide(step, tree, logp)
        length, width, column = tree.tokens.shape[1], logp.shape[1], accepted[:, None]
        drafts = tree.exists.sum(1)
        rejected, free = accepted < drafts, accepted == drafts
        free &= accepted < step.valid.sum(1)
        ids = F.pad(tree.tokens, (0, width - length))
        last = ids[:, :1]  # the token after the accepted drafts
        if may_be_any(rejected):
            at = accepted.clamp_max(length - 1)
            last = recovered(step, at, rejected, residual(at))
        if may_be_any(free):
            # all drafts accepted: the bonus token, whose position has noise that was not used yet
            at = accepted.clamp_max(width - 1)
            bonus = step.categorical(columns_of(logp, at), "token", free[:, None], at, shared=True)
            last = torch.where(free[:, None], bonus, last)
        is_last = torch.arange(width, device=logp.device) == column
        return Verdict(accepted, torch.where(is_last, last, ids))

    def decide(self, step: StepContext, tree: Draft, logp: Tensor):
        """Decide which drafts of a chain are accepted; arguments as in ``verify``.

        Returns:
            Accepted drafts [b], and a function from the columns of rejected ones, long [b], to the
            log of their residual [b, V].
        """
        raise NotImplementedError


class PositionVerifier(Verifier):
    """Verifier that judges every draft by itself; the first rejection ends the chain."""

    def acceptance(self, tree: Draft, logp: Tensor) -> Tensor:
        """Compute the probability f(x) to accept each draft, [b, L]; ``logp`` [b, L, V]."""
        raise NotImplementedError

    def chance(self, tree: Draft, logp: Tensor) -> Tensor:
        """Compute ``acceptance``, and 0 where there is no distribution."""
        return self.acceptance(tree, logp).nan_to_num(0.0)

    def residual(self, logq: Tensor, logp: Tensor) -> Tensor:
        """Compute log norm((p - q)+) of log-probabilities, [b, n, V]; it is asked of the few drafts
        that need it.

        It is norm((p - q f)+), the best residual of any acceptance function f, for every f >=
        min(1, p/q): where q < p such an f is 1, and elsewhere q f >= p.
        """
        return normalised(logp.exp().sub_(logq.exp()).clamp_min_(0), logp)

    def residual_at(self, tree: Draft, logp: Tensor, column: Tensor) -> Tensor:
        """Compute the residual of one draft of each row, in ``column`` [b]: [b, V]; ``logp`` [b, W,
        V], W >= L."""
        logp = columns_of(logp, column)
        return self.residual(tree.drawn_from(column, logp), logp)[:, 0]

    def decide(self, step, tree, logp):
        chance = self.chance(tree, logp[:, : tree.tokens.shape[1]])
        kept = step.flip(chance, "accept", tree.exists) & tree.exists
        return num_accepted(kept), lambda column: self.residual_at(tree, logp, column)


@register("verifier", "token")
class Token(PositionVerifier):
    """min(1, p(x) / q(x)), draft by draft."""

    def acceptance(self, tree, logp):
        log_p = logp.gather(-1, tree.tokens[..., None])[..., 0]
        return (log_p - tree.log_mass()).clamp_max(0).exp()


@register("verifier", "block")
class Block(Verifier):
    """All drafts of a chain together."""

    def decide(self, step, tree, logp):
        drafted, (b, length) = tree.exists, tree.tokens.shape
        logp = logp[:, :length]
        log_p = logp.gather(-1, tree.tokens[..., None])[..., 0]
        log_p = log_p.nan_to_num(-torch.inf, neginf=-torch.inf)
        # P is a walk that is held below 1: log P_i = sum_i - max(0, sum_1, ..., sum_i)
        walk = torch.where(drafted, log_p - tree.log_mass(), 0).cumsum(1)
        joint = torch.ones(b, length + 1, dtype=logp.dtype, device=logp.device)  # P_0 ... P_L
        if length:
            joint[:, 1:] = (walk - walk.cummax(1).values.clamp_min(0)).exp()
        q = tree.drawn_from(slice(None), logp).exp().masked_fill_(~drafted[..., None], 0)
        rest = self.rest(
            joint[:, :-1, None], logp.exp(), q
        )  # what a rejection after i drafts leaves: [b, L, V], i < L
        more = rest[:, 1:].sum(-1)  # S_1 ... S_L-1
        down = more + 1 - joint[:, 1:-1]
        inner = torch.where(down > 0, more / down, 1.0)
        chance = joint[:, 1:].clone()  # the last draft's, P_n
        chance[:, :-1] = torch.where(drafted[:, 1:], inner, chance[:, :-1])
        coins = step.flip(chance, "accept", drafted) & drafted
        accepted = (
            (coins * torch.arange(1, length + 1, device=logp.device)).amax(1)
            if length
            else drafted.sum(1)
        )
        return accepted, lambda column: normalised(
            *(columns_of(x, column)[:, 0] for x in (rest, logp))
        )

    def rest(self, joint: Tensor, p: Tensor, q: Tensor) -> Tensor:
        """Compute (P p - q)+, which is 0 where P is: there need not be a p."""
        return torch.where(joint > 0, joint * p - q, 0).clamp_min_(0)


TOKEN = Token()
