"""Orders of a grid's cells, and the tables that follow from the steps of a layout.

An order takes the grid, slowest axis first, and a seed that only ``random`` uses. It lists each
cell once, as its index in raster order. Methods that choose positions use orders too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gen.core.errors import bad_value, unknown
from gen.core.rng import CounterRNG, item_key

PlanEntry = tuple[int, int] | str  # (stream, cell), or the name of a special token


def row_cells(grid: tuple[int, ...], seed: int | None = None) -> Sequence[int]:
    """List the cells in raster order."""
    return range(math.prod(grid))


def snake_cells(grid: tuple[int, ...], seed: int | None = None) -> Sequence[int]:
    """List every other row backwards (and every other frame upwards), so that each cell is a
    neighbour of the one before."""
    cells = [0]
    for size in grid:
        cells = [
            c * size + (size - 1 - x if n % 2 else x)
            for n, c in enumerate(cells)
            for x in range(size)
        ]
    return cells


@cache
def halton_cells(grid: tuple[int, ...], seed: int | None = None) -> tuple[int, ...]:
    """List the cells as the Halton sequence (bases 2, 3, 5, ...) first visits them: far apart from
    one to the next."""
    bases, total = (2, 3, 5, 7)[: len(grid)], math.prod(grid)
    seen: dict[int, None] = {}
    i = 0
    while len(seen) < total:
        i += 1
        cell = 0
        for base, size in zip(bases, grid, strict=True):
            cell = cell * size + int(_radical_inverse(i, base) * size)
        seen.setdefault(cell)
    return tuple(seen)


def random_cells(grid: tuple[int, ...], seed: int | None = None) -> Sequence[int]:
    """List the cells in a permutation that depends on the seed alone, not on the version of
    torch."""
    rng = CounterRNG([item_key("layout", seed)])
    return (
        rng.uniform(torch.tensor([0]), torch.arange(math.prod(grid))[None], "order", None)[0]
        .argsort(stable=True)
        .tolist()
    )


def _radical_inverse(i: int, base: int) -> float:
    """Mirror the digits of i in ``base`` at the point: a number in [0, 1)."""
    x, scale = 0.0, 1.0
    while i:
        i, digit = divmod(i, base)
        scale /= base
        x += digit * scale
    return x


ORDERS = {"row": row_cells, "snake": snake_cells, "halton": halton_cells, "random": random_cells}


class Tables(NamedTuple):
    """Tables of a layout: long, one entry per position, the steps one after another. ``code`` has
    one entry per code, stream after stream."""

    pairs: Tensor  # [P, 2] stream and cell, -1 for special tokens
    step: Tensor  # [P] step of the position
    level: Tensor  # [P] number of positions of that step before it
    low: Tensor  # [P] the token ids low <= id < high are allowed
    high: Tensor
    code: Tensor  # [N] position of every code
    specials: Mapping[int, str]  # token id -> name

    @staticmethod
    def of(
        plan: Sequence[Sequence[PlanEntry]],
        cells: Sequence[int],
        spans: Mapping[int | str, tuple[int, int]],
    ) -> Tables:
        """Make the tables of a plan.

        Args:
            plan: steps, each a list of positions.
            cells: codes per stream.
            spans: low and high of every stream and special token.

        Raises:
            ValueError: a code does not occur in the plan exactly once.
        """
        positions = [position for step in plan for position in step]
        code = sorted(
            (n for n, position in enumerate(positions) if not isinstance(position, str)),
            key=lambda n: positions[n],
        )
        if [positions[n] for n in code] != [
            (q, c) for q, count in enumerate(cells) for c in range(count)
        ]:
            raise ValueError("the plan of a layout has to hold every code once")
        pairs = [(-1, -1) if isinstance(p, str) else p for p in positions]
        step, level = torch.tensor(
            [(s, n) for s, step in enumerate(plan) for n in range(len(step))]
        ).T
        low, high = torch.tensor([spans[p if isinstance(p, str) else p[0]] for p in positions]).T
        specials = {span[0]: name for name, span in spans.items() if isinstance(name, str)}
        return Tables(torch.tensor(pairs), step, level, low, high, torch.tensor(code), specials)

    def fill(self, codes: Tensor) -> Tensor:
        """Convert codes [B, N] to token ids [B, P].

        Raises:
            GenError: a code is out of range for its stream.
        """
        low, high, position = (x.to(codes.device) for x in (self.low, self.high, self.code))
        sizes = (high - low)[position]
        wrong = (codes < 0) | (codes >= sizes)
        if bool(wrong.any()):
            row, n = wrong.nonzero()[0].tolist()
            stream, cell = self.pairs[self.code[n]].tolist()
            name = f"the code of stream {stream}, cell {cell} of row {row}"
            raise bad_value(name, int(codes[row, n]), f"0 to {int(sizes[n]) - 1}")
        ids = low.repeat(len(codes), 1)
        ids[:, position] += codes
        return ids

    def take(self, ids: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Convert token ids [B, P] to codes [B, N].

        Args:
            ids: flat token ids.
            shape: shape of one sequence, which positions are named in.

        Raises:
            GenError: a token is not allowed at its position.
        """
        low, high, position = (x.to(ids.device) for x in (self.low, self.high, self.code))
        wrong = (ids < low) | (ids >= high)
        if bool(wrong.any()):
            row, n = wrong.nonzero()[0].tolist()
            where = n if len(shape) == 1 else divmod(n, shape[1])
            name = f"the token id at position {where} of row {row}"
            (stream, cell), least = self.pairs[n].tolist(), int(low[n])
            what = (
                f"{least} ({self.specials[least]})"
                if stream < 0
                else f"{least} to {int(high[n]) - 1} (stream {stream}, cell {cell})"
            )
            raise bad_value(name, int(ids[row, n]), what)
        return (ids - low)[:, position]


# --- checks


def integers(obj: Any, name: str, least: int, count: int | None = None) -> None:
    """Make a field of a frozen object a tuple of integers.

    Args:
        obj: object whose field is replaced.
        name: name of the field.
        least: smallest allowed integer.
        count: number of integers; None: at least one.

    Raises:
        GenError: the field holds something else.
    """
    value = getattr(obj, name)
    fits = isinstance(value, (list, tuple)) and all(type(x) is int and x >= least for x in value)
    if not fits or (not value if count is None else len(value) != count):
        many = "integers" if count is None else f"{count} integers, one per stream,"
        raise bad_value(name, value, f"a list of {many} of at least {least}")
    object.__setattr__(obj, name, tuple(value))  # the field of a frozen class


def choice(name: str, value: Any, options: Iterable[str]) -> None:
    """Raise ``GenError`` with the nearest option unless ``value`` is one of them."""
    if value not in options:
        raise unknown(name, value, options)


def check_whole(name: str, x: Any, shape: tuple[int, ...]) -> Tensor:
    """Return ``x`` if it is a tensor of integers [B, *shape]. Raises ``GenError`` for all else."""
    if (
        not isinstance(x, Tensor)
        or x.dtype == torch.bool
        or x.is_floating_point()
        or x.is_complex()
    ):
        raise bad_value(
            name, x.dtype if isinstance(x, Tensor) else type(x).__name__, "a tensor of integers"
        )
    if x.dim() != len(shape) + 1 or tuple(x.shape[1:]) != shape:
        raise bad_value(
            f"the shape of {name}", tuple(x.shape), f"[B, {', '.join(map(str, shape))}]"
        )
    return x
