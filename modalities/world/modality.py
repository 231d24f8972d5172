"""World: clips of a board that is played, one frame per action."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.contracts.condition import CONDITION, ConditionEncoder, Prompt
from gen.contracts.frontend import TokenFrontend
from gen.contracts.modality import Binding, Modality, Verdict
from gen.core.errors import GenError, unknown
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.media.video import FORMATS, read_video, write_lossless, write_video
from gen.modalities.world import board
from gen.modalities.world.checker import check as check_clip
from gen.modalities.world.checker import grade as grade_clip
from gen.models.targets.frames import frames_space
from gen.tokenizers.video.patches import Patches

SCALE = 16  # pixels per pixel of a saved clip
FPS = 8.0
FRAME = (board.SIDE, board.SIDE, 3)
REPEAT = "*"  # right*3 is right right right
MOST_ACTIONS = 10_000  # of one prompt


@dataclass(frozen=True)
class Play:
    """Condition of a clip: actions by name, and the seed of the start (None where it is open)."""

    actions: tuple[str, ...]
    seed: int | None = None

    def __str__(self) -> str:
        return " ".join(self.actions)

    def ids(self) -> list[int]:
        """Indices of the actions."""
        return [board.ACTIONS.index(a) for a in self.actions]

    def start(self) -> np.ndarray:
        """Draw the start frame of the seed, uint8 [16, 16, 3]."""
        return start_frame(self.seed or 0)


def start_frame(seed: int) -> np.ndarray:
    """Draw the start frame of a seed, uint8 [16, 16, 3]."""
    return board.render(board.draw(1, np.random.default_rng([seed, board.SIDE])))[0]


def action_number(name: Any) -> int:
    """Return the index of an action. Raises ``GenError`` for an unknown one."""
    if not isinstance(name, str) or name not in board.ACTIONS:
        raise unknown("action", name, board.ACTIONS)
    return board.ACTIONS.index(name)


def parse_actions(prompt: str) -> tuple[str, ...]:
    """Read actions such as ``right right down`` or ``right*2 down``.

    Raises:
        GenError: an unknown action or a bad number.
    """
    out: list[str] = []
    for word in prompt.replace(",", " ").split():
        name, star, number = word.partition(REPEAT)
        action_number(name)
        if star and not (number.isascii() and number.isdigit() and int(number[:6]) > 0):
            raise GenError(
                f"action {word!r} is repeated {number!r} times; expected a number of at least 1"
            )
        out += [name] * (min(int(number[:6]), MOST_ACTIONS + 1) if star else 1)
        if len(out) > MOST_ACTIONS:
            raise GenError(f"the prompt has more than {MOST_ACTIONS} actions; expected fewer")
    if not out:
        raise GenError(f"the prompt has no action; expected some of {', '.join(board.ACTIONS)}")
    return tuple(out)


class StartEncoder(ConditionEncoder):
    """Encoder of start frames: their latents. ``frontend``: frontend of the model."""

    def __init__(self, frontend: TokenFrontend):
        self.frontend = frontend

    def encode(self, condition: int) -> dict[str, Tensor]:
        """Return ``frame``, latents [P, C] of the start of a seed."""
        x = self.frontend.preprocess(start_frame(condition)[None])[None]
        return {"frame": self.frontend.encode(x)[0].flatten(1).T}


@register("modality", "world")
class WorldModality(Modality):
    """Clips of ``gen.modalities.world.board``. The condition is a ``Play``: the prompt's actions,
    and the seed, which decides the start. Latents are the pixels of patches, frame after frame.
    """

    name = "world"
    media_kind = "video"
    extension = "mp4"
    formats = FORMATS
    models = {"frames-latents": "world-frames"}
    frontends = {"latents": "patches"}
    default_samplers = {"frames-latents": "next_frame"}

    def condition(self, prompt: str) -> Play:
        return Play(parse_actions(prompt))

    def ground(self, condition: Play, seed: int) -> Play:
        return replace(condition, seed=seed)

    def drawn_by(self, condition: Play) -> str:
        """Return nothing: a frame depends on the seed and the actions so far, not on later ones."""
        return ""

    def frontend(self, kind="latents", device="cpu", dtype=torch.float32, folder=None):
        return Patches.from_pretrained(folder, device, dtype)

    def bind(self, config: Any, frontend: TokenFrontend, model_name: str) -> Binding:
        shape, actions = tuple(config.frame), tuple(config.actions)
        if shape != FRAME or actions != board.ACTIONS:
            raise GenError(
                f"model {model_name} has frames {shape} and actions {', '.join(actions)}; expected"
                f" {FRAME} and {', '.join(board.ACTIONS)}"
            )
        encoder = StartEncoder(frontend)

        def prompt(play: Play) -> Prompt:
            return Prompt([CONDITION, *play.ids()], play.seed or 0, encoder)

        grid = (1, *frontend.grid_for((1, *config.frame))[1:])
        return Binding(TokenSpace.latents(grid, frontend.config.channels), prompt, [])

    def sized(self, space: TokenSpace, conditions: list[Play]) -> TokenSpace:
        return frames_space(space, 1 + max(len(play.actions) for play in conditions))

    def to_codes(self, tokens: Tensor, space: TokenSpace) -> Tensor:
        rows, columns = space.grid[1:]
        return tokens.unflatten(1, (-1, rows, columns)).movedim(-1, 1)

    def lasting(self, frames: int, frontend: TokenFrontend, space: TokenSpace) -> TokenSpace:
        raise GenError(f"frames is {frames}; expected none: a clip has one frame per action more")

    def save(self, media: np.ndarray, path: Path, info: dict[str, Any]) -> None:
        write_video(path, media, FPS, info, scale=SCALE)

    kept = "mkv"

    def keep(self, media: np.ndarray, path: Path) -> None:
        write_lossless(path, media, FPS)

    def load(self, path: Path) -> np.ndarray:
        return read_video(path, FRAME[:2], self.frame_rate)

    def check(self, media: np.ndarray, prompt: str) -> Verdict:
        return check_clip(np.asarray(media), _ids(prompt))

    def grade(self, media: np.ndarray, prompt: str) -> float:
        """Return the share of frames before the first wrong one."""
        return grade_clip(np.asarray(media), _ids(prompt))

    def example_prompts(self, count: int, seed: int) -> list[str]:
        """Action sequences of 20, half of the actions repeated."""
        rng = np.random.default_rng([123, seed])
        drawn = board.persistent_actions(count, 20, 0.5, rng)
        return [" ".join(board.ACTIONS[a] for a in row) for row in drawn]


def _ids(prompt: str) -> np.ndarray:
    """Indices of a prompt's actions, int64 [T]."""
    return np.array(Play(parse_actions(prompt)).ids())
