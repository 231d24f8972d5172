"""Video: clips of 16 frames of 32x32 RGB pixels with a moving shape, as 8x8x8 VQ tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from gen.contracts.modality import Verdict
from gen.core.errors import GenError
from gen.core.registry import register
from gen.media.video import FORMATS, read_video, write_lossless, write_video
from gen.modalities.grid_base import GridModality
from gen.modalities.video import captions as moving
from gen.modalities.video import checker as moving_check
from gen.models.load.locate import ZOO
from gen.tokenizers.video.video_vq import VideoVQ

SCALE = 8  # pixels per pixel of a saved clip: 32 are too few to see
SIDE = (moving.SIZE, moving.SIZE)


@register("modality", "video")
class VideoModality(GridModality):
    """Captioned moving shapes (``gen.modalities.video.captions``). The condition is a ``Caption``;
    a model's prompt is its six slots. Tokens are the codes of a frame row by row, frame after
    frame.
    """

    name = "video"
    media_kind = "video"
    extension = "mp4"
    formats = FORMATS
    models = {
        "causal": "video-causal",
        "masked": "video-masked",
        "blocks": "video-masked",
        "causal-draft": "video-draft",
    }
    frontends = {"codes": "video-vq"}
    default_sampling = {"temperature": 0.7, "guidance_scale": 1.5, "top_k": 50}
    masked_params = {"steps": 64}
    slots = moving.SLOTS
    words = moving.PAIRS
    unconditional = [0] * moving.SLOTS  # no word and no motion
    layout_name = "frame_blocks"

    def condition(self, prompt: str) -> moving.Caption:
        try:
            return moving.parse(prompt)
        except ValueError as error:
            raise GenError(str(error)) from None

    def example_prompts(self, count: int, seed: int) -> list[str]:
        """Held-out captions, to measure with."""
        return [str(c) for c in moving.captions(count, seed=123 + seed, held=True)]

    def prompt_words(self, condition: moving.Caption) -> list[int]:
        return condition.pairs()

    def frontend(self, kind="codes", device="cpu", dtype=torch.float32, folder: Path | None = None):
        return VideoVQ.from_pretrained(folder or ZOO / self.frontends[kind], device, dtype)

    def whole_frames(self, media: Any, frontend) -> np.ndarray:
        clip = np.asarray(media)
        if clip.dtype != np.uint8 or clip.ndim != 4 or clip.shape[1:] != (*SIDE, 3):
            raise GenError(
                f"the clip to continue is an array of {clip.dtype} {clip.shape}; expected uint8"
                f" [frames, {SIDE[0]}, {SIDE[1]}, 3]"
            )
        step = frontend.config.compression[0]
        if len(clip) < step:
            raise GenError(
                f"the clip to continue has {len(clip)} frames; expected at least {step}, the"
                " frames of one code"
            )
        return clip[: len(clip) // step * step]

    def save(self, media: np.ndarray, path: Path, info: dict[str, Any]) -> None:
        write_video(path, media, moving.FPS, info, scale=SCALE)

    kept = "mkv"

    def keep(self, media: np.ndarray, path: Path) -> None:
        write_lossless(path, media, moving.FPS)

    def load(self, path: Path) -> np.ndarray:
        return read_video(path, SIDE, self.frame_rate)

    def check(self, media: np.ndarray, prompt: str) -> Verdict:
        return moving_check.check(media, self.condition(prompt))

    def grade(self, media: np.ndarray, prompt: str) -> float:
        """Return the share of the caption's attributes that a clip shows."""
        return moving_check.grade(media, self.condition(prompt))
