"""Caption language of clips with bouncing balls.

A caption states one ball or two: ``a red ball bounces 3 times, high and a blue ball bounces 1 time,
low``. Colour, number and pitch may be omitted (``a ball bounces``). A ball of a known colour whose
pitch is omitted has the pitch of its colour. A stated pitch counts even where it is another one:
the text steers the sound.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gen.core.errors import unknown_word

COLOURS = ("red", "green", "blue")
PITCHES = ("high", "mid", "low")  # of the colours, in this order
MOST_BOUNCES = 3  # of one ball in a clip
MOST_BALLS = 2
BOUNCES = tuple(range(1, MOST_BOUNCES + 1))
EXAMPLE = "a red ball bounces 3 times, high"

# words of a model's prompt: colour with pitch, then number, then the mark of a missing ball
LOOKS = (1 + len(COLOURS)) * (1 + len(PITCHES))
ANY_LOOK, ANY_BOUNCES = 0, LOOKS
NO_BALL = LOOKS + 1 + MOST_BOUNCES
WORDS = NO_BALL + 1
SLOTS = 2 * MOST_BALLS
UNCONDITIONAL = [ANY_LOOK, ANY_BOUNCES] * MOST_BALLS


@dataclass(frozen=True)
class Ball:
    """Statement about one ball; None marks what is not stated.

    Attributes:
        colour: one of ``COLOURS``.
        bounces: number of hits, one of ``BOUNCES``.
        pitch: one of ``PITCHES``.
    """

    colour: str | None = None
    bounces: int | None = None
    pitch: str | None = None

    def __str__(self) -> str:
        words = ["a", self.colour, "ball", "bounces"]
        if self.bounces is not None:
            words += [str(self.bounces), "time" if self.bounces == 1 else "times"]
        text = " ".join(w for w in words if w)
        return f"{text}, {self.pitch}" if self.pitch else text

    @property
    def sounds(self) -> str | None:
        """Pitch that is heard: the stated one, or that of the colour; None where both are open."""
        return self.pitch or (self.colour and natural(self.colour)) or None

    def slots(self) -> list[int]:
        """Two words of a prompt: colour with pitch, and number."""
        colour = COLOURS.index(self.colour) + 1 if self.colour else 0
        pitch = PITCHES.index(self.pitch) + 1 if self.pitch else 0
        return [colour * (1 + len(PITCHES)) + pitch, ANY_BOUNCES + (self.bounces or 0)]


@dataclass(frozen=True)
class Caption:
    """Statement about a clip. ``balls``: at most ``MOST_BALLS``; none of them states nothing."""

    balls: tuple[Ball, ...] = ()

    def __str__(self) -> str:
        return " and ".join(map(str, self.balls))

    def slots(self) -> list[int]:
        """Words of a prompt, ``SLOTS`` integers below ``WORDS``."""
        if not self.balls:
            return list(UNCONDITIONAL)
        said = [slot for ball in self.balls for slot in ball.slots()]
        return said + [NO_BALL] * (SLOTS - len(said))


def natural(colour: str) -> str:
    """Return the pitch of a colour."""
    return PITCHES[COLOURS.index(colour)]


def parse(text: str) -> Caption:
    """Parse the text of a caption; ``str`` of the result is its canonical form.

    Raises:
        ValueError: a word is not allowed where it stands; the message names the first one and the
            nearest allowed word.
    """
    words = re.findall(r"[^\s,.!]+", (text or "").lower())
    if not words:
        raise ValueError(f"the caption is empty; expected one such as {EXAMPLE!r}")
    balls = []
    while True:
        balls.append(_ball(words, text))
        if not words:
            return Caption(tuple(balls))
        if len(balls) == MOST_BALLS:
            raise ValueError(
                f"caption {text!r} continues with {words[0]!r} after ball {MOST_BALLS}; expected at"
                f" most {MOST_BALLS} balls"
            )
        _take(words, ("and",), text)


def _ball(words: list[str], text: str) -> Ball:
    """Read one ball from the front of ``words``, which loses what is read."""
    if words and words[0] in ("a", "an", "the", "one"):
        words.pop(0)
    colour = _maybe(words, COLOURS)
    _take(words, ("ball",) if colour else (*COLOURS, "ball"), text)
    _take(words, ("bounces",), text)
    number = _maybe(words, tuple(map(str, BOUNCES)))
    if number is None and words and words[0].isdigit():
        raise ValueError(
            f"caption {text!r} has a ball that bounces {words[0]} times; expected 1 to"
            f" {MOST_BOUNCES}"
        )
    if number is not None:
        _take(words, ("time", "times"), text)
    pitch = _maybe(words, PITCHES)
    if words and words[0] != "and":
        open_words = () if pitch else PITCHES if number else (*map(str, BOUNCES), *PITCHES)
        raise unknown_word(words[0], (*open_words, "and"), f"caption {text!r}", "the words here")
    return Ball(colour, int(number) if number else None, pitch)


def _maybe(words: list[str], options: tuple[str, ...]) -> str | None:
    """Take the first word if it is one of ``options``."""
    return words.pop(0) if words and words[0] in options else None


def _take(words: list[str], options: tuple[str, ...], text: str) -> None:
    """Take the first word. Raises ``ValueError`` if it is none of ``options``."""
    if _maybe(words, options) is None:
        got = words[0] if words else "the end of the caption"
        raise unknown_word(got, options, f"caption {text!r}", "the words here")
