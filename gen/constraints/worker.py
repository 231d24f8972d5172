"""Constraint that is built in another process: the call, and what its result leaves out."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from gen.constraints.build import built
from gen.constraints.kind import Context
from gen.core.errors import GenError
from gen.core.registry import registry


def prepare() -> None:
    """Import what building takes."""
    registry.table("constraint")


def answer(data: bytes) -> bytes:
    """Build the constraint of a job, and return it, or the ``GenError`` that it raises, without
    what the client has already (``shared``)."""
    job = pickle.loads(data)
    context = replace(job["context"], legal=unpacked(job["legal"], job["context"].vocab_size))
    rule = job["rule"]
    structured = json.loads(rule) if isinstance(rule, str) else rule
    try:
        return dumped(built(structured, context, job["most"]), context)
    except GenError as error:
        return dumped(error, context)


def packed(legal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return allowed tokens, bool [T, V], as distinct rows of bits and the row of each position."""
    bits = np.packbits(legal, axis=1)
    index: dict[bytes, int] = {}
    which = [index.setdefault(row.tobytes(), len(index)) for row in bits]
    _, first = np.unique(which, return_index=True)
    return bits[first], np.array(which)


def unpacked(rows: tuple[np.ndarray, np.ndarray], vocab_size: int) -> np.ndarray:
    """Return what ``packed`` got: bool [T, V]. Equal positions are one row in memory."""
    bits, which = rows
    legal = np.unpackbits(bits, axis=1, count=vocab_size).view(bool)
    if len(legal) == 1:
        return np.broadcast_to(legal, (len(which), vocab_size))
    return legal[which]


def shared(context: Context) -> dict[str, Any]:
    """Return objects that both sides of a connection have, by name."""
    return {"context": context, "legal": context.legal, "vocabulary": context.vocabulary}


def dumped(result: Any, context: Context) -> bytes:
    """Return a result as a pickle without what is shared."""
    names = {id(value): name for name, value in shared(context).items() if value is not None}
    file = io.BytesIO()
    pickler = _Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.name_of = lambda value: names.get(id(value))
    pickler.dump(result)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Pickler that writes the names of objects instead of them."""

    name_of: Callable[[Any], str | None]

    def persistent_id(self, obj: Any) -> str | None:
        return self.name_of(obj)
