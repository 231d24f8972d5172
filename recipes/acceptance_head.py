"""Train the head of the length policy ``acceptance_head`` for a model and its draft model, and
measure it.

    python -m gen.recipes.acceptance_head text --out W
    gen sample text "sort 3 1 2 =" --sampler speculative sampler.policy=acceptance_head \\
        sampler.acceptance_head=W --out out/head

The model draws sequences for prompts that no evaluation uses. A share of their tokens is replaced
by draws of the draft model, so that the head also sees what follows drafts. At every position the
draft model draws a token, and the head learns the probability min(1, p / q) that it is accepted; a
rejection weighs ``REJECTED`` times an acceptance. ``--quick`` runs the same path in seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.models.draft_heads.predictors import (
    AcceptanceNet,
    acceptance_inputs,
    acceptance_label,
)
from gen.models.targets.trained_drafters import write_drafter
from gen.models.targets.trained_predictors import head_facts
from gen.pipeline.pipeline import Pipeline, load
from gen.recipes.common.train import TrainConfig, fit_average
from gen.recipes.drafters.data import ROWS, Teacher, held_out_prompts, training_prompts

LAYER = "model.norm"
REJECTED, MIXED, DRAWS = 6.0, 0.15, 4  # weight, share of drafts, drafts per position
THRESHOLDS = (0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class HeadPlan:
    """Sizes of the recipe.

    Attributes:
        prompts: sequences of the target.
        steps: steps of training.
        batch: positions per step.
        held_out: prompts of the measurement.
        blocks: residual blocks of the head.
        lr: peak learning rate.
    """

    prompts: int = 2000
    steps: int = 2000
    batch: int = 1024
    held_out: int = 50
    blocks: int = 2
    lr: float = 3e-3


QUICK = HeadPlan(prompts=12, steps=20, batch=64, held_out=2)


@dataclass(frozen=True)
class DraftedTokens:
    """Drafts with what a head reads of them.

    Attributes:
        inputs: float32 [n, D + 2].
        label: probability that each is accepted, float32 [n].
    """

    inputs: Tensor
    label: Tensor


def drafted(target: Teacher, draft: Teacher, tokens: Tensor, seed: int) -> DraftedTokens:
    """Draw drafts along sequences and label them.

    Args:
        target: the model.
        draft: the draft model with the same prompts.
        tokens: sequences of the model, long [N, T].
        seed: seed of the draws.
    """
    generator, parts = torch.Generator().manual_seed(seed), []

    def draw(logq: Tensor) -> Tensor:
        q = logq.exp().flatten(0, -2)
        return torch.multinomial(q, 1, generator=generator).view(logq.shape[:-1])

    for rows in torch.arange(len(tokens)).split(ROWS):
        some = tokens[rows]
        drawn = draw(draft.batch(rows, some).logp)
        mixed = torch.rand(some.shape, generator=generator) < MIXED
        some = torch.where(mixed, drawn, some)
        theirs, ours = draft.batch(rows, some), target.batch(rows, some)
        on = (ours.weight > 0) & ours.logp.isfinite().any(-1)
        logq, logp, states = theirs.logp[on], ours.logp[on], theirs.states[LAYER][on]
        for _ in range(DRAWS):
            ids = draw(logq)
            mass = logq.gather(-1, ids[:, None])[:, 0].exp()
            label = acceptance_label(logp, logq, ids)
            parts.append(DraftedTokens(acceptance_inputs(states, mass, logq), label))
    return DraftedTokens(torch.cat([p.inputs for p in parts]), torch.cat([p.label for p in parts]))


def head_loss(logits: Tensor, label: Tensor) -> Tensor:
    """Compute the weighted binary cross-entropy of logits [n] for labels [n], in nats."""
    accepted, rejected = F.logsigmoid(logits), F.logsigmoid(-logits)
    return -(label * accepted + REJECTED * (1 - label) * rejected).mean()


def trained(data: DraftedTokens, plan: HeadPlan, work: Path, log: Callable) -> AcceptanceNet:
    """Train a head on drafts; ``work`` is the folder of its checkpoint."""
    generator = torch.Generator().manual_seed(2)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            some = torch.randint(len(data.label), (plan.batch,), generator=generator)
            yield data.inputs[some], data.label[some]

    def loss(model, batch):
        x, label = batch
        return head_loss(model(x).float(), label), {}

    torch.manual_seed(0)
    net = AcceptanceNet(data.inputs.shape[1] - 2, plan.blocks)
    config = TrainConfig(steps=plan.steps, lr=plan.lr, log_every=500)
    fit_average(net, batches(), loss, config, out=work, log=log)
    return net.eval().requires_grad_(False)


def measured(pipe: Pipeline, prompts: Sequence[str], spec: dict[str, Any]) -> dict[str, float]:
    """Decode prompts: mean tokens, passes of target and draft model, and accepted drafts."""
    out = pipe(list(prompts), {"name": "speculative", **spec}, seed=0, batch_size=25)
    tokens, passes = (sum(vars(s)[k] for s in out.stats) for k in ("tokens", "nfe"))
    rates = [s.draft_acceptance_rate for s in out.stats if s.draft_acceptance_rate is not None]
    return {
        "passes": passes / len(out.stats),
        "draft passes": statistics.mean(s.draft_nfe or 0 for s in out.stats),
        "tokens per pass": tokens / passes,
        "accepted": statistics.mean(rates) if rates else 0.0,
    }


def policies(folder: Path) -> dict[str, dict[str, Any]]:
    """Policies to compare, by their name in tables."""
    longest = {"num_speculative_tokens": 20}
    rows: dict[str, dict[str, Any]] = {
        f"constant, {k}": {"num_speculative_tokens": k} for k in (3, 5, 8, 20)
    }
    for h in THRESHOLDS:
        threshold = longest | {"rejection_threshold": h}
        rows[f"joint_confidence, {h:g}"] = threshold | {"policy": "joint_confidence"}
        head = {"policy": "acceptance_head", "acceptance_head": str(folder)}
        rows[f"acceptance_head, {h:g}"] = threshold | head
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modality")
    parser.add_argument("--out", type=Path, required=True, help="folder of the head")
    parser.add_argument("--model", help="name of the model (default: the modality's own)")
    parser.add_argument("--draft-model", help="name of its draft model (default: MODALITY-draft)")
    parser.add_argument("--prompts", type=int, default=HeadPlan.prompts, help="sequences (2000)")
    parser.add_argument("--quick", action="store_true", help="a smoke run, in seconds")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    plan, began = QUICK if args.quick else HeadPlan(prompts=args.prompts), time.time()
    pipe = load(args.modality, args.model)
    draft = load(args.modality, args.draft_model or f"{args.modality}-draft")
    prompts = training_prompts(pipe.modality, plan.prompts)
    teacher, drafter = Teacher(pipe, prompts), Teacher(draft, prompts, (LAYER,))
    data = drafted(teacher, drafter, teacher.sample(), seed=3)
    made = time.time()
    net = trained(data, plan, args.out / "work", print)
    facts = head_facts(teacher.target, drafter.target, LAYER, plan.blocks)
    write_drafter(args.out, facts, net.state_dict())
    figures = {
        "drafts": len(data.label),
        "accepted": round(float(data.label.mean()), 3),
        "parameters": sum(p.numel() for p in net.parameters()),
        "seconds of data": round(made - began),
        "seconds of training": round(time.time() - made),
    }
    print(json.dumps(figures))
    held = held_out_prompts(pipe.modality, plan.held_out)
    named = {"draft_model": args.draft_model} if args.draft_model else {}
    print("| policy | target passes | draft passes | tokens per pass | accepted |")
    print("| --- | --- | --- | --- | --- |")
    for name, spec in policies(args.out).items():
        row = measured(pipe, held, spec | named)
        cells = f"{row['passes']:.2f} | {row['draft passes']:.1f} | {row['tokens per pass']:.2f}"
        print(f"| `{name}` | {cells} | {row['accepted']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
