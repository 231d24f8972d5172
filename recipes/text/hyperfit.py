"""Hyperfitting of the text model: a fine-tune on a small set to a loss near zero, and what it does.

    python -m gen.recipes.text.hyperfit --work DIR            the run of the documented figures
    python -m gen.recipes.text.hyperfit --work DIR --quick    a smoke run of the same path

Carlsson et al. ("The Hyperfitting Phenomenon", arXiv 2412.04318) find that a model which has
learned a small set by heart writes with low entropy and yet not worse. This recipe trains
``text-causal`` on a few hundred tasks until it knows their answers, and measures both models on
held-out tasks at temperature 1: accuracy, that of the likeliest words, the entropy of a word, how
many different answers a task gets, and the acceptance of drafts, those of the draft model and those
of Jacobi iterations. ``hyperfit.json`` in DIR has the figures; the model is in ``DIR/model``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from gen.core.stats import Stats
from gen.modalities.text import tasks as text_tasks
from gen.models.load.locate import locate, quiet, save_model
from gen.models.nets.grid import GridLlamaForCausalLM
from gen.pipeline.pipeline import Pipeline
from gen.recipes.common.grid_models import causal_loss
from gen.recipes.common.train import TrainConfig, fit
from gen.recipes.text.data import drawn
from gen.recipes.text.recipe import SHAPE, text_codes

MODEL, SEED, HELD = "text-causal", 91, 123


@dataclass(frozen=True)
class Plan:
    """Sizes of the recipe.

    Attributes:
        tasks: tasks that are learned by heart.
        steps: updates, each on a batch of them.
        batch: tasks of an update.
        held: held-out tasks to measure on.
        samples: answers per task.
        lr: peak learning rate.
    """

    tasks: int = 256
    steps: int = 200
    batch: int = 64
    held: int = 200
    samples: int = 4
    lr: float = 5e-4


QUICK = Plan(tasks=8, steps=4, batch=4, held=3, samples=2)


def batches(codes: Tensor, slots: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (condition words [B, P], codes [B, T]), each task once per epoch."""
    generator = torch.Generator().manual_seed(SEED)
    while True:
        for rows in torch.randperm(len(codes), generator=generator).split(size):
            if len(rows) == size:
                yield slots[rows].long(), codes[rows].long()


def loaded(model: str) -> GridLlamaForCausalLM:
    """Load a model of the zoo or of a folder in float32."""
    with quiet():
        return GridLlamaForCausalLM.from_pretrained(locate(model), dtype=torch.float32)


def hyperfit(work: Path, plan: Plan, log: Any = print) -> dict[str, float]:
    """Train the model on few tasks and save it as ``work / "model"``. Returns its loss on these
    tasks ``before`` and ``after``."""
    model = loaded(MODEL)
    codes, slots = text_codes(drawn(plan.tasks, SEED))
    loss = causal_loss(SHAPE)

    def on_all() -> float:
        model.eval()
        with torch.no_grad():
            found = loss(model, (slots.long(), codes.long()))[0].item()
        model.train()
        return found

    before = on_all()
    config = TrainConfig(
        steps=plan.steps, lr=plan.lr, weight_decay=0.0, bfloat16_weights=True, save_every=250
    )
    fit(model, batches(codes, slots, plan.batch), loss, config, out=work, log=log)
    after = on_all()
    save_model(model, work / "model")
    return {"before": before, "after": after}


def measure(model: str | None, plan: Plan) -> dict[str, float]:
    """Measure a model on held-out tasks.

    Args:
        model: folder; None for the model of the zoo.
        plan: sizes.

    Returns:
        ``accuracy``, ``greedy`` (accuracy of the likeliest words), ``entropy`` of a word in nats,
        ``distinct`` (share of different answers among those of a task), ``of_shuffle`` (the same
        where every permutation is right), ``acceptance`` of the draft model's drafts, and
        ``speculative`` and ``jacobi``, tokens per forward pass.
    """
    pipe = Pipeline("text", model)
    prompts = [str(t) for t in text_tasks.tasks(plan.held, HELD, held=True)]
    many = {"num_samples": plan.samples, "seed": 0, "temperature": 1.0, "batch_size": 64}
    out = pipe(prompts, "autoregressive", **many)
    answers = [out.media[i : i + plan.samples] for i in range(0, len(out.media), plan.samples)]
    greedy = pipe(prompts, "autoregressive", seed=0, top_k=1, batch_size=64)
    shuffles = [a for a, p in zip(answers, prompts, strict=True) if p.startswith("shuffle")]
    drafted, jacobi = (
        pipe(prompts, sampler, seed=0, temperature=1.0, batch_size=64).stats
        for sampler in ("speculative", "speculative_jacobi")
    )
    rates = [s.draft_acceptance_rate for s in drafted if s.draft_acceptance_rate is not None]
    return {
        "accuracy": mean(
            pipe.modality.check(a, p).passed
            for some, p in zip(answers, prompts, strict=True)
            for a in some
        ),
        "greedy": mean(
            pipe.modality.check(a, p).passed for a, p in zip(greedy.media, prompts, strict=True)
        ),
        "entropy": entropy(pipe, prompts, out.tokens, plan.samples),
        "distinct": distinct(answers),
        "of_shuffle": distinct(shuffles) if shuffles else float("nan"),
        "acceptance": mean(rates),
        "speculative": per_pass(drafted),
        "jacobi": per_pass(jacobi),
    }


def distinct(answers: Sequence[Sequence[str]]) -> float:
    """Share of different answers among those of a task, between 1 / samples and 1."""
    return mean(len(set(some)) / len(some) for some in answers)


def per_pass(stats: Sequence[Stats]) -> float:
    """Tokens per forward pass of the target, over all items."""
    return sum(s.tokens for s in stats) / sum(s.nfe for s in stats)


@torch.no_grad()
def entropy(pipe: Pipeline, prompts: list[str], tokens: Tensor, samples: int) -> float:
    """Mean entropy of a word in nats, given those before it, over outputs with their eos token."""
    name = pipe.model_name("autoregressive")
    net, binding = loaded(name).eval(), pipe.binding(name)[0]
    slots = [binding.prompt(pipe.modality.condition(p)) for p in prompts for _ in range(samples)]
    ids = torch.cat([torch.tensor(slots), tokens[:, :-1]], 1)
    logits = net(input_ids=ids, logits_to_keep=tokens.shape[1], use_cache=False).logits.float()
    legal = binding.space.legal
    logp = logits.masked_fill(~legal, float("-inf")).log_softmax(-1)
    each = -(logp.exp() * logp.masked_fill(~legal, 0)).sum(-1)
    ended = (tokens == binding.space.eos_token_id).long().cumsum(1)
    counted = (ended == 0) | ((ended == 1) & (tokens == binding.space.eos_token_id))
    return float(each[counted].mean())


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out the recipe of a command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="run all stages briefly")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    plan = QUICK if args.quick else Plan()
    loss = hyperfit(args.work, plan)
    found = {
        "tasks": plan.tasks,
        "held_out": plan.held,
        "samples": plan.samples,
        "loss": loss,
        "before": measure(None, plan),
        "after": measure(str(args.work / "model"), plan),
    }
    (args.work / "hyperfit.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"loss on the {plan.tasks} tasks: {loss['before']:.4f} -> {loss['after']:.4f}")
    for name, value in found["before"].items():
        print(f"{name:12} {value:.4f} -> {found['after'][name]:.4f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
