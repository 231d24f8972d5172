"""Learn2PD's filter for the masked model of any modality: trace its decoding with one position per
forward pass, learn which proposals were already final, and measure decoding with the filter beside
rules without one: thresholds of confidence, and a fixed number of forward passes.

    python -m gen.recipes.learned_filter motion --out W
    python -m gen.recipes.learned_filter motion --out W --quick
    python -m gen.recipes.learned_filter image --out W --passes 64 --tasks 32 --prompts 100
    gen sample motion "a person jumps left twice" --sampler learn2pd sampler.filter=W \\
        sampler.stop=filled --out out/filter

The parts are those of ``gen.recipes.text.filter``, which made the filter of the text model. Prompts
to learn from are none that an evaluation uses. ``--passes`` traces decoding in fewer forward
passes, several positions each, of models with many positions. ``stop: filled`` belongs to tokens
without an eos token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gen.models.load.locate import save_model
from gen.pipeline.pipeline import Pipeline, load
from gen.recipes.common.grid_evaluation import CARD_HEAD
from gen.recipes.drafters.data import held_out_prompts, training_prompts
from gen.recipes.text.filter import ONE_AT_A_TIME, FilterPlan, separation, traces_of, trained
from gen.samplers.masked.methods.learn2pd import PositionFilter

FULL = FilterPlan(tasks=64, steps=1500, held_out=32, rows=16)
QUICK = FilterPlan(tasks=2, steps=20, batch=64, held_out=2, rows=2)
THRESHOLDS = (0.3, 0.5, 0.7, 0.9, 0.96)
FEWER = (2, 4, 8, 16)  # positions per forward pass of the decoders without a threshold
MOST = 400_000  # positions of the traces that are kept


def decoders(
    folder: Path, length: int, ends: bool, traced: int | None = None
) -> dict[str, dict[str, Any]]:
    """Samplers to compare, by their name in tables; the first one is what was traced.

    Args:
        folder: folder of the filter.
        length: positions of an output.
        ends: whether outputs end with an eos token.
        traced: forward passes of the traced decoding; None means one per position.
    """
    stop = {} if ends else {"stop": "filled"}
    filtered = {"name": "learn2pd", "filter": str(folder), **stop}
    traced = length if traced is None else traced
    counts = dict.fromkeys([traced, *(n for k in FEWER if 0 < (n := length // k) < traced)])
    return {
        **{f"llada, {n} passes": ONE_AT_A_TIME | {"steps": n} for n in counts},
        **{f"fast_dllm, {t:g}": {"name": "fast_dllm", "conf_threshold": t} for t in THRESHOLDS},
        **{f"learn2pd, {t:g}": filtered | {"filter_threshold": t} for t in THRESHOLDS},
    }


def decoded(
    pipe: Pipeline, prompts: Sequence[str], specs: dict[str, dict[str, Any]], rows: int
) -> Iterator[tuple[str, dict[str, float]]]:
    """Decode prompts with several samplers.

    Yields:
        By sampler: the share of outputs that pass the modality's checker, the share of tokens equal
        to those of the first sampler, and forward passes.
    """
    reference: torch.Tensor | None = None
    for name, spec in specs.items():
        out = pipe(list(prompts), spec, seed=0, batch_size=rows)
        reference = out.tokens if reference is None else reference
        checked = zip(out.media, prompts, strict=True)
        yield (
            name,
            {
                "passed": statistics.mean(pipe.modality.check(m, p).passed for m, p in checked),
                "same": float((out.tokens == reference).double().mean()),
                "passes": statistics.mean(s.nfe for s in out.stats),
            },
        )


def made(
    pipe: Pipeline, plan: FilterPlan, out: Path, passes: int | None = None
) -> tuple[PositionFilter, dict[str, Any]]:
    """Train a filter; return it and its figures on prompts that it did not see.

    Args:
        pipe: pipeline of the modality.
        plan: sizes.
        out: folder of the filter.
        passes: forward passes of the traced decoding; None means one per position.
    """
    radius = PositionFilter().radius
    _, binding, _ = pipe.bound(pipe.model_name(ONE_AT_A_TIME))
    steps = binding.space.length if passes is None else passes
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
    save_model(model, out)
    return model, separation(model, unseen)


def card(modality: str, model: str, command: str, lines: Sequence[str]) -> str:
    """Return the text of the model card: what the filter is for, and measured tables."""
    return "\n".join(
        [
            f"{CARD_HEAD}# {modality}-filter\n",
            f"A filter of Learn2PD (arXiv 2509.25188) for `{model}`. It predicts which proposals",
            "decoding in more forward passes would keep. Trained on that model's own decoding with",
            f"`{command}`. No other data were used.\n",
            *lines,
            "",
        ]
    )


def tables(pipe: Pipeline, plan: FilterPlan, out: Path, passes: int | None) -> Iterator[str]:
    """Train a filter and measure it; yield the lines of its tables."""
    began = time.time()
    _, figures = made(pipe, plan, out, passes)
    judged = figures.pop("judged")
    yield (
        f"{figures['positions']} masked positions of unseen prompts, {figures['final']:.3f} of"
        f" them final. Cross-entropy per position: {figures['nats']:.3f} nats, and"
        f" {figures['nats_blind']:.3f} for the constant share of final ones."
        f" {time.time() - began:.0f} s.\n"
    )
    yield "| at least | precision | recall |\n| --- | --- | --- |"
    for name, (precision, recall) in judged.items():
        yield f"| {name} | {precision:.3f} | {recall:.3f} |"
    _, binding, _ = pipe.bound(pipe.model_name(ONE_AT_A_TIME))
    # all decoders here are deterministic, so that a prompt counts once
    prompts = list(dict.fromkeys(held_out_prompts(pipe.modality, plan.held_out)))
    specs = decoders(out, binding.space.length, binding.space.eos_token_id is not None, passes)
    yield f"\n{len(prompts)} different held-out prompts:\n"
    yield "| decoder | passed | tokens of the traced decoding | forward passes |"
    yield "| --- | --- | --- | --- |"
    for name, row in decoded(pipe, prompts, specs, plan.rows):
        shares = f"{row['passed']:.3f} | {row['same']:.3f}"
        yield f"| {name} | {shares} | {row['passes']:.1f} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modality")
    parser.add_argument("--out", type=Path, required=True, help="folder of the filter")
    parser.add_argument("--model", help="name of the model (default: the modality's own)")
    parser.add_argument("--quick", action="store_true", help="a smoke run, in seconds")
    parser.add_argument("--passes", type=int, help="forward passes to trace (default: positions)")
    parser.add_argument("--tasks", type=int, help=f"prompts to trace (default: {FULL.tasks})")
    parser.add_argument("--prompts", type=int, help=f"held-out ones (default: {FULL.held_out})")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    plan = QUICK if args.quick else FULL
    plan = replace(plan, tasks=args.tasks or plan.tasks, held_out=args.prompts or plan.held_out)
    pipe, lines = load(args.modality, args.model), []
    for line in tables(pipe, plan, args.out, args.passes):
        print(line, flush=True)
        lines.append(line)
    given = {"passes": args.passes, "tasks": plan.tasks, "prompts": plan.held_out}
    options = "".join(f" --{name} {n}" for name, n in given.items() if n is not None)
    command = f"python -m gen.recipes.learned_filter {args.modality} --out DIR{options}"
    model = args.model or pipe.model_name(ONE_AT_A_TIME)
    (args.out / "README.md").write_text(card(args.modality, model, command, lines))


if __name__ == "__main__":
    main()
