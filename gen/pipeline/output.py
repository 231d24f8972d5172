"""Items that a pipeline plans, and the output that it returns."""

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
    """Plan of one output.

    Attributes:
        index: number among all items of a call.
        prompt: text as the user wrote it.
        seed: seed of this item.
        condition: typed condition of the modality, with what the prompt leaves open decided by the
            seed.
    """

    index: int
    prompt: str
    seed: int
    condition: Any = None


@dataclass
class PipelineOutput:
    """Outputs of a call, in the order of its items.

    Attributes:
        media: images, waveforms, clips, texts ... [N].
        tokens: long [N, T], or latents [N, T, C].
        stats: cost of each item.
        traces: steps of each item, if asked for.
        items: plan of each item.
        modality: name of the modality.
        model: name of the model.
        spec: the sampler: its name as the user wrote it, and the parameters that were given.
        guarantee: one of ``gen.core.token_space.GUARANTEES``.
        sampling: sampling parameters.
        device: device of the model.
        dtype: floating-point type of the model.
        start: edit, continuation or length that generation started from.
        grid: sizes of the axes of the token grid.
        model_options: options of the model.
        served: the modality as the model serves it.
        frontend: frontend that decoded the tokens.
    """

    media: list[Any]
    tokens: Tensor
    stats: list[Stats]
    traces: list[list[TraceStep]] | None
    items: list[ItemPlan]
    modality: str
    model: str
    spec: dict[str, Any]
    guarantee: str
    sampling: SamplingParams
    device: torch.device
    dtype: torch.dtype
    start: EditSpec = EditSpec()
    grid: tuple[int, ...] = ()
    model_options: Mapping[str, Any] = field(default_factory=dict)
    served: Modality | None = None
    frontend: TokenFrontend | None = None

    @cached_property
    def origin(self) -> dict[str, Any]:
        """Facts that a file of tokens holds about where they came from, shared by all items."""
        # the store is a floor above: it reads outputs, and only this asks back
        from gen.store.stored_tokens import origin_of

        return origin_of(self)

    @classmethod
    def joined(cls, parts: Sequence[PipelineOutput]) -> PipelineOutput:
        """Return one output of several that differ in their items only."""
        if len(parts) == 1:
            return parts[0]
        traces = None
        if parts[0].traces is not None:
            traces = [trace for part in parts for trace in part.traces or ()]
        return replace(
            parts[0],
            media=[media for part in parts for media in part.media],
            tokens=torch.cat([part.tokens for part in parts]),
            stats=[stats for part in parts for stats in part.stats],
            traces=traces,
            items=[item for part in parts for item in part.items],
        )

    def save(self, folder: str | Path) -> Path:
        """Write a job folder with media, manifest, config and gallery; return the gallery's path.

        Raises:
            GenError: the folder holds another job.
        """
        # jobs are floors above: they run pipelines, and only this asks back
        from gen.jobs.run import save_output

        return save_output(self, Path(folder))
