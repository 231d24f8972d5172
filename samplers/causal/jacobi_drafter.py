"""Drafter of speculative Jacobi decoding: it holds the iterate."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gen.core.token_space import TokenSpace
from gen.models.targets.base import StepOutput, legal_at
from gen.samplers.causal.couplings import Coupling, without_ends
from gen.samplers.causal.initialisers.base import Entering, Initialiser
from gen.samplers.engine.causal_loop import CausalStep, Draft, Verdict
from gen.samplers.engine.host import to_device
from gen.samplers.engine.rows import RowState, RowStore
from gen.samplers.engine.window import AutoWidth, Windowed
from gen.samplers.verifiers.base import ROW, Proposal


class JacobiDrafter(Windowed):
    """Drafter that holds the iterate: drafts, and the distribution each came from if the coupling
    compares distributions, for the positions after the last committed token."""

    # the first `carried` of the drafts below are carried over from the last step, int64 [b]
    carried = RowState(start=0)
    tokens = RowState()  # [b, n]
    logq: RowState = RowState()  # their distributions [b, n, V]
    kind = RowState()  # and which kind those are, [b, n]
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
    ):
        super().__init__(window)
        self.coupling, self.init, self.space, self.legal = coupling, init, space, legal
        self.targets, self.trend = init.targets, trend
        self._nothing_legal = legal[None, :0]  # bool [1, 0, V]

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
            self.kind, self.logq = (
                self.tokens,
                torch.zeros(b, 0, self.legal.shape[1], device=tokens.device),
            )
        drafts, drafted = _resize(self.tokens, length), step.valid[:, :length]
        compares, redrafts, corrects = (
            self.coupling.compares,
            self.init.redrafts,
            self.init.corrects,
        )
        kind, logq, legal = self.kind, self.logq, self._nothing_legal
        if compares or corrects:
            kind, logq = _resize(kind, length), _resize(logq, length)
        if compares and length:
            legal = self._legal(step.positions[:, :length])
        room, failed = np.minimum(step.widths, length), None
        if length and (redrafts or (self.carried < room).any()):
            entering = self._entering(step, tokens, drafts, drafted, legal)
            if corrects:
                entering.logp = logq
            filled, first, active = self.init.fill(entering), entering.first, entering.active
            drafts[:, first:] = torch.where(active, filled.tokens, drafts[:, first:])
            if filled.failed is not None:
                failed = torch.zeros_like(drafted)
                failed[:, first:] = filled.failed
            if compares:
                kind[:, first:] = torch.where(active, filled.kind, kind[:, first:])
            if compares and filled.logq is not None:
                logq = logq.to(torch.promote_types(logq.dtype, filled.logq.dtype))
                new = filled.logq.to(logq.dtype)
                logq[:, first:] = torch.where(active[..., None], new, logq[:, first:])
        self.drafted, self.proposal = drafted, Proposal(drafts, kind, logq, legal)
        if failed is None and self.targets:
            failed = torch.zeros_like(drafted)
        return Draft(drafts, drafted, failed=failed)

    def _entering(
        self, step: CausalStep, tokens: Tensor, drafts: Tensor, drafted: Tensor, legal: Tensor
    ) -> Entering:
        """Describe the positions that are to be drafted.

        Args:
            step: context of the step.
            tokens: committed tokens [b, T].
            drafts: drafts so far [b, L].
            drafted: drafts that a row has or gets, bool [b, L].
            legal: allowed tokens of the drafts [b, L, V], where the coupling compares.
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
        compares = self.coupling.compares
        here = legal[:, first:] if compares else self._legal(step.positions[:, first:length])
        return Entering(step, first, begins, ends, active, here, compares, tokens, canvas)

    def _legal(self, positions: Tensor) -> Tensor:
        """Look up the tokens that may be drafted at positions [b, n]: bool [b, n, V]."""
        return without_ends(legal_at(self.legal, positions), self.space.ends)

    def verify(self, step: CausalStep, output: StepOutput) -> Verdict:
        logp = output.logprobs
        if not self.drafted.shape[1]:
            ids = step.categorical(logp, "token", step.valid, shared=True)
            verdict = Verdict(torch.zeros_like(step.start), ids)
            self.init.accept(step, verdict)
            return verdict
        proposal, compares = self.proposal, self.coupling.compares
        if compares and proposal.logq.dtype != logp.dtype:
            proposal.logq = proposal.logq.to(logp.dtype)
        next_logprobs = said = without_ends(logp, self.space.ends)
        if self.trend:
            next_logprobs = self._extrapolated(said)
        verdict = self.coupling.step(step, proposal, self.drafted, logp, next_logprobs)
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
        if compares or self.init.corrects:
            # one distribution less while the next one is made
            self.logq = None
            del self.proposal, proposal
            self.logq = columns_of(next_logprobs, inside)
            self.kind = torch.full_like(self.tokens, ROW)
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
