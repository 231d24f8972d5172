"""Figures of hyperfitting, on closed forms, and its quick run."""

from __future__ import annotations

import json
import math

import pytest
import torch

from gen.core.stats import Stats
from gen.modalities.small_language import held_out
from gen.modalities.text import tasks as text_tasks
from gen.pipeline.pipeline import Pipeline
from gen.recipes.text import hyperfit
from gen.recipes.text.data import drawn
from gen.recipes.text.recipe import SHAPE, text_codes


def test_the_share_of_different_answers():
    assert hyperfit.distinct([["a", "a", "b", "c"], ["a", "a", "a", "a"]]) == 0.5
    assert hyperfit.distinct([["a", "b"]]) == 1.0


def test_tokens_per_pass_count_all_items():
    stats = [
        Stats(nfe=n, tokens=t, tokens_computed=0, positions_computed=0, mean_acceptance_length=0)
        for n, t in ((1, 8), (3, 4))
    ]
    assert hyperfit.per_pass(stats) == 3.0  # not the mean of 8 and 4/3


def test_a_uniform_model_has_the_entropy_of_its_allowed_words(monkeypatch):
    net = hyperfit.loaded("text-causal").eval()
    torch.nn.init.zeros_(net.lm_head.weight)
    monkeypatch.setattr(hyperfit, "loaded", lambda name: net)
    pipe = Pipeline("text")
    end = SHAPE.codes - 1
    tokens = torch.tensor([[0, 1, *[end] * 14], [3, *[end] * 15]])
    found = hyperfit.entropy(pipe, ["sort 3 1 2 ="], tokens, 2)
    first, later = math.log(SHAPE.codes - 1), math.log(SHAPE.codes)  # no empty answer
    assert found == pytest.approx((2 * first + 3 * later) / 5, abs=1e-5)


def test_what_is_learned_by_heart_is_not_measured():
    learned = {str(task) for task, _ in drawn(hyperfit.Plan.tasks, hyperfit.SEED)}
    measured = text_tasks.tasks(hyperfit.Plan.held, hyperfit.HELD, held=True)
    assert all(held_out(task) for task in measured)
    assert not learned & {str(task) for task in measured}


def test_codes_are_the_words_of_answers_and_then_the_end():
    data = drawn(5, 3)
    codes, slots = text_codes(data)
    assert codes.shape == slots.shape == (5, 16)
    for row, (_, answer) in zip(codes.tolist(), data, strict=True):
        words = [text_tasks.WORDS[i] for i in row if i < SHAPE.codes - 1]
        assert tuple(words) == answer and row[len(answer) :] == [SHAPE.codes - 1] * (
            16 - len(answer)
        )


@pytest.mark.slow
def test_the_quick_run(tmp_path):
    assert hyperfit.main(["--work", str(tmp_path), "--quick"]) == 0
    found = json.loads((tmp_path / "hyperfit.json").read_text())
    assert found["loss"]["after"] < found["loss"]["before"] < 1
    assert found["before"].keys() == found["after"].keys()
    assert all(0 <= found["after"][k] <= 1 for k in ("accuracy", "distinct", "acceptance"))
