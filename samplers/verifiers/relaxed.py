"""Relaxed verifiers: more drafts are accepted, and the law is no longer quite the model's.

Each credits a draft x ~ q with a mass g(x) in place of p(x), accepts it with probability f(x) =
min(1, g(x) / q(x)), and at a rejection draws from norm((p - q f)+), the best residual there is for
f (see the proof). r is ``relaxation``:

    lantern      p(x) and what its nearest codes have, nearest first, as long as that sums to at
                 most r
    lantern_pp   the same, to at most r p(x)
    gsd          q(x) p(C) / q(C), C: x and the r ids next to it in the ranking by p, if they are as
                 likely and look alike
    typical      q(x) if r p(x) > min(0.09, 0.3 exp(-H(p))) and that is more than p(x); the paper's
                 rule is r = 1
    cool         (1 + r exp(-0.7 i)) p(x), i: the draft's place in the window
    distance     what the ids within r of x have (ids that are ordered bins)

Jang et al. (arXiv 2410.03355) and Park et al. (arXiv 2502.06352) for lantern and lantern_pp; So et
al., "Grouped Speculative Decoding for Autoregressive Image Generation" (ICCV 2025); typical: Cai et
al., "Medusa" (arXiv 2401.10774); cool: Cool-SD; distance: Wang et al., "Spec-VLA" (arXiv
2507.22424). Their rejections draw from other residuals.

Guarantee: r = 0 is the token verifier, the same coins and the same tokens. Above it, ``bound``
bounds the total variation TV between the law c of the token that a step commits and p. With E = sum
(q f - p)+ it is TV(c, p) = E: Let S = sum (p - q f)+. The probability of a rejection is R = 1 - sum
q f = S - E. If S = 0, then E = -R <= 0, so E = R = 0 and c = q f = p. Otherwise c = q f + (R / S)
(p - q f)+: where q f > p, c - p = q f - p; elsewhere c - p = -(1 - R / S) (p - q f), which is not
above 0. So the positive part of c - p sums to E. No residual does better, since c >= q f. As q f =
min(q, g),

    TV(c, p) = sum (min(q, g) - p)+ <= sum min((q - p)+, (g - p)+) <= TV(q, p)

and ``bound`` is the middle sum with an upper bound of (g - p)+, ``excess``, in it. So a step is
never further from p than the draft was; with a draft that was not random it is at most r off for
lantern; at most r for lantern_pp and cool. A sequence is off by at most the sum over its steps,
averaged over what came before each.

Where g >= p, so for all of them but gsd, the residual is that of the token verifier: (p - q f)+ =
(p - q)+.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gen.core.errors import GenError, bad_value
from gen.core.registry import register
from gen.samplers.verifiers.base import PositionVerifier, normalised

_tables = (
    WeakIdKeyDictionary()
)  # codebook -> the nearest codes of every code; takes seconds for large ones


@dataclass(frozen=True)
class Relaxed(PositionVerifier):
    """``relaxation``: how much, 0 being not at all. ``codebook`` [n, D]: the vectors of the first n
    ids (``on`` sets it)."""

    relaxation: float = 0.0
    codebook: Tensor | None = field(default=None, repr=False, compare=False)

    relaxed = True
    most: ClassVar[float] = math.inf
    whole: ClassVar[bool] = False
    needs_codebook: ClassVar[bool] = False

    def __post_init__(self) -> None:
        r = self.relaxation
        number = isinstance(r, (int, float)) and not isinstance(r, bool)
        if not number or not 0 <= r <= self.most or r == math.inf or (self.whole and r != int(r)):
            kind = "a whole number of at least 0" if self.whole else "a number of at least 0"
            raise bad_value(
                "sampler.relaxation",
                r,
                kind if self.most == math.inf else f"a number between 0 and {self.most:g}",
            )

    @property
    def guarantee(self) -> str:
        return "approximate" if self.relaxation else "same_distribution"

    def on(self, space, device="cpu"):
        if space.codebook is None:
            if self.needs_codebook:
                raise GenError(
                    "the verifiers lantern and lantern_pp compare the vectors of codes, and this"
                    " model's tokens have none; expected a model with a codebook, or another"
                    " verifier"
                )
            return self
        return dataclasses.replace(self, codebook=space.codebook.to(device))

    def acceptance(self, proposal, logp):
        return (self.credit(proposal, logp) - proposal.log_mass()).clamp_max(0).exp()

    def credit(self, proposal, logp: Tensor) -> Tensor:
        """log g of the drafts: [b, L]; ``logp`` [b, L, V]."""
        raise NotImplementedError

    def bound(self, logp: Tensor, logq: Tensor) -> Tensor:
        """An upper bound of the total variation between p and the law of the token that one step
        commits, for drafts from q: [..., V] each -> [...]."""
        p, q = logp.exp(), logq.exp()
        return torch.minimum((q - p).clamp_min(0), self.excess(p, q)).sum(-1)

    def excess(self, p: Tensor, q: Tensor) -> Tensor:
        """At least (g - p)+ of every id: [..., V]."""
        raise NotImplementedError


def _log_p(proposal, logp: Tensor) -> Tensor:
    return logp.gather(-1, proposal.tokens[..., None])[..., 0]


def _possible(q: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and ids [m] of what q [n, V] has some mass on; elsewhere than on a CPU of everything,
    since counting it would be waiting for it."""
    if q.device.type == "cpu":
        return (q > 0).nonzero(as_tuple=True)
    n, size = q.shape
    return torch.arange(n, device=q.device).repeat_interleave(size), torch.arange(
        size, device=q.device
    ).repeat(n)


def nearest_codes(codebook: Tensor, most: int) -> Tensor:
    """Codebook [n, D] -> [n, k], the k = min(most, n - 1) others of every code, nearest (L2)
    first."""
    known = _tables.setdefault(codebook, {})
    if most not in known:
        codes, k, out = codebook.float(), min(most, len(codebook) - 1), []
        for start in range(0, len(codes), 1024):
            far = torch.cdist(codes[start : start + 1024], codes)
            row = torch.arange(len(far), device=far.device)
            far[row, start + row] = math.inf
            out.append(far.topk(k, -1, largest=False).indices)
        known[most] = torch.cat(out)
    return known[most]


@register("verifier", "lantern")
@dataclass(frozen=True)
class Lantern(Relaxed):
    """``relaxation``: mass taken from the nearest codes at most."""

    relaxation: float = 0.1
    most = 1.0
    needs_codebook = True
    neighbours: ClassVar[int] = 1000

    def credit(self, proposal, logp):
        log_p, table = _log_p(proposal, logp), nearest_codes(self.codebook, self.neighbours)
        around = table[proposal.tokens.clamp_max(len(table) - 1)]
        mass = logp.gather(-1, around).exp()
        taken = torch.where(mass.cumsum(-1) <= self.limit(log_p.exp())[..., None], mass, 0).sum(-1)
        # ids beyond the codebook are no codes and have no neighbours
        return torch.logaddexp(log_p, torch.where(proposal.tokens < len(table), taken, 0).log())

    def limit(self, p: Tensor) -> Tensor:
        return torch.full_like(p, self.relaxation)

    def excess(self, p, q):
        return torch.minimum(self.limit(p), 1 - p)


@register("verifier", "lantern_pp")
@dataclass(frozen=True)
class LanternPP(Lantern):
    """``relaxation``: mass taken from the nearest codes at most, as a multiple of the draft's
    own."""

    relaxation: float = 10.0
    most = math.inf

    def limit(self, p):
        return self.relaxation * p


@register("verifier", "gsd")
@dataclass(frozen=True)
class GSD(Relaxed):
    """``relaxation``: neighbours in the ranking, one half of them (rounded down) more likely than
    the draft. They count if their p differs by less than 0.15 and, where there are codes, if these
    are near: the squared distance is below a quarter of the mean one in the codebook. (The paper's
    0.5 is a quarter of the mean one of directions.)
    """

    relaxation: float = 13
    whole = True
    close: ClassVar[float] = 0.15
    near: ClassVar[float] = 0.25

    def credit(self, proposal, logp):
        b, length, size = logp.shape
        p, tokens = logp.exp().reshape(-1, size), proposal.tokens.reshape(-1)
        row = torch.arange(len(p), device=p.device)
        ids, member = self._cluster(p, self._ranking(p), row, tokens)
        q = proposal.mass_of(ids.view(b, length, ids.shape[-1])).flatten(0, 1)
        share = (p.gather(1, ids) * member).sum(-1) / (q * member).sum(-1)
        # a draft alone in its cluster has the mass p(x) to the last bit
        log_g = proposal.log_mass() + share.view(b, length).log()
        return torch.where(member.sum(-1).view(b, length) == 1, _log_p(proposal, logp), log_g)

    def residual(self, proposal, logp):
        """norm((p - q f)+): here f may be below min(1, p/q), so that of the token verifier will not
        do."""
        log_p, q = logp.flatten(0, 1), proposal.mass().flatten(0, 1)
        p, drawn = log_p.exp(), torch.minimum(log_p.exp(), q)
        ranking = self._ranking(p)
        for row, x in zip(*(i.split(1 << 14) for i in _possible(q)), strict=True):
            ids, member = self._cluster(p, ranking, row, x)
            mine = q[row, x]
            g = (
                mine
                * (p[row[:, None], ids] * member).sum(-1)
                / (q[row[:, None], ids] * member).sum(-1)
            )
            g = torch.where(member.sum(-1) == 1, drawn[row, x], torch.minimum(mine, g))
            drawn[row, x] = torch.where(mine > 0, g, mine)
        return normalised((p - drawn).clamp_min_(0), log_p).view_as(logp)

    def _ranking(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """Ids in falling order of p, and the rank of every id: [n, V] each."""
        order = p.argsort(dim=-1, descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(
            -1, order, torch.arange(p.shape[-1], device=p.device).expand_as(order)
        )
        return order, rank

    def _cluster(
        self, p: Tensor, ranking: tuple[Tensor, Tensor], row: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Candidates [m, r + 1] of the clusters of ids x [m] under the laws p[row], and which of
        them are in."""
        order, rank = ranking
        r = int(self.relaxation)
        offset = torch.arange(-(r // 2), r - r // 2 + 1, device=p.device)
        position = rank[row, x][:, None] + offset
        ids = order[row[:, None], position.clamp(0, p.shape[-1] - 1)]
        member = (
            (position >= 0)
            & (position < p.shape[-1])
            & ((p[row[:, None], ids] - p[row, x][:, None]).abs() < self.close)
        )
        if self.codebook is not None:
            codes = self.codebook.float()
            n = len(codes)
            apart = (
                (codes[ids.clamp_max(n - 1)] - codes[x.clamp_max(n - 1)][:, None]).square().sum(-1)
            )
            mean = 2 * (codes - codes.mean(0)).square().sum(-1).mean()
            member &= (apart < self.near * mean) & (ids < n) & (x < n)[:, None]
        return ids, member | (offset == 0)

    def excess(self, p, q):
        # q(x) / q(C) <= 1, so g - p is at most what r others have, each less than p(x) + 0.15
        return torch.minimum(self.relaxation * (p + self.close), 1 - p)


@register("verifier", "typical")
@dataclass(frozen=True)
class Typical(Relaxed):
    """``relaxation``: drafts count as typical of p that are so many times less likely than Medusa's
    rule asks for."""

    relaxation: float = 8.0
    epsilon: ClassVar[float] = 0.09
    delta: ClassVar[float] = 0.3

    def credit(self, proposal, logp):
        log_p = _log_p(proposal, logp)
        typical = self.relaxation * log_p.exp() > self.threshold(logp.exp())
        return torch.where(typical, torch.maximum(log_p, proposal.log_mass()), log_p)

    def threshold(self, p: Tensor) -> Tensor:
        entropy = torch.special.entr(p).sum(-1)
        return (self.delta * (-entropy).exp()).clamp_max(self.epsilon)

    def excess(self, p, q):
        return torch.where(
            self.relaxation * p > self.threshold(p)[..., None], (q - p).clamp_min(0), 0
        )


@register("verifier", "cool")
@dataclass(frozen=True)
class Cool(Relaxed):
    """``relaxation``: how much more mass the first draft of a window is credited with; later ones
    less and less."""

    relaxation: float = 6.0
    decay: ClassVar[float] = 0.7

    def credit(self, proposal, logp):
        position = torch.arange(logp.shape[1], dtype=logp.dtype, device=logp.device)
        return _log_p(proposal, logp) + torch.log1p(
            self.relaxation * (-self.decay * position).exp()
        )

    def excess(self, p, q):
        return self.relaxation * p


@register("verifier", "distance")
@dataclass(frozen=True)
class Distance(Relaxed):
    """``relaxation``: how many bins away an id still counts as the draft's own. The paper's 9 is
    for 256 bins; of fewer, each is worth more."""

    relaxation: float = 1
    whole = True

    def credit(self, proposal, logp):
        reach, size = int(self.relaxation), logp.shape[-1]
        offset = torch.arange(1, reach + 1, device=logp.device)
        at = proposal.tokens[..., None] + torch.cat([-offset, offset])
        mass = logp.gather(-1, at.clamp(0, size - 1)).exp()
        return torch.logaddexp(
            _log_p(proposal, logp), torch.where((at >= 0) & (at < size), mass, 0).sum(-1).log()
        )

    def excess(self, p, q):
        reach = int(self.relaxation)
        return torch.nn.functional.pad(p, (reach, reach)).unfold(-1, 2 * reach + 1, 1).sum(-1) - p
