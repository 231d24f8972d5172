"""Plain data: what arguments that are no media, media paths or functions may be made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Number
from types import NoneType
from typing import Any

from gen.core.errors import bad_type, bad_value

DEEPEST = 32  # levels of lists and mappings


def require_plain(name: str, value: Any) -> None:
    """Refuse a value that cannot be compared, written or sent as it is.

    Args:
        name: name of the argument, for the message.
        value: what came. Functions and objects of other classes are left to those who take them.

    Raises:
        GenError: there is an array or a tensor in it, a number beyond floating point, a text with
            half a surrogate pair or a null byte, or it is nested too deeply, such as a list that
            contains itself.
    """
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        below: list[Any] = []
        for one in level:
            _require_simple(name, one, value)
            if isinstance(one, Mapping):
                below += [*one.keys(), *one.values()]
            elif isinstance(one, (list, tuple, set, frozenset)):
                below += one
        if not below:
            return
        level = list({id(one): one for one in below}.values())
    raise bad_value(name, value, f"at most {DEEPEST} levels of lists and mappings")


def require_text(name: str, *texts: str) -> None:
    """Refuse a text that has no UTF-8. Raises ``GenError`` with the name of the argument."""
    for text in texts:
        if not is_encodable(text):
            raise bad_value(name, text, "Unicode text without half a surrogate pair")


def require_texts(name: str, texts: Iterable[Any]) -> None:
    """Refuse texts that have no UTF-8, among other values. Raises ``GenError``."""
    require_text(name, *(text for text in texts if isinstance(text, str)))


def is_encodable(text: str) -> bool:
    """Return True for a text that has a UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_digits(text: str) -> bool:
    """Return True for one or more ASCII digits; those of other scripts are no numbers here."""
    return text.isascii() and text.isdecimal()


def is_finite(value: Any) -> bool:
    """Return True for a real number that floating point holds; a bool is none."""
    try:
        return (
            isinstance(value, Number)
            and not isinstance(value, (bool, complex))
            and abs(float(value)) < float("inf")  # pyright: ignore[reportArgumentType]
        )
    except (OverflowError, TypeError, ValueError):
        return False


def torch_number(value: int | float) -> int | float:
    """Return a number as torch takes it: an integer of more than 64 bits as a float."""
    return float(value) if isinstance(value, int) and abs(value) >= 2**63 else value


def _require_simple(name: str, one: Any, value: Any) -> None:
    if isinstance(one, (bool, NoneType, type)):
        return
    if isinstance(one, str):
        if "\0" in one or not is_encodable(one):
            raise bad_value(name, value, "text without null bytes or half a surrogate pair")
    elif isinstance(one, int):
        if not is_finite(one):
            raise bad_value(name, value, "a number that floating point holds")
    elif hasattr(one, "__array__") and not isinstance(one, Number):  # of any library
        raise bad_type(name, value, "plain numbers, texts, lists or mappings")
