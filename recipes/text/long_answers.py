"""Drafters on answers of 2,048 words: train a model of tours and drafters for it, and compare them.

    python -m gen.recipes.text.long_answers --work DIR            the run of the documented figures
    python -m gen.recipes.text.long_answers --work DIR --quick    a smoke run of the same path

``DIR/model`` is a causal model of ``gen.recipes.text.tours``. It is trained on stretches of a tour
that stand anywhere behind their map, then on whole tours. ``DIR/longspec`` and ``DIR/ar`` hold
drafters for it: a layer with a window that reads the model's keys and values (LongSpec), and a
small model with keys and values of its own. The last stage decodes held-out maps with them and with
drafters without a model. An interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gen.models.load.locate import save_model
from gen.models.nets.grid import GridLlamaForCausalLM
from gen.pipeline.pipeline import Pipeline
from gen.recipes.common.grid_models import Run, Shape, new_lm
from gen.recipes.common.train import TrainConfig, fit_average
from gen.recipes.drafters.data import Teacher
from gen.recipes.drafters.recipe import DrafterRecipe
from gen.recipes.drafters.recipe import Plan as Sizes
from gen.recipes.drafters.table import HEAD, REFERENCE, decode, measured, trained_cells
from gen.recipes.text.tours import (
    MOVES,
    PER_MOVE,
    SLOTS,
    WORDS,
    TourModality,
    maps,
    slots_of,
    tours,
)

SEED = 500  # of the maps that drafters are trained with
DRAFTERS = ("longspec", "ar")
OPTIONS = {
    "longspec": {"depth": "12", "queries": "64", "lr": "4e-3"},
    "ar": {"width": "32", "depth": "1", "start": "none"},
}
THETA = 1e6  # slow enough that a map is found from 2,000 words away
SHAPE = Shape((MOVES, PER_MOVE), SLOTS, len(WORDS) + 1, TourModality.words)


@dataclass(frozen=True)
class Plan:
    """Sizes of the recipe.

    Attributes:
        width: channels of the model.
        layers: its layers.
        stretches: steps on stretches of tours.
        stretch: moves of a stretch.
        batch: stretches of a step.
        whole: steps on whole tours; those of a first cycle of the learning rate, and of a second.
        tours: whole tours of a step.
        prompts: tours of the model that drafters are trained on.
        minutes: time of training of a drafter; 0 for ``steps``.
        steps: its steps.
        drafted: tours of a step of it, at most.
        options: options of each kind of drafter.
        held: held-out maps of the table.
        drafts: drafts of a round.
    """

    width: int = 64
    layers: int = 4
    stretches: int = 2500
    stretch: int = 24
    batch: int = 32
    whole: tuple[int, int] = (150, 300)
    tours: int = 4
    prompts: int = 64
    minutes: float = 2.5
    steps: int = 0
    drafted: int = 4
    options: Mapping[str, dict[str, str]] = field(default_factory=lambda: OPTIONS)
    held: int = 4
    drafts: int = 10


QUICK = Plan(
    width=32,
    layers=2,
    stretches=4,
    stretch=6,
    batch=4,
    whole=(1, 1),
    tours=1,
    prompts=2,
    minutes=0,
    steps=1,
    drafted=1,
    held=1,
)


@dataclass(frozen=True)
class Piece:
    """Stretches of tours with their maps.

    Attributes:
        ids: map and stretch, long [B, 24 + n].
        positions: absolute positions, long [B, 24 + n].
        first: column of the first label; that of column c stands at c + 1.
    """

    ids: Tensor
    positions: Tensor
    first: int


def stretches(plan: Plan, seed: int) -> Iterator[Piece]:
    """Endless stretches of tours. A quarter of the batches begin with their tour."""
    rng, batch = np.random.default_rng(seed), 0
    while True:
        leads = maps(plan.batch, 2 * (seed + batch) + 1)
        start = 0 if batch % 4 == 0 else int(rng.integers(0, MOVES - plan.stretch + 1))
        yield piece(leads, plan.stretch, start, rng)
        batch += 1


def whole_tours(plan: Plan, seed: int) -> Iterator[Piece]:
    """Endless whole tours."""
    rng, batch = np.random.default_rng(seed), 0
    while True:
        yield piece(maps(plan.tours, 2 * (seed + batch) + 1), MOVES, 0, rng)
        batch += 1


def piece(leads: np.ndarray, moves: int, start: int, rng: np.random.Generator) -> Piece:
    """Draw tours through maps that stand at the positions from move ``start`` on."""
    given = torch.from_numpy(SHAPE.codes + slots_of(leads))
    said = torch.from_numpy(tours(leads, moves, rng))
    at = torch.cat([torch.arange(SLOTS), SLOTS + PER_MOVE * start + torch.arange(said.shape[1])])
    ids = torch.cat([given, said], 1)
    # what comes first is a matter of the map alone at the beginning, and of nothing else later
    return Piece(ids, at.expand_as(ids), SLOTS - 1 if start == 0 else SLOTS)


def loss(net: Any, batch: Piece) -> tuple[Tensor, dict[str, float]]:
    """Return the cross-entropy of the next word, and that of the towns that moves lead to."""
    ids, at = batch.ids[:, :-1], batch.positions[:, :-1]
    logits = net(input_ids=ids, position_ids=at, use_cache=False).logits[:, batch.first :].float()
    labels = batch.ids[:, batch.first + 1 :]
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    leads = (batch.positions[:, batch.first + 1 :] - SLOTS) % PER_MOVE == 2
    return each.mean(), {"of towns": each.detach()[leads].mean().item()}


def train_model(work: Path, plan: Plan, log: Any = print) -> None:
    """Train the model of tours; write ``work / "model"``."""
    torch.manual_seed(0)
    config = new_lm(SHAPE, Run(0, plan.width, plan.layers, tied=True)).config
    config.rope_parameters = {"rope_type": "default", "rope_theta": THETA}
    model = GridLlamaForCausalLM(config)
    phases = (
        ("stretches", plan.stretches, 2e-3, stretches(plan, 1_000)),
        ("whole", plan.whole[0], 5e-4, whole_tours(plan, 2_000_000)),
        ("again", plan.whole[1], 1e-3, whole_tours(plan, 3_000_000)),
    )
    for name, steps, lr, made in phases:
        config = TrainConfig(
            steps=steps, lr=lr, muon=(".layers.", 3 * lr), bfloat16_weights=True, save_every=250
        )
        fit_average(model, made, loss, config, out=work / name, log=log)
    save(model, work / "model")


def save(model: nn.Module, folder: Path) -> None:
    """Write the model in half precision, as those of the package."""
    save_model(model.half(), folder)


def pipeline(work: Path) -> Pipeline:
    """Load the model of tours."""
    return Pipeline(TourModality(), work / "model")


def train_drafter(work: Path, kind: str, plan: Plan, log: Any = print) -> DrafterRecipe:
    """Train a drafter of a kind on tours of the model; write ``work / kind / "drafter"``."""
    pipe = pipeline(work)

    def teach(count: int, held: bool) -> Teacher:
        return Teacher(pipe, pipe.modality.example_prompts(count, 0 if held else SEED))

    sizes = Sizes(plan.prompts, 4, plan.minutes, plan.steps, plan.drafted)
    options = plan.options[kind]
    recipe = DrafterRecipe("tours", kind, work / kind, sizes, options, log=log, teach=teach)
    if not (work / kind / "figures.json").is_file():
        recipe.run()
    return recipe


def rows(work: Path, plan: Plan) -> dict[str, tuple[Path | None, dict[str, Any]]]:
    """List the samplers of the table by name, with the folders of trained drafters."""
    drafts = {"num_speculative_tokens": plan.drafts}
    free = {
        "autoregressive": {"name": "autoregressive"},
        "speculative_jacobi": {"name": "speculative_jacobi"},
        "prompt_lookup": {"name": "prompt_lookup", **drafts},
        "suffix": {"name": "suffix"},
        "token_recycling": {"name": "token_recycling"},
    }
    made: dict[str, tuple[Path | None, dict[str, Any]]] = {k: (None, v) for k, v in free.items()}
    for kind in DRAFTERS:
        recipe = train_drafter(work, kind, plan)
        folder = work / kind / "drafter"
        made[kind] = folder, {**recipe.kind.sampler(folder), **drafts}
    return made


def table(work: Path, plan: Plan, log: Any = print) -> None:
    """Print a row for every sampler, which decodes held-out maps; the first one is timed."""
    made, pipe = rows(work, plan), pipeline(work)
    prompts = pipe.modality.example_prompts(plan.held, 0)
    texts = pipe(prompts, "autoregressive", seed=0).media
    right = mean(pipe.modality.grade(m, p) for m, p in zip(texts, prompts, strict=True))
    log(f"{right:.4f} of the model's moves follow the map")
    log(f"{HEAD}\n|" + " --- |" * (HEAD.count(" | ") + 1))
    items = pipe.plan(prompts)
    reference = decode(pipe, items, REFERENCE, 1)[0]
    for name, (folder, spec) in made.items():
        cells = trained_cells(folder) + measured(pipe, items, spec, 1, reference)
        log(f"| `{name}` | {' | '.join(cells)} |")


def main(argv: list[str] | None = None) -> int:
    """Run the stages of a command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="run all stages briefly")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    plan = QUICK if args.quick else Plan()
    if not (args.work / "model").is_dir():
        train_model(args.work, plan)
    table(args.work, plan)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
