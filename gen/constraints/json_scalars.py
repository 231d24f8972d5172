"""JSON strings, numbers and whole values as languages of bytes.

Languages come in two spellings. Free ones have all of JSON's grammar: escapes of any character,
exponents, zeros at the end of fractions. Canonical ones spell every value in one way, so that
intersections and differences of languages are those of values. Strings with a pattern or a format
are canonical always, and numbers with bounds have no exponent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

import numpy as np

from gen.constraints.budget import check, require_bytes, require_states
from gen.constraints.byte_dfa import (
    ByteDFA,
    concat,
    difference,
    intersect,
    literal,
    one_of,
    union,
)
from gen.constraints.characters import LAST, characters
from gen.constraints.regex import regex

FRACTION = (
    10  # digits after the point, at most, where numbers are compared: doubles tell them apart
)
PRECISION = 15  # decimal digits that every double keeps
DIGITS = b"0123456789"
HEX = "[0-9a-fA-F]"
ESCAPES = {
    **{code: b"\\u%04x" % code for code in range(32)},
    **{ord(letter): escape.encode() for letter, escape in zip('"\\\b\f\n\r\t', (
        '\\"', "\\\\", "\\b", "\\f", "\\n", "\\r", "\\t"), strict=True)},
}  # fmt: skip

YEAR = r"(\d{3}[1-9]|\d{2}[1-9]\d|\d[1-9]\d{2}|[1-9]\d{3})"
LEAP = r"(\d\d(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
DATE = (
    rf"({YEAR}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)"
    rf"|02-(0[1-9]|1\d|2[0-8]))|{LEAP}-02-29)"
)
TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
CLOCK = r"T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S)"
LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,20}[A-Za-z0-9])?"
HOST = rf"{LABEL}(\.{LABEL}){{0,4}}"
OCTET = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
GROUP = f"{HEX}{{1,4}}"
ATOM = r"[A-Za-z0-9_+-]+"
PATH = r"[A-Za-z0-9._~!$&'()*+,;=:@/-]*"
URI = rf"https?://{HOST}(:[1-9]\d{{0,3}})?(/{PATH})?(\?{PATH})?(#{PATH})?"
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "duration": rf"P(\d+W|(\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)({CLOCK})?|{CLOCK})",
    "email": rf"{ATOM}(\.{ATOM})*@{HOST}",
    "hostname": HOST,
    "ipv4": rf"{OCTET}(\.{OCTET}){{3}}",
    "ipv6": "|".join(
        [f"({GROUP}:){{7}}{GROUP}", f"({GROUP}:){{1,7}}:", f":(:{GROUP}){{1,7}}", "::"]
        + [f"({GROUP}:){{{k}}}(:{GROUP}){{1,{7 - k}}}" for k in range(1, 7)]
    ),
    "uuid": f"{HEX}{{8}}(-{HEX}{{4}}){{3}}-{HEX}{{12}}",
    "uri": URI,
    "uri-reference": rf"{URI}|/{PATH}",
    "json-pointer": r"(/([^/~]|~[01])*)*",
    "byte": r"([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
}
FORMATS |= {
    "idn-email": FORMATS["email"],
    "iri": FORMATS["uri"],
    "iri-reference": FORMATS["uri-reference"],
}
# formats that say how a text is shown or kept, not which texts there are
FREE_FORMATS = {"password", "binary", "float", "double", "decimal", "multi-line", "textarea"}
INTEGER_FORMATS = {"int32": 2**31, "int64": 2**63}


@lru_cache(maxsize=256)
def format_language(name: str) -> ByteDFA:
    """Return the texts of a format, before they are spelled as JSON. ``name``: of ``FORMATS``."""
    return regex(FORMATS[name])


@lru_cache(maxsize=64)
def free_string(least: int = 0, most: int | None = None) -> ByteDFA:
    """Return JSON strings of so many characters, in every spelling.

    Surrogates come in pairs, which are one character.
    """
    escape = (
        rf'["\\/bfnrt]|u([0-9a-cA-CefEF]{HEX}{{3}}|[dD][0-7]{HEX}{{2}}'
        rf"|[dD][89abAB]{HEX}{{2}}\\u[dD][c-fC-F]{HEX}{{2}})"
    )
    letter = regex(rf'[^\x00-\x1f"\\]|\\({escape})')
    return concat(literal(b'"'), letter.repeat(least, most), literal(b'"'))


@lru_cache(maxsize=64)
def texts(least: int = 0, most: int | None = None) -> ByteDFA:
    """Return texts of so many characters in UTF-8."""
    return characters([(0, LAST)]).repeat(least, most)


def quoted(language: ByteDFA) -> ByteDFA:
    """Return the canonical JSON strings of a language of texts."""
    quote = literal(b'"')
    return concat(quote, _escaped(language), quote)


def _escaped(language: ByteDFA) -> ByteDFA:
    """Write quotes, backslashes and control characters of texts with their shortest escape."""
    require_bytes(3 * 256 * 4 * language.num_states)
    rows = language.next[:, language.byte_class]
    special = list(ESCAPES)
    is_used = rows[:, special] >= 0
    table = [rows.copy()]
    table[0][:, special] = -1
    count = len(rows)
    for state in np.flatnonzero(is_used.any(1)).tolist():
        require_states(count)
        require_bytes(3 * 256 * 4 * count)
        inner: dict[bytes, int] = {b"": state}
        for code in special:
            target = int(rows[state, code])
            if target < 0:
                continue
            escape = ESCAPES[code]
            for n in range(1, len(escape)):
                if escape[:n] not in inner:
                    inner[escape[:n]] = count
                    table.append(np.full((1, 256), -1, np.int32))
                    count += 1
                _row(table, inner[escape[: n - 1]])[escape[n - 1]] = inner[escape[:n]]
            _row(table, inner[escape[:-1]])[escape[-1]] = target
    whole = np.concatenate(table).astype(np.int32)
    accepting = np.append(language.accepting, np.zeros(count - len(rows), bool))
    return ByteDFA(whole, accepting, np.arange(256, dtype=np.uint8)).minimize()


def _row(table: list[np.ndarray], state: int) -> np.ndarray:
    """Return the row of a state: those of the language are one array, the others follow."""
    first = len(table[0])
    return table[0][state] if state < first else table[state - first + 1][0]


@lru_cache(maxsize=8)
def free_number(is_integer: bool) -> ByteDFA:
    """Return JSON's numbers, or those without fraction and exponent."""
    digits = r"-?(0|[1-9][0-9]*)"
    return regex(digits if is_integer else rf"{digits}(\.[0-9]+)?([eE][+-]?[0-9]+)?")


@lru_cache(maxsize=1024)
def number(
    is_integer: bool,
    least: tuple[Decimal, bool] | None = None,
    most: tuple[Decimal, bool] | None = None,
    multiple: int | None = None,
    is_canonical: bool = True,
    decimals: int | None = None,
) -> ByteDFA:
    """Return numbers without exponent in a range.

    Args:
        is_integer: leave out fractions.
        least: lower bound, and True where the number may equal it.
        most: upper bound, and True where the number may equal it.
        multiple: integer of which the numbers are multiples.
        is_canonical: leave out zeros at the end of fractions.
        decimals: digits after the point, at most; by default so many that doubles tell the numbers
            apart.
    """
    bounds = [b for b, _ in (bound for bound in (least, most) if bound)]
    digits = max([0, *(b.adjusted() + 1 for b in bounds if b)])
    if decimals is None:
        decimals = max([min(FRACTION, max(PRECISION - digits, 0)), *(_decimals(b) for b in bounds)])
    fraction = "" if is_integer or multiple else _fraction(decimals, is_canonical)
    size = _digits(fraction)
    if multiple:
        size = intersect(size, _multiples(multiple))
    positive, negative = [size], [difference(size, _zero())]
    if least:
        bound, may_equal = least
        above = "=>" if may_equal else ">"
        below = "<=" if may_equal else "<"
        if bound >= 0:
            positive.append(_compared(bound, above))
            negative = []
        else:
            negative.append(_compared(-bound, below))
    if most:
        bound, may_equal = most
        above = "=>" if may_equal else ">"
        below = "<=" if may_equal else "<"
        if bound >= 0:
            positive.append(_compared(bound, below))
        else:
            positive = []
            negative = [*negative, _compared(-bound, above)] if negative else []
    parts = [intersect(*positive)] if positive else []
    if negative:
        parts.append(concat(literal(b"-"), intersect(*negative)))
    return union(*parts)


@lru_cache(maxsize=32)
def _digits(fraction: str) -> ByteDFA:
    return regex(rf"(0|[1-9][0-9]*){fraction}")


@lru_cache(maxsize=1)
def _zero() -> ByteDFA:
    return regex(r"0(\.0*)?")


def _fraction(decimals: int, is_canonical: bool) -> str:
    if not decimals:
        return ""
    return (
        rf"(\.[0-9]{{0,{decimals - 1}}}[1-9])?" if is_canonical else rf"(\.[0-9]{{1,{decimals}}})?"
    )


def _decimals(bound: Decimal) -> int:
    """Return the digits of a bound after the point."""
    exponent = bound.normalize().as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _multiples(divisor: int) -> ByteDFA:
    """Return decimals whose value is a multiple of an integer; the state is the remainder."""
    states = np.arange(divisor)[:, None]
    table = np.full((divisor, 11), -1, np.int32)
    table[:, :10] = (states * 10 + np.arange(10)) % divisor
    byte_class = np.full(256, 10, np.uint8)
    byte_class[list(DIGITS)] = np.arange(10)
    return ByteDFA(table, np.arange(divisor) == 0, byte_class).minimize()


def _compared(bound: Decimal, relations: str) -> ByteDFA:
    """Return decimals without sign that are less, equal or greater than a bound.

    The state is the relation of the digits so far to those of the bound, and their number.

    Args:
        bound: at least 0.
        relations: those that are accepted, of ``<=>``.
    """
    whole, _, fraction = f"{bound:f}".partition(".")
    whole, fraction = str(int(whole)), fraction.rstrip("0")
    states = {("whole", 0, "="): 0}
    waiting = list(states)
    rows: list[list[int]] = []
    accepting: list[bool] = []

    def number_of(part: str, count: int, relation: str) -> int:
        state = (part, count, relation)
        if state not in states:
            waiting.append(state)
        return states.setdefault(state, len(states))

    for part, count, relation in waiting:  # grows while it is read
        require_states(len(states))
        row = [-1] * 12
        if part == "whole":
            shape = "<" if count < len(whole) else relation if count == len(whole) else ">"
            for digit in "0123456789":
                then = relation
                if relation == "=" and count < len(whole) and digit != whole[count]:
                    then = "<" if digit < whole[count] else ">"
                row[int(digit)] = number_of("whole", min(count + 1, len(whole) + 1), then)
            row[10] = number_of("fraction", 0, shape)
            final = shape
        else:
            for digit in "0123456789":
                then, expected = relation, fraction[count] if count < len(fraction) else "0"
                if relation == "=" and digit != expected:
                    then = "<" if digit < expected else ">"
                row[int(digit)] = number_of("fraction", min(count + 1, len(fraction)), then)
            final = relation
        if final == "=" and (part == "whole" or count < len(fraction)) and fraction:
            final = "<"  # the other digits of the bound are not all zero
        rows.append(row)
        accepting.append(final in relations)
    byte_class = np.full(256, 11, np.uint8)
    byte_class[list(DIGITS)] = np.arange(10)
    byte_class[ord(".")] = 10
    return ByteDFA(np.array(rows, np.int32), np.array(accepting), byte_class).minimize()


@lru_cache(maxsize=8)
def separator(sign: bytes) -> ByteDFA:
    """Return a sign with at most one space after it."""
    return concat(literal(sign), one_of(b" ").optional())


def spelled(value: Any) -> str:
    """Return the canonical spelling of a scalar.

    Raises:
        TypeError: the value is an array or an object.
    """
    if isinstance(value, (list, dict)):
        raise TypeError("arrays and objects have several spellings")
    if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
        text = f"{Decimal(str(value)):f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
        return "0" if text == "-0" else text
    return json.dumps(value, ensure_ascii=False)


def value_language(value: Any) -> ByteDFA:
    """Return the texts of one value: canonical scalars, at most one space after signs."""
    check()
    if isinstance(value, list):
        return bracketed(b"[]", [value_language(item) for item in value])
    if isinstance(value, dict):
        entries = [
            concat(literal(spelled(key).encode()), separator(b":"), value_language(item))
            for key, item in value.items()
        ]
        return bracketed(b"{}", entries)
    return literal(spelled(value).encode())


def bracketed(signs: bytes, entries: Sequence[ByteDFA]) -> ByteDFA:
    """Return entries with commas between them, in brackets."""
    parts = [literal(signs[:1])]
    for n, entry in enumerate(entries):
        parts += [separator(b","), entry] if n else [entry]
    return concat(*parts, literal(signs[1:]))
