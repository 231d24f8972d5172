"""Synthetic dataset of robot actions: a small deterministic tabletop and the demonstrator that
solves its tasks.

The table is one metre square, seen from above. A round gripper is moved by actions ``a`` in [-1,
1]^2, ``HORIZON`` of them to a chunk; in one control step it moves by ``d = STEP * a``. There may be
a round block, or a wall across the middle.

*Block.* Contact is quasi-static without slip. Let ``t`` be the first moment of the step at which
the gripper touches the block while it moves towards it, ``|p + t d - b| = CONTACT`` and ``(p + t d
- b) . d < 0``; from then on both move together:

    p <- p + d,    b <- b + (1 - t) d

An error perpendicular to the push thus stays constant. (Without friction it would grow as
``exp(distance / CONTACT)``, and no chunk chosen in advance could push anything far.)

*Wall.* A segment of length ``2 HALF`` on ``x = WALL_X``. The gripper stops where it touches the
wall, which counts as a collision. The rim of the table stops the gripper and the block without a
collision.

The demonstrator moves by minimum jerk (Flash and Hogan, 1985), ``s(t) = 10 t^3 - 15 t^4 + 6 t^5``:
straight to the goal; or along a curve that comes to the block from behind, and then straight; or
round the end of the wall that is nearer to the straight line. It is a function of the state alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

KINDS = ("reach", "push", "avoid")
# metres; 0 for things that are not there
STATE_NAMES = ("gripper_x", "gripper_y", "goal_x", "goal_y", "block_x", "block_y", "wall_y")
STATES = len(STATE_NAMES)
USED = {
    "reach": STATE_NAMES[:4],
    "push": STATE_NAMES[:6],
    "avoid": (*STATE_NAMES[:4], "wall_y"),
}  # numbers of the state by kind of task
GRIPPER, GOAL, BLOCK, WALL = slice(0, 2), slice(2, 4), slice(4, 6), 6

HORIZON, DIMENSIONS = 16, 2  # control steps of a chunk, numbers of an action
CONTROL_HZ = 10
STEP = 0.1  # metres per control step at full speed
GRIPPER_RADIUS, BLOCK_RADIUS = 0.03, 0.05  # metres
CONTACT = GRIPPER_RADIUS + BLOCK_RADIUS
WALL_X, HALF = 0.5, 0.15  # metres: x of the wall, and half its length
CLEARANCE = 0.09  # metres between the end of the wall and the demonstrator's path
SUCCESS_RADIUS = 0.05  # metres between the gripper, or the block, and the goal
DURATIONS = {"reach": 12, "push": 16, "avoid": 16}  # control steps of a demonstration
_AWAY = (
    1e-9  # square metres: rounding tolerance, so that motion along a surface is no motion into it
)


@dataclass(frozen=True)
class Rollout:
    """Result of actions.

    Attributes:
        states: float32 [..., T + 1, 7], the start first.
        collided: bool [..., T], per control step.
    """

    states: np.ndarray
    collided: np.ndarray


def kinds(states: np.ndarray) -> np.ndarray:
    """Index into ``KINDS`` of states [..., 7]: int [...]. Only a task to push has a block, only one
    to avoid has a wall.
    """
    states = np.asarray(states)
    return np.where((states[..., BLOCK] != 0).any(-1), 1, np.where(states[..., WALL] != 0, 2, 0))


# --- The world


def step(state: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Advance tables by one control step.

    Args:
        state: [..., 7].
        action: [..., 2], clipped to [-1, 1].

    Returns:
        The new states float64 [..., 7], and whether the gripper ran into the wall, bool [...].
    """
    state = np.array(state, np.float64)
    p, b = state[..., GRIPPER], state[..., BLOCK]
    d = np.clip(p + STEP * np.clip(np.asarray(action, np.float64), -1, 1), 0, 1) - p
    hit = wall_time(state, d)
    collided = hit <= 1
    d = d * np.where(collided, hit, 1.0)[..., None]

    touch = np.where((b != 0).any(-1), _enter(p - b, d, CONTACT), np.inf)
    # move of the gripper after it touches the block
    left = np.where(touch <= 1, 1 - np.minimum(touch, 1), 0.0)[..., None] * d
    carried = np.where(
        touch[..., None] <= 1, np.clip(b + left, BLOCK_RADIUS, 1 - BLOCK_RADIUS) - b, 0.0
    )
    state[..., GRIPPER] = p + d - left + carried
    state[..., BLOCK] = b + carried
    return state, collided


def rollout(actions: np.ndarray, state: np.ndarray) -> Rollout:
    """Roll chunks [..., T, 2] out from states [..., 7]."""
    actions, states, hits = np.asarray(actions), [np.asarray(state, np.float64)], []
    for i in range(actions.shape[-2]):
        after, hit = step(states[-1], actions[..., i, :])
        states.append(after)
        hits.append(hit)
    return Rollout(np.stack(states, -2).astype(np.float32), np.stack(hits, -1))


def wall_time(state: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Fraction of a move ``d`` [..., 2] in [0, 1] after which the gripper touches the wall, or
    infinity: float64 [...].

    The gripper's centre may not enter a capsule round the segment: a slab between two discs.
    """
    p, wall = state[..., GRIPPER], state[..., WALL]
    off = p[..., 0] - WALL_X
    inward = -np.sign(off) * d[..., 0]
    slab = np.maximum((np.abs(off) - GRIPPER_RADIUS) / np.where(inward > 0, inward, 1), 0)
    beside = np.abs(p[..., 1] + slab * d[..., 1] - wall) <= HALF
    times = [np.where((inward * GRIPPER_RADIUS > _AWAY) & beside & (slab <= 1), slab, np.inf)]
    times += [
        _enter(p - np.stack([np.full_like(wall, WALL_X), wall + end], -1), d, GRIPPER_RADIUS)
        for end in (-HALF, HALF)
    ]
    return np.where(wall != 0, np.minimum.reduce(times), np.inf)


def _enter(f: np.ndarray, d: np.ndarray, radius: float) -> np.ndarray:
    """First moment in [0, 1] at which ``f + t d`` enters a disc round the origin, or infinity; 0
    for points that are inside and move inwards.
    """
    a, b, c = (d * d).sum(-1), (f * d).sum(-1), (f * f).sum(-1) - radius**2
    root = b * b - a * c
    t = np.maximum((-b - np.sqrt(np.maximum(root, 0))) / np.where(a > 0, a, 1), 0)
    return np.where((b < -_AWAY) & (root >= 0) & (t <= 1), t, np.inf)


def overlap(states: np.ndarray) -> np.ndarray:
    """Depth in metres of the gripper inside the block or the wall: [..., 7] -> float64 [...], at
    most 0 without overlap.
    """
    s = np.asarray(states, np.float64)
    p = s[..., GRIPPER]
    block = CONTACT - np.linalg.norm(p - s[..., BLOCK], axis=-1)
    along = np.maximum(np.abs(p[..., 1] - s[..., WALL]) - HALF, 0)
    wall = GRIPPER_RADIUS - np.hypot(p[..., 0] - WALL_X, along)
    return np.choose(kinds(s), [np.full(block.shape, -np.inf), block, wall])


# --- The demonstrator


def minimum_jerk(t: np.ndarray) -> np.ndarray:
    """Progress at time ``t`` of a movement of duration 1; ``t`` is clipped to [0, 1]."""
    t = np.clip(t, 0, 1)
    return t**3 * (10 - 15 * t + 6 * t**2)


def demonstrate(states: np.ndarray) -> np.ndarray:
    """Chunks that solve the tasks of states [n, 7]: float32 [n, 16, 2] in [-1, 1]; or of one state
    [7]: [16, 2].
    """
    states = np.asarray(states, np.float64)
    rows, out = states.reshape(-1, STATES), np.zeros((states.size // STATES, HORIZON, DIMENSIONS))
    for k, kind in enumerate(KINDS):
        mine = kinds(rows) == k
        s = minimum_jerk(np.arange(HORIZON + 1) / DURATIONS[kind])
        out[mine] = np.diff(PATHS[kind](rows[mine], s), axis=1) / STEP
    return np.clip(out, -1, 1).astype(np.float32).reshape(*states.shape[:-1], HORIZON, DIMENSIONS)


def padding(states: np.ndarray) -> np.ndarray:
    """Mask of the control steps after the end of a demonstration: [..., 7] -> bool [..., 16].
    Actions there are 0.
    """
    return np.arange(HORIZON) >= np.array([DURATIONS[k] for k in KINDS])[kinds(states)][..., None]


def _line(a: np.ndarray, b: np.ndarray, s: np.ndarray) -> np.ndarray:
    """Points on the line from ``a`` [n, 2] to ``b`` [n, 2] at ``s`` [m] or [n, m]: [n, m, 2]."""
    return a[:, None] + (b - a)[:, None] * s[..., None]


def _straight(states: np.ndarray, s: np.ndarray) -> np.ndarray:
    return _line(states[:, GRIPPER], states[:, GOAL], s)


def _behind(states: np.ndarray, s: np.ndarray) -> np.ndarray:
    """Parabola to the point of contact opposite the goal, left with the direction and the speed of
    the push.
    """
    start, goal, block = states[:, GRIPPER], states[:, GOAL], states[:, BLOCK]
    push = np.linalg.norm(goal - block, axis=-1, keepdims=True)
    towards = (goal - block) / np.maximum(push, 1e-6)
    contact = block - CONTACT * towards
    way = np.linalg.norm(contact - start, axis=-1, keepdims=True)
    bend = contact - way / 2 * towards
    part = way / np.maximum(way + push, 1e-6)  # share of the movement that comes before the push
    before, after = (
        np.minimum(s / np.maximum(part, 1e-6), 1),
        np.maximum(s - part, 0) / np.maximum(1 - part, 1e-6),
    )
    approach = (
        _line(start, bend, before) * (1 - before[..., None])
        + _line(bend, contact, before) * before[..., None]
    )
    return approach + (goal - block)[:, None] * after[..., None]


def crossing(states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Crossing of the straight line from the gripper to the goal with the wall's line: the fraction
    of the way, and y. [..., 7] -> two [...]; the middle of the way without a crossing.
    """
    s = np.asarray(states, np.float64)
    (x0, y0), (x1, y1) = (np.moveaxis(s[..., part], -1, 0) for part in (GRIPPER, GOAL))
    crosses = (x0 - WALL_X) * (x1 - WALL_X) < 0
    part = np.where(crosses, (WALL_X - x0) / np.where(crosses, x1 - x0, 1), 0.5)
    return part, y0 + part * (y1 - y0)


def _round_the_end(states: np.ndarray, s: np.ndarray) -> np.ndarray:
    """Straight line plus a bump ``(s/m)^4m ((1-s)/(1-m))^4(1-m)``, whose top lies at the fraction
    ``m`` of the way, at the wall.
    """
    part, y = crossing(states)
    wall = states[:, WALL]
    bend = wall + np.where(y >= wall, 1, -1) * (HALF + CLEARANCE) - y
    m = np.clip(part[:, None], 0.01, 0.99)
    bump = (s / m) ** (4 * m) * ((1 - s) / (1 - m)) ** (4 * (1 - m))
    path = _straight(states, s)
    path[..., 1] += bend[:, None] * bump
    return path


PATHS = {"reach": _straight, "push": _behind, "avoid": _round_the_end}
