"""Structured output ``tool_calls``: both engines accept the same texts in every format, and a
reader gets out of a text, in parts of any size, what was written."""

from __future__ import annotations

import random

import pytest
import torch
from tool_models import ADD, NOW, TOOLS, function, tokenizer_of

from gen.constraints.build import build
from gen.constraints.grammar import _Grammar
from gen.contracts.constraint import BITS, AutomatonConstraint
from gen.core.errors import GenError
from gen.core.token_space import TokenSpace
from gen.core.tool_calls import FORMATS, CallReader, format_of, read_calls
from gen.tokenizers.text.hf_text import HFText

LENGTH = 400
ONE = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 20}}\n</tool_call>',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 20}}]',
    "llama3": '{"name": "add", "parameters": {"a": 1, "b": 20}}',
}
NEXT = {
    "hermes": '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "mistral": ', {"name": "now", "arguments": {}}]',
    "llama3": '; {"name": "now", "parameters": {}}',
}
TWO = {f: (ONE[f][:-1] if f == "mistral" else ONE[f]) + NEXT[f] for f in ONE}


@pytest.fixture(scope="module")
def frontends():
    return {name: HFText(tokenizer_of(name)) for name in FORMATS}


def made(frontend, name, **options):
    size = frontend.config.codebook_sizes[0]
    legal = torch.ones(LENGTH, size, dtype=torch.bool)
    space = TokenSpace((LENGTH,), size, legal, eos_token_id=frontend.ends[0])
    rule = {"tool_calls": TOOLS, "format": name, **options}
    return build(rule, frontend.vocabulary(), space)


def accepts(constraint, frontend, text) -> bool:
    """Whether the tokens of a text and its end may come one after the other."""
    state = constraint.start()
    for n, token in enumerate([*frontend.ids(text), frontend.ends[0]]):
        mask = state.allowed_bitmask(LENGTH - n)
        if not int(mask[token // BITS]) >> token % BITS & 1:
            return False
        assert state.advance(token)
    return True


@pytest.mark.parametrize("engine", ["automaton", "llguidance"])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_held_to_their_schemas_and_texts_are_free(frontends, name, engine):
    frontend, one, two = frontends[name], ONE[name], TWO[name]
    form, tight = FORMATS[name], ONE[name].replace(", ", ",").replace(": ", ":")
    cases = {  # text: accepted under auto, required, add, and required without parallel calls
        "hello": (True, False, False, False),
        "": (True, False, False, False),
        one: (True, True, True, True),
        tight: (True, True, True, True),
        two: (True, True, False, False),
        f"so:\n{one}": (True, False, False, False),
        one.replace("20", "2"): (False, False, False, False),
        one.replace("add", "ad"): (False, False, False, False),
        one.replace('"a": 1, ', ""): (False, False, False, False),
        f"{one} well": (False, False, False, False),
        one[:-1]: (False, False, False, False),
        "a <tool_cal": (True, False, False, False),
        f"a {form.sign}": (form.is_whole, False, False, False),
    }
    rules = ({}, {"call": "required"}, {"call": "add"}, {"call": "required", "parallel": False})
    constraints = [made(frontend, name, engine=engine, **rule) for rule in rules]
    assert all(isinstance(c, _Grammar) == (engine == "llguidance") for c in constraints)
    for text, wanted in cases.items():
        found = tuple(accepts(constraint, frontend, text) for constraint in constraints)
        assert found == wanted, text


@pytest.mark.parametrize("engine", ["automaton", "llguidance"])
def test_a_text_beside_calls_may_have_a_schema(frontends, engine):
    frontend = frontends["hermes"]
    constraint = made(frontend, "hermes", engine=engine, text={"enum": ["yes", "no"]})
    texts = ('"yes"', '"no"', ONE["hermes"], "yes", f'"yes"{ONE["hermes"]}')
    assert [accepts(constraint, frontend, t) for t in texts] == [True, True, True, False, False]


def test_schemas_that_no_automaton_expresses_go_to_the_other_engine(frontends):
    odd = function("f", a={"type": "object", "patternProperties": {"^x": {"type": "integer"}}})
    how = {"tool_calls": [odd], "call": "f"}
    constraint = made(frontends["hermes"], "hermes", **how)
    assert isinstance(constraint, _Grammar)
    text = '<tool_call>{"name": "f", "arguments": {"a": {"x1": 2}}}</tool_call>'
    assert accepts(constraint, frontends["hermes"], text)
    assert not accepts(constraint, frontends["hermes"], text.replace("2", '"2"'))
    with pytest.raises(GenError, match="parameters of function 'f': .*patternProperties"):
        made(frontends["hermes"], "hermes", **how, engine="automaton")
    plain = made(frontends["hermes"], "hermes", tool_calls=[ADD])
    assert isinstance(plain, AutomatonConstraint)  # the control


WRONG = {
    "format": ({"format": "hermse"}, "Did you mean 'hermes'"),
    "function": ({"call": "ad"}, "Did you mean 'add'"),
    "engine": ({"engine": "x"}, "structured.engine is 'x'"),
    "nothing": ({"tool_calls": []}, "at least one function"),
    "no list": ({"tool_calls": 3}, "a list of functions"),
    "twice": ({"tool_calls": [NOW, NOW]}, "the name 'now' again"),
    "no function": ({"tool_calls": [{"name": "f"}]}, "tools.0 is"),
    "no object": ({"tool_calls": [function("f") | {"function": {"name": "f", "parameters": {
        "type": "string"}}}]}, "JSON schema of an object"),
    "both refuse": ({"tool_calls": [function("f", a={"type": "strin"})]}, "function 'f'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_rule_is_one_error(frontends, case):
    options, message = WRONG[case]
    with pytest.raises(GenError, match=message) as caught:
        made(frontends["hermes"], "hermes", **options)
    assert "\n" not in str(caught.value)


TEXTS = {
    "calls alone": ("", 2),
    "text and calls": ("Let me see.", 2),
    "text": ("Nothing {to} call: <tool, [TOOL, {\"name\" ", 0),
    "nothing": ("", 0),
}  # fmt: skip


@pytest.mark.parametrize("case", TEXTS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_reader_gets_the_same_from_parts_of_any_size(name, case):
    before, count = TEXTS[case]
    form = FORMATS[name]
    if form.is_whole and before and count:
        count = 0  # such calls are a whole answer
    arguments = ['{"a": "}{\\"\\\\", "b": [{"c": {}}]}', "{}"]
    calls = [f'{{"name": "f{n}", "{form.key}": {a}}}' for n, a in enumerate(arguments)]
    ends = {"hermes": ("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
            "mistral": ("[TOOL_CALLS] [", ", ", "]"), "llama3": ("", "; ", "")}[name]  # fmt: skip
    said = ends[0] + ends[1].join(calls) + ends[2] if TEXTS[case][1] else ""
    text = f"{before}\n{said}" if before and said else before + said
    content, found, is_whole = read_calls(text, form)
    assert is_whole and len(found) == count
    assert content == (before if count or not said else text)
    assert [c["arguments"] for c in found] == arguments[:count]
    draw = random.Random(0)
    for _ in range(100):
        reader, parts, at = CallReader(form), [], 0
        while at < len(text):
            size = draw.randint(1, 7)
            parts += reader.feed(text[at : at + size])
            at += size
        parts += reader.finish()
        assert "".join(p.text for p in parts if p.call is None) == content
        for n, call in enumerate(found):
            own = [p for p in parts if p.call == n]
            assert own[0].name == call["name"] and all(p.name is None for p in own[1:])
            assert "".join(p.text for p in own) == call["arguments"]


def test_a_call_that_is_cut_off_is_open():
    for text, is_whole in ((ONE["hermes"], True), (ONE["hermes"][:50], False)):
        content, calls, found = read_calls(text, FORMATS["hermes"])
        assert (content, len(calls), found) == ("", 1, is_whole)


def test_formats_of_templates():
    assert format_of("a <tool_call> b").name == "hermes"
    assert format_of("<tool_call> <function=f>") is None  # of another family
    assert format_of("[TOOL_CALLS]name[ARGS]{}") is None
    assert format_of("plain") is None
