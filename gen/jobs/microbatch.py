"""Microbatches of one sampler: items of similar length together, fewer after memory ran out. None
of this shows in the media.

A pipeline with continuous batching is handed several batches at once, so that no row waits for the
slowest of a batch; at most one batch is decoded at a time. A failed call is repeated batch by
batch, and then item by item.

Every item has random numbers of its own, so its result does not depend on its microbatch, except
for the last bits of floating point. ``deterministic: true`` removes those too: the microbatches
are then those of the plan, whatever is missing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gen.core.clock import SteadyClock
from gen.core.errors import GenError, describe
from gen.core.memory import free_memory
from gen.jobs.types import Lost, Stopped, Work, WorkerState
from gen.jobs.writer import Writer
from gen.pipeline.memory import Attempt


class Microbatches:
    """Items of one sampler in a shard, decoded in batches. ``due``: ids of the items to be made."""

    def __init__(
        self, worker: WorkerState, pipe: Any, works: list[Work], due: set[str], writer: Writer
    ):
        self.worker, self.pipe, self.works, self.due, self.writer = worker, pipe, works, due, writer
        self.entry, self.number = works[0].entry, works[0].item["entry"]
        self.proven = self.number in worker.proven

    def run(self) -> None:
        """Decode the due items. Raises ``Stopped`` on request, ``GenError`` or ``OSError`` for
        an error that is not about one item."""
        if self.worker.job.run.deterministic:
            size = self.entry.batch_size
            for first in range(0, len(self.works), size):
                batch = self.works[first : first + size]
                if any(w.item["id"] in self.due for w in batch):
                    self._fixed(batch)
            return
        lengths = self.pipe.prompt_lengths([w.plan for w in self.works], self.entry.sampler)
        buckets: dict[int, list[Work]] = {}
        for work, length in zip(self.works, lengths, strict=True):
            buckets.setdefault(int(length).bit_length(), []).append(work)
        for bucket in sorted(buckets):
            self._queue(buckets[bucket], bucket)

    def _queue(self, queue: list[Work], bucket: int) -> None:
        turns = self.pipe.turns(self.entry.sampler)
        apart = alone = (
            # so many items at the head run batch by batch, or one by one, to find the one that
            # fails
            0
        )
        refused: list[
            tuple[Work, GenError]
        ] = []  # what a pipeline refuses may be one prompt, or a value that no item survives
        while queue:
            size = 1 if alone else self.worker.sizes.of(self.number, bucket, self.entry.batch_size)
            batch = queue[: size if alone or apart else size * turns]
            size = min(size, len(batch))
            try:
                out, error, full = self._generate(batch, size)
            except GenError as problem:
                out, error, full = None, str(problem), False
                if len(batch) == 1:
                    refused.append((batch[0], problem))
                    apart, alone = max(0, apart - 1), max(0, alone - 1)
                    del queue[0]
                    if not alone or not queue:
                        self._refuse(refused)
                    continue
            if out is not None and refused:  # others pass
                self._refuse(refused, proven=True)
            if out is None and len(batch) > 1:
                if full and size > 1:
                    less = self.worker.sizes.lower(self.number, bucket, size)
                    self.worker.progress.note(
                        f"out of memory with {size} items at once; continuing with {less}"
                    )
                    self.worker.log.event("oom", items=size, next=less, length=bucket)
                elif len(batch) > size > 1:
                    apart = len(batch)
                else:
                    alone = len(batch)
                continue
            if out is None:
                self.writer.fail(batch, [error])
            else:
                self.proven = True
                self.worker.proven.add(self.number)
                self.writer.submit(out, [replace(w, at_once=size) for w in batch])
            apart, alone = max(0, apart - len(batch)), max(0, alone - 1)
            del queue[: len(batch)]

    def _refuse(self, refused: list[tuple[Work, GenError]], proven: bool = False) -> None:
        """Fail the refused items, or raise if no item of the sampler was ever made."""
        self.proven |= proven or "overrides" in refused[0][0].item
        if not self.proven:
            raise refused[0][1]
        self.writer.fail([w for w, _ in refused], [str(e) for _, e in refused])
        refused.clear()

    def _fixed(self, batch: list[Work]) -> None:
        """Decode a microbatch of the plan as a whole and keep the due items of it."""
        out, error, full = self._generate(batch, len(batch))
        if full:
            raise GenError(
                f"out of memory with {len(batch)} items at once ({error}); a deterministic job"
                " keeps its microbatches: choose a smaller batch_size and another out folder"
            )
        if out is not None:
            self.writer.submit(out, batch, keep=self.due)
            return
        for work in batch:  # each alone: which ones fail is then the same at every attempt
            if work.item["id"] not in self.due:
                continue
            out, error, _ = self._generate([work], 1)
            if out is None:
                self.writer.fail([work], [error])
            else:
                self.writer.submit(out, [work])

    def _generate(self, batch: list[Work], size: int) -> tuple[Any, str, bool]:
        """Decode a batch, ``size`` items at a time.

        Returns:
            The output or None, the error, and True if memory ran out.
        """
        if self.worker.stop():
            raise Stopped
        if self.writer.lost:
            raise Lost
        worker, clock = self.worker, SteadyClock()
        worker.progress.batch(batch[0].label, size)
        made: Attempt[Any] = Attempt()
        with made:
            made.result = self.pipe.generate(
                [w.plan for w in batch],
                dict(self.entry.sampler),
                dict(self.entry.sampling),
                trace=any(w.trace for w in batch),
                callback=worker.progress.step,
                start=self.entry.start,
                max_batch=size,
            )
        if made.out_of_memory:
            free_memory()
        out, full = made.result, made.out_of_memory
        error = "" if made.error is None else describe(made.error)
        said = {"error": error} if out is None else {"nfe": sum(s.nfe for s in out.stats)}
        worker.log.event(
            "batch",
            shard=self.writer.shard,
            items=len(batch),
            seconds=round(clock(), 4),
            sampler=batch[0].label,
            **said,
        )
        return out, error, full
