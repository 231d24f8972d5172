"""Tail initialisers: the first draft of a position that has just entered the window, and the
distribution it was drawn from.

    uniform       uniform over the legal ids, with the noise of the position; q = 1 / |legal|.
                  Acceptance 1 - TV(p, q)
    random        a uniform id taken as it is (q = one-hot); acceptance p(x), about 1 / V. The SJD
                  paper's default
    repeat        the token one position before (q = one-hot). The paper's ``repeat_horizon``
    repeat_above  the token one row above (q = one-hot), in grids of at least two axes

All of them are exact: what counts is that q is the distribution the draft came from.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.samplers.engine.causal_loop import CausalStep
from gen.samplers.verifiers.base import POINT, UNIFORM


def _uniform_logp(legal: Tensor) -> Tensor:
    some = (
        legal[:1, :1] if legal.stride()[:2] == (0, 0) else legal
    )  # one row says it for all positions
    return some.log().log_softmax(-1).expand(legal.shape)


@register("initialiser", "uniform")
def uniform(
    step: CausalStep,
    canvas: Callable[[], Tensor],
    space: TokenSpace,
    first: int,
    legal: Tensor,
    active: Tensor,
) -> tuple[Tensor, int]:
    """Drafts [b, n] of the n columns from ``first`` on, and their kind. ``canvas()`` [b, T]:
    committed tokens and drafts so far. ``legal`` bool [b, n, V]; ``active`` [b, n] marks the
    columns that are really entering."""
    return step.categorical(_uniform_logp(legal), "token", active, first, shared=True), UNIFORM


@register("initialiser", "random")
def random(step, canvas, space, first, legal, active):
    return step.categorical(_uniform_logp(legal), "initial", active, first, shared=True), POINT


@register("initialiser", "repeat")
def repeat(step, canvas, space, first, legal, active):
    return _copy(step, canvas(), first, legal, active, 1), POINT


@register("initialiser", "repeat_above")
def repeat_above(step, canvas, space, first, legal, active):
    return (
        _copy(step, canvas(), first, legal, active, space.grid[-1] if len(space.grid) > 1 else 1),
        POINT,
    )


def _copy(
    step: CausalStep, canvas: Tensor, first: int, legal: Tensor, active: Tensor, back: int
) -> Tensor:
    """The token ``back`` positions before, column by column since a copy may be copied again; the
    smallest legal id where there is none or it is not legal there."""
    out = []
    lowest = legal.to(torch.uint8).argmax(-1)
    for i in range(legal.shape[1]):
        at = step.positions[:, first + i]
        source = at - back
        token = canvas.gather(1, source.clamp_min(0)[:, None])[:, 0]
        allowed = legal[:, i].gather(1, token[:, None])[:, 0] & (source >= 0)
        token = torch.where(allowed, token, lowest[:, i])
        canvas.scatter_(
            1,
            at[:, None],
            torch.where(active[:, i], token, canvas.gather(1, at[:, None])[:, 0])[:, None],
        )
        out.append(token)
    return torch.stack(out, 1) if out else step.positions[:, :0]
