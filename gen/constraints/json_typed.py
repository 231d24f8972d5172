"""Languages of one type of values: strings and numbers that satisfy several schemas together."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

from gen.constraints.budget import within
from gen.constraints.byte_dfa import ByteDFA, any_of, intersect, literal, nothing
from gen.constraints.json_member import Member, tightest
from gen.constraints.json_scalars import (
    FORMATS,
    format_language,
    free_number,
    free_string,
    number,
    quoted,
    texts,
)
from gen.constraints.regex import regex
from gen.core.errors import GenError

CONTAINER_KEYWORDS = (
    "properties required additionalProperties minProperties maxProperties propertyNames items"
    " prefixItems additionalItems minItems maxItems uniqueItems unevaluatedProperties"
).split()
# classes of characters where the dialects differ stand for what all of them have
CLASSES = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": r" \t\n\r\f\v",
    "D": r"\x00-/:-\x7f",
    "W": r"\x00-/:-@\[-\^`{-\x7f",
    "S": r"!-~\u00a1-\u1fff\u2070-\u2fff\u3001-\ud7ff",
}
MANY_DECIMALS = 40  # digits after the point in the second language of a difference


def scalar_language(
    kind: str, members: Sequence[Member], is_canonical: bool, is_over: bool
) -> ByteDFA:
    """Return the values of a type that is no array and no object.

    Args:
        kind: type.
        members: schemas without combinators and enum.
        is_canonical: spell every value in one way.
        is_over: the language is the second one of a difference.
    """
    if kind == "null":
        return literal(b"null")
    if kind == "boolean":
        return any_of([b"true", b"false"])
    if kind == "string":
        return _strings(members, is_canonical)
    least = tightest([m.bound("min") for m in members], "min")
    most = tightest([m.bound("max") for m in members], "max")
    divisors = [int(m.get("multipleOf")) for m in members if m.get("multipleOf")]
    is_integer = kind == "integer"
    if not (is_canonical or least or most or divisors):
        return free_number(is_integer)
    multiples = [
        number(is_integer, least, most, divisor, is_canonical, MANY_DECIMALS if is_over else None)
        for divisor in divisors or [None]
    ]
    return intersect(*multiples)


def _strings(members: Sequence[Member], is_canonical: bool) -> ByteDFA:
    least, most = _lengths(members)
    if most is not None and most < least:
        return nothing()
    chosen = _languages(members)
    if not chosen:
        return quoted(texts(least, most)) if is_canonical else free_string(least, most)
    if least or most is not None:
        chosen.append(texts(least, most))
    return quoted(intersect(*chosen))


def _languages(members: Sequence[Member]) -> list[ByteDFA]:
    """Return the languages of the patterns and formats of schemas."""
    patterns = [m for m in members if m.get("pattern") is not None]
    formats = [m for m in members if m.get("format") in FORMATS and m.is_generated]
    return [
        *(_pattern(m.get("pattern"), m.pointer) for m in patterns),
        *(format_language(m.get("format")) for m in formats),
    ]


def _lengths(members: Sequence[Member]) -> tuple[int, int | None]:
    least = max([0, *(int(m.get("minLength", 0)) for m in members)])
    limits = [int(m.get("maxLength")) for m in members if m.get("maxLength") is not None]
    return least, min(limits, default=None)


def _pattern(pattern: str, pointer: str) -> ByteDFA:
    """Return the texts with a match of a pattern.

    Raises:
        GenError: the pattern is no regular expression; with its pointer.
    """
    try:
        return _searched(_ecma(pattern))
    except GenError as error:
        raise within(f"the schema at {pointer}/pattern", error) from None


@lru_cache(maxsize=256)
def _searched(pattern: str) -> ByteDFA:
    return regex(pattern, search=True)


def _ecma(pattern: str) -> str:
    """Write a pattern of ECMA 262 for ``re``: named groups, and classes that both dialects have."""
    written, is_in_set, i = [], False, 0
    while i < len(pattern):
        letter, after = pattern[i], pattern[i + 1 : i + 2]
        if letter == "\\" and after in CLASSES and after:
            written.append(CLASSES[after] if is_in_set else f"[{CLASSES[after]}]")
        elif letter == "\\":
            written.append("/" if after == "/" else letter + after)
        elif pattern.startswith("(?<", i) and pattern[i + 3 : i + 4] not in ("=", "!"):
            written.append("(?P<")
            i += 1
        else:
            is_in_set = letter == "[" or (is_in_set and letter != "]")
            escaped = is_in_set and letter == "[" and written and written[-1] == "["
            written.append("\\[" if escaped else letter)
        i += 2 if letter == "\\" or written[-1] == "(?P<" else 1
    return "".join(written)


def scalar_holds(value: Any, members: Sequence[Member]) -> bool:
    """Return True where a value that is no array and no object satisfies schemas."""
    if isinstance(value, str):
        least, most = _lengths(members)
        fits = least <= len(value) and (most is None or len(value) <= most)
        return fits and all(part.accepts(value.encode()) for part in _languages(members))
    if value is None or isinstance(value, bool):
        return True
    size = Decimal(str(value))
    for m in members:
        least, most = m.bound("min"), m.bound("max")
        if least and not (size > least[0] or (least[1] and size == least[0])):
            return False
        if most and not (size < most[0] or (most[1] and size == most[0])):
            return False
        if m.get("multipleOf") and size % int(m.get("multipleOf")):
            return False
    return True


def type_of(value: Any) -> str:
    """Return the type of a value; ``integer`` for numbers without fraction."""
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (str, "string"), (list, "array"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "integer" if value == int(value) else "number"
