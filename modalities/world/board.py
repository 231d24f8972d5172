"""Synthetic dataset of worlds: a board of 8 x 8 cells with an agent, a box and walls, drawn as
frames of 16 x 16 pixels.

One action moves the agent by one cell. A wall and the rim stop it. It pushes the box if the cell
behind the box is free, and stops otherwise. A frame shows the whole state, and the next frame is a
function of the frame and the action.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ACTIONS = ("up", "down", "left", "right", "stay")
CELLS = 8  # cells of a side
PIXELS = 2  # pixels of a cell's side
SIDE = CELLS * PIXELS
MOVES = np.array([(-1, 0), (1, 0), (0, -1), (0, 1), (0, 0)])  # (row, column) of each action
WALLS = (4, 9)  # fewest and most walls of a board
REACH = 3  # largest distance between box and agent, in rows and in columns, of every second board
FLOOR, WALL, BOX, AGENT = range(4)
COLOURS = np.array([(30, 36, 54), (124, 135, 158), (46, 196, 182), (255, 159, 28)], np.uint8)


@dataclass(frozen=True)
class Boards:
    """States of N boards.

    Attributes:
        walls: bool [N, 8, 8].
        agent: cells of the agents, int64 [N, 2] (row, column).
        box: cells of the boxes, int64 [N, 2].
    """

    walls: np.ndarray
    agent: np.ndarray
    box: np.ndarray


def draw(count: int, rng: np.random.Generator) -> Boards:
    """Draw starts.

    Walls, agent and box are at different cells. The box is never at the rim, where it could be
    pushed along the rim alone. In half of the boards it is near the agent.
    """
    n = np.arange(count)
    order = rng.random((count, CELLS * CELLS)).argsort(1)
    many = rng.integers(WALLS[0], WALLS[1] + 1, count)
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(CELLS * CELLS)[None], 1)
    walls = (rank < many[:, None]).reshape(count, CELLS, CELLS)

    score = rng.random((count, CELLS, CELLS))
    agent = _argmax(np.where(walls, -1, score))
    rows, columns = np.indices((CELLS, CELLS))
    free = ~walls & (rows > 0) & (rows < CELLS - 1) & (columns > 0) & (columns < CELLS - 1)
    free[n, agent[:, 0], agent[:, 1]] = False
    away = np.maximum(
        abs(rows - agent[:, :1, None]), abs(columns - agent[:, 1:, None])
    )  # [N, 8, 8]
    near = (away <= REACH) & (rng.random((count, 1, 1)) < 0.5)
    box = _argmax(np.where(free, rng.random((count, CELLS, CELLS)) + near, -1))
    return Boards(walls, agent, box)


def step(boards: Boards, actions: np.ndarray) -> Boards:
    """Advance boards by actions, int64 [N] (indices into ``ACTIONS``)."""
    move = MOVES[np.asarray(actions)]
    target, behind = boards.agent + move, boards.box + move
    pushes = (target == boards.box).all(-1)
    goes = _free(boards, target) & (~pushes | _free(boards, behind))
    moved = goes[:, None] & pushes[:, None]
    return Boards(
        boards.walls,
        np.where(goes[:, None], target, boards.agent),
        np.where(moved, behind, boards.box),
    )


def render(boards: Boards) -> np.ndarray:
    """Draw frames, uint8 [N, 16, 16, 3]."""
    n = np.arange(len(boards.agent))
    kinds = np.where(boards.walls, WALL, FLOOR)
    kinds[n, boards.box[:, 0], boards.box[:, 1]] = BOX
    kinds[n, boards.agent[:, 0], boards.agent[:, 1]] = AGENT
    return COLOURS[kinds].repeat(PIXELS, 1).repeat(PIXELS, 2)


def roll_out(boards: Boards, actions: np.ndarray) -> np.ndarray:
    """Draw the start and the frame after each action.

    Args:
        boards: N starts.
        actions: int64 [N, T].

    Returns:
        Frames, uint8 [N, T + 1, 16, 16, 3].
    """
    frames = [render(boards)]
    for t in range(actions.shape[1]):
        boards = step(boards, actions[:, t])
        frames.append(render(boards))
    return np.stack(frames, 1)


def persistent_actions(
    count: int, length: int, persistence: float, rng: np.random.Generator
) -> np.ndarray:
    """Draw action sequences, int64 [count, length].

    An action is repeated with probability ``persistence`` and otherwise one of the other four.
    """
    out = rng.integers(len(ACTIONS), size=(count, length))
    for t in range(1, length):
        other = (out[:, t - 1] + rng.integers(1, len(ACTIONS), count)) % len(ACTIONS)
        out[:, t] = np.where(rng.random(count) < persistence, out[:, t - 1], other)
    return out


def seeking_actions(
    boards: Boards, length: int, share: float, rng: np.random.Generator
) -> np.ndarray:
    """Draw action sequences that often push the box, int64 [N, length].

    Args:
        boards: N starts.
        length: actions of each.
        share: probability of a step towards the box; the other steps are any of the five.
        rng: random numbers.
    """
    n, out = len(boards.agent), []
    for _ in range(length):
        way = boards.box - boards.agent
        column = abs(way[:, 1]) + rng.uniform(-0.5, 0.5, n) > abs(way[:, 0])
        along = np.where(column, way[:, 1], way[:, 0])
        towards = 2 * column + (along > 0)  # up, down, left, right
        out.append(np.where(rng.random(n) < share, towards, rng.integers(len(ACTIONS), size=n)))
        boards = step(boards, out[-1])
    return np.stack(out, 1)


def _free(boards: Boards, cells: np.ndarray) -> np.ndarray:
    """Return whether cells [N, 2] are on the board and no wall, bool [N]."""
    inside = ((cells >= 0) & (cells < CELLS)).all(-1)
    row, column = np.clip(cells, 0, CELLS - 1).T
    return inside & ~boards.walls[np.arange(len(cells)), row, column]


def _argmax(scores: np.ndarray) -> np.ndarray:
    """Return the cell of the largest score of each board: int64 [N, 2]."""
    return np.stack(np.unravel_index(scores.reshape(len(scores), -1).argmax(1), (CELLS, CELLS)), 1)
