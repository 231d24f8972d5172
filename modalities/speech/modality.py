"""Speech: up to four spoken words, 2.4 s at 16 kHz, as 60 frames of 4 residual codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from gen.contracts.modality import Verdict
from gen.core.errors import GenError
from gen.core.registry import register
from gen.media.audio import FORMATS, read_wav, write_sound
from gen.modalities.grid_base import GridModality
from gen.modalities.speech import checker as spoken_check
from gen.modalities.speech import synth as spoken
from gen.models.load.locate import ZOO
from gen.tokenizers.audio.mimi import Mimi

AUDIBLE = 0.01  # of full scale; lower values at the end of a wave are silence
TAIL = spoken.RATE // 10  # samples of silence that stay after the last audible one


@register("modality", "speech")
class SpeechModality(GridModality):
    """Spoken words (``gen.modalities.speech.synth``). The condition is an ``Utterance``; a model's
    prompt is its six slots, each joined with its number. Tokens are the codes of a frame, coarse
    ones first, frame after frame.
    """

    name = "speech"
    media_kind = "audio"
    extension = "wav"
    formats = FORMATS
    models = {"causal": "speech-causal", "masked": "speech-masked", "causal-draft": "speech-draft"}
    frontends = {"codes": "speech-codec"}
    default_sampling = {"guidance_scale": 2.0, "top_k": 50}
    masked_params = {"steps": 30}
    slots = spoken.SLOTS
    words = spoken.PAIRS
    unconditional = spoken.pairs(np.full((1, spoken.SLOTS), spoken.ANY))[0].tolist()
    layout_name, layout_params = "flatten", {"order": "time_major", "vocabulary": "offset"}
    streams = True

    def condition(self, prompt: str) -> spoken.Utterance:
        try:
            return spoken.parse(prompt)
        except ValueError as error:
            raise GenError(str(error)) from None

    def example_prompts(self, count: int, seed: int) -> list[str]:
        """Held-out utterances, to measure with."""
        return [str(u) for u in spoken.utterances(count, seed=123 + seed, held=True)]

    def prompt_words(self, condition: spoken.Utterance) -> list[int]:
        return condition.pairs()

    def frontend(self, kind="codes", device="cpu", dtype=torch.float32, folder: Path | None = None):
        return Mimi.from_pretrained(folder or ZOO / self.frontends[kind], device, dtype)

    def whole_frames(self, media: Any, frontend) -> np.ndarray:
        wave = np.asarray(media)
        if wave.ndim != 1 or not np.issubdtype(wave.dtype, np.floating):
            raise GenError(
                f"the wave to continue is an array of {wave.dtype} {wave.shape}; expected floats"
                f" [n], one channel at {spoken.RATE} Hz"
            )
        if not np.isfinite(wave).all():
            raise GenError(
                "the wave to continue holds NaN or inf; expected finite samples in [-1, 1]"
            )
        frames = len(wave) // frontend.frame
        if not frames:
            raise GenError(
                f"the wave to continue has {len(wave)} samples; expected at least {frontend.frame}"
                f" at {spoken.RATE} Hz, one frame"
            )
        return wave[: frames * frontend.frame]

    def trim(self, media: np.ndarray) -> np.ndarray:
        loud = np.flatnonzero(np.abs(media) > AUDIBLE)
        return media[: loud[-1] + 1 + TAIL] if len(loud) else media[:TAIL]

    def save(self, media: np.ndarray, path: Path, info: dict[str, Any]) -> None:
        write_sound(path, media, spoken.RATE, info)

    def load(self, path: Path) -> np.ndarray:
        return read_wav(path, spoken.RATE)

    def check(self, media: np.ndarray, prompt: str) -> Verdict:
        return spoken_check.check(media, self.condition(prompt))

    def grade(self, media: np.ndarray, prompt: str) -> float:
        """Return the share of right words, times that of voice and speed."""
        return spoken_check.grade(media, self.condition(prompt))
