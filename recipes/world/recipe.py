"""World model from nothing: roll boards out, train the frame model, measure it.

    python -m gen.recipes.world all --work DIR            the run that made gen/zoo/world-frames
    python -m gen.recipes.world all --work DIR --quick    a smoke run of the same path, a minute

Stages: ``flow``, ``shortcut``, ``long``, ``pushes``, ``export``, ``evaluate``; ``all`` runs them in
this order. Training stages resume from their checkpoints in ``--work``. ``flow`` trains the
smallest step size, ``shortcut`` goes on with all of them, so that one step per frame is enough,
``long`` with clips of twice the window, half of whose frames do not see the start, and ``pushes``
with clips in which the agent seeks the box: random actions rarely push it. ``export`` writes
half-precision weights to ``--zoo`` (default ``WORK/zoo``), ``evaluate`` measures those and writes
their model card. On one core of an EPYC processor, shared: flow 25 minutes, shortcut 12, long 8,
pushes 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from gen.modalities.world import board
from gen.models.load.locate import save_model
from gen.models.nets.frames import FrameConfig, FrameModel, to_positions
from gen.models.nets.shortcut import noised, shortcut_target
from gen.recipes.common.grid_models import tidy
from gen.recipes.common.recipe import Recipe
from gen.recipes.common.train import TrainConfig, fit_average
from gen.recipes.world.evaluation import evaluate

NAME = "world-frames"
PERSISTENCES = (0.2, 0.5, 0.9)  # of the actions, one per board
SEEKING = 0.7  # share of steps towards the box, of an agent that seeks it
ROLL_OUT = 0.3  # share of clips noised as when sampling: context first, then frames of one level
# otherwise, share of frames at the context's level (short clips, long ones) and at 0
AT_CONTEXT, AT_NOISE = (0.45, 0.55), 0.2


@dataclass(frozen=True, kw_only=True)
class WorldPlan:
    """Sizes of the world recipe.

    Attributes:
        flow_steps: training steps of the smallest step size.
        shortcut_steps: training steps of all step sizes.
        long_steps: training steps with long clips.
        long_schedule: steps of their learning-rate schedule, of which the first are run.
        pushes_steps: training steps with clips in which the agent seeks the box.
        batch: clips of a training step, each ``window`` frames long.
        width, layers, heads: of the model.
        held_out: action sequences to measure with.
        horizon: actions of each.
    """

    flow_steps: int = 1500
    shortcut_steps: int = 500
    long_steps: int = 500
    long_schedule: int = 1200
    pushes_steps: int = 450
    batch: int = 16
    lr: float = 0.002
    width: int = 128
    layers: int = 3
    heads: int = 8
    held_out: int = 200
    horizon: int = 24


FULL = WorldPlan()
QUICK = WorldPlan(
    flow_steps=4,
    shortcut_steps=3,
    long_steps=3,
    pushes_steps=3,
    batch=2,
    width=32,
    layers=1,
    heads=8,
    held_out=2,
    horizon=4,
)


def clips(count: int, length: int, seed: int, seeking: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (frames uint8 [count, length, 16, 16, 3], actions long [count, length]).

    The first frame has no action, whose index is the number of actions. In the first ``seeking``
    clips of a batch the agent seeks the box.
    """
    rng = np.random.default_rng(seed)
    while True:
        boards = board.draw(count, rng)
        parts = [
            board.persistent_actions(len(rows), length - 1, persistence, rng)
            for rows, persistence in zip(
                np.array_split(np.arange(count), len(PERSISTENCES)), PERSISTENCES, strict=True
            )
        ]
        actions = np.concatenate(parts)
        if seeking:
            sought = board.seeking_actions(boards, length - 1, SEEKING, rng)
            actions = np.where(np.arange(count)[:, None] < seeking, sought, actions)
        frames = board.roll_out(boards, actions)
        none = np.full((count, 1), len(board.ACTIONS))
        yield torch.from_numpy(frames), torch.from_numpy(np.concatenate([none, actions], 1))


def draw_signal(
    count: int,
    length: int,
    level: float,
    generator: torch.Generator,
    at_context: float = AT_CONTEXT[0],
) -> tuple[Tensor, Tensor]:
    """Draw signal levels float [count, length], and which frames are context, bool [count, length].

    The context is at ``level``. The first frame always counts as context: it has no action.
    """

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    # 1. Independent levels
    kind = uniform(count, length)
    signal = torch.where(kind < at_context + AT_NOISE, torch.zeros(()), uniform(count, length))
    context = kind < at_context
    # 2. Some clips as when sampling
    known = torch.randint(3, length, (count, 1), generator=generator)
    shared = torch.where(uniform(count, 1) < 0.5, torch.zeros(()), uniform(count, 1))
    whole = uniform(count, 1) < ROLL_OUT
    signal = torch.where(whole, shared, signal)
    context = torch.where(whole, torch.arange(length) < known, context)
    context[:, 0] = True
    return signal.masked_fill(context, level), context


def new_model(plan: WorldPlan) -> FrameModel:
    """Create a frame model."""
    model = FrameModel(
        FrameConfig(
            frame=(board.SIDE, board.SIDE, 3),
            actions=board.ACTIONS,
            hidden_size=plan.width,
            num_hidden_layers=plan.layers,
            num_attention_heads=plan.heads,
        )
    )
    model.start()
    return model


def flow_loss(config: FrameConfig, generator: torch.Generator) -> Callable:
    """Loss of the smallest step size: the squared error of every frame that is no context."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, float]]:
        x, actions = to_positions(batch[0], config), batch[1]
        signal, context = draw_signal(*actions.shape, config.context_signal, generator)
        z = noised(x, torch.randn(x.shape, generator=generator), signal)
        error = _error(model, z, signal, torch.full_like(actions, config.finest), actions, x)
        return error[~context].mean(), {}

    return loss


def shortcut_loss(config: FrameConfig, generator: torch.Generator) -> Callable:
    """Loss of all step sizes: half of the clips as in ``flow_loss``, half with a larger step."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, float]]:
        x, actions = to_positions(batch[0], config), batch[1]
        count, half = len(x), len(x) // 2
        signal, context = draw_signal(*actions.shape, config.context_signal, generator)
        # 1. Step sizes above the smallest, with signal levels on their grid
        exponents = torch.randint(config.finest.bit_length() - 1, (half, 1), generator=generator)
        size = (2**exponents).expand(-1, actions.shape[1])
        steps = torch.full_like(actions, config.finest)
        steps[:half] = torch.where(context[:half], steps[:half], size)
        on_grid = (signal[:half] * size).floor() / size
        signal[:half] = torch.where(context[:half], signal[:half], on_grid)
        z = noised(x, torch.randn(x.shape, generator=generator), signal)

        # 2. Targets: two steps of half the size, or the frames themselves
        def predict(z: Tensor, signal: Tensor, steps: Tensor) -> Tensor:
            steps = torch.where(context[:half], config.finest, steps)
            return _predict(model, z, signal, steps, actions[:half])

        large = shortcut_target(predict, z[:half], signal[:half], steps[:half], ~context[:half])
        target = torch.cat([large, x[half:]])
        error = _error(model, z, signal, steps, actions, target)
        chosen = ~context
        first = torch.arange(count)[:, None] < half
        figures = {
            "small": error[chosen & ~first].mean().item(),
            "large": error[chosen & first].mean().item(),
        }
        return error[chosen].mean(), figures

    return loss


def long_loss(config: FrameConfig, generator: torch.Generator) -> Callable:
    """Loss of all step sizes, each clip with one of them, on the frames themselves.

    The next frame is certain, so that paths are straight, and the target of two half steps is the
    frame too; it takes one forward pass instead of three.
    """

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, float]]:
        x, actions = to_positions(batch[0], config), batch[1]
        signal, context = draw_signal(
            *actions.shape, config.context_signal, generator, AT_CONTEXT[1]
        )
        exponents = torch.randint(config.finest.bit_length(), (len(x), 1), generator=generator)
        size = (2**exponents).expand_as(actions)
        signal = torch.where(context, signal, (signal * size).floor() / size)
        steps = torch.where(context, config.finest, size)
        z = noised(x, torch.randn(x.shape, generator=generator), signal)
        error = _error(model, z, signal, steps, actions, x)
        return error[~context].mean(), {}

    return loss


def train(work: Path, plan: WorldPlan, name: str, log: Callable = print) -> None:
    """Train stage ``flow``, or another one from the average of the stage before."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(3)
    steps, lr, loss, before = {
        "flow": (plan.flow_steps, plan.lr, flow_loss, None),
        "shortcut": (plan.shortcut_steps, plan.lr / 2, shortcut_loss, "flow"),
        "long": (plan.long_schedule, plan.lr * 3 / 4, long_loss, "shortcut"),
        "pushes": (plan.pushes_steps, plan.lr * 3 / 4, long_loss, "long"),
    }[name]
    model = new_model(plan)
    if before is not None:
        model = FrameModel.from_pretrained(work / before / "model")
    batch, length, seeking = plan.batch, model.config.window, 0
    if name in ("long", "pushes"):
        batch = max(1, batch // 2)
        length, seeking = (2 * length, 0) if name == "long" else (length * 3 // 2, batch * 3 // 4)
    fit_average(
        model,
        clips(batch, length, {"flow": 5, "shortcut": 6, "long": 7, "pushes": 8}[name], seeking),
        loss(model.config, generator),
        TrainConfig(
            steps=steps,
            lr=lr,
            muon=("layers.", 3 * lr),
            weight_decay=0.02,
            save_every=100,
            cooldown=(plan.long_steps, plan.long_steps) if name == "long" else None,
        ),
        out=work / name,
        log=log,
    )
    save_model(model, work / name / "model")


class WorldRecipe(Recipe):
    """Frame model of the board."""

    doc, full, quick = __doc__, FULL, QUICK

    def stages(self):
        return {
            "flow": lambda: train(self.work, self.plan, "flow", self.log),
            "shortcut": lambda: train(self.work, self.plan, "shortcut", self.log),
            "long": lambda: train(self.work, self.plan, "long", self.log),
            "pushes": lambda: train(self.work, self.plan, "pushes", self.log),
            "export": self.export,
            "evaluate": lambda: evaluate(
                self.zoo, NAME, self.plan.held_out, self.plan.horizon, self.log
            ),
        }

    def export(self) -> None:
        """Write half-precision weights."""
        model = FrameModel.from_pretrained(self.work / "pushes" / "model").half()
        model.config.palette = board.COLOURS.tolist()
        save_model(model, self.zoo / NAME)
        tidy(self.zoo)
        self.log(f"wrote {self.zoo}")


main = WorldRecipe.main


def _predict(model: nn.Module, z: Tensor, signal: Tensor, steps: Tensor, actions: Tensor) -> Tensor:
    """Prediction of a net in training. Matrix products are in bfloat16, which processors with
    instructions for it take a third less time for; loss and optimiser are in float32."""
    with torch.autocast("cpu", torch.bfloat16):
        return model(z, signal, steps, actions)[0].float()


def _error(
    model: nn.Module, z: Tensor, signal: Tensor, steps: Tensor, actions: Tensor, target: Tensor
) -> Tensor:
    """Mean squared error of each frame, [B, F]."""
    return (_predict(model, z, signal, steps, actions) - target).square().mean((-2, -1))


if __name__ == "__main__":
    main()
