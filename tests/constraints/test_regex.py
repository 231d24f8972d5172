"""A regular expression accepts the texts that Python's ``re`` matches with the flag ASCII."""

from __future__ import annotations

import random
import re

import pytest

from gen.constraints.characters import characters, others
from gen.constraints.regex import regex
from gen.core.errors import GenError

LETTERS = "aabbcdAB01_- .\né\u0660€\U0001f642"
PATTERNS = [
    r"a*?b+?|",
    r"(a|b){2,3}c?",
    r"(?:ab?){2,}",
    r"[^a-c]é.{1,2}",
    r"[\d_]+-\w*\s?",
    r"\D\W\S",
    r"(?i)ab[c-e]|[^a]",
    r"(?i:a)b?(?s:.)",
    r"(?x) a  b? # letters",
    r"[é-€]+|\x61\u00e9",
    r"(?P<name>a)(b|)",
    r"[^\w\s]",
    r"a{0}b{1}",
]
ANCHORED = [r"^a|b$", r"(^a|b?)c$", r"^(^a|b)", r"\Aab\Z", r"(a|^b$|c)", r"^$|a"]


def texts(pattern: str, count: int) -> list[str]:
    """Draw texts over the letters; half of them have the characters of the pattern alone."""
    draw = random.Random(pattern)
    own = [c for c in pattern if c.isalnum()] + list(LETTERS)
    lengths = [0, 1, 1, 2, 2, 3, 3, 4, 5]
    return [
        "".join(draw.choices(draw.choice([own, LETTERS]), k=draw.choice(lengths)))
        for _ in range(count)
    ]


@pytest.mark.parametrize("pattern", PATTERNS + ANCHORED)
def test_a_whole_text_matches_iff_re_says_so(pattern):
    dfa, matches = regex(pattern), 0
    for text in [*texts(pattern, 700), "ab", "c", "acb"]:
        wanted = re.fullmatch(pattern, text, re.ASCII) is not None
        assert dfa.accepts(text.encode()) == wanted, text
        matches += wanted
    assert matches and re.fullmatch(pattern, dfa.shortest().decode(), re.ASCII)


@pytest.mark.parametrize("pattern", PATTERNS + ANCHORED)
def test_a_search_finds_iff_re_says_so(pattern):
    dfa, found = regex(pattern, search=True), 0
    for text in [*texts(pattern, 700), "ab", "c", "acb"]:
        if "$" in pattern and text.endswith("\n"):
            continue  # `$` of re also stands before a last line break
        wanted = re.search(pattern, text, re.ASCII) is not None
        assert dfa.accepts(text.encode()) == wanted, text
        found += wanted
    assert found and re.search(pattern, dfa.shortest().decode(), re.ASCII)


@pytest.mark.parametrize(
    "first, last",
    [(0, 0x7F), (0x41, 0x800), (0x7FF, 0x10000), (0xD000, 0xE100), (0xFFFD, 0x10FFFF), (233, 233)],
)
def test_a_range_of_characters_is_a_range_of_code_points(first, last):
    dfa = characters([(first, last)])
    edges = [0, 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF]
    codes = {c + d for c in (first, last, *edges) for d in range(-2, 3)}
    for code in sorted(c for c in codes if 0 <= c <= 0x10FFFF and not 0xD800 <= c <= 0xDFFF):
        assert dfa.accepts(chr(code).encode()) == (first <= code <= last)
        assert characters(others([(first, last)])).accepts(chr(code).encode()) == (
            not first <= code <= last
        )
    for wrong in (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xe2\x82", b""):
        assert not dfa.accepts(wrong)


@pytest.mark.parametrize(
    "pattern, words",
    [
        (r"(a)\1", "a back-reference"),
        (r"(a)?(?(1)b|c)", "a condition on a group"),
        (r"a(?=b)", "look-around"),
        (r"(?<!a)b", "look-around"),
        (r"(?>a|ab)c", "an atomic group"),
        (r"a++b", "a possessive repetition"),
        (r"\bword", r"\\b inside"),
        (r"a^b", r"\^ inside"),
        (r"(a$)?b", r"\$ inside"),
        (r"(^a)*", r"\^ inside"),
        (r"(?m)^a", "the flag m"),
        (r"(?m:a)", "the flag m"),
        ("a(b", "at position 1: missing "),
        ("ab\ncd[e", "at line 2, column 3: unterminated"),
        ("*", "nothing to repeat"),
    ],
)
def test_what_is_no_regular_expression_is_refused_by_name(pattern, words):
    with pytest.raises(GenError, match=words):
        regex(pattern)


def test_a_pattern_is_a_text():
    with pytest.raises(GenError, match="expected a text"):
        regex(3)  # type: ignore[arg-type]
