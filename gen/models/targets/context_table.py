"""Context tables: how often a token followed its neighbours in the grid, with back-off.

A token's neighbours are at fixed offsets in the grid: to the left, above, in the frame before. A
neighbour outside of the grid counts as a token of its own. Level k of a table counts tokens after
their first k neighbours; level 0 counts tokens. The distribution of a token after its neighbours
c_1 .. c_K is interpolated from level to level by the rule of Witten and Bell,

    q_k(x) = (n(c_1 .. c_k, x) + d(c_1 .. c_k) q_k-1(x)) / (n(c_1 .. c_k) + d(c_1 .. c_k))

n being how often and d how many different tokens followed, and q_-1 uniform over the vocabulary.
Ian H. Witten and Timothy C. Bell, "The zero-frequency problem", IEEE Transactions on Information
Theory 37 (1991).

Counts come from sequences of the model's training world, in ``table.safetensors`` beside its
weights (``python -m gen.recipes.tables``), and so never from other items. A model in memory, which
lies in no folder, begins with an empty table, whose q is uniform.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from gen.core.errors import GenError
from gen.core.registry import register
from gen.models.load.locate import locate, readable

if TYPE_CHECKING:
    from gen.models.targets.causal import CausalTarget

Offset = tuple[int, ...]
DENSE = 1 << 22  # numbers that distributions after all contexts may be
FILE, WEIGHTS, KIND = "table.safetensors", "model.safetensors", "context_table"
EMPTY = "empty"


class Level(NamedTuple):
    """Counts of one level: e pairs of a context and a token that followed it.

    Attributes:
        keys: context of each pair, in ascending order, int64 [e].
        ids: its token, int64 [e].
        counts: how often the one followed the other, float64 [e].
        most: pairs of the context that has most.
    """

    keys: Tensor
    ids: Tensor
    counts: Tensor
    most: int

    @classmethod
    def of(cls, pairs: Sequence[np.ndarray], size: int) -> Level:
        """Count pairs.

        Args:
            pairs: contexts int64 [n], the token after each int64 [n], and how often each pair was
                seen, float64 [n]; pairs may repeat.
            size: number of token ids V.
        """
        keys, ids, counts = pairs
        contexts, number = np.unique(keys, return_inverse=True)
        codes, index = np.unique(number * size + ids, return_inverse=True)
        counts = np.bincount(index, weights=counts, minlength=len(codes)).astype(np.float64)
        parts = contexts[codes // size], codes % size, counts
        keys, ids, counts = (torch.from_numpy(x) for x in parts)
        return cls(keys, ids, counts, int(np.bincount(codes // size).max(initial=0)))

    def plus(self, keys: np.ndarray, ids: np.ndarray, size: int) -> Level:
        """Count further tokens int64 [n] after contexts int64 [n], in a level of its own."""
        joined = zip(self[:3], (keys, ids, np.ones(len(keys))), strict=True)
        return Level.of([np.concatenate([old.numpy(), new]) for old, new in joined], size)

    def look_up(self, key: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Look up contexts int64 [b]: counts of every token [b, V], their sum and how many tokens
        there are [b, 1], which is 1 of a context that is not known."""
        begin, end = (torch.searchsorted(self.keys, key, right=right) for right in (False, True))
        entry = begin[:, None] + torch.arange(self.most, device=key.device)
        exists = entry < end[:, None]
        entry = entry.clamp_max(len(self.ids) - 1)
        given = torch.where(exists, self.counts[entry], 0.0)
        counts = given.new_zeros(len(key), size).scatter_add_(1, self.ids[entry], given)
        return counts, given.sum(1, keepdim=True), (end - begin).clamp_min(1)[:, None]


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
        nothing = np.zeros(0, dtype=np.int64)
        self.levels = [Level.of([nothing, nothing, nothing], size)] * (1 + len(offsets))
        self.levels = self.plus(sequences, self.where).levels

    def key(self, context: Tensor) -> Tensor:
        """Number contexts: ids [..., k], V being outside of the grid -> int64 [...]."""
        key = torch.zeros(context.shape[:-1], dtype=torch.long, device=context.device)
        for k in range(context.shape[-1]):
            key = key * (self.size + 1) + context[..., k]
        return key

    def to(self, device: torch.device) -> ContextTable:
        """Copy the counts to a device."""
        found = copy(self)
        found.levels = [
            Level(x.keys.to(device), x.ids.to(device), x.counts.to(device), x.most)
            for x in self.levels
        ]
        return found

    def plus(self, sequences: Tensor, where: Tensor) -> ContextTable:
        """Count further sequences, in a table of its own.

        Args:
            sequences: token ids int64 [n, T'], on the CPU.
            where: position of each neighbour of every position, long [T', K], -1 outside.
        """
        around, ids = gather(sequences, where, self.size).flatten(0, 1), sequences.flatten().numpy()
        found = copy(self)
        vars(found).pop("dense", None)  # of these counts alone
        found.levels = [
            level.plus(self.key(around[:, :k]).numpy(), ids, self.size)
            for k, level in enumerate(self.levels)
        ]
        return found

    @cached_property
    def dense(self) -> Tensor | None:
        """Distributions after all contexts, float32 [(V + 1) ** K, V]; None where they are many."""
        contexts = (self.size + 1) ** len(self.offsets)
        if contexts * self.size > DENSE:
            return None
        axes = (self.size + 1,) * len(self.offsets)
        every = np.indices(axes).reshape(len(axes), contexts).T  # in the order of their keys
        context = torch.from_numpy(every).to(self.levels[0].keys.device, non_blocking=True)
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
    cells = np.indices(grid).reshape(len(grid), 1, -1).T
    cells = cells + np.array(offsets, dtype=np.int64).reshape(-1, len(grid))  # [T, K, axes]
    at = np.ravel_multi_index(tuple(np.moveaxis(cells, -1, 0)), grid, mode="clip")
    inside = ((cells >= 0) & (cells < np.array(grid))).all(-1)
    return torch.from_numpy(np.where(inside, at, -1))


def gather(sequences: Tensor, where: Tensor, size: int) -> Tensor:
    """Look up the neighbours of every position: ids [n, T] -> [n, T, K], ``size`` outside."""
    found = sequences[:, where.clamp_min(0)]
    return torch.where(where < 0, size, found)


def digest(folder: Path) -> str:
    """Digest the weights of a model's folder."""
    return hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()


def write_table(
    folder: Path, sequences: Tensor, grid: tuple[int, ...], size: int, offsets: list[Offset]
) -> Path:
    """Write ``table.safetensors`` beside a model's weights.

    Args:
        folder: folder of the model.
        sequences: token ids that it generated, int64 [n, T].
        grid: sizes of the axes, slowest first.
        size: number of token ids V.
        offsets: neighbours (``choose_offsets``).
    """
    facts = {
        "kind": KIND,
        "model": digest(folder),
        "grid": json.dumps(grid),
        "size": str(size),
        "offsets": json.dumps(offsets),
    }
    dtype = torch.uint8 if size <= 256 else torch.uint16
    save_file({"tokens": sequences.to(dtype).contiguous()}, folder / FILE, facts)
    return folder / FILE


def read_table(file: Path, model: str) -> ContextTable:
    """Read a table and check that it is the model's.

    Args:
        file: table.
        model: name or folder of the model.

    Raises:
        GenError: the file cannot be read, or the table is of another model.
    """
    with readable("context table", file), safe_open(file, "pt") as opened:
        facts, tokens = opened.metadata() or {}, opened.get_tensor("tokens").long()
        if facts.get("kind") != KIND:
            raise GenError(f"{file} is no context table; expected a file of gen.recipes.tables")
        grid, size = tuple(json.loads(facts["grid"])), int(facts["size"])
        offsets = [tuple(x) for x in json.loads(facts["offsets"])]
    folder = locate(model) if model else None
    if not isinstance(folder, Path) or not (folder / WEIGHTS).is_file():
        raise GenError(
            f"table {file} came with a model that has no {WEIGHTS} to compare it with; expected"
            " sampler.table=empty"
        )
    if digest(folder) != facts["model"]:
        raise GenError(
            f"table {file} was counted with other weights than those of model {model}; expected"
            f" its own table (python -m gen.recipes.tables {model}), or sampler.table=empty"
        )
    return ContextTable(tokens, grid, size, offsets)


@register("drafting", "context_table")
def table_of(target: CausalTarget, table: str | None) -> ContextTable:
    """Find the table of a target's model.

    Args:
        target: the model.
        table: file, name of a model or its folder, or ``empty``; None for the one beside the
            model's weights, which a model in memory has not.

    Raises:
        GenError: there is none, or it is of another model or of other tokens.
    """
    size, grid = target.legal.shape[1], target.space.grid
    if table == EMPTY or (table is None and not target.name):
        nothing = torch.zeros(0, target.length, dtype=torch.long)
        axes = [tuple(-int(a == b) for b in range(len(grid))) for a in range(len(grid))]
        return ContextTable(nothing, grid, size, axes[::-1])
    file = Path(table or "")
    if not (table and file.is_file()):
        folder = locate(table or target.name)
        file = Path(folder) / FILE
        if isinstance(folder, str) or not file.is_file():
            raise GenError(
                f"model {table or target.name} has no {FILE}; expected sampler.table=empty, or a"
                f" table made by python -m gen.recipes.tables {table or target.name}"
            )
    known = target.learned
    if (KIND, file) not in known:
        known[KIND, file] = read_table(file, target.name)
    found: ContextTable = known[KIND, file]
    if found.size != size or len(found.where) < target.length:
        raise GenError(
            f"table {file} has {found.size} ids on the grid {found.grid}; expected {size} ids and"
            f" at least {target.length} positions"
        )
    return found
