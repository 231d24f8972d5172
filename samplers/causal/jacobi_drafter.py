"""Drafter of speculative Jacobi decoding: it holds the iterate."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gen.core.token_space import TokenSpace
from gen.models.targets.base import StepOutput, legal_at
from gen.samplers.causal.couplings import Coupling, without_ends
from gen.samplers.causal.initialisers.base import Entering, Filled, Initialiser
from gen.samplers.engine.draft import Draft, Verdict
from gen.samplers.engine.host import to_device
from gen.samplers.engine.rows import RowState, RowStore
from gen.samplers.engine.step_context import CausalStep
from gen.samplers.engine.window import AutoWidth, Windowed


class JacobiDrafter(Windowed):
    """Drafter that holds the iterate: drafts, and the distribution each came from if the coupling
    compares distributions, for the positions after the last committed token."""

    # the first `carried` of the drafts below are carried over from the last step, int64 [b]
    carried = RowState(start=0)
    tokens = RowState()  # [b, n]
    logq: RowState = RowState()  # their distributions [b, n, V]
    guessed = RowState()  # drafts that no model made, bool [b, n]
    before = RowState()  # with a ``trend``: what the target said there last, [b, n, V]
    num_before = RowState(start=0)  # how many of them there are, int64 [b]

    def __init__(
        self,
        window: int | AutoWidth,
        coupling: Coupling,
        init: Initialiser,
        space: TokenSpace,
        legal: Tensor,
        trend: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__(window)
        self.coupling, self.init, self.space, self.legal = coupling, init, space, legal
        self.targets, self.trend, self.dtype = init.targets, trend, dtype

    @property
    def stores(self) -> tuple[RowStore, ...]:
        return (self.store, *self.init.stores)

    @property
    def nfe(self) -> list[int] | None:
        return self.init.nfe

    def propose(self, step: CausalStep, tokens: Tensor) -> Draft:
        b, width = step.positions.shape
        length = min(self.window - 1, width)
        if self.tokens is None:
            self.carried = np.zeros(b, dtype=np.int64)
            self.tokens = torch.zeros(b, 0, dtype=torch.long, device=tokens.device)
            self.guessed = self.tokens.bool()
            shape = b, 0, self.legal.shape[1]
            self.logq = torch.zeros(shape, dtype=self.dtype, device=tokens.device)
        drafts, drafted = _resize(self.tokens, length), step.valid[:, :length]
        compares, corrects = self.coupling.compares, self.init.corrects
        logq, guessed = self.logq, self.guessed
        if compares or corrects:
            logq, guessed = _resize(logq, length), _resize(guessed, length)
        room, failed = np.minimum(step.widths, length), None
        if length and (self.init.redrafts or (self.carried < room).any()):
            entering = self._entering(step, tokens, drafts, drafted)
            if corrects:
                entering.logp = logq
            filled, first, active = self.init.fill(entering), entering.first, entering.active
            drafts[:, first:] = torch.where(active, filled.tokens, drafts[:, first:])
            if filled.failed is not None:
                failed = torch.zeros_like(drafted)
                failed[:, first:] = filled.failed
            if compares:
                self._claim(logq[:, first:], filled, active)
                guessed[:, first:] = torch.where(active, filled.guessed, guessed[:, first:])
        if failed is None and self.targets:
            failed = torch.zeros_like(drafted)
        return Draft(drafts, drafted, logq, guessed=guessed, failed=failed)

    def _claim(self, logq: Tensor, filled: Filled, active: Tensor) -> None:
        """Write what drafts were drawn from to ``logq`` [b, n, V], in columns that are active."""
        here = active[..., None]
        if filled.logq is not None:
            torch.where(here, filled.logq.to(logq.dtype), logq, out=logq)
            return
        ids = filled.tokens[..., None]
        certain = torch.where(here, 0.0, logq.gather(-1, ids))
        logq.masked_fill_(here, -torch.inf).scatter_(-1, ids, certain)

    def _entering(
        self, step: CausalStep, tokens: Tensor, drafts: Tensor, drafted: Tensor
    ) -> Entering:
        """Describe the positions that are to be drafted.

        Args:
            step: context of the step.
            tokens: committed tokens [b, T].
            drafts: drafts so far [b, L].
            drafted: drafts that a row has or gets, bool [b, L].
        """
        length = drafts.shape[1]
        begins, ends = np.minimum(self.carried, length), np.minimum(step.widths, length)
        entering = drafted & to_device(np.arange(length) >= begins[:, None], tokens.device)

        def canvas() -> Tensor:
            """Join committed tokens and drafts so far, [b, T]."""
            total = tokens.shape[1]  # what is not carried goes to a position behind all others
            at = torch.where(drafted & ~entering, step.positions[:, :length], total)
            return torch.cat([tokens, tokens[:, :1]], 1).scatter_(1, at, drafts)[:, :total]

        first = 0 if self.init.redrafts else int(begins.min())
        active = drafted if self.init.redrafts else entering[:, first:]
        legal = legal_at(self.legal, step.positions[:, first:length])
        legal, compares = without_ends(legal, self.space.ends), self.coupling.compares
        return Entering(step, first, begins, ends, active, legal, compares, tokens, canvas)

    def verify(self, step: CausalStep, draft: Draft, output: StepOutput) -> Verdict:
        logp = output.logprobs
        if not draft.tokens.shape[1]:
            ids = step.categorical(logp, "token", step.valid, shared=True)
            verdict = Verdict(torch.zeros_like(step.start), ids)
            self.init.accept(step, verdict)
            return verdict
        next_logprobs = said = without_ends(logp, self.space.ends)
        if self.trend:
            next_logprobs = self._extrapolated(said)
        verdict = self.coupling.step(step, draft, logp, next_logprobs)
        self.init.accept(step, verdict)
        accepted, ids = verdict.num_accepted, verdict.tokens
        # what lies past the token that follows the accepted drafts is the next iterate, drawn from
        # p or p without an end: q
        width = logp.shape[1]
        following = torch.arange(1, width + 1, device=logp.device)
        inside = (accepted[:, None] + following).clamp_max_(width - 1)
        self.tokens = ids.gather(1, inside)
        if self.trend:
            self.before = columns_of(said, inside)
        if self.coupling.compares or self.init.corrects:
            # one distribution less while the next one is made
            self.logq = draft.logq = None
            self.logq = columns_of(next_logprobs, inside)
            self.guessed = torch.zeros_like(self.tokens, dtype=torch.bool)
        return verdict

    def _extrapolated(self, logp: Tensor) -> Tensor:
        """Raise what rose since the target was last asked: log norm(p (p / before) ** trend), and p
        where it was not asked. Tokens without mass before or now keep what they have."""
        before = self.before
        if before is None:
            return logp
        before = _resize(before, logp.shape[1])
        rise = torch.where(logp.isfinite() & before.isfinite(), logp - before, 0.0)
        column = torch.arange(logp.shape[1], device=logp.device)
        is_known = column < to_device(self.num_before, logp.device)[:, None]
        moved = (logp + self.trend * rise).log_softmax(-1)
        return torch.where(is_known[..., None], moved, logp)

    def observe(self, step: CausalStep, num_accepted: np.ndarray, num_drafted: np.ndarray) -> None:
        super().observe(step, num_accepted, num_drafted)
        self.carried = np.maximum(step.widths - num_accepted - 1, 0)
        if self.trend:
            self.num_before = self.carried


def columns_of(x: Tensor, columns: Tensor) -> Tensor:
    """Take columns, long [b, n], of x [b, W, V]: [b, n, V]."""
    if len(x) == 1:
        return x.index_select(1, columns[0])
    return x.gather(1, columns[..., None].expand(-1, -1, x.shape[-1]))


def _resize(x: Tensor, length: int) -> Tensor:
    """[b, n, ...] cut, or a copy padded with zeros, to [b, length, ...]."""
    if x.shape[1] >= length:
        return x[:, :length]
    out = x.new_zeros(len(x), length, *x.shape[2:])
    n = min(length, x.shape[1])
    out[:, :n] = x[:, :n]
    return out
