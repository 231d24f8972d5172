"""Checks of the sampling parameters that look back or name tokens: what came becomes plain values.

A token id and a text may stand for the same token; texts are looked up where the tokenizer is known
(``gen.pipeline.control``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from gen.core.errors import GenError, bad_value
from gen.core.plain import is_digits, is_finite, require_text, torch_number

Word = str | tuple[int, ...]


def number(name: str, value: object, positive: bool = False) -> float:
    """Return a finite number, above 0 if ``positive``.

    Args:
        name: name of the sampling parameter.
        value: what came.
        positive: whether the number must be above 0.

    Raises:
        GenError: something else came.
    """
    expected = "a number above 0" if positive else "a finite number"
    if not isinstance(value, Real) or not is_finite(value):
        raise bad_value(f"sampling.{name}", value, expected)
    if positive and value <= 0:
        raise bad_value(f"sampling.{name}", value, expected)
    return torch_number(int(value) if isinstance(value, Integral) else float(value))


def count(name: str, value: object, least: int = 0) -> int:
    """Return an integer of at least ``least``. Raises ``GenError`` for anything else."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise bad_value(f"sampling.{name}", value, f"an integer of at least {least}")
    return int(value)


def texts(name: str, value: object) -> tuple[str, ...]:
    """Return texts that are not empty; one text stands for a list of it.

    Raises:
        GenError: something else came.
    """
    found = _several(name, value, "a text, or a list of texts")
    for text in found:
        if not isinstance(text, str) or not text:
            raise bad_value(f"sampling.{name}", value, "texts that are not empty")
        require_text(f"sampling.{name}", text)
    return found


def ids(name: str, value: object) -> tuple[int, ...]:
    """Return token ids; one id stands for a list of it.

    Raises:
        GenError: something else came.
    """
    return tuple(_id(name, token) for token in _several(name, value, "a list of token ids"))


def words(value: object) -> tuple[Word, ...]:
    """Return bad words: texts, and tuples of token ids.

    Raises:
        GenError: something else came.
    """
    found: list[Word] = []
    for word in _several("bad_words", value, "a list of texts or of lists of token ids"):
        if isinstance(word, str):
            found += texts("bad_words", word)
            continue
        tokens = ids("bad_words", word)
        if not tokens:
            raise bad_value("sampling.bad_words", value, "words of at least one token")
        found.append(tokens)
    return tuple(found)


def bias(value: object) -> dict[int | str, float]:
    """Return the biases of tokens by id or by text. A text of digits is an id, as JSON writes it.

    Raises:
        GenError: something else came, or a token has two biases.
    """
    name = "logit_bias"
    if not isinstance(value, Mapping):
        raise bad_value(f"sampling.{name}", value, "a mapping of token ids or texts to numbers")
    found: dict[int | str, float] = {}
    for token, add in value.items():
        is_text = isinstance(token, str) and not (is_digits(token))
        key = token if is_text else _id(name, int(token) if isinstance(token, str) else token)
        is_number = isinstance(add, Real) and (abs(add) == math.inf or is_finite(add))
        if key == "" or not is_number or isinstance(add, bool):
            raise bad_value(f"sampling.{name}", value, "a mapping of token ids or texts to numbers")
        if add == math.inf:
            raise bad_value(f"sampling.{name}", value, "numbers below infinity")
        if key in found:
            raise GenError(f"sampling.{name} names token {key!r} twice; expected each token once")
        found[key] = torch_number(int(add) if isinstance(add, Integral) else float(add))
    return found


def processors(value: object) -> tuple[Callable[..., Any], ...]:
    """Return logits processors. Raises ``GenError`` for anything that cannot be called."""
    expected = (
        "functions (input_ids [n, S], scores [n, V]) -> scores, which Python calls take and job"
        " files do not"
    )
    found = (value,) if callable(value) else _several("logits_processor", value, expected)
    for processor in found:
        if not callable(processor):
            raise bad_value("sampling.logits_processor", value, expected)
    return found


def _several(name: str, value: object, expected: str) -> tuple[Any, ...]:
    """Return several values as a tuple; one text or id stands for a list of it."""
    if isinstance(value, (str, Integral)) and not isinstance(value, bool):
        return (value,)
    if not isinstance(value, Iterable) or isinstance(value, (Mapping, bytes)):
        raise bad_value(f"sampling.{name}", value, expected)
    try:
        return tuple(value)
    except TypeError:  # an array without axes
        raise bad_value(f"sampling.{name}", value, expected) from None


def _id(name: str, token: object) -> int:
    """Return a token id. Raises ``GenError`` for anything else."""
    if not isinstance(token, Integral) or isinstance(token, bool) or token < 0:
        raise bad_value(f"sampling.{name}", token, "token ids, integers of at least 0")
    return int(token)
