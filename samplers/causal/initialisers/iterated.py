"""Drafts by iteration: a cheap distribution q continues the iterate and corrects it.

    enters    x_n = argmax log q(. | x_<n) + G_n
    carried   x_n = argmax log p(. | x'_<n) + log q(. | x_<n) - log q(. | x'_<n) + G_n

x are the drafts of this round and x' those of the round before, p is what the target said of the
latter, q the distribution of a draft model or of a table and G_n the noise of the position, which
the target uses as well. The second line (``redraft``) moves the target's distribution along with
the tokens that changed below, by as much as q moves. Where q does not care, the draft is the plain
Jacobi iterate. The target said p of x'_<n, so that it says little where many of those were wrong:
``redraft: replace`` drafts carried positions by the first line as well.

All positions are drafted at once and q is asked again with what came out, a Jacobi iteration of its
own: after k passes the first k positions are final, and most others too. It ends where nothing
changes any more, or after some passes.

Guarantee: that of the coupling. A draft depends on the noise of its own position through G_n alone,
and on that of lower positions: so x_n is distributed as what stands before G_n above, given
everything that fixes it. When the iteration ends says nothing else: at its fixed point further
passes change nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gen.core.sampling_params import SamplingParams, has_no_distribution
from gen.core.token_space import TokenSpace
from gen.samplers.causal.couplings import without_ends
from gen.samplers.causal.initialisers.base import Entering, Filled, Initialiser
from gen.samplers.engine.draft import Verdict
from gen.samplers.engine.failed import failed_draws
from gen.samplers.engine.host import to_device
from gen.samplers.engine.rows import RowState, RowStore
from gen.samplers.engine.step_context import CausalStep

# log-probability that a token has at least when distributions are compared
FLOOR = -30.0


class IteratedInitialiser(Initialiser):
    """Base of initialisers that ask a distribution q of all positions again and again.

    Args:
        space: token space of the target.
        guess: initialiser that the iteration begins with.
        rounds: passes per round of the sampler at most; None for as many as change a draft.
        redrafts: whether drafts that are carried on are corrected.
        filters: filters of the target, which q lacks; None where q has them or there are none.
        corrects: whether they are corrected from what the target said; False drafts them from q.
    """

    # log q of the last pass of the round before [b, n, V], from position ``at`` on
    before = RowState()
    at = RowState(start=0)

    def __init__(
        self,
        space: TokenSpace,
        guess: Initialiser,
        rounds: int | None,
        redrafts: bool,
        filters: SamplingParams | None = None,
        corrects: bool = True,
    ):
        self.space, self.guess, self.rounds, self.redrafts = space, guess, rounds, redrafts
        self.filters, self.corrects = filters, redrafts and corrects

    @property
    def stores(self) -> tuple[RowStore, ...]:
        return (self.store, *self.guess.stores)

    def predict(self, entering: Entering, canvas: Tensor, is_first: bool) -> Tensor:
        """Compute log q of the columns, [b, n, V].

        Args:
            entering: positions to draft.
            canvas: committed tokens and drafts, [b, T + 1].
            is_first: whether it is the first pass of the round.
        """
        raise NotImplementedError

    def count(self, entering: Entering, passes: np.ndarray) -> None:
        """Learn how many passes each row took, int64 [b]."""

    def accept(self, step: CausalStep, verdict: Verdict) -> None:
        self.guess.accept(step, verdict)

    def fill(self, entering: Entering) -> Filled:
        step, b, n = entering.step, *entering.active.shape
        canvas = torch.nn.functional.pad(entering.canvas(), (0, 1))
        columns = entering.first + np.arange(n)
        enters = entering.active & to_device(columns >= entering.begins[:, None], canvas.device)
        drawn = entering.active if self.redrafts else enters
        # columns that do not exist are written behind all positions
        positions = step.positions[:, entering.first : entering.first + n]
        slots = torch.where(entering.active, positions, canvas.shape[1] - 1)
        guess = self.guess.fill(replace(entering, active=enters, compares=False)).tokens
        tokens = torch.where(enters, guess, canvas.gather(1, slots))
        canvas.scatter_(1, slots, tokens)
        shift = self._shift(entering, enters)
        running = entering.ends > (0 if self.redrafts else entering.begins)
        inner = to_device(columns < entering.ends[:, None] - 1, canvas.device)
        passes = np.zeros(b, dtype=np.int64)
        logq = q = entering.legal  # until the first pass
        while running.any() and (self.rounds is None or passes.max() < self.rounds):
            q = self.predict(entering, canvas, not passes.any())
            q = without_ends(q, self.space.ends)
            passes += running
            logq = q if self.filters is None else self.filters(q, None, None)
            logq = logq if shift is None else _shifted(q, shift, logq)
            new = step.categorical(logq, "token", drawn, entering.first, shared=True)
            new = torch.where(drawn, new, tokens)
            changed, tokens = new != tokens, new
            canvas.scatter_(1, slots, tokens)
            if self.rounds is None or passes.max() < self.rounds:
                running &= (changed & inner).any(1).cpu().numpy()
        self.count(entering, passes)
        if self.corrects:
            self.before, self.at = q.clamp_min(FLOOR), step.starts.copy()
        failed = drawn & failed_draws(tokens, q)
        return Filled(tokens, logq if entering.compares else None, failed, guessed=False)

    def _shift(self, entering: Entering, enters: Tensor) -> Tensor | None:
        """Compute log p - log q of the round before, [b, n, V]: 0 where a position enters; None
        where nothing is corrected."""
        logp, before, n = entering.logp, self.before, entering.active.shape[1]
        if not self.corrects or before is None or logp is None:
            return None
        source = np.arange(n) + (entering.step.starts - self.at)[:, None]
        beyond = to_device(source >= before.shape[1], before.device)  # had no draft
        source = to_device(np.minimum(source, before.shape[1] - 1), before.device)
        old = before.gather(1, source[..., None].expand(-1, -1, before.shape[-1]))
        without = enters | beyond | has_no_distribution(logp)
        return torch.where(without[..., None], torch.nan, logp.to(old.dtype) - old)


def _shifted(q: Tensor, shift: Tensor, plain: Tensor) -> Tensor:
    """log q [b, n, V] moved by ``shift``, normalised; ``plain`` where that is NaN."""
    moved = (q.clamp_min(FLOOR) + shift).log_softmax(-1)
    return torch.where(shift.isnan(), plain, moved)
