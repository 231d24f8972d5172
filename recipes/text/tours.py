"""Synthetic texts of 2,048 words: tours through a map, which the prompt gives and a program checks.

A map has 8 places, ``a`` to ``h``, and each of them three ways, ``left``, ``ahead`` and ``right``.
A prompt names where they lead, place by place, and the answer makes 512 moves, each from where the
one before it ended. Which way is taken is free:

    tour bcd aef ... : a left b . b right f . f ahead ...

Every fourth word is a matter of chance, and every place that a move leads to stands in the
prompt, up to 2,000 words back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.contracts.frontend import TokenFrontend
from gen.contracts.modality import Binding, Verdict
from gen.core.errors import GenError
from gen.modalities.grid_base import GridModality
from gen.modalities.text.modality import NOTHING, TextModality
from gen.tokenizers.text.words import TextWords

PLACES = tuple("abcdefgh")
WAYS = ("left", "ahead", "right")
STOP = "."
WORDS = (*PLACES, *WAYS, STOP)
MOVES, PER_MOVE = 512, 4  # a move is a place, a way, a place and a stop
POSITIONS = MOVES * PER_MOVE
SLOTS = len(PLACES) * len(WAYS)
EXAMPLE = f"{' '.join(['bcd'] * 2)} ..., {len(PLACES)} groups of {len(WAYS)} places"


@dataclass(frozen=True)
class Tour:
    """Condition of a tour.

    Attributes:
        leads: place that each way of each place leads to, by number, [8][3].
    """

    leads: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        return " ".join(["tour", *("".join(PLACES[n] for n in row) for row in self.leads)])

    @classmethod
    def parse(cls, prompt: str) -> Tour:
        """Read a prompt. Raises ``GenError`` for another text than a map."""
        first, *rows = prompt.lower().split() or [""]
        named = all(len(row) == len(WAYS) and set(row) <= set(PLACES) for row in rows)
        if first != "tour" or len(rows) != len(PLACES) or not named:
            raise GenError(f"the prompt is {prompt[:80]!r}; expected 'tour {EXAMPLE}'")
        return cls(tuple(tuple(PLACES.index(n) for n in row) for row in rows))


def maps(count: int, seed: int) -> np.ndarray:
    """Draw maps, int64 [count, 8, 3]; no way leads back to its own place."""
    rng = np.random.default_rng(seed)
    leads = rng.integers(0, len(PLACES) - 1, (count, len(PLACES), len(WAYS)))
    return leads + (leads >= np.arange(len(PLACES))[:, None])


def tours(leads: np.ndarray, moves: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a tour through each map, from any place.

    Args:
        leads: maps, int64 [N, 8, 3].
        moves: number of moves.
        rng: draws the first place and the ways.

    Returns:
        Word ids, int64 [N, 4 moves].
    """
    row, place = np.arange(len(leads)), rng.integers(0, len(PLACES), len(leads))
    out = np.empty((len(leads), moves, PER_MOVE), dtype=np.int64)
    out[..., 3] = WORDS.index(STOP)
    for move in range(moves):
        way = rng.integers(0, len(WAYS), len(leads))
        out[:, move, 0], out[:, move, 1] = place, len(PLACES) + way
        place = leads[row, place, way]
        out[:, move, 2] = place
    return out.reshape(len(leads), -1)


def slots_of(leads: np.ndarray) -> np.ndarray:
    """Return the condition slots [N, 24] of maps [N, 8, 3]."""
    return 1 + leads.reshape(len(leads), -1)


class TourModality(TextModality):
    """Texts of 2,048 words. It is no registered modality: its models are those of
    ``gen.recipes.text.long_answers``."""

    name = "text"
    models = {}
    slots = SLOTS
    words = 1 + len(PLACES)
    unconditional = [NOTHING] * SLOTS

    def condition(self, prompt: str) -> Any:
        return Tour.parse(prompt)

    def example_prompts(self, count: int, seed: int) -> list[str]:
        """Maps to measure with; training draws those of odd seeds."""
        return [str(Tour(tuple(map(tuple, m.tolist())))) for m in maps(count, 2 * seed)]

    def prompt_words(self, condition: Any) -> list[int]:
        return slots_of(np.array(condition.leads)[None])[0].tolist()

    def frontend(self, kind="codes", device="cpu", dtype=torch.float32, folder: Path | None = None):
        return TextWords.of(WORDS, POSITIONS, device)

    def bind(self, config: Any, frontend: TokenFrontend, model_name: str) -> Binding:
        binding = GridModality.bind(self, config, frontend, model_name)
        legal, end = binding.space.legal.clone(), frontend.eos_token_id
        legal[0, end] = False
        places = torch.arange(len(PLACES))
        said = torch.cat([torch.arange(end + 1), torch.tensor([-1]), places])
        space = replace(binding.space, legal=legal, eos_token_id=end, prompt_tokens=said)
        return replace(binding, space=space)

    def codebook(self, frontend: TokenFrontend) -> Tensor | None:
        """None: words have no vectors."""

    def check(self, media: str, prompt: str) -> Verdict:
        right, moves = right_moves(media, Tour.parse(prompt))
        done = len(moves) == MOVES
        text = f"{right} of {len(moves)} moves follow the map; expected {MOVES}"
        return Verdict(done and right == MOVES, bool(moves), text)

    def grade(self, media: str, prompt: str) -> float:
        """Return the share of 512 moves that are right."""
        return right_moves(media, Tour.parse(prompt))[0] / MOVES


def right_moves(text: str, tour: Tour) -> tuple[int, list[list[str]]]:
    """Count the moves that follow the map and begin where the last one ended.

    Returns:
        Their number, and all moves as lists of words.
    """
    words = text.split()
    moves = [words[n : n + PER_MOVE] for n in range(0, len(words), PER_MOVE)]
    right, last = 0, None
    for move in moves:
        match move:
            case [start, way, end, "."] if start in PLACES and way in WAYS and end in PLACES:
                leads = tour.leads[PLACES.index(start)][WAYS.index(way)]
                right += PLACES[leads] == end and last in (None, start)
                last = end
            case _:
                last = None
    return right, moves
