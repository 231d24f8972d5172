"""Synthetic dataset of translations whose right outputs a program lists.

A prompt names 2 to 10 digits, which may repeat:

    translate: seven seven two

A right output says them in one of two orders, as they are or reversed, and all of them in one of
two styles, each with a word of its own for every digit:

    plain     sette sette due    or    due sette sette
    solemn    septem septem duo  or    duo septem septem

so that there are up to 4 right outputs; a mixture of two of them is wrong. The order and the style
of a training pair are drawn at random and nothing in its source tells them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gen.contracts.modality import Verdict
from gen.core.errors import unknown_word
from gen.modalities.small_language import draw_conditions

START = "translate:"
SOURCE = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
STYLES = {
    "plain": ("zero", "uno", "due", "tre", "quattro", "cinque", "sei", "sette", "otto", "nove"),
    "solemn": (
        *("nihil", "unus", "duo", "tres", "quattuor"),
        *("quinque", "sex", "septem", "octo", "novem"),
    ),
}
ORDERS = ("kept", "reversed")
WORDS = tuple(word for words in STYLES.values() for word in words)
LENGTHS = range(2, 11)
BOS, EOS = len(SOURCE), len(SOURCE) + 1  # ids of sources beside those of digits
SOURCE_IDS = EOS + 1
LONGEST = LENGTHS[-1] + 2  # ids of the longest source


@dataclass(frozen=True)
class Translation:
    """Source of a translation.

    Attributes:
        digits: numbers 0 to 9, 2 to 10 of them.

    Raises:
        ValueError: digits of another number or value.
    """

    digits: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.digits) not in LENGTHS:
            raise ValueError(
                f"the text to translate has {len(self.digits)} words; expected {LENGTHS[0]} to"
                f" {LENGTHS[-1]} digits"
            )
        for digit in self.digits:
            if digit not in range(10):
                raise ValueError(f"digit {digit} to translate; expected 0 to 9")

    def __str__(self) -> str:
        return " ".join([START, *(SOURCE[digit] for digit in self.digits)])

    def ids(self) -> list[int]:
        """Return the ids of the source: bos, the digits, eos."""
        return [BOS, *self.digits, EOS]


def is_translation(prompt: str) -> bool:
    """Return whether a prompt asks for a translation, right or wrong."""
    return prompt.strip().lower().startswith(START.removesuffix(":"))


def parse(prompt: str) -> Translation:
    """Read a prompt.

    Raises:
        ValueError: it is none, with the nearest word.
    """
    first, *words = prompt.lower().replace(":", ": ").split()
    if first != START:
        raise ValueError(f"the prompt begins with {first!r}; expected {START!r} and digit words")
    for word in words:
        if word not in SOURCE:
            raise unknown_word(word, SOURCE, "the text to translate", "the digit words")
    return Translation(tuple(SOURCE.index(word) for word in words))


def draw_source(rng: np.random.Generator) -> Translation:
    """Draw a source: its length uniformly, then its digits; a fifth of them repeat the one before.

    Random digits alone would seldom repeat.
    """
    digits: list[int] = []
    for _ in range(int(rng.choice(LENGTHS))):
        repeat = bool(digits) and rng.random() < 0.2
        digits.append(digits[-1] if repeat else int(rng.integers(10)))
    return Translation(tuple(digits))


def sources(n: int, seed: int, held: bool = False) -> list[Translation]:
    """Draw ``n`` sources, all held out or none of them."""
    return draw_conditions(n, seed, draw_source, held)


def outputs(source: Translation) -> dict[tuple[str, str], tuple[str, ...]]:
    """List the right outputs by order and style."""
    orders = dict(zip(ORDERS, (source.digits, source.digits[::-1]), strict=True))
    return {
        (order, style): tuple(words[digit] for digit in digits)
        for order, digits in orders.items()
        for style, words in STYLES.items()
    }


def draw_output(source: Translation, rng: np.random.Generator) -> tuple[str, ...]:
    """Draw a right output: an order and a style, both uniformly."""
    found = list(outputs(source).values())
    return found[int(rng.integers(len(found)))]


def check(source: Translation, text: str) -> Verdict:
    """Judge whether an output is one of the right ones. ``valid``: words of the two styles."""
    words = tuple(text.lower().split())
    right = sorted(" ".join(output) for output in set(outputs(source).values()))
    passed = " ".join(words) in right
    detail = f"the output is {' '.join(words)!r}; expected one of {', '.join(map(repr, right))}"
    valid = bool(words) and all(word in WORDS for word in words)
    return Verdict(passed, valid, "" if passed else detail)


def grade(source: Translation, text: str) -> float:
    """Return the share of an output that is right: its longest beginning of a right one, over the
    words of the longer of the two."""
    words = text.lower().split()
    return _right(source, words) / max(len(words), len(source.digits))


def grade_partial(source: Translation, text: str) -> float:
    """Return the share of an unfinished output that some right one begins with; 1 for no text."""
    words = text.lower().split()
    return _right(source, words) / len(words) if words else 1.0


def _right(source: Translation, words: list[str]) -> int:
    """Count the words at the beginning that some right output begins with."""
    same = [0]
    for right in outputs(source).values():
        pairs = list(zip(words, right, strict=False))
        same.append(next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs)))
    return max(same)
