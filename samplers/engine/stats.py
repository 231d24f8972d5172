"""Statistics and traces of the items of a batch, for all decoding loops.

Steps are noted as they are and counted at the end. Counting a step of a small model takes as long
as the step, and counts that lie on a device would have to be waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gen.core.stats import SampleOutput, Stats, TraceStep

Counts = int | np.ndarray | Tensor  # one number for all rows of a step, or one per row [b]


class _Note(NamedTuple):
    """Counts of one step; see ``StatsRecorder.add``."""

    items: np.ndarray
    computed: Counts
    positions: Counts
    committed: Counts
    accepted: Counts
    drafted: Counts
    ran: Counts
    partial: Counts | None


class StatsRecorder:
    """Record steps of a batch and turn them into ``Stats`` and traces per item.

    Args:
        items: number of items N.
        trace: whether traces are recorded.
        window: least number of entries of an acceptance histogram; it grows with what was seen.

    Attributes:
        traces: the steps of each item as far as they were recorded; None without ``trace``.
    """

    def __init__(self, items: int, trace: bool = False, window: int = 0):
        self.items, self.window = items, window
        self.notes: list[_Note] = []
        self.traces: list[list[TraceStep]] | None = [[] for _ in range(items)] if trace else None

    def add(
        self,
        items: np.ndarray,
        computed: Counts,
        positions: Counts,
        committed: Counts = 0,
        accepted: Counts = 0,
        drafted: Counts = 0,
        ran: Counts | None = None,
        partial: Counts | None = None,
    ) -> None:
        """Note one step. Nobody may write to the arrays afterwards.

        Args:
            items: int64 [b], the items of the rows.
            computed: positions of its own that each row sent through the model.
            positions: the same with padding.
            committed: tokens that each row committed.
            accepted: drafts that were accepted.
            drafted: drafts that were verified.
            ran: whether the step was a forward pass of the row (bool [b]); None means it was.
        partial: whether a pass computed a part of a canvas (bool [b]); None means none does.
        """
        self.notes.append(
            _Note(
                items,
                computed,
                positions,
                committed,
                accepted,
                drafted,
                1 if ran is None else ran,
                partial,
            )
        )

    def add_trace(
        self,
        item: int,
        window: Sequence[int],
        accepted: Sequence[int],
        committed: dict[int, Any],
        removed: Sequence[int] = (),
    ) -> None:
        """Note one step of one item's trace; positions are those of the grid (``TraceStep``)."""
        if self.traces is not None:
            step = TraceStep(list(window), list(accepted), committed, list(removed))
            self.traces[item].append(step)

    def output(
        self,
        tokens: Tensor,
        seconds: float,
        num_tokens: Sequence[int] | None = None,
        draft_nfe: Sequence[int] | None = None,
    ) -> SampleOutput:
        """Count all steps.

        Args:
            tokens: [N, T(, C)] of all items.
            seconds: wall time of the batch.
            num_tokens: tokens of each item, N of them; None means the sum of ``committed``.
            draft_nfe: forward passes of the draft model, N of them.
        """
        device = tokens.device
        memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        rows = _column((note.items for note in self.notes), self.notes)

        def total(name: str) -> list[int]:
            counts = _column((getattr(note, name) for note in self.notes), self.notes)
            return np.bincount(rows, counts, self.items).astype(np.int64).tolist()

        nfe, computed, positions = map(total, ("ran", "computed", "positions"))
        accepted, drafted = map(total, ("accepted", "drafted"))
        caches = any(note.partial is not None for note in self.notes)
        partial = total("partial") if caches else [None] * self.items
        made = total("committed") if num_tokens is None else list(num_tokens)
        histograms = self._histograms(rows)
        stats = [
            Stats(
                nfe=nfe[i],
                tokens=made[i],
                tokens_computed=computed[i],
                positions_computed=positions[i],
                mean_acceptance_length=made[i] / nfe[i] if nfe[i] else 0.0,
                draft_acceptance_rate=accepted[i] / drafted[i] if drafted[i] else None,
                acceptance_histogram=histograms[i] if drafted[i] else [],
                draft_nfe=None if draft_nfe is None else draft_nfe[i],
                partial_nfe=partial[i],
                seconds=seconds / len(tokens),
                peak_memory=memory,
            )
            for i in range(self.items)
        ]
        return SampleOutput(tokens, stats, self.traces)

    def last_drafts(self) -> tuple[int, int]:
        """Count the drafts of the last step, and those of them that were accepted."""
        note = self.notes[-1]
        totals = [
            int(c.sum()) if isinstance(c, (np.ndarray, Tensor)) else c * len(note.items)
            for c in (note.drafted, note.accepted)
        ]
        return totals[0], totals[1]

    def of_item(self, item: int, first: int = 0) -> StatsRecorder:
        """Return a recorder of one item alone.

        Args:
            item: the item.
            first: number of steps before its first one.
        """
        own = StatsRecorder(1, self.traces is not None, self.window)
        counts: list[list[Any]] = []
        for note in self.notes[first:]:
            rows = (note.items == item).nonzero()[0]
            if len(rows):
                counts.append([_of_row(count, int(rows[0])) for count in note[1:]])
        if counts:  # one note of as many rows as there were steps
            steps = np.zeros(len(counts), dtype=np.int64)
            own.notes = [_Note(steps, *map(_joined, zip(*counts, strict=True)))]
        if self.traces is not None:
            own.traces = [self.traces[item]]
        return own

    def _histograms(self, rows: np.ndarray) -> list[list[int]]:
        """Count, for every item, the steps after which 0, 1, ... drafts were accepted.

        Zeros at the end that are beyond ``window`` are cut off: another row's longer window shows
        in no row's counts.
        """
        accepted = _column((note.accepted for note in self.notes), self.notes)
        counts = np.zeros((self.items, int(accepted.max(initial=0)) + 1), dtype=np.int64)
        np.add.at(counts, (rows, accepted), 1)
        found = []
        for row in counts.tolist():
            longest = max((k + 1 for k, steps in enumerate(row) if steps), default=0)
            length = max(self.window, longest)
            found.append((row + [0] * length)[:length])
        return found


def _of_row(count: Counts | None, row: int) -> Any:
    """Return the count of one row of a step."""
    if count is None or isinstance(count, int):
        return count
    return int(count[row] if count.shape else count)


def _joined(counts: Sequence[int | None]) -> Any:
    """Return the counts of several steps as int64 [n]; None where they have no such count."""
    if all(count is None for count in counts):
        return None
    return np.array([count or 0 for count in counts], dtype=np.int64)


def _column(values: Iterable[Counts], notes: Sequence[_Note]) -> np.ndarray:
    """Join one count of all steps: int64 [sum of b]."""
    arrays = [np.zeros(0, dtype=np.int64)]
    numbers: list[int] = []  # of the last notes, whose rows have one number
    rows: list[int] = []
    for value, note in zip(values, notes, strict=True):
        here = value.cpu().numpy() if isinstance(value, Tensor) else value
        if not isinstance(here, np.ndarray) or not here.shape:
            numbers.append(0 if here is None else int(here))
            rows.append(len(note.items))
            continue
        if numbers:
            arrays.append(np.repeat(numbers, rows))
            numbers, rows = [], []
        arrays.append(here)
    return np.concatenate([*arrays, np.repeat(numbers, rows)]).astype(np.int64)
