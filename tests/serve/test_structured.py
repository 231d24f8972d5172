"""Structured output over HTTP: which engine answers, and what is said of a rule too large."""

from __future__ import annotations

import json
import re

import openai
import pytest
from served import serving

from gen.constraints.budget import Limits

LARGE = {"type": "integer", "minimum": 3, "maximum": 9}
TWICE = {"oneOf": [LARGE, {"type": "integer", "minimum": 7}]}  # llguidance has no oneOf
MESSAGES = [{"role": "user", "content": "sort 3 1 2 ="}]

pytestmark = pytest.mark.slow  # a process builds the constraints


@pytest.fixture(scope="module")
def served():
    with serving(limits=Limits(states=5)) as made:
        yield made


def ask(served, schema, **more):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return served.client().chat.completions.create(
        model="text", messages=MESSAGES, response_format=form, **more
    )


def test_a_response_format_takes_the_engine_that_builds_it(served):
    text = ask(served, LARGE).choices[0].message.content
    assert re.fullmatch("[0-9]+", text) and 3 <= int(text) <= 9, text
    rule = {"structured": {"json_schema": LARGE}}
    with pytest.raises(openai.BadRequestError) as refused:  # control: the automaton is too large
        served.client().completions.create(model="text", prompt="sort 3 1 2 =", extra_body=rule)
    assert refused.value.param == "structured" and refused.value.code == "constraint_too_large"
    assert "5 states" in refused.value.message
    assert "--constraint-states of gen serve" in refused.value.message


def test_an_error_is_about_the_field_that_holds_the_rule(served):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(served, TWICE)
    assert refused.value.param == "response_format", refused.value.message
    assert "5 states" in refused.value.message and "oneOf" in refused.value.message


@pytest.mark.parametrize("rule", [{"regex": "Q"}, {"regex": "a("}, {"grammar": 'start: "a'}, {}])
def test_what_is_wrong_with_a_rule_is_about_the_rule(served, rule):
    body = {"model": "text", "prompt": "sort 3 1 2 =", "structured": rule}
    status, answer, _ = served.ask("/v1/completions", body)
    assert status == 400 and answer["error"]["param"] == "structured", answer


def test_a_request_may_lower_the_limits_and_not_raise_them(served):
    for budget, words in (({"states": 6}, "at most 5 here"), ({"states": 1}, "1 states")):
        body = {
            "model": "text",
            "prompt": "sort 3 1 2 =",
            "structured": {"regex": "[3-9]", "budget": budget},
        }
        status, answer, _ = served.ask("/v1/completions", body)
        assert status == 400 and words in json.dumps(answer)
    body["structured"]["budget"] = {"states": 5, "seconds": 1.5}
    assert served.ask("/v1/completions", body)[0] == 200  # control
