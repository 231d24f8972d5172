"""Follow the target: draw the target's own token at every node of the path, and go on where a child
is that token.

    y = argmax over v of log p(v) + G(v), G the noise of the position
    a child that is y is accepted; else y is the next token

With the noise of the position y is the token that plain autoregression with the same seed has
there, so drafts decide about the number of forward passes alone. No draft distribution is read.
Drafts that were drawn with the same noise, ``position_noise``, agree with y more often: with
probability at least (1 - TV) / (1 + TV) for one draft, TV the total variation between p and q
(Daliri et al., "Coupling without Communication and Drafter-Invariant Speculative Decoding", arXiv
2408.07978).

Guarantee: the tokens of plain autoregression with the same seed, whatever the drafts. Where nothing
about a draft is random, the acceptance rate is that of ``recursive``.
"""

from __future__ import annotations

import torch

from gen.core.registry import register
from gen.samplers.engine.draft import DRAWS, Verdict
from gen.samplers.engine.host import may_be_any
from gen.samplers.verifiers.tree import TreeVerifier, node


@register("verifier", "follow")
class Follow(TreeVerifier):
    """The target's token at every node of the path, with the noise of the position."""

    guarantee = "same_tokens"
    draws = DRAWS

    def verify(self, step, tree, logp):
        at = torch.full_like(step.start, -1)
        count, alive = torch.zeros_like(at), torch.ones_like(at, dtype=torch.bool)
        tokens = torch.zeros(logp.shape[:2], dtype=torch.long, device=logp.device)
        for depth in range(logp.shape[1]):
            here, p = (step.start + depth)[:, None], node(logp, at)[:, None]
            drawn = step.rng.categorical(p, step.rows, here, "token", None, alive[:, None])
            tokens[:, depth] = torch.where(alive, drawn[:, 0], 0)
            child = tree.exists & (tree.parents == at[:, None]) & (tree.tokens == drawn)
            alive = alive & child.any(1)
            if not may_be_any(alive):
                break
            at = torch.where(alive, child.byte().argmax(1), at)
            count = count + alive
        return Verdict(count, tokens, None if tree.is_chain else tree.path(at))


@register("verifier", "greedy")
class Greedy(Follow):
    """The argmax token at every node of the path; it requires temperature 0."""

    needs_greedy = True
