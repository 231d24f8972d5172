"""Sampling parameters that look back or name tokens: their values, and what specs say of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.core.sampling_params import CONTROLS, FILTERS, SAMPLING_FIELDS, SamplingParams

WRONG = {
    "repetition_penalty": (0, -1, float("nan"), float("inf"), "2", None),
    "presence_penalty": (float("inf"), "1", [1]),
    "frequency_penalty": (float("nan"), "1"),
    "no_repeat_ngram_size": (-1, 1.5, True),
    "bad_words": (5.5, {"a": 1}, [""], [[]], [[-1]], [[1.0]], [3.0], b"x"),
    "logit_bias": ([1], {"": 1}, {1.5: 1}, {-1: 1}, {1: "x"}, {1: float("nan")}, {1: float("inf")}),
    "min_new_tokens": (-1, 2.0, True),
    "max_new_tokens": (0, 2.0, True, "9"),
    "max_length": (0, 2.0, True, "9"),
    "stop": ("", [""], [3], {"a": 1}, 5.0, b"x"),
    "stop_token_ids": ([-1], ["x"], 1.5, [True]),
    "logits_processor": ([1], "f", {"f": 1}, 3.0),
    "structured": ("x", [1], {1: "x"}),
    "logprobs": (-1, 1.5, True),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_bad_values_are_refused_by_name(name):
    for value in WRONG[name]:
        with pytest.raises(GenError, match=rf"^sampling\.{name}"):
            SamplingParams(**{name: value})


def test_defaults_of_controls_stay_out_of_specs():
    assert tuple(SamplingParams().to_dict()) == FILTERS
    assert set(FILTERS) | set(CONTROLS) == set(SAMPLING_FIELDS)
    off = SamplingParams(
        stop=[], bad_words=(), logit_bias={}, presence_penalty=0, stop_token_ids=[]
    )
    assert off == SamplingParams() and off.to_dict() == SamplingParams().to_dict()


def test_values_are_plain_and_survive_json():
    given = SamplingParams(
        repetition_penalty=np.float64(1.5),
        no_repeat_ngram_size=np.int64(3),
        bad_words=["a", [1, np.int64(2)]],
        logit_bias={"12": 1, 3: -0.5, " the": 2},
        stop="END",
        stop_token_ids=7,
        max_new_tokens=5,
        max_length=9,
        structured={"regex": "[0-9]+"},
    )
    assert given.bad_words == ("a", (1, 2)) and given.stop == ("END",)
    assert given.logit_bias == {12: 1, 3: -0.5, " the": 2} and given.stop_token_ids == (7,)
    again = SamplingParams(**json.loads(json.dumps(given.to_dict())))
    assert again == given and again.to_dict() == given.to_dict()
    assert resolve_sampler("autoregressive", given)[1] == given


def test_a_token_has_one_bias():
    with pytest.raises(GenError, match="names token 3 twice"):
        SamplingParams(logit_bias={3: 1, "3": 2})


def test_parameters_that_look_back_are_told_from_those_that_do_not():
    alone = SamplingParams(logit_bias={1: 2}, bad_words=[[4]], stop="x", min_new_tokens=2)
    assert not alone.looks_back and alone.without_past() is alone
    several = SamplingParams(bad_words=[[4], [1, 2]], presence_penalty=1, logit_bias={1: 2})
    assert several.looks_back == ("presence_penalty", "bad_words")
    assert several.without_past() == SamplingParams(bad_words=[[4]], logit_bias={1: 2})
