"""Actions: chunks of 16 control steps for a gripper on a table, as 32 uniform bins or as
byte-pair-encoded frequencies (FAST).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.contracts.condition import Condition
from gen.contracts.frontend import TokenFrontend, require_same_frontend
from gen.contracts.modality import Binding, Modality, Verdict
from gen.core.errors import GenError
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.media.npz import read_npz, write_npz
from gen.media.video import write_mp4
from gen.modalities.action import checker as tabletop_check
from gen.modalities.action import tasks as tabletop_tasks
from gen.modalities.action import world as tabletop
from gen.modalities.action.camera import camera
from gen.modalities.action.tasks import STATE_KEY, TASK_KEY, Task
from gen.modalities.action.view import CAMERA, IMAGE_KEY, animate
from gen.modalities.grid_base import GridModality
from gen.models.load.locate import ZOO
from gen.tokenizers.action.base import ActionFrontend

CENTIMETRES = 101  # words for one number of the state
ANY = 0  # word of a number that the task leaves open or does not have


@dataclass(frozen=True, eq=False)
class Situation:
    """Condition of a chunk: a task and the state float32 [7] that it starts from."""

    task: Task
    state: np.ndarray

    def __str__(self) -> str:
        return f"{self.task} | {' '.join(f'{v:.6g}' for v in self.state.tolist())}"

    def words(self) -> list[int]:
        """Words of the task and of the state's numbers in centimetres."""
        kind = tabletop.KINDS.index(self.task.kind)
        used = tabletop.USED[self.task.kind]
        first = 1 + len(tabletop.KINDS)
        near = np.rint(100 * self.state).astype(int).clip(0, CENTIMETRES - 1)
        return [
            1 + kind,
            *(
                first + int(n) if name in used else ANY
                for name, n in zip(tabletop.STATE_NAMES, near, strict=True)
            ),
        ]


@dataclass(frozen=True, eq=False)
class ActionChunk:
    """``action`` float32 [16, 2] and the situation it is meant for. numpy converts it to its
    actions.
    """

    action: np.ndarray
    situation: Situation

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.array(self.action, dtype=dtype)


@register("modality", "action")
class ActionModality(GridModality):
    """Next actions of the gripper of ``gen.modalities.action.world``.

    The condition is a ``Situation``: a task and a state. The seed decides the numbers of the state
    that the prompt leaves open. A model's prompt is the situation's eight slots.
    """

    name = "action"
    media_kind = "data"
    extension = "npz"
    also = ("mp4",)
    models = {"causal": "action-causal", "masked": "action-masked", "causal-draft": "action-draft"}
    frontends = {"codes": "action-bins"}
    default_sampling = {"temperature": 0.2}
    accepts = frozenset({"text", "observation"})
    slots = 1 + tabletop.STATES
    words = 1 + len(tabletop.KINDS) + CENTIMETRES
    unconditional = [ANY] * slots
    layout_name = "raster"

    def condition(self, prompt: str) -> Task:
        try:
            return tabletop_tasks.parse(prompt)
        except ValueError as error:
            raise GenError(str(error)) from None

    def ground(self, condition: Task | Situation, seed: int) -> Situation:
        if isinstance(condition, Situation):  # an observation leaves nothing open
            return condition
        return Situation(
            condition,
            tabletop_tasks.draw_state(
                condition, np.random.default_rng([seed, len(str(condition))])
            ),
        )

    def parse(self, condition: Condition) -> Task | Situation:
        """Return the condition that a text or an observation states. The state of an observation
        without one is read from its camera image."""
        if condition.observation is None:
            return super().parse(condition)
        condition.require(frozenset({"observation"}), "a policy")
        observation = dict(condition.observation)
        if STATE_KEY not in observation and IMAGE_KEY in observation:
            task = tabletop_tasks.observed_task(observation)
            image = condition.cameras((CAMERA, CAMERA))[IMAGE_KEY]
            return Situation(task, camera().state(image, task.kind))
        state, task = tabletop_tasks.validate_observation(observation)
        return Situation(task, state)

    def example_prompts(self, count: int, seed: int) -> list[str]:
        """Tasks from held-out states, to measure with."""
        return [
            str(tabletop_tasks.described(s))
            for s in tabletop_tasks.episodes(count, 123 + seed, held=True).states
        ]

    def prompt_words(self, condition: Situation) -> list[int]:
        return condition.words()

    def frontend(
        self, kind="codes", device="cpu", dtype=torch.float32, folder: Path | None = None
    ) -> ActionFrontend:
        return ActionFrontend.from_pretrained(folder or ZOO / self.frontends[kind], device, dtype)

    def bind(self, config: Any, frontend: TokenFrontend, model_name: str) -> Binding:
        if (frontend.horizon, frontend.dimensions) != (tabletop.HORIZON, tabletop.DIMENSIONS):
            raise GenError(
                f"the frontend of model {model_name} makes chunks of {frontend.horizon} steps and"
                f" {frontend.dimensions} dimensions; expected {tabletop.HORIZON} and"
                f" {tabletop.DIMENSIONS}"
            )
        if frontend.config.kind == "codes":
            return super().bind(config, frontend, model_name)
        size = frontend.vocab_size
        if (
            config.codebook_size != size
            or config.prefix_length != self.slots
            or tuple(config.grid) != frontend.grid
        ):
            raise GenError(
                f"model {model_name} has codebook_size {config.codebook_size}, prefix_length"
                f" {config.prefix_length} and grid {tuple(config.grid)}; expected {size},"
                f" {self.slots} and {frontend.grid}"
            )
        if not config.causal:
            raise GenError(
                f"model {model_name} is a masked one of ids whose number differs from chunk to"
                " chunk; expected a causal one, or bins"
            )
        require_same_frontend(config, frontend, model_name, self.frontends["codes"])
        space = TokenSpace.codes(frontend.grid, size, config.vocab_size)
        space.legal[0, frontend.eos_token_id] = False
        constraint = replace(
            frontend.constraint,
            lengths=torch.nn.functional.pad(
                frontend.constraint.lengths, (0, config.vocab_size - size)
            ),
        )
        space = replace(space, eos_token_id=frontend.eos_token_id, constraint=constraint)

        def shift(slots):
            return [s + size for s in slots]

        return Binding(space, lambda c: shift(self.prompt_words(c)), shift(self.unconditional))

    def to_codes(self, tokens: Tensor, space: TokenSpace) -> Tensor:
        if space.eos_token_id is None:
            return super().to_codes(tokens, space)
        return torch.nn.functional.pad(
            tokens, (0, space.length - tokens.shape[1]), value=space.eos_token_id
        )[:, None]

    def prefix(self, media: Any, frontend: TokenFrontend, space: TokenSpace) -> Tensor:
        return Modality.prefix(self, media, frontend, space)

    def whole_frames(self, media: Any, frontend) -> Any:
        raise NotImplementedError("action chunks cannot be continued; expected no prefix")

    def complete(self, media: np.ndarray, condition: Situation) -> ActionChunk:
        return ActionChunk(media, condition)

    def save(self, media: ActionChunk, path: Path, info: dict[str, Any]) -> None:
        pad = np.zeros(len(media.action), bool)
        write_npz(
            path,
            {
                "action": media.action,
                "action_is_pad": pad,
                STATE_KEY: media.situation.state,
                TASK_KEY: str(media.situation.task),
                **info,
            },
        )

    def save_also(self, media: ActionChunk, path: Path, info: dict[str, Any]) -> None:
        write_mp4(path, animate(media.situation.state, media.action), tabletop.CONTROL_HZ, info)

    def load(self, path: Path) -> ActionChunk:
        arrays = read_npz(path, ("action", STATE_KEY, TASK_KEY))
        return ActionChunk(
            arrays["action"], Situation(self.condition(str(arrays[TASK_KEY])), arrays[STATE_KEY])
        )

    def check(self, media: ActionChunk, prompt: str) -> Verdict:
        task = self._task(media, prompt)
        return tabletop_check.check(media.action, media.situation.state, task)

    def grade(self, media: ActionChunk, prompt: str) -> float:
        """Return how much of the way to the goal a chunk goes."""
        return tabletop_check.grade(media.action, media.situation.state, self._task(media, prompt))

    def _task(self, media: ActionChunk, prompt: str) -> Task:
        """Return the task of a prompt; of an empty one, the task of the observation."""
        return self.condition(prompt) if prompt else media.situation.task
