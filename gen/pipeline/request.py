"""A resolved request, the point that generation starts from, and a run that is ready to decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gen.contracts.constraint import Constraint
from gen.contracts.frontend import TokenFrontend
from gen.contracts.modality import Modality
from gen.contracts.protocol import ModelProtocol
from gen.core.edit_spec import EditSpec
from gen.core.errors import GenError
from gen.core.sampler import Callback, Sampler
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.targets.base import Target
from gen.pipeline.control import shaped
from gen.pipeline.output import ItemPlan
from gen.pipeline.streaming import OnChunk


@dataclass(frozen=True)
class GenerationRequest:
    """Everything that a batch of items is made from, resolved once.

    Attributes:
        items: items of the batch.
        spec: the sampler as the user wrote it.
        sampler: the sampler.
        sampling: sampling parameters.
        start: edit, continuation or length to start from.
        trace: whether steps are recorded.
        callback: called once per forward pass.
        on_chunk: called with every part of a row's media as soon as its tokens are there.
        max_batch: items decoded at a time; None takes all at once.
        previews: previews of each image that ``on_chunk`` gets.
        build: builds the constraint of structured output, as ``ConstraintBuilder.build``; None
            takes that of the pipeline.
    """

    items: Sequence[ItemPlan]
    spec: dict[str, Any]
    sampler: Sampler
    sampling: SamplingParams
    start: EditSpec = EditSpec()
    trace: bool = False
    callback: Callback | None = None
    on_chunk: OnChunk | None = None
    max_batch: int | None = None
    previews: int = 0
    build: Callable[..., Constraint] | None = None

    @property
    def split(self) -> bool:
        """True where the request has more items than may be decoded at a time."""
        return self.max_batch is not None and self.max_batch < len(self.items)

    def batches(self, size: int) -> Iterator[GenerationRequest]:
        """Yield requests of at most ``size`` items each."""
        for first in range(0, len(self.items), size):
            yield replace(
                self,
                items=self.items[first : first + size],
                on_chunk=self.on_chunk and _from_row(first, self.on_chunk),
            )


def _from_row(first: int, on_chunk: OnChunk) -> OnChunk:
    """Return ``on_chunk`` for a batch whose row 0 is row ``first`` of the whole."""

    def shifted(row: int, media: Any, preview: bool = False) -> None:
        on_chunk(first + row, media, preview)

    return shifted


@dataclass(frozen=True)
class StartingPoint:
    """Known tokens that generation starts from.

    Attributes:
        space: token space of the results.
        prefix: first tokens [k(, C)] of every result, if any.
        canvas: canvas [B, T(, C)] with masked positions to fill, if any.
        known: the same long [B, T] for positions that are decoded from left to right.
        overlays: lay the result of each row over its original media; empty without an edit.
    """

    space: TokenSpace
    prefix: Tensor | None = None
    canvas: Tensor | None = None
    known: Tensor | None = None
    overlays: tuple[Callable[[Any], Any], ...] = ()

    def overlay(self, row: int, media: Any) -> Any:
        """Lay the result of a row over the media that it started from."""
        return self.overlays[row](media) if self.overlays else media

    @classmethod
    def of(
        cls,
        request: GenerationRequest,
        protocol: type[ModelProtocol],
        modality: Modality,
        frontend: TokenFrontend,
        space: TokenSpace,
        device: torch.device,
    ) -> StartingPoint:
        """Return the starting point of a request.

        Args:
            request: the request.
            protocol: protocol of its sampler.
            modality: modality that reads the media to start from.
            frontend: frontend of the model.
            space: token space of the model.
            device: device of the canvas.

        Raises:
            GenError: the protocol or the modality cannot start there.
        """
        start, rows = request.start, len(request.items)
        own = [modality.own_edit(item.condition) for item in request.items]
        space = modality.sized(space, [item.condition for item in request.items])
        limit = request.sampling.max_new_tokens
        is_edit = start.source is not None or any(own)
        if limit is not None and (is_edit or start.frames is not None):
            given = "source" if start.frames is None else "frames"
            raise GenError(
                f"sampling.max_new_tokens is {limit} and {given} is given, which both set the"
                " length; expected one of them"
            )
        if is_edit:
            space = shaped(space, request.sampling, frontend)
            return cls._edit(request, own, protocol, modality, frontend, space)
        if start.frames is not None:
            space = modality.lasting(start.frames, frontend, space)
        prefix = None
        if start.prefix is not None:
            try:
                prefix = modality.prefix(start.prefix, frontend, space)
            except GenError as error:
                raise GenError(f"prefix: {error}") from None
            if start.frames is not None and len(prefix) >= int((space.legal.sum(1) > 1).sum()):
                raise GenError(
                    f"frames is {start.frames}, which the prefix already fills; expected more"
                )
        num_prefix = 0 if prefix is None else len(prefix)
        space = shaped(space, request.sampling, frontend, num_prefix)
        if protocol.left_to_right or (prefix is None and start.frames is None):
            return cls(space, prefix)
        canvas = space.empty(rows, device)
        if prefix is not None:
            canvas[:, : len(prefix)] = prefix
        # where only one token may stand, it does
        forced = (space.legal.sum(1) == 1).to(device)
        if bool(forced.any()):
            canvas[:, forced] = space.legal.to(device)[forced].long().argmax(1)
        return cls(space, prefix, canvas)

    @classmethod
    def _edit(
        cls,
        request: GenerationRequest,
        own: Sequence[EditSpec | None],
        protocol: type[ModelProtocol],
        modality: Modality,
        frontend: TokenFrontend,
        space: TokenSpace,
    ) -> StartingPoint:
        """Return the canvas of an edit: the source's tokens, masked where they are made anew.

        The source is that of the call, or of each condition (``own``).
        """
        start = request.start
        # a row that ends early would leave known tokens behind its end
        has_ends = bool(space.channels) or space.eos_token_id is not None
        if not protocol.edits or (protocol.left_to_right and has_ends):
            raise GenError(
                f"sampler {request.spec['name']!r} decodes left to right and cannot edit here:"
                " the model makes latents or an eos token; use a masked one such as 'maskgit'"
            )
        if any(own):
            if start != EditSpec():
                raise GenError(
                    "the conditions are edits of their own media, and the call gives media to start"
                    " from too; expected one of them"
                )
            edits = [edit for edit in own if edit is not None]
            made = [modality.edit(e.source, e.mask, frontend, space) for e in edits]
            canvases, overlays = zip(*made, strict=True)
            return cls._filling(space, torch.stack(canvases), overlays, protocol)
        region, where = ("mask", start.mask) if start.span is None else ("span", start.span)
        if region != modality.edited_by:
            raise GenError(
                f"modality {modality.name!r} is edited with a {modality.edited_by}; got a {region}"
            )
        canvas, overlay = modality.edit(start.source, where, frontend, space)
        rows = len(request.items)
        canvas = canvas.expand(rows, *canvas.shape)
        return cls._filling(space, canvas, (overlay,) * rows, protocol)

    @classmethod
    def _filling(
        cls,
        space: TokenSpace,
        canvas: Tensor,
        overlays: tuple[Callable[[Any], Any], ...],
        protocol: type[ModelProtocol],
    ) -> StartingPoint:
        """Return the starting point whose masked positions of a canvas are filled."""
        if protocol.left_to_right:
            return cls(space, known=canvas, overlays=overlays)
        return cls(space, canvas=canvas, overlays=overlays)


@dataclass(frozen=True)
class PreparedRun:
    """A request with its model, ready to decode.

    Attributes:
        request: the request.
        model: name of the model.
        frontend: frontend that decodes the tokens.
        start: known tokens that generation starts from.
        space: token space of the results. Where the lengths of rows are drawn first, it has no eos
            token at positions before the end.
        target: model, conditions and sampling parameters, as the sampler sees them.
        drafts: targets of the draft models.
        length_space: token space in which the lengths of rows are drawn first; None where they are
            not.
    """

    request: GenerationRequest
    model: str
    frontend: TokenFrontend
    start: StartingPoint
    space: TokenSpace
    target: Target
    drafts: tuple[Target, ...] = ()
    length_space: TokenSpace | None = None

    def __post_init__(self) -> None:
        if self.start.known is not None:
            for target in (self.target, *self.drafts):
                target.known = self.start.known.to(target.device)

    @property
    def replaces_rows(self) -> bool:
        """True where the next items can replace finished rows."""
        return all(target.replaces for target in (self.target, *self.drafts))

    @property
    def draft(self) -> Target | tuple[Target, ...] | None:
        """What the sampler gets: the target of the draft model, or of each where there are
        several."""
        return self.drafts if len(self.drafts) > 1 else next(iter(self.drafts), None)

    @property
    def prefix(self) -> Tensor | None:
        """Tokens [k(, C)] before those that the sampler decodes, if any."""
        return self.start.prefix if self.space.length > self.target.length else None

    def limit_batch(self, max_batch: int) -> None:
        """Decode at most so many items at a time; before any forward pass."""
        for target in (self.target, *self.drafts):
            target.at_most(max_batch)
