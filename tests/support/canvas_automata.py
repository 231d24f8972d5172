"""Random automata over small canvases, and the rows that they accept by enumeration."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import torch
from closed_form import LeaningMasked
from tabular import masked_target
from torch import Tensor

from gen.contracts.constraint import Automaton, AutomatonConstraint
from gen.contracts.row_constraint import RowConstraint
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.targets.masked import MaskedTarget

IDS, MASK, GRID, T, ROWS = 4, 4, (2, 3), 6, 3
SPACE = replace(
    TokenSpace.codes(GRID, IDS, IDS + 1, MASK),
    delimiters=(1, 2),
    rarity=torch.arange(1.0, IDS + 2),
)
ALL = np.array(list(product(range(IDS), repeat=T)))


class Model(LeaningMasked):
    """Places agree with themselves in part, and with what stands elsewhere in part."""

    own = 2.0


MODEL = Model(IDS + 1, 1, spread=3.0)


def accepts(automaton: Automaton, rows: np.ndarray) -> np.ndarray:
    """Whether rows [n, T] are accepted, by walking along each: bool [n]."""
    state = np.zeros(len(rows), dtype=int)
    for tokens in rows.T:
        kind = automaton.token_class[tokens]
        state = np.where((state < 0) | (kind < 0), -1, automaton.next[state, kind])
    return (state >= 0) & automaton.accepting[state]


def random_automaton(
    seed: int, states: int = 12, ids: int = IDS, rows: np.ndarray = ALL
) -> Automaton:
    """One of up to so many states that accepts some of the rows [n, T], and not nearly all."""
    draw = np.random.default_rng(seed)
    while True:
        size, kinds = int(draw.integers(2, states + 1)), int(draw.integers(2, ids + 1))
        token_class = np.append(draw.integers(-1, kinds, ids), -1).astype(np.int32)
        following = draw.integers(0, size, (size, kinds))
        following = np.where(draw.random((size, kinds)) < 0.5, following, -1).astype(np.int32)
        found = Automaton(following, draw.random(size) < 0.4, token_class)
        if 2 <= accepts(found, rows).sum() <= len(rows) // 2:
            return found


EVERYTHING = Automaton(
    np.zeros((1, 1), dtype=np.int32),
    np.ones(1, dtype=bool),
    np.zeros(IDS + 1, dtype=np.int32),
)


def under(automaton: Automaton, space: TokenSpace = SPACE) -> TokenSpace:
    """The space with the automaton as its constraint."""
    before = 0 if space.prefix is None else len(space.prefix)
    constraint = RowConstraint(AutomatonConstraint(automaton), before + space.length)
    return replace(space, constraint=constraint)


def offered(accepted: np.ndarray, canvas: list[int], ids: int = IDS) -> np.ndarray:
    """Tokens that some accepted row [m, T] has at each position and else what the canvas holds:
    bool [T, ids]."""
    row = np.array(canvas)
    fits = (accepted == row) | (row == MASK)
    out = np.zeros((len(row), ids), dtype=bool)
    for position in range(len(row)):
        others = np.delete(fits, position, axis=1).all(1)
        out[position, accepted[others, position]] = True
    return out


def target(
    space: TokenSpace, sampling: SamplingParams | None = None, rows=range(ROWS), model=MODEL
) -> MaskedTarget:
    return masked_target(model, space, sampling or SamplingParams(), [r % 3 for r in rows])


def keys(rows=range(ROWS)) -> CounterRNG:
    return CounterRNG([31 * r + 7 for r in rows])


def partly(accepted: np.ndarray, seed: int, share: float = 0.4) -> Tensor:
    """Canvases that hold a part of an accepted row each; the first is empty: long [ROWS, T]."""
    draw = np.random.default_rng(seed)
    rows = accepted[draw.integers(len(accepted), size=ROWS)].copy()
    rows[draw.random(rows.shape) > share] = MASK
    rows[0] = MASK
    return torch.from_numpy(rows)
