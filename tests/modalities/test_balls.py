"""Bouncing balls: the simulator, its captions, and the checker that listens."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from gen.modalities.audio import balls, captions, checker
from gen.modalities.audio.balls import Path, Scene
from gen.modalities.audio.captions import Ball, Caption


@pytest.fixture(scope="module")
def scenes():
    return balls.scenes(60, 5, held=True)


# --- the simulator


def test_a_ball_that_reaches_a_wall_turns_and_hits_in_that_frame():
    path = Path("red", "fast", lane=3, start=9, forward=True)
    assert path.positions().tolist() == [9, 11, 12, 10, 8, 6, 4, 2, 0, 2, 4, 6, 8, 10, 12, 10]
    assert path.hits() == (2, 8, 14)
    slow = Path("red", "slow", lane=3, start=2, forward=False)
    assert slow.hits() == (2, 14)


def test_hits_are_the_frames_in_which_the_frame_touches_a_wall(scenes):
    for scene in scenes:
        coloured = (scene.frames() != balls.GROUND).any(-1)
        along = coloured.any(1) if scene.axis == "x" else coloured.any(2)  # [FRAMES, SIZE]
        touching = np.flatnonzero(along[:, 0] | along[:, -1])
        assert [h.frame for h in scene.hits()] == touching.tolist()


def test_touches_are_read_from_the_frames(scenes):
    for scene in scenes:
        assert balls.touches(scene.frames()) == [(h.frame, h.colour) for h in scene.hits()]


def test_a_frame_has_one_hit_at_most_and_balls_never_share_a_tile(scenes):
    known = {tile.tobytes() for tile in balls.tiles()}
    side, count = balls.TILE, balls.SIZE // balls.TILE
    for scene in scenes:
        frames = [h.frame for h in scene.hits()]
        assert frames == sorted(set(frames))
        cut = scene.frames().reshape(-1, count, side, count, side, 3).swapaxes(2, 3)
        assert {t.tobytes() for t in cut.reshape(-1, side, side, 3)} <= known


def test_a_hit_is_a_tone_that_begins_with_its_frame(scenes):
    for scene in scenes[:10]:
        frames = scene.wave().reshape(balls.FRAMES, balls.HOP)
        assert np.flatnonzero(np.abs(frames).max(1)).tolist() == [h.frame for h in scene.hits()]
    peak = {loud: np.abs(balls.tone("mid", loud)).max() for loud in (False, True)}
    assert peak[True] / peak[False] == pytest.approx(4, rel=1e-3)


# --- captions


def test_text_and_caption_are_inverse(scenes):
    said = [scene.caption() for scene in scenes]
    said += [
        Caption((Ball("red", None, "high"),)),
        Caption((Ball(None, 2, None), Ball("blue"))),
        Caption((Ball(None, None, "low"),)),
    ]
    for caption in said:
        assert captions.parse(str(caption)) == caption
    assert len({tuple(c.slots()) for c in said}) == len(set(said))  # slots lose nothing
    assert str(Caption((Ball("red", 1, "high"),))) == "a red ball bounces 1 time, high"


@pytest.mark.parametrize(
    "text, named",
    [
        ("", "the caption is empty"),
        ("a rad ball bounces", "'red'"),
        ("a red ball bounces 4 times", "1 to 3"),
        ("a red ball bounces, hgih", "'high'"),
        ("a red ball", "bounces"),
        ("a red ball bounces 2, low", "times"),
        ("a ball bounces and a ball bounces and a ball bounces", "at most 2"),
        ("a red ball bounces low high", "and"),
    ],
)
def test_what_is_no_caption_is_refused_with_the_word_and_what_may_stand_there(text, named):
    with pytest.raises(ValueError, match="caption") as error:
        captions.parse(text)
    assert named in str(error.value)


def test_a_stated_pitch_counts_more_than_the_colour():
    assert Ball("red").sounds == "high" and Ball("red", None, "low").sounds == "low"
    assert Ball(None).sounds is None


# --- the checker


def test_the_checker_hears_frame_pitch_and_loudness_of_every_hit(scenes):
    for scene in scenes:
        heard = checker.listen(scene.wave())
        assert [(h.frame, h.pitch, h.loud) for h in heard] == [
            (h.frame, captions.natural(h.colour), h.loud) for h in scene.hits()
        ]
        assert checker.check(scene.wave(), scene.caption()).passed


def test_the_checker_refuses_the_sounds_of_other_captions(scenes):
    passed = [
        checker.check(other.wave(), scene.caption()).passed
        for scene, other in pairwise(scenes)
        if other.caption() != scene.caption()
    ]
    assert not any(passed) and len(passed) > 40


def test_silence_has_no_onset_and_is_invalid():
    silent = np.zeros(balls.SAMPLES, np.float32)
    assert checker.listen(silent) == []
    verdict = checker.check(silent, Caption())
    assert not verdict.passed and not verdict.valid and "silent" in verdict.detail
    faint = 1e-4 * np.random.default_rng(0).standard_normal(balls.SAMPLES)
    assert checker.listen(faint) == []


@pytest.mark.parametrize("error, known", [(0.02, True), (-0.02, True), (0.06, False)])
def test_a_pitch_counts_within_three_per_cent(error, known):
    n = np.arange(checker.LISTEN)
    for hertz in balls.FREQUENCIES.values():
        part = np.sin(2 * np.pi * hertz * (1 + error) / balls.RATE * n)
        found = checker.frequency(part)
        assert found == pytest.approx(hertz * (1 + error), rel=0.006)
        assert (checker.Heard(0, found, 1.0).pitch is not None) == known


def test_a_sound_of_an_unknown_pitch_is_invalid():
    wave = np.zeros(balls.SAMPLES, np.float32)
    wave[4000:5600] = 0.5 * np.sin(2 * np.pi * 650 / balls.RATE * np.arange(1600))
    verdict = checker.check(wave, Caption((Ball(None),)))
    assert not verdict.valid and "650" in verdict.detail


def test_onsets_and_frames_are_paired_one_to_one_nearest_first():
    heard = [checker.Heard(f, 800.0, 0.4) for f in (3, 4, 9)]
    assert checker.matches(heard, [4, 8, 14]) == [(1, 0), (2, 1)]
    assert checker.matches(heard, [4, 8, 14], within=0) == [(1, 0)]
    assert checker.matches([], [4]) == []


def test_a_caption_is_judged_by_numbers_and_pitches():
    scene = Scene("x", (Path("red", "fast", 3, 9, True),))
    heard = checker.listen(scene.wave())
    for ball, share in (
        (Ball("red", 3, "high"), 1.0),
        (Ball("red"), 1.0),
        (Ball("red", 2, "high"), 0.5),
        (Ball("red", 3, "low"), 0.0),
        (Ball(None, 3), 1.0),
        (Ball(None, 2), 0.0),
    ):
        assert checker.agreement(heard, Caption((ball,))) == share, ball


def test_a_sound_of_a_clip_is_judged_by_its_hits_and_the_stated_pitch(scenes):
    for scene, other in pairwise(scenes):
        assert checker.check_clip(scene.wave(), scene.frames(), Caption()).passed
        if len(other.hits()) != len(scene.hits()):
            assert not checker.check_clip(other.wave(), scene.frames(), Caption()).passed
    assert not checker.check_clip(0 * scene.wave(), scene.frames(), Caption()).valid
    scene = Scene("x", (Path("red", "fast", 3, 9, True),))
    low, plain = scene.wave({"red": "low"}), scene.wave()
    for ball in (Ball("red", None, "low"), Ball(None, None, "low")):
        said = Caption((ball,))
        assert checker.check_clip(low, scene.frames(), said).passed
        assert not checker.check_clip(plain, scene.frames(), said).passed
    late = np.roll(plain, 2 * balls.HOP)
    assert not checker.check_clip(late, scene.frames(), Caption()).passed
