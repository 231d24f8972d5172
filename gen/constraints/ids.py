"""Sequences of token ids as languages of bytes: every id is a word of the same length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

from gen.constraints.kind import Context
from gen.core.errors import bad_type


def width(vocab_size: int) -> int:
    """Return the bytes of an id."""
    return max(((vocab_size - 1).bit_length() + 7) // 8, 1)


def spell(ids: Iterable[int], vocab_size: int) -> bytes:
    """Return the bytes of a sequence of ids."""
    return b"".join(i.to_bytes(width(vocab_size), "big") for i in ids)


def spellings(vocab_size: int) -> list[bytes]:
    """Return the bytes of every id."""
    return [spell([token], vocab_size) for token in range(vocab_size)]


def is_ids(value: Any) -> TypeGuard[list[int]]:
    """Return True for a list of integers."""
    return isinstance(value, (list, tuple)) and all(
        isinstance(i, int) and not isinstance(i, bool) for i in value
    )


def read_texts(name: str, value: Any, context: Context, kind: str) -> tuple[list[bytes], bool]:
    """Read a list of texts, or a list of lists of ids.

    Args:
        name: name of the value, for messages.
        value: value that came.
        context: model of the request.
        kind: kind of constraint.

    Returns:
        Bytes of every element, and True where they are ids.

    Raises:
        GenError: the value is no such list, it is empty, or an id is outside of the vocabulary.
    """
    expected = "a list of texts, or of lists of token ids, with at least one element"
    if not isinstance(value, (list, tuple)) or not value:
        raise bad_type(name, value, expected)
    if all(isinstance(v, str) for v in value):
        context.require_text(kind)
        return [v.encode() for v in value], False
    for i, element in enumerate(value):
        if not is_ids(element):
            raise bad_type(f"{name}[{i}]", element, expected)
        for token in element:
            context.require_id(f"{name}[{i}]", token)
    return [spell(v, context.vocab_size) for v in value], True


def ids_of(name: str, value: Any, context: Context) -> Sequence[int]:
    """Read an id or a list of ids. Raises ``GenError`` for anything else."""
    found = [value] if isinstance(value, int) and not isinstance(value, bool) else value
    if not is_ids(found):
        raise bad_type(name, value, "a token id or a list of token ids")
    return [context.require_id(name, token) for token in found]
