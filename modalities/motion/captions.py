"""Synthetic dataset of captioned human motion: the caption language.
``gen.modalities.motion.synth`` is its renderer.

A caption states an action, and its direction, speed, hand or leg, and count: ``a person waves
quickly with the left hand three times``. ``ACTIONS`` lists the attributes of each action. Speed,
side and count may be omitted ("a person walks forward"); a person who jumps in no direction stays
in place. A caption becomes five slots. Slot ``ANY`` means "not stated", or "the action has no such
attribute". The unconditional caption of classifier-free guidance has all slots ``ANY``.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from itertools import product

import numpy as np

from gen.core.errors import unknown_word
from gen.modalities.small_language import (
    draw_conditions,
)
from gen.modalities.small_language import held_out as held_out

DIRECTIONS = (
    "forward",
    "backward",
    "left",
    "right",
    "in place",
    "in a circle to the left",
    "in a circle to the right",
)
SPEEDS = ("slowly", "quickly")
REPEATS, STEPS = (1, 2, 3), (4, 6, 8)  # number of repetitions, or of steps
COUNTS = {
    1: "once",
    2: "twice",
    3: "three times",
    4: "for four steps",
    6: "for six steps",
    8: "for eight steps",
}
SIDES = ("left", "right", "both")
CIRCLES = DIRECTIONS[5:]


@dataclass(frozen=True)
class Action:
    """Attributes of an action. An empty tuple means that the action does not have the attribute."""

    directions: tuple[str, ...] = ()
    speeds: tuple[str, ...] = SPEEDS
    counts: tuple[int, ...] = REPEATS
    sides: tuple[str, ...] = ()
    limb: str = ""  # limb that the sides refer to
    particle: str = ""  # particle of the verb in writing


ACTIONS = {
    "walks": Action(
        ("forward", "backward", *CIRCLES), counts=STEPS
    ),  # a circle is one whole circle: it has no count
    "runs": Action(("forward",), counts=STEPS),
    "turns": Action(("left", "right")),
    "jumps": Action(("in place", "forward", "backward", "left", "right"), speeds=()),
    "waves": Action(sides=SIDES, limb="hand"),
    "kicks": Action(sides=SIDES[:2], limb="leg"),
    "squats": Action(),
    "bows": Action(),
    "sits": Action(counts=(), particle="down"),
}
ANY = 0
TABLES = tuple(  # per slot: slot value -> word
    ("<any>", *words) for words in (ACTIONS, DIRECTIONS, SPEEDS, COUNTS.values(), SIDES)
)
SLOTS = len(TABLES)  # action, direction, speed, count, side
OPTIONAL = (2, 3, 4)  # slots that a text may omit


def options(action: str, direction: str | None = None) -> dict[str, tuple]:
    """Attributes of captions of an action, ``speed``, ``count`` and ``side``, each with its values.
    A tuple may be empty.
    """
    known = ACTIONS[action]
    return {
        "speed": known.speeds,
        "count": () if direction in CIRCLES else known.counts,
        "side": known.sides,
    }


@dataclass(frozen=True)
class Caption:
    """Caption of one person's action. ``None`` means that the caption does not state the attribute,
    or that the action does not have it; an action with directions has one. ``count`` are
    repetitions, or steps.

    Raises:
        ValueError: the action cannot have an attribute's value.
    """

    action: str
    direction: str | None = None
    speed: str | None = None
    count: int | None = None
    side: str | None = None

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise unknown_word(str(self.action), tuple(ACTIONS), "caption", "the actions")
        allowed = {"direction": ACTIONS[self.action].directions or (None,)}
        allowed |= {
            key: (None, *values) for key, values in options(self.action, self.direction).items()
        }
        for key, values in allowed.items():
            if getattr(self, key) not in values:
                expected = ", ".join("nothing" if v is None else str(v) for v in values)
                raise ValueError(
                    f"a person who {_verb(self.action)} has {key} {getattr(self, key)!r}; expected"
                    f" {expected}"
                )

    def __str__(self) -> str:
        limb = ACTIONS[self.action].limb
        side = {None: None, "both": f"with both {limb}s"}.get(
            self.side, f"with the {self.side} {limb}"
        )
        direction = None if self.direction == "in place" else self.direction
        words = (
            "a person",
            _verb(self.action),
            direction,
            self.speed,
            side,
            COUNTS.get(self.count),
        )
        return " ".join(w for w in words if w)

    def slots(self) -> list[int]:
        """Five integers, each in the range of its table in ``TABLES``."""
        words = (self.action, self.direction, self.speed, COUNTS.get(self.count), self.side)
        return [table.index(w) if w else ANY for table, w in zip(TABLES, words, strict=True)]

    def pairs(self) -> list[int]:
        """Five integers in ``range(PAIRS)``: a model's prompt."""
        return pairs(np.array([self.slots()]))[0].tolist()


def _verb(action: str) -> str:
    return f"{action} {ACTIONS[action].particle}".strip()


def _enumerate() -> tuple[np.ndarray, int]:
    """Number of every joint word: int [SLOTS, words, actions, directions], -1 for joint words
    outside the language; and their count.
    """
    table = np.full((SLOTS, max(map(len, TABLES)), len(TABLES[0]), len(TABLES[1])), -1)
    table[:, ANY, ANY, ANY] = np.arange(SLOTS)
    for action, known in ACTIONS.items():
        shared: dict[tuple[int, int], int] = {}  # words of the action, for every direction
        for direction in known.directions or (None,):
            at = tuple(Caption(action, direction).slots()[:2])
            values = options(action, direction).values()
            table[0, at[0], *at], table[1, at[1], *at] = table.max() + 1, table.max() + 2
            words = [
                (i, w)
                for i, v in zip(OPTIONAL, values, strict=True)
                for w in (ANY, *(TABLES[i].index(COUNTS.get(x, x)) for x in v))
            ]
            for slot, word in words:
                table[slot, word, *at] = shared.setdefault((slot, word), table.max() + 1)
    return table, int(table.max()) + 1


# PAIRS: (action, direction) twice, (speed, action), (count, action), (side, action)
_JOINT, PAIRS = _enumerate()


def pairs(slots: np.ndarray) -> np.ndarray:
    """Join action and direction with each other, and speed, count and side with the action: int [N,
    5] -> int [N, 5].

    The meaning of a word differs from action to action, and a small model takes very long to put it
    together from single words. Directions share the other slots, so every joint word of a held-out
    caption occurs in training captions. Only combinations of the language have a number.

    Raises:
        ValueError: no caption has these slots.
    """
    slots = np.asarray(slots)
    joined = _JOINT[np.arange(SLOTS), slots, slots[:, :1], slots[:, 1:2]]
    if (joined < 0).any():
        raise ValueError(
            f"no caption has the slots {slots[(joined < 0).any(1)][0].tolist()} (action, direction,"
            " speed, count, side)"
        )
    return joined


# --- Reading

_STEMS = {
    "walks": "walk",
    "runs": "run",
    "turns": "turn",
    "jumps": "jump",
    "waves": "wav",
    "kicks": "kick",
    "squats": "squat",
    "bows": "bow",
    "sits": "sit",
}
_SUBJECTS = ("person", "man", "woman", "someone", "figure")
_DIRECTIONS = {  # value -> alternative spellings
    "forward": ("forwards",),
    "backward": ("backwards",),
    "left": ("to the left",),
    "right": ("to the right",),
    "in place": ("up", "on the spot"),
    CIRCLES[0]: ("in a circle left", "in a left circle"),
    CIRCLES[1]: ("in a circle right", "in a right circle"),
}
_NUMBERS = {
    1: ("one time", "1 time"),
    2: ("two times", "2 times"),
    3: ("thrice", "3 times"),
    4: ("four steps", "4 steps", "for 4 steps"),
    6: ("six steps", "6 steps", "for 6 steps"),
    8: ("eight steps", "8 steps", "for 8 steps"),
}
_LIMBS = {"hand": ("hand", "arm"), "leg": ("leg", "foot")}


def _verbs() -> dict[str, str]:
    forms = {}
    for action, stem in _STEMS.items():
        double = stem + stem[-1] if stem in ("run", "squat", "sit") else stem
        forms |= dict.fromkeys([action, action.removesuffix("s"), double + "ing"], action)
    return forms


def _phrases(action: str) -> dict[tuple[str, ...], tuple]:
    """Phrases that may follow the verb: words -> (attribute, value, usual spelling)."""
    known = ACTIONS[action]
    out = {(d, *_DIRECTIONS[d]): ("direction", d) for d in known.directions}
    out |= {(s,): ("speed", s) for s in known.speeds}
    out |= {(COUNTS[c], *_NUMBERS[c]): ("count", c) for c in known.counts}
    for side in known.sides:
        how = (
            ("both {}s",)
            if side == "both"
            else (f"the {side} {{}}", f"a {side} {{}}", f"their {side} {{}}")
        )
        out[tuple(f"with {h.format(limb)}" for h in how for limb in _LIMBS[known.limb])] = (
            "side",
            side,
        )
    return {tuple(text.split()): (*what, texts[0]) for texts, what in out.items() for text in texts}


def parse(text: str) -> Caption:
    """Parse the text of a caption. Phrases after the verb may come in any order.

    Raises:
        ValueError: a word is not allowed where it stands; the message names the first one and the
            nearest allowed word.
    """
    if not text or not text.strip():
        raise ValueError(
            "the prompt is empty; expected a caption such as 'a person walks forward quickly for"
            " six steps'"
        )
    words = re.sub(r"[.,!]+(\s|$)", " ", text.strip().lower()).split()
    where, verbs, known = f"caption {text!r}", _verbs(), (*_SUBJECTS, *ACTIONS)
    if words and words[0] in ("a", "an", "the", "one"):
        words.pop(0)
    if words and words[0] in _SUBJECTS:
        words.pop(0)
        known = tuple(ACTIONS)
        if words and words[0] == "is":
            words.pop(0)
    if not words or words[0] not in verbs:
        raise _refused(words[0] if words else "the end of the caption", known, where)
    action, attributes = verbs[words.pop(0)], {}
    if words and words[0] == ACTIONS[action].particle:
        words.pop(0)
    while words:
        done = {*attributes, *(["count"] if attributes.get("direction") in CIRCLES else [])}
        never = CIRCLES if "count" in attributes else ()
        further = {
            words: what
            for words, what in _phrases(action).items()
            if what[0] not in done and what[1] not in never
        }
        used, (key, value, _) = _longest(words, further, where, _verb(action))
        words, attributes[key] = words[used:], value
    directions = ACTIONS[action].directions
    if directions and "direction" not in attributes:
        if len(directions) > 1 and "in place" not in directions:
            raise ValueError(
                f"{where}: a person who {_verb(action)} needs a direction; known:"
                f" {', '.join(directions)}"
            )
        # the only direction, or "in place", which no caption needs to state
        attributes["direction"] = directions[0]
    return Caption(action, **attributes)


def _longest(words: list[str], phrases: dict, where: str, verb: str) -> tuple[int, tuple]:
    """Longest phrase that the words begin with: its number of words, and its meaning."""
    best, reached = None, phrases
    for i in range(len(words) + 1):
        best = (i, reached[tuple(words[:i])]) if tuple(words[:i]) in reached else best
        further = {
            p: v for p, v in reached.items() if i < len(words) and len(p) > i and p[i] == words[i]
        }
        if not further:
            break
        reached = further
    if best is not None:
        return best
    expected = tuple(
        dict.fromkeys(p[i] if i else usual for p, (_, _, usual) in reached.items() if len(p) > i)
    )
    if not expected:
        raise ValueError(
            f"{where} continues with {words[0]!r} after its end; a person who {verb} has no"
            " further attributes"
        )
    raise _refused(
        words[i] if i < len(words) else "the end of the caption",
        expected,
        where,
        f"what may follow {verb!r}",
    )


def _refused(
    got: str, known: tuple[str, ...], where: str, what: str = "the vocabulary here"
) -> ValueError:
    """Build the error of ``unknown_word``, but also find the nearest word within a phrase."""
    if not difflib.get_close_matches(got, known, 1, 0.5):
        inside = [w for phrase in known for w in phrase.split()]
        near = difflib.get_close_matches(got, inside, 1, 0.6)
        known = tuple(sorted(known, key=lambda phrase: not near or near[0] not in phrase.split()))
    return unknown_word(got, known, where, what)


# --- Sampling captions


def every_caption() -> list[Caption]:
    """All captions that state every attribute of their action."""
    out = []
    for action, known in ACTIONS.items():
        for direction in known.directions or (None,):
            values = [v or (None,) for v in options(action, direction).values()]
            out += [Caption(action, direction, *values_of) for values_of in product(*values)]
    return out


def random_caption(rng: np.random.Generator) -> Caption:
    """Draw a caption that states every attribute of its action. Actions with their directions are
    equally likely, so that those with few captions are as frequent as those with many.
    """
    kinds = [(a, d) for a, known in ACTIONS.items() for d in known.directions or (None,)]
    return complete(Caption(*kinds[rng.integers(len(kinds))]), rng)


def complete(caption: Caption, rng: np.random.Generator) -> Caption:
    """Caption with its omitted attributes drawn."""
    attributes = {}
    for key, values in options(caption.action, caption.direction).items():
        # drawn in any case, so that stating one attribute changes no other draw
        draw = int(rng.integers(max(len(values), 1)))
        attributes[key] = getattr(caption, key) or (values[draw] if values else None)
    return Caption(caption.action, caption.direction, **attributes)


def captions(n: int, seed: int, *, held: bool) -> list[Caption]:
    """Draw ``n`` captions, all held out or none of them."""
    return draw_conditions(n, seed, random_caption, held)
