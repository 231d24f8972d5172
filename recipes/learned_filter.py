"""Learn2PD's filter for the masked model of any modality: trace its decoding with one position per
forward pass, learn which proposals were already final, and measure decoding with the filter.

    python -m gen.recipes.learned_filter motion --out W
    python -m gen.recipes.learned_filter motion --out W --quick
    gen sample motion "a person jumps left twice" --sampler learn2pd sampler.filter=W \\
        sampler.stop=filled --out out/filter

The parts are those of ``gen.recipes.text.filter``, which made the filter of the text model. Prompts
to learn from are none that an evaluation uses. ``stop: filled`` belongs to tokens without an eos
token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gen.pipeline.pipeline import Pipeline, load
from gen.recipes.drafters.data import held_out_prompts, training_prompts
from gen.recipes.text.filter import ONE_AT_A_TIME, FilterPlan, separation, traces_of, trained
from gen.samplers.masked.methods.learn2pd import PositionFilter

FULL = FilterPlan(tasks=64, steps=1500, held_out=32, rows=16)
QUICK = FilterPlan(tasks=2, steps=20, batch=64, held_out=2, rows=2)
THRESHOLDS = (0.5, 0.7, 0.9, 0.96)
MOST = 400_000  # positions of the traces that are kept


def decoders(folder: Path, steps: int, ends: bool) -> dict[str, dict[str, Any]]:
    """Samplers to compare, by their name in tables.

    Args:
        folder: folder of the filter.
        steps: positions of an output.
        ends: whether outputs end with an eos token.
    """
    stop = {} if ends else {"stop": "filled"}
    filtered = {"name": "learn2pd", "filter": str(folder), **stop}
    return {
        "llada, one position per pass": ONE_AT_A_TIME | {"steps": steps},
        **{f"fast_dllm, {t:g}": {"name": "fast_dllm", "conf_threshold": t} for t in (0.9, 0.5)},
        **{f"learn2pd, {t:g}": filtered | {"filter_threshold": t} for t in THRESHOLDS},
    }


def decoded(
    pipe: Pipeline, prompts: Sequence[str], specs: dict[str, dict[str, Any]], rows: int
) -> dict[str, dict[str, float]]:
    """Decode prompts with several samplers.

    Returns:
        By sampler: the share of outputs that pass the modality's checker, the share of tokens equal
        to those of the first sampler, and forward passes.
    """
    found: dict[str, dict[str, float]] = {}
    reference: torch.Tensor | None = None
    for name, spec in specs.items():
        out = pipe(list(prompts), spec, seed=0, batch_size=rows)
        reference = out.tokens if reference is None else reference
        checked = zip(out.media, prompts, strict=True)
        found[name] = {
            "passed": statistics.mean(pipe.modality.check(m, p).passed for m, p in checked),
            "same": float((out.tokens == reference).double().mean()),
            "passes": statistics.mean(s.nfe for s in out.stats),
        }
    return found


def made(pipe: Pipeline, plan: FilterPlan, out: Path) -> tuple[PositionFilter, dict[str, Any]]:
    """Train a filter; return it and its figures on prompts that it did not see."""
    radius = PositionFilter().radius
    _, binding, _ = pipe.bound(pipe.model_name(ONE_AT_A_TIME))
    steps = binding.space.length
    seen, unseen = (
        traces_of(pipe, prompts, plan, radius, steps)
        for prompts in (
            training_prompts(pipe.modality, plan.tasks),
            held_out_prompts(pipe.modality, max(2, plan.held_out // 4)),
        )
    )
    some = torch.randperm(len(seen.x), generator=torch.Generator().manual_seed(1))[:MOST]
    seen = type(seen)(seen.x[some], seen.c[some], seen.final[some])
    model = trained(seen, radius, plan, out / "work")
    model.save_pretrained(out)
    return model, separation(model, unseen)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modality")
    parser.add_argument("--out", type=Path, required=True, help="folder of the filter")
    parser.add_argument("--model", help="name of the model (default: the modality's own)")
    parser.add_argument("--quick", action="store_true", help="a smoke run, in seconds")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    plan, began = QUICK if args.quick else FULL, time.time()
    pipe = load(args.modality, args.model)
    _, figures = made(pipe, plan, args.out)
    judged = figures.pop("judged")
    print(json.dumps(figures | {"seconds": round(time.time() - began)}), flush=True)
    for name, (precision, recall) in judged.items():
        print(f"| {name} | {precision:.3f} | {recall:.3f} |")
    _, binding, _ = pipe.bound(pipe.model_name(ONE_AT_A_TIME))
    space, prompts = binding.space, held_out_prompts(pipe.modality, plan.held_out)
    specs = decoders(args.out, space.length, space.eos_token_id is not None)
    print("| decoder | passed | tokens of one position per pass | forward passes |")
    print("| --- | --- | --- | --- |")
    for name, row in decoded(pipe, prompts, specs, plan.rows).items():
        print(f"| {name} | {row['passed']:.3f} | {row['same']:.3f} | {row['passes']:.1f} |")


if __name__ == "__main__":
    main()
