"""Media of conditions: as token ids of prompts, and to be described."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from gen.media.given import GivenMedia

KEPT = 256  # media whose tokens are kept


@dataclass(frozen=True)
class Description:
    """Condition of a description: the part of the condition that is described, and its medium."""

    part: str
    medium: GivenMedia

    def __str__(self) -> str:
        return f"describe {self.medium}"


class Recent:
    """Values of the keys that were asked for last.

    Args:
        most: number of values that are kept.
    """

    def __init__(self, most: int):
        self._most = most
        self._values: OrderedDict[Hashable, Any] = OrderedDict()

    def of(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the value of a key, made if it is not kept."""
        value = self._values.pop(key, None)
        value = make() if value is None else value
        self._values[key] = value
        while len(self._values) > self._most:
            self._values.popitem(last=False)
        return value


class MediaTokens:
    """Tokens of media, each encoded once. ``encode`` maps a medium to token ids."""

    def __init__(self, encode: Callable[[GivenMedia], list[int]]):
        self._encode, self._recent = encode, Recent(KEPT)

    def __call__(self, medium: GivenMedia) -> list[int]:
        """Return the token ids of a medium."""
        return self._recent.of(medium.digest, lambda: self._encode(medium))
