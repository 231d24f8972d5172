"""Pairs of images that differ by one attribute, with the instruction between them.

A target image is drawn with the random numbers of its source, so that nothing but the attribute
differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gen.modalities.image import captions as shapes
from gen.modalities.image import instructions
from gen.recipes.common.data import training_conditions

SIDE, CELL = 16, 4  # cells of a side, pixels of a cell


@dataclass(frozen=True)
class Pair:
    """Source image, instruction and target image.

    Attributes:
        source: caption of the source.
        instruction: what changes.
        images: source and target, uint8 [2, 64, 64, 3].
    """

    source: shapes.Caption
    instruction: instructions.Instruction
    images: np.ndarray

    @property
    def touched(self) -> np.ndarray:
        """Cells at most one cell away from a pixel that differs, bool [16, 16]."""
        pixels = (self.images[0] != self.images[1]).any(-1)
        cells = pixels.reshape(SIDE, CELL, SIDE, CELL).any((1, 3))
        wide = np.pad(cells, 1)
        return np.lib.stride_tricks.sliding_window_view(wide, (3, 3)).any((2, 3))


def pair(caption: shapes.Caption, rng: np.random.Generator) -> Pair:
    """Draw the images of a caption and of an instruction for it."""
    instruction = instructions.random_instruction(caption, rng)
    seed = int(rng.integers(1 << 62))
    both = [caption, instruction.applied(caption)]
    drawn = [shapes.draw(c, np.random.default_rng(seed)) for c in both]
    return Pair(caption, instruction, np.stack(drawn))


def pairs(count: int, seed: int, held: bool) -> list[Pair]:
    """Draw pairs whose source captions are all held out, or none of them."""
    rng = np.random.default_rng(seed)
    if held:
        return [pair(c, rng) for c in shapes.captions(count, seed, held=True)]
    return [pair(c, rng) for c in training_conditions(count, lambda: shapes.random_caption(rng))]
