"""Synthetic dataset of captioned moving shapes: the caption language and the renderer of its clips.

A caption states the look of one shape and its motion: ``a small blue circle moves up quickly and
bounces``. Size, colour and speed may be omitted ("a square moves right"). A caption without "and
bounces" states that the shape does not bounce. A caption becomes six slots. Slot ``ANY`` means "not
stated". The unconditional caption of classifier-free guidance has all slots ``ANY``.

Clips are 16 RGB frames of 32x32. The shape moves straight at one of two speeds. It either stays
clear of the wall ahead, or touches it in the middle of the clip, always in the same frame, and
comes back. It starts on a lattice of pixels, and the background is one of eight plain muted
colours: a caption leaves little open, so that a small model can learn the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from gen.core.errors import unknown_word
from gen.modalities.image import captions as shapes
from gen.modalities.image.captions import COLOURS, PALETTE, SHAPES, SIZES
from gen.modalities.small_language import (
    draw_conditions,
)
from gen.modalities.small_language import held_out as held_out

DIRECTIONS = ("right", "left", "up", "down")
SPEEDS = ("slowly", "quickly")
ENDS = ("passes", "bounces")  # slot words of a caption without and with "and bounces"
ANY = 0
WORDS = ("<any>", *SIZES, *COLOURS, *SHAPES, *DIRECTIONS, *SPEEDS, *ENDS)  # slot value -> word
MOTIONS = 25  # none stated, or a direction with a speed, which may be omitted, and an end
PAIRS = len(WORDS) * MOTIONS  # (word, motion)
SLOTS = 6  # size, colour, shape, direction, speed, end
OPTIONAL = (0, 1, 4)  # slots that a text may omit

SIZE, FRAMES, FPS = 32, 16, 8
RADII = {"small": 4.5, "large": 7.0}  # pixels
PACES = {"slowly": 0.5, "quickly": 1.0}  # pixels per frame
TURN = FRAMES // 2  # the frame in which a bouncing shape touches the wall
STEPS = {"right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1)}  # x, y
# radii from the centre to the outermost point right, left, up and down, as ``shapes.coverage``
# draws it
EXTENTS = {
    "circle": (1, 1, 1, 1),
    "square": (0.88, 0.88, 0.88, 0.88),
    "triangle": (0.9, 0.9, 1, 0.8),
    "ring": (1, 1, 1, 1),
    "cross": (1, 1, 1, 1),
}
GROUNDS = (  # 8-bit RGB of backgrounds
    (92, 76, 70),
    (84, 82, 62),
    (66, 84, 68),
    (60, 82, 84),
    (64, 70, 94),
    (82, 66, 90),
    (96, 70, 82),
    (72, 72, 74),
)


@dataclass(frozen=True)
class Caption:
    """Caption of one shape and its motion. ``None`` marks an omitted attribute; no text omits
    ``bounces``.
    """

    shape: str
    direction: str
    colour: str | None = None
    size: str | None = None
    speed: str | None = None
    bounces: bool | None = False

    def __str__(self) -> str:
        words = ["a", self.size, self.colour, self.shape, "moves", self.direction, self.speed]
        return " ".join(w for w in (*words, "and bounces" if self.bounces else None) if w)

    def slots(self) -> list[int]:
        """Six integers in ``range(len(WORDS))``."""
        end = None if self.bounces is None else ENDS[self.bounces]
        words = (self.size, self.colour, self.shape, self.direction, self.speed, end)
        return [WORDS.index(w) if w else ANY for w in words]

    def pairs(self) -> list[int]:
        """Six integers in ``range(PAIRS)``: a model's prompt."""
        return pairs(np.array([self.slots()]))[0].tolist()


def pairs(slots: np.ndarray) -> np.ndarray:
    """Join every slot with the motion of the caption: int [N, 6] -> int [N, 6].

    The start of a shape depends on direction, speed and bounce together, and a small model takes
    very long to put that together from single words.
    """
    _, _, _, direction, speed, end = slots.T
    at = direction - WORDS.index(DIRECTIONS[0])
    fast = np.where(speed == ANY, 0, speed - WORDS.index(SPEEDS[0]) + 1)
    motion = np.where(direction == ANY, 0, 1 + 6 * at + 2 * fast + (end == WORDS.index(ENDS[1])))
    return slots * MOTIONS + motion[:, None]


def parse(text: str) -> Caption:
    """Parse the text of a caption.

    Raises:
        ValueError: a word is not allowed where it stands; the message names the first one and the
            nearest allowed word.
    """
    if not text or not text.strip():
        raise ValueError(
            "the prompt is empty; expected a caption such as 'a small blue circle moves up quickly"
            " and bounces'"
        )
    words = re.sub(r"[.,!]+(\s|$)", " ", text.strip().lower()).split()
    if words and words[0] in ("a", "an", "the", "one"):
        words = words[1:]
    attributes: dict[str, str] = {}
    known: tuple[str, ...] = ()  # words that may stand here
    kinds = {
        "size": SIZES,
        "colour": COLOURS,
        "shape": SHAPES,
        "verb": ("moves", "moving", "goes"),
        "direction": DIRECTIONS,
        "speed": SPEEDS,
        "and": ("and",),
        "end": ("bounces",),
    }
    for kind, options in kinds.items():
        if kind == "end" and "and" not in attributes:
            break
        known += options
        if words and words[0] in options:
            attributes[kind] = words.pop(0)
            known = ()
        elif kind in ("shape", "verb", "direction", "end"):
            raise _unknown(words[0] if words else "the end of the caption", known, text)
    if words:
        raise _unknown(words[0], () if "end" in attributes else known, text)
    return Caption(
        attributes["shape"],
        attributes["direction"],
        attributes.get("colour"),
        attributes.get("size"),
        attributes.get("speed"),
        "end" in attributes,
    )


def _unknown(got: str, options: tuple[str, ...], text: str) -> ValueError:
    if not options:
        return ValueError(
            f"caption {text!r} continues with {got!r} after its end; expected nothing after 'and"
            " bounces'"
        )
    options = tuple("and bounces" if o == "and" else o for o in options)
    return unknown_word(got, options, f"caption {text!r}", "the vocabulary here")


def every_caption() -> list[Caption]:
    """All captions with every attribute stated."""
    return [
        Caption(s, d, c, z, v, b)
        for z, c, s, d, v, b in product(SIZES, COLOURS, SHAPES, DIRECTIONS, SPEEDS, (False, True))
    ]


def random_caption(rng: np.random.Generator) -> Caption:
    """Draw a caption with every attribute stated."""

    def pick(options):
        return options[rng.integers(len(options))]

    return Caption(
        pick(SHAPES),
        pick(DIRECTIONS),
        pick(COLOURS),
        pick(SIZES),
        pick(SPEEDS),
        bool(rng.integers(2)),
    )


def captions(n: int, seed: int, *, held: bool) -> list[Caption]:
    """Draw ``n`` captions, all held out or none of them."""
    return draw_conditions(n, seed, random_caption, held)


# --- Motion


def walls(shape: str, size: str) -> dict[str, float]:
    """Per direction the x or y of the centre, in pixels, at which a shape touches that wall, to the
    nearest half pixel.
    """
    room = {
        d: round(2 * RADII[size] * e) / 2 for d, e in zip(DIRECTIONS, EXTENTS[shape], strict=True)
    }
    return {d: SIZE - 0.5 - room[d] if sum(STEPS[d]) > 0 else room[d] - 0.5 for d in DIRECTIONS}


def trajectory(caption: Caption, start: tuple[float, float]) -> np.ndarray:
    """Centres (x, y) in pixels, one per frame, of a shape that starts at ``start``: float32 [16,
    2].

    Only the wall ahead turns a shape, and only one that bounces. Every attribute but the colour
    must be stated.
    """
    step = np.array(STEPS[caption.direction], np.float32)
    # pixels from the wall
    ahead = walls(caption.shape, caption.size)[caption.direction] * step.sum() - step @ start
    moved = PACES[caption.speed] * np.arange(FRAMES, dtype=np.float32)
    if caption.bounces:
        moved = np.minimum(moved, 2 * ahead - moved)
    return np.asarray(start, np.float32) + moved[:, None] * step


def starts(caption: Caption) -> tuple[np.ndarray, np.ndarray]:
    """Possible starts of a shape: x and y in pixels, freely combined, multiples of four where there
    are any, or of two. Along its way a bouncing shape has one start, from which it comes to the
    wall in frame ``TURN``.
    """
    wall = walls(caption.shape, caption.size)
    inside = [
        np.arange(np.ceil(wall[a]), wall[b] + 0.5).astype(int)
        for a, b in (("left", "right"), ("up", "down"))
    ]
    axis, sign = int(STEPS[caption.direction][0] == 0), sum(STEPS[caption.direction])
    ahead, pace = sign * (wall[caption.direction] - inside[axis]), PACES[caption.speed]
    inside[axis] = inside[axis][ahead >= pace * (FRAMES - 1)]
    out = [
        next(a[a % n == 0] for n in (4, 2, 1) if (a % n == 0).any()) if len(a) else a
        for a in inside
    ]
    if caption.bounces:
        out[axis] = np.array([wall[caption.direction] - sign * pace * TURN])
    return out[0], out[1]


# --- Drawing


def coverage(shape: str, radius: np.ndarray | float, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Share of each pixel that a shape covers, for many radii (or one) and centres in pixels:
    float32 [n, 32, 32] in [0, 1].

    The grid of ``shapes.coverage`` is twice as fine; four of its pixels make one.
    """

    def fine(v, shift):
        return (2 * np.asarray(v, np.float32) + np.float32(shift)).reshape(-1, 1, 1)

    c = shapes.coverage(shape, fine(radius, 0), fine(x, 0.5), fine(y, 0.5))
    c = c[:, ::2] + c[:, 1::2]
    return (c[:, :, ::2] + c[:, :, 1::2]) / 4


def background(rng: np.random.Generator) -> np.ndarray:
    """Draw a plain muted colour: float32 [32, 32, 3], 0..255."""
    return np.full((SIZE, SIZE, 3), GROUNDS[rng.integers(len(GROUNDS))], np.float32)


def draw(caption: Caption, rng: np.random.Generator) -> np.ndarray:
    """Render a clip that passes the checker for a caption: uint8 [16, 32, 32, 3]. Omitted
    attributes are drawn.
    """

    def pick(stated, options):
        return stated or options[rng.integers(len(options))]

    caption = replace(
        caption,
        colour=pick(caption.colour, COLOURS),
        size=pick(caption.size, SIZES),
        speed=pick(caption.speed, SPEEDS),
    )
    x, y = trajectory(caption, tuple(float(rng.choice(s)) for s in starts(caption))).T
    alpha = coverage(caption.shape, RADII[caption.size], x, y)[..., None]
    clip = background(rng) * (1 - alpha) + np.array(PALETTE[caption.colour], np.float32) * alpha
    return clip.round().astype(np.uint8)
