"""Sets of characters as languages of their UTF-8 bytes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from gen.constraints.budget import check, require_states
from gen.constraints.byte_dfa import ByteDFA

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)  # UTF-8 has no bytes for them
# of 1, 2, 3, 4 bytes: the first byte without bits of the character, code points, bytes after it
LENGTHS = (
    (0, 0, 0x7F, 0),
    (0xC0, 0x80, 0x7FF, 1),
    (0xE0, 0x800, 0xFFFF, 2),
    (0xF0, 0x10000, LAST, 3),
)

Ranges = tuple[tuple[int, int], ...]


def characters(ranges: Iterable[tuple[int, int]]) -> ByteDFA:
    """Return the language of texts of one character.

    Args:
        ranges: code points (first, last), both included. Surrogates are left out.
    """
    return _language(merged(ranges))


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges in order, those that touch joined."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return tuple(found)


def others(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the ranges of all characters outside of ranges."""
    edges = [-1, *(edge for pair in merged(ranges) for edge in pair), LAST + 1]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return tuple((before + 1, after - 1) for before, after in gaps if after - before > 1)


@lru_cache(maxsize=4096)
def _language(ranges: Ranges) -> ByteDFA:
    texts = _Texts()
    kept = _without_surrogates(ranges)
    for lead, first, last, more in LENGTHS:
        texts.fill(0, lead, _clipped(kept, first, last), more)
    accepting = np.zeros(len(texts.rows), bool)
    accepting[texts.end] = True
    return ByteDFA(np.stack(texts.rows), accepting, np.arange(256, dtype=np.uint8)).minimize()


class _Texts:
    """Table of an automaton whose states are sets of bytes that may still come."""

    def __init__(self) -> None:
        self.rows = [np.full(256, -1, np.int32), np.full(256, -1, np.int32)]
        self.end = 1
        self.index: dict[tuple[int, Ranges], int] = {}

    def fill(self, state: int, first_byte: int, ranges: Ranges, more: int) -> None:
        """Add the steps of a state.

        Args:
            state: the state.
            first_byte: byte whose bits of the character are 0.
            ranges: characters, or what of their bits is left.
            more: bytes after the one of these steps, of 6 bits each.
        """
        size = 1 << 6 * more
        for first, last in ranges:
            for top in range(first // size, last // size + 1):
                check()
                rest = _clipped(ranges, top * size, (top + 1) * size - 1)
                below = tuple((a - top * size, b - top * size) for a, b in rest)
                self.rows[state][first_byte + top] = self._after(below, more)

    def _after(self, ranges: Ranges, more: int) -> int:
        """Return the state from which ``more`` bytes have the given 6-bit values."""
        if not more:
            return self.end
        if (more, ranges) not in self.index:
            state = self.index[more, ranges] = len(self.rows)
            self.rows.append(np.full(256, -1, np.int32))
            require_states(len(self.rows))
            self.fill(state, 0x80, ranges, more - 1)
        return self.index[more, ranges]


def _clipped(ranges: Ranges, low: int, high: int) -> Ranges:
    """Return the parts of ranges between two code points, both included."""
    parts = ((max(first, low), min(last, high)) for first, last in ranges)
    return tuple((first, last) for first, last in parts if first <= last)


def _without_surrogates(ranges: Ranges) -> Ranges:
    low, high = SURROGATES
    return _clipped(ranges, 0, low - 1) + _clipped(ranges, high + 1, LAST)
