"""What modalities share whose models are embedded ones over a grid of codes: binding, layout,
continuation.

A subclass says its slots (``slots``, ``words``, ``unsaid``) and its ``layout``; the grid's first
axis is time.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from gen.contracts.frontend import TokenFrontend, require_same_frontend
from gen.contracts.layouts import Layout, make_layout, space
from gen.contracts.modality import Binding, Modality
from gen.core.errors import GenError
from gen.core.token_space import TokenSpace


@cache
def _layout(name: str, sizes: tuple[int, ...], grid: tuple[int, ...], params: tuple) -> Layout:
    return make_layout(name, sizes=sizes, grid=grid, **dict(params))


@dataclass(frozen=True)
class WholeFrames:
    """A constraint: a row ends between frames of ``streams`` ids, not inside one."""

    streams: int
    eos_token_id: int
    vocab_size: int

    def legal(self, history: Tensor, positions: Tensor) -> Tensor:
        out = torch.ones(
            *positions.shape, self.vocab_size, dtype=torch.bool, device=positions.device
        )
        out[..., self.eos_token_id] = positions % self.streams == 0
        return out


def ending(space: TokenSpace, eos_token_id: int, shortest: int, causal: bool) -> TokenSpace:
    """A space whose rows may end after ``shortest`` frames. A causal one cannot end inside a frame;
    for a masked model, how long a row is will be decided first (``gen.pipeline.lengths``)."""
    legal, streams = space.legal.clone(), space.length // space.grid[0]
    legal[shortest * streams :, eos_token_id] = True
    constraint = (
        WholeFrames(streams, eos_token_id, space.vocab_size) if causal and streams > 1 else None
    )
    return replace(space, legal=legal, eos_token_id=eos_token_id, constraint=constraint)


class GridModality(Modality):
    """``slots``: condition tokens of a model's prompt. ``words``: their ids. ``unsaid``: the slots
    that say nothing. ``layout_name``, ``layout_knobs``: how codes become a sequence."""

    slots: ClassVar[int]
    words: ClassVar[int]
    unsaid: ClassVar[list[int]]
    layout_name: ClassVar[str]
    layout_knobs: ClassVar[dict[str, Any]] = {}
    streams: ClassVar[bool] = (
        False  # whether the second axis of tokens are streams of codes, with a codebook each
    )
    # frames of the grid that media have at least, where they end when they like; 0: all have one
    # length
    shortest: ClassVar[int] = 0

    @abstractmethod
    def prompt_words(self, condition: Any) -> list[int]:
        """The slots of a condition, each in ``range(words)``."""

    def layout(self, sizes: tuple[int, ...], grid: tuple[int, ...]) -> Layout:
        return _layout(
            self.layout_name, tuple(sizes), tuple(grid), tuple(self.layout_knobs.items())
        )

    def code_grid(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """The grid of codes that a model's grid of tokens stands for."""
        return grid[:1] if self.streams else grid

    def codebook(self, frontend: TokenFrontend) -> Tensor:
        """The vectors of all code ids [n, D]; a further coordinate keeps those of different streams
        apart, so that no one's neighbours are another's."""
        tables = frontend.codebooks
        if not self.streams:
            return tables[0]
        far = 10 * max(float(t.abs().max()) for t in tables) * tables[0].shape[1]
        return torch.cat(
            [torch.cat([t, torch.full_like(t[:, :1], q * far)], 1) for q, t in enumerate(tables)]
        )

    def bind(self, config: Any, frontend: TokenFrontend, model_name: str) -> Binding:
        for key in ("prefix_length", "codebook_size", "grid"):
            if not hasattr(config, key):
                raise GenError(
                    f"model {model_name} is a {config.model_type!r} without {key!r}; the modality"
                    f" {self.name!r} needs a model trained for it, such as"
                    f" {self.models['causal']!r}"
                )
        layout = self.layout(frontend.config.codebook_sizes, self.code_grid(tuple(config.grid)))
        size = layout.code_ids + bool(self.shortest)
        need = size + self.words
        if (
            config.codebook_size != size
            or config.prefix_length != self.slots
            or config.vocab_size < need
        ):
            raise GenError(
                f"model {model_name} has codebook_size {config.codebook_size}, prefix_length"
                f" {config.prefix_length} and vocab_size {config.vocab_size}; expected {size},"
                f" {self.slots} and at least {need}"
            )
        require_same_frontend(config, frontend, model_name, self.frontends["codes"])
        found = space(layout, config.mask_token_id, self.codebook(frontend), config.vocab_size)
        if found.grid != tuple(config.grid):
            raise GenError(
                f"model {model_name} has the grid {tuple(config.grid)}; expected {found.grid}"
            )
        if self.shortest:
            found = ending(found, layout.code_ids, self.shortest, config.causal)

        def shift(slots):
            return [s + size for s in slots]

        return Binding(found, lambda c: shift(self.prompt_words(c)), shift(self.unsaid))

    def to_codes(self, tokens: Tensor, space: TokenSpace) -> Tensor:
        """Of all frames or the first ones."""
        frames = tokens.shape[1] // math.prod(space.grid[1:])
        return self.layout(
            self.sizes(space), self.code_grid((frames, *space.grid[1:]))
        ).from_sequence(tokens)

    def sizes(self, space: TokenSpace) -> tuple[int, ...]:
        """The codebook sizes of a space that ``bind`` made: how many ids are legal in the places of
        the first frame, one per stream."""
        return tuple(space.legal[: space.grid[1] if self.streams else 1].sum(1).tolist())

    def prefix(self, media: Any, frontend: TokenFrontend, space: TokenSpace) -> Tensor:
        media = self.load(Path(media)) if self.is_path(media) else media
        x = frontend.preprocess(self.whole_frames(media, frontend))[None]
        codes = frontend.encode(x)
        if codes.shape[2] >= space.grid[0]:
            raise GenError(
                f"the medium to continue has {codes.shape[2]} frames of codes; expected fewer than"
                f" {space.grid[0]}, all that there is room for"
            )
        return self.layout(frontend.config.codebook_sizes, tuple(codes.shape[2:])).to_sequence(
            codes
        )[0]

    def lasting(self, frames: int, frontend: TokenFrontend, space: TokenSpace) -> TokenSpace:
        """The space of media of so many frames of the signal."""
        step, total = frontend.config.compression[0], space.grid[0]
        if not self.shortest:
            return super().lasting(frames, frontend, space)
        if frames % step or not self.shortest <= frames // step <= total:
            raise GenError(
                f"frames is {frames}; expected a multiple of {step} from {self.shortest * step} to"
                f" {total * step}"
            )
        legal = space.legal.clone()
        positions = frames // step * (space.length // total)
        legal[:positions, space.eos_token_id] = False
        legal[positions:] = False
        legal[positions:, space.eos_token_id] = True
        return replace(space, legal=legal)

    @abstractmethod
    def whole_frames(self, media: Any, frontend: TokenFrontend) -> Any:
        """A medium cut to whole frames of codes. Raises ``GenError`` if that leaves none, or if it
        is another kind of medium."""
