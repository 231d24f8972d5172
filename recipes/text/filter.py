"""Learn2PD's filter for the masked text model: trace its decoding with one position per forward
pass, and learn which proposals were already final.

    python -m gen.recipes.text.filter all --work DIR --zoo DIR            the run that made
                                                                          gen/zoo/text-filter
    python -m gen.recipes.text.filter all --work DIR --zoo DIR --quick    a smoke run, in seconds

Stages: ``traces``, ``filter``, ``evaluate``; ``all`` runs them in this order. The model is
``text-masked`` in ``--zoo`` (default ``WORK/zoo``), written by ``recipes/text/recipe.py``; the
filter is written beside it, as ``text-filter``. ``filter`` resumes from its checkpoint in
``--work``.

    traces     training tasks, decoded by ``llada`` with as many steps as positions; for every
               masked position in every forward pass, the filter's input
               (``gen.samplers.masked.methods.learn2pd.features``), and whether the proposal
               there is the final token
    filter     binary cross-entropy on that, AdamW
    evaluate   on held-out tasks: precision and recall per threshold, beside those of the confidence
               alone; the cost and the accuracy of decoding with the filter
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.rng import RNG, CounterRNG
from gen.modalities.text import tasks as text_tasks
from gen.modalities.text.modality import POSITIONS
from gen.models.load.locate import save_model
from gen.pipeline.pipeline import Pipeline
from gen.recipes.common.grid_evaluation import CARD_HEAD
from gen.recipes.common.recipe import Recipe
from gen.recipes.common.train import TrainConfig, fit_average
from gen.recipes.text.data import drawn
from gen.samplers.masked.loop import decode_masked
from gen.samplers.masked.methods.learn2pd import PositionFilter, features
from gen.samplers.masked.methods.llada import even
from gen.samplers.masked.step import MaskedStep

MODEL, FILTER = "text-masked", "text-filter"
THRESHOLDS = (0.5, 0.8, 0.9, 0.96, 0.99)
ONE_AT_A_TIME = {"name": "llada", "steps": POSITIONS}
DECODERS = {
    "llada, one position per pass": ONE_AT_A_TIME,
    "fast_dllm, 0.9": "fast_dllm",
    **{f"learn2pd, {t:g}": {"name": "learn2pd", "filter_threshold": t} for t in THRESHOLDS[1:]},
}


@dataclass(frozen=True)
class FilterPlan:
    """Sizes of the filter recipe."""

    tasks: int = 3000
    steps: int = 3000
    batch: int = 2048
    lr: float = 3e-3
    held_out: int = 500
    rows: int = 100  # tasks that are decoded together


QUICK = FilterPlan(tasks=12, steps=60, batch=64, held_out=4)


@dataclass(frozen=True)
class Traces:
    """Positions that were masked in some forward pass, n of them.

    Attributes:
        x: float32 [n, F], input of a filter.
        c: float64 [n], probability of the proposal.
        final: bool [n], the proposal is the final token.
    """

    x: Tensor
    c: Tensor
    final: Tensor


def watched(target, rng: RNG, sampler, radius: int) -> Traces:
    """Decode every row of a target and record the inputs of a filter.

    Args:
        target: masked target.
        rng: its random numbers.
        sampler: sampler whose parameters give the positions per forward pass, by LLaDA's selector.
        radius: radius of the filter.
    """
    seen: list[tuple[Tensor, ...]] = []

    def watch(step: MaskedStep) -> Tensor:
        row, position = step.eligible.nonzero(as_tuple=True)
        seen.append(
            (
                features(step, radius)[row, position].float(),
                step.confidence[row, position],
                step.rows[row],
                position,
                step.proposed_tokens[row, position],
            )
        )
        return even(step)

    tokens = decode_masked(target, rng, sampler, overrides={"selector": watch}).tokens
    x, c, row, position, ids = (torch.cat(parts).cpu() for parts in zip(*seen, strict=True))
    return Traces(x, c, tokens.cpu()[row, position] == ids)


def traces_of(
    pipe: Pipeline,
    prompts: Sequence[str],
    plan: FilterPlan,
    radius: int,
    steps: int = POSITIONS,
) -> Traces:
    """Traces of a model's own decoding of prompts in so many forward passes."""
    sampler, sampling = pipe.resolve(ONE_AT_A_TIME | {"steps": steps}, None)
    items, found = pipe.plan(list(prompts)), []
    for at in range(0, len(items), plan.rows):
        some = items[at : at + plan.rows]
        found.append(
            watched(
                pipe.target(sampler, sampling, some),
                CounterRNG([pipe.draw_key(i) for i in some]),
                sampler,
                radius,
            )
        )
    x, c, final = (torch.cat(p) for p in zip(*((t.x, t.c, t.final) for t in found), strict=True))
    return Traces(x, c, final)


def trained(traces: Traces, radius: int, plan: FilterPlan, out: Path, log=print) -> PositionFilter:
    """Train a filter on traces. ``out`` is the folder of its checkpoint."""
    generator = torch.Generator().manual_seed(2)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            some = torch.randint(len(traces.x), (plan.batch,), generator=generator)
            yield traces.x[some], traces.final[some].float()

    def loss(model, batch):
        x, final = batch
        return F.binary_cross_entropy_with_logits(model(x), final), {}

    torch.manual_seed(0)
    model = PositionFilter(radius)
    fit_average(
        model,
        batches(),
        loss,
        TrainConfig(steps=plan.steps, lr=plan.lr, log_every=500),
        out=out,
        log=log,
    )
    return model.eval().requires_grad_(False)


def precision_and_recall(chosen: Tensor, final: Tensor) -> tuple[float, float]:
    """Precision, 1 without chosen items, and recall of ``chosen`` for ``final``, bool [n]."""
    both = int((chosen & final).sum())
    return both / max(1, int(chosen.sum())) if bool(chosen.any()) else 1.0, both / max(
        1, int(final.sum())
    )


def separation(model: PositionFilter, traces: Traces) -> dict[str, Any]:
    """Figures of a filter on unseen traces.

    Returns:
        ``nats``, binary cross-entropy per position; ``nats_blind``, the same for the constant share
        of final proposals; ``judged``, precision and recall of filter and confidence, by threshold.
    """
    logits, final = model(traces.x), traces.final
    rate = final.double().mean().clamp(1e-9, 1 - 1e-9)
    judged = {
        f"filter, {t:g}": precision_and_recall(logits.sigmoid() >= t, final) for t in THRESHOLDS
    }
    judged |= {f"confidence, {t:g}": precision_and_recall(traces.c >= t, final) for t in THRESHOLDS}
    return {
        "positions": len(final),
        "final": float(rate),
        "nats": float(F.binary_cross_entropy_with_logits(logits.double(), final.double())),
        "nats_blind": float(torch.special.entr(torch.stack([rate, 1 - rate])).sum()),
        "judged": judged,
    }


def decoding(
    pipe: Pipeline, filter: Path, tasks: Sequence[text_tasks.Task], plan: FilterPlan
) -> dict[str, dict[str, float]]:
    """Per decoder: the share of right answers, the share of texts equal to those of one position
    per forward pass, and forward passes.
    """
    rows: dict[str, dict[str, float]] = {}
    reference: list[str] = []
    for name, spec in DECODERS.items():
        spec = {**spec, "filter": str(filter)} if name.startswith("learn2pd") else spec
        out = pipe([str(t) for t in tasks], spec, seed=0, batch_size=plan.rows)
        reference = reference or out.media
        rows[name] = {
            "passed": statistics.mean(
                text_tasks.check(t, m).passed for t, m in zip(tasks, out.media, strict=True)
            ),
            "same": statistics.mean(a == b for a, b in zip(out.media, reference, strict=True)),
            "calls": statistics.mean(s.nfe for s in out.stats),
        }
    return rows


def card(
    figures: dict[str, Any], rows: dict[str, dict[str, float]], held_out: int, parameters: int
) -> str:
    """Text of the model card."""
    judged = "".join(
        f"| {name} | {p:.3f} | {r:.3f} |\n" for name, (p, r) in figures["judged"].items()
    )
    decoded = "".join(
        f"| {name} | {row['passed']:.3f} | {row['same']:.3f} | {row['calls']:.1f} |\n"
        for name, row in rows.items()
    )
    return (
        f"{CARD_HEAD}# {FILTER}\n\nA filter of Learn2PD (arXiv 2509.25188) for"
        f" `{MODEL}`, of {parameters} parameters.\nIt predicts which proposals one position per"
        " pass would keep. Trained from scratch on that model's own decoding, with\n`python -m"
        " gen.recipes.text.filter all --work DIR --zoo DIR`. No other data were used.\n\n"
        f"Measured on {held_out} held-out tasks: {figures['positions']} masked positions,"
        f" {figures['final']:.3f} of them final. Cross-entropy per position:\n"
        f"{figures['nats']:.3f} nats, and {figures['nats_blind']:.3f} for the constant share of"
        " final ones.\n\n| at least | precision | recall |\n| --- | --- | --- |\n"
        f"{judged}\n| decoder | task passed | text of one position per pass | forward passes (mean)"
        f" |\n| --- | --- | --- | --- |\n{decoded}"
    )


class FilterRecipe(Recipe):
    """Filter of the masked text model in ``zoo``."""

    doc, full, quick = __doc__, FilterPlan(), QUICK

    def stages(self):
        return {"traces": self.record, "filter": self.learn, "evaluate": self.evaluate}

    def pipe(self) -> Pipeline:
        """Pipeline of the masked text model."""
        return Pipeline("text", self.zoo / MODEL)

    def traces(self, pipe: Pipeline, tasks: Sequence[text_tasks.Task]) -> Traces:
        """Traces of tasks for a filter of the default radius."""
        return traces_of(pipe, [str(t) for t in tasks], self.plan, PositionFilter().radius)

    def record(self) -> None:
        """Decode the training tasks and save their traces."""
        began, count = time.time(), self.plan.tasks
        traces = self.traces(self.pipe(), [task for task, _ in drawn(count, seed=21)])
        torch.save(vars(traces), self.work / "filter-traces.pt")
        share, seconds = traces.final.double().mean(), time.time() - began
        self.log(
            f"{len(traces.x)} masked positions of {count} tasks, {share:.3f} final; {seconds:.0f} s"
        )

    def learn(self) -> None:
        """Train the filter on the traces and write it to ``zoo``."""
        traces = Traces(**torch.load(self.work / "filter-traces.pt", weights_only=True))
        model = trained(traces, PositionFilter().radius, self.plan, self.work / "filter", self.log)
        save_model(model, self.zoo / FILTER)
        self.log(f"wrote {self.zoo / FILTER}")

    def evaluate(self) -> None:
        """Measure the filter on held-out tasks and write its model card."""
        folder, pipe = self.zoo / FILTER, self.pipe()
        tasks = text_tasks.tasks(self.plan.held_out, 123, held=True)
        model = PositionFilter.from_pretrained(folder)
        figures = separation(model, self.traces(pipe, tasks))
        rows = decoding(pipe, folder, tasks, self.plan)
        text = card(figures, rows, len(tasks), sum(p.numel() for p in model.parameters()))
        (folder / "README.md").write_text(text)
        self.log(text)


main = FilterRecipe.main


if __name__ == "__main__":
    main()
