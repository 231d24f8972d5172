"""Verifying drafts that are latents: chains for ``drafting.ModelDrafter`` whose drafts have a
denoising path.

A path has a density and its end alone has none in closed form, so paths are what is compared. Both
rules accept a draft with probability min(1, r), r a ratio of densities, kept in log space, and
after a rejection draw from the target's side, accepting a try with probability max(0, 1 - 1/r) of
the same r; ``max_tries`` tries at most.

    exact    r = P(path) / Q(path), P and Q the target's and the draft's distribution of a path
             (``gen.models.adapters.denoising_path``)
    aligned  one noise e for both: the draft's path is x^q, the target's own x^p. With S
             transitions and the draft x = x^q_S, r = Sigma p(x | x^p_S-1) / q(x | x^q_S-1),  Sigma
             = prod_{k<S} s_q,k / s_p,k. ``relaxation`` flattens the exponents of the two Gaussians
             alone: exp(-z^2 / 2) becomes exp(-z^2 / 2)^(1 - relaxation); all scales stay

The released code of the paper has Sigma upside down, s_p,k / s_q,k.

Exact: what is lost. Given the tokens before, a draft is accepted with density min(P, Q), and
rejected with probability R = TV(P, Q). A try is a path from P that is accepted with probability (1
- Q/P)+, hence R in all, and then has the distribution (P - Q)+ / R. Where all K tries fail, with
  probability
(1 - R)^K, a path of P itself is taken. So a token's path has the distribution

    min(P, Q) + (1 - (1 - R)^K) (P - Q)+ + (1 - R)^K R P  =  P + (1 - R)^K (R P - (P - Q)+)

whose distance from P is (1 - R)^K R TV(P, (P - Q)+ / R). As (P - Q)+ <= P, the mass those two share
is at least R, so that last distance is at most 1 - R:

    TV <= R (1 - R)^(K+1) < 1 / (e (K + 1))      for every R;  K = 1000: less than 0.00037 per token

It is that large only where R is about 1 / K, drafts that are hardly ever rejected; for R = 0.05 it
is below 1e-23. On average a token costs at most one try, whatever R is: R times 1 / R.

Aligned: r is the ratio of P and Q at two paths, the target's own with its end replaced by x, and
the draft's; their earlier transitions have one noise, so that all that is left of them is Sigma.
Drafts come from the distribution of x given x^q_S-1, but r is not the ratio of that and the
target's, so this is not exact. With S = 1 and relaxation 0 it is, up to the bound above: then both
distributions are given the same x_0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gen.models.adapters.denoising_path import PathDistribution, log_density, noise_size, walk
from gen.samplers.engine.draft import Draft, Verdict, columns_of
from gen.samplers.engine.host import to_device
from gen.samplers.verifiers.base import num_accepted

if TYPE_CHECKING:
    from gen.samplers.engine.step_context import CausalStep

BLOCK = 64  # tries of a position computed at once, at most


class PathRule:
    """Common part of both rules, which draw drafts and verify them. ``ours``, ``theirs``: the path
    distributions of target and draft.

    Below, ``row`` and ``column`` [n] pick positions of the round. The noise of a position itself
    ("token") is what autoregression would use; a chain uses it for a position at most once.
    """

    def __init__(self, ours: PathDistribution, theirs: PathDistribution, max_tries: int):
        self.ours, self.theirs, self.max_tries = ours, theirs, max_tries
        self.drawn: list = []  # what is known of the drafts, column by column

    def begin(self) -> None:
        """Begin a round without drafts."""
        self.drawn = []

    def verify(self, step: CausalStep, draft: Draft, logprobs: Tensor) -> Verdict:
        drafts, drafted = draft.tokens, draft.exists
        accepted = num_accepted(self.kept(step, drafted, logprobs))
        chosen = torch.cat([drafts, drafts.new_zeros(len(drafts), 1, drafts.shape[-1])], 1)
        rejected = (
            (accepted < drafted.sum(1)).cpu().numpy()
        )  # walks are too dear to be taken for nothing, so this is waited for
        for which, draw in ((rejected, self.residual), (~rejected, self.own)):
            if which.any():
                rows = to_device(which.nonzero()[0], logprobs.device)
                chosen[rows, accepted[rows]] = draw(step, rows, accepted[rows], logprobs).to(
                    chosen.dtype
                )
        return Verdict(accepted, chosen)

    def undrafted(self, step: CausalStep, logprobs: Tensor) -> Tensor:
        """Draw the latents [b, 1, C] of a round without any draft."""
        row = torch.arange(len(logprobs), device=logprobs.device)
        return self.own(step, row, torch.zeros_like(row), logprobs)[:, None]

    def kept(self, step: CausalStep, drafted: Tensor, logprobs: Tensor) -> Tensor:
        """Flip the coin of each draft by itself: bool like ``drafted``."""
        out = torch.zeros_like(drafted)
        if self.drawn:
            count = len(self.drawn)
            chance = self.log_ratio(step, logprobs[:, :count]).clamp_max(0).exp()
            out[:, :count] = step.flip(chance, "accept", drafted[:, :count]) & drafted[:, :count]
        return out

    def own(self, step: CausalStep, row: Tensor, column: Tensor, logprobs: Tensor) -> Tensor:
        """Latents [n, C] of the target alone."""
        noise = _noise(step, row, column, "token", None, noise_size(self.ours))
        return walk(self.ours, logprobs[row, column], noise)[:, -1]

    def residual(self, step: CausalStep, row: Tensor, column: Tensor, logprobs: Tensor) -> Tensor:
        """Latents [n, C] in place of rejected drafts: the first accepted try, or else the target's
        own. Every try is a round of draws of its own, so how many are computed at once changes
        nothing. After each block of tries the device is waited for: are there enough?
        """
        out = logprobs.new_zeros(len(row), self.ours.channels)
        left, tried = torch.arange(len(row), device=row.device), 0
        while len(left) and tried < self.max_tries:
            block = min(max(tried, 1), BLOCK, self.max_tries - tried)
            r, c = row[left].repeat_interleave(block), column[left].repeat_interleave(block)
            tries = (
                step.round[r] * self.max_tries
                + tried
                + torch.arange(block, device=row.device).repeat(len(left))
            )
            x, log_ratio = self.attempt(step, r, c, logprobs, tries)
            chance = -torch.expm1(-log_ratio.clamp_min(0))[:, None]
            at = step.positions[r, c][:, None]
            fine = step.rng.flip(
                chance,
                step.rows[r],
                at,
                "residual_accept",
                tries,
                torch.ones_like(chance, dtype=torch.bool),
            )
            fine = fine.view(-1, block)
            hit, first = fine.any(1), fine.long().argmax(1)
            best = columns_of(x.view(len(left), block, -1), first)[:, 0].to(out.dtype)
            out[left] = torch.where(hit[:, None], best, out[left])
            missed = (~hit).cpu().numpy().nonzero()[0]
            left, tried = left[to_device(missed, left.device)], tried + block
        if len(left):
            out[left] = self.own(step, row[left], column[left], logprobs)
        return out

    def draw(self, step: CausalStep, column: int, logprobs: Tensor, active: Tensor) -> Tensor:
        """Draw the latents of one column; see ``ModelDrafter.draw``."""
        raise NotImplementedError

    def log_ratio(self, step: CausalStep, logprobs: Tensor) -> Tensor:
        """log r of the drafts, [b, L], which stand in the first L columns; ``distribution`` is
        those columns'."""
        raise NotImplementedError

    def attempt(
        self, step: CausalStep, row: Tensor, column: Tensor, logprobs: Tensor, tries: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Latents [n, C] of the target's side, and log r of each [n]."""
        raise NotImplementedError


class ExactPaths(PathRule):
    """Drafts have noise of their round, and are judged by the densities of whole paths."""

    def draw(self, step, column, logprobs, active):
        noise = step.rng.normal(
            step.rows, step.positions[:, column, None], "draft", step.round, noise_size(self.theirs)
        )[:, 0]
        path = walk(self.theirs, logprobs, noise)
        self.drawn.append((path, logprobs))
        return path[:, -1]

    def log_ratio(self, step, logprobs):
        path, self.conditions = (torch.stack(x, 1) for x in zip(*self.drawn, strict=True))
        return self.compare(path, logprobs, self.conditions)

    def attempt(self, step, row, column, logprobs, tries):
        noise = _noise(step, row, column, "residual", tries, noise_size(self.ours))
        path = walk(self.ours, logprobs[row, column], noise)
        return path[:, -1], self.compare(path, logprobs[row, column], self.conditions[row, column])

    def compare(self, path: Tensor, ours: Tensor, theirs: Tensor) -> Tensor:
        """log P / Q of paths, given the conditioning vectors of both."""
        return log_density(self.ours, path.to(ours.dtype), ours) - log_density(
            self.theirs, path.to(theirs.dtype), theirs
        )


class Last(NamedTuple):
    """The end of a path, the last transition to it, and the sum of log s over the transitions
    before."""

    end: Tensor  # [..., C]
    mean: Tensor
    log_sigma: Tensor
    before: Tensor  # [...]

    def score(self, x: Tensor, relaxation: float) -> Tensor:
        """log of the density of x after the path's last but one position, times the product of 1 /
        s before; its exponent is flattened, and constants are left out."""
        log_sigma = self.log_sigma.double()
        z = (x.double() - self.mean.double()) * (-log_sigma).exp()
        return (-0.5 * (1 - relaxation) * z.square() - log_sigma).sum(-1) - self.before


class AlignedPaths(PathRule):
    """Draft and target share the noise of the position."""

    def __init__(
        self, ours: PathDistribution, theirs: PathDistribution, max_tries: int, relaxation: float
    ):
        super().__init__(ours, theirs, max_tries)
        self.relaxation = relaxation

    def draw(self, step, column, logprobs, active):
        noise = step.rng.normal(
            step.rows, step.positions[:, column, None], "token", None, noise_size(self.theirs)
        )[:, 0]
        last = align(self.theirs, logprobs, noise)
        self.drawn.append(last)
        return last.end

    def log_ratio(self, step, logprobs):
        self.q = Last(*(torch.stack(x, 1) for x in zip(*self.drawn, strict=True)))
        self.p = align(
            self.ours,
            logprobs,
            step.normal("token", noise_size(self.ours), logprobs.shape[1], shared=True),
        )
        return self.compare(self.q.end, self.p, self.q)

    def attempt(self, step, row, column, logprobs, tries):
        p, q = (Last(*(x[row, column] for x in last)) for last in (self.p, self.q))
        x = p.mean + p.log_sigma.exp() * _noise(
            step, row, column, "residual", tries, self.ours.channels
        ).to(p.mean.dtype)
        return x, self.compare(x, p, q)

    def compare(self, x: Tensor, p: Last, q: Last) -> Tensor:
        return p.score(x, self.relaxation) - q.score(x, self.relaxation)


@torch.no_grad()
def align(logprobs: PathDistribution, z: Tensor, noise: Tensor) -> Last:
    """Where ``gen.models.adapters.denoising_path.walk`` leads, and how it gets there. z [..., H,
    D], noise [..., (S + 1) C]."""
    lead, z = z.shape[:-2], z.flatten(0, -3)
    noise = noise.reshape(-1, logprobs.steps + 1, logprobs.channels).to(z.dtype)
    x, before = noise[:, 0], torch.zeros(len(z), dtype=torch.float64, device=z.device)
    mean = log_sigma = x  # of the last step, and there is at least one
    for k in range(logprobs.steps):
        mean, log_sigma = logprobs.transition(x, k, z)
        if k + 1 < logprobs.steps:
            before = before + log_sigma.double().sum(-1)
        x = mean + log_sigma.exp() * noise[:, k + 1]
    return Last(*(y.view(*lead, *y.shape[1:]) for y in (x, mean, log_sigma, before)))


def _noise(
    step: CausalStep, row: Tensor, column: Tensor, purpose: str, round: Tensor | None, size: int
) -> Tensor:
    """Standard normal numbers [n, size] of positions of the round."""
    return step.rng.normal(
        step.rows[row], step.positions[row, column][:, None], purpose, round, size
    )[:, 0]
