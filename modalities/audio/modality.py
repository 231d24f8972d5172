"""Sounds of bouncing balls: 2 s at 16 kHz as 32 frames of 3 bands, from a clip and a caption."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gen.contracts.condition import CONDITION, Condition, Prompt
from gen.contracts.frontend import TokenFrontend
from gen.contracts.modality import Binding, Verdict
from gen.core.errors import GenError
from gen.core.registry import register
from gen.media.audio import FORMATS, read_wav, write_sound
from gen.media.muxed import write_sounding_mp4
from gen.modalities.audio import balls, captions, checker, prompts
from gen.modalities.audio.states import ROWS, SoundCondition, sound_states
from gen.modalities.grid_base import GridModality
from gen.models.load.locate import ZOO, locate, read_config
from gen.models.load.networks import config_field
from gen.tokenizers.audio.codecs import open_codec

SCALE = 16  # pixels per pixel of a saved clip


@dataclass(frozen=True, eq=False)
class SoundTrack:
    """``wave`` float32 [n] and the ``frames`` uint8 [T, h, w, 3] that it belongs to. numpy converts
    it to its wave.
    """

    wave: np.ndarray
    frames: np.ndarray

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.array(self.wave, dtype=dtype)


@register("modality", "audio")
class AudioModality(GridModality):
    """Sounds of ``gen.modalities.audio.balls``.

    The condition is a ``SoundCondition``. A model's prompt is the states of a model of captions
    that reads clip and caption, or else the tiles of the clip and four words of the caption. A
    pitch that the caption states counts more than the colour that the clip shows.
    Tokens are the codes of a frame, low band first, frame after frame.
    """

    name = "audio"
    media_kind = "audio"
    extension = "wav"
    formats = FORMATS
    also = ("mp4",)
    models = {"masked": "audio-masked"}
    frontends = {"codes": prompts.BANDS_FOLDER}
    default_sampling = {"guidance_scale": 1.5}
    masked_params = {"steps": 16}
    accepts = frozenset({"text", "video"})
    most = {"video": 1}
    slots = prompts.SOUND_SLOTS
    words = prompts.SOUND_WORDS
    unconditional = prompts.UNCONDITIONAL
    layout_name, layout_params = "flatten", {"order": "time_major", "vocabulary": "offset"}
    streams = True
    rate = balls.RATE

    def parse(self, condition: Condition) -> SoundCondition:
        condition.require(self.accepts, f"modality {self.name!r}", self.most)
        if not condition.video:
            return self.condition(condition.text or "")
        said = self._caption(condition.text) if condition.text else captions.Caption()
        clip = condition.media("video", fps=balls.FPS)[0]
        tiles = prompts.clip_codes(prompts.clip_frames(clip))
        return SoundCondition(said, clip, tuple(tiles))

    def condition(self, prompt: str) -> SoundCondition:
        return SoundCondition(self._caption(prompt))

    def prompt_sizes(self, config: Any) -> tuple[int, int]:
        if config_field(config, "states_of") is None:
            return super().prompt_sizes(config)
        return ROWS, 0

    def bind(self, config: Any, frontend: TokenFrontend, model_name: str) -> Binding:
        """Bind a model of sounds, whose prompts are token ids, or states of a model of captions.

        Raises:
            GenError: another layout, other codes, or states of another size.
        """
        binding = super().bind(config, frontend, model_name)
        source = config_field(config, "states_of")
        if source is None:
            return binding
        # a model trained elsewhere brings the other one along
        beside = Path(locate(model_name)).parent / source
        source = str(beside) if beside.is_dir() else source
        states = sound_states(source, config.states_digest)
        size = read_config(source)["hidden_size"]
        if size != config.state_size:
            raise GenError(
                f"model {model_name} takes states of {config.state_size} entries, and those of"
                f" {source} have {size}"
            )

        def prompt(condition: SoundCondition) -> list[int] | Prompt:
            if condition.clip is None and not condition.caption.balls:
                return nothing
            return Prompt([CONDITION] * ROWS, condition, states)

        nothing = [config.mask_token_id] * ROWS
        return replace(binding, prompt=prompt, unconditional=nothing)

    def _caption(self, text: str) -> captions.Caption:
        """Parse a caption. Raises ``GenError`` for one that does not parse."""
        try:
            return captions.parse(text)
        except ValueError as error:
            raise GenError(str(error)) from None

    def example_prompts(self, count: int, seed: int) -> list[str]:
        """Captions of held-out clips, to measure with."""
        return [str(s.caption()) for s in balls.scenes(count, 123 + seed, held=True)]

    def prompt_words(self, condition: SoundCondition) -> list[int]:
        return prompts.sound_words(condition.tiles, condition.caption)

    def frontend(self, kind="codes", device="cpu", dtype=torch.float32, folder: Path | None = None):
        return open_codec(folder or ZOO / self.frontends[kind], device, dtype)

    def complete(self, media: np.ndarray, condition: SoundCondition) -> np.ndarray | SoundTrack:
        if condition.clip is None:
            return media
        return SoundTrack(media, prompts.clip_frames(condition.clip))

    def whole_frames(self, media: Any, frontend: TokenFrontend) -> np.ndarray:
        wave = np.asarray(media)
        if wave.ndim != 1 or not np.issubdtype(wave.dtype, np.floating):
            raise GenError(
                f"the wave to continue is an array of {wave.dtype} {wave.shape}; expected floats"
                f" [n], one channel at {self.rate} Hz"
            )
        frame = frontend.config.compression[0]
        frames = len(wave) // frame
        if not frames:
            raise GenError(
                f"the wave to continue has {len(wave)} samples; expected at least {frame} at"
                f" {self.rate} Hz, one frame"
            )
        return wave[: frames * frame]

    def save(self, media: np.ndarray | SoundTrack, path: Path, info: dict[str, Any]) -> None:
        write_sound(path, np.asarray(media), self.rate, info)

    def save_also(self, media: np.ndarray | SoundTrack, path: Path, info: dict[str, Any]) -> None:
        """Write an MP4 with the sound: its clip, or bars of the bands where there was none."""
        wave = np.asarray(media)
        frames = media.frames if isinstance(media, SoundTrack) else bars(wave)
        write_sounding_mp4(path, frames, balls.FPS, wave, self.rate, info, scale=SCALE)

    def load(self, path: Path) -> np.ndarray:
        return read_wav(path, self.rate)

    def check(self, media: np.ndarray | SoundTrack, prompt: str) -> Verdict:
        return checker.check(np.asarray(media), self._stated(prompt))

    def judge(self, media: np.ndarray | SoundTrack, condition: Condition) -> Verdict:
        """Judge a sound of a caption, or of a clip: its hits are those that the clip shows."""
        wanted = self.parse(condition)
        if wanted.clip is None:
            return checker.check(np.asarray(media), wanted.caption)
        frames = prompts.clip_frames(wanted.clip)
        return checker.check_clip(np.asarray(media), frames, wanted.caption)

    def grade(self, media: np.ndarray | SoundTrack, prompt: str) -> float:
        """Return the share of a caption's pitches and numbers that are heard."""
        return checker.agreement(checker.listen(np.asarray(media)), self._stated(prompt))

    def _stated(self, prompt: str) -> captions.Caption:
        """Caption of a prompt; an empty one states nothing."""
        return self._caption(prompt) if prompt else captions.Caption()


def bars(wave: np.ndarray) -> np.ndarray:
    """Draw a sound as frames, uint8 [T, 16, 16, 3]: a bar for every pitch, low left, as high as the
    hit of that frame is loud, in the colour of the pitch.
    """
    count = max(1, -(-len(wave) // balls.HOP))
    out = np.empty((count, balls.SIZE, balls.SIZE, 3), np.uint8)
    out[:] = balls.GROUND
    for hit in checker.listen(wave):
        if hit.pitch is None or hit.frame >= count:
            continue
        index = captions.PITCHES.index(hit.pitch)
        left, top = 1 + 5 * (len(captions.PITCHES) - 1 - index), 2 if hit.loud else 9
        out[hit.frame, top : balls.SIZE - 1, left : left + 4] = balls.PALETTE[
            captions.COLOURS[index]
        ]
    return out
