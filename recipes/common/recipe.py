"""Base of the recipes: sizes, stages, and the command line that runs them."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from gen.recipes.common.grid_evaluation import World, evaluate
from gen.recipes.common.grid_models import Run, Shape, Words, export_lm, tidy, train_lm

MODELS = ("causal", "masked", "draft")


class Recipe(ABC):
    """Stages that train models and measure them. Training is for one thread per stage.

    Attributes:
        doc: help text of the command line.
        full: sizes of the shipped models.
        quick: sizes of a smoke run of the same path.
        work: folder of data and checkpoints.
        zoo: folder of the finished models.
        plan: ``full`` or ``quick``.
    """

    doc: ClassVar[str]
    full: ClassVar[Any]
    quick: ClassVar[Any]

    def __init__(self, work: Path, zoo: Path, quick: bool = False, log: Callable = print):
        self.work, self.zoo, self.log = work, zoo, log
        self.plan = self.quick if quick else self.full

    @abstractmethod
    def stages(self) -> dict[str, Callable[[], object]]:
        """Stages by name, in the order of ``all``."""

    @classmethod
    def main(cls, argv: list[str] | None = None) -> None:
        """Run one stage, or all of them in order.

        Args:
            argv: command line; None for the process's own.
        """
        parser = argparse.ArgumentParser(
            description=cls.doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        names = list(cls(Path(), Path()).stages())
        parser.add_argument("stage", choices=[*names, "all"], help="stage to run, or all in order")
        parser.add_argument(
            "--work", type=Path, required=True, help="folder for checkpoints and data"
        )
        parser.add_argument(
            "--zoo", type=Path, help="folder for the finished models (default: WORK/zoo)"
        )
        parser.add_argument(
            "--quick", action="store_true", help="run all stages briefly, as a smoke test"
        )
        args = parser.parse_args(argv)
        torch.set_num_threads(1)
        args.work.mkdir(parents=True, exist_ok=True)
        stages = cls(args.work, args.zoo or args.work / "zoo", args.quick).stages()
        for name in names if args.stage == "all" else [args.stage]:
            stages[name]()


@dataclass(frozen=True, kw_only=True)
class GridPlan:
    """Sizes of a modality's token models and of their evaluation."""

    causal: Run
    masked: Run
    draft: Run
    held_out: int = 200

    def run_of(self, name: str) -> Run:
        """Training of one of ``MODELS``."""
        return {"causal": self.causal, "masked": self.masked, "draft": self.draft}[name]


class GridRecipe(Recipe):
    """Recipe of a modality's causal, masked and draft model over the codes of its frontend.

    Attributes:
        name: the modality, which begins the names of its models.
        frontend: zoo folder of the frontend.
        shape: prompt and grid of the models.
    """

    name: ClassVar[str]
    frontend: ClassVar[str]
    shape: ClassVar[Shape]
    words: ClassVar[Words]

    def model_stages(self) -> dict[str, Callable[[], object]]:
        """Training stages, one per model."""
        return {name: lambda name=name: self.train(name) for name in MODELS}

    def train(self, name: str) -> None:
        """Train one of ``MODELS`` on ``tokens.pt``."""
        train_lm(self.work, self.shape, self.plan.run_of(name), name, type(self).words, self.log)

    def export_models(self, digest: str, counts: Tensor | None = None) -> None:
        """Write half-precision models that name their frontend.

        Args:
            digest: digest of the frontend's codebook.
            counts: occurrences of ids in training, long [n]; None to leave them out.
        """
        for name in MODELS:
            folder = self.zoo / f"{self.name}-{name}"
            export_lm(self.work / name / "model", folder, self.frontend, digest, counts)
        tidy(self.zoo)
        self.log(f"wrote {self.zoo}")

    def world(self) -> World:
        """Dataset and samplers to measure with."""
        raise NotImplementedError

    def evaluate(self) -> None:
        """Measure the models in ``zoo`` and write their model cards."""
        evaluate(self.world(), self.zoo, self.plan.held_out, self.log)


def draft_card(name: str) -> str:
    """Model card text of a modality's draft model."""
    architecture = f"The architecture of `{name}-causal`, smaller"
    return f"{architecture}: the draft model of its speculative decoding."
