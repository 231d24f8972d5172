"""Grammars through llguidance: what may come next, going back, ends, errors with their position."""

from __future__ import annotations

import json
import random
import sys

import jsonschema
import numpy as np
import pytest
import torch

from gen.constraints.build import build
from gen.constraints.kind import Context
from gen.constraints.kinds.grammar import Grammar
from gen.constraints.kinds.json_schema import JsonSchema
from gen.contracts.vocabulary import Vocabulary
from gen.core.errors import GenError
from gen.core.token_space import TokenSpace

BYTES = [bytes([b]) for b in range(256)]
LATER = (*BYTES, b'{"', b'":', b" a", b"[[", b"]]", None)
FIRST = (*BYTES[:32], b"", *BYTES[33:], b'{"', b'":', b"a", b"[[", b"]]", None)  # no first space
END = len(LATER) - 1
BRACKETS = 'start: "[" (start | /[0-9]/)* "]"'


def context(first=LATER, positions=64) -> Context:
    legal = np.ones((positions, len(LATER)), bool)
    return Context(Vocabulary(tuple(first), LATER), len(LATER), (END,), positions, legal)


def offered(state) -> list[int]:
    mask = state.allowed_bitmask(64)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(LATER)]
    return np.flatnonzero(bits).tolist()


def offered_after(constraint, ids) -> list[int]:
    state = constraint.start()
    assert all(state.advance(i) for i in ids)
    return offered(state)


def test_tokens_that_may_come_follow_the_brackets():
    constraint = Grammar(BRACKETS).language(context())
    digits = [*range(ord("0"), ord("9") + 1)]
    assert offered_after(constraint, []) == [ord("["), LATER.index(b"[[")]
    inside = sorted([*digits, ord("["), ord("]"), LATER.index(b"[[")])
    assert offered_after(constraint, [ord("[")]) == inside
    assert offered_after(constraint, [LATER.index(b"[[")]) == sorted([*inside, LATER.index(b"]]")])
    assert offered_after(constraint, b"[1]") == [END]
    assert offered_after(constraint, [*b"[1]", END]) == [END]


def test_going_back_gives_the_state_of_the_text_that_is_left():
    constraint, rng = Grammar(BRACKETS).language(context()), random.Random(0)
    state, ids = constraint.start(), []
    for _ in range(200):
        assert offered(state) == offered_after(constraint, ids)
        if ids and rng.random() < 0.4:
            count = rng.randint(1, len(ids))
            state.rollback(count)
            del ids[len(ids) - count :]
        else:
            token = rng.choice(offered(state))
            assert state.advance(token)
            ids.append(token)
    with pytest.raises(GenError, match=f"expected 0 to {len(ids)}"):
        state.rollback(len(ids) + 1)


def test_a_state_that_does_not_go_back_offers_other_tokens():
    """Control: the comparison above sees a rollback that is left out."""
    constraint = Grammar(BRACKETS).language(context())
    state = constraint.start()
    assert state.advance(ord("["))
    assert offered(state) != offered_after(constraint, [])


def test_wrong_tokens_change_nothing():
    state = Grammar(BRACKETS).language(context()).start()
    assert not state.advance(ord("]")) and not state.advance(END)
    assert state.advance(ord("[")) and not state.advance(END) and state.advance(ord("]"))
    assert state.advance(END) and not state.advance(ord("["))


def test_first_tokens_have_their_own_bytes():
    constraint = Grammar('start: "a" | " a"').language(context(FIRST))
    assert offered_after(constraint, []) == [32, ord("a"), LATER.index(b" a")]
    assert offered_after(constraint, [LATER.index(b" a")]) == [END]  # it wrote "a"
    assert LATER.index(b" a") in offered_after(constraint, [32])  # it wrote nothing


def test_schemas_of_llguidance_make_valid_texts():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "patternProperties": {"^z": {"type": "null"}},
        "additionalProperties": False,
    }
    constraint, rng = JsonSchema(schema, engine="llguidance").language(context()), random.Random(1)
    for _ in range(10):
        state, ids = constraint.start(), []
        while (token := rng.choice(offered(state))) != END and len(ids) < 400:
            assert state.advance(token)
            ids.append(token)
        if token == END:
            text = b"".join(LATER[i] for i in ids)
            jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    "text, syntax, message",
    [
        ("start: a\n  foo bar", "lark", "does not parse at line 2, column 7: Expected token ':'"),
        ('start: "a" b', "lark", 'does not parse at line 1, column 8: unknown name: "b"'),
        ('root ::= "a"\nb ::= (', "gbnf", "does not parse at line 2, column 8: "),
        ('x ::= "a"', "gbnf", "No 'root' rule found"),
        ('root ::= "a"', "lark", "has ::=, as GBNF does; expected syntax: gbnf"),
        ('start: "a"', "ebnf", "structured.syntax is 'ebnf'; expected lark or gbnf"),
        (7, "lark", "structured.grammar is 7"),
    ],
)  # fmt: skip
def test_grammars_that_do_not_parse_say_where(text, syntax, message):
    with pytest.raises(GenError) as raised:
        Grammar(text, syntax).language(context())
    assert message in str(raised.value)


def test_gbnf_is_read():
    constraint = Grammar('root ::= "x" [0-9]? | "y"', "gbnf").language(context())
    assert offered_after(constraint, []) == [ord("x"), ord("y")]
    assert offered_after(constraint, b"x") == [*range(ord("0"), ord("9") + 1), END]


def test_models_that_always_fill_their_positions_are_refused():
    endless = Context(Vocabulary(LATER, LATER), len(LATER), (), 8, np.ones((8, len(LATER)), bool))
    with pytest.raises(GenError, match="needs an eos token"):
        Grammar(BRACKETS).language(endless)


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GenError, match=r'pip install "gen-toolkit\[structured\]"'):
        Grammar(BRACKETS).language(context())


def test_requests_name_the_kinds():
    legal = torch.ones(16, len(LATER), dtype=torch.bool)
    space = TokenSpace((16,), len(LATER), legal, eos_token_id=END)
    vocabulary = Vocabulary(LATER, LATER)
    schema = {"enum": ["ab", 12]}
    constraint = build({"json_schema": schema}, vocabulary, space)
    assert constraint.automaton() is not None
    assert offered_after(constraint, []) == [ord('"'), ord("1")]
    same = build({"json_schema": schema, "engine": "llguidance"}, vocabulary, space)
    assert same.automaton() is None
    assert offered_after(same, []) == [ord('"'), ord("1")]
    with pytest.raises(GenError, match=r"structured\.json_schema: the schema has contains at"):
        build({"json_schema": {"contains": {}}}, vocabulary, space)
    with pytest.raises(GenError, match=r"structured\.engine is 'xgrammar'"):
        build({"json_schema": schema, "engine": "xgrammar"}, vocabulary, space)
