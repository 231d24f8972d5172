"""Language of instructions that change one attribute of one shape of an image.

    make the circle blue        make it large        turn the red circle into a square
    move the ring to the top left

An instruction names the shape that it changes by colour, shape, both, or ``it``, and one new
colour, size, shape or location. A location is absolute: "to the left" is the middle of the left
side.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from gen.core.errors import GenError, cut, unknown_word
from gen.modalities.image.captions import (
    ANCHORS,
    COLOURS,
    IMAGE_SIZE,
    LOCATIONS,
    RADII,
    SHAPES,
    SIZES,
    Caption,
    Item,
    apart,
    has_room,
)

ATTRIBUTES = {"colour": COLOURS, "size": SIZES, "shape": SHAPES, "location": LOCATIONS}
VERBS = ("make", "turn", "move")
EXPECTED = (
    "expected an instruction such as 'make the circle blue', 'make it large', 'turn it into a"
    " square' or 'move the red circle to the left'"
)


@dataclass(frozen=True)
class Instruction:
    """Instruction to change one attribute of one shape.

    Attributes:
        value: new colour, size, shape or location.
        colour: colour that names the shape to change; None where the instruction gives none.
        shape: shape that names it; None where the instruction gives none.
    """

    value: str
    colour: str | None = None
    shape: str | None = None

    @property
    def attribute(self) -> str:
        """Name of the attribute that changes."""
        return next(name for name, values in ATTRIBUTES.items() if self.value in values)

    def __str__(self) -> str:
        named = [w for w in (self.colour, self.shape) if w]
        if named and not self.shape:
            named.append("one")
        what = " ".join(["the", *named]) if named else "it"
        if self.attribute == "location":
            return f"move {what} to the {self.value}"
        if self.attribute == "shape":
            return f"turn {what} into a {self.value}"
        return f"make {what} {self.value}"

    def names(self, item: Item) -> bool:
        """Return whether the instruction may be about a shape."""
        return self.colour in (None, item.colour) and self.shape in (None, item.shape)

    def applied(self, caption: Caption) -> Caption:
        """Return the caption of the changed image.

        Raises:
            GenError: the instruction names none or several shapes of the caption or changes
                nothing, or the result is no caption.
        """
        named = [i for i, item in enumerate(caption.items) if self.names(item)]
        if len(named) != 1:
            raise GenError(
                f"the instruction {str(self)!r} names {len(named)} shapes of {str(caption)!r};"
                " expected one"
            )
        items = list(caption.items)
        if vars(items[named[0]])[self.attribute] == self.value:
            raise GenError(
                f"the instruction {str(self)!r} changes nothing of {str(caption)!r}; expected"
                f" another {self.attribute}"
            )
        items[named[0]] = replace(items[named[0]], **{self.attribute: self.value})
        if not possible(items):
            raise GenError(
                f"{str(self)!r} makes of {str(caption)!r} shapes of one colour, or that overlap"
            )
        return Caption(tuple(items))


def possible(items: list[Item]) -> bool:
    """Return whether shapes can stand in one image: no two of one colour, none that overlap."""
    if len(items) == 1:
        return True
    a, b = items
    return a.colour != b.colour and has_room(a.location) and apart(a.location, b.location)


def parse(text: str) -> Instruction:
    """Parse the text of an instruction.

    Raises:
        GenError: a word or phrase is outside the language; the message names it and the nearest
            known one.
    """
    clean = re.sub(r"\bcenter\b|\bmiddle\b", "centre", re.sub(r"[.,!]+(\s|$)", " ", text.lower()))
    words = clean.split()
    verb, rest = (words[0], words[1:]) if words else ("", [])
    if verb not in VERBS:
        raise GenError(f"the instruction is {cut(text)!r}; {EXPECTED}")
    link = {"move": "to", "turn": "into"}.get(verb)
    if link:
        if link not in rest:
            raise GenError(f"the instruction {cut(text)!r} has no {link!r}; {EXPECTED}")
        at = rest.index(link)
        named, value = rest[:at], rest[at + 1 :]
        if value[:1] in (["the"], ["a"], ["an"]):
            value = value[1:]
    else:
        named, value = rest[:-1], rest[-1:]
    kinds = {"move": LOCATIONS, "turn": SHAPES}.get(verb, (*COLOURS, *SIZES))
    said = " ".join(value)
    if said not in kinds:
        raise _unknown(said, kinds, text)
    return _named(named, said, text)


def _named(words: list[str], value: str, text: str) -> Instruction:
    """Return the instruction of a new value and the words that name a shape."""
    if words in (["it"], ["the", "shape"], ["the", "one"]):
        return Instruction(value)
    if words[:1] != ["the"] or len(words) not in (2, 3):
        raise GenError(f"the instruction {cut(text)!r} does not name a shape; {EXPECTED}")
    colour = words[1] if words[1] in COLOURS else None
    last = words[-1]
    shape = None if last in ("one", "shape") or (colour == last and len(words) == 2) else last
    if shape is not None and shape not in SHAPES:
        raise _unknown(shape, (*COLOURS, *SHAPES), text)
    if len(words) == 3 and colour is None:
        raise _unknown(words[1], COLOURS, text)
    return Instruction(value, colour, shape)


def _unknown(word: str, known: tuple[str, ...], text: str) -> GenError:
    return GenError(str(unknown_word(word, known, f"the instruction {cut(text)!r}")))


def random_instruction(caption: Caption, rng: np.random.Generator) -> Instruction:
    """Draw an instruction that can be applied to a caption with every attribute stated.

    The attribute is uniform, and so is the new value among those that differ and are possible. The
    shape is named by colour, shape, both, or ``it``, uniformly among the ways that name it alone.
    """
    while True:
        item = caption.items[rng.integers(len(caption.items))]
        attribute = list(ATTRIBUTES)[rng.integers(len(ATTRIBUTES))]
        values = [v for v in ATTRIBUTES[attribute] if v != vars(item)[attribute]]
        value = values[rng.integers(len(values))]
        ways = [
            Instruction(value, colour, shape)
            for colour in (None, item.colour)
            for shape in (None, item.shape)
        ]
        alone = [w for w in ways if sum(w.names(i) for i in caption.items) == 1]
        if not alone:
            continue
        chosen = alone[rng.integers(len(alone))]
        items = [replace(i, **{attribute: value}) if i is item else i for i in caption.items]
        if possible(items):
            return chosen


MARGIN = 3.5  # pixels around a shape of the largest radius: the jitter of its centre, and its edge
# distance of the farthest pixel of a shape from its centre, as a share of its radius
REACH = {"circle": 1.0, "square": 1.25, "triangle": 1.21, "ring": 1.0, "cross": 1.06}


def region(before: Caption, after: Caption) -> np.ndarray:
    """Return the pixels that may change from one caption to another, bool [64, 64].

    They are discs at the locations of the shapes that differ, before and after, without the pixels
    that are nearer to the location of a shape that stays.
    """
    found = np.zeros((IMAGE_SIZE, IMAGE_SIZE), dtype=bool)
    pairs = list(zip(before.items, after.items, strict=True))
    kept = [_distance(old) for old, new in pairs if old == new]
    for item in (item for pair in pairs if pair[0] != pair[1] for item in pair):
        distance = _distance(item)
        reach = RADII[item.size or "large"][1] * REACH[item.shape] + MARGIN
        found |= (distance <= reach) & np.all([distance <= other for other in kept], axis=0)
    return found


def _distance(item: Item) -> np.ndarray:
    """Return the distance of every pixel from the location of a shape, float [64, 64]."""
    row, column = divmod(LOCATIONS.index(item.location or "centre"), 3)
    y, x = np.mgrid[:IMAGE_SIZE, :IMAGE_SIZE]
    return np.hypot(x - ANCHORS[column], y - ANCHORS[row])
