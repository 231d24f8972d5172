"""Media of conditions: as token ids of prompts, and to be described."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from gen.media.given import GivenMedia

KEPT = 256  # media whose tokens are kept


@dataclass(frozen=True)
class Description:
    """Condition of a description: the part of the condition that is described, and its medium."""

    part: str
    medium: GivenMedia

    def __str__(self) -> str:
        return f"describe {self.medium}"


class MediaTokens:
    """Tokens of media, each encoded once. ``encode`` maps a medium to token ids."""

    def __init__(self, encode: Callable[[GivenMedia], list[int]]):
        self._encode = encode
        self._kept: OrderedDict[str, list[int]] = OrderedDict()

    def __call__(self, medium: GivenMedia) -> list[int]:
        """Return the token ids of a medium."""
        if medium.digest not in self._kept:
            self._kept[medium.digest] = self._encode(medium)
        self._kept.move_to_end(medium.digest)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return self._kept[medium.digest]
