"""Layouts map a grid of codes to the token sequence that a model reads, and back.

Letters: B batch, Q code streams, S positions or steps, V vocabulary.

A layout is a list of steps; a step is a list of positions. A position holds one code or a special
token such as ``eol``. A code is named by (stream q, cell c), cells counted in raster order. All
else follows from that list. Position n allows the token ids ``low[n] <= id < high[n]``:
[o_q, o_q + size_q) for a code of stream q, one id for a special token. Let p(q, c) be the position
of a code; every code has exactly one. Then

    ids[n] = low[n], and ids[p(q, c)] += codes[q, c]
    codes[q, c] = ids[p(q, c)] - low[p(q, c)]

so both directions read one table and cannot disagree. ``vocabulary`` sets o_q: 0 (``shared``:
streams use the same token ids), or the sum of the sizes before it (``offset``: one joint
vocabulary). Special tokens follow the codes.

Codes are int64 [B, Q, *grid]. Streams of unequal stride (SNAC) are a list of [B, T_q], T_q = T /
stride_q. Sequences are int64 [B, S]; ``parallel`` and ``delay`` make [B, S, Q], or [B, S * Q] with
``flat``, step by step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from gen.contracts.layout_orders import ORDERS, PlanEntry, Tables, check_whole, choice, integers
from gen.core.errors import GenError, bad_value, unknown
from gen.core.registry import register, registry
from gen.core.token_space import TokenSpace


@dataclass(frozen=True, kw_only=True)
class Layout(ABC):
    """Order of codes and special tokens in a sequence.

    A new layout is a ``plan`` under ``@register("layout", name)``.

    Attributes:
        sizes: codes per stream; its length is Q.
        grid: cells of a stream, slowest axis first.
        vocabulary: ``shared`` or ``offset``, see the module.

    Raises:
        GenError: a value is out of range.
    """

    sizes: tuple[int, ...]
    grid: tuple[int, ...]
    vocabulary: str = "shared"

    specials: ClassVar[tuple[str, ...]] = ()
    one_stream: ClassVar[bool] = False

    def __post_init__(self) -> None:
        integers(self, "sizes", 1)
        integers(self, "grid", 1)
        choice("vocabulary", self.vocabulary, ("shared", "offset"))
        if self.one_stream and len(self.sizes) != 1:
            raise bad_value(
                "sizes", self.sizes, f"one stream: {type(self).__name__} orders the cells of one"
            )

    @abstractmethod
    def plan(self) -> list[list[PlanEntry]]:
        """List the steps; every (stream, cell) occurs in them once."""

    # --- sizes

    @property
    def cells(self) -> tuple[int, ...]:
        """Number of codes of each stream."""
        return (math.prod(self.grid),) * len(self.sizes)

    @property
    def code_ids(self) -> int:
        """Number of token ids for codes: the ids [0, code_ids)."""
        return sum(self.sizes) if self.vocabulary == "offset" else max(self.sizes)

    @property
    def special_ids(self) -> dict[str, int]:
        """Token id of every special token, by name."""
        return {name: self.code_ids + n for n, name in enumerate(self.specials)}

    @property
    def vocab_size(self) -> int:
        """Vocabulary size V: codes and special tokens."""
        return self.code_ids + len(self.specials)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sequence: (S,), or (S, Q) where a step is read as a whole."""
        return tuple(self._tables.low.shape)

    @property
    def sequence_grid(self) -> tuple[int, ...]:
        """Axes of the flat sequence, slowest first: (S,) where neighbours on an axis would not be
        neighbours in the grid."""
        return tuple(self._tables.low.shape)

    def length(self, grid: Sequence[int] | None = None) -> int:
        """Return the sequence length S for this grid or another."""
        return (self if grid is None else replace(self, grid=grid)).shape[0]

    # --- tables

    @cached_property
    def _tables(self) -> Tables:
        spans: dict[int | str, tuple[int, int]] = {
            name: (i, i + 1) for name, i in self.special_ids.items()
        }
        for q, size in enumerate(self.sizes):
            first = sum(self.sizes[:q]) if self.vocabulary == "offset" else 0
            spans[q] = first, first + size
        return Tables.of(self.plan(), self.cells, spans)

    @property
    def positions(self) -> Tensor:
        """Stream and cell of every position, -1 for special tokens: long [S(, Q), 2]."""
        return self._tables.pairs.reshape(*self.shape, 2)

    @property
    def steps(self) -> Tensor:
        """Step of every position: long [S(, Q)]."""
        return self._tables.step.reshape(self.shape)

    @property
    def level(self) -> Tensor:
        """Number of positions of the same step before every position: long [S(, Q)]."""
        return self._tables.level.reshape(self.shape)

    @property
    def block_of(self) -> Tensor:
        """Block of every position: long [S]. Position n attends to position m if ``block_of[m] <=
        block_of[n]``; this default is causal."""
        return torch.arange(self.shape[0])

    @property
    def blocks(self) -> list[Tensor]:
        """Positions of every block."""
        return list(self.block_of.argsort(stable=True).split(self.block_of.bincount().tolist()))

    def legal(self, vocab_size: int | None = None) -> Tensor:
        """Return the allowed tokens of every position: bool [S(, Q), V].

        Args:
            vocab_size: V of a model with more token ids than the layout.

        Raises:
            GenError: ``vocab_size`` is smaller than the layout's.
        """
        if vocab_size is not None and vocab_size < self.vocab_size:
            raise bad_value(
                "vocab_size",
                vocab_size,
                f"at least {self.vocab_size}, the codes and special tokens of the layout",
            )
        ids, t = torch.arange(vocab_size or self.vocab_size), self._tables
        return ((ids >= t.low[:, None]) & (ids < t.high[:, None])).reshape(*self.shape, -1)

    # --- there and back

    def to_sequence(self, codes: Tensor | Sequence[Tensor]) -> Tensor:
        """Convert codes [B, Q, *grid], or a list of [B, T_q], to token ids [B, S(, Q)].

        Raises:
            GenError: a shape or a code is out of range.
        """
        return self._tables.fill(self._flatten(codes)).unflatten(1, self.shape)

    def from_sequence(self, ids: Tensor) -> Tensor | list[Tensor]:
        """Convert token ids [B, S(, Q)] to codes [B, Q, *grid], or to a list of [B, T_q].

        Raises:
            GenError: the shape differs, or a token is not allowed at its position.
        """
        check_whole("ids", ids, self.shape)
        codes = self._tables.take(ids.long().flatten(1), self.shape)
        return (
            list(codes.split(self.cells, 1))
            if self._ragged
            else codes.unflatten(1, (len(self.sizes), *self.grid))
        )

    @property
    def _ragged(self) -> bool:
        return any(n != math.prod(self.grid) for n in self.cells)

    def _flatten(self, codes: Tensor | Sequence[Tensor]) -> Tensor:
        """Concatenate the streams: long [B, N]."""
        if not self._ragged:
            return check_whole("codes", codes, (len(self.sizes), *self.grid)).long().flatten(1)
        if not isinstance(codes, (list, tuple)) or len(codes) != len(self.sizes):
            raise bad_value(
                "codes",
                type(codes).__name__,
                f"a list of {len(self.sizes)} streams of {self.cells} codes",
            )
        for q, stream in enumerate(codes):
            check_whole(f"codes[{q}]", stream, (self.cells[q],))
        if len({len(stream) for stream in codes}) != 1:
            raise bad_value(
                "the rows of the streams", [len(stream) for stream in codes], "as many in each"
            )
        return torch.cat([stream.long() for stream in codes], 1)


def make_layout(name: str, **params: Any) -> Layout:
    """Make the layout of a registered name.

    Args:
        name: registered name.
        params: its parameters.

    Raises:
        GenError: the name or a parameter is unknown (with the nearest one), or a parameter is
            missing.
    """
    cls = registry.get("layout", name)
    for param in params:
        if param not in cls.__dataclass_fields__:
            raise unknown(f"parameter of layout {name!r}:", param, cls.__dataclass_fields__)
    if lacking := [f.name for f in fields(cls) if f.default is MISSING and f.name not in params]:
        raise GenError(f"layout {name!r} lacks {', '.join(lacking)}")
    return cls(**params)


def space(
    layout: Layout,
    mask_token_id: int | None = None,
    codebook: Tensor | None = None,
    vocab_size: int | None = None,
) -> TokenSpace:
    """Make the token space of a flat layout.

    Args:
        layout: layout with one token per position.
        mask_token_id: token id beyond the layout's, which is allowed at no position.
        codebook: float [n, D], the vectors of the first n codes.
        vocab_size: vocabulary size of a model with more token ids than the layout.

    Raises:
        GenError: the layout has several tokens per step, or token ids overlap.
    """
    if len(layout.shape) > 1:
        raise bad_value(
            f"flat of the layout {type(layout).__name__}",
            False,
            "True: a token space has one token per position",
        )
    if mask_token_id is not None and mask_token_id < layout.vocab_size:
        raise bad_value(
            "mask_token_id",
            mask_token_id,
            f"at least {layout.vocab_size}: ids below are codes and special tokens of the layout",
        )
    need = layout.vocab_size if mask_token_id is None else mask_token_id + 1
    if vocab_size is not None and vocab_size < need:
        raise bad_value(
            "vocab_size",
            vocab_size,
            f"at least {need}, so that it holds codes, special tokens and mask",
        )
    if codebook is not None and len(codebook) > layout.code_ids:
        raise bad_value(
            "the number of codebook vectors",
            len(codebook),
            f"at most {layout.code_ids}, the number of codes",
        )
    width = need if vocab_size is None else vocab_size
    return TokenSpace(layout.sequence_grid, width, layout.legal(width), mask_token_id, codebook)


# --- one stream


@register("layout", "raster")
@dataclass(frozen=True, kw_only=True)
class Raster(Layout):
    """Layout of one stream, cell by cell in ``order``: row, snake, halton, or random with its
    ``seed``."""

    order: str = "row"
    seed: int | None = None

    one_stream = True
    ORDERS: ClassVar[Iterable[str]] = tuple(ORDERS)

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("order", self.order, self.ORDERS)
        if self.order != "random" and self.seed is not None:
            raise bad_value("seed", self.seed, f"none: the order {self.order!r} has no use for it")
        if self.order == "random" and type(self.seed) is not int:
            raise bad_value(
                "seed", self.seed, "an integer: the order 'random' is another one for every seed"
            )

    @property
    def sequence_grid(self) -> tuple[int, ...]:
        return self.grid if self.order == "row" else self.shape

    def plan(self) -> list[list[PlanEntry]]:
        return [[(0, c)] for c in ORDERS[self.order](self.grid, self.seed)]


@register("layout", "raster_eol")
class RasterEol(Layout):
    """Layout row by row, each row followed by an end-of-line token: h * (w + 1) positions (Emu3),
    and t * h * (w + 1) for video."""

    one_stream = True
    specials = ("eol",)

    @property
    def sequence_grid(self) -> tuple[int, ...]:
        return (*self.grid[:-1], self.grid[-1] + 1)

    def plan(self) -> list[list[PlanEntry]]:
        width = self.grid[-1]
        return [
            [p]
            for r in range(math.prod(self.grid[:-1]))
            for p in (*((0, r * width + x) for x in range(width)), "eol")
        ]


@register("layout", "frame_blocks")
class FrameBlocks(Layout):
    """Layout frame by frame (slices of the first axis). A frame is a step and a block: attention is
    bidirectional inside and causal across."""

    one_stream = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.grid) < 2:
            raise bad_value("grid", self.grid, "frames and at least one axis inside them")

    @property
    def sequence_grid(self) -> tuple[int, ...]:
        return self.grid

    @property
    def block_of(self) -> Tensor:
        return self.steps

    def plan(self) -> list[list[PlanEntry]]:
        size = math.prod(self.grid[1:])
        return [[(0, t * size + c) for c in range(size)] for t in range(self.grid[0])]


# --- several streams


@dataclass(frozen=True, kw_only=True)
class _Stepped(Layout):
    """Steps of Q tokens. ``flat``: one token per position, stream after stream within a step."""

    flat: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._tables.low.shape) if self.flat else self.sequence_grid

    @property
    def sequence_grid(self) -> tuple[int, ...]:
        return (len(self._tables.low) // len(self.sizes), len(self.sizes))


@register("layout", "parallel")
class Parallel(_Stepped):
    """Layout of one cell per step, all streams at once."""

    def plan(self) -> list[list[PlanEntry]]:
        return [[(q, c) for q in range(len(self.sizes))] for c in range(self.cells[0])]


@register("layout", "delay")
@dataclass(frozen=True, kw_only=True)
class Delay(_Stepped):
    """Delay of ``delays[q]`` steps for stream q: step s holds its cell s - delays[q], or the pad
    token where there is none.

    MusicGen has the delays (0, 1, 2, 3), Dia (0, 8, 9, ..., 15).
    """

    delays: tuple[int, ...]

    specials = ("pad",)

    def __post_init__(self) -> None:
        super().__post_init__()
        integers(self, "delays", 0, len(self.sizes))

    def plan(self) -> list[list[PlanEntry]]:
        cells, last = self.cells[0], self.cells[0] + max(self.delays)
        return [
            [(q, s - d) if 0 <= s - d < cells else "pad" for q, d in enumerate(self.delays)]
            for s in range(last)
        ]


@register("layout", "depth")
class Depth(Layout):
    """Layout of one cell per step, its streams one after another.

    A backbone predicts stream 0 (``level`` 0), a depth model the rest (CSM, Moshi, RQ-Transformer).
    The tokens are those of ``flatten`` in time-major order.
    """

    @property
    def sequence_grid(self) -> tuple[int, ...]:
        return (*self.grid, len(self.sizes))

    def plan(self) -> list[list[PlanEntry]]:
        return [[(q, c) for q in range(len(self.sizes))] for c in range(self.cells[0])]


@dataclass(frozen=True, kw_only=True)
class _Strided(Layout):
    """Streams of unequal rate. ``strides``: stream q has one code per ``strides[q]`` cells of a
    grid of one axis; None: one per cell."""

    strides: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strides is None:
            return
        integers(self, "strides", 1, len(self.sizes))
        if max(self.strides) > 1 and (
            len(self.grid) != 1 or any(self.grid[0] % s for s in self.strides)
        ):
            raise bad_value(
                "grid",
                self.grid,
                f"one axis, a multiple of every one of the strides {self.strides}",
            )

    @property
    def cells(self) -> tuple[int, ...]:
        return tuple(math.prod(self.grid) // s for s in self.strides or (1,) * len(self.sizes))

    @property
    def sequence_grid(self) -> tuple[int, ...]:
        return self.shape if self._ragged else (len(self.sizes), *self.grid)


@register("layout", "coarse_first")
class CoarseFirst(_Strided):
    """Layout stream by stream: all of stream 0, then all of stream 1, and so on. A step is a
    stream."""

    def plan(self) -> list[list[PlanEntry]]:
        return [[(q, c) for c in range(count)] for q, count in enumerate(self.cells)]


@register("layout", "flatten")
@dataclass(frozen=True, kw_only=True)
class Flatten(_Strided):
    """Layout of one code per step.

    ``order`` is ``time_major`` (a code when its time begins, coarse streams first, so that SNAC has
    1 + 2 + 4 + 8 tokens per coarse frame) or ``stream_major``.
    """

    order: str = "time_major"

    ORDERS: ClassVar[Iterable[str]] = ("time_major", "stream_major")

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("order", self.order, self.ORDERS)

    @property
    def sequence_grid(self) -> tuple[int, ...]:
        stacked = self.order == "time_major" and not self._ragged
        return (*self.grid, len(self.sizes)) if stacked else super().sequence_grid

    def plan(self) -> list[list[PlanEntry]]:
        codes = [(q, c) for q, count in enumerate(self.cells) for c in range(count)]
        if self.order == "time_major":
            strides = self.strides or (1,) * len(self.sizes)
            codes.sort(key=lambda code: (code[1] * strides[code[0]], code[0]))
        return [[code] for code in codes]
