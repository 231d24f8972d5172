"""What modalities share whose models are embedded ones over a grid of codes: binding, layout, continuation.

A subclass says its slots (``slots``, ``words``, ``unsaid``) and its ``layout``; the grid's first axis is time.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from gen.errors import GenError
from gen.frontend import TokenFrontend, require_same_frontend
from gen.layouts import Layout, make_layout, space
from gen.modality import Binding, Modality
from gen.types import TokenSpace


@cache
def _layout(name: str, sizes: tuple[int, ...], grid: tuple[int, ...], knobs: tuple) -> Layout:
    return make_layout(name, sizes=sizes, grid=grid, **dict(knobs))


class GridModality(Modality):
    """``slots``: condition tokens of a model's prompt. ``words``: their ids. ``unsaid``: the slots that say nothing.
    ``layout_name``, ``layout_knobs``: how codes become a sequence."""

    slots: ClassVar[int]
    words: ClassVar[int]
    unsaid: ClassVar[list[int]]
    layout_name: ClassVar[str]
    layout_knobs: ClassVar[dict[str, Any]] = {}

    @abstractmethod
    def prompt_words(self, condition: Any) -> list[int]:
        """The slots of a condition, each in ``range(words)``."""

    def layout(self, sizes: tuple[int, ...], grid: tuple[int, ...]) -> Layout:
        return _layout(self.layout_name, tuple(sizes), tuple(grid), tuple(self.layout_knobs.items()))

    @abstractmethod
    def code_grid(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """The grid of codes that a model's grid of tokens stands for."""

    def codebook(self, frontend: TokenFrontend) -> Tensor:
        """The vectors of all code ids [n, D]."""
        return frontend.codebooks[0]

    def bind(self, config: Any, frontend: TokenFrontend, model_name: str) -> Binding:
        for key in ("prefix_length", "codebook_size", "grid"):
            if not hasattr(config, key):
                raise GenError(f"model {model_name} is a {config.model_type!r} without {key!r}; the modality {self.name!r} needs a model "
                               f"trained for it, such as {self.models['causal']!r}")
        layout = self.layout(frontend.config.codebook_sizes, self.code_grid(tuple(config.grid)))
        size, need = layout.code_ids, layout.code_ids + self.words
        if config.codebook_size != size or config.prefix_length != self.slots or config.vocab_size < need:
            raise GenError(f"model {model_name} has codebook_size {config.codebook_size}, prefix_length {config.prefix_length} and "
                           f"vocab_size {config.vocab_size}; expected {size}, {self.slots} and at least {need}")
        require_same_frontend(config, frontend, model_name, self.frontends["codes"])
        found = space(layout, config.mask_token_id, self.codebook(frontend), config.vocab_size)
        if found.grid != tuple(config.grid):
            raise GenError(f"model {model_name} has the grid {tuple(config.grid)}; expected {found.grid}")
        shift = lambda slots: [s + size for s in slots]
        return Binding(found, lambda c: shift(self.prompt_words(c)), shift(self.unsaid))

    def to_codes(self, tokens: Tensor, space: TokenSpace) -> Tensor:
        """Of all frames or the first ones."""
        frames = tokens.shape[1] // math.prod(space.grid[1:])
        return self.layout(self.sizes(space), self.code_grid((frames, *space.grid[1:]))).from_sequence(tokens)

    def sizes(self, space: TokenSpace) -> tuple[int, ...]:
        """The codebook sizes of a space that ``bind`` made: how many ids are legal in the places of the first frame, one per stream."""
        return (int(space.legal[0].sum()),)

    def prefix(self, media: Any, frontend: TokenFrontend, space: TokenSpace) -> Tensor:
        media = self.load(Path(media)) if isinstance(media, (str, Path)) else media
        x = frontend.preprocess(self.whole_frames(media, frontend))[None]
        codes = frontend.encode(x)
        if codes.shape[2] >= space.grid[0]:
            raise GenError(f"the medium to continue has {codes.shape[2]} frames of codes; expected fewer than {space.grid[0]}, "
                           "all that there is room for")
        return self.layout(frontend.config.codebook_sizes, tuple(codes.shape[2:])).to_sequence(codes)[0]

    @abstractmethod
    def whole_frames(self, media: Any, frontend: TokenFrontend) -> Any:
        """A medium cut to whole frames of codes. Raises ``GenError`` if that leaves none, or if it is another kind of medium."""
