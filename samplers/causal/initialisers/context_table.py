"""Context tables: how often a token followed its neighbours in the grid, with back-off.

A token's neighbours are at fixed offsets in the grid: to the left, above, in the frame before. A
neighbour outside of the grid counts as a token of its own. Level k of a table counts tokens after
their first k neighbours; level 0 counts tokens. The distribution of a token after its neighbours
c_1 .. c_K is interpolated from level to level by the rule of Witten and Bell,

    q_k(x) = (n(c_1 .. c_k, x) + d(c_1 .. c_k) q_k-1(x)) / (n(c_1 .. c_k) + d(c_1 .. c_k))

n being how often and d how many different tokens followed, and q_-1 uniform over the vocabulary.
Counts may be fractions. Ian H. Witten and Timothy C. Bell, "The zero-frequency problem", IEEE
Transactions on Information Theory 37 (1991).
"""

from __future__ import annotations

import itertools
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

Offset = tuple[int, ...]
DENSE = 1 << 22  # numbers that distributions after all contexts may be


@dataclass
class Level:
    """Counts of one level, by context.

    Attributes:
        keys: contexts in ascending order, int64 [m].
        starts: first entry of each context and the end of the last, int64 [m + 1].
        ids: token of each entry, int64 [e].
        counts: its count, float64 [e].
        totals: counts of each context together, float64 [m].
        most: entries of the context that has most.
    """

    keys: Tensor
    starts: Tensor
    ids: Tensor
    counts: Tensor
    totals: Tensor
    most: int

    @classmethod
    def of(
        cls, keys: np.ndarray, tokens: np.ndarray, size: int, weights: np.ndarray | None = None
    ) -> Level:
        """Count tokens after contexts.

        Args:
            keys: contexts, int64 [n].
            tokens: the token after each, int64 [n].
            size: number of token ids V.
            weights: count of each pair, float64 [n]; None for 1.
        """
        contexts, number = np.unique(keys, return_inverse=True)
        pairs, number = np.unique(number * size + tokens, return_inverse=True)
        counts = np.bincount(number, weights=weights, minlength=len(pairs))
        starts = np.searchsorted(pairs, np.arange(len(contexts) + 1) * size)
        totals = np.bincount(pairs // size, weights=counts, minlength=len(contexts))
        return cls(
            torch.from_numpy(contexts),
            torch.from_numpy(starts),
            torch.from_numpy(pairs % size),
            torch.from_numpy(counts.astype(np.float64)),
            torch.from_numpy(totals),
            int(np.diff(starts).max(initial=0)),
        )

    def plus(self, keys: np.ndarray, tokens: np.ndarray, size: int) -> Level:
        """Count further tokens int64 [n] after contexts int64 [n], in a level of its own."""
        known = self.keys.repeat_interleave(self.starts.diff()).numpy()
        weights = np.concatenate([self.counts.numpy(), np.ones(len(keys))])
        return Level.of(
            np.concatenate([known, keys]),
            np.concatenate([self.ids.numpy(), tokens]),
            size,
            weights,
        )

    def to(self, device: torch.device) -> Level:
        """Copy the level to a device."""
        return Level(
            self.keys.to(device),
            self.starts.to(device),
            self.ids.to(device),
            self.counts.to(device),
            self.totals.to(device),
            self.most,
        )

    def look_up(self, key: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Look up contexts int64 [b]: counts of every token [b, V], their sum and how many tokens
        there are [b, 1], which is 1 of a context that is not known."""
        counts = torch.zeros(len(key), size, dtype=torch.float64, device=key.device)
        if not len(self.keys):
            return counts, counts[:, :1], counts[:, :1] + 1
        row = torch.searchsorted(self.keys, key).clamp_max(len(self.keys) - 1)
        is_known = self.keys[row] == key
        begin, end = self.starts[row], self.starts[row + 1]
        entry = begin[:, None] + torch.arange(self.most, device=key.device)
        exists = is_known[:, None] & (entry < end[:, None])
        entry = entry.clamp_max(len(self.ids) - 1)
        counts.scatter_add_(1, self.ids[entry], torch.where(exists, self.counts[entry], 0.0))
        total = torch.where(is_known, self.totals[row], 0.0)
        return counts, total[:, None], torch.where(is_known, end - begin, 1)[:, None]


class ContextTable:
    """Table of one model.

    Args:
        sequences: token ids int64 [n, T], in raster order of the grid.
        grid: sizes of the axes, slowest first.
        size: number of token ids V.
        offsets: neighbours, the one that is counted from level 1 on first.
    """

    def __init__(self, sequences: Tensor, grid: tuple[int, ...], size: int, offsets: list[Offset]):
        self.grid, self.size, self.offsets = grid, size, offsets
        self.where = neighbours(grid, offsets)
        around = gather(sequences, self.where, size).flatten(0, 1)
        flat = sequences.reshape(-1).numpy()
        self.levels = [
            Level.of(self.key(around[:, :k]).numpy(), flat, size) for k in range(len(offsets) + 1)
        ]

    def key(self, context: Tensor) -> Tensor:
        """Number contexts: ids [..., k], V being outside of the grid -> int64 [...]."""
        key = torch.zeros(context.shape[:-1], dtype=torch.long, device=context.device)
        for k in range(context.shape[-1]):
            key = key * (self.size + 1) + context[..., k]
        return key

    def to(self, device: torch.device) -> ContextTable:
        """Copy the counts to a device."""
        found = copy(self)
        found.levels = [level.to(device) for level in self.levels]
        return found

    def plus(self, sequences: Tensor, where: Tensor) -> ContextTable:
        """Count further sequences, in a table of its own.

        Args:
            sequences: token ids int64 [n, T'], on the CPU.
            where: position of each neighbour of every position, long [T', K], -1 outside.
        """
        around, flat = gather(sequences, where, self.size).flatten(0, 1), sequences.reshape(-1)
        found = copy(self)
        vars(found).pop("dense", None)  # of these counts alone
        found.levels = [
            level.plus(self.key(around[:, :k]).numpy(), flat.numpy(), self.size)
            for k, level in enumerate(self.levels)
        ]
        return found

    @cached_property
    def dense(self) -> Tensor | None:
        """Distributions after all contexts, float32 [(V + 1) ** K, V]; None where they are many."""
        contexts = (self.size + 1) ** len(self.offsets)
        if contexts * self.size > DENSE:
            return None
        keys = torch.arange(contexts, device=self.levels[0].keys.device)
        weights = (self.size + 1) ** torch.arange(len(self.offsets) - 1, -1, -1, device=keys.device)
        context = keys[:, None] // weights % (self.size + 1)
        return torch.cat([self.interpolated(part).float() for part in context.split(1 << 12)])

    def distribution(self, context: Tensor) -> Tensor:
        """Compute q of every token after neighbours [b, K]: float64 [b, V]."""
        if self.dense is not None:
            return self.dense[self.key(context)].double()
        return self.interpolated(context)

    def interpolated(self, context: Tensor) -> Tensor:
        """Interpolate q from level to level: float64 [b, V] after neighbours [b, K]."""
        q = torch.full(
            (len(context), self.size), 1 / self.size, dtype=torch.float64, device=context.device
        )
        for k, level in enumerate(self.levels):
            counts, total, distinct = level.look_up(self.key(context[:, :k]), self.size)
            q = (q * distinct + counts) / (total + distinct)
        return q


def neighbours(grid: tuple[int, ...], offsets: list[Offset]) -> Tensor:
    """Find the position at each offset from every position: long [T, K], -1 outside of the grid."""
    cells = np.stack(np.meshgrid(*(np.arange(n) for n in grid), indexing="ij"), -1)
    cells = cells.reshape(-1, len(grid))
    sizes = np.array(grid)
    found = []
    for offset in offsets:
        cell = cells + np.array(offset)
        inside = ((cell >= 0) & (cell < sizes)).all(1)
        at = np.ravel_multi_index(tuple(np.clip(cell, 0, sizes - 1).T), grid)
        found.append(np.where(inside, at, -1))
    where = np.array(found, dtype=np.int64).reshape(len(offsets), len(cells))
    return torch.from_numpy(np.ascontiguousarray(where.T))


def gather(sequences: Tensor, where: Tensor, size: int) -> Tensor:
    """Look up the neighbours of every position: ids [n, T] -> [n, T, K], ``size`` outside."""
    found = sequences[:, where.clamp_min(0)]
    return torch.where(where < 0, size, found)


def candidates(grid: tuple[int, ...]) -> list[Offset]:
    """List offsets to positions that come before: at most two cells along an axis, or one each
    along two."""
    axes = len(grid)
    steps = [s for s in itertools.product((-2, -1, 0, 1), repeat=axes) if 0 < sum(map(abs, s)) <= 2]
    return [s for s in steps if next(x for x in s if x) < 0]


def choose_offsets(
    sequences: Tensor, grid: tuple[int, ...], size: int, most: int = 4
) -> list[Offset]:
    """Choose neighbours one by one: each time the one that makes every second sequence likeliest
    under the table of the others.

    Args:
        sequences: token ids int64 [n, T].
        grid: sizes of the axes, slowest first.
        size: number of token ids V.
        most: neighbours at most.
    """
    chosen: list[Offset] = []
    best = -np.inf
    while len(chosen) < most:
        scores = {
            offset: log_likelihood(
                ContextTable(sequences[::2], grid, size, [*chosen, offset]), sequences[1::2]
            )
            for offset in candidates(grid)
            if offset not in chosen
        }
        offset = max(scores, key=scores.__getitem__)
        if scores[offset] <= best:
            break
        chosen, best = [*chosen, offset], scores[offset]
    return chosen


def log_likelihood(table: ContextTable, sequences: Tensor) -> float:
    """Mean log-probability of the tokens of sequences int64 [n, T]."""
    context = gather(sequences, table.where, table.size).flatten(0, 1)
    q = table.distribution(context)
    return float(q.gather(1, sequences.reshape(-1, 1)).log().mean())
