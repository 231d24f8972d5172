"""Figures of the image models in one JSON file, which is written after each measurement, so that an
evaluation continues after an interruption.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gen.core.files import sha256

HELD_OUT_SEED = 123  # of the captions that are measured
SHORT_SEED = 321  # of the words that are left out of them


class Figures:
    """Figures of samplers in a zoo.

    A row names the digests of the weights that it was measured with. A file of the same captions is
    continued, without the rows of other weights; any other file is begun anew.

    Args:
        path: the file.
        head: description of the measurements.
        models: folders of the models that each sampler runs.
    """

    def __init__(self, path: Path, head: dict[str, Any], models: Mapping[str, Sequence[str]]):
        self.path = path
        digests = {name: weights_digest(path.parent / name) for name in {*sum(models.values(), ())}}
        self.weights = {
            sampler: {name: digests[name] for name in names} for sampler, names in models.items()
        }
        self.values: dict[str, Any] = {**head, "samplers": {}}
        old = json.loads(path.read_text()) if path.is_file() else {}
        if all(old.get(key) == value for key, value in head.items()):
            rows = old.get("samplers", {})
            kept = {n: r for n, r in rows.items() if r.get("weights") == self.weights.get(n)}
            self.values = {**old, "samplers": kept}

    @property
    def rows(self) -> dict[str, Any]:
        """Figures by sampler."""
        return self.values["samplers"]

    def save(self, key: str, value: Any) -> None:
        """Set a value of the file and write it."""
        self.values[key] = value
        self.path.write_text(json.dumps(self.values, indent=1) + "\n")

    def save_row(self, sampler: str, row: dict[str, Any]) -> None:
        """Add figures of a sampler and write the file."""
        row = {**self.rows.get(sampler, {}), **row, "weights": self.weights[sampler]}
        rows = {**self.rows, sampler: row}
        self.save("samplers", {name: rows[name] for name in self.weights if name in rows})


def weights_digest(folder: Path) -> str:
    """Digest of a model's weights: the first 16 digits of the SHA-256 of its one weight file."""
    (path,) = folder.glob("*.safetensors")
    return sha256(path)[:16]
