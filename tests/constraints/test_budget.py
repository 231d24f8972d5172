"""Budgets end the construction of a rule at every stage, and say what was exceeded."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch

from gen.constraints.budget import Budget, BudgetExceeded, Limits, Unsupported
from gen.constraints.build import build, built, context_of
from gen.constraints.byte_dfa import any_of, difference, intersect, literal, network, one_of
from gen.constraints.canvas import CanvasTable
from gen.constraints.characters import characters
from gen.constraints.json_schema import schema_dfa
from gen.constraints.kinds.graph import Graph
from gen.constraints.lengths import PositionedConstraint
from gen.constraints.regex import regex
from gen.constraints.tokens import over_tokens, trimmed
from gen.contracts.constraint import AutomatonConstraint
from gen.contracts.vocabulary import Vocabulary
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.token_space import TokenSpace

BYTES = (*(bytes([b]) for b in range(256)), None)
TEXT = Vocabulary(BYTES, BYTES)
END = 256
HOSTILE = "^((a{0,100}){0,100}){0,100}$"


def space(length: int = 24, eos: int | None = END) -> TokenSpace:
    legal = torch.ones(length, len(BYTES), dtype=torch.bool)
    return TokenSpace((length,), len(BYTES), legal, eos_token_id=eos)


def causal(left_to_right: bool = True):
    return context_of(TEXT, space(), left_to_right)


def letters(count: int) -> list[list[str]]:
    return [[chr(97 + i), "r", chr(97 + (i * 5 + 1) % count)] for i in range(count)]


AB = one_of(b"ab")
LETTERS = regex("[a-z]{1,3}( [a-z]{1,3})*")
ALL = np.ones((24, len(BYTES)), bool)
STAGES = {
    "parsing a regex": lambda: regex("a|b|c"),
    "characters": lambda: characters([(0x4E00 + random.randrange(4000), 0x9FFF)]),
    "texts": lambda: any_of([b"ab", b"cd"]),
    "subsets of states": lambda: AB.repeat(0, 40),
    "alternatives": lambda: network([(0, AB, 1), (1, AB, 2)], [2]),
    "products": lambda: intersect(AB.repeat(3, 3), AB.repeat(1, None)),
    "differences": lambda: difference(AB.star(), literal(b"a")),
    "minimizing": lambda: LETTERS.minimize(),
    "schemas": lambda: schema_dfa({"allOf": [{"type": "string"}, {"maxLength": 3}]}),
    "enums": lambda: schema_dfa({"enum": ["a", "b", 3]}),
    "objects": lambda: schema_dfa({"properties": {"a": {"type": "integer"}}}),
    "references": lambda: schema_dfa({"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}),
    "paths of a graph": lambda: Graph(letters(6)).language(causal()),
    "tokens": lambda: over_tokens(LETTERS, BYTES),
    "useless states": lambda: trimmed(over_tokens(LETTERS, BYTES)),
    "positions": lambda: PositionedConstraint(over_tokens(LETTERS, BYTES), ALL),
}


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_ends_when_the_time_is_over(stage):
    with Budget(Limits(), "rule"):  # control
        STAGES[stage]()
    late = Budget(Limits(), "rule")
    late.until = time.monotonic() - 1
    with late, pytest.raises(BudgetExceeded) as caught:
        STAGES[stage]()
    assert caught.value.limit == "seconds"


def test_time_is_looked_at_inside_of_a_stage():
    """Of a product of two automata, of 9,000 texts, and of tokens: some way through."""
    many = [b"%06d" % (7919 * n % 1_000_003) for n in range(9_000)]
    first, second = AB.repeat(97, 97).star(), AB.repeat(89, 89).star()
    for make in (lambda: intersect(first, second), lambda: any_of(many)):
        asked = []
        with Budget(Limits(seconds=60), "rule") as budget:
            budget.check = lambda: asked.append(1)
            make()
        assert len(asked) > 100
        half = len(asked) // 2

        def halfway():
            asked.pop()
            if len(asked) < half:
                raise budget.exceeded("seconds")

        with Budget(Limits(seconds=60), "rule") as budget:
            budget.check = halfway
            with pytest.raises(BudgetExceeded):
                make()


def test_time_bounds_what_goes_on_without_it():
    began = time.monotonic()
    with pytest.raises(BudgetExceeded, match=r"more than 0.1 seconds.*\"budget\".*above 0.1"):
        build({"regex": HOSTILE, "budget": {"seconds": 0.1}}, TEXT, space())
    assert time.monotonic() - began < 2
    # control: with more time the same rule is still being built long after that
    ended = Unsupported("ended by the test")
    with pytest.raises(Unsupported, match="ended by the test"):
        stop = time.monotonic() + 0.5
        built(
            {"regex": HOSTILE, "budget": {"seconds": 60}},
            causal(),
            interrupted=lambda: ended if time.monotonic() > stop else None,
        )


@pytest.mark.parametrize(
    "rule",
    [
        {"regex": "(a|b)*a(a|b){9}"},
        {"json_schema": {"enum": [f"{n * 7919 % 10_007:05d}" for n in range(900)]}},
        {"choice": [f"{n * 7919 % 10_007:05d}" for n in range(900)]},
        {"trie": [[n % 7, n % 11, n % 13] for n in range(900)], "form": "transitions"},
    ],
)
def test_states_and_memory_are_bounded(rule):
    found = build(rule, TEXT, space())  # control
    assert isinstance(found, AutomatonConstraint)
    for limits, words in (({"states": 40}, "40 states"), ({"megabytes": 0.01}, "0.01 MB of mem")):
        with pytest.raises(BudgetExceeded, match=f"takes more than {words}.*N above"):
            build({**rule, "budget": limits}, TEXT, space())


def test_memory_of_positions_and_canvases_is_bounded(monkeypatch):
    automaton = over_tokens(LETTERS, BYTES)
    with Budget(Limits(megabytes=0.0001)), pytest.raises(BudgetExceeded):
        PositionedConstraint(automaton, ALL)
    CanvasTable(automaton, ALL)  # control
    for name in ("MOST_STEPS", "MOST_CELLS"):
        with monkeypatch.context() as patch, pytest.raises(BudgetExceeded, match="masked model"):
            patch.setattr(f"gen.constraints.canvas.{name}", 3)
            CanvasTable(automaton, ALL)


def test_a_rule_may_state_its_limits_up_to_those_of_a_server():
    rule = {"regex": "(a|b)*a(a|b){9}"}
    most = Limits(states=500)
    with pytest.raises(BudgetExceeded, match="which --constraint-states of gen serve raises"):
        built(rule, causal(), most)
    assert built({**rule, "budget": {"seconds": 9}}, causal())  # control: none but its own
    for budget, words in (
        ({"states": 501}, "at most 500 here"),
        ({"state": 5}, "Did you mean 'states'"),
        ({"seconds": 0}, "structured.budget.seconds is 0; expected a number above 0"),
        ({"seconds": float("nan")}, "structured.budget.seconds is nan"),
        ({"states": "many"}, "structured.budget.states is 'many'"),
        (5, "structured.budget is 5, a int; expected a mapping"),
    ):
        with pytest.raises(GenError, match=words):
            built({**rule, "budget": budget}, causal(), most)


def test_auto_takes_the_other_engine_where_an_automaton_is_too_large_or_not_supported():
    small = {"type": "string", "maxLength": 3}
    large = {"type": "string", "pattern": "^(a|b)*a(a|b){9}$"}
    unsupported = {"type": "object", "patternProperties": {"^a": {"type": "null"}}}
    tight = {"states": 300}
    for schema, name in ((small, "AutomatonConstraint"), (large, "_G"), (unsupported, "_G")):
        rule = {"json_schema": schema, "engine": "auto", "budget": tight}
        assert type(build(rule, TEXT, space())).__name__.startswith(name)
    with pytest.raises(BudgetExceeded, match="300 states"):
        build({"json_schema": large, "budget": tight}, TEXT, space())
    with pytest.raises(BudgetExceeded, match="300 states"):  # canvases need an automaton
        rule = {"json_schema": large, "engine": "auto", "budget": tight}
        build(rule, TEXT, space(), left_to_right=False)
    with pytest.raises(Unsupported, match="patternProperties"):
        build({"json_schema": unsupported, "engine": "automaton"}, TEXT, space())
    neither = {"oneOf": [large, {"maxLength": 30}, unsupported]}
    with pytest.raises(GenError, match="the other engine does not take it either: .*oneOf"):
        build({"json_schema": neither, "engine": "auto"}, TEXT, space())


@pytest.mark.parametrize(
    "schema, words",
    [
        ({"maximum": float("inf")}, "#/maximum is inf; expected a number"),
        ({"exclusiveMinimum": "a"}, "#/exclusiveMinimum is 'a'; expected a number"),
        ({"format": []}, "#/format is .*; expected the name of a format"),
        ({"$ref": ["a"]}, "the schema has .ref .*at #"),
        ({"enum": [float("inf")]}, "a number that is out of range"),
        ({"maxLength": float("nan")}, "#/maxLength is nan"),
    ],
)
def test_values_that_no_schema_has_are_named(schema, words):
    with pytest.raises(GenError, match=words):
        build({"json_schema": schema}, TEXT, space())


def test_a_rule_that_is_nested_too_deeply_is_refused():
    pattern = "(" * 900 + "a" + ")" * 900
    with pytest.raises(GenError, match="too deeply|cannot be parsed"):
        build({"regex": pattern}, TEXT, space())
    assert build({"regex": "((((a))))"}, TEXT, space())  # control
    assert "budget" not in registry.table("constraint")  # the key beside all of them
