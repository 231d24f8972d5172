"""Answers of 2,048 words: what a program makes follows its map, what it checks, and the recipe of
drafters for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gen.core.errors import GenError
from gen.recipes.drafters.table import HEAD
from gen.recipes.text import long_answers
from gen.recipes.text.tours import (
    MOVES,
    POSITIONS,
    SLOTS,
    WORDS,
    Tour,
    TourModality,
    maps,
    tours,
)


def text_of(ids: np.ndarray) -> str:
    return " ".join(WORDS[n] for n in ids)


def one() -> tuple[Tour, np.ndarray]:
    leads = maps(1, 4)
    ids = tours(leads, MOVES, np.random.default_rng(0))[0]
    return Tour(tuple(map(tuple, leads[0].tolist()))), ids


def test_a_tour_follows_its_map_and_has_2048_words():
    tour, ids = one()
    assert len(ids) == POSITIONS == 2048
    verdict = TourModality().check(text_of(ids), str(tour))
    assert verdict.passed and verdict.valid
    assert Tour.parse(str(tour)) == tour


@pytest.mark.parametrize("column", [0, 1, 2, 3])
def test_control_a_tour_with_another_word_is_wrong(column):
    tour, ids = one()
    ids[40 * 4 + column] = {0: 1, 1: 0, 2: 1, 3: 0}[column] + (ids[40 * 4 + column] == 1)
    modality = TourModality()
    assert not modality.check(text_of(ids), str(tour)).passed
    assert modality.grade(text_of(ids), str(tour)) >= 1 - 3 / MOVES


def test_control_a_tour_of_another_map_or_length_is_wrong():
    tour, ids = one()
    other = Tour(tuple(map(tuple, maps(1, 6)[0].tolist())))
    assert TourModality().grade(text_of(ids), str(other)) < 0.5
    assert not TourModality().check(text_of(ids[:-4]), str(tour)).passed


@pytest.mark.parametrize("prompt", ["", "tour", "walk bcd", "tour " + "bcz " * 8])
def test_what_is_no_map_is_refused(prompt):
    with pytest.raises(GenError, match="expected 'tour"):
        TourModality().condition(prompt)


def test_labels_are_the_words_that_follow():
    made = long_answers.piece(maps(2, 1), 6, 3, np.random.default_rng(1))
    assert made.ids.shape[1] == SLOTS + 24
    assert made.positions[0, SLOTS] == SLOTS + 12

    def net(input_ids, position_ids, use_cache):
        rest = made.ids[:, 1:]
        return type("Out", (), {"logits": 50 * torch.eye(long_answers.SHAPE.mask)[rest]})()

    assert float(long_answers.loss(net, made)[0]) < 1e-6


@pytest.mark.slow
def test_the_recipe_compares_drafters(tmp_path):
    lines: list[str] = []
    long_answers.train_model(tmp_path, long_answers.QUICK, lambda line: None)
    long_answers.table(tmp_path, long_answers.QUICK, lines.append)
    named = [line.split("`")[1] for line in lines if line.startswith("| `")]
    assert named[0] == "autoregressive" and {"prompt_lookup", "suffix", "longspec"} <= set(named)
    assert all(line.count("|") == HEAD.count("|") for line in lines[-len(named) :])
    same = {line.split("`")[1]: line.split("|")[-2].strip() for line in lines[-len(named) :]}
    assert same["speculative_jacobi"] == same["autoregressive"] != ""
