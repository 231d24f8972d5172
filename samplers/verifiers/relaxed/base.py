"""Relaxed verifiers: more drafts are accepted, and the distribution is no longer quite the model's.

Each credits a draft x ~ q with a mass g(x) in place of p(x), accepts it with probability f(x) =
min(1, g(x) / q(x)), and at a rejection draws from norm((p - q f)+), the best residual there is for
f (see the proof); the papers draw from other residuals. r is ``relaxation``. Their presets draft by
repetition (``init: repeat``): a draft that is not random is judged by p alone, where uniform ones
have a q so small that relaxed rules would let any of them pass.

Guarantee: r = 0 is the token verifier, the same coins and the same tokens. Above it, ``bound``
bounds the total variation TV between the distribution c of the token that a step commits and p.
With E = sum (q f - p)+ it is TV(c, p) = E: Let S = sum (p - q f)+. The probability of a rejection
is R = 1 - sum q f = S - E. If S = 0, then E = -R <= 0, so E = R = 0 and c = q f = p. Otherwise c =
q f + (R / S) (p - q f)+: where q f > p, c - p = q f - p; elsewhere c - p = -(1 - R / S) (p - q f),
which is not above 0. So the positive part of c - p sums to E. No residual does better, since c >=
q f. As q f = min(q, g),

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

from gen.core.errors import GenError, bad_value
from gen.samplers.verifiers.base import Token, draft_logp

__all__ = ["Relaxed", "draft_logp"]


@dataclass(frozen=True)
class Relaxed(Token):
    """Verifier that trades the distribution for acceptance: it raises the ``credit`` of drafts.

    Attributes:
        relaxation: how much, in the verifier's own terms; 0 is not at all.
        codebook: [n, D], the vectors of the first n token ids (``attach`` sets it).
        most: the largest relaxation.
        whole: takes whole numbers only.
        needs_codebook: compares the vectors of codes.
    """

    relaxation: float = 0.0
    codebook: Tensor | None = field(default=None, repr=False, compare=False)

    relaxed = True
    most: ClassVar[float] = math.inf
    whole: ClassVar[bool] = False
    needs_codebook: ClassVar[bool] = False

    def __post_init__(self) -> None:
        r, number = self.relaxation, "a whole number" if self.whole else "a number"
        is_number = isinstance(r, (int, float)) and not isinstance(r, bool)
        if is_number and 0 <= r <= self.most and r < math.inf and not (self.whole and r != int(r)):
            return
        bounded = f"a number between 0 and {self.most:g}"
        expected = f"{number} of at least 0" if self.most == math.inf else bounded
        raise bad_value("sampler.relaxation", r, expected)

    @property
    def guarantee(self) -> str:
        return "approximate" if self.relaxation else "same_distribution"

    def attach(self, target, weights=None):
        codebook = target.space.codebook
        if codebook is not None:
            return dataclasses.replace(self, codebook=codebook.to(target.device))
        if self.needs_codebook:
            raise GenError(
                "the verifiers lantern and lantern_pp compare the vectors of codes, and this"
                " model's tokens have none; expected a model with a codebook, or another verifier"
            )
        return self

    def bound(self, logp: Tensor, logq: Tensor) -> Tensor:
        """Bounds the total variation between p and the distribution of the token that one step
        commits, for drafts from q: [..., V] each -> [...]."""
        p, q = logp.exp(), logq.exp()
        return torch.minimum((q - p).clamp_min(0), self.excess(p, q)).sum(-1)

    def excess(self, p: Tensor, q: Tensor) -> Tensor:
        """Bounds (g - p)+ of every token from above: [..., V]."""
        raise NotImplementedError
