"""Checker of action chunks: a chunk passes if its rollout from the state brings the task's object
to the goal.

Only the rollout is judged, not the actions. ``reach``: the gripper ends within ``SUCCESS_RADIUS``
of the goal. ``push``: the block does. ``avoid``: the gripper does, and never ran into the wall.

A chunk of another shape, with NaN, or with values that no controller would take is invalid and
never passes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gen.contracts.modality import Verdict
from gen.modalities.action import tasks as tabletop_tasks
from gen.modalities.action import world as tabletop
from gen.modalities.action.tasks import Task
from gen.modalities.action.world import (
    BLOCK,
    DIMENSIONS,
    GOAL,
    GRIPPER,
    HORIZON,
    STATES,
    SUCCESS_RADIUS,
    rollout,
)

TOLERANCE = 0.05  # tolerance for a codec's overshoot of [-1, 1]; the world clips it
MISSED = 0.9  # most that a chunk gets that does not pass


def check(actions: object, state: np.ndarray, task: Task | str) -> Verdict:
    """Judge one chunk (floats [16, 2]) for a task from a state [7].

    Raises:
        ValueError: the state is impossible for the task.
    """
    return check_many([actions], [state], [task])[0]


def check_many(
    actions: Sequence[object] | np.ndarray,
    states: Sequence[np.ndarray] | np.ndarray,
    tasks: Sequence[Task | str],
) -> list[Verdict]:
    """Judge chunks one by one.

    Raises:
        ValueError: the lengths differ, or a state is impossible for its task.
    """
    if not len(actions) == len(states) == len(tasks):
        raise ValueError(
            f"{len(actions)} chunks, {len(states)} states and {len(tasks)} tasks; expected one"
            " state and one task per chunk"
        )
    parsed = [tabletop_tasks.parse(t) if isinstance(t, str) else t for t in tasks]
    for state, task in zip(states, parsed, strict=True):
        if np.shape(state) != (STATES,):
            raise ValueError(
                f"the state has the shape {list(np.shape(state))}; expected [{STATES}]"
            )
        tabletop_tasks.require_state(state, task)
    faults = [_fault(a) for a in actions]
    good = [i for i, fault in enumerate(faults) if not fault]
    out = [Verdict(False, False, fault) for fault in faults]
    if good:
        done = rollout(
            np.stack([np.asarray(actions[i], np.float64) for i in good]),
            np.stack([states[i] for i in good]),
        )
        errors = end_errors(done.states)
        for i, error, hits in zip(good, errors.tolist(), done.collided, strict=True):
            out[i] = _verdict(parsed[i], error, hits)
    return out


def goal_error(actions: object, state: np.ndarray) -> float:
    """Return the distance in metres from the goal at the end of a chunk's rollout from a state [7].

    Infinite for an invalid chunk.
    """
    if _fault(actions):
        return float("inf")
    return float(end_errors(rollout(np.asarray(actions, np.float64), state).states))


def grade(actions: object, state: np.ndarray, task: Task | str) -> float:
    """Return how much of the way to the goal a chunk (floats [16, 2]) goes from a state [7].

    One minus the distance that is left outside of the goal, as a share of that at the start, and at
    most ``MISSED`` where the chunk does not pass. A gripper that ran into the wall has half of it.

    Returns:
        0 to 1; 1 where ``check`` passes and nowhere else.
    """
    if check(actions, state, task).passed:
        return 1.0
    error = goal_error(actions, state)
    if error == float("inf"):
        return 0.0
    start = float(end_errors(np.asarray(state)[None]))
    left = max(0.0, error - SUCCESS_RADIUS) / max(start - SUCCESS_RADIUS, SUCCESS_RADIUS)
    hits = rollout(np.asarray(actions, np.float64), state).collided.any()
    return MISSED * max(0.0, 1 - left) * (0.5 if hits else 1.0)


def end_errors(states: np.ndarray) -> np.ndarray:
    """Distance from the goal at the end of rollouts [..., T + 1, 7], of the block if there is one
    and else of the gripper: metres, float64 [...].
    """
    end = np.asarray(states, np.float64)[..., -1, :]
    moved = np.where((tabletop.kinds(end) == 1)[..., None], end[..., BLOCK], end[..., GRIPPER])
    return np.linalg.norm(moved - end[..., GOAL], axis=-1)


def _verdict(task: Task, error: float, hits: np.ndarray) -> Verdict:
    what = "block" if task.kind == "push" else "gripper"
    detail = f"the {what} ends {error:.3f} m from the goal"
    if hits.any():
        return Verdict(
            False, True, f"{detail}; the gripper ran into the wall in step {int(hits.argmax()) + 1}"
        )
    if error < SUCCESS_RADIUS:
        return Verdict(True, True, detail)
    return Verdict(False, True, f"{detail}; expected less than {SUCCESS_RADIUS:g} m")


def _fault(actions: object) -> str:
    """Reason why a chunk is invalid, or an empty text."""
    expected = f"expected floats [{HORIZON}, {DIMENSIONS}] in [-1, 1]"
    try:
        array = np.asarray(actions)
    except (TypeError, ValueError):
        return f"the chunk is a {type(actions).__name__}, no array; {expected}"
    if array.shape != (HORIZON, DIMENSIONS) or array.dtype.kind not in "fiu":
        return f"the chunk is {array.dtype} {list(array.shape)}; {expected}"
    if not np.isfinite(array).all():
        return f"the chunk holds NaN or inf; {expected}"
    most = float(np.abs(array.astype(np.float64)).max())
    return (
        f"the chunk holds {most:.3f} in absolute value; {expected}" if most > 1 + TOLERANCE else ""
    )
