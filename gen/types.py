"""What travels between the rooms: token spaces, statistics, traces, results. Letters: B batch, T positions, V ids."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

EXACTNESS = {
    "sample": "the same tokens as the reference with that seed",
    "law": "the same distribution as the reference",
    "group": "exact over stated groups of tokens",
    "none": "relaxed; states its bound where it has one",
}


@dataclass(frozen=True)
class TokenSpace:
    """The shape of what is generated: ids, or latents.

    ``grid``: sizes of the axes, slowest first; ``length`` positions in raster order. ``vocab_size``: V, the width of the
    model's logits. ``legal``: bool [T, V], which ids may stand where. ``mask_id``: the id of an empty place, if any.
    ``codebook``: float [n, D], the vectors of the first n ids (the metric of relaxed acceptance), if any.
    ``channels``: C, the floats of a latent; 0 for ids. A space of latents has V = 0, and an empty place holds NaN.
    """

    grid: tuple[int, ...]
    vocab_size: int
    legal: Tensor
    mask_id: int | None = None
    codebook: Tensor | None = None
    channels: int = 0

    @property
    def kind(self) -> str:
        """``codes`` or ``latents``."""
        return "latents" if self.channels else "codes"

    def blank(self, batch: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
        """Zeros: ids long [B, T] or latents [B, T, C] of ``dtype``."""
        if self.channels:
            return torch.zeros(batch, self.length, self.channels, dtype=dtype, device=device)
        return torch.zeros(batch, self.length, dtype=torch.long, device=device)

    def empty(self, batch: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
        """A canvas without one known place. Raises ``ValueError`` for ids without a mask id."""
        if not self.channels and self.mask_id is None:
            raise ValueError("a space of ids without a mask id has no empty canvas")
        return self.blank(batch, device, dtype) + (float("nan") if self.channels else self.mask_id)

    def is_empty(self, canvas: Tensor) -> Tensor:
        """Which places of a canvas [B, T(, C)] are empty: bool [B, T]."""
        return canvas.isnan().any(-1) if self.channels else canvas == self.mask_id

    @property
    def length(self) -> int:
        return self.legal.shape[0]

    def after(self, places: int) -> TokenSpace:
        """What is left after so many places; of the first axis, if they are whole slices of it, or else without axes."""
        size = torch.Size(self.grid[1:]).numel()
        whole = places % size == 0
        grid = (self.grid[0] - places // size, *self.grid[1:]) if whole else (self.length - places,)
        return replace(self, grid=grid, legal=self.legal[places:])

    @staticmethod
    def codes(grid: tuple[int, ...], codebook_size: int, vocab_size: int, mask_id: int | None = None,
              codebook: Tensor | None = None) -> TokenSpace:
        """A grid on which every place takes the ids ``[0, codebook_size)``."""
        legal = torch.zeros(torch.Size(grid).numel(), vocab_size, dtype=torch.bool)
        legal[:, :codebook_size] = True
        return TokenSpace(tuple(grid), vocab_size, legal, mask_id, codebook)

    @staticmethod
    def latents(grid: tuple[int, ...], channels: int) -> TokenSpace:
        """A grid of vectors of so many floats."""
        return TokenSpace(tuple(grid), 0, torch.zeros(torch.Size(grid).numel(), 0, dtype=torch.bool), channels=channels)


@dataclass
class Stats:
    """What decoding one item cost.

    ``nfe``: model forward calls (both halves of guidance count as one). ``draft_nfe``: those of the draft model, if there is
    one. ``tokens``: tokens produced.
    ``tokens_computed``: positions sent through the model, prompt included. ``mean_acceptance_length``: tokens per forward call,
    bonus included. ``draft_acceptance_rate``: accepted / drafted tokens, ``None`` where nothing is drafted.
    ``acceptance_histogram``: entry k = forward calls after which k drafts were accepted (empty where nothing is drafted).
    ``seconds``: wall time of the batch the item was in, divided by its rows. ``peak_memory``: bytes on the device, ``None`` on CPU.
    """

    nfe: int
    tokens: int
    tokens_computed: int
    mean_acceptance_length: float
    draft_acceptance_rate: float | None = None
    acceptance_histogram: list[int] = field(default_factory=list)
    draft_nfe: int | None = None
    seconds: float = 0.0
    peak_memory: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class TraceStep:
    """One forward call as one row saw it. Applying ``committed`` step by step gives the row's tokens.

    ``window``: grid positions whose law was computed, ``accepted``: those whose draft was kept, ``committed``: position ->
    id (a latent is a list of floats).
    ``removed``: positions emptied again (re-masked after having been committed).
    """

    window: list[int]
    accepted: list[int]
    committed: dict[int, Any]
    removed: list[int] = field(default_factory=list)

    def after(self, places: int) -> TraceStep:
        """The same so many places further on."""
        move = lambda at: [n + places for n in at]
        committed = {n + places: x for n, x in self.committed.items()}
        return TraceStep(move(self.window), move(self.accepted), committed, move(self.removed))


@dataclass
class SampleOutput:
    """What a sampler returns: ``tokens`` long [B, T] or latents [B, T, C], ``stats`` per row, ``traces`` per row if asked for."""

    tokens: Tensor
    stats: list[Stats]
    traces: list[list[TraceStep]] | None = None

    def after(self, given: Tensor) -> SampleOutput:
        """The same with tokens [k] before all rows, and the places of traces behind them."""
        tokens = torch.cat([given.expand(len(self.tokens), *given.shape), self.tokens], 1)
        return replace(self, tokens=tokens, traces=self.traces and [[s.after(len(given)) for s in row] for row in self.traces])
