"""Open batch: a run that items join and leave between two forward passes.

The run has room for a fixed number of items, each used once. An item gets its prompt, key, limits,
sampling parameters and canvas when it joins, waits for a row, and has its output when it has no row
any more. Nothing that it draws depends on the other items, so its tokens are those that it has
alone:

    batch = OpenBatch(sampler, target, drafts, room=256)
    items = batch.join(target, drafts, keys)     of any target that ``takes``
    batch.grow(8)                                rows for those that wait
    batch.step()                                 one forward pass of all rows
    batch.leave(items)                           rows are free before the next forward pass
    batch.run.output_of(item, seconds)           of a finished item
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from gen.core.rng import CounterRNG
from gen.core.sampler import Sampler
from gen.models.adapters.base import ModelAdapter
from gen.models.targets.base import Target
from gen.samplers.engine.stepping import SteppableRun


def may_open(sampler: Sampler, target: Target, drafts: Sequence[Target]) -> bool:
    """Return whether items can join a run of this sampler and these targets later on."""
    return sampler.opens and all(
        t.opens and not t.offset and isinstance(t.model, ModelAdapter) and not t.model.features
        for t in (target, *drafts)
    )


class OpenBatch:
    """Run of one sampler, whose items join and leave.

    Attributes:
        run: the run.
        room: number of items that can still join.

    Args:
        sampler: a sampler that ``opens``.
        target: target of the first items, whose model and token space all items share.
        drafts: targets of the draft models.
        room: number of items that can join.
        trace: whether to record every step.
        mixed: whether items may have sampling parameters of their own.
    """

    def __init__(
        self,
        sampler: Sampler,
        target: Target,
        drafts: Sequence[Target] = (),
        room: int = 256,
        trace: bool = False,
        mixed: bool = False,
    ):
        self.capacity = self.room = room
        own, *others = (_with_room(one, room) for one in (target, *drafts))
        if mixed:
            own.item_sampling = [target.sampling] * room
        self.rng = CounterRNG([0] * room, target.device)
        draft = tuple(others) if len(others) > 1 else next(iter(others), None)
        self.run: SteppableRun = sampler.begin(own, self.rng, draft=draft, trace=trace)
        # drafters may have derived targets from those that they were given
        self.targets = self.run.slots.targets
        self.run.slots.waiting = np.zeros(0, dtype=np.int64)
        self.run.drop(np.ones(room, dtype=bool))

    @property
    def rows(self) -> int:
        """Number of rows in the batch."""
        return len(self.run.slots)

    @property
    def active(self) -> set[int]:
        """Items that have a row or wait for one."""
        slots = self.run.slots
        return {*slots.items.tolist(), *slots.waiting.tolist()}

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that the rows hold."""
        return sum(t.cache.nbytes for t in self.targets if t.cache is not None)

    def takes(self, target: Target, drafts: Sequence[Target]) -> bool:
        """Return whether the items of a target, and of its draft targets, fit in."""
        pairs = self._pairs(target, drafts)
        return target.items <= self.room and all(own.takes(other) for own, other in pairs)

    def join(
        self,
        target: Target,
        drafts: Sequence[Target],
        keys: Sequence[int],
        canvas: Tensor | None = None,
    ) -> list[int]:
        """Let the items of a target wait for rows.

        Args:
            target: target that ``takes``.
            drafts: targets of the draft models, of the same items.
            keys: keys of the items' random numbers.
            canvas: tokens or latents [n, T(, C)], masked where one is wanted; None means all are.

        Returns:
            Number of each item in this batch.
        """
        first = self.capacity - self.room
        items, numbers = np.arange(first, first + target.items), np.arange(target.items)
        self.room -= target.items
        for own, other in self._pairs(target, drafts):
            own.put(items, other, numbers)
        self.rng.put(items.tolist(), keys)
        unfinished = items if canvas is None else items[self.run.put(items, canvas)]
        slots = self.run.slots
        slots.waiting = np.concatenate([slots.waiting, unfinished])
        return items.tolist()

    def _pairs(self, target: Target, drafts: Sequence[Target]) -> list[tuple[Target, Target]]:
        """Pair each of the run's targets with the one that it takes prompts from.

        A drafter that derives a target from the model's own has no draft model.
        """
        given = [target, *drafts] if drafts else [target] * len(self.targets)
        return list(zip(self.targets, given, strict=True))

    def grow(self, rows: int) -> None:
        """Give waiting items rows, until there are ``rows`` of them."""
        self.run.grow(rows)

    def step(self) -> None:
        """Run one forward pass for all rows; those that finish are given to waiting items."""
        self.run.step()

    def leave(self, items: Sequence[int]) -> None:
        """End items where they are, whether they have a row or wait for one."""
        gone = np.zeros(self.capacity, dtype=bool)
        gone[list(items)] = True
        slots = self.run.slots
        slots.waiting = slots.waiting[~gone[slots.waiting]]
        if gone[slots.items].any():
            self.run.drop(gone)


def _with_room(target: Target, items: int) -> Target:
    """Make a target of the same model with room for so many items, which holds one row."""
    roomy = target.with_room(items, target.widest(int(target.prompts.host_lengths.max())))
    roomy.shares_prefill = True
    roomy.at_most(1)
    return roomy
