"""Calibration of ATTS for a text model and its draft model: scores of right drafts.

    python -m gen.recipes.text.calibrate --out DIR            the calibration of the figures
    python -m gen.recipes.text.calibrate --out DIR --quick    a smoke run of the same path

The draft model answers training tasks, none of them held out; every right answer is scored by its
mean log-probability under the target (``gen.samplers.search.atts``). A right draft of another such
task is then rejected with probability alpha at most. Temperature and models must be those of the
calls that use the file.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from gen.core.resolve import resolve_sampler
from gen.modalities.text import tasks as text_tasks
from gen.pipeline.pipeline import Pipeline
from gen.samplers.search.atts import critical_score, likelihood, save_calibration

SEED, SAMPLES, BATCH = 91, 1, 200
SAMPLER = "autoregressive"


def right_scores(
    pipe: Pipeline, draft_model: str, prompts: Sequence[str], temperature: float
) -> np.ndarray:
    """Score the right drafts among those of prompts: float64 [m], at most one per prompt."""
    drafts = Pipeline("text", draft_model)(
        prompts, SAMPLER, seed=0, temperature=temperature, batch_size=BATCH, progress=False
    )
    sampler, sampling = resolve_sampler(SAMPLER, {"temperature": temperature})
    found = []
    for first in range(0, len(prompts), BATCH):
        items = pipe.plan(list(prompts[first : first + BATCH]))
        target = pipe.target(sampler, sampling, items)
        scores, _ = likelihood(target, drafts.tokens[first : first + BATCH])
        for item, media, score in zip(items, drafts.media[first:], scores, strict=False):
            if pipe.modality.check(media, item.prompt).passed:
                found.append(float(score))
    return np.asarray(found)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the calibration")
    parser.add_argument("--draft-model", default="text-draft", help="draft model (text-draft)")
    parser.add_argument("--tasks", type=int, default=600, help="training tasks (600)")
    parser.add_argument("--temperature", type=float, default=1.0, help="temperature (1)")
    parser.add_argument("--alpha", type=float, default=0.05, help="share to reject (0.05)")
    parser.add_argument("--quick", action="store_true", help="a few tasks")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    count = 40 if args.quick else args.tasks
    prompts = [str(t) for t in text_tasks.tasks(count, SEED, held=False)]
    pipe = Pipeline("text")
    scores = right_scores(pipe, args.draft_model, prompts, args.temperature)
    save_calibration(args.out, scores)
    held = right_scores(
        pipe, args.draft_model, pipe.modality.example_prompts(count, 0), args.temperature
    )
    kept = float((held > critical_score(scores, args.alpha)).mean())
    print(
        f"{len(scores)} right drafts of {count} training tasks; of {len(held)} right drafts of"
        f" held-out tasks {kept:.3f} are kept at alpha {args.alpha:g}"
    )


if __name__ == "__main__":
    main()
