"""Forward passes of Jacobi decoding with drafts of a model and of a table, on held-out conditions.

    python -m gen.recipes.drafted_jacobi image --count 200    the rows of docs/results.md
    python -m gen.recipes.drafted_jacobi speech --count 50 --samplers '{"init": "model"}'

Everything runs in float64 with the modality's default sampling parameters, one sample per
condition, and is compared with the tokens of ``autoregressive``. ``--samplers`` are parameters of
``speculative_jacobi``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import torch

from gen.core.stats import SampleOutput
from gen.pipeline.pipeline import Pipeline, load
from gen.recipes.image.figures import HELD_OUT_SEED
from gen.recipes.tables import CONDITIONS

SAMPLERS: tuple[dict[str, Any], ...] = (
    {},
    {"init": "table"},
    {"init": "model", "redraft": False, "draft_rounds": None},
    {"init": "model"},
    {"init": "model", "draft_rounds": None},
    {"init": "model_table"},
    {"init": "model_table", "window": 96},
)
OTHER_SEED = 123  # of held-out conditions of the other modalities, as in their evaluations


def decode(pipe: Pipeline, prompts: list[str], spec: dict[str, Any], batch: int) -> SampleOutput:
    """Decode one sample per prompt, ``batch`` of them at a time."""
    items, (sampler, sampling) = pipe.plan(prompts), pipe.resolve(spec)
    parts = [
        pipe.generate(items[i : i + batch], sampler, sampling) for i in range(0, len(items), batch)
    ]
    return SampleOutput(torch.cat([p.tokens for p in parts]), [s for p in parts for s in p.stats])


def measure(modality: str, count: int, samplers: Sequence[dict[str, Any]], batch: int) -> None:
    """Print a row for each sampler: forward passes, those of the draft model, equal samples."""
    seed = HELD_OUT_SEED if modality == "image" else OTHER_SEED
    prompts = [str(c) for c in CONDITIONS[modality](count, seed, held=True)]
    pipe = load(modality, dtype="float64")
    reference = decode(pipe, prompts, {"name": "autoregressive"}, batch)
    plain = mean(s.nfe for s in reference.stats)
    print("| parameters | forward passes, mean (median, max) | of the draft model | fewer passes |"
          " same tokens | seconds |\n| --- | --- | --- | --- | --- | --- |")  # fmt: skip
    for params in samplers:
        began = time.time()
        out = decode(pipe, prompts, {"name": "speculative_jacobi", **params}, batch)
        nfe = [s.nfe for s in out.stats]
        draft = [s.draft_nfe for s in out.stats if s.draft_nfe is not None]
        same = int((out.tokens == reference.tokens).all(1).sum())
        print(
            f"| `{json.dumps(params)}` | {mean(nfe):.1f} ({median(nfe):g}, {max(nfe)}) |"
            f" {f'{mean(draft):.1f}' if draft else '-'} | {plain / mean(nfe):.1f}x |"
            f" {same} of {count} | {time.time() - began:.0f} |",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modality", choices=list(CONDITIONS))
    parser.add_argument("--count", type=int, default=200, help="held-out conditions (200)")
    parser.add_argument("--batch", type=int, default=50, help="items decoded together (50)")
    parser.add_argument("--samplers", type=json.loads, nargs="+", default=SAMPLERS)
    args = parser.parse_args(argv)
    measure(args.modality, args.count, args.samplers, args.batch)


if __name__ == "__main__":
    main()
