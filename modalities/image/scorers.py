"""Rewards of images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gen.contracts.scorer import Scorer
from gen.core.params import choice
from gen.core.registry import register
from gen.modalities.image.captions import COLOURS
from gen.modalities.image.checker import share_of_colour


@register("scorer", "red_area")
@dataclass(frozen=True)
class ColourArea(Scorer):
    """Share of the pixels that have one colour.

    ``colour``: the colour, one of those of captions.
    """

    colour: str = choice("red", COLOURS)

    modalities: ClassVar[tuple[str, ...]] = ("image",)
    about: ClassVar[str] = "share of red pixels, or of another colour; 0 to 1"

    def score(self, samples):
        return [share_of_colour(s.media, self.colour) for s in samples]
