"""Camera of the tabletop: train the network that reads a state from an image, and measure a policy
that sees.

    python -m gen.recipes.action.camera all --work DIR            the run that made action-camera
    python -m gen.recipes.action.camera all --work DIR --quick    a smoke run of the same path

Stages: ``train``, ``export``, ``evaluate``.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from gen.media.given import read_media
from gen.modalities.action import checker as tabletop_check
from gen.modalities.action import tasks as tabletop_tasks
from gen.modalities.action.camera import FOLDER, POINTS, TabletopCamera
from gen.modalities.action.modality import Situation
from gen.modalities.action.view import render
from gen.modalities.action.world import BLOCK, GOAL, GRIPPER, KINDS, WALL, WALL_X, kinds
from gen.models.nets.keypoints import Keypoints
from gen.pipeline.output import ItemPlan
from gen.pipeline.pipeline import Pipeline
from gen.recipes.common.grid_evaluation import CARD_HEAD
from gen.recipes.common.recipe import Recipe
from gen.recipes.common.train import TrainConfig, fit_average


@dataclass(frozen=True, kw_only=True)
class CameraPlan:
    """Sizes of the recipe."""

    tables: int = 12_000
    steps: int = 1500
    batch: int = 32
    width: int = 24
    held_out: int = 200


QUICK = CameraPlan(tables=40, steps=4, batch=4, width=8, held_out=4)


CARD = f"""{CARD_HEAD}# {FOLDER}

A small convolutional network with spatial soft-argmax that reads the state of the tabletop from a
camera image (`gen/modalities/action/camera.py`). Trained from scratch on rendered tables, with
`python -m gen.recipes.action.camera all --work DIR`. No other data were used.

Over {{held_out}} held-out tables: mean error of a coordinate in millimetres, and the share of tasks
that `action-causal` (`autoregressive`) and `action-masked` (`maskgit`) solve from pixels and from
the state itself.

| | |
| --- | --- |
{{rows}}
"""


def points_of(states: np.ndarray) -> np.ndarray:
    """Return the points of states [N, 7] as [N, 4, 2], and NaN for what is not there."""
    walls = states[:, [WALL]]
    points = np.stack(
        [
            states[:, GRIPPER],
            states[:, GOAL],
            states[:, BLOCK],
            np.concatenate([np.full_like(walls, WALL_X), walls], 1),
        ],
        1,
    ).astype(np.float32)
    points[(points[:, 2] == 0).all(-1), 2] = np.nan
    points[walls[:, 0] == 0, 3] = np.nan
    return points


def batches(plan: CameraPlan, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless images float [B, 3, 64, 64] and points [B, 4, 2] of tables that are not held out."""
    states = tabletop_tasks.episodes(plan.tables, seed, held=False).states
    images = torch.from_numpy(np.stack([render(s) for s in states])).permute(0, 3, 1, 2)
    points = torch.from_numpy(points_of(states))
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(len(states), generator=generator).split(plan.batch):
            if len(rows) == plan.batch:
                yield images[rows] / 255, points[rows]


def distance(model: Keypoints, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, float]]:
    """Loss of the points that are there: their mean distance, in decimetres."""
    images, points = batch
    there = ~points.isnan().any(-1)
    errors = (model(images)[there].float() - points[there]).norm(dim=-1)
    return 10 * errors.mean(), {"millimetres": 1000 * errors.mean().item()}


class CameraRecipe(Recipe):
    """Camera of the tabletop."""

    doc, full, quick = __doc__, CameraPlan(), QUICK

    def stages(self):
        return {"train": self.train, "export": self.export, "evaluate": self.evaluate}

    def train(self) -> None:
        torch.manual_seed(0)
        model = Keypoints(POINTS, self.plan.width)
        config = TrainConfig(steps=self.plan.steps, lr=3e-3, weight_decay=0.0)
        fit_average(
            model, batches(self.plan, 1), distance, config, out=self.work / "camera", log=self.log
        )
        save_file(model.state_dict(), self.work / "camera" / "model.safetensors")

    def export(self) -> None:
        """Write half-precision weights."""
        model = Keypoints(POINTS, self.plan.width)
        state = torch.load(self.work / "camera" / "checkpoint.pt", weights_only=True)["average"]
        model.load_state_dict(state)
        folder = self.zoo / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {k: v.half() for k, v in model.state_dict().items()}, folder / "model.safetensors"
        )
        config = {"encoder": "tabletop_camera", "width": self.plan.width}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def evaluate(self) -> None:
        """Roll out what a policy does that sees held-out tables, beside one that knows them."""
        episodes = tabletop_tasks.episodes(self.plan.held_out, 99, held=True)
        states = episodes.states
        eyes = TabletopCamera(self.zoo / FOLDER)
        asked = {"reach": "reach", "push": "push the block", "avoid": "avoid the wall"}
        tasks = [asked[KINDS[kind]] for kind in kinds(states)]
        images = [render(s) for s in states]
        seen = [
            eyes.state(read_media(image, "image"), task.split()[0])
            for image, task in zip(images, tasks, strict=True)
        ]
        error = np.abs(np.stack(seen) - states)
        found = {"millimetres": 1000 * float(error[states != 0].mean())}
        pipe = Pipeline("action")
        parsed = [tabletop_tasks.parse(task) for task in tasks]
        for name, given in (("pixels", seen), ("state", list(states))):
            items = [
                ItemPlan(i, text, i, Situation(task, state))
                for i, (text, task, state) in enumerate(zip(tasks, parsed, given, strict=True))
            ]
            for sampler in ("autoregressive", "maskgit"):
                out = pipe.generate(items, sampler, max_batch=50)
                actions = [np.asarray(media) for media in out.media]
                verdicts = tabletop_check.check_many(actions, list(states), tasks)
                found[f"{name}, {sampler}"] = statistics.mean(v.passed for v in verdicts)
        self.log(str(found))
        rows = "\n".join(f"| {name} | {value:.3f} |" for name, value in found.items())
        (self.zoo / FOLDER / "README.md").write_text(CARD.format(rows=rows, **vars(self.plan)))
        (self.zoo / "evaluation-camera.json").write_text(json.dumps(found, indent=1) + "\n")


main = CameraRecipe.main


if __name__ == "__main__":
    main()
