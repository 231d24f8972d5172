"""Frontends from folders of diffusers and transformers: a class with the weights that it has, none fewer and none more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gen.errors import GenError
from gen.models.loading import quiet, readable
from gen.models.weights import SHOWN


def exactly(cls: Any, path: str | Path, kind: str, **options: Any) -> Any:
    """``cls.from_pretrained``. ``kind``: what messages call it. Raises ``GenError`` for what cannot be read, and lists weights that are not there, that
    the class does not have, and that are of another shape there."""
    with readable(kind, path), quiet():
        model, info = cls.from_pretrained(path, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    said = {
        "lacks the weight": [repr(k) for k in sorted(info["missing_keys"])],
        "has the weight that it does not know": [repr(k) for k in sorted(info["unexpected_keys"])],
        "has the mis-shaped weight": [f"{k[0]!r} ({tuple(k[1])}, expected {tuple(k[2])})" for k in sorted(info["mismatched_keys"], key=str)],
    }
    wrong = [f"{what} {', '.join(v[:SHOWN])}{' ...' if len(v) > SHOWN else ''}" for what, v in said.items() if v]
    if wrong:
        raise GenError(f"{kind} {path} is not what {cls.__name__} is made of: it {', and '.join(wrong)}")
    return model
