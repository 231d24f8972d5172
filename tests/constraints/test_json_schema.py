"""JSON schemas as automata: every accepted text is JSON and validates."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import jsonschema
import pytest
from byte_words import near, random_text

from gen.constraints.json_scalars import FORMATS
from gen.constraints.json_schema import schema_dfa
from gen.core.errors import GenError

SCHEMAS = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parent / "schemas").glob("*.json"))
}
SUPPORTED = [name for name in SCHEMAS if not name.startswith("unsupported")]
UNSUPPORTED = [name for name in SCHEMAS if name.startswith("unsupported")]
FAST = ["chess_move", "drink", "feature_flag", "linked_list", "payment_card", "unicode_text"]
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
INTEGER = {"type": "integer"}
POINT = {
    "type": "object",
    "properties": {"x": INTEGER, "y": INTEGER},
    "required": ["x"],
    "additionalProperties": False,
}


def is_valid(text: bytes, schema) -> bool:
    """True for JSON that satisfies a schema, formats included. Lone surrogates are no text."""
    try:
        value = json.loads(text.decode(), parse_constant=lambda name: pytest.fail(name))
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return jsonschema.Draft202012Validator(schema, format_checker=CHECKER).is_valid(value)


def require_valid(schema, samples: int, dfa=None) -> int:
    """Sample texts and neighbours of them; return how many neighbours both refuse."""
    dfa, rng, refused = dfa or schema_dfa(schema), random.Random(0), 0
    for _ in range(samples):
        text = random_text(dfa, rng)
        assert dfa.accepts(text)
        assert is_valid(text, schema), text
        other = near(text, rng)
        if not is_valid(other, schema):
            refused += 1
            assert not dfa.accepts(other), other
    return refused


def texts(schema, *candidates: str, **options) -> list[bool]:
    dfa = schema_dfa(schema, **options)
    return [dfa.accepts(c.encode()) for c in candidates]


@pytest.mark.parametrize("name", FAST)
def test_accepted_texts_validate(name):
    assert require_valid(SCHEMAS[name], 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUPPORTED)
def test_accepted_texts_of_all_schemas_validate(name):
    refused = require_valid(SCHEMAS[name], 60)
    assert refused or name == "scalar_any"


def test_an_automaton_of_another_schema_has_texts_that_do_not_validate():
    """Control: the check finds an automaton that is too large."""
    loose = {**POINT, "properties": {**POINT["properties"], "x": {"type": "number"}}}
    with pytest.raises(AssertionError):
        require_valid(POINT, 40, schema_dfa(loose))


def test_there_are_a_hundred_schemas():
    assert len(SCHEMAS) == 100 and len(UNSUPPORTED) == 5


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_keywords_are_refused_with_their_pointer(name):
    keyword = SCHEMAS[name]["$comment"].removeprefix("refused: ")
    with pytest.raises(GenError, match=rf"has {keyword}.* at #[\w/]*/{keyword}, which"):
        schema_dfa(SCHEMAS[name])


def test_properties_come_in_order_with_at_most_one_space():
    assert texts(
        POINT, '{"x":1}', '{"x": 1,"y":-2}', '{"x": 1, "y": 2}', '{"y":1}', '{"y":1,"x":2}',
        '{ "x":1}', '{"x":  1}', '{"x":1,}', '{"x":1,"z":2}', '{"x":01}', '{"x":1.0}', '{"x":+1}',
    ) == [True] * 3 + [False] * 9  # fmt: skip


def test_properties_that_are_not_declared_need_a_schema():
    open_ = {"type": "object", "properties": {"x": INTEGER}}
    assert texts(open_, "{}", '{"x":1}', '{"z":1}') == [True, True, False]
    typed = {**open_, "additionalProperties": {"type": "null"}}
    assert texts(typed, '{"x":1,"z":null}', '{"x":null}', '{"z":1}') == [True, False, False]


def test_counts_of_properties_are_bounded():
    schema = {
        "properties": {"a": INTEGER, "b": INTEGER, "c": INTEGER},
        "type": "object",
        "minProperties": 1,
        "maxProperties": 2,
    }
    assert texts(schema, "{}", '{"b":1}', '{"a":1,"c":1}', '{"a":1,"b":1,"c":1}') == [
        False, True, True, False,
    ]  # fmt: skip


def test_numbers_have_jsons_grammar():
    number = {"type": "number"}
    good = ["0", "-0", "10", "-1.50", "1e5", "2E-07", "0.0"]
    bad = ["", "-", "01", ".5", "1.", "1e", "+1", "NaN", "0x1", "1e+"]
    assert texts(number, *good, *bad) == [True] * len(good) + [False] * len(bad)


@pytest.mark.parametrize("is_integer", [True, False])
def test_bounded_numbers_are_those_in_the_range(is_integer):
    rng, kind = random.Random(1), "integer" if is_integer else "number"
    bounds = [-120, -7.5, -1, -0.25, 0, 0.3, 2, 9, 10, 99.5, 100]
    written = ["0", "1", "-1", "2", "7", "9", "10", "99", "100", "101", "-7", "-8", "-120", "-121"]
    written += ["0.3", "0.30", "0.29", "0.31", "-0.25", "-0.2", "-0.26", "9.99", "99.5", "99.51"]
    for _ in range(12):
        low, high = sorted(rng.sample(bounds, 2))
        keys = (
            rng.choice(("minimum", "exclusiveMinimum")),
            rng.choice(("maximum", "exclusiveMaximum")),
        )
        schema = {"type": kind, keys[0]: low, keys[1]: high}
        validator = jsonschema.Draft202012Validator(schema)
        try:
            dfa = schema_dfa(schema)
        except GenError:
            assert math.ceil(low) >= math.floor(high) and is_integer
            continue
        for text in written:
            assert dfa.accepts(text.encode()) == validator.is_valid(json.loads(text)), (
                schema,
                text,
            )


def test_multiples_are_those_of_the_remainder():
    dfa = schema_dfa({"type": "integer", "multipleOf": 7, "minimum": -30, "maximum": 30})
    accepted = [n for n in range(-40, 41) if dfa.accepts(str(n).encode())]
    assert accepted == [n for n in range(-28, 29) if n % 7 == 0]


def test_strings_count_characters_and_escape_all_that_must_be():
    short = {"type": "string", "minLength": 1, "maxLength": 2}
    good = ['"a"', '"é東"', '"\\n\\u0041"', '"\\ud83d\\ude00"', '"🙂🙂"']
    bad = ['""', '"abc"', '"\n"', '"\\x"', '"\\ud83d"', '"\\ude00"', '"a']
    assert texts(short, *good, *bad) == [True] * 5 + [False] * 7
    quoted = {"type": "string", "pattern": '^["\\\\\n]$'}
    assert texts(quoted, '"\\""', '"\\\\"', '"\\n"', '"""', '"a"') == [True] * 3 + [False] * 2


def test_patterns_match_anywhere_unless_they_are_anchored():
    assert texts({"type": "string", "pattern": "b+"}, '"b"', '"abba"', '"a"') == [True, True, False]
    assert texts({"type": "string", "pattern": "^b+$"}, '"bb"', '"abb"') == [True, False]
    named = {"type": "string", "pattern": r"^(?<year>\d{4})\/[^\W\d]$"}
    assert texts(named, '"1999/a"', '"1999/5"', '"1999a"') == [True, False, False]


@pytest.mark.parametrize("name", ["ipv4", "uuid"])
def test_formats_have_valid_texts(name):
    require_valid({"type": "string", "format": name}, 20)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_all_formats_have_valid_texts(name):
    require_valid({"type": "string", "format": name}, 100)


def test_dates_know_the_lengths_of_months():
    date = {"type": "string", "format": "date"}
    assert texts(
        date, '"2024-02-29"', '"2000-02-29"', '"2023-02-29"', '"1900-02-29"', '"2023-04-31"',
        '"0000-01-01"',
    ) == [True, True, False, False, False, False]  # fmt: skip


def test_one_of_leaves_out_what_two_branches_accept():
    schema = {"oneOf": [{"type": "integer", "multipleOf": 3}, {"type": "integer", "multipleOf": 5}]}
    assert texts(schema, "3", "5", "15", "30", "9", "1") == [True, True, False, False, True, False]
    # an integer is a number with another spelling, and "1.0" an integer
    schema = {"oneOf": [INTEGER, {"type": "number"}]}
    assert texts(schema, "1", "1.0", "1.5", "1e0") == [False, False, True, False]
    # open objects: the second branch accepts objects that do not mention its properties
    first = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
    second = {"type": "object", "properties": {"a": {"minimum": 5}, "b": INTEGER}}
    assert texts({"oneOf": [first, second]}, '{"a":4}', '{"a":5}', '{"b":1}', '{"a":5,"b":1}') == [
        True, False, True, False,
    ]  # fmt: skip


def test_not_and_if_are_differences():
    schema = {"type": "integer", "minimum": 0, "maximum": 9, "not": {"enum": [3, 4]}}
    assert texts(schema, *map(str, range(10))) == [n not in (3, 4) for n in range(10)]
    assert texts(
        SCHEMAS["feature_flag"], '{"enabled":false}', '{"enabled":false,"rollout":1}',
        '{"enabled":true,"rollout":1}',
    ) == [True, False, True]  # fmt: skip


def test_all_of_merges_properties_and_bounds():
    schema = {
        "allOf": [
            POINT,
            {"properties": {"x": {"minimum": 5}}},
            {"properties": {"x": {"maximum": 6}}},
        ]
    }
    assert texts(schema, '{"x":5}', '{"x":6,"y":0}', '{"x":4}', '{"x":7}') == [
        True, True, False, False,
    ]  # fmt: skip


def test_arrays_have_prefixes_and_limits():
    schema = {"type": "array", "prefixItems": [INTEGER, {"type": "null"}], "items": {"const": "z"}}
    assert texts(schema, "[]", "[1]", "[1,null]", '[1, null, "z"]', "[null]", "[1,null,2]") == [
        True, True, True, True, False, False,
    ]  # fmt: skip
    limited = {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 3}
    assert texts(limited, "[1]", "[1,2]", "[1,2,3]", "[1,2,3,4]") == [False, True, True, False]
    unique = {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}
    assert texts(unique, '["b","a"]', '["a"]', '["a","a"]') == [True, True, False]


def test_recursions_are_unrolled_to_the_depth():
    schema = SCHEMAS["linked_list"]
    nested = ['{"head":1,"tail":' * n + "null" + "}" * n for n in range(1, 5)]
    assert texts(schema, *nested, max_depth=2) == [True, True, True, False]
    assert texts(schema, *nested, max_depth=3) == [True, True, True, True]


@pytest.mark.parametrize(
    "schema, message",
    [
        (False, "satisfied by no text"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "satisfied by no text: # has no value"),
        (
            {"type": "object", "required": ["a"], "properties": {"a": {"enum": []}}},
            "#/properties/a/enum is []; expected a list that is not empty",
        ),
        (
            {"type": "array", "minItems": 1, "items": {"type": "null", "const": 1}},
            "#/items has no value",
        ),
        (
            {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
            "with at most 3 recursive $ref",
        ),
        ({"type": "strin"}, "#/type: 'strin' is outside the vocabulary. Did you mean 'string'?"),
        ({"$ref": "other.json"}, "has $ref 'other.json' at #/$ref; expected #"),
        ({"anyOf": [{"$ref": "#"}]}, "satisfied by no text"),
        ({"type": "string", "pattern": "(a"}, "at #/pattern: regex"),
        ({"type": "string", "maxLength": 100_000}, "states"),
        ([], "json_schema is []"),
    ],
)  # fmt: skip
def test_bad_schemas_have_one_clear_error(schema, message):
    with pytest.raises(GenError, match=re.escape(message)):
        schema_dfa(schema)
