"""Lane: works of one model, sampler and token space, which share batches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from gen.engine.open_batch import OpenBatch
from gen.engine.stats import EngineStats
from gen.engine.ticket import RUNNING
from gen.engine.work import Work

ROOM = 256  # items of a batch, after which another one begins


@dataclass
class Member:
    """Item of a batch.

    Attributes:
        work: work that it belongs to.
        row: its number there.
        began: time at which it got a row; None before.
    """

    work: Work
    row: int
    began: float | None = None


class Lane:
    """Queue and batches of works that may share them.

    Attributes:
        queue: works that are in no batch yet.
        max_rows: rows of all batches together; less than asked for where memory ran out.
        idle_since: time since which the lane has nothing to do.

    Args:
        model: id of the model.
        max_rows: rows of all batches together.
        stats: counts to add to.
        is_kept: keep the last batch for a while when there is nothing to do; those of structured
            output hold a constraint, and go.
    """

    def __init__(self, model: str, max_rows: int, stats: EngineStats, is_kept: bool):
        self.model, self.max_rows, self.stats, self.is_kept = model, max_rows, stats, is_kept
        self.queue: deque[Work] = deque()
        self.batches: list[LaneBatch] = []
        self.idle_since = time.monotonic()

    @property
    def rows(self) -> int:
        """Rows of all batches."""
        return sum(batch.open.rows for batch in self.batches)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values of all batches."""
        return sum(batch.open.nbytes for batch in self.batches)

    @property
    def is_idle(self) -> bool:
        """True where there is nothing to do."""
        return not self.queue and not any(batch.members for batch in self.batches)

    def works(self) -> Iterator[Work]:
        """List the works in the queue and in batches."""
        found = {id(work): work for work in self.queue}
        for batch in self.batches:
            found |= {id(m.work): m.work for m in batch.members.values()}
        yield from list(found.values())

    def admit(self, free_bytes: float) -> None:
        """Take works from the queue into the newest batch, and give items rows.

        Args:
            free_bytes: bytes that keys and values of further rows may take.
        """
        while self.queue:
            work = self.queue.popleft()
            if not self.batches or not self.batches[-1].takes(work):
                self.batches.append(LaneBatch(work, self.model, self.stats))
            self.batches[-1].join(work)
        for batch in self.batches:
            size = batch.open.rows + self.max_rows - self.rows
            if batch.open.rows and batch.open.nbytes:
                more = int(free_bytes * batch.open.rows / batch.open.nbytes)
                size = min(size, batch.open.rows + more)
            batch.grow(max(size, 0 if self.rows else 1))

    def remove(self, work: Work) -> None:
        """Take a work out of the queue or its batch."""
        if work in self.queue:
            self.queue.remove(work)
        for batch in self.batches:
            batch.remove(work)

    def drop_spent(self) -> None:
        """Drop batches that are done and will take no more items."""
        self.batches = [
            b for n, b in enumerate(self.batches) if b.members or n == len(self.batches) - 1
        ]


class LaneBatch:
    """Batch and the works of its items.

    Attributes:
        open: the batch.
        members: unfinished items by their number.
    """

    def __init__(self, work: Work, model: str, stats: EngineStats):
        prepared, request = work.prepared, work.prepared.request
        self.stats, self.model = stats, model
        self.members: dict[int, Member] = {}
        self.open = OpenBatch(
            request.sampler,
            prepared.target,
            prepared.drafts,
            max(ROOM, len(request.items)),
            work.ticket.traced,
            work.mixed,
        )

    def takes(self, work: Work) -> bool:
        """Return whether the items of a work fit in."""
        return self.open.takes(work.prepared.target, work.prepared.drafts)

    def join(self, work: Work) -> None:
        """Let the items of a work wait for rows; requests take turns."""
        prepared, batch = work.prepared, self.open
        numbers = batch.join(prepared.target, prepared.drafts, work.keys, work.canvas)
        self.members |= {n: Member(work, row) for row, n in enumerate(numbers)}
        slots = batch.run.slots
        # the first item of each request, then the second ones
        turns = sorted(slots.waiting.tolist(), key=lambda n: self.members[n].row)
        slots.waiting = np.array(turns, dtype=np.int64)

    def grow(self, rows: int) -> None:
        """Give waiting items rows, until there are ``rows`` of them."""
        self.open.grow(rows)
        self._begin()

    def _begin(self) -> None:
        """Note which items have a row."""
        now = time.monotonic()
        for number in self.open.run.slots.items.tolist():
            member = self.members[number]
            if member.began is None:
                member.began, member.work.ticket.state = now, RUNNING
                self.stats.move(member.work.ticket, waiting=-1, running=1)

    def step(self, finish: Callable[[Work], None]) -> None:
        """Run one forward pass; hand works to ``finish`` whose items are all decoded."""
        stepped = self.open.run.slots.items.tolist()
        if stepped:
            self.open.step()
            self._count(stepped)
            self._send(stepped)
        self._begin()
        active = self.open.active
        for number in [n for n in self.members if n not in active]:
            member = self.members.pop(number)
            began = member.began or time.monotonic()
            made = self.open.run.output_of(number, time.monotonic() - began)
            member.work.outputs[member.row] = made
            self.stats.add(member.work.ticket.model, tokens=made.stats[0].tokens)
            self._count_out(member)
            if member.work.is_decoded:
                finish(member.work)

    def remove(self, work: Work) -> None:
        """End the items of a work where they are."""
        gone = [n for n, member in self.members.items() if member.work is work]
        self.open.leave(gone)
        for number in gone:
            self._count_out(self.members.pop(number))

    def _count_out(self, member: Member) -> None:
        """Count an item out that has a row, or waits for one."""
        had_row = member.began is not None
        self.stats.move(member.work.ticket, waiting=had_row - 1, running=-int(had_row))

    def _count(self, stepped: list[int]) -> None:
        drafted, accepted = self.open.run.recorded.last_drafts()
        self.stats.add(self.model, steps=1, nfe=len(stepped), drafted=drafted, accepted=accepted)

    def _send(self, stepped: list[int]) -> None:
        """Send what the step has added to the rows of works that receive media or steps."""
        run = self.open.run
        heard = [
            n
            for n in stepped
            if self.members[n].work.media is not None
            or self.members[n].work.ticket.on_step is not None
        ]
        if not heard:
            return
        (tokens, known), steps = run.progress(heard), run.recorded.traces
        for row, number in enumerate(heard):
            member = self.members[number]
            work = member.work
            if work.media is not None:
                work.media.step(member.row, tokens[row], known[row])
            if work.ticket.on_step is not None:
                assert steps is not None, "a work that hears of steps has them recorded"
                work.send_step(member.row, tokens[row], known[row], steps[number])
