"""Images of motions: they are stable, and what moves in the motion moves in the image."""

from __future__ import annotations

import numpy as np
import pytest

from gen.core.errors import GenError
from gen.media.motion.skeleton import STANDING, Motion, axis_rotation, joint, standing
from gen.modalities.motion import stick_figure
from gen.modalities.motion.stick_figure import BODY, GROUND, LEFT, RIGHT, render

UP = np.array([0.0, STANDING, 0.0])


def posed(frames: int = 1, root: np.ndarray = UP, **turned: np.ndarray) -> Motion:
    motion = standing(frames)
    rotations = motion.rotations.copy()
    for name, rotation in turned.items():
        rotations[:, joint(name)] = rotation
    return Motion(np.broadcast_to(root, (frames, 3)), rotations)


def where(frame: np.ndarray, colour: tuple[int, int, int], within: float = 30) -> np.ndarray:
    """x and y of the pixels of a colour: [n, 2]."""
    return np.argwhere(np.linalg.norm(frame.astype(float) - colour, axis=-1) < within)[:, ::-1]


def test_frames_are_squares_of_the_size_asked_for():
    for size in (64, 97):
        clip = render(standing(3), size)
        assert clip.dtype == np.uint8 and clip.shape == (3, size, size, 3)


def test_the_same_motion_makes_the_same_bytes_and_another_does_not():
    wave = posed(4, left_shoulder=axis_rotation("z", np.linspace(0, 2, 4)))
    assert np.array_equal(render(wave, 80), render(wave, 80))
    assert not np.array_equal(render(wave, 80)[1:], render(standing(4), 80)[1:])


def test_a_figure_stands_upright_in_the_middle_of_a_light_image():
    frame = render(standing(1))[0]
    figure = np.concatenate([where(frame, c) for c in (LEFT, RIGHT, BODY)])
    low, high = figure.min(0), figure.max(0)
    assert low.min() > 20 and high.max() < 220 and high[1] - low[1] > 140  # pixels of 240
    assert abs(figure[:, 0].mean() - 120) < 12
    assert where(frame, BODY)[:, 1].mean() < where(frame, LEFT)[:, 1].mean()
    assert np.array_equal(np.unique(frame[:40, :40].reshape(-1, 3), axis=0), [GROUND])
    assert len(where(frame, GROUND, 1)) > 0.6 * 240**2


def test_edges_are_smooth(monkeypatch):
    """Between a limb and the ground there are shades of both, and none where the image is drawn
    at its own size."""

    def blended() -> int:
        frame = render(posed(left_shoulder=axis_rotation("z", 1.0)), azimuth=0)[0].astype(float)
        along = np.subtract(LEFT, GROUND).astype(float)
        share = (frame - GROUND) @ along / (along @ along)
        off = np.linalg.norm(frame - GROUND - share[..., None] * along, axis=-1)
        return int(((share > 0.3) & (share < 0.7) & (off < 2)).sum())

    fine = blended()
    monkeypatch.setattr(stick_figure, "FINE", 1)
    assert fine > 30 and blended() < fine / 3


def test_left_and_right_limbs_have_their_own_colours_seen_from_before_and_behind():
    front, back = (render(standing(1), azimuth=a)[0] for a in (0, 180))

    def side(frame):
        return where(frame, LEFT)[:, 0].mean() - where(frame, RIGHT)[:, 0].mean()

    assert side(front) > 10 and side(back) < -10
    raised = render(posed(left_shoulder=axis_rotation("z", 2.8)), azimuth=0)[0]
    assert where(raised, LEFT)[:, 1].min() < where(front, LEFT)[:, 1].min() - 30
    assert where(raised, RIGHT)[:, 1].min() == where(front, RIGHT)[:, 1].min()


def test_a_figure_that_turns_away_hides_its_face_dot():
    """From before there is a light dot inside the head, from behind none."""

    def dot(azimuth: float) -> int:
        frame = render(standing(1), azimuth=azimuth)[0].astype(int)
        body = where(frame, BODY)
        top = body[:, 1].min()
        head = body[body[:, 1] < top + 16]
        x0, x1 = head[:, 0].min() + 4, head[:, 0].max() - 4
        return int((frame[top + 6 : top + 16, x0 : x1 + 1].sum(-1) > 450).sum())

    assert dot(0) > 4 and dot(180) == 0


def test_the_floor_shows_translation_that_the_camera_follows():
    """A statue that glides stays in the middle, but the floor passes below it; on the spot nothing
    changes."""
    steps = np.arange(60)[:, None] * (0.04, 0, 0)
    still, gliding = render(standing(60), 120), render(posed(60, UP + steps), 120)
    assert all(np.array_equal(f, still[0]) for f in still)

    def middle(frame):
        return where(frame, BODY)[:, 0].mean()

    assert abs(middle(gliding[30]) - middle(still[30])) < 2

    def floor(frame):
        return frame[70:, :30].astype(int)  # beside the figure

    assert np.abs(floor(gliding[30]) - floor(gliding[33])).max() > 10


def test_a_camera_that_does_not_follow_sees_the_figure_cross_the_image():
    steps = np.arange(30)[:, None] * (0.1, 0, 0)
    clip = render(posed(30, UP + steps), 120, azimuth=0, follow=False)
    xs = [where(f, BODY)[:, 0].mean() for f in clip]
    assert np.all(np.diff(xs) > 0) and xs[-1] - xs[0] > 50
    assert np.array_equal(clip[0][-8:], clip[-1][-8:])  # the floor stands still


@pytest.mark.parametrize("follow", [True, False])
def test_every_limb_stays_inside_the_image(follow: bool):
    """However far and fast it goes; the border holds floor alone."""
    rng = np.random.default_rng(0)
    root = UP + np.cumsum(rng.normal(size=(20, 3)) * (0.6, 0.1, 0.6), 0)
    up = {f"{s}_shoulder": axis_rotation("z", a) for s, a in (("left", 2.5), ("right", -2.5))}
    for frame in render(posed(20, root, **up), 96, follow=follow):
        border = np.concatenate([frame[0], frame[-1], frame[:, 0], frame[:, -1]])
        assert (
            min(
                np.linalg.norm(border.astype(float) - c, axis=-1).min() for c in (LEFT, RIGHT, BODY)
            )
            > 60
        )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"size": 8}, "size is 8"),
        ({"size": 120.5}, "size is 120.5"),
        ({"azimuth": float("nan")}, "azimuth nan"),
        ({"elevation": 95}, "elevation 95"),
        ({"elevation": -5}, "elevation -5"),
    ],
)
def test_an_impossible_view_is_refused(options, says):
    with pytest.raises(GenError, match=says):
        render(standing(1), **options)
