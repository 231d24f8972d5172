"""Drafter of speculative Jacobi decoding: it holds the iterate."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.sampling_params import wide_dtype
from gen.models.targets.base import StepOutput
from gen.models.targets.causal import CausalTarget
from gen.samplers.causal.couplings import Coupling, without_ends
from gen.samplers.causal.initialisers.base import Entering, Initialiser
from gen.samplers.engine.draft import Draft, Verdict
from gen.samplers.engine.rows import RowState, RowStore
from gen.samplers.engine.step_context import CausalStep
from gen.samplers.engine.window import AutoWidth, Windowed


class JacobiDrafter(Windowed):
    """Drafter that holds the iterate: drafts, and the distribution each came from if somebody
    compares distributions, for the positions after the last committed token.

    Args:
        target: the model with its items.
        window: positions of a forward pass.
        coupling: verifies the iterate and makes the next one.
        init: drafts the positions that enter.
        trend: power of a token's rise in the distribution of the next iterate.
    """

    drafted = RowState(start=False)  # drafts that are carried over from the last step, bool [b, n]
    carried = RowState(start=0)  # how many, int64 [b], as the host knows after a step
    tokens = RowState()  # [b, n]
    logq: RowState = RowState()  # their distributions [b, n, V]
    guessed = RowState()  # drafts that no model made, bool [b, n]
    before = RowState()  # with a ``trend``: what the target said there last, [b, n, V]

    def __init__(
        self,
        target: CausalTarget,
        window: int | AutoWidth,
        coupling: Coupling,
        init: Initialiser,
        trend: float = 0.0,
    ):
        super().__init__(window)
        self.coupling, self.init, self.trend = coupling, init, trend
        self.ends, self.targets, self.captures = target.space.ends, init.targets, init.guesses
        self.carried = np.zeros(target.rows, dtype=np.int64)
        nothing = target.legal.new_zeros(target.rows, 0, target.legal.shape[1])
        self.drafted = self.guessed = nothing[..., 0]
        self.tokens = self.drafted.long()
        self.logq = self.before = nothing.to(wide_dtype(target.model.dtype))

    @property
    def stores(self) -> tuple[RowStore, ...]:
        return (self.store, *self.init.stores)

    @property
    def nfe(self) -> list[int] | None:
        return self.init.nfe

    def propose(self, step: CausalStep, tokens: Tensor) -> Draft:
        length = min(self.window - 1, step.positions.shape[1])
        draft = Draft(_resize(self.tokens, length), step.valid[:, :length])
        if self.coupling.compares or self.init.corrects:
            draft.logq, draft.guessed = _resize(self.logq, length), _resize(self.guessed, length)
        if self.targets:
            draft.failed = torch.zeros_like(draft.exists)
        # a CPU computes what enters and no more; elsewhere shapes do not depend on it
        whole = self.init.redrafts or (self.init.guesses and not tokens.is_cpu)
        if length and (whole or (self.carried < np.minimum(step.widths, length)).any()):
            self._fill(step, tokens, draft, whole)
        return draft

    def _fill(self, step: CausalStep, tokens: Tensor, draft: Draft, whole: bool) -> None:
        """Write the drafts of the positions that enter the iterate so far, and those that are
        drafted again; of all columns where ``whole``, else from the first that enters on."""
        init, exists, length = self.init, draft.exists, draft.tokens.shape[1]
        first = 0 if whole else min(int(self.carried.min()), length)
        enters = exists & ~_resize(self.drafted, length)
        active = exists if init.redrafts else enters[:, first:]

        def canvas() -> Tensor:
            # what is not carried goes to a position behind all others
            at = torch.where(exists & ~enters, step.positions[:, :length], tokens.shape[1])
            return torch.cat([tokens, tokens[:, :1]], 1).scatter_(1, at, draft.tokens)

        compares, logp = self.coupling.compares, draft.logq if init.corrects else None
        filled = init.fill(Entering(step, first, active, enters[:, first:], compares, canvas, logp))
        ids = draft.tokens[:, first:]
        draft.tokens[:, first:] = torch.where(active, filled.tokens, ids)
        if filled.failed is not None:
            draft.failed = F.pad(filled.failed, (first, 0))
        if compares:
            assert draft.logq is not None and draft.guessed is not None
            draft.guessed[:, first:] = torch.where(active, init.guesses, draft.guessed[:, first:])
            here, logq = active[..., None], draft.logq[:, first:]
            if filled.logq is not None:
                torch.where(here, filled.logq.to(logq.dtype), logq, out=logq)
            else:  # chosen, not drawn
                ids = filled.tokens[..., None]
                certain = torch.where(here, 0.0, logq.gather(-1, ids))
                logq.masked_fill_(here, -torch.inf).scatter_(-1, ids, certain)

    def verify(self, step: CausalStep, draft: Draft, output: StepOutput) -> Verdict:
        logp = output.logprobs
        if not draft.tokens.shape[1]:
            ids = step.categorical(logp, "token", step.valid, shared=True)
            verdict = Verdict(torch.zeros_like(step.start), ids)
            self.drafted = torch.zeros_like(self.drafted)
        else:
            said = without_ends(logp, self.ends)
            following = self._extrapolated(said) if self.trend else said
            verdict = self.coupling.step(step, draft, logp, following)
            draft.logq = None  # one distribution less while the next one is made
            columns = self._carry(verdict.tokens, verdict.num_accepted, step.valid, following)
            if self.trend:
                self.before = _take(said, columns)
        self.init.accept(step, verdict)
        return verdict

    def _carry(self, ids: Tensor, accepted: Tensor, valid: Tensor, following: Tensor) -> Tensor:
        """Keep what lies past the token that follows the ``accepted`` drafts, long [b]: the next
        iterate, of the step's tokens ``ids`` [b, W] in columns that are ``valid``, and the
        distributions ``following`` [b, W, V] that they came from. Returns its columns, long [b,
        W]."""
        width = ids.shape[1]
        columns = accepted[:, None] + torch.arange(1, width + 1, device=ids.device)
        self.drafted = columns < valid.sum(1, keepdim=True)
        columns = columns.clamp_max_(width - 1)
        self.tokens = ids.gather(1, columns)
        if self.coupling.compares or self.init.corrects:
            self.logq = None
            self.logq = _take(following, columns)
            self.guessed = torch.zeros_like(self.tokens, dtype=torch.bool)
        return columns

    def _extrapolated(self, logp: Tensor) -> Tensor:
        """Raise what rose since the target was last asked: log norm(p (p / before) ** trend), and p
        where it was not asked. Tokens without mass before or now keep what they have."""
        width = logp.shape[1]
        before, is_known = _resize(self.before, width), _resize(self.drafted, width)
        rise = torch.where(logp.isfinite() & before.isfinite(), logp - before, 0.0)
        moved = (logp + self.trend * rise).log_softmax(-1)
        return torch.where(is_known[..., None], moved, logp)

    def observe(self, step: CausalStep, num_accepted: np.ndarray, num_drafted: np.ndarray) -> None:
        super().observe(step, num_accepted, num_drafted)
        columns = np.minimum(step.widths, self.tokens.shape[1])
        self.carried = np.maximum(columns - num_accepted - 1, 0)


def _take(x: Tensor, columns: Tensor) -> Tensor:
    """Take columns, long [b, n], of x [b, W, V]: [b, n, V]."""
    if len(x) == 1:
        return x.index_select(1, columns[0])
    return x.gather(1, columns[..., None].expand(-1, -1, x.shape[-1]))


def _resize(x: Tensor, length: int) -> Tensor:
    """Cut x [b, n, ...], or pad a copy with zeros, to [b, length, ...]."""
    if x.shape[1] >= length:
        return x[:, :length]
    return F.pad(x, (0, 0) * (x.ndim - 2) + (0, length - x.shape[1]))
