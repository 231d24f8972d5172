"""Synthetic dataset of captioned shapes: the caption language and the renderer of its images.

A caption names one or two shapes, each by size, colour, shape and location: ``a large red circle at
the top left and a small blue ring at the right``. Every attribute but the shape may be omitted ("a
red circle"). The captions of images omit none, so ``complete`` draws what a prompt omits: an image
of the completed caption is an image of the prompt.

A caption becomes eight slots, four per shape. Slot ``ANY`` means "not stated", slot ``NONE`` "there
is no second shape". The unconditional caption of classifier-free guidance has all slots ``ANY``. A
model's prompt pairs every slot with the location of its shape.

Images are 64x64 RGB. Two shapes never share a colour and never overlap. Backgrounds are muted
gradients with stripes, checks or blotches, so that their tokens have entropy while shapes stay
separable by colour.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from gen.core.errors import cut, unknown_word
from gen.modalities.small_language import (
    draw_conditions,
)
from gen.modalities.small_language import held_out as held_out

SIZES = ("small", "large")
COLOURS = ("red", "green", "blue", "yellow", "purple", "white")
SHAPES = ("circle", "square", "triangle", "ring", "cross")
LOCATIONS = (
    "top left",
    "top",
    "top right",
    "left",
    "centre",
    "right",
    "bottom left",
    "bottom",
    "bottom right",
)
ANY, NONE = 0, 1
WORDS = ("<any>", "<none>", *SIZES, *COLOURS, *SHAPES, *LOCATIONS)  # slot value -> word
SLOTS = 8
FIRST_LOCATION = WORDS.index(LOCATIONS[0])
# (word, location of its shape); location 0 is none stated
PAIRS = len(WORDS) * (len(LOCATIONS) + 1)

IMAGE_SIZE = 64
# pixel coordinate of the first, middle and last row or column of locations
ANCHORS = (16.0, 31.5, 47.0)
JITTER = 2.0  # pixels, uniform, each way
RADII = {"small": (7.0, 8.5), "large": (11.5, 13.5)}  # pixels
PALETTE = {  # 8-bit RGB, each far from the muted backgrounds
    "red": (215, 45, 45),
    "green": (45, 185, 65),
    "blue": (50, 90, 235),
    "yellow": (240, 215, 50),
    "purple": (170, 60, 205),
    "white": (242, 242, 242),
}


@dataclass(frozen=True)
class Item:
    """Shape of a caption. ``None`` marks an omitted attribute."""

    shape: str
    colour: str | None = None
    size: str | None = None
    location: str | None = None

    def phrase(self) -> str:
        """Words of the shape in a caption."""
        words = ["a", *(w for w in (self.size, self.colour, self.shape) if w)]
        if self.location:
            words.append(
                "in the centre" if self.location == "centre" else f"at the {self.location}"
            )
        return " ".join(words)

    def slots(self) -> list[int]:
        """Four integers in ``range(len(WORDS))``."""
        return [
            WORDS.index(w) if w else ANY
            for w in (self.size, self.colour, self.shape, self.location)
        ]


@dataclass(frozen=True)
class Caption:
    """Caption of one or two shapes."""

    items: tuple[Item, ...]

    def __str__(self) -> str:
        return " and ".join(i.phrase() for i in self.items)

    def slots(self) -> list[int]:
        """Eight integers in ``range(len(WORDS))``."""
        out = [s for i in self.items for s in i.slots()]
        return out + [NONE] * (SLOTS - len(out))

    def pairs(self) -> list[int]:
        """Eight integers in ``range(PAIRS)``: a model's prompt."""
        return pairs(np.array([self.slots()]))[0].tolist()


def pairs(slots: np.ndarray) -> np.ndarray:
    """Join every slot with the location of its shape: int [N, 8] -> int [N, 8].

    From words alone, a small model takes very long to learn which of two shapes a word belongs to.
    A word that carries a location relates to the image directly.
    """
    location = slots[:, 3::4].repeat(4, axis=1)
    return slots * (len(LOCATIONS) + 1) + np.where(
        location >= FIRST_LOCATION, location - FIRST_LOCATION + 1, 0
    )


def parse(text: str) -> Caption:
    """Parse the text of a caption.

    Raises:
        ValueError: a word or phrase is outside the language; the message names the first one and
            the nearest known one.
    """
    if not text or not text.strip():
        raise ValueError(
            "the prompt is empty; expected a caption such as 'a large red circle at the top left'"
        )
    clean = re.sub(r"\bcenter\b", "centre", re.sub(r"[.,!]+(\s|$)", " ", text.strip().lower()))
    parts = re.split(r"\s+and\s+", clean)
    if len(parts) > 2:
        raise ValueError(f"caption {text!r} names {len(parts)} shapes; expected one or two")
    items = tuple(_parse_item(p, text) for p in parts)
    colours = [i.colour for i in items if i.colour]
    if len(colours) != len(set(colours)):
        raise ValueError(
            f"caption {text!r} gives both shapes the colour {colours[0]!r}; expected two different"
            " colours"
        )
    if (
        len(items) == 2
        and all(i.location for i in items)
        and not apart(items[0].location, items[1].location)
    ):
        raise ValueError(
            f"caption {text!r} puts two shapes at {items[0].location!r} and"
            f" {items[1].location!r}, where they may overlap; expected locations two rows or"
            " two columns apart, such as 'left' and 'right'"
        )
    for item in items if len(items) == 2 else ():
        if item.location and not has_room(item.location):
            raise ValueError(
                f"caption {text!r} puts one of two shapes at {item.location!r}, which leaves no"
                " room for the other; expected another location, such as 'left'"
            )
    return Caption(items)


def _parse_item(phrase: str, text: str) -> Item:
    words = phrase.split()
    attributes: dict[str, str] = {}
    i = 0
    if words and words[0] in ("a", "an", "the", "one"):
        i = 1
    for kind, options in (("size", SIZES), ("colour", COLOURS), ("shape", SHAPES)):
        if i < len(words) and words[i] in options:
            attributes[kind] = words[i]
            i += 1
    if "shape" not in attributes:
        if i == len(words):
            raise ValueError(
                f"caption {cut(text)!r}: the phrase {cut(phrase)!r} ends before its shape; expected"
                f" {', '.join(SHAPES[:-1])} or {SHAPES[-1]}"
            )
        known = (*SIZES, *COLOURS, *SHAPES)
        raise unknown_word(words[i], known, f"caption {text!r}, phrase {phrase!r}")
    rest = words[i:]
    if rest:
        if len(rest) > 2 and rest[0] in ("at", "in", "on") and rest[1] == "the":
            rest = rest[2:]
        location = " ".join(rest).replace("middle", "centre")
        if location not in LOCATIONS:
            raise unknown_word(location, LOCATIONS, f"the location in caption {text!r}")
        attributes["location"] = location
    return Item(**attributes)


def apart(a: str, b: str) -> bool:
    """Return whether two locations are two rows or two columns apart, so that shapes there cannot
    overlap.
    """
    (ra, ca), (rb, cb) = (divmod(LOCATIONS.index(p), 3) for p in (a, b))
    return abs(ra - rb) == 2 or abs(ca - cb) == 2


def has_room(location: str) -> bool:
    """Return whether a second shape fits beside a shape at a location."""
    return any(apart(location, other) for other in LOCATIONS)


def random_caption(rng: np.random.Generator, two: float = 0.35) -> Caption:
    """Draw a caption with every attribute stated; two shapes with probability ``two``."""

    def pick(options):
        return options[rng.integers(len(options))]

    items = [
        Item(pick(SHAPES), pick(COLOURS), pick(SIZES), pick(LOCATIONS))
        for _ in range(2 if rng.random() < two else 1)
    ]
    if len(items) == 2:
        a, b = items
        while b.colour == a.colour or not has_room(a.location) or not apart(a.location, b.location):
            if not has_room(a.location):
                a = replace(a, location=pick(LOCATIONS))
            b = replace(b, colour=pick(COLOURS), location=pick(LOCATIONS))
        items = [a, b]
    return Caption(tuple(items))


@dataclass(frozen=True)
class Completed(Caption):
    """Caption whose omitted attributes were drawn.

    Attributes:
        stated: the caption as it was written.
    """

    stated: Caption

    __str__ = Caption.__str__


def complete(caption: Caption, rng: np.random.Generator) -> Caption:
    """Draw the attributes that a caption omits, uniformly from the captions of the dataset that
    agree with it. A caption that states everything is returned as it is.
    """
    if all(i.colour and i.size and i.location for i in caption.items):
        return caption

    def pick(options):
        return options[rng.integers(len(options))]

    while True:
        drawn = tuple(
            Item(
                i.shape,
                i.colour or pick(COLOURS),
                i.size or pick(SIZES),
                i.location or pick(LOCATIONS),
            )
            for i in caption.items
        )
        a, b = drawn[0], drawn[-1]
        if len(drawn) == 1 or (a.colour != b.colour and apart(a.location, b.location)):
            return Completed(drawn, caption)


def captions(n: int, seed: int, *, held: bool, two: float = 0.35) -> list[Caption]:
    """Draw ``n`` captions, all held out or none of them; two shapes with probability ``two``."""
    return draw_conditions(n, seed, lambda rng: random_caption(rng, two), held)


def shortened(captions: list[Caption], seed: int) -> list[Caption]:
    """Leave out words of captions, so that captions of every length are equally frequent: each word
    but the shape with a probability that is drawn per caption.
    """
    rng = np.random.default_rng(seed)

    def short(item: Item, share: float) -> Item:
        gone = {word: None for word in ("size", "colour", "location") if rng.random() < share}
        return replace(item, **gone)

    shares = rng.random(len(captions))
    return [
        Caption(tuple(short(item, share) for item in caption.items))
        for caption, share in zip(captions, shares, strict=True)
    ]


_Y, _X = np.mgrid[0:IMAGE_SIZE, 0:IMAGE_SIZE].astype(np.float32)


def coverage(shape: str, radius: float, cx: float, cy: float) -> np.ndarray:
    """Share of each pixel that a shape covers: float32 [64, 64] in [0, 1], from its signed
    distance.
    """
    x, y = _X - cx, _Y - cy
    r = radius
    if shape == "circle":
        d = np.hypot(x, y) - r
    elif shape == "square":
        d = np.maximum(abs(x), abs(y)) - 0.88 * r
    elif shape == "triangle":  # apex up
        d = np.maximum(y - 0.8 * r, (2 * abs(x) - y - r) / np.float32(5**0.5))
    elif shape == "ring":
        d = abs(np.hypot(x, y) - 0.74 * r) - 0.26 * r
    elif shape == "cross":
        ax, ay = abs(x), abs(y)
        d = np.minimum(np.maximum(ax - r, ay - 0.32 * r), np.maximum(ay - r, ax - 0.32 * r))
    else:
        raise ValueError(f"unknown shape {shape!r}; expected one of {', '.join(SHAPES)}")
    return np.clip(0.5 - d, 0, 1).astype(np.float32)


def background(rng: np.random.Generator) -> np.ndarray:
    """Draw a muted textured background: float32 [64, 64, 3], 0..255."""
    base = rng.uniform(50, 100) + rng.uniform(-11, 11, 3)
    angle = rng.uniform(0, 2 * np.pi)
    light = rng.uniform(0, 14) * (_X * np.cos(angle) + _Y * np.sin(angle)) / (IMAGE_SIZE / 2)
    kind = rng.integers(4)
    amplitude = rng.uniform(3, 9)
    phase, period, turn = rng.uniform(0, 2 * np.pi), rng.uniform(10, 20), rng.uniform(0, np.pi)
    u = (_X * np.cos(turn) + _Y * np.sin(turn)) * (2 * np.pi / period)
    v = (_Y * np.cos(turn) - _X * np.sin(turn)) * (2 * np.pi / period)
    if kind == 0:
        texture = np.sin(u + phase)
    elif kind == 1:
        texture = np.sin(u + phase) * np.sin(v)
    elif kind == 2:  # blotches: coarse noise, bilinearly enlarged
        k = int(rng.integers(4, 8))
        coarse = rng.standard_normal((k + 1, k + 1))
        s = np.linspace(0, k, IMAGE_SIZE, endpoint=False)
        i, f = s.astype(int), s - s.astype(int)
        rows = coarse[i] * (1 - f)[:, None] + coarse[i + 1] * f[:, None]
        texture = rows[:, i] * (1 - f) + rows[:, i + 1] * f
    else:
        texture = np.zeros_like(_X)
    grain = rng.standard_normal((IMAGE_SIZE, IMAGE_SIZE, 1))
    shade = light - light.mean() + amplitude * texture
    return (base + shade[..., None] + grain).astype(np.float32)


def draw(caption: Caption, rng: np.random.Generator) -> np.ndarray:
    """Render an image that passes the checker for a caption with all attributes stated: uint8 [64,
    64, 3].
    """
    image = background(rng)
    for item in caption.items:
        row, col = divmod(LOCATIONS.index(item.location), 3)
        cx, cy = (
            ANCHORS[col] + rng.uniform(-JITTER, JITTER),
            ANCHORS[row] + rng.uniform(-JITTER, JITTER),
        )
        alpha = coverage(item.shape, rng.uniform(*RADII[item.size]), cx, cy)[..., None]
        colour = np.array(PALETTE[item.colour]) + rng.uniform(-10, 10, 3)
        shade = 1 - 0.12 * (_Y[..., None] - cy) / 14  # lit from above
        image = image * (1 - alpha) + np.clip(colour * shade, 0, 255) * alpha
    return np.clip(image.round(), 0, 255).astype(np.uint8)
