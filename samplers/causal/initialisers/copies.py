"""Initialisers that know nothing of the model: uniform tokens, and copies of tokens nearby."""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.registry import register
from gen.samplers.causal.initialisers.base import Entering, Filled, Initialiser


@register("initialiser", "uniform")
class Uniform(Initialiser):
    """Uniform over the allowed tokens, with the noise of the position."""

    @classmethod
    def make(cls, sampler, target, draft):
        return cls()

    def fill(self, entering):
        logq = _uniform(entering.legal, torch.float64) if entering.compares else None
        return Filled(_drawn(entering, "token"), logq)


@register("initialiser", "random")
class Random(Initialiser):
    """A uniform token, judged as if it were certain."""

    @classmethod
    def make(cls, sampler, target, draft):
        return cls()

    def fill(self, entering):
        return Filled(_drawn(entering, "initial"))


@register("initialiser", "repeat")
class Repeat(Initialiser):
    """The token one position before."""

    def __init__(self, back: int):
        self.back = back

    @classmethod
    def make(cls, sampler, target, draft):
        return cls(1)

    def fill(self, entering):
        return Filled(_copy(entering, self.back))


@register("initialiser", "repeat_above")
class RepeatAbove(Repeat):
    """The token one row above, in grids of at least two axes."""

    @classmethod
    def make(cls, sampler, target, draft):
        grid = target.space.grid
        return cls(grid[-1] if len(grid) > 1 else 1)


def _drawn(entering: Entering, purpose: str) -> Tensor:
    """Draw uniform tokens [b, n] with the noise of their positions."""
    legal, active, first = entering.legal, entering.active, entering.first
    logq = _uniform(legal, torch.float32).expand(legal.shape)
    return entering.step.categorical(logq, purpose, active, first, shared=True)


def _uniform(legal: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logarithm of uniform distributions [b, n, V], or of all positions [1, 1, V]."""
    some = legal[:1, :1] if legal.stride()[:2] == (0, 0) else legal
    # the logarithm of true and false is a float32 by itself, in one kernel
    logs = some.log() if dtype == torch.float32 else some.to(dtype).log()
    return logs.log_softmax(-1)


def _copy(entering: Entering, back: int) -> Tensor:
    """The token ``back`` positions before, column by column since a copy may be copied again; the
    smallest legal id where there is none or it is not legal there."""
    step, legal, canvas, out = entering.step, entering.legal, entering.canvas(), []
    lowest = legal.to(torch.uint8).argmax(-1)
    for i in range(legal.shape[1]):
        at = step.positions[:, entering.first + i]
        source = at - back
        token = canvas.gather(1, source.clamp_min(0)[:, None])[:, 0]
        allowed = legal[:, i].gather(1, token[:, None])[:, 0] & (source >= 0)
        token = torch.where(allowed, token, lowest[:, i])
        old = canvas.gather(1, at[:, None])[:, 0]
        token_or_old = torch.where(entering.active[:, i], token, old)
        canvas.scatter_(1, at[:, None], token_or_old[:, None])
        out.append(token)
    return torch.stack(out, 1) if out else step.positions[:, :0]
