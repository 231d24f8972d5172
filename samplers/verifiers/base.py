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
(arXiv 2403.10444). Verifiers of trees are in ``gen.samplers.verifiers.trees``.

Guarantee: if every x_i ~ q_i given the tokens before it, what is committed is distributed as p.
``block`` accepts at least as many drafts on average as any other rule that looks at one chain, so
at least as many as ``token``. It holds too where the chain ended because of the drafts in it
(``length_policies``): each i above is a node of a tree of unequal depths.

A residual is never warped again, and where it is empty (p = q up to rounding) it falls back to p.
It is a difference of probabilities: a draft of a chain comes from its whole q, so that what these
cannot hold is as rare as that. What earlier siblings left of q is not (``trees``).

Behind a draft that the target cannot say there need not be a distribution: the tokens before that
position have no mass, and all log-probabilities there may be NaN. No draft is accepted there, and
such a p says nothing about the drafts before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.registry import register
from gen.samplers.engine.draft import JUDGED, Draft, Verdict, columns_of
from gen.samplers.engine.host import may_be_any

if TYPE_CHECKING:
    from gen.models.targets.causal import CausalTarget
    from gen.samplers.engine.step_context import StepContext

# the column of the forward pass behind which the next token is drawn, long [b], 0 for the root; and
# a function that makes the log-probabilities [b, V] of it where a draft was rejected
Decision = tuple[Tensor, Callable[[], Tensor]]


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


def draft_logp(draft: Draft, logp: Tensor) -> Tensor:
    """Look up the log-probability of the drafts of a chain, [b, L]; ``logp`` [b, L, V]."""
    return logp.gather(-1, draft.tokens[..., None])[..., 0]


def recovered(step: StepContext, column: Tensor, rejected: Tensor, logprobs: Tensor) -> Tensor:
    """Draw the recovered tokens [b, 1] from residuals [b, V], which stand at a column of the pass,
    long [b], of the rows that are ``rejected``, bool [b]; the others draw for nothing."""
    return step.categorical(logprobs[:, None], "residual", rejected[:, None], column)


class Verifier:
    """Rule that accepts a path of drafts from the root on and draws the token after it.

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
    draws: ClassVar[tuple[str, ...]] = JUDGED
    needs_greedy: ClassVar[bool] = False
    needs_weights: ClassVar[bool] = False
    hidden_layers: tuple[str, ...] = ()

    def attach(self, target: CausalTarget, weights: str | None = None) -> Verifier:
        """Make the verifier for a model. ``weights``: folder or name of trained weights, where it
        reads some; None for those that are embedded for the model. Raises ``GenError``: the model
        or its tokens lack what it needs, or the weights are not its."""
        return self

    def decide(self, step: StepContext, draft: Draft, logp: Tensor) -> Decision:
        """Decide which drafts are accepted; arguments as in ``verify``."""
        raise NotImplementedError

    def verify(self, step: StepContext, draft: Draft, logp: Tensor) -> Verdict:
        """Accept a path of drafts and draw the token after it.

        A bonus token, where no draft was rejected, has the noise of its position, which was not
        used yet: a row without drafts draws the same in a batch whose other rows have some.

        Args:
            step: context of the step, whose positions are those of the root and the drafts.
            draft: L drafts: a chain, or a tree if the rule ``judges_trees``.
            logp: log-probabilities [b, W, V] of the target after the root and each draft, W > L;
                of a chain W may be L, where no row has its last draft accepted.

        Returns:
            The accepted drafts; tokens [b, W] are right up to the token after them.
        """
        last, residual = self.decide(step, draft, logp)
        count, path, ids = last, None, draft.tokens
        if draft.is_chain:
            rejected = last < draft.exists.sum(1)
        else:
            count, path = draft.depth_of(last - 1), draft.path(last - 1)
            ids = ids.gather(1, path)
            rejected = (draft.exists & (draft.parents == last[:, None] - 1)).any(1)
        free = ~rejected & (count < step.valid.sum(1))
        width, at = logp.shape[1], last.clamp_max(logp.shape[1] - 1)
        ids = torch.cat([ids, ids.new_zeros(len(ids), width - ids.shape[1])], 1)
        end = count.clamp_max(width - 1)[:, None]
        after = ids.gather(1, end)
        if may_be_any(rejected):
            new = recovered(step, at, rejected, residual())
            after = torch.where(rejected[:, None], new, after)
        if may_be_any(free):
            bonus = step.categorical(columns_of(logp, at), "token", free[:, None], at, shared=True)
            after = torch.where(free[:, None], bonus, after)
        return Verdict(count, ids.scatter(1, end, after), path)


@register("verifier", "token")
class Token(Verifier):
    """min(1, p(x) / q(x)), draft by draft."""

    def credit(self, draft: Draft, logp: Tensor) -> Tensor:
        """Compute log g(x) of the drafts, [b, L], for an acceptance of min(1, g(x) / q(x)): log p,
        which verifiers may raise; ``logp`` [b, L, V]."""
        return draft_logp(draft, logp)

    def chance(self, draft: Draft, logp: Tensor) -> Tensor:
        """Compute the probability f(x) to accept each draft, [b, L], which is 0 where there is no
        distribution; ``logp`` [b, L, V]."""
        return (self.credit(draft, logp) - draft.log_mass()).clamp_max(0).exp().nan_to_num(0.0)

    def residual(self, logq: Tensor, logp: Tensor) -> Tensor:
        """Compute log norm((p - q)+) of log-probabilities, [b, n, V]; it is asked of the few drafts
        that need it.

        It is norm((p - q f)+), the best residual of any acceptance function f, for every f >=
        min(1, p/q): where q < p such an f is 1, and elsewhere q f >= p.
        """
        return normalised(logp.exp().sub_(logq.exp()).clamp_min_(0), logp)

    def residual_at(self, draft: Draft, logp: Tensor, column: Tensor) -> Tensor:
        """Compute the residual of one draft of each row, in ``column`` [b]: [b, V]; ``logp`` [b, W,
        V], W >= L."""
        logp = columns_of(logp, column)
        return self.residual(draft.drawn_from(column, logp), logp)[:, 0]

    def decide(self, step, draft, logp):
        length = draft.tokens.shape[1]
        chance = self.chance(draft, logp[:, :length])
        count = num_accepted(step.flip(chance, "accept", draft.exists) & draft.exists)
        return count, lambda: self.residual_at(draft, logp, count.clamp_max(length - 1))


@register("verifier", "block")
class Block(Verifier):
    """All drafts of a chain together."""

    def decide(self, step, draft, logp):
        drafted, length = draft.exists, draft.tokens.shape[1]
        logp = logp[:, :length]
        log_p = draft_logp(draft, logp).nan_to_num(-torch.inf, neginf=-torch.inf)
        # P is a walk that is held below 1: log P_i = sum_i - max(0, sum_1, ..., sum_i)
        walk = torch.where(drafted, log_p - draft.log_mass(), 0).cumsum(1)
        joint = F.pad((walk - walk.cummax(1).values.clamp_min(0)).exp(), (1, 0), value=1.0)
        q = draft.drawn_from(slice(None), logp).exp().masked_fill_(~drafted[..., None], 0)
        # what a rejection after i drafts leaves: [b, L, V], i < L
        rest = self.rest(joint[:, :-1, None], logp.exp(), q)
        more = rest[:, 1:].sum(-1)  # S_1 ... S_L-1
        down = more + 1 - joint[:, 1:-1]
        inner = torch.where(down > 0, more / down, 1.0)
        chance = joint[:, 1:].clone()  # the last draft's, P_n
        chance[:, :-1] = torch.where(drafted[:, 1:], inner, chance[:, :-1])
        coins = step.flip(chance, "accept", drafted) & drafted
        numbers = F.pad(coins * torch.arange(1, length + 1, device=logp.device), (1, 0))
        count = numbers.amax(1)

        def residual() -> Tensor:
            column = count.clamp_max(length - 1)
            return normalised(*(columns_of(x, column)[:, 0] for x in (rest, logp)))

        return count, residual

    def rest(self, joint: Tensor, p: Tensor, q: Tensor) -> Tensor:
        """Compute (P p - q)+, which is 0 where P is: there need not be a p."""
        return torch.where(joint > 0, joint * p - q, 0).clamp_min_(0)


TOKEN = Token()
