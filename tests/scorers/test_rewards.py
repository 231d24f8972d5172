"""Rewards of attributes: what they read from media that are known, in their units."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gen.contracts.scorer import Sample, checked_scores, read_scorer
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.modalities.action import tasks as tabletop_tasks
from gen.modalities.action import world as tabletop
from gen.modalities.action.modality import ActionChunk, Situation
from gen.modalities.image import captions as shapes
from gen.modalities.motion import captions as moves
from gen.modalities.motion import synth as moves_draw
from gen.modalities.speech import synth as spoken
from gen.modalities.video import captions as moving


def sample(modality: str, media: Any, prompt: str = "", known: Any = None) -> Sample:
    made = registry.get("modality", modality)()
    return Sample(media, torch.zeros(2, dtype=torch.long), prompt, None, made, 0, known)


def score(scorer: Any, modality: str, media: Any, prompt: str = "", known: Any = None) -> float:
    return float(checked_scores(read_scorer(scorer), [sample(modality, media, prompt, known)])[0])


def test_red_area_is_the_share_of_red_pixels_whatever_the_size_of_the_image():
    image = np.full((40, 100, 3), 70, np.uint8)
    image[:, :25] = shapes.PALETTE["red"]
    image[:10, 50:] = shapes.PALETTE["blue"]
    assert score("red_area", "image", Image.fromarray(image)) == 0.25
    assert score({"name": "red_area", "colour": "blue"}, "image", Image.fromarray(image)) == 0.125


def test_red_area_is_the_area_of_the_drawn_shape_to_a_tenth():
    rng = np.random.default_rng(0)
    for caption in shapes.captions(12, 3, held=True):
        drawn = Image.fromarray(shapes.draw(caption, rng))
        colours = {item.colour for item in caption.items}
        for colour in shapes.COLOURS:
            area = score({"name": "red_area", "colour": colour}, "image", drawn)
            assert (area > 0.02) == (colour in colours), (str(caption), colour, area)


def test_digit_sum_and_pitch_are_those_of_what_is_said():
    rng = np.random.default_rng(1)
    wave = spoken.speak(spoken.parse("nine stop three, high voice"), rng)
    assert score("digit_sum", "speech", wave) == 12
    assert score("pitch", "speech", wave) == pytest.approx(225, abs=25)
    assert score("digit_sum", "speech", np.zeros(640, np.float32)) == 0
    assert score("pitch", "speech", np.zeros(640, np.float32)) == 0


def test_foot_skate_grows_with_a_drift_that_is_laid_over_a_motion():
    rng = np.random.default_rng(2)
    joints = moves_draw.draw(moves.captions(1, 3, held=True)[0], rng).joints
    rewards = []
    for drift in (0.0, 0.01, 0.02):
        moved = joints.copy()
        moved[..., 0] += drift * np.arange(len(joints))[:, None]
        rewards.append(score("foot_skate", "motion", moved))
    assert 0 >= rewards[0] > rewards[1] > rewards[2]


def test_goal_distance_is_the_distance_that_is_left_at_the_end():
    states = tabletop_tasks.states("reach", 5, 3, held=True)
    for state, chunk in zip(states, tabletop.demonstrate(states), strict=True):
        situation = Situation(tabletop_tasks.described(state), state)
        start = np.linalg.norm(state[tabletop.GRIPPER] - state[tabletop.GOAL])
        still = score("goal_distance", "action", ActionChunk(0 * chunk, situation))
        assert still == pytest.approx(-start, abs=1e-6)
        assert score("goal_distance", "action", ActionChunk(chunk, situation)) > -0.05
        assert score("goal_distance", "action", ActionChunk(chunk + np.nan, situation)) == -2


def test_texts_are_scored_by_their_digits_and_their_open_brackets():
    assert score("digit_count", "text", "11 + 5 = 16") == 5
    assert score("bracket_depth", "text", "} )", "close ( [ ] { =") == 0
    assert score("bracket_depth", "text", ")", "close ( [ ] { =") == -3
    assert score("bracket_depth", "text", "", "close ( [ ] { =") == -2


def test_travel_is_larger_of_a_fast_shape_than_of_a_slow_one():
    rng = np.random.default_rng(3)
    ways = []
    for speed in moving.SPEEDS:
        caption = moving.parse(f"a large red circle moves right {speed}")
        ways.append(score("travel", "video", moving.draw(caption, rng)))
    paces = [15 * moving.PACES[speed] for speed in moving.SPEEDS]
    assert ways == pytest.approx(paces, rel=0.15)
    assert score("travel", "video", np.full((16, 32, 32, 3), 80, np.uint8)) == 0


def test_process_grades_beginnings_as_beginnings_and_outputs_as_outputs():
    half = torch.tensor([True, False])
    assert score("process", "text", "1 2", "sort 3 1 2 =", half) == 1.0
    assert score("process", "text", "1 2", "sort 3 1 2 =", torch.tensor([True, True])) == 2 / 3
    assert score("process", "text", "1 2", "sort 3 1 2 =") == pytest.approx(2 / 3)
    caption = shapes.parse("a large red circle in the centre")
    image = Image.fromarray(shapes.draw(caption, np.random.default_rng(0)))
    assert score("process", "image", image, "a red circle", half) == 1.0
    assert 0 < score("process", "image", image, "a blue circle", half) < 1


def test_every_scorer_says_what_it_measures_and_is_known_by_its_name():
    for name, cls in registry.table("scorer").items():
        assert cls.about, name
        if name == "value_head":  # a head belongs to a model, so there is no usual one
            with pytest.raises(GenError, match=r"value_head\.path is ''"):
                read_scorer(name)
        else:
            assert read_scorer(name).name == name
        known = registry.table("modality")
        assert set(cls.modalities) <= set(known), name


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("red_aera", ["unknown scorer 'red_aera'", "Did you mean 'red_area'?"]),
        ({"name": "red_area", "color": "red"}, ["color", "Did you mean 'colour'?"]),
        ({"name": "red_area", "colour": "rde"}, ["red_area.colour is 'rde'", "red", "scorer"]),
        ({"name": "foot_skate", "height": -1}, ["foot_skate.height", "-1"]),
        ({"colour": "red"}, ["has no name"]),
        (7, ["sampler.scorer", "7"]),
        ("no_such_module:f", ["sampler.scorer is 'no_such_module:f'", "cannot be imported"]),
        ("math:pi", ["'math:pi'", "float", "function"]),
    ],
)
def test_a_bad_scorer_is_one_error_that_says_what_came_and_what_was_expected(spec, words):
    with pytest.raises(GenError) as error:
        read_scorer(spec)
    assert all(word in str(error.value) for word in words), error.value


def test_a_scorer_by_its_import_path_is_the_function_of_that_file(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def short(media, prompt):\n    return -len(media)\n")
    spec = f"{tmp_path / 'mine.py'}:short"
    assert read_scorer(spec).name == spec
    assert score(spec, "text", "1 2 3") == -5
    monkeypatch.syspath_prepend(tmp_path)
    assert score("mine:short", "text", "1 2 3") == -5
    assert score("math:hypot", "text", 3.0, 4.0) == 5.0


RETURNS = {
    "nan": (lambda m, p: float("nan"), "returned nan for"),
    "infinite": (lambda m, p: float("inf"), "returned inf for"),
    "a text": (lambda m, p: "good", "for 1 outputs; expected one number per output"),
    "none": (lambda m, p: None, "returned nan"),
    "two numbers": (lambda m, p: (1.0, 2.0), "for 1 outputs; expected one number per output"),
    "raises": (lambda m, p: 1 / 0, "failed on 'sort 2 1 =': ZeroDivisionError"),
}


@pytest.mark.parametrize("name", RETURNS)
def test_a_reward_that_is_no_finite_number_is_one_error_that_names_the_reward(name):
    function, words = RETURNS[name]
    with pytest.raises(GenError) as error:
        score(function, "text", "1 2", "sort 2 1 =")
    assert words in str(error.value) and "lambda" in str(error.value)


def test_a_scorer_of_another_modality_is_refused_by_name():
    with pytest.raises(GenError, match=r"'red_area' judges outputs of image; got modality 'text'"):
        score("red_area", "text", "1 2")


def test_a_scorer_that_takes_no_partial_outputs_is_not_asked_about_them():
    from gen.modalities.text.scorers import DigitCount

    class Late(DigitCount):
        takes_partial = False

    assert score(Late(), "text", "1 2") == 2
    with pytest.raises(GenError, match=r"finished outputs alone.*sampler\.value"):
        score(Late(), "text", "1 2", known=torch.tensor([True, False]))


def test_control_a_number_per_output_of_any_kind_is_taken():
    assert score(lambda m, p: np.float32(2), "text", "1") == 2
    assert score(lambda m, p: True, "text", "1") == 1
    assert score(lambda m, p: torch.tensor(3.0), "text", "1") == 3
