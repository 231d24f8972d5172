"""Searches on published models, whose prompts no checker knows."""

from __future__ import annotations

import byte_folders
import pytest

import gen
from gen.core.errors import GenError


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    return gen.load("text", model=byte_folders.causal(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("name, scorer", [("best_of", "checker"), ("smc", "process")])
def test_scorers_that_ask_the_checker_are_refused_with_the_reason(pipe, name, scorer):
    spec = {"name": name, "scorer": scorer}
    with pytest.raises(GenError, match="no checker can grade .* another scorer, such as log_l"):
        pipe(["some words"], sampler=spec, max_new_tokens=4, seed=0)


def test_other_scorers_score_them(pipe):
    spec = {"name": "best_of", "n": 2, "scorer": "log_likelihood"}
    pipe(["some words"], sampler=spec, max_new_tokens=4, seed=0)
    seen = []
    spec = {"name": "best_of", "n": 2, "scorer": lambda text, prompt: seen.append(prompt) or 1.0}
    pipe(["some words"], sampler=spec, max_new_tokens=4, seed=0)
    assert set(seen) == {"some words"}
