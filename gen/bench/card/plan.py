"""Measurements in the order of their worth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

KINDS = {  # method of a kind, as module:class and name, and the seconds that it may take
    "bits": ("gen.bench.card.minimal:Invariance", "shares", 30),
    "image": ("gen.bench.card.parity:Parity", "image", 60),
    "control": ("gen.bench.card.parity:Parity", "image_cpu", 60),
    "text": ("gen.bench.card.parity:Parity", "text", 60),
    "wall": ("gen.bench.card.wall:Wall", "shape", 120),
    "launches": ("gen.bench.card.wall:Wall", "launches", 60),
    "decode": ("gen.bench.card.wall:Wall", "decode", 120),
}
GRAPHS = "cuda_graphs"


@dataclass(frozen=True)
class Measurement:
    """Call of a method of ``KINDS``.

    The module is imported when its first measurement begins, so that a package that is not
    installed fails its own measurements only.
    """

    kind: str
    args: dict[str, Any]

    @property
    def name(self) -> str:
        """Key of the result."""
        return f"{self.kind} " + ", ".join(f"{key} {value}" for key, value in self.args.items())


def grid(kind: str, **axes: Any) -> Iterator[Measurement]:
    """Yield the measurements of all combinations of arguments: each is one value or a list."""
    values = [axis if isinstance(axis, list) else [axis] for axis in axes.values()]
    for chosen in product(*values):
        yield Measurement(kind, dict(zip(axes, chosen, strict=True)))


def full() -> list[Measurement]:
    """Return what is measured on an accelerator."""
    bits = {"dtype": ["bfloat16", "float16"], "parameters": "300M", "layers": 6, "length": 128}
    shapes = {"rows": [2, 16, 128], "width": [1, 16, 32, 64]}
    options = ["none", "batch_invariant", GRAPHS]
    images = {"count": 8, "option": options}
    one, several = {"window": 1, "batch": [3, 8]}, {"window": [16, 64], "batch": [1, 3, 8]}
    whole = {"batch": [1, 8, 64], "window": "auto"}
    texts = {"count": 4, "option": ["none", GRAPHS], "part": list(range(8)), "parts": 8}
    return [
        *grid("bits", **bits, rows=0, base=0, moved=False),
        *grid("bits", **bits, rows=[16, 64], base=16, moved=[False, True]),
        *grid("image", dtype="bfloat16", **images, **one),
        *grid("image", dtype="bfloat16", **images, **several),
        *grid("wall", size="300M", option=GRAPHS, **shapes, repeats=5),
        *grid("launches", size="300M", option=GRAPHS, rows=2, width=[1, 16]),
        *grid("decode", size="300M", option=GRAPHS, **whole, repeats=3),
        *grid("control", count=8, altered=[0.0, 0.5]),
        *grid("text", **texts),
        *grid("image", dtype="float32", **images, **one),
        *grid("image", dtype="float32", **images, **several),
        *grid("wall", size="300M", option="none", rows=2, width=[1, 16, 32, 64], repeats=5),
        *grid("launches", size="300M", option="none", rows=2, width=[1, 16]),
        *grid("decode", size="300M", option=options[:2], batch=8, window="auto", repeats=3),
        *grid("wall", size="1B", option=GRAPHS, **shapes, repeats=5),
        *grid("wall", size="7B", option=GRAPHS, **shapes, repeats=3),
        *grid("decode", size="7B", option=GRAPHS, **whole, repeats=2),
    ]


def quick() -> list[Measurement]:
    """Return the same of small models and few items: whether it runs, not what it shows."""
    bits = {"dtype": "bfloat16", "parameters": "30M", "layers": 2, "length": 32}
    options = ["none", "batch_invariant", GRAPHS]
    return [
        *grid("bits", **bits, rows=0, base=0, moved=False),
        *grid("bits", **bits, rows=32, base=16, moved=True),
        *grid("image", dtype="bfloat16", count=2, option=options, window=[1, 16], batch=2),
        *grid("control", count=2, altered=[0.0, 0.5]),
        *grid("text", count=1, option="none", part=0, parts=8),
        *grid("wall", size="3M", option="none", rows=2, width=[1, 16], repeats=2),
        *grid("launches", size="3M", option="none", rows=2, width=16),
        *grid("decode", size="3M", option="none", batch=1, window=16, repeats=1),
    ]
