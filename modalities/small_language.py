"""What the small languages of program-made data share: refusing a word, holding out a tenth,
drawing from either part."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def unknown_word(
    got: str, options: Sequence[str], where: str, what: str = "the vocabulary"
) -> ValueError:
    """``WHERE: 'squre' is outside the vocabulary. Did you mean 'square'? Known: ...``"""
    near = difflib.get_close_matches(got, options, 1, 0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"{where}: {got!r} is outside {what}.{hint} Known: {', '.join(options)}")


def held_out(condition: Any) -> bool:
    """Whether a condition belongs to the tenth that training never sees."""
    return hashlib.sha256(str(condition).encode()).digest()[0] % 10 == 0


def draw_conditions(
    n: int, seed: int, draw: Callable[[np.random.Generator], Any], held: bool
) -> list[Any]:
    """``n`` conditions, all held out or none of them."""
    rng, out = np.random.default_rng(seed), []
    while len(out) < n:
        condition = draw(rng)
        if held_out(condition) == held:
            out.append(condition)
    return out
