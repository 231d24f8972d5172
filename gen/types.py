"""What travels between the rooms: token spaces, statistics, traces, results. Letters: B batch, T positions, V ids."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
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
    """The shape of what is generated.

    ``grid``: sizes of the axes, slowest first; ``length`` positions in raster order. ``vocab_size``: V, the width of the
    model's logits. ``legal``: bool [T, V], which ids may stand where. ``mask_id``: the id of an empty place, if any.
    ``codebook``: float [n, D], the vectors of the first n ids (the metric of relaxed acceptance), if any.
    """

    grid: tuple[int, ...]
    vocab_size: int
    legal: Tensor
    mask_id: int | None = None
    codebook: Tensor | None = None

    @property
    def length(self) -> int:
        return self.legal.shape[0]

    @staticmethod
    def codes(grid: tuple[int, ...], codebook_size: int, vocab_size: int, mask_id: int | None = None,
              codebook: Tensor | None = None) -> TokenSpace:
        """A grid on which every place takes the ids ``[0, codebook_size)``."""
        legal = torch.zeros(torch.Size(grid).numel(), vocab_size, dtype=torch.bool)
        legal[:, :codebook_size] = True
        return TokenSpace(tuple(grid), vocab_size, legal, mask_id, codebook)


@dataclass
class Stats:
    """What decoding one item cost.

    ``nfe``: model forward calls (both halves of guidance count as one). ``tokens``: tokens produced.
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
    seconds: float = 0.0
    peak_memory: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class TraceStep:
    """One forward call as one row saw it. Applying ``committed`` step by step gives the row's tokens.

    ``window``: grid positions whose law was computed, ``accepted``: those whose draft was kept, ``committed``: position -> id.
    ``removed``: positions emptied again (re-masked after having been committed).
    """

    window: list[int]
    accepted: list[int]
    committed: dict[int, int]
    removed: list[int] = field(default_factory=list)


@dataclass
class SampleOutput:
    """What a sampler returns: ``tokens`` long [B, T], ``stats`` per row, ``traces`` per row if asked for."""

    tokens: Tensor
    stats: list[Stats]
    traces: list[list[TraceStep]] | None = None
