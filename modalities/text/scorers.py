"""Rewards of texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gen.contracts.scorer import Scorer
from gen.core.registry import register

BRACKETS = {")": "(", "]": "[", "}": "{"}


@register("scorer", "digit_count")
@dataclass(frozen=True)
class DigitCount(Scorer):
    """Number of digits in a text."""

    modalities: ClassVar[tuple[str, ...]] = ("text",)
    about: ClassVar[str] = "number of digits in the text; at least 0"

    def score(self, samples):
        return [sum(c.isdigit() for c in s.media) for s in samples]


@register("scorer", "bracket_depth")
@dataclass(frozen=True)
class BracketDepth(Scorer):
    """Number of brackets that are still open behind prompt and text, negated.

    A closing bracket of another kind than the last open one counts as one that is open too.
    """

    modalities: ClassVar[tuple[str, ...]] = ("text",)
    about: ClassVar[str] = "minus the number of open brackets behind prompt and text; at most 0"

    def score(self, samples):
        return [-depth(s.prompt + s.media) for s in samples]


def depth(text: str) -> int:
    """Count the brackets of a text without a partner."""
    stack, strays = [], 0
    for c in text:
        if c in BRACKETS.values():
            stack.append(c)
        elif c in BRACKETS and stack and stack[-1] == BRACKETS[c]:
            stack.pop()
        elif c in BRACKETS:
            strays += 1
    return len(stack) + strays
