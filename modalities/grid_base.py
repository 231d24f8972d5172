"""Base of the modalities with embedded models over a grid of codes: binding, layout, continuation.

A subclass declares its prompt (``slots``, ``words``, ``unconditional``) and its layout
(``layout_name``). The first axis of the grid is time.
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
    """Constraint: a sequence ends between frames of ``streams`` tokens, not inside one."""

    streams: int
    eos_token_id: int
    vocab_size: int

    def legal(self, history: Tensor, positions: Tensor) -> Tensor:
        """Allowed tokens bool [..., vocab_size] at ``positions`` after ``history`` [B, T]."""
        out = torch.ones(
            *positions.shape, self.vocab_size, dtype=torch.bool, device=positions.device
        )
        out[..., self.eos_token_id] = positions % self.streams == 0
        return out


def ending(space: TokenSpace, eos_token_id: int, shortest: int, causal: bool) -> TokenSpace:
    """Let the sequences of a space end after ``shortest`` frames.

    Causal sequences cannot end inside a frame. For masked models the length is decided before
    decoding (``gen.pipeline.lengths``).

    Args:
        space: token space without an eos token.
        eos_token_id: id that ends a sequence.
        shortest: frames of the shortest sequence.
        causal: the space serves a causal model.
    """
    legal, streams = space.legal.clone(), space.length // space.grid[0]
    legal[shortest * streams :, eos_token_id] = True
    constraint = (
        WholeFrames(streams, eos_token_id, space.vocab_size) if causal and streams > 1 else None
    )
    return replace(space, legal=legal, eos_token_id=eos_token_id, constraint=constraint)


class GridModality(Modality):
    """Modality whose models read a prompt of condition slots and write a grid of codes.

    Attributes:
        slots: condition tokens of a prompt.
        words: ids of condition tokens.
        unconditional: slots of the unconditional prompt of classifier-free guidance.
        layout_name: registered layout of codes as a sequence.
        layout_params: parameters of that layout.
        streams: the second axis of tokens holds streams of codes with one codebook each.
        shortest: frames of the grid of the shortest media, where lengths differ; 0 for one length.
    """

    slots: ClassVar[int]
    words: ClassVar[int]
    unconditional: ClassVar[list[int]]
    layout_name: ClassVar[str]
    layout_params: ClassVar[dict[str, Any]] = {}
    streams: ClassVar[bool] = False
    shortest: ClassVar[int] = 0

    @abstractmethod
    def prompt_words(self, condition: Any) -> list[int]:
        """Slots of a condition, each in ``range(words)``."""

    def prompt_sizes(self, config: Any) -> tuple[int, int]:
        """Return the condition tokens of a model's prompt, and the number of their ids."""
        return self.slots, self.words

    def layout(self, sizes: tuple[int, ...], grid: tuple[int, ...]) -> Layout:
        """Layout of codes with these codebook sizes and this grid."""
        return _layout(
            self.layout_name, tuple(sizes), tuple(grid), tuple(self.layout_params.items())
        )

    def code_grid(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Grid of codes that belongs to a model's grid of tokens."""
        return grid[:1] if self.streams else grid

    def codebook(self, frontend: TokenFrontend) -> Tensor:
        """Vectors of all code ids [n, D]. With streams, a further coordinate separates them, so
        that no code has a neighbour in another stream.
        """
        tables = frontend.codebooks
        if not self.streams:
            return tables[0]
        offset = 10 * max(float(t.abs().max()) for t in tables) * tables[0].shape[1]
        return torch.cat(
            [torch.cat([t, torch.full_like(t[:, :1], q * offset)], 1) for q, t in enumerate(tables)]
        )

    def bind(self, config: Any, frontend: TokenFrontend, model_name: str) -> Binding:
        for key in ("prefix_length", "codebook_size", "grid"):
            if not hasattr(config, key):
                example = f", such as {self.models['causal']!r}" if "causal" in self.models else ""
                raise GenError(
                    f"model {model_name} is a {config.model_type!r} without {key!r}; the modality"
                    f" {self.name!r} needs a model trained for it{example}"
                )
        layout = self.layout(frontend.config.codebook_sizes, self.code_grid(tuple(config.grid)))
        size, (slots, words) = layout.code_ids + bool(self.shortest), self.prompt_sizes(config)
        if (
            config.codebook_size != size
            or config.prefix_length != slots
            or config.vocab_size < size + words
        ):
            raise GenError(
                f"model {model_name} has codebook_size {config.codebook_size}, prefix_length"
                f" {config.prefix_length} and vocab_size {config.vocab_size}; expected {size},"
                f" {slots} and at least {size + words}"
            )
        require_same_frontend(config, frontend, model_name, self.frontends["codes"])
        token_space = space(
            layout, config.mask_token_id, self.codebook(frontend), config.vocab_size
        )
        if token_space.grid != tuple(config.grid):
            raise GenError(
                f"model {model_name} has the grid {tuple(config.grid)}; expected {token_space.grid}"
            )
        if self.shortest:
            token_space = ending(token_space, layout.code_ids, self.shortest, config.causal)

        def shift(slots):
            return [s + size for s in slots]

        return Binding(
            token_space, lambda c: shift(self.prompt_words(c)), shift(self.unconditional)
        )

    def to_codes(self, tokens: Tensor, space: TokenSpace) -> Tensor:
        """Codes of all frames or the first ones."""
        frames = tokens.shape[1] // math.prod(space.grid[1:])
        return self.layout(
            self.sizes(space), self.code_grid((frames, *space.grid[1:]))
        ).from_sequence(tokens)

    def sizes(self, space: TokenSpace) -> tuple[int, ...]:
        """Codebook sizes of a space that ``bind`` made: the numbers of allowed ids at the positions
        of the first frame, one per stream.
        """
        return tuple(space.legal[: space.grid[1] if self.streams else 1].sum(1).tolist())

    def prefix(self, media: Any, frontend: TokenFrontend, space: TokenSpace) -> Tensor:
        media = self.load(Path(media)) if self.is_path(media) else media
        x = frontend.preprocess(self.whole_frames(media, frontend))[None]
        codes = frontend.encode(x)
        if codes.shape[2] >= space.grid[0]:
            raise GenError(
                f"the media to continue has {codes.shape[2]} frames of codes; expected fewer"
                f" than {space.grid[0]}, the frames of the model"
            )
        return self.layout(frontend.config.codebook_sizes, tuple(codes.shape[2:])).to_sequence(
            codes
        )[0]

    def lasting(self, frames: int, frontend: TokenFrontend, space: TokenSpace) -> TokenSpace:
        """Space of media with exactly ``frames`` frames of the signal.

        Raises:
            GenError: ``frames`` is no multiple of a code's frames, or out of range.
        """
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
        """Media cut to whole frames of codes.

        Raises:
            GenError: no whole frame is left, or the media are of another type.
        """
