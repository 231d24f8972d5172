"""The skeleton, its rotations and kinematics, and the features that a motion becomes."""

from __future__ import annotations

import numpy as np
import pytest

from gen.core.errors import GenError
from gen.media.motion import features as mf
from gen.media.motion.skeleton import (
    FPS,
    JOINTS,
    OFFSETS,
    PARENTS,
    STANDING,
    Motion,
    axis_rotation,
    euler_zyx,
    from_six,
    joint,
    kinematics,
    six,
    standing,
    to_euler_zyx,
    yaw_of,
)

UP = np.array([0.0, STANDING, 0.0])


def anyhow(seed: int, frames: int = 40) -> Motion:
    """Any motion with an upright pelvis: every other joint is turned at random, and the figure
    jumps about."""
    rng = np.random.default_rng(seed)
    rotations = euler_zyx(rng.uniform(-3, 3, (frames, len(JOINTS), 3)))
    rotations[:, 0] = axis_rotation("y", np.cumsum(rng.uniform(-2.5, 2.5, frames)))
    return Motion(np.cumsum(rng.normal(size=(frames, 3)), 0) * 0.2, rotations)


def posed(frames: int = 2, root: np.ndarray = UP, **turned: np.ndarray) -> Motion:
    """A standing figure with some joints turned."""
    rotations = np.tile(np.eye(3), (frames, len(JOINTS), 1, 1))
    for name, rotation in turned.items():
        rotations[:, joint(name)] = rotation
    return Motion(np.broadcast_to(root, (frames, 3)), rotations)


def walked(yaw: np.ndarray, metres: float) -> Motion:
    """A stiff figure that goes ``metres`` per frame to where it faces."""
    steps = metres * np.stack([np.sin(yaw), 0 * yaw, np.cos(yaw)], 1)
    return posed(len(yaw), UP + np.cumsum(steps, 0), pelvis=axis_rotation("y", yaw))


def error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


def placed(motion: Motion, heading: float, by: np.ndarray) -> Motion:
    """The same motion elsewhere."""
    turn = axis_rotation("y", heading)
    rotations = motion.rotations.copy()
    rotations[:, 0] = turn @ rotations[:, 0]
    return Motion(motion.root @ turn.T + by, rotations)


# --- Skeleton


def test_joints_are_a_tree_in_order_and_the_right_side_mirrors_the_left():
    assert len(JOINTS) == len(set(JOINTS)) == len(PARENTS) == len(OFFSETS) == 22
    assert PARENTS[0] == -1 and all(0 <= above < j for j, above in enumerate(PARENTS) if j)
    for name in JOINTS:
        if name.startswith("left_"):
            left, right = joint(name), joint(name.replace("left", "right"))
            assert np.array_equal(OFFSETS[left] * (-1, 1, 1), OFFSETS[right]) and left < right
            assert JOINTS[PARENTS[left]].replace("left", "right") == JOINTS[PARENTS[right]]


def test_the_rest_pose_stands_on_the_floor_with_hanging_arms_and_faces_z():
    p = dict(zip(JOINTS, standing(1).joints[0], strict=True))
    assert abs(p["left_foot"][1]) < 1e-6 and abs(p["right_foot"][1]) < 1e-6
    assert min(v[1] for v in p.values()) > -1e-6 and 1.4 < p["head"][1] < 1.7
    assert p["left_foot"][2] > p["left_ankle"][2] and p["left_hip"][0] > 0 > p["right_hip"][0]
    for side in ("left", "right"):
        hand, shoulder = p[f"{side}_wrist"], p[f"{side}_shoulder"]
        assert hand[1] < shoulder[1] - 0.4 and np.allclose(hand[[0, 2]], shoulder[[0, 2]])


def test_kinematics_agree_with_homogeneous_matrices():
    motion = anyhow(0)

    def matrix(t: int, j: int) -> np.ndarray:
        own = np.eye(4)
        own[:3, :3], own[:3, 3] = motion.rotations[t, j], OFFSETS[j] if j else motion.root[t]
        return own if j == 0 else matrix(t, PARENTS[j]) @ own

    expected = np.array([[matrix(t, j)[:3, 3] for j in range(22)] for t in range(motion.frames)])
    assert motion.joints.dtype == np.float32 and error(motion.joints, expected) < 1e-5
    turned_first = np.array(
        [
            [
                matrix(t, PARENTS[j])[:3, 3] + (matrix(t, j)[:3, :3] @ OFFSETS[j])
                for j in range(1, 22)
            ]
            for t in range(3)
        ]
    )
    assert (
        error(motion.joints[:3, 1:], turned_first) > 0.1
    )  # a joint's own rotation does not turn the bone that leads to it


def test_a_joint_moves_what_hangs_on_it_and_nothing_else():
    def hangs_on(j: int, above: int) -> bool:
        return j > 0 and (PARENTS[j] == above or hangs_on(PARENTS[j], above))

    rest = standing(1).joints[0]
    for j in range(22):
        turned = posed(1, **{JOINTS[j]: euler_zyx(np.array([0.5, 0.4, 0.3]))}).joints[0]
        assert [bool(m) for m in np.abs(turned - rest).max(1) > 1e-4] == [
            hangs_on(k, j) for k in range(22)
        ]


def test_bones_keep_their_lengths():
    p = anyhow(1).joints
    lengths = np.linalg.norm(p[:, 1:] - p[:, list(PARENTS[1:])], axis=-1)
    assert error(lengths, np.linalg.norm(OFFSETS[1:], axis=-1)) < 1e-5


def test_a_motion_is_a_copy_that_nobody_writes_to():
    root, rotations = np.zeros((2, 3)), np.tile(np.eye(3, dtype=np.float32), (2, 22, 1, 1))
    motion = Motion(root, rotations)
    root[:] = 1
    assert not motion.root.any() and motion.rotations.dtype == np.float64
    for array in (motion.root, motion.rotations, motion.joints):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_cutting_gives_those_frames():
    motion = anyhow(2, 10)
    assert motion.cut(3, 7).frames == 4 and np.array_equal(
        motion.cut(3, 7).joints, motion.joints[3:7]
    )
    assert np.array_equal(motion.cut(3).joints, motion.joints[3:])
    for start, stop in ((3, 3), (0, 11), (-1, 3)):
        with pytest.raises(GenError, match="of a motion of 10"):
            motion.cut(start, stop)


def _with(array: np.ndarray, at: tuple, value: float) -> np.ndarray:
    array = array.copy()
    array[at] = value
    return array


GOOD_ROOT, GOOD = np.zeros((3, 3)), np.tile(np.eye(3), (3, 22, 1, 1))


@pytest.mark.parametrize(
    ("root", "rotations", "says"),
    [
        (np.zeros((3, 2)), GOOD, r"root of a motion is \[3, 2\]"),
        (np.zeros((0, 3)), GOOD[:0], "at least one frame"),
        (5.0, GOOD, r"root of a motion is \[\]"),
        (np.zeros((2, 3)), GOOD, r"expected \[2, 22, 3, 3\]"),
        (GOOD_ROOT, GOOD[:, :21], r"rotations of a motion are \[3, 21, 3, 3\]"),
        ("here", GOOD, "array of real numbers"),
        (_with(GOOD_ROOT, (1, 0), np.nan), GOOD, "not finite at frame 1"),
        (GOOD_ROOT, _with(GOOD, (2, 5, 0, 0), np.inf), "frame 2, joint right_knee"),
        (
            GOOD_ROOT,
            _with(GOOD, (2, 15, 0, 0), 1.01),
            "matrix of head in frame 2 is not a rotation",
        ),
        (GOOD_ROOT, _with(GOOD, (0, 15, 0, 0), -1), "mirrors"),
    ],
)
def test_what_is_no_motion_is_refused(root, rotations, says):
    with pytest.raises(GenError, match=says):
        Motion(root, rotations)
    Motion(GOOD_ROOT, GOOD)


def test_an_unknown_joint_is_named_with_the_nearest():
    with pytest.raises(GenError, match="'left_ankel'.*'left_ankle'"):
        joint("left_ankel")


# --- Rotations


def test_rotations_are_right_handed():
    x, y, z = np.eye(3)
    assert np.allclose(axis_rotation("x", np.pi / 2) @ y, z) and np.allclose(
        axis_rotation("y", np.pi / 2) @ z, x
    )
    assert np.allclose(axis_rotation("z", np.pi / 2) @ x, y)
    third = axis_rotation(np.array([2.0, 2.0, 2.0]), 2 * np.pi / 3)
    assert np.allclose(third @ x, y) and np.allclose(third @ y, z)
    assert axis_rotation("x", np.zeros((4, 5))).shape == (4, 5, 3, 3)
    for bad in ("w", np.zeros(3), np.ones(2), np.full(3, np.nan)):
        with pytest.raises(GenError, match="axis is"):
            axis_rotation(bad, 0.1)


def test_euler_angles_come_back_even_where_two_axes_coincide():
    angles = np.random.default_rng(3).uniform(-1.5, 1.5, (500, 3))
    assert error(to_euler_zyx(euler_zyx(angles)), angles) < 1e-9
    locked = angles.copy()
    locked[:, 1] = np.pi / 2 * np.sign(angles[:, 1])
    wild = np.concatenate([3 * angles, locked, locked + 1e-9])
    assert error(euler_zyx(to_euler_zyx(euler_zyx(wild))), euler_zyx(wild)) < 1e-12
    assert (
        error(euler_zyx(angles[:, ::-1]), euler_zyx(angles)) > 0.5
    )  # another order is another rotation


def test_six_numbers_are_two_columns_and_give_the_rotation_back():
    rotations = euler_zyx(np.random.default_rng(4).uniform(-3, 3, (200, 3)))
    assert error(from_six(six(rotations)), rotations) < 1e-12
    assert np.array_equal(six(rotations)[0], [*rotations[0][:, 0], *rotations[0][:, 1]])
    rows = np.concatenate([rotations[:, 0], rotations[:, 1]], -1)
    assert error(from_six(rows), rotations) > 0.5


def test_any_six_numbers_but_flat_ones_give_a_rotation():
    made = from_six(np.random.default_rng(5).normal(size=(300, 6)))
    assert (
        error(np.swapaxes(made, -1, -2) @ made, np.eye(3)) < 1e-9
        and error(np.linalg.det(made), 1) < 1e-9
    )
    for flat in ([0, 0, 0, 0, 1, 0], [1, 2, 3, 2, 4, 6], [np.nan, 0, 0, 0, 1, 0]):
        with pytest.raises(GenError, match="do not span a plane"):
            from_six(np.array(flat, float))
    with pytest.raises(GenError, match=r"\[5\]"):
        from_six(np.zeros(5))


def test_yaw_is_where_a_leaning_frame_faces():
    yaw = np.linspace(-3, 3, 50)
    turn = axis_rotation("y", yaw)
    assert error(yaw_of(turn), yaw) < 1e-12
    assert error(yaw_of(turn @ axis_rotation("x", 0.4)), yaw) < 1e-12
    assert error(yaw_of(turn @ axis_rotation("z", 0.4)), yaw) < 1e-12
    assert error(yaw_of(np.swapaxes(turn, -1, -2)), yaw) > 1


# --- Features


def test_the_layout_covers_every_dimension_once():
    parts = [mf.ROOT, mf.RIC, mf.ROTATIONS, mf.VELOCITY, mf.CONTACT]
    assert [p.stop - p.start for p in parts] == [4, 63, 126, 66, 4]
    assert np.array_equal(np.concatenate([np.arange(mf.WIDTH)[p] for p in parts]), np.arange(263))
    assert sorted([*mf.LOWER, *mf.UPPER]) == list(range(263))


@pytest.mark.parametrize("seed", range(3))
def test_features_give_all_frames_but_the_last_back_both_ways(seed: int):
    motion = anyhow(seed, 200)
    rows, start = mf.features(motion), mf.start_of(motion)
    assert rows.dtype == np.float32 and rows.shape == (199, 263)
    assert error(mf.recover(rows, *start).joints, motion.joints[:-1]) < 1e-5
    assert error(mf.recover_joints(rows, *start), motion.joints[:-1]) < 1e-5


@pytest.mark.parametrize(
    "broken", ["a frame late", "a frame early", "a whole angle", "the other way", "another heading"]
)
def test_a_wrong_integration_does_not_give_the_motion_back(broken: str):
    motion = anyhow(1)
    rows, (heading, origin) = mf.features(motion), mf.start_of(motion)
    if "frame" in broken:
        rows[:, :3] = np.roll(rows[:, :3], 1 if broken.endswith("late") else -1, 0)
    elif broken == "another heading":
        heading += 0.01
    else:
        rows[:, 0] *= 0.5 if broken == "a whole angle" else -1
    assert error(mf.recover(rows, heading, origin).joints, motion.joints[:-1]) > 1e-3
    assert error(mf.recover_joints(rows, heading, origin), motion.joints[:-1]) > 1e-3


def test_features_do_not_depend_on_where_a_motion_starts_or_faces():
    motion = anyhow(5)
    rows = mf.features(motion)
    elsewhere = placed(motion, 2.0, np.array([3.0, 0.0, -4.0]))
    assert error(elsewhere.joints, motion.joints) > 1
    assert error(mf.features(elsewhere), rows) < 1e-5
    assert error(mf.features(placed(motion, 0.0, np.array([0.0, 0.1, 0.0]))), rows) > 0.09
    at_origin = mf.recover(rows)
    heading, origin = mf.start_of(at_origin)
    assert abs(heading) < 1e-9 and np.abs(origin).max() < 1e-9


def test_the_root_is_stored_as_the_quaternions_of_humanml3d_say():
    """Their arithmetic by quaternions: q turns the world into the facing frame, the turn is arcsin
    of y of q[t+1] inv(q[t])."""
    motion = anyhow(6)
    half = -yaw_of(motion.rotations[:, 0]) / 2
    q = np.stack([np.cos(half), 0 * half, np.sin(half), 0 * half], 1)

    def times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        w = a[:, :1] * b[:, :1] - (a[:, 1:] * b[:, 1:]).sum(1, keepdims=True)
        return np.concatenate(
            [w, a[:, :1] * b[:, 1:] + b[:, :1] * a[:, 1:] + np.cross(a[:, 1:], b[:, 1:])], 1
        )

    back = q * (1, -1, -1, -1)
    turn = times(q[1:], back[:-1])
    turn *= np.sign(turn[:, :1])  # the same rotation, the shorter way round
    step = np.concatenate([np.zeros((motion.frames - 1, 1)), np.diff(motion.root, axis=0)], 1)
    seen = times(times(q[1:], step), back[1:])
    rows = mf.features(motion)
    assert error(rows[:, 0], np.arcsin(turn[:, 2])) < 1e-6
    assert error(rows[:, 1:3], seen[:, [1, 3]]) < 1e-6
    before = times(times(q[:-1], step), back[:-1])
    assert (
        error(rows[:, 1:3], before[:, [1, 3]]) > 0.01
    )  # the frame faced before the step is another


def test_walking_forward_is_the_same_forward_velocity_in_any_direction():
    for yaw in (np.zeros(10), np.full(10, 2.0), np.linspace(0, 3, 10)):
        rows = mf.features(walked(yaw, 0.05))
        assert (
            error(rows[:, 1], 0) < 1e-6
            and error(rows[:, 2], 0.05) < 1e-6
            and error(rows[:, 3], STANDING) < 1e-6
        )
        assert (
            error(rows[:, 0], -np.diff(yaw) / 2) < 1e-6
        )  # to its left, which is towards +x, is negative
    sideways = posed(10, UP + np.arange(10)[:, None] * (0.05, 0, 0))
    assert error(mf.features(sideways)[:, 1], 0.05) < 1e-6


def test_legs_change_lower_features_and_arms_and_spine_change_upper_ones_alone():
    def swing(amount):
        return axis_rotation("x", amount * np.sin(np.arange(30)))

    base = mf.features(standing(30))
    for names, own, other in (
        (("left_hip", "right_knee", "left_ankle", "right_foot"), mf.LOWER, mf.UPPER),
        (
            ("spine1", "neck", "head", "left_collar", "right_shoulder", "left_wrist"),
            mf.UPPER,
            mf.LOWER,
        ),
    ):
        for name in names:
            rows = mf.features(posed(30, **{name: swing(0.5)}))
            assert (
                error(rows[:, own], base[:, own]) > 0.1
                and error(rows[:, other], base[:, other]) == 0
            )
    walking = mf.features(walked(np.linspace(0, 1, 30), 0.05))
    assert (
        error(walking[:, mf.LOWER[:4]], base[:, mf.LOWER[:4]]) > 0.04
    )  # how the root moves is lower


def test_feet_are_in_contact_while_they_stand_low_and_still():
    assert mf.features(standing(3))[:, mf.CONTACT].all()
    slow, fast = (mf.features(walked(np.zeros(5), v / FPS)) for v in (0.5, 1.5))
    assert slow[:, mf.CONTACT].all() and not fast[:, mf.CONTACT].any()
    assert not mf.features(posed(3, UP + np.array([0, 0.3, 0])))[:, mf.CONTACT].any()
    bent = posed(3, left_hip=axis_rotation("x", -1.0), left_knee=axis_rotation("x", 1.5))
    assert (mf.features(bent)[:, mf.CONTACT] == (0, 0, 1, 1)).all()


def test_a_leaning_pelvis_is_refused_with_the_angle_and_the_way_out():
    for lean in (axis_rotation("x", np.radians(12)), axis_rotation("z", np.radians(-12))):
        motion = posed(4, pelvis=axis_rotation("y", 1.0) @ lean)
        with pytest.raises(GenError, match=r"leans by 12 degrees in frame 0.*spine1 and the hips"):
            mf.features(motion)
        upright = motion.rotations.copy()
        upright[:, 0] = axis_rotation("y", yaw_of(motion.rotations[:, 0]))
        for name in ("spine1", "left_hip", "right_hip"):
            upright[:, joint(name)] = lean
        mf.features(Motion(motion.root, upright))
    with pytest.raises(GenError, match="leans by 180 degrees"):
        mf.features(posed(2, pelvis=axis_rotation("x", np.pi)))


def test_features_survive_rotations_that_were_kept_in_single_precision():
    motion = anyhow(7)
    single = Motion(motion.root.astype(np.float32), motion.rotations.astype(np.float32))
    assert error(mf.features(single), mf.features(motion)) < 1e-5


def test_recovered_bones_keep_their_lengths_whatever_the_numbers_are_but_ric_may_stretch_them():
    rng = np.random.default_rng(8)
    rows = mf.features(anyhow(8)) + rng.normal(size=(39, 263)) * 0.2

    def lengths(p):
        return np.linalg.norm(p[:, 1:] - p[:, list(PARENTS[1:])], axis=-1)

    expected = np.linalg.norm(OFFSETS[1:], axis=-1)
    assert error(lengths(mf.recover(rows).joints), expected) < 1e-5
    assert error(lengths(mf.recover_joints(rows)), expected) > 0.1


def test_statistics_are_those_of_all_rows_and_never_zero():
    several = [mf.features(anyhow(s, n)) for s, n in ((0, 20), (1, 50))]
    mean, std = mf.statistics(several)
    rows = np.concatenate(several).astype(np.float64)
    varies = rows.std(0) > 1e-3
    assert mean.dtype == std.dtype == np.float32 and mean.shape == std.shape == (263,)
    assert error(mean, rows.mean(0)) < 1e-6 and error(std[varies], rows.std(0)[varies]) < 1e-6
    assert (~varies).any() and np.all(std[~varies] == np.float32(1e-3))
    assert mf.statistics(several, floor=0.5)[1].min() == 0.5
    with pytest.raises(GenError, match="no features"):
        mf.statistics([])


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (np.zeros((4, 251)), r"\[4, 251\]; expected \[frames, 263\]"),
        (np.zeros((0, 263)), "at least one frame"),
        (np.zeros(263), r"\[263\]"),
        (_with(np.zeros((4, 263)), (2, 100), np.nan), "not finite in frame 2, dimension 100"),
    ],
)
def test_what_are_no_features_is_refused(rows, says):
    for read in (mf.recover, mf.recover_joints, lambda r: mf.statistics([r])):
        with pytest.raises(GenError, match=says):
            read(rows)
    with pytest.raises(GenError, match="do not span a plane"):
        mf.recover(np.zeros((4, 263)))


def test_one_frame_has_no_features():
    with pytest.raises(GenError, match="1 frame"):
        mf.features(standing(1))
    assert mf.features(standing(2)).shape == (1, 263)


def test_kinematics_take_any_leading_axes():
    motion = anyhow(9, 6)
    p, frames = kinematics(motion.root.reshape(2, 3, 3), motion.rotations.reshape(2, 3, 22, 3, 3))
    assert p.shape == (2, 3, 22, 3) and frames.shape == (2, 3, 22, 3, 3)
    assert error(p.reshape(6, 22, 3), motion.joints) < 1e-5
