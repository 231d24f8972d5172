"""Modalities of published checkpoints: any prompt that the checkpoint takes, with the files of the
embedded modality of that name.

The checkpoint (``gen.contracts.checkpoint``) decides the meaning of prompts, the frontend, and the
way from tokens to codes. There is no checker for these prompts, and ``check`` refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from gen.contracts.condition import Condition
from gen.contracts.modality import Modality, Verdict
from gen.core.errors import GenError
from gen.core.token_space import TokenSpace
from gen.core.tool_calls import ToolFormat
from gen.media.audio import read_wav, write_sound
from gen.media.npz import read_npz, write_npz
from gen.media.video import read_video, write_lossless, write_video
from gen.modalities.image.modality import ImageModality
from gen.modalities.speech.modality import SpeechModality
from gen.modalities.text.modality import TextModality
from gen.modalities.video.modality import VideoModality


class FreePrompts:
    """Mixin before a modality's class that delegates to the checkpoint."""

    models: dict[str, str] = {}
    masked_params: dict[str, Any] = {}

    def __init__(self, checkpoint):
        self.checkpoint = checkpoint

    @property
    def default_samplers(self) -> Mapping[str, str]:
        return {**super().default_samplers, **self.checkpoint.default_samplers}

    @property
    def default_sampling(self) -> dict[str, Any]:
        return self.checkpoint.sampling

    @property
    def needs_prompt(self) -> bool:
        return self.checkpoint.needs_prompt

    @property
    def accepts(self) -> frozenset[str]:
        return self.checkpoint.accepts

    @property
    def most(self) -> Mapping[str, int]:
        return self.checkpoint.most

    @property
    def tool_format(self) -> ToolFormat | None:
        return self.checkpoint.tool_format

    def parse(self, condition: Condition) -> Any:
        return self.checkpoint.parse(condition)

    def raw_ids(self, text: str) -> list[int] | None:
        return self.checkpoint.raw_ids(text)

    def condition(self, prompt: str) -> Any:
        return self.checkpoint.condition(prompt)

    def ground(self, condition: Any, seed: int) -> Any:
        return condition

    def frontend(self, kind, device, dtype, folder=None):
        return self.checkpoint.frontend

    def bind(self, config, frontend, model_name):
        return self.checkpoint.binding

    def to_codes(self, tokens: Tensor, space: TokenSpace) -> Tensor:
        return self.checkpoint.to_codes(tokens, space)

    def example_prompts(self, count: int, seed: int) -> list[str]:
        raise GenError(
            f"a checkpoint of modality {self.name!r} has no prompts to measure with; expected"
            " prompts of your own"
        )

    def check(self, media: Any, prompt: str) -> Verdict:
        raise GenError(
            f"no checker can tell whether the media of this {self.name} model match the prompt;"
            " expected a built-in model, whose language has a checker"
        )

    def grade(self, media: Any, prompt: str) -> float:
        raise GenError(
            f"no checker can grade the media of this {self.name} model, which a scorer asks for;"
            " expected another scorer, such as log_likelihood or a function of (media, prompt)"
        )


class FreeImage(FreePrompts, ImageModality):
    """Images of any size."""


class FreeVideo(FreePrompts, VideoModality):
    """Clips uint8 [F, h, w, 3] at the checkpoint's ``fps``."""

    @property
    def frame_rate(self) -> float:
        return self.checkpoint.fps

    def whole_frames(self, media: Any, frontend) -> np.ndarray:
        clip = np.asarray(media)
        if clip.dtype != np.uint8 or clip.ndim != 4 or clip.shape[-1] != 3:
            raise GenError(
                f"the clip to continue is an array of {clip.dtype} {clip.shape}; expected uint8"
                " [frames, h, w, 3]"
            )
        return clip[: frontend.whole(len(clip))]

    def save(self, media: np.ndarray, path: Path, info: dict[str, Any]) -> None:
        write_video(path, media, self.checkpoint.fps, info)

    def keep(self, media: np.ndarray, path: Path) -> None:
        write_lossless(path, media, self.checkpoint.fps)

    def load(self, path: Path) -> np.ndarray:
        return read_video(path, self.checkpoint.frame_size, self.frame_rate)


class FreeAudio(FreePrompts, SpeechModality):
    """Waves float32 [n] at the sampling rate of the checkpoint's frontend."""

    def whole_frames(self, media: Any, frontend) -> np.ndarray:
        wave = np.asarray(media)
        if (
            wave.ndim != 1
            or not np.issubdtype(wave.dtype, np.floating)
            or not np.isfinite(wave).all()
            or len(wave) < frontend.frame
        ):
            raise GenError(
                f"the wave to continue is an array of {wave.dtype} {wave.shape}; expected finite"
                f" floats [n], at least one frame of {frontend.frame} at {frontend.rate} Hz"
            )
        return wave[: len(wave) // frontend.frame * frontend.frame]

    def trim(self, media: np.ndarray) -> np.ndarray:
        return media

    def save(self, media: np.ndarray, path: Path, info: dict[str, Any]) -> None:
        write_sound(path, media, self.checkpoint.frontend.rate, info)

    def load(self, path: Path) -> np.ndarray:
        return read_wav(path, self.checkpoint.frontend.rate)


class FreeText(FreePrompts, TextModality):
    """Any text."""

    def to_codes(self, tokens: Tensor, space: TokenSpace) -> Tensor:
        return tokens[:, None]

    def prefix(self, media: Any, frontend, space: TokenSpace) -> Tensor:
        text = self.load(Path(media)) if self.is_path(media) else media
        ids = frontend.encode(frontend.preprocess(text)[None])[0, 0]
        if not len(ids) or len(ids) >= space.length:
            raise GenError(
                f"the text to continue has {len(ids)} tokens; expected 1 to {space.length - 1}"
            )
        return ids

    def grade_partial(self, media: str, prompt: str) -> float:
        return self.grade(media, prompt)

    def edit(self, source, where, frontend, space):
        raise GenError(
            "texts of published models cannot be edited; expected the built-in text model"
        )


class FreeAction(FreePrompts, Modality):
    """Chunks of actions, floats [steps, dimensions] in the units of the training data."""

    name, media_kind, extension = "action", "data", "npz"

    def save(self, media: np.ndarray, path: Path, info: dict[str, Any]) -> None:
        write_npz(path, {"action": np.asarray(media), **info})

    def load(self, path: Path) -> np.ndarray:
        return read_npz(path, ("action",))["action"]
