"""Jacobi iteration on latents: the noise of every position is fixed, and a window of positions is
iterated to the fixed point.

With noise e_n per position (the one that ``autoregressive`` uses) a latent is a function of those
before it,

    x_n = f_n(x_<n),    f_n: the end of the path that e_n leads along, given z(x_<n)

and its solution is what sequential sampling gives. A position past the last committed one holds an
iterate y. A round computes y_n' = f_n(x_<start, y_start .. y_n-1) for the whole window and commits,
from the left, the iterates y_n that moved by at most ``tolerance`` (the largest component of |y_n'
- y_n|), and then y_n' of the first position that moved more, which is right given what stands
  before
it. The others go on with y_n'. What is committed of a position that did not move is y_n, not y_n':
the later positions were computed from it, so output and cache agree.

Song, Meng, Liao & Ermon, "Accelerating Feedforward Computation via Parallel Nonlinear Equation
Solving" (arXiv 2002.03629); Wiggers & Hoogeboom, "Predictive Sampling with Forecasting
Autoregressive Models" (arXiv 2002.09928).

Guarantee, for every window, init and batch: each committed x_n differs from f_n(x_<n) by at most
``tolerance`` in every component, x_<n being the output's own. At tolerance 0 that is plain
autoregression with the same seed, up to the arithmetic: an iterate that is right but off in its
last bits is computed again, which costs speed and nothing else. Above 0, how far the output is from
the sequential one depends on how the model passes a difference on; it is measured, not bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gen.core.errors import unknown
from gen.core.params import number, param
from gen.core.registry import register
from gen.models.adapters.denoising_path import PathDistribution, noise_size, walk
from gen.samplers.engine.causal_loop import CausalSampler
from gen.samplers.engine.draft import Draft, Verdict
from gen.samplers.engine.rows import RowState
from gen.samplers.engine.window import AUTO, AutoWidth, Windowed, width_of
from gen.samplers.verifiers.base import num_accepted

if TYPE_CHECKING:
    from gen.models.targets.base import StepOutput
    from gen.samplers.engine.step_context import CausalStep

INITS = ("repeat", "zeros")


class LatentJacobiDrafter(Windowed):
    """Drafter that holds the iterate of every position that has been in the window, and what was
    committed, which ends it."""

    iterate = RowState(start=0)  # [b, T, C]
    reach = RowState(start=0)  # positions below it have an iterate, long [b]

    def __init__(
        self, paths: PathDistribution, window: int | AutoWidth, tolerance: float, init: str
    ):
        super().__init__(window)
        self.paths, self.tolerance, self.init = paths, tolerance, init

    def propose(self, step: CausalStep, tokens: Tensor) -> Draft:
        if self.iterate is None:
            self.iterate, self.reach = torch.zeros_like(tokens), torch.zeros_like(step.start)
        length = min(self.window - 1, step.positions.shape[1])
        at, drafted = step.positions[:, :length], step.valid[:, :length]
        row = torch.arange(len(at), device=at.device)[:, None]
        # all positions that enter follow the last one with an iterate; before the first position
        # there is
        # none
        known = self.iterate[row, (self.reach[:, None] - 1).clamp_min(0)]
        enter = known if self.init == "repeat" else torch.zeros_like(known)
        drafts = torch.where((at < self.reach[:, None])[..., None], self.iterate[row, at], enter)
        return Draft(drafts, drafted)

    def verify(self, step: CausalStep, draft: Draft, output: StepOutput) -> Verdict:
        logprobs, drafts = output.logprobs, draft.tokens
        width, length = logprobs.shape[1], drafts.shape[1]
        values = self.values(step, logprobs).to(drafts.dtype)
        still = (values[:, :length] - drafts).abs().amax(-1) <= self.tolerance
        accepted = num_accepted(still & draft.exists)
        column = torch.arange(width, device=logprobs.device)
        chosen = values.clone()
        chosen[:, :length] = torch.where(
            (column[:length] < accepted[:, None])[..., None], drafts, values[:, :length]
        )
        # a column that does not exist stands for the row's first one
        here = torch.where(step.valid[..., None], chosen, chosen[:, :1])
        self.iterate.scatter_(1, step.positions[..., None].expand_as(here), here)
        self.reach = step.start + step.valid.sum(1)
        return Verdict(accepted, chosen)

    def values(self, step: CausalStep, logprobs: Tensor) -> Tensor:
        """Walk from the noise of each position, given its conditioning vector: [b, W, C]."""
        return walk(
            self.paths,
            logprobs,
            step.normal("token", noise_size(self.paths), logprobs.shape[1], shared=True),
        )[..., -1, :]


@register("sampler", "continuous_jacobi")
@dataclass(frozen=True)
class ContinuousJacobi(CausalSampler):
    """Decode several latents per forward pass, drafted by the model's own previous iterate.

    ``window``: positions computed per forward pass, or auto (``auto_width``). ``tolerance``: how
    far an iterate may still move, in its largest component, to be committed; 0 gives plain
    autoregression. ``init``: what positions that enter the window start from, repeat (the iterate
    one position before) or zeros.
    """

    window: int | str = param(16, int, 1, also=(AUTO,))
    tolerance: float = number(0.05)
    init: str = "repeat"

    papers = ("2002.03629", "2002.09928")
    protocol = "causal"
    kinds = ("latents",)
    reference = "plain autoregression"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init not in INITS:
            raise unknown("sampler.init", self.init, INITS)

    @property
    def guarantee(self) -> str:
        return "same_tokens" if self.tolerance == 0 else "approximate"

    @property
    def timed(self) -> bool:
        return self.window == AUTO

    def make_drafter(self, target, draft):
        return LatentJacobiDrafter(
            target.paths, width_of(self.window, self, target), self.tolerance, self.init
        )
