"""Checker of clips of the board, which reads pixels alone.

A cell shows what the colour of each of its pixels is nearest to; a cell whose pixels disagree shows
nothing, nor does a pixel far from all colours. A frame is a board if every cell shows something,
with one agent and one box. The first frame is the start, and the others are compared with the
simulator.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gen.contracts.modality import Verdict
from gen.modalities.world import board
from gen.modalities.world.board import AGENT, BOX, CELLS, PIXELS, WALL, Boards

NOTHING = -1
# RGB distance of a pixel from its colour: half of that between the two nearest colours
_SHADES = board.COLOURS.astype(float)
MOST = min(np.linalg.norm(a - b) for i, a in enumerate(_SHADES) for b in _SHADES[i + 1 :]) / 2


@dataclass(frozen=True)
class Reading:
    """Positions that frames show.

    Attributes:
        cells: what each cell shows, int64 [F, 8, 8], ``NOTHING`` where nothing is clear.
        agent: cell of the agent, int64 [F, 2]; -1 where there is not exactly one.
        box: cell of the box, the same.
    """

    cells: np.ndarray
    agent: np.ndarray
    box: np.ndarray


def read(frames: np.ndarray) -> Reading:
    """Read frames uint8 [F, 16, 16, 3]."""
    distance = np.linalg.norm(frames[..., None, :].astype(float) - _SHADES, axis=-1)
    kind = np.where(distance.min(-1) < MOST, distance.argmin(-1), NOTHING)
    parts = kind.reshape(len(frames), CELLS, PIXELS, CELLS, PIXELS)
    least, most = parts.min((2, 4)), parts.max((2, 4))
    cells = np.where(least == most, most, NOTHING)
    return Reading(cells, _only(cells == AGENT), _only(cells == BOX))


def expected(first: Reading, actions: np.ndarray) -> Reading | None:
    """Roll out what the first frame of a reading shows; None where that is no board.

    Args:
        first: reading whose frame 0 is the start.
        actions: int64 [T].
    """
    if (first.cells[0] == NOTHING).any() or (first.agent[0] < 0).any() or (first.box[0] < 0).any():
        return None
    start = Boards(first.cells[:1] == WALL, first.agent[:1], first.box[:1])
    return read(board.roll_out(start, actions[None])[0])


def check(frames: np.ndarray, actions: np.ndarray) -> Verdict:
    """Judge whether every frame [F, 16, 16, 3] shows what its action, int64 [F - 1], leads to."""
    shown = read(frames)
    truth = expected(shown, actions)
    if truth is None:
        return Verdict(False, False, "the first frame shows no board with one agent and one box")
    if len(frames) != len(actions) + 1:
        return Verdict(
            False, True, f"{len(frames)} frames; expected {len(actions) + 1}, one per action more"
        )
    wrong = (shown.cells != truth.cells).any((1, 2)).nonzero()[0]
    if not len(wrong):
        return Verdict(True, True, f"{len(actions)} actions as simulated")
    f = int(wrong[0])
    for name, seen, right in (("agent", shown.agent, truth.agent), ("box", shown.box, truth.box)):
        if (seen[f] != right[f]).any():
            where = "nowhere" if (seen[f] < 0).any() else f"at cell {tuple(seen[f].tolist())}"
            return Verdict(
                False, True, f"frame {f}: {name} {where}, expected {tuple(right[f].tolist())}"
            )
    return Verdict(False, True, f"frame {f}: a cell differs from the simulator")


def grade(frames: np.ndarray, actions: np.ndarray) -> float:
    """Return the share of frames before the first one that is wrong, 0 to 1."""
    shown = read(frames)
    truth = expected(shown, actions)
    if truth is None:
        return 0.0
    n = min(len(frames), len(actions) + 1)
    right = (shown.cells[:n] == truth.cells[:n]).all((1, 2))
    return float(right.cumprod().sum() / (len(actions) + 1))


def _only(there: np.ndarray) -> np.ndarray:
    """Return the cell of the only True of each frame, int64 [F, 2]; -1 where there is another
    number of them."""
    flat = there.reshape(len(there), -1)
    cell = np.stack(np.unravel_index(flat.argmax(1), there.shape[1:]), 1)
    return np.where(flat.sum(1)[:, None] == 1, cell, -1)
