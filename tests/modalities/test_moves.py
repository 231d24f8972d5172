"""The program that moves the skeleton, and the checker that judges its clips."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gen.media.motion.skeleton import (
    FPS,
    JOINTS,
    STANDING,
    Motion,
    joint,
    kinematics,
    standing,
    yaw_of,
)
from gen.modalities.motion import synth as moves_draw
from gen.modalities.motion.captions import (
    ACTIONS,
    CIRCLES,
    SPEEDS,
    Caption,
    every_caption,
    options,
    parse,
)
from gen.modalities.motion.checker import check, check_many, describe
from gen.modalities.motion.synth import GRID, MAX_POSES, MIN_POSES, STYLES, draw, lengths, perform

EVERY = every_caption()
FEET = [joint("left_foot"), joint("right_foot")]
MIRROR = {"left": "right", "righ": "left"}  # by the first four letters
SWAPPED = [
    JOINTS.index(MIRROR[n[:4]] + n[n.index("_") :] if n[:4] in MIRROR else n) for n in JOINTS
]


def smooth_noise(
    shape: tuple[int, ...], metres: float, rng: np.random.Generator, width: int = 8
) -> np.ndarray:
    """Noise of one standard deviation per coordinate that changes over about ``width`` frames."""
    kernel = np.exp(-0.5 * (np.arange(-2 * width, 2 * width + 1) / (width / 2)) ** 2)
    white = rng.standard_normal((shape[0] + 4 * width, int(np.prod(shape[1:]))))
    even = sum(k * white[i : i + shape[0]] for i, k in enumerate(kernel)) / np.sqrt(
        (kernel**2).sum()
    )
    return metres * even.reshape(shape)


def halved(joints: np.ndarray) -> np.ndarray:
    """Every second pose, and straight lines between them."""
    out = joints.copy()
    out[1:-1:2] = (joints[:-2:2] + joints[2::2]) / 2
    return out


def share(clips: list[np.ndarray], captions: list[Caption]) -> float:
    return float(np.mean([v.passed for v in check_many(clips, captions)]))


def clip(text: str, style: int = 0) -> np.ndarray:
    return perform(parse(text), STYLES[style]).joints


def over_ground(joints: np.ndarray) -> np.ndarray:
    """The way of the pelvis since the first pose, at height zero: [T, 1, 3]."""
    return (joints[:, :1] - joints[:1, :1]) * np.array([1, 0, 1])


@pytest.fixture(scope="module")
def data() -> list[np.ndarray]:
    """A clip of every caption."""
    return [draw(c, np.random.default_rng(i)).joints for i, c in enumerate(EVERY)]


# --- Drawing


def test_every_clip_starts_in_the_rest_pose_and_lasts_as_long_as_its_caption_says():
    rest = standing(1).joints[0]
    for caption in EVERY:
        for style in STYLES[::3]:
            motion = perform(caption, style)
            assert np.allclose(motion.joints[0], rest, atol=1e-6)
            assert (motion.frames,) == lengths(caption)
            assert motion.frames % GRID == 1 and MIN_POSES <= motion.frames <= MAX_POSES
    said = [
        lengths(parse(f"a person squats quickly {n}")) for n in ("once", "twice", "three times")
    ]
    assert lengths(parse("a person squats quickly")) == sum(said, ())
    kicks = parse("a person kicks")
    assert {draw(kicks, np.random.default_rng(s)).frames for s in range(40)} == set(lengths(kicks))


def test_the_same_seed_draws_the_same_clip_and_styles_differ():
    caption = parse("a person walks forward slowly for four steps")
    first, again = (draw(caption, np.random.default_rng(1)) for _ in range(2))
    assert np.array_equal(first.root, again.root) and np.array_equal(
        first.rotations, again.rotations
    )
    many = {draw(caption, np.random.default_rng(s)).joints.tobytes() for s in range(24)}
    assert len(many) == len(STYLES)  # nothing else is open


def test_what_a_caption_leaves_open_is_drawn():
    rng = np.random.default_rng(5)
    found = {describe(draw(parse("a person waves"), rng)).caption for _ in range(40)}
    assert {(c.action, c.direction) for c in found} == {("waves", None)}
    assert all(
        len({getattr(c, key) for c in found}) == n
        for key, n in (("speed", 2), ("count", 3), ("side", 3))
    )
    with pytest.raises(ValueError, match="omits its speed and count"):
        perform(parse("a person walks forward"))


def test_motions_are_smooth_and_the_pelvis_stays_upright():
    for caption in EVERY:
        motion = perform(caption, STYLES[3])
        step = np.linalg.norm(np.diff(motion.joints, axis=0), axis=-1)
        assert step.max() < 0.45 and step[0].max() < 0.06 and step[-1].max() < 0.02, str(caption)
        upright = motion.rotations[:, 0]
        assert (
            np.allclose(upright[:, 1, 1], 1)
            and np.abs(np.diff(np.unwrap(yaw_of(upright)))).max() < 0.2
        )


def test_feet_stay_on_the_floor_and_do_not_slide():
    for caption in EVERY:
        balls = perform(caption, STYLES[1]).joints[:, FEET]
        assert balls[..., 1].min() > -1e-3, str(caption)
        if caption.action in ("jumps", "runs"):
            assert 0.05 < balls[..., 1].min(1).max() < 0.3
            continue
        assert balls[..., 1].min(1).max() < 1e-3, str(caption)  # one foot always stands
        moved = np.linalg.norm(np.diff(balls, axis=0), axis=-1)
        planted = np.maximum(balls[1:, :, 1], balls[:-1, :, 1]) < 1e-6
        assert moved[planted].max() < 1e-3 and planted.mean() > 0.4, str(caption)


def test_left_and_right_mirror_each_other():
    def mirror(text):
        return clip(text)[:, SWAPPED] * np.array([-1, 1, 1])

    for text in (
        "a person turns left slowly twice",
        "a person kicks quickly with the left leg once",
        "a person jumps left twice",
        "a person walks in a circle to the left quickly",
        "a person waves slowly with the left hand twice",
    ):
        assert np.allclose(mirror(text), clip(text.replace("left", "right")), atol=1e-5), text
    assert not np.allclose(
        mirror("a person walks forward slowly for six steps"),
        clip("a person walks forward slowly for six steps"),
        atol=0.1,
    )


def test_walking_forward_moves_forward_by_its_steps_and_quickly_is_faster():
    def ahead(text):
        return clip(text)[-1, 0, 2]

    def pace(text):
        return np.diff(clip(text)[:, 0, 2])[18:-18].mean() * FPS

    four, six = (ahead(f"a person walks forward slowly for {n} steps") for n in ("four", "six"))
    assert np.isclose(six / four, 5 / 3)  # the last step only closes up
    assert ahead("a person walks backward slowly for four steps") < -0.8
    for action in ("walks forward", "runs forward"):
        slow, quick = (pace(f"a person {action} {speed} for eight steps") for speed in SPEEDS)
        assert quick > 1.4 * slow > 0.8
    circle = clip("a person walks in a circle to the left slowly")
    assert (
        np.abs(circle[-1] - circle[0]).max() < 1e-3 and circle[:, 0, 0].max() > 1
    )  # comes back, having been on the left


def test_each_action_does_what_it_says():
    def height(text):
        return clip(text)[:, 0, 1] - STANDING

    assert height("a person jumps once").max() > 0.2 and height("a person jumps once").min() < -0.15
    squat, sit = height("a person squats slowly once"), height("a person sits down slowly")
    assert squat.min() < -0.3 and abs(squat[-1]) < 1e-6
    assert STANDING + sit[-1] == pytest.approx(0.5, abs=0.05) and sit[-8:].std() < 1e-6
    turn = perform(parse("a person turns left quickly once"))
    assert yaw_of(turn.rotations[:, 0])[-1] == pytest.approx(np.pi / 2)
    wave = clip("a person waves slowly with the right hand three times")
    over = (wave[:, joint("right_wrist")] - wave[:, joint("right_shoulder")])[:, 1] > 0
    assert over.mean() > 0.5 and wave[:, joint("left_wrist"), 1].max() < 1
    assert (
        clip("a person kicks quickly with the left leg once")[:, joint("left_foot"), 1].max() > 0.5
    )


# --- The checker: what must pass


def test_drawn_clips_fulfil_their_captions_in_every_style():
    clips = [(c, perform(c, s)) for c in EVERY for s in STYLES[1:3]]
    assert share([m.joints for _, m in clips], [c for c, _ in clips]) == 1
    assert all(describe(m).caption == c for c, m in clips[::9])


def test_unsaid_attributes_match_anything_and_said_ones_do_not():
    joints = clip("a person waves slowly with the left hand twice")
    for text in (
        "a person waves",
        "a person waves slowly",
        "a person waves with the left hand",
        "a person waves twice",
    ):
        assert check(joints, text).passed, text
    for text in (
        "a person waves quickly",
        "a person waves with the right hand",
        "a person waves once",
        "a person bows",
    ):
        verdict = check(joints, text)
        assert verdict.valid and not verdict.passed, text
        assert "saw a person waves slowly with the left hand twice; expected" in verdict.detail


def test_noise_and_missing_frames_do_not_turn_the_verdict(data):
    rng = np.random.default_rng(11)

    def noisy(metres):
        return [j + smooth_noise(j.shape, metres, rng) for j in data]

    assert share(noisy(0.01), EVERY) >= 0.99
    assert share(noisy(0.02), EVERY) >= 0.97
    assert share([j + rng.normal(0, 0.01, j.shape) for j in data], EVERY) >= 0.99
    assert share([halved(j) for j in data], EVERY) >= 0.99
    assert share(noisy(0.15), EVERY) < 0.2  # the control: this much noise is no person


def test_clips_survive_the_representation_that_models_are_trained_on():
    from gen.media.motion.features import features, recover

    clips = [features(perform(c)) for c in EVERY[::2]]
    assert share([recover(x) for x in clips], EVERY[::2]) == 1
    assert (
        share([recover(x[::-1]) for x in clips], EVERY[::2]) < 1
    )  # the control: backwards it says something else


def test_where_a_clip_starts_and_how_long_it_stands_has_no_say(data):
    from gen.media.motion.skeleton import axis_rotation

    turned = [j @ axis_rotation("y", 2.2).T + np.array([3, 0, -5]) for j in data]
    assert share(turned, EVERY) == 1
    assert (
        share([np.concatenate([j[:1].repeat(12, 0), j, j[-1:].repeat(30, 0)]) for j in data], EVERY)
        == 1
    )
    up = [j + np.array([0, 0.3, 0]) for j in data]
    assert share(up, EVERY) == 0  # the control: who floats is no person


# --- The checker: what must fail


def test_clips_fulfil_the_captions_of_other_clips_at_chance(data):
    found = [describe(j).caption for j in data]
    hits = np.array([[f == c for c in EVERY] for f in found])
    assert hits.diagonal().all() and hits.sum() == len(EVERY)
    assert share(data, EVERY[1:] + EVERY[:1]) == 0


def test_changing_any_one_stated_attribute_turns_the_verdict(data):
    changed = 0
    for caption, joints in zip(EVERY, data, strict=True):
        found = describe(joints)
        others = {
            "direction": ACTIONS[caption.action].directions,
            **options(caption.action, caption.direction),
        }
        for key, values in others.items():
            for value in values:
                if value != getattr(caption, key) and not (
                    key == "direction" and (value in CIRCLES) != (caption.direction in CIRCLES)
                ):
                    other = replace(caption, **{key: value})
                    assert not check(joints, other).passed and getattr(found, key) != value
                    changed += 1
    assert changed > 250


def test_only_the_true_order_of_time_passes(data):
    rng = np.random.default_rng(8)
    backwards = {c: describe(j[::-1].copy()) for c, j in zip(EVERY, data, strict=True)}
    opposite = {"forward": "backward", "backward": "forward", "left": "right", "right": "left"}
    for caption, found in backwards.items():
        if (
            caption.action in ("waves", "kicks", "squats", "bows")
            or caption.direction == "in place"
        ):
            assert found.caption == caption  # shows the same
        elif caption.action in ("walks", "turns", "jumps") and caption.direction in opposite:
            assert (found.action, found.direction, found.count) == (
                caption.action,
                opposite[caption.direction],
                caption.count,
            )
        else:
            assert found.caption != caption
    assert share([j[rng.permutation(len(j))] for j in data], EVERY) == 0


def test_who_stands_still_fulfils_nothing(data):
    for pick in (0, 0.3, 0.5, 0.7, 1):
        still = [np.repeat(j[[round(pick * (len(j) - 1))]], len(j), 0) for j in data]
        assert not any(v.valid for v in check_many(still, EVERY))


def test_who_glides_does_not_walk_and_who_walks_on_the_spot_gets_nowhere(data):
    for caption, joints in zip(EVERY, data, strict=True):
        if caption.action in ("walks", "runs") and caption.direction not in CIRCLES:
            glides, stays = joints[:1] + over_ground(joints), joints - over_ground(joints)
            assert "without steps" in check(glides, caption).detail
            assert not check(stays, caption).valid
            ahead = 1 if caption.direction == "forward" else -1
            ice = stays - ahead * 0.04 * np.arange(len(joints))[:, None, None] * np.array(
                [0, 0, 1]
            )  # steps one way and slides the other
            assert (
                "glides"
                in check(ice, f"a person walks {'backward' if ahead > 0 else 'forward'}").detail
            )
    spinning = clip("a person turns left slowly once")
    turn = yaw_of(perform(parse("a person turns left slowly once")).rotations[:, 0])
    still = np.tile(np.eye(3), (len(turn), len(JOINTS), 1, 1))
    still[:, 0, 0, 0] = still[:, 0, 2, 2] = np.cos(turn)
    still[:, 0, 0, 2], still[:, 0, 2, 0] = np.sin(turn), -np.sin(turn)
    rigid = kinematics(np.tile([0, STANDING, 0], (len(turn), 1)), still)[0]
    assert check(spinning, "a person turns left").passed
    assert "without steps" in check(rigid, "a person turns left").detail


def test_two_actions_in_one_clip_are_not_valid():
    waves, walks = (
        perform(parse("a person waves slowly with the left hand twice")),
        perform(parse("a person walks forward slowly for four steps")),
    )
    rotations = walks.rotations.copy()
    for part in ("shoulder", "elbow"):
        rotations[:, joint(f"left_{part}")] = waves.rotations[:, joint(f"left_{part}")]
    assert waves.frames == walks.frames
    both = check(Motion(walks.root, rotations), "a person walks forward")
    assert (
        not both.valid
        and "several things" in both.detail
        and "waves" in both.detail
        and "walks" in both.detail
    )
    bows, kicks = (
        clip("a person bows quickly once"),
        clip("a person kicks quickly with the left leg once"),
    )
    assert not check(np.concatenate([bows, kicks]), "a person bows").valid
    assert check(np.concatenate([bows, bows]), "a person bows twice").passed


def test_a_number_of_steps_that_no_caption_has_is_seen_as_such():
    five = np.concatenate(
        [clip("a person squats quickly twice"), clip("a person squats quickly three times")]
    )
    found = describe(five)
    assert (
        found.count == 5
        and found.caption is None
        and str(found) == "a person squats quickly, 5 times"
    )
    assert check(five, "a person squats quickly").passed
    assert not check(five, "a person squats three times").passed


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda j: j[:, :21], "expected floats"),
        (lambda j: j[:5], "at least 9"),
        (lambda j: j.astype(int), "int64"),
        (lambda j: np.where(np.arange(len(j))[:, None, None] == 7, np.nan, j), "NaN"),
        (lambda j: j * 1.4, "lengths"),
        (lambda j: j * np.array([1, 0.6, 1]), "lengths"),
        (lambda j: j + (np.arange(len(j)) > 30)[:, None, None] * np.array([1.0, 0, 0]), "leaps"),
        (lambda j: j - np.array([0, 0.5, 0]), "floor"),
    ],
)
def test_what_is_no_person_is_not_valid_and_says_why(break_it, says):
    joints = clip("a person walks forward slowly for six steps")
    assert check(joints, "a person walks forward").passed
    verdict = check(break_it(joints), "a person walks forward")
    assert not verdict.valid and not verdict.passed and says in verdict.detail


def test_motions_and_their_joints_are_judged_alike():
    motion = perform(parse("a person bows slowly twice"))
    assert check(motion, "a person bows twice") == check(
        motion.joints, parse("a person bows twice")
    )
    with pytest.raises(ValueError, match="one caption per clip"):
        check_many([motion], [])


def test_the_slow_and_the_quick_are_far_apart_for_the_checker():
    paces = {}
    for caption in EVERY:
        if caption.speed:
            paces.setdefault((caption.action, caption.direction), {}).setdefault(
                caption.speed, []
            ).append(describe(perform(caption)).pace)
    for kind, pace in paces.items():
        slow, quick = (np.array(pace[s]) for s in SPEEDS)
        apart = (
            np.log(slow.min() / quick.max())
            if kind[0] not in ("walks", "runs")
            else np.log(quick.min() / slow.max())
        )
        assert apart > 0.25, kind
    assert moves_draw.TURN_STEPS.keys() == set(SPEEDS)
