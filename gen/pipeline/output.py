"""Items that a pipeline plans, and the output that it returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, overload

import torch
from torch import Tensor

from gen.contracts.condition import Condition
from gen.contracts.frontend import TokenFrontend
from gen.contracts.modality import Modality
from gen.contracts.plain_spec import plain_spec
from gen.core.edit_spec import EditSpec
from gen.core.errors import GenError, bad_type
from gen.core.logprobs import ItemLogprobs, as_dicts
from gen.core.sampling_params import SamplingParams
from gen.core.stats import Stats, TraceStep
from gen.pipeline.candidates import CandidateOutput
from gen.pipeline.html import as_html


@dataclass(frozen=True)
class ItemPlan:
    """Plan of one output.

    Attributes:
        index: number among all items of a call.
        prompt: text as the user wrote it.
        seed: seed of this item.
        condition: typed condition of the modality, with what the prompt leaves open decided by the
            seed.
        max_new_tokens: tokens that this item may have, where they differ between items.
        given: condition as the user gave it; None where the prompt is all of it.
        adapter: name of the adapter that this item is computed with; None for none.
    """

    index: int
    prompt: str
    seed: int
    condition: Any = None
    max_new_tokens: int | None = None
    given: Condition | None = None
    adapter: str | None = None


MEDIA_KINDS = ("image", "audio", "video")


@dataclass(repr=False)
class PipelineOutput:
    """Outputs of a call, in the order of its items.

    Attributes:
        media: images, waveforms, clips, texts ... [N].
        tokens: long [N, T], or latents [N, T, C].
        stats: cost of each item.
        traces: steps of each item, if asked for.
        logprobs: log-probabilities of each item's tokens up to and including the eos token, if
            asked for; None stands for tokens of a given prefix. The last batch of an interrupted
            call has none.
        candidates: what a search looked at for each item, level by level; None without a search.
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
        interrupted: whether a callback ended the call. The media then show the known tokens, and
            positions without one hold any allowed token. Statistics of the last batch count its
            forward passes and known tokens only, and items of later batches are absent.

    An output behaves like a list of its media: ``len(out)``, ``out[0]``, ``for image in out``; a
    slice of it is an output. ``out.images``, ``out.audios``, ``out.videos``, ``out.texts``,
    ``out.motions`` and ``out.actions`` are the media under the name of their kind.
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
    interrupted: bool = False
    logprobs: list[ItemLogprobs] | None = None
    candidates: list[list[CandidateOutput]] | None = None

    def __len__(self) -> int:
        return len(self.media)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.media)

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> PipelineOutput: ...

    def __getitem__(self, index: int | slice) -> Any:
        """Return the media of one item, or the output of several."""
        if not isinstance(index, slice):
            return self.media[index]
        return replace(
            self,
            media=self.media[index],
            tokens=self.tokens[index],
            stats=self.stats[index],
            traces=None if self.traces is None else self.traces[index],
            items=self.items[index],
            logprobs=None if self.logprobs is None else self.logprobs[index],
            candidates=None if self.candidates is None else self.candidates[index],
        )

    @property
    def images(self) -> list[Any]:
        """Images, where the modality makes images."""
        return self._media_named("images")

    @property
    def audios(self) -> list[Any]:
        """Waveforms, where the modality makes sound."""
        return self._media_named("audios")

    @property
    def videos(self) -> list[Any]:
        """Clips, where the modality makes video."""
        return self._media_named("videos")

    @property
    def texts(self) -> list[str]:
        """Texts, where the modality makes text."""
        return self._media_named("texts")

    @property
    def motions(self) -> list[Any]:
        """Motions, where the modality makes motion."""
        return self._media_named("motions")

    @property
    def actions(self) -> list[Any]:
        """Chunks of actions, where the modality makes actions."""
        return self._media_named("actions")

    @property
    def seeds(self) -> list[int]:
        """Seed of each item; ``seed=seeds[i]`` makes item i again."""
        return [item.seed for item in self.items]

    @property
    def media_name(self) -> str:
        """Attribute that has the media under the name of their kind."""
        kind = self.modality
        if self.served is not None and self.served.media_kind in MEDIA_KINDS:
            kind = self.served.media_kind
        return kind if kind.endswith("s") else f"{kind}s"

    def _media_named(self, name: str) -> list[Any]:
        """Return the media. Raises ``AttributeError`` if they have another name."""
        if name != self.media_name:
            raise AttributeError(
                f"an output of modality {self.modality!r} has no {name}; expected"
                f" .{self.media_name} or .media"
            )
        return self.media

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the media as plain data, which JSON can hold."""
        return {
            "modality": self.modality,
            "model": self.model,
            "model_options": dict(self.model_options),
            "sampler": plain_spec(self.spec),
            "sampling": self.sampling.to_dict(),
            "guarantee": self.guarantee,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "interrupted": self.interrupted,
            "items": [self._item_dict(i) for i in range(len(self))],
        }

    def _item_dict(self, i: int) -> dict[str, Any]:
        """Return everything about one item but its media as plain data."""
        item = self.items[i]
        said: dict[str, Any] = {}
        if self.logprobs is not None:
            said["logprobs"] = as_dicts(self.logprobs[i])
        if self.candidates is not None:
            said["candidates"] = [c.to_dict() for c in self.candidates[i]]
        tokens, stats = self.tokens[i].tolist(), self.stats[i].to_dict()
        return {"prompt": item.prompt, "seed": item.seed, "tokens": tokens, "stats": stats, **said}

    def __repr__(self) -> str:
        seeds = self.seeds
        if not seeds:
            return "PipelineOutput(empty)"
        several = f"seeds {seeds[0]}...{seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"
        passes = median(s.nfe for s in self.stats)
        name = self.media_name if len(self) > 1 else self.media_name.removesuffix("s")
        return (
            f"PipelineOutput({len(self)} {name}, model={self.model!r},"
            f" sampler={self.spec['name']!r}, {several}, {passes:g} forward passes per item"
            f"{', interrupted' if self.interrupted else ''})"
        )

    def _repr_html_(self) -> str:
        """Show the media in a notebook."""
        captions = [f"{item.prompt} (seed {item.seed})" for item in self.items]
        return as_html(repr(self), self.media, captions, self.served)

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
        traces, logprobs, candidates = None, None, None
        if parts[0].traces is not None:
            traces = [trace for part in parts for trace in part.traces or ()]
        if parts[0].logprobs is not None:
            logprobs = [row for part in parts for row in part.logprobs or ()]
        if any(part.candidates is not None for part in parts):  # an interrupted one has none
            candidates = [row for part in parts for row in part.candidates or [[] for _ in part]]
        return replace(
            parts[0],
            media=[media for part in parts for media in part.media],
            tokens=_stacked([part.tokens for part in parts]),
            grid=max(part.grid for part in parts),
            stats=[stats for part in parts for stats in part.stats],
            traces=traces,
            items=[item for part in parts for item in part.items],
            interrupted=any(part.interrupted for part in parts),
            logprobs=logprobs,
            candidates=candidates,
        )

    def save(self, folder: str | Path) -> Path:
        """Write a job folder with media, manifest, config and gallery; return the gallery's path.

        Raises:
            GenError: the folder holds another job, or the call was interrupted.
        """
        if not isinstance(folder, (str, Path)) or not str(folder):
            raise bad_type("folder", folder, "the path of a folder")
        if self.interrupted:
            raise GenError("the output was interrupted; expected one with whole items to save")
        # jobs are floors above: they run pipelines, and only this asks back
        from gen.jobs.run import save_output

        return save_output(self, Path(folder).expanduser())


def _stacked(parts: list[Tensor]) -> Tensor:
    """Join tokens [N, T(, C)]. Latents of fewer positions than others are followed by NaN."""
    longest = max(part.shape[1] for part in parts)
    missing = [longest - part.shape[1] for part in parts]
    return torch.cat(
        [
            part if not n else torch.nn.functional.pad(part, (0, 0, 0, n), value=torch.nan)
            for part, n in zip(parts, missing, strict=True)
        ]
    )
