"""ADJUST's layer for the masked text model: learn how a token changes the other positions.

    python -m gen.recipes.text.adjust all --work DIR --zoo DIR            the whole run
    python -m gen.recipes.text.adjust all --work DIR --zoo DIR --quick    a smoke run, in seconds

Stages: ``tokens``, ``train``, ``evaluate``; ``all`` runs them in this order. The model is
``text-masked`` in ``--zoo``; without such a folder there, the embedded one. ``train`` resumes from
its checkpoint in ``--work`` and writes ``text-adjust`` to ``--zoo`` (default ``WORK/zoo``).

    tokens     training tasks, each with one of its right answers; three quarters of them have
               several right answers, since the layer has nothing to learn from the others
    train      a state x_0: an answer, some of whose positions are masked. The model draws the token
               of its most certain position, which gives x_1, and again, which gives x_2, x_3, ...
               The layer is unrolled along them from the states behind x_0, and

                   L = mean over j of KL(model(x_j) || layer_j) at the masked positions

               In half of the rows the masked positions of x_0 are any, in the others those that the
               model is least certain of before anything is known, as in decoding.
    evaluate   accuracy on held-out tasks by forward passes, and the same sampler without the layer

The authors (arXiv 2509.22738) store their model's own samples and the order of their positions, and
train on the last of a random number of unrolls. Here the model runs at every step of training.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.modalities.text import tasks as text_tasks
from gen.modalities.text.modality import POSITIONS, TextModality
from gen.models.load.digest import digest_of
from gen.models.load.locate import zoo
from gen.models.nets.grid import GridLlamaForCausalLM
from gen.pipeline.pipeline import Pipeline
from gen.recipes.common.grid_evaluation import CARD_HEAD
from gen.recipes.common.grid_models import token_batches
from gen.recipes.common.recipe import Recipe
from gen.recipes.common.train import TrainConfig, fit_average
from gen.recipes.text.data import drawn
from gen.recipes.text.recipe import SHAPE
from gen.samplers.masked.adjust_layer import AdjustLayer
from gen.tokenizers.text.words import TextWords

MODEL, LAYER = "text-masked", "text-adjust"
HEADS, INTERMEDIATE = 3, 192
COMMITS = (1, 2, 3, 4)


@dataclass(frozen=True)
class AdjustPlan:
    """Sizes of the recipe.

    Attributes:
        tasks: training tasks.
        steps: updates.
        batch: answers per update.
        unrolls: applications of the layer per answer.
        lr: peak learning rate.
        held_out: tasks to measure on.
        rows: tasks that are decoded together.
    """

    tasks: int = 60_000
    steps: int = 800
    batch: int = 32
    unrolls: int = 3
    lr: float = 2e-3
    held_out: int = 200
    rows: int = 100


QUICK = AdjustPlan(tasks=40, steps=4, batch=4, held_out=4)


class FrozenModel:
    """Masked model whose hidden states are adjusted; it is not trained.

    Args:
        folder: folder of a model of the built-in architecture that is not shifted.
    """

    def __init__(self, folder: str | Path):
        self.net = GridLlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.net.eval().requires_grad_(False)
        self.width = self.net.config.hidden_size

    def embedded(self, ids: Tensor) -> Tensor:
        """Embed ids [B, L] at positions from 0 on: [B, L, D]."""
        at = torch.arange(ids.shape[1])[None].expand_as(ids)
        return self.net.model.embed_tokens(ids) + self.net.locate(at)

    @torch.no_grad()
    def states(self, ids: Tensor) -> Tensor:
        """Compute what the head reads, [B, L, D], of ids [B, L]."""
        width = ids.shape[1]
        return self.net.model(
            inputs_embeds=self.embedded(ids),
            attention_mask=torch.zeros(1, 1, width, width),
            position_ids=torch.arange(width)[None],
            use_cache=False,
        ).last_hidden_state

    def logprobs(self, hidden: Tensor, length: int, codes: int) -> Tensor:
        """Compute log-probabilities [B, T, V] of the first ``codes`` ids at the last positions."""
        return self.net.lm_head(hidden[:, -length:])[..., :codes].float().log_softmax(-1)


def masked_states(codes: Tensor, entropy: Tensor, generator: torch.Generator) -> Tensor:
    """Choose masked positions of answers, bool [B, T].

    Args:
        codes: answers, long [B, T].
        entropy: entropies of all positions before anything is known, [B, T].
        generator: source of the random numbers.

    Returns:
        From one to all positions of each row: any in the first half of the rows, those of the
        highest entropy in the others.
    """
    rows, total = codes.shape
    count = torch.randint(1, total + 1, (rows, 1), generator=generator)
    score = torch.rand(rows, total, generator=generator)
    score[rows // 2 :] = entropy[rows // 2 :]
    rank = score.argsort(1, descending=True).argsort(1)
    return rank < count


def entropy_of(logprobs: Tensor) -> Tensor:
    """Compute entropies [B, T] of log-probabilities [B, T, V]."""
    return torch.special.entr(logprobs.exp()).sum(-1)


def reveal(
    logprobs: Tensor, canvas: Tensor, masked: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw the token of each row's most certain masked position.

    Args:
        logprobs: [B, T, V].
        canvas: long [B, T].
        masked: bool [B, T].
        generator: source of the random numbers.

    Returns:
        The canvas and the positions that are masked now; a row without masks stays as it is.
    """
    entropy = entropy_of(logprobs).masked_fill(~masked, torch.inf)
    row, position = torch.arange(len(canvas)), entropy.argmin(1)
    token = torch.multinomial(logprobs[row, position].exp(), 1, generator=generator)[:, 0]
    first = F.one_hot(position, canvas.shape[1]).bool() & masked
    return torch.where(first, token[:, None], canvas), masked & ~first


def adjust_loss(model: FrozenModel, plan: AdjustPlan, generator: torch.Generator):
    """Loss of the module for batches of words [B, P] and answers [B, T]."""
    length, size = SHAPE.length, SHAPE.codes

    def of_model(ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = model.states(ids)
        return hidden, model.logprobs(hidden, length, size)

    def loss(layer, batch):
        prompt, codes = batch[0] + SHAPE.codes, batch[1]

        def ids_of(canvas: Tensor, masked: Tensor) -> Tensor:
            return torch.cat([prompt, canvas.masked_fill(masked, SHAPE.mask)], 1)

        everything = torch.ones_like(codes, dtype=torch.bool)
        half = len(codes) // 2
        entropy = torch.zeros(codes.shape)
        entropy[half:] = entropy_of(of_model(ids_of(codes, everything)[half:])[1])
        masked, canvas = masked_states(codes, entropy, generator), codes
        hidden, logprobs = of_model(ids_of(canvas, masked))
        at = torch.arange(hidden.shape[1])[None]
        total, figures = torch.zeros(()), {}
        for number in range(1, plan.unrolls + 1):
            canvas, masked = reveal(logprobs, canvas, masked, generator)
            ids = ids_of(canvas, masked)
            logprobs = of_model(ids)[1]
            hidden = layer(model.embedded(ids), hidden, at)
            found = model.logprobs(hidden, length, size)
            nats = (logprobs.exp() * (logprobs - found)).sum(-1)
            mean = (nats * masked).sum() / masked.sum().clamp_min(1)
            total, figures[f"kl{number}"] = total + mean / plan.unrolls, mean.item()
        return total, figures

    return loss


def measured(
    pipe: Pipeline, layer: str, tasks: Sequence[text_tasks.Task], rows: int
) -> dict[str, dict[str, float]]:
    """Measure accuracy at temperature 1 by positions per forward pass, with a layer and without."""
    found: dict[str, dict[str, float]] = {}
    for commits in COMMITS:
        plain = {"name": "adjust", "adjust_commits": commits, "proposer": "categorical"}
        spec: dict[str, Any] = {"name": "adjust", "adjust_commits": commits, "adjust_layer": layer}
        for name, sampler in (("product", plain | {"adjust_layer": ""}), ("adjust", spec)):
            out = pipe([str(t) for t in tasks], sampler, seed=0, batch_size=rows)
            right = [text_tasks.check(t, m).passed for t, m in zip(tasks, out.media, strict=True)]
            row = found.setdefault(str(commits), {})
            row[name] = statistics.mean(right)
            row["passes"] = statistics.mean(s.nfe for s in out.stats)
    return found


def card(figures: dict[str, dict[str, float]], held_out: int, parameters: int) -> str:
    """Text of the model card."""
    rows = "".join(
        f"| {commits} | {row['passes']:.1f} | {row['product']:.3f} | {row['adjust']:.3f} |\n"
        for commits, row in figures.items()
    )
    return (
        f"{CARD_HEAD}# {LAYER}\n\nThe layer of ADJUST (arXiv 2509.22738) for `{MODEL}`, of"
        f" {parameters} parameters: it updates the other\npositions after each token that a forward"
        " pass of the model commits. Trained on that model's own\ndistributions, with `python -m"
        " gen.recipes.text.adjust all --work DIR`. No other data were used.\n\nMeasured on"
        f" {held_out} held-out tasks at temperature 1, the most certain positions first:\n\n"
        "| positions per forward pass | forward passes | right without the layer | with it |\n"
        f"| --- | --- | --- | --- |\n{rows}"
    )


class AdjustRecipe(Recipe):
    """ADJUST's layer of the masked text model."""

    doc, full, quick = __doc__, AdjustPlan(), QUICK

    def stages(self):
        return {
            "tokens": self.draw,
            "train": self.train,
            "evaluate": self.evaluate,
        }

    def base(self) -> Path:
        """Folder of the masked model."""
        local = self.zoo / MODEL
        return local if local.is_dir() else zoo()[MODEL]

    def draw(self) -> None:
        """Save answers [N, T] with the slots of their prompts [N, P] as ``tokens.pt``."""
        count = self.plan.tasks // 4
        data = [*drawn(count, 41), *drawn(3 * count, 42, text_tasks.RANDOM)]
        modality = TextModality()
        id_of = {w: i for i, w in enumerate(TextWords.of(text_tasks.WORDS, POSITIONS).words)}
        codes = torch.full((len(data), POSITIONS), SHAPE.codes - 1, dtype=torch.int16)
        for row, (_, answer) in zip(codes.numpy(), data, strict=True):
            row[: len(answer)] = [id_of[w] for w in answer]
        slots = torch.tensor([modality.prompt_words(task) for task, _ in data], dtype=torch.uint8)
        torch.save({"codes": codes, "slots": slots}, self.work / "tokens.pt")

    def train(self) -> None:
        """Train the layer and write it to ``zoo``."""
        plan, model = self.plan, FrozenModel(self.base())
        torch.manual_seed(0)
        layer = AdjustLayer(model.width, HEADS, INTERMEDIATE, digest_of(model.net))
        torch.nn.init.constant_(layer.result_norm.weight, 0.1)  # near the model, not at it
        fit_average(
            layer,
            token_batches(self.work / "tokens.pt", plan.batch, 8, lambda slots, _: slots),
            adjust_loss(model, plan, torch.Generator().manual_seed(9)),
            TrainConfig(steps=plan.steps, lr=plan.lr, log_every=50, save_every=50),
            out=self.work / "adjust",
            log=self.log,
        )
        layer.save_pretrained(self.zoo / LAYER)
        self.log(f"wrote {self.zoo / LAYER}")

    def evaluate(self) -> None:
        """Measure the layer on held-out tasks and write its model card."""
        folder, plan = self.zoo / LAYER, self.plan
        tasks = text_tasks.tasks(plan.held_out, 123, held=True)
        figures = measured(Pipeline("text", self.base()), str(folder), tasks, plan.rows)
        (self.work / "evaluation-adjust.json").write_text(json.dumps(figures, indent=1) + "\n")
        layer = AdjustLayer.from_pretrained(folder)
        text = card(figures, len(tasks), sum(p.numel() for p in layer.parameters()))
        (folder / "README.md").write_text(text)
        self.log(text)


main = AdjustRecipe.main


if __name__ == "__main__":
    main()
