"""Runs that can be stepped: decoding loops that a search advances, looks into and forks.

A search (``gen.samplers.search``) decodes P particles of every item side by side. Each particle is
an item of the target of its own, so the loop knows nothing of searches:

    run.advance(block)   every unfinished particle goes on: a masked run by ``block`` forward
                         passes, a causal run to the next position that is a multiple of ``block``
    run.peek()           what each particle has so far, and an estimate of the rest
    run.take(ancestors)  particle i goes on from the state of particle ancestors[i], cache included
    run.drop(particles)  these particles end where they are
    run.is_over          no particle has anything left to decode
    run.output()         tokens, statistics and traces of all particles

What a search decides from a particle depends on nothing that the particle draws later: a causal run
stops exactly at the block's end, whatever its window. A particle that goes on from another one's
state gets noise of its own, that of a new branch of its item, so copies diverge and no noise that a
decision has seen is used again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from torch import Tensor

from gen.core.errors import GenError

if TYPE_CHECKING:
    from gen.core.rng import RNG
    from gen.core.stats import SampleOutput
    from gen.samplers.engine.rows import BatchSlots, SlotChange
    from gen.samplers.engine.stats import StatsRecorder

T = TypeVar("T")


@dataclass(frozen=True)
class Estimate:
    """What N particles have so far.

    Attributes:
        tokens: tokens [N, T], or latents [N, T, C]. At positions that are not known they are an
            estimate: of a masked model the likeliest tokens, of a causal model none (any number).
        known: positions that are committed, bool [N, T].
        is_whole: whether unknown positions hold an estimate.
    """

    tokens: Tensor
    known: Tensor
    is_whole: bool


class SteppableRun(ABC):
    """Run of a decoding loop that a search controls.

    Attributes:
        slots: the unfinished particles; each is an item of the target.
        rng: random numbers, a key per particle.
    """

    slots: BatchSlots
    rng: RNG

    @property
    def is_over(self) -> bool:
        """Tell whether no particle has anything left to decode."""
        return not len(self.slots)

    @abstractmethod
    def step(self) -> None:
        """Run one forward pass for all unfinished particles."""

    @abstractmethod
    def advance(self, block: int) -> None:
        """Take every unfinished particle further by a block; see the module."""

    @abstractmethod
    def peek(self) -> Estimate:
        """Return what every particle has so far."""

    @abstractmethod
    def follow(self, ancestors: np.ndarray, live: SlotChange) -> None:
        """Give particles the state of their ancestors, int64 [N], where it is kept by item and not
        by row. ``live``: change of the rows, which are the unfinished particles after it."""

    def grow(self, size: int) -> None:
        """Give items that wait (``BatchSlots.waiting``) rows, until there are ``size`` of them."""
        change = self.slots.grow(size)
        if change is not None:
            self.extend(change)

    def put(self, items: np.ndarray, canvas: Tensor) -> np.ndarray:
        """Give items [n] that have no row a canvas to start from: tokens or latents [n, T(, C)],
        masked where one is wanted. Returns the items with anything to generate, bool [n]. Raises
        ``GenError``: the run decodes from left to right, or a token is not allowed."""
        raise GenError(f"{type(self).__name__} decodes from left to right and takes no canvas")

    @abstractmethod
    def extend(self, change: SlotChange) -> None:
        """Begin the rows that the batch has grown by; see ``BatchSlots.grow``."""

    @abstractmethod
    def progress(self, items: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the tokens [n, T(, C)] of items so far, and which positions are known, bool
        [n, T]."""

    @property
    @abstractmethod
    def recorded(self) -> StatsRecorder:
        """Return the recorder of statistics and traces."""

    @abstractmethod
    def output_of(self, item: int, seconds: float) -> SampleOutput:
        """Return tokens, statistics and trace of one item, which has no row any more and took
        ``seconds`` of wall time."""

    @abstractmethod
    def output(self) -> SampleOutput:
        """Return tokens, statistics and traces of all particles.

        The costs of a particle are its own, not those of its ancestors.
        """

    def take(self, ancestors: np.ndarray, rng: RNG) -> None:
        """Let every particle go on from the state of an ancestor, int64 [N]. ``rng``: random
        numbers from now on, a key per particle; that of a particle that goes on from another one is
        new, since it may come to the same rounds again."""
        row_of = np.full(len(ancestors), -1)
        row_of[self.slots.items] = np.arange(len(self.slots))
        rows = row_of[ancestors]
        living = (rows >= 0).nonzero()[0]
        self.rng = rng
        self.follow(ancestors, self.slots.continue_as(rows[living], living))

    def drop(self, particles: np.ndarray) -> None:
        """End particles (bool [N]) where they are; their tokens stay as they are."""
        rows = (~particles[self.slots.items]).nonzero()[0]
        if len(rows) < len(self.slots):
            change = self.slots.continue_as(rows, self.slots.items[rows])
            self.follow(np.arange(len(particles)), change)


def by_ancestor(values: Sequence[T], ancestors: np.ndarray) -> list[T]:
    """Return the value of every particle's ancestor."""
    return [values[a] for a in ancestors.tolist()]
