"""Figures of the image models in one JSON file, which is written after each measurement, so that an
evaluation continues after an interruption; and the loops that measure samplers.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gen.core.files import sha256
from gen.modalities.image import captions as shapes
from gen.modalities.image.checker import check_many
from gen.pipeline.output import PipelineOutput
from gen.pipeline.pipeline import Pipeline

HELD_OUT_SEED = 123  # of the captions that are measured
SHORT_SEED = 321  # of the words that are left out of them
BATCH = 25

# figures of one sampler beside those of every sampler: its name, output, verdicts, and the output
# of autoregression with the same seeds, if there is one
Describe = Callable[[str, PipelineOutput, list, PipelineOutput | None], dict[str, Any]]


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
    (path,) = folder.glob("*model.safetensors")
    return sha256(path)[:16]


def pixels_of(out: PipelineOutput) -> np.ndarray:
    """Return the images of an output as uint8 [N, H, W, 3]."""
    return np.stack([np.asarray(m) for m in out.media])


def mean(values: list) -> float | None:
    """Mean of the values, None without any."""
    return statistics.mean(values) if values else None


def measure_samplers(
    figures: Figures,
    folder: Path,
    captions: list[shapes.Caption],
    samplers: Mapping[str, Any],
    sampling: dict[str, Any],
    describe: Describe,
    log: Callable[[str], None] = print,
) -> None:
    """Add a row to ``figures`` for every sampler that lacks one.

    Args:
        figures: figures to extend.
        folder: folder of the model.
        captions: captions to generate.
        samplers: samplers by the name of their row; all run the same model.
        sampling: sampling parameters.
        describe: returns the further figures of a row.
        log: receives a line per row.
    """
    missing = {name: sampler for name, sampler in samplers.items() if name not in figures.rows}
    if not missing:
        return
    pipe, prompts = Pipeline("image", str(folder)), [str(c) for c in captions]

    def run(sampler: Any) -> PipelineOutput:
        return pipe(prompts, sampler, **sampling, seed=0, batch_size=BATCH)

    is_measured = "autoregressive" in samplers and "autoregressive" not in missing
    reference = run("autoregressive") if is_measured else None
    for name, sampler in missing.items():
        out = run(sampler)
        verdicts = check_many(pixels_of(out), captions)
        reference = out if name == "autoregressive" else reference
        nfe = [s.nfe for s in out.stats]
        row = {
            "passed": mean([v.passed for v in verdicts]),
            "nfe_median": statistics.median(nfe),
            "nfe_mean": mean(nfe),
            "nfe_max": max(nfe),
            **describe(name, out, verdicts, reference),
        }
        figures.save_row(name, row)
        log(f"{name}: {json.dumps(row)}")


def measure_short(
    figures: Figures,
    folder: Path,
    captions: list[shapes.Caption],
    samplers: Mapping[str, Any],
    sampling: dict[str, Any],
    log: Callable[[str], None] = print,
) -> None:
    """Add to the rows of ``samplers`` the share of passed captions after words were left out.

    Args:
        figures: figures to extend.
        folder: folder of the models; a row names its model.
        captions: captions, from which words are left out at random.
        samplers: samplers by the name of their row.
        sampling: sampling parameters.
        log: receives a line per row.
    """
    short = shapes.shortened(captions, SHORT_SEED)
    for name, sampler in samplers.items():
        if "any_length" in figures.rows[name]:
            continue
        pipe = Pipeline("image", str(folder / next(iter(figures.weights[name]))))
        out = pipe([str(c) for c in short], sampler, **sampling, seed=0, batch_size=BATCH)
        share = mean([v.passed for v in check_many(pixels_of(out), short)])
        figures.save_row(name, {"any_length": share})
        log(f"{name}, captions of every length: {share}")


def any_length(row: dict) -> str:
    """Cell of the share of passed captions of every length."""
    return f"{row['any_length']:.3f}" if "any_length" in row else "–"
