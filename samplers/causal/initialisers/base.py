"""Initialisers: the first draft of a position that has just entered the window, and the
distribution it was drawn from.

    uniform       uniform over the legal ids, with the noise of the position; q = 1 / |legal|.
                  Acceptance 1 - TV(p, q)
    random        a uniform id taken as it is (q = one-hot); acceptance p(x), about 1 / V. The SJD
                  paper's default
    repeat        the token one position before (q = one-hot). The paper's ``repeat_horizon``
    repeat_above  the token one row above (q = one-hot), in grids of at least two axes
    model         a draft model continues the iterate, argmax log q + G with the noise G of the
                  position; q is the draft model's distribution (``iterated``)
    table         counts of neighbouring tokens give q, argmax log q + G (``iterated``)
    model_table   a draft model whose own Jacobi iterate begins with the table's

All of them are exact: what counts is that q is the distribution the draft came from. Those with the
noise of the position draft the very token of the target wherever q ranks it first as p does.

``@register("initialiser", name)`` on a subclass in one file is all that a new one takes; the
samplers of Jacobi drafts then accept ``init: name``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.lookup import legal_at
from gen.core.registry import register
from gen.samplers.causal.couplings import without_ends
from gen.samplers.engine.draft import Draft, Verdict
from gen.samplers.engine.host import to_device
from gen.samplers.engine.rows import RowOwner

if TYPE_CHECKING:
    from gen.models.targets.causal import CausalTarget
    from gen.samplers.engine.step_context import CausalStep


@dataclass
class Entering:
    """Columns of a step that are to be drafted: the last n of the L drafts of b rows.

    Attributes:
        step: context of the step.
        tokens: committed tokens, long [b, T].
        draft: the L drafts so far, whose distributions are the target's where the initialiser
            ``corrects``; anything where none is carried on.
        is_carried: those that are, bool [b, L].
        compares: whether the distribution of a draft is read.
        first: column of the step that they begin with.
        active: columns that are drafted, bool [b, n].
        enters: those of them that have no draft yet, bool [b, n].
    """

    step: CausalStep
    tokens: Tensor
    draft: Draft
    is_carried: Tensor
    compares: bool
    first: int
    active: Tensor
    enters: Tensor

    @property
    def positions(self) -> Tensor:
        """Grid positions of the columns, long [b, n]."""
        return self.step.positions[:, self.first : self.first + self.active.shape[1]]

    def canvas(self) -> Tensor:
        """Make committed tokens and drafts so far, a fresh [b, T + 1] whose last column is for what
        does not exist."""
        tokens, is_known = self.tokens, self.draft.exists & self.is_carried
        at = self.step.positions[:, : is_known.shape[1]]
        at = torch.where(is_known, at, tokens.shape[1])
        return torch.cat([tokens, tokens[:, :1]], 1).scatter_(1, at, self.draft.tokens)


class Initialiser(RowOwner):
    """Rule for the first drafts of positions.

    Attributes:
        needs_draft_model: whether it asks a draft model, the sampler's or one of the target's own
            layers.
        has_table: whether it reads a context table.
        guesses: whether no model makes its drafts.
        targets: draft models of the same items, whose rows follow the batch.
        nfe: forward passes of the draft model, of every item; None without a draft model.
        redrafts: whether it drafts the positions again that are carried on; all columns are then
            ``active``.
        corrects: whether it does so from what the target said of them.
        legal: tokens that may be drafted, bool [T, V]: the allowed ones without an end.
    """

    needs_draft_model: ClassVar[bool] = False
    has_table: ClassVar[bool] = False
    guesses: ClassVar[bool] = True
    targets: tuple[CausalTarget, ...] = ()
    nfe: list[int] | None = None
    redrafts: bool = False
    corrects: bool = False

    def __init__(self, target: CausalTarget):
        legal = target.legal
        some = legal[:1] if legal.stride(0) == 0 else legal
        self.legal = without_ends(some, target.space.ends).expand_as(legal)

    @classmethod
    def make(cls, sampler: Any, target: CausalTarget, draft: CausalTarget | None) -> Initialiser:
        """Make the initialiser of one call of a sampler. ``draft``: target of the draft model,
        where one is needed."""
        return cls(target)

    def enter(
        self,
        step: CausalStep,
        tokens: Tensor,
        draft: Draft,
        is_carried: Tensor,
        num_carried: np.ndarray,
        compares: bool,
    ) -> None:
        """Write the drafts of the positions that enter the window, and of those that are drafted
        again. ``num_carried``: drafts that are carried on, int64 [b], as the host counts them;
        the others as in ``Entering``."""
        exists, length = draft.exists, draft.tokens.shape[1]
        if self.targets:
            draft.failed = torch.zeros_like(exists)
        # a CPU computes what enters and no more; elsewhere shapes do not depend on it
        whole = self.redrafts or (self.guesses and not tokens.is_cpu)
        if not length or not (whole or (num_carried < np.minimum(step.widths, length)).any()):
            return
        first = 0 if whole else min(int(num_carried.min()), length)
        enters = (exists & ~is_carried)[:, first:]
        active = exists if self.redrafts else enters
        known = step, tokens, draft, is_carried, compares
        filled = self._fill(Entering(*known, first, active, enters))
        ids = draft.tokens[:, first:]
        draft.tokens[:, first:] = torch.where(active, filled.tokens, ids)
        if filled.failed is not None:
            draft.failed = F.pad(filled.failed, (first, 0))
        if not compares:
            return
        assert draft.logq is not None and draft.guessed is not None
        draft.guessed[:, first:] = torch.where(active, self.guesses, draft.guessed[:, first:])
        here, logq = active[..., None], draft.logq[:, first:]
        if filled.logq is not None:
            torch.where(here, filled.logq.to(logq.dtype), logq, out=logq)
        else:  # chosen, not drawn
            ids = filled.tokens[..., None]
            certain = torch.where(here, 0.0, logq.gather(-1, ids))
            logq.masked_fill_(here, -torch.inf).scatter_(-1, ids, certain)

    def _fill(self, entering: Entering) -> Draft:
        """Draft the columns that are active, [b, n]; the others may get anything. Without
        ``compares`` nobody reads the distributions."""
        raise NotImplementedError

    def accept(self, step: CausalStep, verdict: Verdict) -> None:
        """Read what the coupling made of the step; what follows an eos token is not committed."""


@register("initialiser", "uniform")
class Uniform(Initialiser):
    """Uniform over the allowed tokens, with the noise of the position."""

    def __init__(self, target: CausalTarget):
        super().__init__(target)
        # log q of the allowed tokens of every position, which their number alone decides, and of
        # the others: [T, 2]
        some, self.logs = self.legal[:1] if self.legal.stride(0) == 0 else self.legal, {}
        legal = some.cpu().numpy()
        _, first, kinds = np.unique(legal.sum(-1), True, True)
        some = torch.from_numpy(legal[first])
        for x in (some.float(), some.double()):
            most = x.log_().log_softmax(-1).numpy().max(-1)[kinds]
            both = np.stack([most, most - most.dtype.type(np.inf)], -1)
            self.logs[x.dtype] = to_device(both, self.legal.device)

    def _fill(self, entering):
        logq = self.logq(entering.positions, torch.float64) if entering.compares else None
        return Draft(self._draw(entering, "token"), entering.active, logq)

    def _draw(self, entering: Entering, purpose: str) -> Tensor:
        """Draw tokens [b, n] with the noise of their positions."""
        step, active, at = entering.step, entering.active, entering.positions
        logq = self.logq(at, torch.float32).expand(*at.shape, -1)
        return step.categorical(logq, purpose, active, entering.first, shared=True)

    def logq(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute log q at positions [b, n]: [b, n, V], or one [1, 1, V] where they are equal."""
        legal, logs = legal_at(self.legal, positions), self.logs[dtype]
        is_uniform = legal.stride()[:2] == (0, 0)
        some = legal[:1, :1] if is_uniform else legal
        logs = logs[:1] if is_uniform else logs[positions.clamp_max(len(logs) - 1)]
        return torch.where(some, logs[..., :1], logs[..., 1:])


@register("initialiser", "random")
class Random(Uniform):
    """A uniform token, judged as if it were certain."""

    def _fill(self, entering):
        return Draft(self._draw(entering, "initial"), entering.active)


@register("initialiser", "repeat")
class Repeat(Initialiser):
    """The token one position before; the smallest allowed id where there is none, or where it is
    not allowed."""

    def __init__(self, target: CausalTarget):
        super().__init__(target)
        self.back, self.is_uniform = 1, self.legal.stride(0) == 0
        rows = self.legal[:1] if self.is_uniform else self.legal
        self.lowest = rows.to(torch.uint8).argmax(-1).expand(len(self.legal))

    def _fill(self, entering):
        at, canvas, columns = entering.positions, entering.canvas(), entering.active.shape[1]
        # a copy may be copied again: all are copies of what stands before the columns that enter
        hops = (entering.enters.long().cumsum(1) - 1).clamp_min_(0) // self.back
        source = at - (hops + 1) * self.back
        ids = torch.where(source < 0, -1, canvas.gather(1, source.clamp_min(0)))
        # what was allowed once is allowed at all hops, unless positions differ in what they allow
        for hop in range(0 if self.is_uniform else (columns - 1) // self.back, -1, -1):
            here = (at - hop * self.back).clamp(0, len(self.legal) - 1)
            allowed = (ids >= 0) & self.legal[here, ids.clamp_min(0)]
            ids = torch.where(allowed | (hop > hops), ids, self.lowest[here])
        return Draft(ids, entering.active)


@register("initialiser", "repeat_above")
class RepeatAbove(Repeat):
    """The token one row above, in grids of at least two axes."""

    def __init__(self, target: CausalTarget):
        super().__init__(target)
        grid = target.space.grid
        self.back = grid[-1] if len(grid) > 1 else 1
