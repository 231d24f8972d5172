"""What a pipeline plans and returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gen.contracts.frontend import TokenFrontend
from gen.contracts.modality import Modality
from gen.core.edit_spec import EditSpec
from gen.core.sampling_params import SamplingParams
from gen.core.stats import Stats, TraceStep


@dataclass(frozen=True)
class ItemPlan:
    """One medium to make. ``index``: its place among all items; ``prompt``: as the user wrote it;
    ``seed``: its own; ``condition``: what the prompt states, and what the seed decides of what it
    leaves open."""

    index: int
    prompt: str
    seed: int
    condition: Any = None


@dataclass
class PipelineOutput:
    """``media`` and ``items`` in the same order, ``tokens`` long [N, T] or latents [N, T, C],
    ``stats`` and ``traces`` (if asked for) per item."""

    media: list[Any]
    tokens: Tensor
    stats: list[Stats]
    traces: list[list[TraceStep]] | None
    items: list[ItemPlan]
    modality: str
    model: str
    spec: dict[str, Any]  # the sampler: its name as the user wrote it, and the knobs that were said
    guarantee: str
    sampling: SamplingParams
    device: torch.device
    dtype: torch.dtype
    start: EditSpec = EditSpec()
    grid: tuple[int, ...] = ()
    model_options: Mapping[str, Any] = field(default_factory=dict)
    served: Modality | None = None  # the modality as the model serves it
    frontend: TokenFrontend | None = None  # what made the media of the tokens

    @cached_property
    def origin(self) -> dict[str, Any]:
        """What a file of tokens says of where they came from, as far as all items share it."""
        from gen.store.stored_tokens import origin_of

        return origin_of(self)

    @classmethod
    def joined(cls, parts: Sequence[PipelineOutput]) -> PipelineOutput:
        """One output of several that differ in their items only."""
        if len(parts) == 1:
            return parts[0]

        def every(name):
            return [x for p in parts for x in getattr(p, name)]

        traces = every("traces") if parts[0].traces is not None else None
        return replace(
            parts[0],
            media=every("media"),
            tokens=torch.cat([p.tokens for p in parts]),
            stats=every("stats"),
            traces=traces,
            items=every("items"),
        )

    def save(self, folder: str | Path) -> Path:
        """Writes a job folder: media, manifest, config, gallery. Returns the gallery's path."""
        from gen.jobs.run import save_output

        return save_output(self, Path(folder))
