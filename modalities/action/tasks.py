"""Synthetic dataset of tabletop tasks: their language, the states they start from, and observations
in the format of robot datasets.

A task names an action, and may give positions in metres from the lower left corner of the table:

    reach from 0.20 0.30 to 0.80 0.50
    push the block at 0.45 0.40 from 0.25 0.35 to 0.70 0.55
    avoid the wall at 0.50 from 0.20 0.45 to 0.80 0.60

``from`` is the gripper, ``to`` the goal of the gripper or the block, ``at`` the block (x y) or the
middle of the wall (y). Omitted positions are drawn uniformly among all whole centimetres from which
one chunk of the demonstrator solves the task (``RULES``). A task with all positions is equivalent
to the state.

Observations have the keys of LeRobot datasets: ``observation.state`` (float32 [7], ``STATE_NAMES``)
and ``task`` (str).
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gen.core.errors import GenError, bad_value, unknown, unknown_word
from gen.modalities import small_language as language
from gen.modalities.action import world as tabletop
from gen.modalities.action.world import (
    BLOCK,
    BLOCK_RADIUS,
    CONTACT,
    GOAL,
    GRIPPER,
    HALF,
    KINDS,
    STATE_NAMES,
    STATES,
    USED,
    WALL,
    WALL_X,
)

AREA = (0.10, 0.90)  # metres: range of x and y in tasks and in drawn states
WALLS = (0.30, 0.70)  # metres: range of the middle of the wall
OBJECTS = {"reach": "goal", "push": "block", "avoid": "wall"}
STATE_KEY, TASK_KEY = "observation.state", "task"
# centimetres: states of one kind whose numbers lie in the same cells are held out together
CELL = 20
_CENTIMETRES = 0.006  # metres: tolerance between a number of a state and the two decimals of a text
_BATCH, _TRIES = 512, 800  # proposals per attempt, and attempts until a task counts as impossible

Point = tuple[float, float]


@dataclass(frozen=True)
class Task:
    """Task with its positions in metres, two decimals; ``None`` for an omitted one.

    Raises:
        GenError: a number is out of range or too fine.
    """

    kind: str
    start: Point | None = None  # position of the gripper
    goal: Point | None = None
    block: Point | None = None
    wall: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("task", self.kind, KINDS)
        for name, kind in (("block", "push"), ("wall", "avoid")):
            if getattr(self, name) is not None and self.kind != kind:
                raise GenError(
                    f"a task to {self.kind} gives a position of the {name}; only a task to"
                    f" {kind} has one"
                )
        for name, value in self.numbers().items():
            low, high = WALLS if name == "wall_y" else AREA
            if not low <= value <= high:
                raise bad_value(name.replace("_", " "), value, f"{low:.2f} to {high:.2f} metres")
            if round(value, 2) != value:
                raise bad_value(name.replace("_", " "), value, "at most two decimals")

    def numbers(self) -> dict[str, float]:
        """Numbers that the task states, under the names of ``STATE_NAMES``."""
        points = {"gripper": self.start, "goal": self.goal, "block": self.block}
        out = {
            f"{name}_{axis}": v
            for name, point in points.items()
            if point is not None
            for axis, v in zip("xy", point, strict=True)
        }
        return out if self.wall is None else {**out, "wall_y": self.wall}

    def __str__(self) -> str:
        words = [self.kind] if self.kind == "reach" else [self.kind, "the", OBJECTS[self.kind]]
        phrases = (
            ("at", self.block if self.wall is None else (self.wall,)),
            ("from", self.start),
            ("to", self.goal),
        )
        return " ".join(
            words
            + [
                w
                for name, position in phrases
                if position is not None
                for w in (name, *(f"{v:.2f}" for v in position))
            ]
        )


def parse(text: str) -> Task:
    """Parse the text of a task. ``at``, ``from`` and ``to`` may come in any order.

    Raises:
        ValueError: a word is not allowed where it stands; the message names it and the nearest
            allowed word.
    """
    if not text or not text.strip():
        raise ValueError(
            "the task is empty; expected one such as 'reach' or 'push the block at 0.45 0.40 from"
            " 0.25 0.35 to 0.70 0.55'"
        )
    where = f"task {text!r}"
    words = re.sub(r"[,;:()]|[.!](?=\s|$)", " ", text.lower()).split()
    kind = words.pop(0) if words else "the end of the task"
    if kind not in KINDS:
        raise unknown_word(kind, KINDS, where, "the tasks")
    if words[:2] == ["the", OBJECTS[kind]]:
        words = words[2:]
    elif words[:1] == [OBJECTS[kind]]:
        words = words[1:]
    elif words[:1] == ["the"]:
        raise unknown_word(
            " ".join(words[1:2]) or "the end of the task",
            (OBJECTS[kind],),
            where,
            "the vocabulary here",
        )
    counts = {"at": {"push": 2, "avoid": 1}.get(kind, 0), "from": 2, "to": 2}
    numbers_of: dict[str, tuple[float, ...]] = {}
    while words:
        word = words.pop(0)
        options = [w for w, count in counts.items() if count and w not in numbers_of]
        if word in numbers_of:
            raise ValueError(f"{where} has {word!r} twice; expected it once")
        if word not in options:
            raise (
                unknown_word(word, options, where, "the vocabulary here")
                if options
                else ValueError(f"{where} continues with {word!r} after its end")
            )
        numbers_of[word] = tuple(
            _number(words.pop(0) if words else "the end of the task", word, counts[word], where)
            for _ in range(counts[word])
        )
    at = numbers_of.get("at")
    block, wall = (at, None) if kind == "push" else (None, at and at[0])
    try:
        return Task(kind, numbers_of.get("from"), numbers_of.get("to"), block, wall)
    except GenError as error:
        raise ValueError(f"{where}: {error}") from None


def _number(word: str, after: str, count: int, where: str) -> float:
    if not re.fullmatch(r"-?(\d+\.?\d*|\.\d+)", word):
        expected = (
            "two numbers, x and y, such as 0.20 0.30"
            if count == 2
            else "one number, y, such as 0.50"
        )
        raise ValueError(f"{where}: {word!r} follows {after!r}; expected {expected}")
    return float(word)


# --- Solvable states


def _distance(s: np.ndarray, a: slice, b: slice) -> np.ndarray:
    return np.linalg.norm(s[..., a] - s[..., b], axis=-1)


def _within(v: np.ndarray, low: float, high: float) -> np.ndarray:
    return (v > low - 1e-6) & (v < high + 1e-6)  # numbers in whole centimetres, as float32


def _before_the_block(s: np.ndarray) -> np.ndarray:
    """Cosine of the angle between the ways of gripper to block and of block to goal."""
    to, on = s[..., BLOCK] - s[..., GRIPPER], s[..., GOAL] - s[..., BLOCK]
    return (to * on).sum(-1) / np.maximum(
        np.linalg.norm(to, axis=-1) * np.linalg.norm(on, axis=-1), 1e-6
    )


def _wall_offset(s: np.ndarray) -> np.ndarray:
    return np.abs(tabletop.crossing(s)[1] - s[..., WALL])


Rule = tuple[str, Callable[[np.ndarray], np.ndarray]]  # of float64 [n, 7]
RULES: dict[str, tuple[Rule, ...]] = {
    "reach": (
        (
            "the goal has to be 0.20 to 0.60 metres from the gripper",
            lambda s: _within(_distance(s, GRIPPER, GOAL), 0.20, 0.60),
        ),
    ),
    "push": (
        (
            "the goal has to be 0.12 to 0.40 metres from the block",
            lambda s: _within(_distance(s, GOAL, BLOCK), 0.12, 0.40),
        ),
        (
            "the gripper has to be 0.12 to 0.30 metres from the block",
            lambda s: _within(_distance(s, GRIPPER, BLOCK), 0.12, 0.30),
        ),
        (
            "the gripper has to be behind the block as seen from the goal, within 45 degrees",
            lambda s: _before_the_block(s) > np.sqrt(0.5),
        ),
    ),
    "avoid": (
        (
            (
                "the gripper and the goal have to be on different sides of the wall (x = 0.50),"
                " 0.20 to 0.35 metres from it"
            ),
            lambda s: (
                ((s[..., 0] - WALL_X) * (s[..., 2] - WALL_X) < 0)
                & _within(np.abs(s[..., [0, 2]] - WALL_X), 0.20, 0.35).all(-1)
            ),
        ),
        (
            "the goal has to be at most 0.30 metres above or below the gripper",
            lambda s: _within(np.abs(s[..., 1] - s[..., 3]), 0, 0.30),
        ),
        (
            (
                "the straight line from the gripper to the goal has to meet the wall 0.03 to 0.10"
                " metres from its middle"
            ),
            lambda s: _within(_wall_offset(s), 0.03, 0.10),
        ),
    ),
}


def solvable(states: np.ndarray, kind: str) -> np.ndarray:
    """Mask of the states [n, 7] that a task of this kind may start from: bool [n]."""
    states = np.asarray(states, np.float64)
    return np.logical_and.reduce([rule(states) for _, rule in RULES[kind]])


def _propose(task: Task, n: int, rng: np.random.Generator) -> np.ndarray:
    """Draw states float32 [n, 7] that agree with a task, whether or not they are solvable."""
    out, stated = np.zeros((n, STATES), np.float32), task.numbers()
    for name in USED[task.kind]:
        low, high = WALLS if name == "wall_y" else AREA
        drawn = rng.integers(round(100 * low), round(100 * high) + 1, n) / 100
        out[:, STATE_NAMES.index(name)] = stated.get(name, drawn)
    return out


def draw_state(task: Task, rng: np.random.Generator) -> np.ndarray:
    """Draw a state that a task can start from: float32 [7] in whole centimetres.

    Raises:
        GenError: no chunk reliably solves the task; the message names the violated rule.
    """
    for _ in range(1 if len(task.numbers()) == len(USED[task.kind]) else _TRIES):
        states = _propose(task, _BATCH, rng)
        good = solvable(states, task.kind)
        if good.any():
            return states[good.argmax()]
    failed = [
        (float(np.mean(~rule(states.astype(np.float64)))), text) for text, rule in RULES[task.kind]
    ]
    raise GenError(f"task {str(task)!r} cannot be solved in one chunk: {max(failed)[1]}")


def described(state: np.ndarray) -> Task:
    """Task that states all of a state, to the centimetre.

    Raises:
        GenError: a number of the state is outside ``AREA``.
    """
    kind = KINDS[int(tabletop.kinds(state))]
    x = [round(float(v), 2) for v in np.asarray(state)]
    return Task(
        kind,
        (x[0], x[1]),
        (x[2], x[3]),
        (x[4], x[5]) if kind == "push" else None,
        x[WALL] if kind == "avoid" else None,
    )


# --- Data


def held_out(state: np.ndarray) -> bool:
    """Return whether a state [7] belongs to the tenth of all cells that training never sees."""
    return _held_out(tuple(_cells(state).tolist()))


def _cells(states: np.ndarray) -> np.ndarray:
    return np.rint(100 * np.asarray(states, np.float64)).astype(int) // CELL


_held_out = functools.cache(language.held_out)  # there are about 2000 cells


def states(kind: str, n: int, seed: int, *, held: bool) -> np.ndarray:
    """Draw ``n`` states float32 [n, 7] of one kind, all held out or none of them. A larger ``n``
    begins with the same states.
    """
    rng, out = np.random.default_rng([seed, KINDS.index(kind)]), []
    while len(out) < n:
        drawn = _propose(Task(kind), 8 * _BATCH, rng)
        drawn = drawn[solvable(drawn, kind)]
        out += [
            s
            for s, cells in zip(drawn, _cells(drawn).tolist(), strict=True)
            if _held_out(tuple(cells)) == held
        ]
    return np.stack(out[:n]) if n else np.zeros((0, STATES), np.float32)


@dataclass(frozen=True)
class Episodes:
    """Demonstrations.

    Attributes:
        states: float32 [n, 7].
        tasks: one per state, kind after kind, without numbers.
        actions: float32 [n, 16, 2] of the demonstrator.
        action_is_pad: bool [n, 16], True after the end of a demonstration, where actions are 0.
    """

    states: np.ndarray
    tasks: list[Task]
    actions: np.ndarray
    action_is_pad: np.ndarray


def episodes(n: int, seed: int, held: bool) -> Episodes:
    """Draw ``n`` demonstrations, all from held-out states or none of them."""
    out = np.zeros((n, STATES), np.float32)
    for k, kind in enumerate(KINDS):
        mine = len(range(k, n, len(KINDS)))
        out[k :: len(KINDS)] = states(kind, mine, seed, held=held)
    tasks = [Task(KINDS[i % len(KINDS)]) for i in range(n)]
    return Episodes(out, tasks, tabletop.demonstrate(out), tabletop.padding(out))


# --- Observations


def observation(state: np.ndarray, task: Task) -> dict[str, Any]:
    """Observation of a policy: ``observation.state`` float32 [7] and ``task``."""
    return {STATE_KEY: np.array(state, np.float32), TASK_KEY: str(task)}


def validate_observation(obs: Mapping[str, Any]) -> tuple[np.ndarray, Task]:
    """Check an observation and return its state float32 [7] and its task. Other keys (cameras,
    times) are ignored.

    Raises:
        GenError: a key is missing, or has another length or type; numbers are NaN, infinite or off
            the table; things overlap; or the state does not fit the task.
    """
    if not isinstance(obs, Mapping):
        raise GenError(
            f"the observation is a {type(obs).__name__}; expected a dict with {STATE_KEY!r} and"
            f" {TASK_KEY!r}"
        )
    _require_key(obs, STATE_KEY)
    task = observed_task(obs)
    try:
        state = np.asarray(obs[STATE_KEY])
        numeric = (
            state.dtype != bool
            and np.issubdtype(state.dtype, np.number)
            and not np.iscomplexobj(state)
        )
    except (TypeError, ValueError):
        numeric, state = False, np.zeros(0)
    if not numeric or state.shape != (STATES,):
        came = (
            f"{state.dtype} {list(state.shape)}"
            if state.size
            else f"a {type(obs[STATE_KEY]).__name__}"
        )
        raise GenError(
            f"{STATE_KEY} is {came}; expected {STATES} numbers, {', '.join(STATE_NAMES)}"
        )
    state = state.astype(np.float32)
    require_state(state, task)
    return state, task


def observed_task(obs: Mapping[str, Any]) -> Task:
    """Return the task of an observation. Raises ``GenError`` where it has none, or no text."""
    _require_key(obs, TASK_KEY)
    if not isinstance(obs[TASK_KEY], str):
        raise bad_value(TASK_KEY, obs[TASK_KEY], "a text such as 'reach'", "the observation")
    try:
        return parse(obs[TASK_KEY])
    except ValueError as error:
        raise GenError(str(error)) from None


def _require_key(obs: Mapping[str, Any], key: str) -> None:
    """Raise ``GenError`` for an observation without a key."""
    if key not in obs:
        near = difflib.get_close_matches(key, [str(k) for k in obs], 1, 0.5)
        hint = f" Did you mean {key!r} by {near[0]!r}?" if near else ""
        raise GenError(
            f"the observation has no {key!r}.{hint} It has:"
            f" {', '.join(sorted(map(str, obs))) or 'nothing'}"
        )


def require_state(state: np.ndarray, task: Task) -> None:
    """Check that a state [7] is possible for a task, solvable or not.

    Raises:
        GenError: it is not; the message names the number.
    """
    for name, value in zip(STATE_NAMES, np.asarray(state).tolist(), strict=True):
        if not np.isfinite(value):
            raise bad_value(name, value, "a finite number", STATE_KEY)
        if name not in USED[task.kind]:
            if value:
                raise bad_value(
                    name,
                    value,
                    f"0, since a task to {task.kind} has no {name.split('_')[0]}",
                    STATE_KEY,
                )
            continue
        low = {"block": BLOCK_RADIUS, "wall": HALF}.get(name.split("_")[0], 0.0)
        if not low - 1e-6 <= value <= 1 - low + 1e-6:
            raise bad_value(name, value, f"{low:g} to {1 - low:g} metres", STATE_KEY)
        stated = task.numbers().get(name, value)
        if abs(stated - value) > _CENTIMETRES:
            raise bad_value(name, value, f"{stated:.2f} as in the task {str(task)!r}", STATE_KEY)
    if tabletop.overlap(state) > 1e-3:
        other, room = (
            ("block", CONTACT) if task.kind == "push" else ("wall", tabletop.GRIPPER_RADIUS)
        )
        raise GenError(
            f"the gripper is inside the {other}; expected at least {room:g} metres between them"
        )
