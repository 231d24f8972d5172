"""The tabletop's tasks: their language, the states that are drawn for them, and observations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gen.core.errors import GenError
from gen.modalities.action import checker as tabletop_check
from gen.modalities.action import tasks as tabletop_tasks
from gen.modalities.action import world as tabletop
from gen.modalities.action.tasks import (
    Task,
    draw_state,
    episodes,
    observation,
    parse,
    validate_observation,
)
from gen.modalities.action.world import KINDS, STATE_NAMES, STATES, demonstrate, rollout

REACH = np.array([0.2, 0.3, 0.6, 0.5, 0, 0, 0], np.float32)
PUSH = np.array([0.25, 0.35, 0.7, 0.55, 0.45, 0.4, 0], np.float32)
AVOID = np.array([0.2, 0.45, 0.8, 0.6, 0, 0, 0.48], np.float32)


@pytest.fixture(scope="module")
def data() -> tabletop_tasks.Episodes:
    return episodes(90, 7, False)


# --- The task language


def test_every_task_reads_back_as_itself():
    rng = np.random.default_rng(0)
    for kind in KINDS:
        assert parse(str(Task(kind))) == Task(kind)
        for state in tabletop_tasks.states(kind, 60, 3, held=False):
            full = tabletop_tasks.described(state)
            part = replace(
                full, **{k: None for k in ("start", "goal", "block", "wall") if rng.random() < 0.5}
            )
            assert parse(str(full)) == full and parse(str(part)) == part
            assert np.array_equal(
                draw_state(full, rng), state
            )  # a task that says everything says the state


def test_equivalent_spellings_mean_the_same_task():
    assert str(Task("reach", (0.2, 0.3), (0.8, 0.5))) == "reach from 0.20 0.30 to 0.80 0.50"
    assert (
        str(Task("push", block=(0.4, 0.4), goal=(0.6, 0.5)))
        == "push the block at 0.40 0.40 to 0.60 0.50"
    )
    assert str(Task("avoid", wall=0.5)) == "avoid the wall at 0.50"
    for text in ("Reach to 0.8 .5 from 0.20, 0.3.", "reach the goal from .2 .3 to .80 .50"):
        assert parse(text) == Task("reach", (0.2, 0.3), (0.8, 0.5))
    assert parse("push") == parse("push block") == parse("push the block") == Task("push")
    assert parse("avoid at 0.5") == Task("avoid", wall=0.5)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ("empty", "push the block")),
        ("raech", ("'raech'", "'reach'", "push, avoid")),
        ("push the blok", ("'blok'", "'block'")),
        ("push the wall", ("'wall'", "block")),
        ("reach form 0.2 0.3", ("'form'", "'from'")),
        ("reach at 0.2 0.3", ("'at'", "from, to")),
        ("reach from 0.2", ("'the end of the task'", "'from'", "two numbers")),
        ("reach from 0.2 to 0.3 0.4", ("'to' follows 'from'", "two numbers")),
        ("avoid the wall at 0.4 0.5", ("'0.5'", "from, to")),
        ("avoid the wall at high", ("'high'", "one number")),
        ("reach from 0.2 0.3 from 0.2 0.3", ("'from' twice",)),
        ("reach from 0.2 0.3 to 0.4 0.5 now", ("'now'", "after its end")),
        ("reach to 1.2 0.5", ("goal x", "1.2", "0.10 to 0.90")),
        ("reach to -0.2 0.5", ("goal x", "-0.2")),
        ("avoid the wall at 0.9", ("wall y", "0.30 to 0.70")),
        ("reach to 0.555 0.5", ("goal x", "0.555", "two decimals")),
        ("reach to nan 0.5", ("'nan'", "two numbers")),
    ],
)
def test_a_bad_task_names_what_is_wrong_and_what_was_expected(text, names):
    with pytest.raises(ValueError) as error:
        parse(text)
    for name in names:
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: Task("pull"), ("'pull'", "push")),
        (lambda: Task("reach", block=(0.4, 0.4)), ("block", "push")),
        (lambda: Task("push", wall=0.4), ("wall", "avoid")),
        (lambda: Task("reach", goal=(0.5, float("nan"))), ("goal y", "nan")),
    ],
)
def test_a_task_that_cannot_be_is_refused_when_it_is_made(make, names):
    with pytest.raises(GenError) as error:
        make()
    assert all(name in str(error.value) for name in names)


def test_what_a_task_leaves_open_is_drawn_and_what_it_says_is_kept():
    rng = np.random.default_rng(4)
    for text in (
        "reach",
        "reach to 0.80 0.50",
        "push the block at 0.45 0.40",
        "push from 0.20 0.30 to 0.50 0.50",
        "avoid the wall at 0.41",
    ):
        task = parse(text)
        drawn = np.stack([draw_state(task, rng) for _ in range(40)])
        assert (
            drawn.dtype == np.float32
            and drawn.shape == (40, STATES)
            and len(np.unique(drawn, axis=0)) > 20
        )
        assert (
            all(
                v.passed
                for v in tabletop_check.check_many(demonstrate(drawn), drawn, [task] * len(drawn))
            )
            and tabletop_tasks.solvable(drawn, task.kind).all()
        )
        for i, name in enumerate(STATE_NAMES):
            said = task.numbers().get(name)
            assert said is None or (drawn[:, i] == np.float32(said)).all()
    again, other = (draw_state(Task("push"), np.random.default_rng(s)) for s in (4, 5))
    assert np.array_equal(
        again, draw_state(Task("push"), np.random.default_rng(4))
    ) and not np.array_equal(again, other)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("reach from 0.20 0.30 to 0.25 0.30", "0.20 to 0.60"),
        ("reach from 0.10 0.10 to 0.90 0.90", "0.20 to 0.60"),
        ("push the block at 0.50 0.50 to 0.55 0.50", "0.12 to 0.40"),
        ("push the block at 0.50 0.50 from 0.70 0.50 to 0.70 0.50", "behind"),
        ("avoid the wall from 0.20 0.50 to 0.30 0.50", "sides"),
        ("avoid the wall at 0.30 from 0.20 0.80 to 0.80 0.80", "middle"),
    ],
)
def test_a_task_that_no_chunk_can_be_relied_on_to_solve_is_refused(text, why):
    with pytest.raises(GenError, match="cannot be solved in one chunk") as error:
        draw_state(parse(text), np.random.default_rng(0))
    assert why in str(error.value)


# --- Data


def test_the_held_out_tenth_is_disjoint_and_about_a_tenth():
    rng = np.random.default_rng(6)
    drawn = [draw_state(Task(k), rng) for k in KINDS for _ in range(200)]
    assert 0.06 < np.mean([tabletop_tasks.held_out(s) for s in drawn]) < 0.14
    for held in (False, True):
        assert all(tabletop_tasks.held_out(s) == held for s in episodes(300, 1, held).states)


def test_near_states_are_held_out_together():
    state = tabletop_tasks.states("reach", 1, 0, held=True)[0]
    cell = np.floor(np.rint(state[:4] * 100) / tabletop_tasks.CELL) * tabletop_tasks.CELL
    for offset in (0, 7, 19):
        assert tabletop_tasks.held_out(np.concatenate([(cell + offset) / 100, np.zeros(3)]))


def test_episodes_take_turns_and_more_of_them_begin_with_the_same_ones():
    few, many, other = episodes(10, 3, False), episodes(40, 3, False), episodes(10, 4, False)
    assert (
        [t.kind for t in few.tasks]
        == [KINDS[i % 3] for i in range(10)]
        == [KINDS[k] for k in tabletop.kinds(few.states)]
    )
    assert np.array_equal(few.states, many.states[:10]) and np.array_equal(
        few.actions, many.actions[:10]
    )
    assert not np.array_equal(few.states, other.states)
    assert few.states.dtype == few.actions.dtype == np.float32 and few.action_is_pad.dtype == bool


# --- Observations


def test_an_observation_reads_back_as_its_state_and_task(data):
    for state, task in zip(data.states[:60], data.tasks[:60], strict=True):
        for said in (task, tabletop_tasks.described(state)):
            obs = observation(state, said)
            back, parsed = validate_observation({**obs, "timestamp": 0.0})
            assert set(obs) == {"observation.state", "task"} and back.dtype == np.float32
            assert np.array_equal(back, state) and parsed == said
    as_list = validate_observation(
        {"observation.state": [round(float(v), 2) for v in REACH], "task": "reach"}
    )
    assert np.array_equal(as_list[0], REACH)


def test_every_state_on_the_way_of_a_demonstration_is_a_valid_observation(data):
    for state, task, actions in zip(
        data.states[:60], data.tasks[:60], data.actions[:60], strict=True
    ):
        for now in rollout(actions, state).states:
            assert validate_observation(observation(now, task))[1] == task


def changed(state: np.ndarray, name: str, value: float) -> np.ndarray:
    state = state.copy()
    state[STATE_NAMES.index(name)] = value
    return state


@pytest.mark.parametrize(
    ("obs", "names"),
    [
        ([0.2] * 7, ("list", "'observation.state'")),
        (
            {"task": "reach", "observation.sate": REACH},
            ("'observation.state'", "'observation.sate'"),
        ),
        ({"observation.state": REACH}, ("'task'", "It has: observation.state")),
        ({"observation.state": REACH, "task": "raech"}, ("'raech'", "'reach'")),
        ({"observation.state": REACH, "task": 3}, ("task", "3", "a text")),
        ({"observation.state": REACH[:6], "task": "reach"}, ("[6]", "7 numbers", "gripper_x")),
        ({"observation.state": REACH[None], "task": "reach"}, ("[1, 7]", "7 numbers")),
        ({"observation.state": ["a"] * 7, "task": "reach"}, ("7 numbers",)),
        ({"observation.state": None, "task": "reach"}, ("object []", "7 numbers")),
        (
            {"observation.state": changed(REACH, "goal_y", np.nan), "task": "reach"},
            ("goal_y", "nan", "finite"),
        ),
        (
            {"observation.state": changed(REACH, "goal_y", np.inf), "task": "reach"},
            ("goal_y", "inf", "finite"),
        ),
        (
            {"observation.state": changed(REACH, "gripper_x", 1.5), "task": "reach"},
            ("gripper_x", "1.5", "0 to 1"),
        ),
        (
            {"observation.state": changed(PUSH, "block_x", 0.01), "task": "push"},
            ("block_x", "0.05 to 0.95"),
        ),
        (
            {"observation.state": changed(AVOID, "wall_y", 0.95), "task": "avoid"},
            ("wall_y", "0.15 to 0.85"),
        ),
        ({"observation.state": PUSH, "task": "reach"}, ("block_x", "no block")),
        ({"observation.state": REACH, "task": "avoid"}, ("wall_y", "0.15 to 0.85")),
        ({"observation.state": REACH, "task": "reach to 0.70 0.50"}, ("goal_x", "0.70")),
        (
            {"observation.state": changed(PUSH, "block_x", 0.25), "task": "push"},
            ("inside the block", "0.08"),
        ),
        (
            {"observation.state": changed(AVOID, "gripper_x", 0.51), "task": "avoid"},
            ("inside the wall", "0.03"),
        ),
    ],
)
def test_a_bad_observation_names_what_came_and_what_was_expected(obs, names):
    with pytest.raises(GenError) as error:
        validate_observation(obs)
    for name in names:
        assert name in str(error.value)
