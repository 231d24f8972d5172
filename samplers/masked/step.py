"""What the parts of masked decoding look at: one step of some rows, what they remember, and the
means to compare places. And who sits in the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.core.rng import RNG
from gen.core.token_space import TokenSpace
from gen.samplers.engine.host import to_device


class Memory(dict[str, Tensor]):
    """What parts remember from step to step: tensors whose first axis is the rows. A row that has
    become another item remembers nothing: until a name is set again, ``get`` gives its start
    there."""

    def __init__(self) -> None:
        super().__init__()
        self._gone: dict[
            str, Tensor
        ] = {}  # of names that have not been set since, the rows that are others now: bool [b]

    def __setitem__(self, name: str, value: Tensor) -> None:
        super().__setitem__(name, value)
        self._gone.pop(name, None)

    def update(self, *args, **named: Tensor) -> None:
        for name, value in dict(*args, **named).items():
            self[name] = value

    def get(self, name: str, start: Tensor | None = None) -> Tensor | None:
        found, gone = super().get(name, start), self._gone.get(name)
        return (
            found
            if gone is None
            else torch.where(gone.view(-1, *[1] * (found.ndim - 1)), start, found)
        )

    def renew(self, rows: Tensor) -> None:
        """These rows (bool [b]) are other items."""
        self._gone = {name: rows | self._gone.get(name, rows) for name in self}

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but the given ones (bool [b])."""
        super().update({name: x[rows] for name, x in self.items()})
        self._gone = {name: x[rows] for name, x in self._gone.items()}


class Seats:
    """Which items the rows of a target are: ``rows`` long [b], and ``numbers``, as the host has
    them. One that is done makes room for the next that has anything to fill, where the target has
    some waiting, or else leaves the batch. ``num_masked_at_start`` bool [N]: which of all items
    have anything to fill.
    """

    def __init__(self, target, wanted: Tensor):
        self.target = target
        self.numbers = list(range(target.rows))
        self._waiting = [n for n, some in enumerate(wanted.tolist()) if some and n >= target.rows]
        self.rows = torch.arange(target.rows, device=wanted.device)
        self.leave(~wanted[: target.rows])

    def leave(self, done: Tensor) -> tuple[Tensor, Tensor] | None:
        """The rows ``done`` (bool [b]) make room. Which rows are others now, and which are left of
        all of them: bool [b]; None where nothing changed."""
        over = done.cpu().numpy()  # the one thing that a step waits for
        free = over.nonzero()[0]
        if not len(free):
            return None
        free, there = free[: len(self._waiting)], lambda x: to_device(x, done.device)
        new = np.zeros_like(over)
        new[free] = True
        again, left = there(new), new | ~over
        if len(free):
            following, self._waiting = self._waiting[: len(free)], self._waiting[len(free) :]
            self.numbers = [
                following.pop(0) if fresh else n
                for n, fresh in zip(self.numbers, new.tolist(), strict=True)
            ]
            self.target.replace(again, there(np.array(self.numbers)[free]))
        self.numbers = [n for n, stays in zip(self.numbers, left.tolist(), strict=True) if stays]
        self.rows = there(np.array(self.numbers, dtype=np.int64))
        if len(self.numbers) < len(over) and self.numbers:
            self.target.keep(there(left))
        return again, there(left)


@dataclass
class MaskedStep:
    """One forward call, of b rows. T places, V ids.

    ``rows`` [b]: their numbers among all items, ``step_index`` [b]: forward calls of each before
    this one. ``params``: the sampler. Of the canvas as it was before: ``canvas`` [b, T(, C)]; bool
    [b, T] ``prefilled`` (known from the start), ``masked`` (empty), ``open`` (of the block at
    work), ``fresh`` (whose law this call computed). ``law`` [b, T, V]: the final law, or
    conditioning vectors of latents.

    ``proposed_tokens`` [b, T]: an id for every masked place, and the ids that stand at the others;
    ``logp`` float64 [b, T]: the log-probability of those, under the law that
    ``knobs.confidence_on`` names; ``score`` float64 [b, T]: their order, highest first.
    ``committed_logp`` [b, T]: ``logp`` of each id when it was committed. ``left_out_logp`` [b, T]:
    ``logp`` of committed ids of the block had their own place been masked, where a remasker asked
    for it (``shadow``); 0 elsewhere.

    Of the block: ``is_first_step`` bool [b], whether this is its first step; ``steps_in_block``
    [b]: steps before this one; ``num_masked_at_start`` [b]: places that were masked when it began;
    ``progress`` float64 [b]: the share of its steps that is over after this one; ``is_last_step``
    bool [b]: whether that is all of them; ``quota`` [b]: how many places the schedule commits now,
    at least 1. ``num_prompt_tokens`` [b]: ids of the condition, in front of the canvas.

    ``memory``: what parts remember, tensors whose first axis are these rows. ``raw_logprobs()``:
    the law without temperature and filters, [b, T, V].
    """

    rng: RNG
    rows: Tensor
    step_index: Tensor
    space: TokenSpace
    params: Any
    canvas: Tensor
    prefilled: Tensor
    masked: Tensor
    fresh: Tensor
    logprobs: Tensor
    raw_logprobs: Callable[[], Tensor]
    memory: dict[str, Tensor]
    committed_logp: Tensor
    left_out_logp: Tensor | None = None
    num_prompt_tokens: Tensor | int = 0
    open: Tensor = field(init=False)
    proposed_tokens: Tensor = field(init=False)
    logp: Tensor = field(init=False)
    score: Tensor = field(init=False)
    is_first_step: Tensor = field(init=False)
    steps_in_block: Tensor = field(init=False)
    num_masked_at_start: Tensor = field(init=False)
    progress: Tensor = field(init=False)
    is_last_step: Tensor = field(init=False)
    quota: Tensor = field(init=False)

    @property
    def eligible(self) -> Tensor:
        """Masked places that may be committed now: bool [b, T]."""
        return self.masked & self.open & self.fresh

    @property
    def remaskable(self) -> Tensor:
        """Places of the block that earlier steps committed: bool [b, T]."""
        return ~self.masked & ~self.prefilled & self.open & self.fresh

    @property
    def positions(self) -> Tensor:
        """Numbers of the places, [b, T]."""
        return torch.arange(self.masked.shape[1], device=self.masked.device).expand(
            self.masked.shape
        )

    @property
    def confidence(self) -> Tensor:
        """The probability of what is proposed: float64 [b, T]."""
        return self.logp.exp()

    def confidence_logprobs(self) -> Tensor:
        """The log-probabilities [b, T, V] that confidence is read from."""
        return self.raw_logprobs() if self.params.confidence_on == "raw" else self.logprobs

    def recall(self, name: str, start: Tensor) -> Tensor:
        """What was remembered under a name, or ``start`` in a row that remembers nothing yet."""
        return self.memory.get(name, start)


def ranked(score: Tensor, among: Tensor) -> Tensor:
    """The rank [b, T] of every place, 0 for the highest score among those in ``among`` (bool [b,
    T]); the first of equal ones. The others come behind them."""
    position = torch.arange(score.shape[1], device=score.device).expand_as(score)
    # also behind scores of minus infinity
    order = score.masked_fill(~among, 0).argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, (~among).gather(1, order).long().argsort(dim=1, stable=True))
    return torch.empty_like(order).scatter_(1, order, position)


def highest(score: Tensor, among: Tensor, count: Tensor) -> Tensor:
    """The ``count`` [b] places with the highest score of those in ``among``, or all of them: bool
    [b, T]."""
    return among & (ranked(score, among) < count[:, None])


def lowest(score: Tensor, among: Tensor, count: Tensor) -> Tensor:
    """The ``count`` [b] places with the lowest score of those in ``among``, or all of them: bool
    [b, T]."""
    return highest(-score, among, count)
