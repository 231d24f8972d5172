"""Paired comparison of samplers on one embedded image model: accuracy and cost.

``python -m gen.recipes.image.paired`` decodes held-out captions with every sampler, with several
seeds each, and prints one row per sampler: captions passed (the pixel checker), the paired
difference to the first sampler and its standard error over captions, forward passes as full +
partial, positions computed and their share, milliseconds per image. Samplers are JSON.

Partial forward passes (ReCAP), beside the same sampler without a cache:

    python -m gen.recipes.image.paired --seeds 1 '{"name": "maskgit", "steps": 16}' \\
        '{"name": "maskgit", "steps": 16, "cache": "partial", "cache_warmup": 0}'

Refinement of scales (HMAR), beside the pass that fills alone:

    python -m gen.recipes.image.paired --model image-scales-masked --seeds 5 \\
        '{"name": "next_scale_masked", "schedule": "fill"}' '{"name": "next_scale_masked"}' \\
        '{"name": "next_scale_masked", "schedule": [[1], [4], [9], [16], [18, 18], [32, 32]]}'
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from typing import Any

from gen.modalities.image import captions as shapes
from gen.modalities.image.checker import check_many
from gen.pipeline.pipeline import Pipeline
from gen.recipes.image.figures import BATCH, HELD_OUT_SEED, pixels_of

SAMPLING: dict[str, dict[str, Any]] = {
    "image-masked": {"guidance_scale": 2.0, "top_k": 100},
    "image-mar": {"guidance_scale": 2.0},
    "image-scales": {"guidance_scale": 2.0, "top_k": 100},
    "image-scales-masked": {"guidance_scale": 2.0, "top_k": 100},
}


def measure(
    pipe: Pipeline, sampling: dict[str, Any], captions: list, spec: dict, seeds: int
) -> dict[str, Any]:
    """Decode the captions with every seed; ``passed`` has one share per caption."""
    prompts = [str(c) for c in captions]
    passed, stats = [0.0] * len(captions), []
    for seed in range(seeds):
        out = pipe(prompts, spec, **sampling, seed=seed * len(prompts), batch_size=BATCH)
        verdicts = check_many(pixels_of(out), captions)
        passed = [p + v.passed / seeds for p, v in zip(passed, verdicts, strict=True)]
        stats += out.stats

    def mean(values) -> float:
        return statistics.mean(v or 0 for v in values)

    return {
        "passed": passed,
        "nfe": mean(s.nfe for s in stats),
        "partial": mean(s.partial_nfe for s in stats),
        "computed": mean(s.tokens_computed for s in stats),
        "ms": 1000 * mean(s.seconds for s in stats),
    }


def row(found: dict[str, Any], base: dict[str, Any]) -> str:
    """One line of the table."""
    change = [a - b for a, b in zip(found["passed"], base["passed"], strict=True)]
    error = statistics.stdev(change) / math.sqrt(len(change))
    full = found["nfe"] - found["partial"]
    return (
        f"{statistics.mean(found['passed']):.4f} | {statistics.mean(change):+.4f} +- {error:.4f} |"
        f" {full:g} + {found['partial']:g} | {found['computed']:.0f} |"
        f" {found['computed'] / base['computed']:.3f} | {found['ms']:.1f}"
    )


def main() -> None:
    """Measure the samplers given as JSON; the first is the one that others are compared with."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("specs", nargs="+", help="samplers, as JSON")
    parser.add_argument("--model", default="image-masked", choices=SAMPLING)
    parser.add_argument("--held-out", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    pipe = Pipeline("image", given.model)
    captions = shapes.captions(given.held_out, HELD_OUT_SEED, held=True)
    print("sampler | passed | change | full + partial | computed | share | ms")
    base = None
    for text in given.specs:
        found = measure(pipe, SAMPLING[given.model], captions, json.loads(text), given.seeds)
        base = base or found
        print(f"{text} | {row(found, base)}", flush=True)


if __name__ == "__main__":
    main()
