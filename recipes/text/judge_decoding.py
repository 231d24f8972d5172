"""Probe of judge decoding for a causal text model: which drafts are right, by the checker.

    python -m gen.recipes.text.judge_decoding --out DIR            the run that made
                                                                   gen/zoo/text-judge-probe
    python -m gen.recipes.text.judge_decoding --out DIR --quick    a smoke run of the same path

Training tasks, most of which have several right answers, are answered by the target up to a random
position, half of them up to none, as a first round is; and from there by the draft model, half of
them with its argmax tokens. A draft is right if the target's greedy continuation of
it passes the checker; what follows a wrong draft is left out, and so are beginnings that the target
fails from. The probe (``gen.samplers.verifiers.relaxed.judge``) is a logistic regression on the
target's hidden states and distributions at the drafts. No task is held out of these; a
tenth of them is kept for the measurement that is printed, and ``evaluate`` decodes held-out tasks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.sampling_params import SamplingParams
from gen.modalities.small_language import draw_conditions
from gen.modalities.text import tasks as text_tasks
from gen.models.draft_heads.predictors import probe_inputs
from gen.models.targets.causal import CausalTarget
from gen.models.targets.identity import distribution_of, target_digest
from gen.models.targets.trained_predictors import Probe
from gen.pipeline.output import ItemPlan
from gen.pipeline.pipeline import Pipeline
from gen.recipes.common.grid_evaluation import CARD_HEAD
from gen.samplers.verifiers.relaxed.judge import LAYER

NAME, SEED, RIDGE, STEPS = "text-judge-probe", 31, 1e-4, 100
KEPT = 0.1  # share of the tasks that the fit does not see
BEGINNINGS = 0.5  # share of the tasks that are drafted from their first word on
WRONG = 20.0  # weight of a wrong draft in the fit; that of a right one is 1
RELAXATIONS = (0.1, 0.2, 0.3, 0.5)
MANY = text_tasks.RANDOM  # tasks with several right answers
# draft temperature and relaxation
COMPARED = ((1.0, 0.0), (1.0, 0.2), (0.0, 0.0), *((0.0, r) for r in RELAXATIONS))
# of training tasks; whether an order is the given one is the hardest to judge
OPS = (*text_tasks.OPS, *MANY, *MANY, *["shuffle"] * 4)
DRAFTED = {"name": "relaxed_acceptance", "verifier": "judge", "drafter": "model"}


@dataclass(frozen=True)
class JudgePlan:
    """Sizes of the recipe.

    Attributes:
        tasks: training tasks.
        held_out: held-out tasks of each measurement.
        rows: rows that are decoded together.
    """

    tasks: int = 6000
    held_out: int = 200
    rows: int = 500


QUICK = JudgePlan(tasks=150, held_out=6, rows=150)


@dataclass(frozen=True)
class LabelledDrafts:
    """Drafts with what a probe reads of them.

    Attributes:
        inputs: float32 [n, D + 3], inputs of the probe (``probe_inputs``).
        right: bool [n].
        task: number of each draft's task, long [n].
    """

    inputs: Tensor
    right: Tensor
    task: Tensor


class Models:
    """A causal model and its draft model, which continue answers of any tasks.

    Args:
        pipe: pipeline of the model.
        draft: name or folder of the draft model.
        seed: seed of the draws.
    """

    def __init__(self, pipe: Pipeline, draft: str, seed: int = SEED):
        self.pipe, self.draft = pipe, draft
        self.sampler, self.sampling = pipe.resolve({"name": "autoregressive"}, None)
        self.generator = torch.Generator().manual_seed(seed)

    def target(self, items: Sequence[ItemPlan], temperature: float, drafts: bool = False):
        """Make a fresh target of some items."""
        sampling: SamplingParams = replace(self.sampling, temperature=temperature)
        name = self.draft if drafts else None
        return self.pipe.target(self.sampler, sampling, items, name)

    def continued(self, target: CausalTarget, tokens: Tensor, start: Tensor) -> Tensor:
        """Replace the tokens [B, T] from position ``start``, long [B], on by the target's draws;
        behind an eos token stand eos tokens."""
        tokens, end = tokens.clone(), target.space.eos_token_id
        for position in range(tokens.shape[1]):
            before = tokens[:, max(0, position - 1), None]
            at = torch.full_like(before, position)
            logprobs = target.predict(before, at).logprobs[:, 0]
            ids = torch.multinomial(logprobs.exp(), 1, generator=self.generator)[:, 0]
            if position:
                ids = torch.where(before[:, 0] == end, before[:, 0], ids)
            tokens[:, position] = torch.where(start <= position, ids, tokens[:, position])
        return tokens

    def passes(self, items: Sequence[ItemPlan], tokens: Tensor, start: Tensor) -> Tensor:
        """Say whether greedy continuations of the first ``start`` tokens pass: bool [B]."""
        target = self.target(items, 0.0)
        whole, space = self.continued(target, tokens, start), target.space
        frontend = self.pipe.bound(target.name)[2]
        media = [self.pipe.decode(row, space, frontend) for row in whole]
        check = self.pipe.modality.check
        verdicts = [check(m, i.prompt).passed for m, i in zip(media, items, strict=True)]
        return torch.tensor(verdicts)

    def inputs(self, items: Sequence[ItemPlan], tokens: Tensor, layer: str) -> Tensor:
        """Compute the inputs of a probe at every token but the last, [B, T - 1, D + 3]."""
        target = self.target(items, self.sampling.temperature)
        target.require_hidden_states((layer,), "a judge")
        before = torch.cat([tokens[:, :1], tokens[:, :-1]], 1)
        at = torch.arange(tokens.shape[1]).expand_as(before)
        output = target.predict(before, at)
        assert output.hidden_states is not None, "they were asked for"
        return probe_inputs(
            output.hidden_states[layer][:, 1:], output.logprobs[:, :-1], tokens[:, :-1]
        )


def training_prompts(count: int) -> list[str]:
    """Draw prompts of tasks that are not held out."""

    def task(rng: np.random.Generator) -> text_tasks.Task:
        return text_tasks.random_task(rng, OPS)

    return [str(t) for t in draw_conditions(count, SEED, task, False)]


def labelled(models: Models, prompts: Sequence[str], first: int, rows: int) -> LabelledDrafts:
    """Draft answers of some prompts and label the drafts.

    Args:
        models: target and draft model.
        prompts: prompts of the tasks.
        first: number of the first task.
        rows: rows that are decoded together.
    """
    items = models.pipe.plan(list(prompts))
    target = models.target(items, 1.0)
    count, length, end = len(items), target.length, target.space.eos_token_id
    blank, nothing = torch.zeros(count, length).long(), torch.zeros(count).long()
    answers = models.continued(target, blank, nothing)
    lengths = (answers != end).sum(1) + 1
    cut = (torch.rand(count, generator=models.generator) * lengths).long()
    cut = cut.masked_fill(torch.rand(count, generator=models.generator) < BEGINNINGS, 0)
    half = count // 2
    drafted = torch.cat(
        [
            models.continued(models.target(items[a:b], t, True), answers[a:b], cut[a:b])
            for a, b, t in ((0, half, 0.0), (half, count, 1.0))
        ]
    )
    inputs = models.inputs(items, drafted, LAYER)
    # a beginning of ``kept`` tokens ends with the draft kept - 1; the first one has no draft
    last = ((drafted != end).sum(1) + 1).clamp_max(length - 1)
    kept = torch.arange(length)
    row, kept = ((kept >= cut[:, None]) & (kept <= last[:, None])).nonzero(as_tuple=True)
    passed = torch.cat(
        [
            models.passes([items[i] for i in r.tolist()], drafted[r], k)
            for r, k in zip(row.split(rows), kept.split(rows), strict=True)
        ]
    )
    table = torch.zeros(count, length, dtype=torch.bool)
    table[row, kept] = passed
    # right before, and so the first wrong draft is the last one that counts
    before = table.long().masked_fill(torch.arange(length) < cut[:, None], 1).cumprod(1).bool()
    counts = (kept > cut[row]) & before[row, kept - 1]
    row, kept = row[counts], kept[counts]
    return LabelledDrafts(inputs[row, kept - 1], table[row, kept], first + row)


def fit(data: LabelledDrafts) -> tuple[Tensor, Tensor]:
    """Fit a logistic regression with a small ridge, in which wrong drafts weigh more: weights [D +
    3] and bias []."""
    x, y = data.inputs.double(), data.right.double()
    cost = torch.where(data.right, 1.0, WRONG).double()
    mean, scale = x.mean(0), x.std(0).clamp_min(1e-6)
    z = (x - mean) / scale
    weight = torch.zeros(x.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = z @ weight[:-1] + weight[-1]
        value = F.binary_cross_entropy_with_logits(logits, y, cost)
        value = value + RIDGE / 2 * weight[:-1].square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    found = weight.detach()[:-1] / scale
    return found.float(), (weight.detach()[-1] - (found * mean).sum()).float()


def separation(probe: Probe, data: LabelledDrafts) -> dict[str, float]:
    """Measure a probe on drafts: their number, the share of right ones, and of every relaxation the
    shares of right and of wrong drafts that it accepts."""
    score, right = probe.probability(data.inputs), data.right
    found = {"drafts": float(len(right)), "right": float(right.float().mean())}
    for r in RELAXATIONS:
        taken = (score > 1 - r).float()
        found[f"right taken, {r:g}"] = float(taken[right].mean())
        found[f"wrong taken, {r:g}"] = float(taken[~right].mean())
    return found


def trained(pipe: Pipeline, draft: str, plan: JudgePlan) -> tuple[Probe, dict[str, float]]:
    """Fit a probe: it, and what it does on drafts that the fit did not see."""
    models = Models(pipe, draft)
    prompts = training_prompts(plan.tasks)
    starts = range(0, len(prompts), plan.rows)
    parts = [labelled(models, prompts[a : a + plan.rows], a, plan.rows) for a in starts]
    inputs, right, task = (torch.cat([vars(p)[n] for p in parts]) for n in vars(parts[0]))
    seen = task >= KEPT * len(prompts)
    weight, bias = fit(LabelledDrafts(inputs[seen], right[seen], task[seen]))
    target = models.target(pipe.plan(prompts[:1]), models.sampling.temperature)
    facts = target_digest(target), target.name, distribution_of(target.sampling)
    probe = Probe(*facts, LAYER, weight, bias)
    return probe, separation(probe, LabelledDrafts(inputs[~seen], right[~seen], task[~seen]))


def decoded(pipe: Pipeline, tasks: Sequence[text_tasks.Task], spec: Any) -> dict[str, float]:
    """Decode tasks: the share that passes, and forward passes of target and draft model."""
    out = pipe([str(t) for t in tasks], spec, seed=0, batch_size=50)
    pairs = zip(tasks, out.media, strict=True)
    return {
        "passed": statistics.mean(text_tasks.check(t, m).passed for t, m in pairs),
        "passes": statistics.mean(s.nfe for s in out.stats),
        "draft passes": statistics.mean(s.draft_nfe or 0 for s in out.stats),
    }


def evaluate(pipe: Pipeline, folder: Path, draft: str, count: int) -> dict[str, dict[str, float]]:
    """Decode held-out tasks, with several right answers and of every kind."""
    every = text_tasks.tasks(40 * count, 123, held=True)
    sets = {"several answers": [t for t in every if t.op in MANY][:count], "all": every[:count]}
    rows: dict[str, dict[str, float]] = {}
    for name, tasks in sets.items():
        rows[f"{name}, autoregressive"] = decoded(pipe, tasks, {"name": "autoregressive"})
        for temperature, r in COMPARED:
            spec = {**DRAFTED, "draft_model": draft, "draft_temperature": temperature}
            spec |= {"num_speculative_tokens": 15, "relaxation": r}
            spec |= {"verifier_weights": str(folder)} if r else {}
            label = f"{name}, drafts at {temperature:g}, relaxation {r:g}"
            rows[label] = decoded(pipe, tasks, spec)
    return rows


def card(figures: dict[str, float], rows: dict[str, dict[str, float]], model: str) -> str:
    """Write the text of the model card."""
    judged = "".join(
        f"| {r:g} | {figures[f'right taken, {r:g}']:.3f} | {figures[f'wrong taken, {r:g}']:.3f} |\n"
        for r in RELAXATIONS
    )
    decodes = "".join(
        f"| {name} | {row['passed']:.3f} | {row['passes']:.2f} | {row['draft passes']:.1f} |\n"
        for name, row in rows.items()
    )
    return (
        f"{CARD_HEAD}# {NAME}\n\nA linear probe of Judge Decoding (arXiv 2501.19309) on the hidden"
        f" states of `{model}`.\nLabels are the checker's. Made with `python -m"
        " gen.recipes.text.judge_decoding --out DIR`. No other data were used.\n\nOn"
        f" {figures['drafts']:.0f} unseen drafts, {figures['right']:.3f} of them right:\n\n"
        "| relaxation | right ones accepted | wrong ones accepted |\n| --- | --- | --- |\n"
        f"{judged}\n| held-out tasks | task passed | target passes | draft passes |\n"
        f"| --- | --- | --- | --- |\n{decodes}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the probe")
    parser.add_argument("--model", default=None, help="zoo name or folder of a causal model")
    parser.add_argument("--draft-model", default="text-draft", help="name or folder (text-draft)")
    parser.add_argument("--quick", action="store_true", help="a few tasks")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    plan, began = QUICK if args.quick else JudgePlan(), time.time()
    pipe = Pipeline("text", args.model)
    probe, figures = trained(pipe, args.draft_model, plan)
    probe.save_pretrained(args.out)
    print({k: round(v, 3) for k, v in figures.items()}, f"{time.time() - began:.0f} s", flush=True)
    rows = evaluate(pipe, args.out, args.draft_model, plan.held_out)
    text = card(figures, rows, probe.target_name)
    (args.out / "README.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
