"""Verifiers of trees: which path of a tree of drafts is accepted, and which token follows it.

The target's distributions p and the drafts' q are final ones (guided, filtered). q of a draft is
what it was drawn from given its earlier siblings, and 1 at a draft that was not drawn at random. At
a node with distribution p:

    recursive  for its children x in the order in which they were drawn: accept x with probability
               min(1, p(x) / q(x)) and go on at x, else p <- norm((p - q)+). If no child is left the
               next token is drawn from what p is then
    traversal  P of the root is 1. On the way down to a child c of u, P_c = min(1, P_u p_u(c) /
               q_c(c)). In the order of a depth-first walk:

                   at a leaf c    accept its whole path with probability P_c; the next token is
                                  drawn from p_c
                   else delete c; S = sum over v of (P_u p_u(v) - q_c(v))+ at its parent u, then
                                  p_u <- norm((P_u p_u - q_c)+),  P_u <- S / (S + 1 - P_u)

               A node whose children are all deleted is a leaf
    k_seq      for k children, all drawn independently from one q: accept x with probability
               min(1, p(x) / (rho q(x))), one after the other, else draw from
               norm(p - min(q, p / rho) (1 - (1 - beta)^k) / beta), where

                   beta(rho) = sum over v of min(q(v), p(v) / rho)
                   rho       = the smallest in [1, k] with 1 - (1 - beta)^k <= rho beta

    follow     y = argmax over v of log p(v) + G(v), G the noise of the position: accept a child
               that is y, else y is the next token. greedy is the same at temperature 0

recursive: with replacement Miao et al., "SpecInfer" (arXiv 2305.09781); without Jeon et al.,
"Recursive Speculative Decoding" (arXiv 2402.14160), Chen et al., "Sequoia" (arXiv 2402.12374); with
the most probable tokens and one random one, judged first, Hu et al., "Towards Optimal Multi-draft
Speculative Decoding" (arXiv 2502.18779). traversal: Weng et al., "Traversal Verification for
Speculative Tree Decoding" (arXiv 2505.12398). k_seq: Sun et al., "SpecTr: Fast Speculative Decoding
via Optimal Transport" (arXiv 2310.15141). follow: drafts that were drawn with the same noise,
``position_noise``, agree with y with probability at least (1 - TV) / (1 + TV) for one draft, TV the
total variation between p and q (Daliri et al., "Coupling without Communication and
Drafter-Invariant Speculative Decoding", arXiv 2408.07978).

Guarantee: with ``recursive`` and ``traversal`` what is committed is distributed as p, however the
children were drawn; with ``k_seq`` if the paths were drawn independently of each other. ``follow``
gives the tokens of plain autoregression with the same seed, whatever the drafts, since its noise is
that of the position. On a chain ``recursive`` is the verifier ``token``, and ``traversal`` is
``block``. ``traversal`` accepts at least as many drafts on average as ``recursive``, and ``k_seq``
at least 1 - 1/e times as often as the best rule.

A verifier reads one target distribution per node: paths through the same node share it, and of
equal siblings the first one has all children (``Draft.merged``). A draft that the target cannot say
is rejected; behind it there need not be a distribution. p and q are judged as logarithms: what
earlier siblings left of a sharp q is more than probabilities can hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.method import Limit, method
from gen.core.registry import register
from gen.samplers.engine.draft import (
    DRAWS,
    WITH_REPLACEMENT,
    WITHOUT_REPLACEMENT,
    Draft,
    Verdict,
    node_positions,
)
from gen.samplers.engine.host import may_be_any
from gen.samplers.engine.step_context import StepContext
from gen.samplers.verifiers.base import Verifier

BISECTIONS = 60


def coins(step: StepContext, draft: Draft, column: Tensor, p: Tensor, active: Tensor) -> Tensor:
    """Flip the coin, of probability p [b], of one draft of each row, ``column`` [b], in rows that
    are ``active``, bool [b]: bool [b]."""
    column = column[:, None]
    key = node_positions(step, draft.depth.gather(1, column), column)
    flipped = step.rng.flip(p[:, None], step.rows, key, "accept", step.round, active[:, None])
    return flipped[:, 0] & active


def node(x: Tensor, column: Tensor) -> Tensor:
    """Take x [b, L + 1, ...] at a draft of each row, or the root: column -1."""
    return x[torch.arange(len(x), device=x.device), column + 1]


def log_excess(logp: Tensor, logq: Tensor) -> Tensor:
    """Compute log (p - q)+ of logarithms [b, V]; -inf where there is no p."""
    less = logq - logp
    # of NaN, which both at -inf give, the comparison is false
    return torch.where(less < 0, logp + (-torch.expm1(less)).log(), -torch.inf)


def log_residual(logp: Tensor, logq: Tensor) -> Tensor:
    """Compute log norm((p - q)+) of log-probabilities [b, V]; where it is empty, ``logp``."""
    rest = log_excess(logp, logq)
    total = rest.logsumexp(-1, keepdim=True)
    return torch.where(total > -torch.inf, rest - total, logp)


@register("verifier", "recursive")
class Recursive(Verifier):
    """Child after child, each against the residual of those before it."""

    judges_trees = True

    def decide(self, step, draft, logp):
        at, p = torch.full_like(step.start, -1), logp[:, 0]  # log p, as all below
        for column in range(draft.tokens.shape[1]):
            turn = draft.exists[:, column] & (draft.parents[:, column] == at)
            if not may_be_any(turn):
                continue
            here, ids = torch.full_like(at, column), draft.tokens[:, column, None]
            q = draft.drawn_from(slice(column, column + 1), p[:, None])[:, 0]
            chance = (p - q).gather(1, ids)[:, 0].clamp_max(0).exp().nan_to_num(0.0)
            kept = coins(step, draft, here, chance, turn)
            p = torch.where((turn & ~kept)[:, None], log_residual(p, q), p)
            p = torch.where(kept[:, None], node(logp, here), p)
            at = torch.where(kept, here, at)
        return at + 1, lambda: p


@method(
    "traversal",
    sampler="speculative",
    about="traversal verification: paths are judged from the leaves of the tree to its root",
    paper="2505.12398",
    title="Traversal Verification for Speculative Tree Decoding",
    params={
        "shape": "branching",
        "draws": WITHOUT_REPLACEMENT,
        "verifier": "traversal",
        "branching": "2-2-2",
    },
    limit=Limit("rsd_c", {"branching": "1"}, {"branching": "1"}),
    example={"branching": "2-2-1"},
)
@register("verifier", "traversal")
class Traversal(Verifier):
    """All drafts of a path together, from the leaves to the root."""

    judges_trees = True

    def decide(self, step, draft, logp):
        row = torch.arange(len(logp), device=logp.device)
        joint, p = torch.zeros_like(logp[..., 0]), logp.clone()  # log P and log p of the nodes
        at = end = torch.full_like(step.start, -1)
        found, visited = torch.zeros_like(at, dtype=torch.bool), torch.zeros_like(draft.exists)
        for _ in range(2 * draft.tokens.shape[1]):  # a draft is entered once and left once
            children = draft.exists & (draft.parents == at[:, None]) & ~visited
            entering = children.any(1) & ~found
            leaving = ~entering & ~found & (at >= 0)
            if not may_be_any(entering | leaving):
                break
            column = torch.where(entering, children.byte().argmax(1), at).clamp_min(0)
            visited[row, column] |= entering
            u = draft.parents[row, column]
            q, p_u, joint_u = (
                draft.drawn_from(column, logp[:, :1])[:, 0],
                node(p, u),
                node(joint, u),
            )
            ratio = (p_u - q).gather(1, draft.tokens[row, column, None])[:, 0]
            down = (joint_u + ratio).clamp_max(0).nan_to_num(-torch.inf, neginf=-torch.inf)
            here = torch.where(entering, down, node(joint, column))
            joint[row, column + 1] = here
            kept = coins(step, draft, column, here.exp(), leaving)
            end, found, lost = torch.where(kept, column, end), found | kept, leaving & ~kept
            rest = log_excess(joint_u[:, None] + p_u, q)
            total = rest.logsumexp(1)
            less = torch.where(total[:, None] > -torch.inf, rest - total[:, None], p_u)
            p[row, u + 1] = torch.where(lost[:, None], less, p_u)
            whole = torch.logaddexp(total, (-torch.expm1(joint_u)).log())  # log(S + 1 - P)
            share = torch.where(whole > -torch.inf, total - whole, 0.0)
            joint[row, u + 1] = torch.where(lost, share, joint_u)
            at = torch.where(entering, column, torch.where(lost, u, at))
        return end + 1, lambda: node(p, end)


@register("verifier", "k_seq")
class KSeq(Verifier):
    """The rule of SpecTr for paths that were drawn independently of each other."""

    judges_trees = True
    draws = (WITH_REPLACEMENT,)

    def decide(self, step, draft, logp):
        at = torch.full_like(step.start, -1)

        def enter():
            """Read the distributions at the rows' nodes, and the rule for their drafts."""
            drafts = draft.exists & (draft.parents == at[:, None])
            p, k = node(logp, at), drafts.sum(1, keepdim=True)
            q = draft.drawn_from(drafts.byte().argmax(1), p[:, None])[:, 0].exp()
            return p.exp(), q, k, smallest_factor(p.exp(), q, k)

        p, q, k, rho = enter()
        for column in range(draft.tokens.shape[1]):
            turn = draft.exists[:, column] & (draft.parents[:, column] == at)
            if not may_be_any(turn):
                continue
            here, ids = torch.full_like(at, column), draft.tokens[:, column, None]
            chance = (p.gather(1, ids) / (rho * q.gather(1, ids)))[:, 0]
            kept = coins(step, draft, here, chance.clamp_max(1).nan_to_num(0.0), turn)
            # a sibling may be accepted whose equal was not: the first of them has the children
            equal = draft.exists & (draft.parents == at[:, None]) & (draft.tokens == ids)
            at = torch.where(kept, equal.byte().argmax(1), at)
            if may_be_any(kept):
                p, q, k, rho = enter()

        def residual() -> Tensor:
            common = torch.minimum(q, p / rho)
            beta = common.sum(1, keepdim=True)
            share = torch.where(beta > 0, (1 - (1 - beta) ** k) / beta, 0)
            rest = (p - common * share).clamp_min_(0)
            total = rest.sum(1, keepdim=True)
            return torch.where(total > 0, rest / total, p).log()

        return at + 1, residual


def smallest_factor(p: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Find the rho of ``k_seq``, [b, 1], for p and q [b, V] and k drafts, long [b, 1]."""
    most = k.clamp_min(1).to(p.dtype)
    low, high = torch.ones_like(most), most.clone()
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        beta = torch.minimum(q, p / middle).sum(1, keepdim=True)
        enough = 1 - (1 - beta) ** most <= middle * beta
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high


@register("verifier", "follow")
class Follow(Verifier):
    """The target's token at every node of the path, with the noise of the position."""

    judges_trees = True
    guarantee = "same_tokens"
    draws = DRAWS

    def verify(self, step, draft, logp):
        at = torch.full_like(step.start, -1)
        count, alive = torch.zeros_like(at), torch.ones_like(at, dtype=torch.bool)
        tokens = torch.zeros(logp.shape[:2], dtype=torch.long, device=logp.device)
        for depth in range(logp.shape[1]):
            here, p = (step.start + depth)[:, None], node(logp, at)[:, None]
            drawn = step.rng.categorical(p, step.rows, here, "token", None, alive[:, None])
            tokens[:, depth] = torch.where(alive, drawn[:, 0], 0)
            child = draft.exists & (draft.parents == at[:, None]) & (draft.tokens == drawn)
            alive = alive & child.any(1)
            if not may_be_any(alive):
                break
            at = torch.where(alive, child.byte().argmax(1), at)
            count = count + alive
        return Verdict(count, tokens, None if draft.is_chain else draft.path(at))


@register("verifier", "greedy")
class Greedy(Follow):
    """The argmax token at every node of the path; it requires temperature 0."""

    needs_greedy = True
