"""Automatic width (``window: auto`` and its kin): as many positions per forward pass as make the
time per committed token least.

    width = argmax over w of  m(w) / c(b, w)        w = 1, 4, 8, 16, ...

m(w): tokens that a row commits in a round of that width, their mean of late, counted. Wider windows
are not only computed longer, their drafts are also better when their turn comes, by how much nobody
knows beforehand. So widths are tried from 1 upwards, a few rounds each, until they are worth far
less than the best; then the best is kept, and its neighbours and one position at a time are looked
at again from time to time. What was seen is kept with the model for later calls (``Widths``).

c(b, w): cost of a round of b rows and w positions, of which there are two figures. The nominal one,
1 + b w / n, is that of a device whose pass of n positions takes twice as long as one of none. The
measured one is the lower quartile of the last few rounds of that shape, moved to where the rows are
now; a wider round never costs less. Which width is best is decided by the nominal cost, that is by
counting alone, unless the clock is clear and says that another one is more than a tenth better.
A clock is clear about two widths if the middle half of their measurements lies within a tenth
(``is_clear``): on a busy machine it is not, and every run chooses the same widths. On a CPU it is
the time of the thread, which stands still while others have the processor.

A trial whose drafts are rejected ends by counting, not by the clock: after a few steps in which the
rows accepted less than one draft in four, the best width is kept for a while, twice as long after
every such trial.

Guarantee: the distribution of what is committed stays. The width of a round depends on clocks and
on rounds that are over, never on the drafts that it lets in or leaves out: what was accepted so far
follows from tokens and distributions below the positions concerned, and a draft that is left out
takes nothing back (a draft may be submitted or not, as long as its own value has no say:
"non-anticipating"). Where a sampler's tokens do not depend on the width (coupling ``gumbel``), they
are the same tokens too; elsewhere another clock may give other tokens of the same distribution.
"""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gen.samplers.engine.causal_loop import Drafter
from gen.samplers.engine.step_context import CausalStep

AUTO = "auto"
LADDER = (1, 4, 8, 16, 32, 64, 128)
# steps after a change of width that say nothing of what it accepts: their drafts are still those of
# the width before
SETTLE = 3
ENOUGH = 24  # steps of a row at a width before it is judged: eight rows have as many in three
ROUNDS = 12  # of the batch at least
# positions, of all branches, of a pass that takes twice as long as one of none
FREE = {"cpu": 32}
FREE_ELSEWHERE = 256  # about FLOPs per byte of an accelerator's memory, in 16-bit types
CLEAR = 1.1  # upper quartile of measured seconds by the lower one: above, the clock does not tell
CLEAR_STEPS = 12  # measurements of a width without which the clock does not tell
LEAST_STEPS = 4  # of one number of rows and width, to say how far they spread
SURE = 1.1  # times the worth of the width that counting chooses: less is left to counting
WORTH = 0.75  # of the best: below, wider ones are not tried
AGAIN = 96  # steps at the best width before a neighbour is looked at again
NEAR = 0.8  # of the best: neighbours that are worth less are not looked at again
BETTER = 1.08  # times the worth of the width that was kept so far: less may be chance
# times the worth of one position at a time, of a single row and of several: less may be chance, and
# several rows come to their ends at different times, so that the last steps have a few only
MARGIN = {True: 1.12, False: 1.2}
FINE = 1e-6  # seconds that a clock has to tell apart
CHANCE = 4  # steps of a trial after which it has to show accepted drafts
LEAST = 0.25  # of them by row and step
PAUSE = 128  # steps without a trial after one that showed fewer, the first time
LAST = 24  # steps whose seconds are remembered, of each number of rows and width
LATELY = 512  # steps whose tokens are remembered, of each width


@dataclass
class Widths:
    """Measurements of each width.

    Attributes:
        seconds: seconds of steps, with the mean length of their rows, by rows and width.
        tokens: recent steps of single rows and tokens committed in them, by width.
        best: the width that was kept last.
        checked: whether one position at a time was measured again, on a machine that is warm.
        pause: steps before the next trial of another width.
        wait: the pause after the next trial whose drafts are rejected.
        free: positions of a row in a pass that takes twice as long as one of none.
        clock: gives seconds.
    """

    seconds: dict[tuple[int, int], deque[tuple[float, float]]] = field(default_factory=dict)
    tokens: dict[int, list[float]] = field(default_factory=dict)
    best: int = 0
    checked: bool = False
    pause: int = 0
    wait: int = PAUSE
    free: float = FREE["cpu"]
    clock: Callable[[], float] = time.perf_counter

    @classmethod
    def on(cls, device: torch.device, branches: int) -> Widths:
        """Return widths without measurements, for a device and so many branches of guidance."""
        free = FREE.get(device.type, FREE_ELSEWHERE) / branches
        is_fine = time.get_clock_info("thread_time").resolution <= FINE
        is_own = device.type == "cpu" and is_fine  # the host only waits for an accelerator
        return cls(free=free, clock=time.thread_time if is_own else time.perf_counter)

    def see(self, rows: int, width: int, far: float, seconds: float, tokens: float | None) -> None:
        """Record one step: ``rows`` sequences at mean length ``far`` advanced by ``tokens`` on
        average; None records the time alone."""
        self.seconds.setdefault((rows, width), deque(maxlen=LAST)).append((far, seconds))
        if tokens is not None:
            known = self.tokens.setdefault(width, [0.0, 0.0])
            known[:] = known[0] + rows, known[1] + rows * tokens
            # half of what was seen is forgotten: what is new then counts for more
            if known[0] > LATELY * rows:
                known[:] = known[0] / 2, known[1] / 2

    def rounds(self, width: int) -> float:
        """Count the recorded steps of single rows."""
        return self.tokens.get(width, (0.0,))[0]

    def gain(self, width: int) -> float:
        """Estimate the tokens that a row commits in a step. A wider window never accepts less;
        where it seems to, too few rounds were seen, or of harder positions."""
        return max(
            tokens / rounds
            for w, (rounds, tokens) in self.tokens.items()
            if w == width or (w < width and rounds >= ENOUGH)
        )

    def worth(self, rows: int, width: int, far: float) -> float:
        """Estimate tokens per second and row of a width that was measured."""
        return self.gain(width) / self.cost(rows, width, far)

    def choose(self, rows: int, widths: Sequence[int], far: float) -> int:
        """Return the best of some widths: the one that counting chooses, unless the clock is sure
        of another one."""
        counted = self.counted(rows, widths)
        clear = [w for w in widths if self.is_clear(w)]
        fast = max(clear, key=lambda w: self.worth(rows, w, far), default=counted)
        return fast if self.ratio(rows, fast, counted, far) > SURE else counted

    def counted(self, rows: int, widths: Sequence[int]) -> int:
        """Return the best of some widths by counted tokens and the nominal cost alone."""
        return max(widths, key=lambda w: self.gain(w) / self.nominal(rows, w))

    def ratio(self, rows: int, width: int, other: int, far: float) -> float:
        """Estimate how many times as much a width is worth as another one."""
        if self.is_clear(width, other):
            return self.worth(rows, width, far) / self.worth(rows, other, far)
        cheaper = self.nominal(rows, other) / self.nominal(rows, width)
        return self.gain(width) / self.gain(other) * cheaper

    def nominal(self, rows: int, width: int) -> float:
        """Return the nominal cost of a round, in passes of no position."""
        return 1 + rows * width / self.free

    def is_clear(self, *widths: int) -> bool:
        """Return True if the measured seconds of each of these widths, in relation to the lower
        quartile of their number of rows, spread so little that they can be compared."""
        return all(self._spread(width) <= CLEAR for width in widths)

    def _spread(self, width: int) -> float:
        relative: list[float] = []
        for (rows, w), seen in self.seconds.items():
            if w == width and len(seen) >= LEAST_STEPS:
                moved = _moved(seen, self.slope(rows), seen[-1][0])
                relative += [seconds / moved[len(moved) // 4] for seconds in moved]
        if len(relative) < CLEAR_STEPS:
            return float("inf")
        relative.sort()
        low, high = (relative[len(relative) * n // 4] for n in (1, 3))
        return high / low

    def cost(self, rows: int, width: int, far: float) -> float:
        """Seconds of a round: as seen, and no less than of a narrower one; or between those of
        rounds of fewer and of more positions in all; or, beyond the most positions that were seen,
        in proportion, as on a device that is full."""
        slope = self.slope(rows)
        if (rows, width) in self.seconds:
            known = ((w, seen) for (r, w), seen in self.seconds.items() if r == rows)
            return max(_low(seen, slope, far) for w, seen in known if w <= width)
        points = sorted((r * w, _low(seen, slope, far)) for (r, w), seen in self.seconds.items())
        positions, sizes = rows * width, [n for n, _ in points]
        at = bisect.bisect_left(sizes, positions)
        if at == len(points):
            return points[-1][1] * positions / sizes[-1]
        (n, low), (m, high) = points[max(at - 1, 0)], points[at]
        return high if at == 0 or n == m else low + (high - low) * (positions - n) / (m - n)

    def slope(self, rows: int) -> float:
        """Estimate the seconds that a step gets longer per token that its rows have: the keys
        and values of all of them are read every time, however many positions are computed. The
        least squares of all widths with a level of their own each.
        """
        up = down = 0.0
        for (r, _), seen in self.seconds.items():
            if r == rows and len(seen) > 1:
                far, seconds = (np.array(x) for x in zip(*seen, strict=True))
                up += float(((far - far.mean()) * (seconds - seconds.mean())).sum())
                down += float(((far - far.mean()) ** 2).sum())
        return max(up / down, 0.0) if down > 0 else 0.0


def _low(seen: deque[tuple[float, float]], slope: float, far: float) -> float:
    """Estimate the seconds of a step at ``far`` tokens on an otherwise idle machine: the lower
    quartile of some steps, each moved there."""
    return _moved(seen, slope, far)[len(seen) // 4]


def _moved(seen: deque[tuple[float, float]], slope: float, far: float) -> list[float]:
    """Move the seconds of some steps to ``far`` tokens, and sort them."""
    return sorted(max(seconds + slope * (far - at), 0.2 * seconds) for at, seconds in seen)


class AutoWidth:
    """Width of every step, at most ``most`` positions of ``rows`` rows, by measurements that it
    adds to. ``clock``: gives seconds; None for the one of ``known``."""

    def __init__(
        self, known: Widths, rows: int, most: int, clock: Callable[[], float] | None = None
    ):
        self.known, self.rows, self.clock = known, rows, clock or known.clock
        self.arms = [w for w in LADDER if w <= most] or [1]
        self.since: float | None = None  # the end of the last round
        self.far = 0.0  # tokens that the rows have on average
        self.stay, self.calm, self.turn, self.settled = 0, 0, 0, 0
        self.accepted = 0.0  # drafts of a row since the width changed
        self.best = self.arms[0]  # the width that pays
        self.width = self._next()

    def observe(self, width: int, starts: np.ndarray, tokens: np.ndarray) -> None:
        """Record a step of ``width`` positions, in which the rows, which had ``starts`` [b] tokens,
        committed ``tokens`` [b]."""
        known, before, self.since = self.known, self.since, self.clock()
        self.far, mean = float(starts.mean()), float(tokens.mean())
        if len(tokens) != self.rows:  # what went on between the steps is not a step's time
            self.rows, before = len(tokens), None
        # the first step of all brings the prompt along
        if before is not None and width == self.width:
            counted = mean if self.settled >= SETTLE else None
            known.see(self.rows, width, self.far, self.since - before, counted)
            is_judged = width != self.best and known.rounds(width) >= ENOUGH
            if is_judged and self._ratio(width, self.best) < WORTH:
                self.stay = 0  # known already to be worth far less
        self.settled, self.stay = self.settled + 1, self.stay - 1
        known.pause = max(known.pause - 1, 0)
        self._count(width, mean - 1)
        if self.stay <= 0 and (then := self._next()) != self.width:
            self.settled, self.accepted, self.width = 0, 0.0, then

    def _count(self, width: int, accepted: float) -> None:
        """Count drafts that a row accepted, and end a trial that shows too few of them."""
        known = self.known
        self.accepted += accepted
        if width <= self.best or width != self.width or self.settled < CHANCE:
            return
        if self.accepted < LEAST * self.settled:
            known.pause, known.wait, self.stay = known.wait, 2 * known.wait, 0
        elif known.rounds(width) >= ENOUGH:
            known.wait = PAUSE

    def _next(self) -> int:
        """Choose a width, and for how many steps it stays."""
        known, arms = self.known, self.arms
        tried = [w for w in arms if known.rounds(w) >= ENOUGH]
        self.stay = SETTLE + max(ROUNDS, -(-ENOUGH // max(self.rows, 1)))
        if not tried:
            return arms[0]
        best = known.choose(self.rows, tried, self.far)
        if known.best in tried and self._ratio(best, known.best) < BETTER:
            best = known.best
        self.best = best
        wider = arms[arms.index(tried[-1]) + 1 :]
        if wider and not known.pause and self._ratio(tried[-1], best) >= WORTH:
            return wider[0]
        if not known.checked:
            known.checked = True
            return arms[0]
        if self._ratio(best, arms[0]) < MARGIN[self.rows == 1]:
            best = arms[0]
        self.best = known.best = best
        self.calm += self.stay
        if known.pause or self.calm <= AGAIN * (1 if best > arms[0] else 3):
            self.stay *= 2
            return best
        self.calm, self.turn = 0, self.turn + 1
        at = arms.index(best)
        other = arms[(0, max(at - 1, 0), min(at + 1, len(arms) - 1))[self.turn % 3]]
        doubtful = self.turn % 3 == 0 or known.rounds(other) < 3 * ENOUGH
        return other if other != best and (doubtful or self._ratio(other, best) >= NEAR) else best

    def _ratio(self, width: int, other: int) -> float:
        return self.known.ratio(self.rows, width, other, self.far)


class Windowed(Drafter):
    """Drafter whose window is a number, or the width that pays."""

    def __init__(self, window: int | AutoWidth):
        self._window = window

    @property
    def window(self) -> int:
        return self._window if isinstance(self._window, int) else self._window.width

    def observe(self, step: CausalStep, num_accepted: np.ndarray, num_drafted: np.ndarray) -> None:
        if not isinstance(self._window, int):
            self._window.observe(
                step.positions.shape[1], step.starts, np.minimum(num_accepted + 1, step.widths)
            )


def width_of(value: int | str, sampler: Any, target: Any) -> int | AutoWidth:
    """Resolve a drafter's window: ``value`` itself, or an ``AutoWidth`` where it is ``auto``."""
    if isinstance(value, int):
        return min(value, target.length)
    return auto_width(sampler, target)


def auto_width(sampler: Any, target: Any, most: int | None = None) -> AutoWidth:
    """Make the width that a timed sampler finds while it decodes; what is seen is kept in the
    target's ``learned``. ``most``: most positions of a step; None for those of the target."""
    fresh = Widths.on(target.device, target.branches)
    known = target.learned.setdefault((sampler, target.sampling), fresh)
    return AutoWidth(known, target.rows, target.length if most is None else most)
