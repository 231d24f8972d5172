"""Drafts by a draft model, which continues the iterate and corrects it.

    enters    x_n = argmax log q(. | x_<n) + G_n
    carried   x_n = argmax log p(. | x'_<n) + log q(. | x_<n) - log q(. | x'_<n) + G_n

x are the drafts of this round and x' those of the round before, p is what the target said of the
latter, q the draft model's distribution and G_n the noise of the position, which the target uses as
well. The second line (``redraft``) moves the target's distribution along with the tokens that
changed below: by as much as the draft model's moves. Where the draft model does not care, the draft
is the plain Jacobi iterate.

All positions are drafted at once and the draft model is asked again with what came out, its own
Jacobi iteration: after k forward passes the first k positions are final, and most others too. It
ends where nothing changes any more, or after ``draft_rounds`` passes. The iteration begins with
uniform tokens, or with those of a table (``model_table``).

The draft model's cache has a slot per position. The first forward pass of a round brings along what
was committed since the round before.

Guarantee: that of the coupling. A draft depends on the noise of its own position through G_n alone,
and on that of lower positions: so x_n is distributed as what stands before G_n above, given
everything that fixes it. When the iteration ends says nothing else: at its fixed point further
passes change nothing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gen.core.registry import register
from gen.core.sampling_params import has_no_distribution
from gen.models.targets.causal import CausalTarget
from gen.samplers.causal.couplings import without_eos
from gen.samplers.causal.drafters.model import require_same_tokens
from gen.samplers.causal.initialisers.base import Entering, Filled, Initialiser
from gen.samplers.causal.initialisers.copies import Uniform
from gen.samplers.engine.failed import failed_draws
from gen.samplers.engine.host import to_device
from gen.samplers.engine.rows import RowState, RowStore
from gen.samplers.verifiers.base import ROW

# nats below certainty that a token of the draft model has at least when distributions are compared
FLOOR = -30.0
UNFILTERED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@register("initialiser", "model")
class ModelInitialiser(Initialiser):
    """A draft model continues the iterate and corrects it, from uniform tokens on."""

    needs_draft_model = True
    # the draft model was asked for positions up to this one given committed tokens, int64 [b]
    known = RowState(start=-1)
    # its distributions in the last pass of the round before [b, n, V], from position ``at`` on
    before = RowState()
    at = RowState(start=0)

    def __init__(self, draft: CausalTarget, guess: Initialiser, rounds: int | None, redrafts: bool):
        self.draft, self.guess, self.rounds, self.redrafts = draft, guess, rounds, redrafts
        self.targets = (draft,)
        self.num_passes = np.zeros(draft.items, dtype=np.int64)
        self.known = np.full(draft.rows, -1)

    @classmethod
    def make(cls, sampler, target, draft):
        return cls.beginning_with(Uniform(), sampler, target, draft)

    @classmethod
    def beginning_with(cls, guess, sampler, target, draft) -> ModelInitialiser:
        """Make one whose iteration begins with the tokens of another initialiser."""
        draft = require_same_tokens(target, draft)
        sampling = draft.sampling
        if sampler.redrafts:  # a filter would leave nothing to compare outside of it
            sampling = dataclasses.replace(sampling, **UNFILTERED)
        return cls(draft.with_params(sampling), guess, sampler.draft_rounds, sampler.redrafts)

    @property
    def stores(self) -> tuple[RowStore, ...]:
        return (self.store, *self.guess.stores)

    @property
    def nfe(self) -> list[int]:
        return self.num_passes.tolist()

    def fill(self, entering: Entering) -> Filled:
        step, b, n = entering.step, *entering.active.shape
        canvas = torch.nn.functional.pad(entering.canvas(), (0, 1))
        columns = entering.first + np.arange(n)
        enters = entering.active & to_device(columns >= entering.begins[:, None], canvas.device)
        drawn = entering.active if self.redrafts else enters
        # columns that do not exist are written behind all positions
        positions = step.positions[:, entering.first : entering.first + n]
        place = torch.where(entering.active, positions, canvas.shape[1] - 1)
        guess = self.guess.fill(replace(entering, active=enters, compares=False)).tokens
        tokens = torch.where(enters, guess, canvas.gather(1, place))
        canvas.scatter_(1, place, tokens)
        shift = self._shift(entering, enters)
        at, column = self._span(entering)
        running = entering.ends > (0 if self.redrafts else entering.begins)
        inner = to_device(columns < entering.ends[:, None] - 1, canvas.device)
        passes = np.zeros(b, dtype=np.int64)
        logq = q = entering.legal  # until the first pass
        while running.any() and (self.rounds is None or passes.max() < self.rounds):
            given = canvas.gather(1, (at - 1).clamp_min(0))
            q = without_eos(self.draft.predict(given, at).logprobs, self.draft.space.eos_token_id)
            q = q if column is None else q.gather(1, column[..., None].expand(-1, -1, q.shape[-1]))
            passes += running
            logq = q if shift is None else _shifted(q, shift)
            new = step.categorical(logq, "token", drawn, entering.first, shared=True)
            new = torch.where(drawn, new, tokens)
            changed, tokens = new != tokens, new
            canvas.scatter_(1, place, tokens)
            at, column = positions, None
            if self.rounds is None or passes.max() < self.rounds:
                running &= (changed & inner).any(1).cpu().numpy()
        np.add.at(self.num_passes, step.items, passes)
        self.known = step.starts.copy()
        if self.redrafts:
            self.before, self.at = q.clamp_min(FLOOR), step.starts.copy()
        failed = drawn & failed_draws(tokens, q)
        return Filled(tokens, ROW, logq if entering.compares else None, failed)

    def _span(self, entering: Entering) -> tuple[Tensor, Tensor]:
        """List the positions that the draft model is first asked for, [b, w], from the first one
        that it has not seen; and where among them the columns are, long [b, n].

        Shorter rows repeat their first position.
        """
        step, n = entering.step, entering.active.shape[1]
        first, last = self.known + 1, step.starts + entering.ends - 1
        width = int((last - first).max()) + 1
        at = np.maximum(last[:, None] - np.arange(width - 1, -1, -1), first[:, None])
        offset = step.starts + entering.first - last + width - 1
        column = np.clip(offset[:, None] + np.arange(n), 0, width - 1)
        return to_device(at, entering.active.device), to_device(column, entering.active.device)

    def _shift(self, entering: Entering, enters: Tensor) -> Tensor | None:
        """Compute log p - log q of the round before, [b, n, V]: 0 where a position enters; None
        where nothing is redrafted."""
        logp, before, n = entering.logp, self.before, entering.active.shape[1]
        if not self.redrafts or before is None or logp is None:
            return None
        source = np.arange(n) + (entering.step.starts - self.at)[:, None]
        beyond = to_device(source >= before.shape[1], before.device)  # had no draft
        source = to_device(np.minimum(source, before.shape[1] - 1), before.device)
        old = before.gather(1, source[..., None].expand(-1, -1, before.shape[-1]))
        without = enters | beyond | has_no_distribution(logp)
        return torch.where(without[..., None], torch.nan, logp.to(old.dtype) - old)


def _shifted(q: Tensor, shift: Tensor) -> Tensor:
    """log q [b, n, V] moved by ``shift``, normalised; as it is where that is NaN."""
    moved = (q.clamp_min(FLOOR) + shift).log_softmax(-1)
    return torch.where(shift.isnan(), q, moved)
