"""Statistics and traces of the items of a batch, for all decoding loops.

Steps are noted as they are and counted at the end. Counting a step of a small model takes as long
as the step, and counts that lie on a device would have to be waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gen.core.stats import SampleOutput, Stats, TraceStep

Counts = int | np.ndarray | Tensor  # one number for all rows of a step, or one per row [b]


class Note(NamedTuple):
    """Counts of one step.

    Attributes:
        items: int64 [b], the items of the rows.
        computed: positions of its own that each row sent through the model.
        positions: the same with padding.
        committed: tokens that each row committed.
        accepted: drafts that were accepted.
        drafted: drafts that were verified.
        ran: whether the step was a forward pass of the row (bool [b]); None means it was.
        partial: whether a pass computed a part of a canvas (bool [b]); None means none does.
    """

    items: np.ndarray
    computed: Counts
    positions: Counts
    committed: Counts = 0
    accepted: Counts = 0
    drafted: Counts = 0
    ran: Counts | None = None
    partial: Counts | None = None


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
        self.notes: list[Note] = []
        self.traces: list[list[TraceStep]] | None = [[] for _ in range(items)] if trace else None

    def add(self, items: np.ndarray, *counts: Any, **named: Any) -> None:
        """Note one step by the fields of ``Note``. Nobody may write to the arrays afterwards."""
        self.notes.append(Note(items, *counts, **named))

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
        """Count all steps of the items with ``tokens`` [N, T(, C)], which took ``seconds`` of wall
        time together. ``num_tokens``: tokens of each item; None for the sum of ``committed``.
        ``draft_nfe``: forward passes of the draft model, of each item."""
        device = tokens.device
        memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        columns = _columns(self.notes)
        rows = columns["items"]
        total = {
            name: np.bincount(rows, column, self.items).astype(np.int64).tolist()
            for name, column in columns.items()
        }
        nfe, accepted, drafted = total["ran"], total["accepted"], total["drafted"]
        made = total["committed"] if num_tokens is None else list(num_tokens)
        histograms = self._histograms(rows, columns["accepted"])
        stats = [
            Stats(
                nfe=nfe[i],
                tokens=made[i],
                tokens_computed=total["computed"][i],
                positions_computed=total["positions"][i],
                mean_acceptance_length=made[i] / nfe[i] if nfe[i] else 0.0,
                draft_acceptance_rate=accepted[i] / drafted[i] if drafted[i] else None,
                acceptance_histogram=histograms[i] if drafted[i] else [],
                draft_nfe=None if draft_nfe is None else draft_nfe[i],
                partial_nfe=total["partial"][i] if "partial" in total else None,
                seconds=seconds / len(tokens),
                peak_memory=memory,
            )
            for i in range(self.items)
        ]
        return SampleOutput(tokens, stats, self.traces)

    def last_drafts(self) -> tuple[int, int]:
        """Count the drafts of the last step, and those of them that were accepted."""
        last = _columns(self.notes[-1:])
        return int(last["drafted"].sum()), int(last["accepted"].sum())

    def of_item(self, item: int) -> StatsRecorder:
        """Return a recorder of one item alone."""
        own = StatsRecorder(1, self.traces is not None, self.window)
        columns = _columns([note for note in self.notes if item in note.items])
        is_own = columns.pop("items") == item
        counts = {name: column[is_own] for name, column in columns.items()}
        # one note of as many rows as there were steps
        own.notes = [Note(np.zeros(int(is_own.sum()), dtype=np.int64), **counts)]
        if self.traces is not None:
            own.traces = [self.traces[item]]
        return own

    def _histograms(self, rows: np.ndarray, accepted: np.ndarray) -> list[list[int]]:
        """Count, for every item, the steps after which 0, 1, ... drafts were accepted.

        Zeros at the end that are beyond ``window`` are cut off: another row's longer window shows
        in no row's counts.
        """
        most = max(self.window, 1 + int(accepted.max(initial=0)))
        counts = np.zeros((self.items, most), dtype=np.int64)
        np.add.at(counts, (rows, accepted), 1)
        longest = np.where(counts > 0, np.arange(most) + 1, 0).max(1).clip(self.window)
        return [row[:n] for row, n in zip(counts.tolist(), longest.tolist(), strict=True)]


def _columns(notes: Sequence[Note]) -> dict[str, np.ndarray]:
    """Join each count of some steps, int64 [sum of b]; without ``partial`` where none has it."""
    sizes = [len(note.items) for note in notes]
    named = dict(zip(Note._fields, zip(*notes, strict=True), strict=True)) if notes else {}
    columns = {name: np.zeros(0, dtype=np.int64) for name in Note._fields[:-1]}
    for name, values in named.items():
        if name != "partial" or any(value is not None for value in values):
            absent = int(name == "ran")
            columns[name] = _column([absent if x is None else x for x in values], sizes)
    return columns


def _column(values: Sequence[Counts], sizes: Sequence[int]) -> np.ndarray:
    """Join one count of all steps, which have so many rows: int64 [sum of b]."""
    if {*map(type, values)} <= {int, bool}:  # takes less time than arrays do
        return np.repeat(np.array(values, dtype=np.int64), sizes)
    arrays = [x.cpu().numpy() if isinstance(x, Tensor) else x for x in values]
    pairs = zip(arrays, sizes, strict=True)
    return np.concatenate([x if np.ndim(x) else np.full(n, x) for x, n in pairs]).astype(np.int64)
