"""The tabletop: its world, its demonstrator, the checker and the images."""

from __future__ import annotations

import numpy as np
import pytest

from gen.modalities.action import checker as tabletop_check
from gen.modalities.action import tasks as tabletop_tasks
from gen.modalities.action import view as tabletop_view
from gen.modalities.action import world as tabletop
from gen.modalities.action.checker import check, check_many, end_errors
from gen.modalities.action.tasks import episodes
from gen.modalities.action.world import (
    BLOCK,
    CONTACT,
    GOAL,
    GRIPPER,
    GRIPPER_RADIUS,
    HALF,
    HORIZON,
    KINDS,
    STATE_NAMES,
    STATES,
    STEP,
    SUCCESS_RADIUS,
    WALL,
    WALL_X,
    demonstrate,
    minimum_jerk,
    rollout,
    step,
)

REACH = np.array([0.2, 0.3, 0.6, 0.5, 0, 0, 0], np.float32)
PUSH = np.array([0.25, 0.35, 0.7, 0.55, 0.45, 0.4, 0], np.float32)
AVOID = np.array([0.2, 0.45, 0.8, 0.6, 0, 0, 0.48], np.float32)


def solved(actions: np.ndarray, states: np.ndarray) -> np.ndarray:
    done = rollout(actions, states)
    return (end_errors(done.states) < SUCCESS_RADIUS) & ~done.collided.any(-1)


def binned(x: np.ndarray, bins: int, low: float, high: float) -> np.ndarray:
    """The centres of the uniform bins that numbers lie in."""
    at = np.clip(np.floor((x - low) / (high - low) * bins), 0, bins - 1)
    return low + (at + 0.5) * (high - low) / bins


def straight(states: np.ndarray) -> np.ndarray:
    """Chunks that take the gripper to the goal on a straight line, whatever is in between."""
    s = minimum_jerk(np.arange(HORIZON + 1) / HORIZON)
    return (
        np.diff(s)[None, :, None] * (states[:, None, GOAL] - states[:, None, GRIPPER]) / STEP
    ).astype(np.float32)


@pytest.fixture(scope="module")
def data() -> tabletop_tasks.Episodes:
    both = [episodes(n, 7, held) for n, held in ((9000, False), (1002, True))]
    return tabletop_tasks.Episodes(
        *(
            (
                np.concatenate([getattr(e, k) for e in both])
                if k != "tasks"
                else both[0].tasks + both[1].tasks
            )
            for k in ("states", "tasks", "actions", "action_is_pad")
        )
    )


# --- The world


def test_an_action_moves_the_free_gripper_by_a_step_and_nothing_else():
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (50, 2))
    before = np.tile(np.array([0.5, 0.5, 0.1, 0.9, 0, 0, 0]), (50, 1))
    after, hit = step(before, actions)
    assert np.allclose(after[:, GRIPPER] - before[:, GRIPPER], STEP * actions) and not hit.any()
    assert np.array_equal(after[:, 2:], before[:, 2:])
    assert np.array_equal(before, np.tile(before[:1], (50, 1)))  # pure
    assert np.array_equal(step(before[0], [9, -9])[0], step(before[0], [1, -1])[0])


def test_a_batch_of_tables_goes_as_each_table_alone(data):
    chunks, states = data.actions[:30], data.states[:30]
    together = rollout(chunks, states)
    assert together.states.shape == (30, HORIZON + 1, STATES) and together.collided.shape == (
        30,
        HORIZON,
    )
    for i in range(30):
        alone = rollout(chunks[i], states[i])
        assert np.array_equal(alone.states, together.states[i]) and np.array_equal(
            alone.collided, together.collided[i]
        )


def test_the_gripper_never_gets_into_anything_nor_off_the_table():
    rng = np.random.default_rng(1)
    for kind in KINDS:
        states = tabletop_tasks.states(kind, 400, 2, held=False)
        done = rollout(
            rng.uniform(-1, 1, (400, 60, 2)) + rng.uniform(-0.5, 0.5, (400, 1, 2)), states
        )
        free = np.linalg.norm(np.diff(done.states, axis=1)[..., GRIPPER], axis=-1) > 1e-6
        assert (
            (done.states >= -1e-6).all() and (done.states <= 1 + 1e-6).all() and free.mean() > 0.5
        )
        assert tabletop.overlap(done.states).max() < 1e-5, kind


def test_a_long_move_does_not_jump_through_the_wall_or_the_block():
    wall = np.array([0.46, 0.5, 0.9, 0.5, 0, 0, 0.5])
    after, hit = step(wall, [1, 0])
    assert hit and np.isclose(after[0], WALL_X - GRIPPER_RADIUS)
    past = np.array([0.46, 0.5 + HALF + GRIPPER_RADIUS + 1e-3, 0.9, 0.5, 0, 0, 0.5])
    after, hit = step(past, [1, 0])
    assert not hit and np.isclose(after[0], 0.56)
    block = np.array([0.3, 0.5, 0.9, 0.5, 0.39, 0.5, 0])
    after, _ = step(block, [1, 0])
    assert np.isclose(after[0], 0.4) and np.allclose(after[BLOCK], [0.4 + CONTACT, 0.5])


def test_the_wall_stops_what_comes_and_lets_go_what_leaves():
    state = np.array([WALL_X - GRIPPER_RADIUS, 0.5, 0.9, 0.5, 0, 0, 0.5])
    assert step(state, [1, 0])[1] and step(state, [0.1, 1])[1]
    for action in ([-1, 0], [0, 1], [-0.1, -1], [0, 0]):
        after, hit = step(state, action)
        assert not hit and np.allclose(after[GRIPPER], state[GRIPPER] + STEP * np.array(action))


def test_the_block_moves_with_the_gripper_only_while_it_is_pushed():
    touching = np.array([0.4 - CONTACT, 0.4, 0.9, 0.5, 0.4, 0.4, 0])
    for action, moves in (
        ([0.5, 0], True),
        ([0.5, 0.4], True),
        ([-0.5, 0], False),
        ([0, 0.5], False),
        ([-0.2, 0.5], False),
    ):
        after, hit = step(touching, action)
        carried = STEP * np.array(action) * moves
        assert np.allclose(after[BLOCK] - touching[BLOCK], carried) and not hit, action
        assert np.allclose(after[GRIPPER] - touching[GRIPPER], STEP * np.array(action))


def test_how_finely_a_straight_push_is_cut_makes_no_difference():
    coarse, fine = (
        rollout(np.full((n, 2), (v, v / 5)), np.array([0.2, 0.38, 0.9, 0.5, 0.45, 0.4, 0])).states[
            -1
        ]
        for n, v in ((4, 1), (40, 0.1))
    )
    assert np.allclose(coarse, fine, atol=1e-6) and coarse[4] > 0.5


# --- The demonstrator


def test_the_demonstrator_solves_every_drawn_task(data):
    assert len(data.states) == 10002 and np.abs(data.actions).max() < 1
    assert solved(data.actions, data.states).all()


def test_bins_of_actions_and_of_states_fine_enough_do_not_cost_a_task(data):
    """64 bins of an action and 48 of a number of the state, even both; 16 are too few, which shows
    that this can fail."""

    def coarse(bins):
        return np.where(data.states != 0, binned(data.states.astype(float), bins, 0, 1), 0)

    assert solved(binned(data.actions, 64, -1, 1), data.states).all()
    assert solved(demonstrate(coarse(48)), data.states).all()
    assert solved(binned(demonstrate(coarse(48)), 64, -1, 1), data.states).all()
    assert solved(binned(data.actions, 16, -1, 1), data.states).mean() < 0.95
    assert solved(demonstrate(coarse(16)), data.states).mean() < 0.95


def test_demonstrations_are_smooth_and_end_before_their_padding(data):
    assert data.actions.shape == (len(data.states), HORIZON, 2) and data.actions.dtype == np.float32
    assert not data.actions[data.action_is_pad].any()
    lengths = (~data.action_is_pad).sum(1)
    assert {k: set(lengths[tabletop.kinds(data.states) == i]) for i, k in enumerate(KINDS)} == {
        k: {n} for k, n in tabletop.DURATIONS.items()
    }

    def jumps(a):
        return np.abs(np.diff(np.pad(a, ((0, 0), (1, 1), (0, 0))), axis=1)).max((1, 2))

    shuffled = data.actions[:, np.random.default_rng(0).permutation(HORIZON)]
    assert jumps(data.actions).max() < 0.8 and np.median(jumps(data.actions)) < 0.5 * np.median(
        jumps(shuffled)
    )


def test_the_demonstration_is_a_function_of_the_state_alone(data):
    assert np.array_equal(demonstrate(data.states), data.actions)
    assert np.array_equal(np.stack([demonstrate(s) for s in data.states[:30]]), data.actions[:30])
    assert demonstrate(data.states[:0]).shape == (0, HORIZON, 2)


def test_a_tabletop_turned_upside_down_is_solved_upside_down(data):
    flipped = data.states.copy()
    for i, name in enumerate(STATE_NAMES):
        if name.endswith("_y"):
            flipped[:, i] = np.where(flipped[:, i] != 0, 1 - flipped[:, i], 0)
    assert np.allclose(demonstrate(flipped), data.actions * [1, -1], atol=1e-5)


# --- Negative controls


def test_standing_still_and_going_backwards_solve_nothing(data):
    for broken in (np.zeros_like(data.actions), -data.actions):
        assert not solved(broken, data.states).any()
    far = np.abs(data.states[:, 0] - data.states[:, 2]) > SUCCESS_RADIUS
    mirrored = data.actions * np.array([-1, 1], np.float32)
    reaches = far & (tabletop.kinds(data.states) != 1)
    assert reaches.sum() > 5000 and not solved(mirrored, data.states)[reaches].any()


def test_chunks_of_other_states_and_half_chunks_nearly_always_fail(data):
    assert solved(np.roll(data.actions, 3, axis=0), data.states).mean() < 0.05  # of the same kind
    half = np.where(np.arange(HORIZON)[:, None] < HORIZON // 2, data.actions, 0)
    assert solved(half, data.states).mean() < 0.3
    random = np.random.default_rng(5).uniform(-1, 1, data.actions.shape)
    assert solved(random, data.states).mean() < 0.02


def test_the_order_of_the_steps_matters_where_something_is_in_the_way(data):
    kinds, order = tabletop.kinds(data.states), np.random.default_rng(8)
    shuffled = solved(order.permuted(data.actions, axis=1), data.states)
    assert (
        shuffled[kinds == 1].mean() < 0.6 and shuffled[kinds == 2].mean() < 0.1
    )  # a block does not mind which way round it is met
    joint = np.stack([a[order.permutation(HORIZON)] for a in data.actions])
    assert solved(joint, data.states)[
        kinds == 0
    ].all()  # displacements add up: nothing is in the way of a reach


def test_the_straight_line_passes_only_where_the_wall_stops_nothing(data, monkeypatch):
    mine = data.states[tabletop.kinds(data.states) == 2]
    assert not solved(straight(mine), mine).any()
    done = rollout(straight(mine), mine)
    assert done.collided.any(1).all()
    monkeypatch.setattr(tabletop, "wall_time", lambda state, d: np.full(state.shape[:-1], np.inf))
    assert solved(straight(mine), mine).all()


def test_a_block_that_is_not_touched_or_just_driven_over_stays_unsolved(data, monkeypatch):
    mine = tabletop.kinds(data.states) == 1
    states = data.states[mine]
    assert not solved(
        straight(states), states
    ).any()  # the gripper, not the block, comes to the goal
    monkeypatch.setattr(tabletop, "_enter", lambda f, d, radius: np.full(f.shape[:-1], np.inf))
    assert not solved(data.actions[mine], states).any()


def test_a_detour_on_the_wrong_side_of_the_wall_s_end_collides(data):
    states = data.states[tabletop.kinds(data.states) == 2]
    moved = states.copy()
    moved[:, WALL] += np.where(tabletop.crossing(states)[1] >= states[:, WALL], 1, -1) * np.float32(
        0.1
    )  # the wall is longer than thought
    assert not solved(demonstrate(states), moved).any()


# --- The checker


def test_the_checker_says_what_the_rollout_says(data):
    states, tasks = data.states[:90], data.tasks[:90]
    good = check_many(data.actions[:90], states, tasks)
    assert all(v.passed and v.valid and "m from the goal" in v.detail for v in good)
    still = check_many(np.zeros((90, HORIZON, 2)), states, [str(t) for t in tasks])
    assert all(v.valid and not v.passed and "expected less than 0.05 m" in v.detail for v in still)
    mixed = np.where(np.arange(90)[:, None, None] % 2, data.actions[:90], 0)
    assert [v.passed for v in check_many(mixed, states, tasks)] == [bool(i % 2) for i in range(90)]
    assert check(data.actions[1], states[1], tasks[1]) == good[1]


def test_the_end_error_is_that_of_the_block_where_there_is_one():
    assert "the block ends 0.00" in check(demonstrate(PUSH), PUSH, "push").detail
    assert (
        "the block ends 0.292 m" in check(np.zeros((16, 2)), PUSH, "push").detail
    )  # hypot(0.25, 0.15)
    assert (
        "the gripper ends 0.447 m" in check(np.zeros((16, 2)), REACH, "reach").detail
    )  # hypot(0.4, 0.2)


def test_a_collision_fails_even_if_the_goal_is_reached():
    clean = demonstrate(AVOID)
    state = AVOID.copy()
    state[GRIPPER] = [WALL_X - 0.08, 0.48]
    state[GOAL] = [WALL_X - 0.08, 0.48]
    bump = np.zeros((HORIZON, 2))
    bump[3], bump[4] = (0.8, 0), (-0.5, 0)  # to the wall, which stops it after 0.05 m, and back
    verdict = check(bump, state, "avoid the wall")
    assert (
        not verdict.passed
        and verdict.valid
        and "ends 0.000 m" in verdict.detail
        and "wall in step 4" in verdict.detail
    )
    assert check(np.zeros((HORIZON, 2)), state, "avoid the wall").passed
    assert check(clean, AVOID, "avoid the wall").passed


@pytest.mark.parametrize(
    ("chunk", "why"),
    [
        (np.zeros((15, 2)), "[15, 2]"),
        (np.zeros((1, 16, 2)), "[1, 16, 2]"),
        (np.zeros((16, 2), bool), "bool"),
        (np.full((16, 2), "a"), "<U1"),
        (np.full((16, 2), np.nan), "NaN"),
        (np.full((16, 2), -np.inf), "NaN or inf"),
        (np.full((16, 2), 1.2), "1.200"),
        (None, "object []"),
        ([[0, 0], [0]], "list"),
    ],
)
def test_what_is_no_chunk_is_invalid(chunk, why):
    verdict = check(chunk, REACH, "reach")
    assert not verdict.valid and not verdict.passed
    assert why in verdict.detail and "expected floats [16, 2] in [-1, 1]" in verdict.detail


def test_a_small_overshoot_is_clipped_and_not_refused():
    within = np.full((16, 2), 1 + tabletop_check.TOLERANCE / 2)
    assert check(within, REACH, "reach").valid
    assert np.array_equal(rollout(within, REACH).states, rollout(np.ones((16, 2)), REACH).states)


def test_a_state_of_another_task_or_shape_is_refused_by_the_checker():
    for state, text, why in (
        (PUSH, "reach", "no block"),
        (REACH[:5], "reach", r"shape \[5\]"),
        (REACH, "reach to 0.70 0.50", "as in the task"),
    ):
        with pytest.raises(ValueError, match=why):
            check(np.zeros((16, 2)), state, text)
    with pytest.raises(ValueError, match="one state and one task"):
        check_many(np.zeros((2, 16, 2)), [REACH], ["reach"])


# --- Images


def changed(state: np.ndarray, name: str, value: float) -> np.ndarray:
    state = state.copy()
    state[STATE_NAMES.index(name)] = value
    return state


def near(image: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    """The centre (x, y) in metres of the pixels of a colour."""
    y, x = np.nonzero(np.abs(image.astype(int) - colour).sum(-1) < 25)
    return np.array([x.mean() + 0.5, image.shape[0] - y.mean() - 0.5]) / image.shape[0]


def test_the_camera_sees_everything_where_it_is(data):
    for state in data.states[:60]:
        image = tabletop_view.render(state)
        assert image.shape == (64, 64, 3) and image.dtype == np.uint8
        seen = [(GRIPPER, tabletop_view.HAND_FILL), (GOAL, tabletop_view.GOAL_FILL)]
        seen += [(BLOCK, tabletop_view.BLOCK_FILL)] if tabletop.kinds(state) == 1 else []
        for part, colour in seen:
            assert np.abs(near(image, colour) - state[part]).max() < 0.025
        assert np.array_equal(image, tabletop_view.render(state))
    differs = np.nonzero(
        (tabletop_view.render(AVOID) != tabletop_view.render(changed(AVOID, "wall_y", 0))).any(-1)
    )  # y down, x
    assert np.allclose(
        np.mean(differs, 1), [64 * (1 - AVOID[WALL]) - 0.5, 64 * WALL_X - 0.5], atol=0.6
    )
    assert np.isclose(np.ptp(differs[0]), 64 * 2 * HALF, atol=3)
    assert not np.array_equal(
        tabletop_view.render(REACH), tabletop_view.render(changed(REACH, "gripper_x", 0.3))
    )


def test_an_animation_follows_the_rollout_and_draws_its_path():
    for state in (REACH, PUSH, AVOID):
        clip, path = (
            tabletop_view.animate(state, demonstrate(state)),
            rollout(demonstrate(state), state).states,
        )
        assert clip.shape == (HORIZON + 1, 192, 192, 3) and clip.dtype == np.uint8
        for i in (0, 6, HORIZON):
            assert np.abs(near(clip[i], tabletop_view.HAND_FILL) - path[i, GRIPPER]).max() < 0.01
        drawn = [
            (np.abs(frame.astype(int) - tabletop_view.HAND_PATH).sum(-1) < 10).sum()
            for frame in clip
        ]
        assert drawn[0] == 0 and drawn[-1] > 100


def test_a_wall_that_was_run_into_and_a_goal_that_was_reached_look_so():
    def has(image, colour):
        return (np.abs(image.astype(int) - colour).sum(-1) < 10).any()

    struck = tabletop_view.animate(AVOID, straight(AVOID[None])[0])
    passed = tabletop_view.animate(AVOID, demonstrate(AVOID))
    assert has(struck[-1], tabletop_view.STRUCK) and not has(struck[0], tabletop_view.STRUCK)
    assert not has(passed[-1], tabletop_view.STRUCK)
    assert (
        has(passed[-1], tabletop_view.REACHED)
        and not has(passed[0], tabletop_view.REACHED)
        and not has(struck[-1], tabletop_view.REACHED)
    )
    with pytest.raises(ValueError, match="expected 7 finite numbers"):
        tabletop_view.render(REACH[:5])
