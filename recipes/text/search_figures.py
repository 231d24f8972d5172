"""Figures of searches on the zoo's text model: accuracy against passes and positions.

    python -m gen.recipes.text.search_figures            200 held-out tasks
    python -m gen.recipes.text.search_figures --quick    20 of them

The temperature is raised, so that plain samples are often wrong. ``passes`` are forward passes of
all candidates, which for an autoregressive base is the number of tokens that they generate;
``computed`` are all positions sent through the model, prompts included.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from gen.pipeline.pipeline import Pipeline
from gen.recipes.text.calibrate import main as calibrate

BASE = {"base": "autoregressive"}
ALL = 256  # items at a time


def blind(media: Any, prompt: str) -> float:
    """Score every output alike, so that votes alone decide."""
    return 0.0


def searches(calibration: Path | None) -> dict[str, Any]:
    """Samplers by their name in the table."""
    vote = {**BASE, "scorer": blind}
    found: dict[str, Any] = {
        "autoregressive": "autoregressive",
        "best_of 4": {"name": "best_of", "n": 4, **BASE},
        "best_of 8": {"name": "best_of", "n": 8, **BASE},
        "a_star k=2 block=1": {"name": "a_star", "k": 2, "block": 1, **BASE},
        "a_star k=3 block=2": {"name": "a_star", "k": 3, "block": 2, **BASE},
        "a_star k=4 block=2": {"name": "a_star", "k": 4, "block": 2, **BASE},
        "early_answer 1 then 7": {"name": "early_answer", "n": 1, "more": 7, **BASE},
        "iad n=1 rounds=8": {
            "name": "iad",
            "n": 1,
            "rounds": 8,
            "keep": 1.0,
            "value": "process",
            "threshold": 1.0,
            **BASE,
        },
        "majority of 16": {"name": "majority_vote", "n": 16, **vote},
        "deepprune 16, start=1": {"name": "deepprune", "n": 16, "start": 1, **vote},
        "deepprune 16, start=2": {"name": "deepprune", "n": 16, "start": 2, **vote},
        "deepprune 16, start=1 keep=4": {
            "name": "deepprune",
            "n": 16,
            "start": 1,
            "keep": 4,
            **vote,
        },
        "early_answer 3 agreeing, then 13": {
            "name": "early_answer",
            "n": 3,
            "more": 13,
            "threshold": None,
            "agreement": 1.0,
            "aggregation": "majority",
            **vote,
        },
    }
    if calibration is not None:
        found["majority of 4"] = {"name": "majority_vote", "n": 4, **vote}
        found["atts 4, alpha=0.05"] = {
            "name": "atts",
            "n": 4,
            "calibration": str(calibration),
            "alpha": 0.05,
            **vote,
        }
    return found


def measure(pipe: Pipeline, prompts: Sequence[str], spec: Any, temperature: float) -> dict:
    """Measure a sampler: accuracy, and passes and positions per prompt."""
    out = pipe(list(prompts), spec, seed=0, temperature=temperature, batch_size=ALL, progress=False)
    passed = [pipe.modality.check(m, p).passed for m, p in zip(out.media, prompts, strict=True)]
    return {
        "accuracy": float(np.mean(passed)),
        "passes": float(np.mean([s.nfe for s in out.stats])),
        "computed": float(np.mean([s.tokens_computed for s in out.stats])),
        "draft passes": float(np.mean([s.draft_nfe or 0 for s in out.stats])),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=200, help="held-out tasks (200)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.5, 2.0])
    parser.add_argument("--only", default="", help="samplers whose name has this in it")
    parser.add_argument("--quick", action="store_true", help="20 tasks, one temperature")
    args = parser.parse_args(argv)
    pipe = Pipeline("text")
    prompts = pipe.modality.example_prompts(20 if args.quick else args.prompts, 0)
    temperatures = args.temperatures[:1] if args.quick else args.temperatures
    with TemporaryDirectory() as folder:
        for temperature in temperatures:
            quick = ["--quick"] if args.quick else []
            calibrate(["--out", folder, "--temperature", str(temperature), *quick])
            print(f"temperature {temperature:g}, {len(prompts)} held-out tasks")
            for name, spec in searches(Path(folder)).items():
                if args.only in name:
                    found = measure(pipe, prompts, spec, temperature)
                    row = "  ".join(f"{key} {value:.3f}" for key, value in found.items())
                    print(f"{name:34s} {row}", flush=True)


if __name__ == "__main__":
    main()
