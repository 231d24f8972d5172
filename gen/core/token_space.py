"""What travels between the rooms: token spaces, statistics, traces, results. Letters: B batch, T
positions, V ids."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from gen.core.errors import GenError, bad_value

GUARANTEES = {
    "same_tokens": "the same tokens as the reference with that seed",
    "same_distribution": "the same distribution as the reference",
    "group": "exact over stated groups of tokens",
    "approximate": "relaxed; states its bound where it has one",
}


class Constraint(Protocol):
    """Which ids may follow which: a length that must come out, a grammar. Asked left to right, so
    by causal models alone."""

    def legal(self, history: Tensor, positions: Tensor) -> Tensor:
        """Which ids may stand at places [n, L] given the ids before each in ``history``, both long:
        bool [n, L, V].

        ``history`` [n, T] holds one id per place; entries at or after a place say nothing about it.
        Every place must be left at least one of the ids that the space has legal there, also after
        ids that should not have come: drafts are asked about before they are judged."""


@dataclass(frozen=True)
class TokenSpace:
    """The shape of what is generated: ids, or latents.

    ``grid``: sizes of the axes, slowest first; ``length`` positions in raster order.
    ``vocab_size``: V, the width of the model's logits. ``legal``: bool [T, V], which ids may stand
    where. ``mask_token_id``: the id of an empty place, if any. ``codebook``: float [n, D], the vectors of
    the first n ids (the metric of relaxed acceptance), if any. ``channels``: C, the floats of a
    latent; 0 for ids. A space of latents has V = 0, and an empty place holds NaN. ``constraint``:
    what else an id must obey, given those before it. ``eos_token_id``: the id after which a row is over:
    by law every later place holds it too, and causal samplers stop there. Masked and block models
    take it for an id like any other, and refuse a constraint. ``given`` long [k]: ids before the
    first place, where a constraint or an end begins to look (``after``).

    Raises ``GenError`` for an end that may stand at a place but not at all after it, and for
    latents with rules about ids.
    """

    grid: tuple[int, ...]
    vocab_size: int
    legal: Tensor
    mask_token_id: int | None = None
    codebook: Tensor | None = None
    channels: int = 0
    constraint: Constraint | None = None
    eos_token_id: int | None = None
    given: Tensor | None = None
    delimiters: tuple[int, ...] = ()  # ids that end a sentence or another unit of what is said
    # float [V]: minus the logarithm of how often each id comes up in what the model was trained on,
    # if that is known
    rarity: Tensor | None = None

    def __post_init__(self) -> None:
        if self.channels and self.is_history_dependent:
            raise GenError(
                "a space of latents came with a constraint or an end; expected neither, both are"
                " about ids"
            )
        for delimiter in self.delimiters:
            if not 0 <= delimiter < self.vocab_size:
                raise bad_value("delimiters", delimiter, f"ids below {self.vocab_size}")
        if self.eos_token_id is None:
            return
        if not 0 <= self.eos_token_id < self.vocab_size:
            raise bad_value("eos_token_id", self.eos_token_id, f"an id below {self.vocab_size}")
        missing = (~self.legal[:, self.eos_token_id]).nonzero()[:, 0].tolist()
        if bool(self.legal[: missing[-1] if missing else 0, self.eos_token_id].any()):
            raise GenError(
                f"end_id {self.eos_token_id} may not stand at place {missing[-1]}; expected every place"
                " after the first that it may stand at, since a row that is over holds nothing"
                " else"
            )

    @cached_property
    def reach(self) -> int:
        """How many ids a law has to run over: up to the last that may come anywhere; all of them
        where what may come depends on the ids before."""
        if self.is_history_dependent or self.rarity is not None or not self.vocab_size:
            return self.vocab_size
        return int(self.legal.any(0).nonzero()[-1]) + 1

    @cached_property
    def is_uniform(self) -> bool:
        """Whether the same ids may stand at all places."""
        return bool((self.legal == self.legal[:1]).all())

    @property
    def is_history_dependent(self) -> bool:
        """Whether what may stand at a place depends on the ids before it."""
        return self.constraint is not None or self.eos_token_id is not None

    @property
    def kind(self) -> str:
        """``codes`` or ``latents``."""
        return "latents" if self.channels else "codes"

    def blank(
        self, batch: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Zeros: ids long [B, T] or latents [B, T, C] of ``dtype``."""
        if self.channels:
            return torch.zeros(batch, self.length, self.channels, dtype=dtype, device=device)
        return torch.zeros(batch, self.length, dtype=torch.long, device=device)

    def empty(
        self, batch: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """A canvas without one known place. Raises ``ValueError`` for ids without a mask id."""
        if not self.channels and self.mask_token_id is None:
            raise ValueError("a space of ids without a mask id has no empty canvas")
        return self.blank(batch, device, dtype) + (
            float("nan") if self.channels else self.mask_token_id
        )

    def is_masked(self, canvas: Tensor) -> Tensor:
        """Which places of a canvas [B, T(, C)] are empty: bool [B, T]."""
        return canvas.isnan().any(-1) if self.channels else canvas == self.mask_token_id

    @property
    def length(self) -> int:
        return self.legal.shape[0]

    def after(self, given: Tensor | int) -> TokenSpace:
        """What is left after tokens [k(, C)], or after so many places; of the first axis, if they
        are whole slices of it, or else without axes. A space that looks back needs the tokens:
        ``ValueError`` for their number, ``GenError`` if they end.
        """
        positions = given if isinstance(given, int) else len(given)
        before = None
        if self.is_history_dependent and positions:
            if isinstance(given, int):
                raise ValueError(
                    "a space with a constraint or an end needs the given tokens themselves, not how"
                    " many they are"
                )
            if self.eos_token_id is not None and bool((given == self.eos_token_id).any()):
                position = int((given == self.eos_token_id).nonzero()[0])
                raise GenError(
                    f"what is given ends at place {position}, with id {self.eos_token_id}; expected tokens"
                    " that something may follow"
                )
            before = given if self.given is None else torch.cat([self.given.to(given), given])
        size = torch.Size(self.grid[1:]).numel()
        whole = positions % size == 0
        grid = (
            (self.grid[0] - positions // size, *self.grid[1:])
            if whole
            else (self.length - positions,)
        )
        return replace(self, grid=grid, legal=self.legal[positions:], given=before)

    def before_end(self, tokens: Tensor) -> Tensor:
        """The tokens [T(, C)] of one row as far as they go: those before its end, or all."""
        return (
            tokens
            if self.eos_token_id is None
            else tokens[: int((tokens != self.eos_token_id).long().cumprod(0).sum())]
        )

    def apply_constraint(self, legal: Tensor, history: Tensor, positions: Tensor) -> Tensor:
        """What may stand at places [n, L] given the ids before each in ``history`` [n, T], both
        long: bool [n, L, V].

        ``legal`` bool [n, L, V]: what may stand there whatever came before. Entries of ``history``
        at or after a place change nothing. Raises ``GenError`` where the constraint leaves
        nothing."""
        if self.given is not None:
            history = torch.cat([self.given.to(history).expand(len(history), -1), history], 1)
            positions = positions + len(self.given)
        if self.constraint is not None:
            legal = legal & self.constraint.legal(history, positions)
        if self.eos_token_id is not None:
            position = torch.arange(history.shape[1], device=history.device)
            first = torch.where(history == self.eos_token_id, position, len(position)).amin(
                1, keepdim=True
            )
            only = torch.arange(self.vocab_size, device=history.device) == self.eos_token_id
            legal = torch.where((first < positions)[..., None], only, legal)
        stuck = ~legal.any(-1)
        if bool(stuck.any()):
            row, column = stuck.nonzero()[0].tolist()
            at = int(positions[row, column])
            raise GenError(
                f"the constraint leaves no id for place {at} after {history[row, :at].tolist()};"
                " expected at least one"
            )
        return legal

    @staticmethod
    def codes(
        grid: tuple[int, ...],
        codebook_size: int,
        vocab_size: int,
        mask_token_id: int | None = None,
        codebook: Tensor | None = None,
    ) -> TokenSpace:
        """A grid on which every place takes the ids ``[0, codebook_size)``."""
        legal = torch.zeros(torch.Size(grid).numel(), vocab_size, dtype=torch.bool)
        legal[:, :codebook_size] = True
        return TokenSpace(tuple(grid), vocab_size, legal, mask_token_id, codebook)

    @staticmethod
    def latents(grid: tuple[int, ...], channels: int) -> TokenSpace:
        """A grid of vectors of so many floats."""
        return TokenSpace(
            tuple(grid),
            0,
            torch.zeros(torch.Size(grid).numel(), 0, dtype=torch.bool),
            channels=channels,
        )
