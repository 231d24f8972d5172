"""Translation in one forward pass: a DA-Transformer, and two baselines of the same net.

    python -m gen.recipes.text.dag all --work DIR            the run that made gen/zoo/text-dag
    python -m gen.recipes.text.dag all --work DIR --quick    a smoke run of the same path

Stages: ``pairs``, ``dag``, ``positionwise``, ``causal``, ``export``, ``evaluate``; ``all`` runs
them in this order. Training stages resume from their checkpoints in ``--work``. Pairs are those of
``modalities/text/translation.py``: every source has one of its right outputs, drawn at random.
``positionwise`` trains the net with one vertex per word and the cross entropy of every position,
``causal`` the same net left to right. ``export`` writes half-precision weights of ``dag`` and its
words to ``--zoo`` (default ``WORK/zoo``); the baselines stay in the work folder, and ``evaluate``
measures all three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gen.contracts.frontend import codebook_digest
from gen.modalities.text import translation
from gen.modalities.text.modality import GRAPH_WORDS
from gen.models.load.locate import save_model
from gen.models.nets.dag import DagConfig, DagModel
from gen.models.nets.lattice import (
    best_alignment,
    chain_links,
    glance,
    lattice_loss,
    matches,
)
from gen.recipes.common.grid_models import tidy
from gen.recipes.common.recipe import Recipe
from gen.recipes.common.train import TrainConfig, fit_average
from gen.recipes.text.dag_evaluation import causal_logprobs, evaluate
from gen.tokenizers.text.words import TextWords

LAMBDA = 4  # vertices per word
POSITIONS = 2 * translation.LENGTHS[-1]  # words of an output; a graph has paths of up to 46
POOL = 8  # batches whose pairs are sorted by length
GLANCES = (0.5, 0.1)  # share of wrong targets that are revealed, at the first and the last step


@dataclass(frozen=True, kw_only=True)
class DagPlan:
    """Sizes of the recipe.

    Attributes:
        pairs: training pairs.
        steps: steps of the schedule of the graph model; baselines have their own.
        chain_steps: first steps, with fixed transitions (``chain_links``). Learned from the start,
            transitions settle on one path before the words of vertices differ.
        cooldown: (first, end) of an early linear cooldown of the graph model.
        causal_steps: steps of the causal net. Up to step 1500 it stays near 0.65 right outputs, and
            at 4000 it has converged.
        width, heads: of all nets.
        layers: of encoder and decoder.
        held_out: sources to measure with.
    """

    pairs: int = 20_000
    steps: int = 1000
    chain_steps: int = 300
    cooldown: tuple[int, int] | None = None
    positionwise_steps: int = 1000
    causal_steps: int = 6000
    batch: int = 32
    lr: float = 1.5e-3
    width: int = 96
    heads: int = 4
    layers: tuple[int, int] = (2, 3)
    held_out: int = 200


QUICK = DagPlan(
    pairs=64,
    steps=4,
    chain_steps=2,
    cooldown=None,
    positionwise_steps=3,
    causal_steps=3,
    batch=4,
    width=16,
    heads=2,
    layers=(1, 1),
    held_out=2,
)
# sources [B, S], targets [B, S], words of both [B], number of the step
Batch = tuple[Tensor, Tensor, Tensor, int]


def make_pairs(work: Path, plan: DagPlan, log: Callable = print) -> None:
    """Save sources that are not held out and one right output of each, both with bos and eos (int16
    [N, 12]), and their numbers of words (long [N]). A source has as many words as its outputs.
    """
    rng, first = np.random.default_rng(1), DagConfig()
    drawn = translation.sources(plan.pairs, seed=1)
    shape = len(drawn), translation.LONGEST
    source, target = (torch.zeros(shape, dtype=torch.int16) for _ in range(2))
    for i, item in enumerate(drawn):
        output = [translation.WORDS.index(w) for w in translation.draw_output(item, rng)]
        source[i, : len(item.ids())] = torch.tensor(item.ids())
        target[i, : len(output) + 2] = torch.tensor([first.bos_id, *output, first.eos_id])
    lengths = torch.tensor([len(item.ids()) for item in drawn])
    torch.save({"source": source, "target": target, "lengths": lengths}, work / "pairs.pt")
    log(f"{len(drawn)} pairs; {float(lengths.float().mean()) - 2:.1f} words per output")


def batches(path: Path, size: int, seed: int) -> Iterator[Batch]:
    """Endless batches of pairs of similar lengths, in a new order every epoch."""
    data = torch.load(path, weights_only=True)
    generator, step = torch.Generator().manual_seed(seed), 0
    while True:
        for pool in torch.randperm(len(data["lengths"]), generator=generator).split(POOL * size):
            groups = pool[data["lengths"][pool].argsort(stable=True)].split(size)
            for group in torch.randperm(len(groups), generator=generator).tolist():
                rows = groups[group]
                lengths = data["lengths"][rows]
                longest = int(lengths.max())
                source, target = (data[k][rows, :longest].long() for k in ("source", "target"))
                yield source, target, lengths, step
                step += 1


def new_model(plan: DagPlan, vertices_per_word: int, first: int = 0) -> DagModel:
    """Create a net whose vertex 0 starts at a position of the source (``DagModel.start``)."""
    model = DagModel(
        DagConfig(
            source_words=translation.SOURCE_IDS,
            max_source=translation.LONGEST,
            vertices_per_word=vertices_per_word,
            hidden_size=plan.width,
            encoder_layers=plan.layers[0],
            decoder_layers=plan.layers[1],
            num_attention_heads=plan.heads,
        )
    )
    model.start(first)
    return model


def dag_loss(plan: DagPlan) -> Callable:
    """Loss of the graph: the exact sum over its paths, after a glance at some targets."""
    generator = torch.Generator().manual_seed(3)

    def loss(model: DagModel, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        source, target, lengths, step = batch
        part = min(1.0, step / plan.steps)
        inputs = model.blank(model.sizes(lengths))
        with torch.no_grad():
            first = model(source, lengths)
            m = matches(first.emissions, target)
            links = first.transitions
            if step < plan.chain_steps:
                links = chain_links(first.lengths, LAMBDA, links)
            path = best_alignment(links, m, first.lengths, lengths)
            ratio = GLANCES[0] + (GLANCES[1] - GLANCES[0]) * part
            shown = glance(first.emissions, path, target, lengths, inputs, ratio, generator)
        graph = model(source, lengths, shown)
        m = matches(graph.emissions, target)
        links = links if step < plan.chain_steps else graph.transitions
        value = lattice_loss(links, m, graph.lengths, lengths)
        return value, {"revealed": (shown != inputs).float().sum(1).mean().item()}

    return loss


def positionwise_loss(model: DagModel, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """Cross entropy of every position on its own, as of a plain non-autoregressive model."""
    source, target, lengths, _ = batch
    emissions = model(source, lengths).emissions
    known = torch.arange(target.shape[1]) < lengths[:, None]
    return F.nll_loss(emissions[known], target[known]), {}


def causal_loss(model: DagModel, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """Cross entropy of every word given those before."""
    source, target, lengths, _ = batch
    logprobs = causal_logprobs(model, target[:, :-1], model.encode(source, lengths))
    known = torch.arange(1, target.shape[1]) < lengths[:, None]
    return F.nll_loss(logprobs[known], target[:, 1:][known]), {}


def train(work: Path, plan: DagPlan, name: str, log: Callable = print) -> None:
    """Train ``dag``, ``positionwise`` or ``causal``."""
    torch.manual_seed(0)
    graph = name == "dag"
    steps = {
        "dag": plan.steps,
        "positionwise": plan.positionwise_steps,
        "causal": plan.causal_steps,
    }
    model: nn.Module = new_model(plan, LAMBDA if graph else 1, int(name == "causal"))
    loss = {"positionwise": positionwise_loss, "causal": causal_loss}.get(name) or dag_loss(plan)
    fit_average(
        model,
        batches(work / "pairs.pt", plan.batch, seed=5),
        loss,
        TrainConfig(
            steps=steps[name],
            lr=plan.lr,
            cooldown=plan.cooldown if graph else None,
            muon=("coder.", 3 * plan.lr),
            betas=(0.9, 0.98),
            log_every=50,
            save_every=100,
        ),
        out=work / name,
        log=log,
    )
    save_model(model, work / name / "model")


class DagRecipe(Recipe):
    """Graph model of translations, and its baselines."""

    doc, full, quick = __doc__, DagPlan(), QUICK

    def stages(self):
        models = ("dag", "positionwise", "causal")
        return {
            "pairs": lambda: make_pairs(self.work, self.plan, self.log),
            **{n: lambda n=n: train(self.work, self.plan, n, self.log) for n in models},
            "export": self.export,
            "evaluate": lambda: evaluate(self.work, self.zoo, self.plan.held_out, self.log),
        }

    def export(self) -> None:
        """Write the words and half-precision weights of the graph model, which name them."""
        words = TextWords.of(translation.WORDS, POSITIONS)
        words.save_pretrained(self.zoo / GRAPH_WORDS)
        model = DagModel.from_pretrained(self.work / "dag" / "model").half()
        model.config.frontend = GRAPH_WORDS
        model.config.codebook_digest = codebook_digest(words.fingerprint)
        save_model(model, self.zoo / "text-dag")
        tidy(self.zoo)
        self.log(f"wrote {self.zoo}")


main = DagRecipe.main


if __name__ == "__main__":
    main()
