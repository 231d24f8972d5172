"""Prompt accuracy of best of n, rated by the modality's checker, on held-out conditions.

    python -m gen.recipes.best_of image --count 200
    python -m gen.recipes.best_of image --model image-causal-latents --n 8 --count 200

The first candidate of every item is the sample of the base with that seed, so that one run gives
the accuracy of both.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

from gen.pipeline.pipeline import Pipeline, load
from gen.recipes.image.figures import HELD_OUT_SEED
from gen.recipes.tables import CONDITIONS

OTHER_SEED = 123  # of held-out conditions of the other modalities, as in their evaluations
BATCH = 20


def prompts_of(pipe: Pipeline, modality: str, count: int) -> list[str]:
    """Return held-out conditions, or prompts to measure with where none are held out."""
    if modality in CONDITIONS:
        seed = HELD_OUT_SEED if modality == "image" else OTHER_SEED
        return [str(c) for c in CONDITIONS[modality](count, seed, held=True)]
    return pipe.modality.example_prompts(count, OTHER_SEED)


def accuracy(modality: str, model: str | None, base: Any, n: int, count: int) -> dict[str, float]:
    """Measure prompt accuracy and forward passes of best of n, and print them as they grow."""
    pipe = load(modality, model)
    prompts = prompts_of(pipe, modality, count)
    check, began = pipe.modality.check, time.time()
    spec = {"name": "best_of", "n": n, **({} if base is None else {"base": base})}
    first = best = done = 0
    passes = 0.0
    for i in range(0, len(prompts), BATCH):
        out = pipe(prompts[i : i + BATCH], spec, seed=0, batch_size=BATCH, progress=False)
        assert out.candidates is not None, "a search has candidates"
        for item, candidates, media in zip(out.items, out.candidates, out.media, strict=True):
            first += check(candidates[0].media, item.prompt).passed
            best += check(media, item.prompt).passed
        passes += sum(s.nfe for s in out.stats)
        done += len(out)
        print(
            f"{done} of {len(prompts)}: base {first / done:.3f}, best of {n} {best / done:.3f},"
            f" {passes / done:.1f} forward passes, {time.time() - began:.0f} s",
            flush=True,
        )
    return {"base": first / done, "best_of": best / done, "passes": passes / done}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modality")
    parser.add_argument("--model", default=None, help="zoo name or folder")
    parser.add_argument("--base", type=json.loads, default=None, help="sampler as JSON")
    parser.add_argument("--n", type=int, default=4, help="candidates (4)")
    parser.add_argument("--count", type=int, default=200, help="conditions (200)")
    args = parser.parse_args(argv)
    accuracy(args.modality, args.model, args.base, args.n, args.count)


if __name__ == "__main__":
    main()
