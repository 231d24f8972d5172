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

    model        q is a draft model's: a small one, or some of the target's own layers with what was
                 trained for the others (``drafter``). Its cache has a slot per position; the first
                 pass of a round brings along what was committed since the round before, and a round
                 has ``draft_rounds`` passes at most. It begins with uniform tokens
    table        q are counts with back-off of what followed these neighbours before (``table``),
                 restricted to the allowed tokens; neighbours are committed tokens and drafts
    model_table  a draft model that begins with the tokens of a table

With ``scope: call`` a table counts the call's finished items as well, as soon as they have
finished. The number of forward passes then depends on their order, so that only a coupling whose
tokens do not depend on the drafts takes it.

Guarantee: that of the coupling. A draft depends on the noise of its own position through G_n alone,
and on that of lower positions: so x_n is distributed as what stands before G_n above, given
everything that fixes it. When the iteration ends says nothing else: at its fixed point further
passes change nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.distributions import has_no_distribution
from gen.core.lookup import legal_at, take
from gen.core.registry import register, registry
from gen.core.sampling_params import SamplingParams
from gen.samplers.causal.couplings import without_ends
from gen.samplers.causal.drafters.model import DraftModel, require_same_tokens
from gen.samplers.causal.initialisers.base import Entering, Initialiser, Uniform
from gen.samplers.causal.initialisers.params import Initialised
from gen.samplers.engine.draft import Draft, Verdict
from gen.samplers.engine.failed import failed_draws
from gen.samplers.engine.host import to_device
from gen.samplers.engine.outputs import CALL, NONE, Outputs
from gen.samplers.engine.rows import RowState

if TYPE_CHECKING:
    from gen.models.targets.causal import CausalTarget
    from gen.samplers.engine.step_context import CausalStep

# log-probability that a token has at least when distributions are compared
FLOOR = -30.0
UNFILTERED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


class IteratedInitialiser(Initialiser):
    """Base of initialisers that ask a distribution q of all positions again and again.

    Args:
        target: the model with its items.
        guess: initialiser that the iteration begins with.
        params: parameters, which say whether drafts that are carried on are drafted again.
    """

    guesses = False
    # passes per round of the sampler at most; None for as many as change a draft
    rounds: int | None = None
    # filters of the target, which q lacks; None where q has them or there are none
    filters: SamplingParams | None = None
    # log q of the last pass of the round before [b, n, V], from position ``at`` on
    before = RowState()
    at = RowState(start=0)

    def __init__(self, target: CausalTarget, guess: Initialiser, params: Initialised):
        super().__init__(target)
        self.guess, self.made_of, self.space = guess, (guess,), target.space
        self.redrafts, self.corrects = params.redrafts, params.corrects

    def predict(self, entering: Entering, canvas: Tensor, is_first: bool) -> Tensor:
        """Compute log q of the columns, [b, n, V], from committed tokens and drafts, [b, T + 1];
        ``is_first``: whether it is the first pass of the round."""
        raise NotImplementedError

    def count(self, step: CausalStep, passes: Tensor) -> None:
        """Learn how many passes each row took, long [b]."""

    def accept(self, step: CausalStep, verdict: Verdict) -> None:
        self.guess.accept(step, verdict)

    def _fill(self, entering: Entering) -> Draft:
        # 1. A guess where a position enters, the iterate of the target elsewhere
        step, enters, first = entering.step, entering.enters, entering.first
        canvas = entering.canvas()
        # columns that do not exist are written behind all positions
        slots = torch.where(entering.active, entering.positions, canvas.shape[1] - 1)
        guess = self.guess._fill(replace(entering, active=enters, compares=False)).tokens
        tokens = torch.where(enters, guess, canvas.gather(1, slots))
        canvas.scatter_(1, slots, tokens)
        # 2. Ask q with what came out, until nothing changes
        shift, drawn = self._shift(entering), entering.active
        running, inner = drawn.any(1), F.pad(drawn[:, 1:], (0, 1))  # the last one changes no other
        passes, turn = torch.zeros_like(step.start), 0
        while True:
            q = without_ends(self.predict(entering, canvas, not turn), self.space.ends)
            passes, turn = passes + running, turn + 1
            logq = q if self.filters is None else self.filters(q, None, None)
            if shift is not None:
                moved = (q.clamp_min(FLOOR) + shift).log_softmax(-1)
                logq = torch.where(shift.isnan(), logq, moved)
            new = torch.where(drawn, step.categorical(logq, "token", drawn, first, True), tokens)
            changed, tokens = new != tokens, new
            canvas.scatter_(1, slots, tokens)
            if turn == self.rounds:
                break
            running = running & (changed & inner).any(1)
            if not running.cpu().numpy().any():
                break
        self.count(step, passes)
        if self.corrects:
            self.before, self.at = q.clamp_min(FLOOR), step.starts.copy()
        failed = drawn & failed_draws(tokens, q)
        return Draft(tokens, drawn, logq if entering.compares else None, failed=failed)

    def _shift(self, entering: Entering) -> Tensor | None:
        """Compute log p - log q of the round before, [b, n, V]: NaN where a position enters; None
        where nothing is corrected."""
        logp, before = entering.draft.logq, self.before
        if not self.corrects or before is None or logp is None:
            return None
        source = np.arange(logp.shape[1]) + (entering.step.starts - self.at)[:, None]
        beyond = to_device(source >= before.shape[1], before.device)  # had no draft
        source = to_device(np.minimum(source, before.shape[1] - 1), before.device)
        old = take(before, source)
        without = entering.enters | beyond | has_no_distribution(logp)
        return torch.where(without[..., None], torch.nan, logp.to(old.dtype) - old)


@register("initialiser", "table")
class TableInitialiser(IteratedInitialiser):
    """Tokens that followed the same neighbours before; they correct the iterate, too."""

    has_table = True

    def __init__(self, target: CausalTarget, params: Initialised):
        super().__init__(target, Uniform(target), params)
        self.allowed = target.legal
        self.counts = registry.get("drafting", "context_table")(target, params.table)
        self.table = table = self.counts.to(target.device)
        self.outputs = Outputs(target) if params.scope == CALL else None
        # the target's positions are the last ones of the table's grid
        shift = len(table.where) - target.length
        self.where = (table.where[shift:] - shift).clamp_min(-1).to(target.device)

    @classmethod
    def make(cls, sampler, target, draft):
        return cls(target, sampler)

    def accept(self, step: CausalStep, verdict: Verdict) -> None:
        super().accept(step, verdict)
        if self.outputs is not None:
            self.outputs.accept(step, verdict)

    def _fill(self, entering: Entering) -> Draft:
        if self.outputs is not None and len(left := self.outputs.begin(entering.step)):
            self._count(self.outputs.tokens[to_device(left, self.where.device)].cpu())
        return super()._fill(entering)

    def _count(self, sequences: Tensor) -> None:
        """Count the tokens of finished items, long [n, T]."""
        end = self.space.eos_token_id
        if end is not None:  # what follows the eos token is the eos token
            sequences = torch.where(sequences == NONE, end, sequences)
        self.counts = self.counts.plus(sequences, self.where.cpu())
        self.table = self.counts.to(self.where.device)

    def predict(self, entering: Entering, canvas: Tensor, is_first: bool) -> Tensor:
        at = entering.positions
        where = self.where[at]
        context = canvas[:, None].expand(-1, at.shape[1], -1).gather(2, where.clamp_min(0))
        context = torch.where(where < 0, self.table.size, context)
        q = self.table.distribution(context.flatten(0, 1)).unflatten(0, at.shape)
        q = q * legal_at(self.allowed, at)
        return (q / q.sum(-1, keepdim=True)).log()


@register("initialiser", "model")
class ModelInitialiser(DraftModel, IteratedInitialiser):
    """A draft model continues the iterate and corrects it, from uniform tokens on."""

    needs_draft_model = True

    def __init__(self, draft: CausalTarget, *rest):
        DraftModel.__init__(self, draft)
        IteratedInitialiser.__init__(self, draft, *rest)

    @classmethod
    def make(cls, sampler, target, draft):
        source = registry.get("drafter", sampler.drafter)
        draft = require_same_tokens(target, source.draft_of(sampler, target, draft))
        sampling, filters = draft.draft_sampling(target), None
        # a filter would leave nothing to compare outside of it
        unfiltered = replace(sampling, **UNFILTERED)
        if sampler.corrects and sampling != unfiltered:
            filters = replace(sampling, temperature=1.0, guidance_scale=1.0)
            sampling = unfiltered
        guess: Initialiser = Uniform(target)
        if cls.has_table:
            guess = TableInitialiser(target, replace(sampler, redraft=False))
        made = cls(draft.with_params(sampling), guess, sampler)
        made.rounds, made.filters = sampler.draft_rounds, filters
        return made

    def predict(self, entering: Entering, canvas: Tensor, is_first: bool) -> Tensor:
        positions = entering.positions
        if not is_first:
            given = canvas.gather(1, (positions - 1).clamp_min(0))
            return self.draft.predict(given, positions).logprobs
        step, end = entering.step, entering.first + positions.shape[1]
        given, at = self.unseen(step, canvas, step.starts + np.minimum(step.widths, end) - 1)
        q = self.draft.predict(given, at).logprobs
        last = at.shape[1] - 1
        column = (positions - at[:, -1:] + last).clamp(0, last)
        return take(q, column)

    def count(self, step: CausalStep, passes: Tensor) -> None:
        self.count_passes(step, passes)
        self.known = step.starts.copy()


@register("initialiser", "model_table")
class ModelTableInitialiser(ModelInitialiser):
    """A draft model continues the iterate and corrects it, from the tokens of a table on."""

    has_table = True
