"""MusicGen Melody: music from text that follows the melody of a sound (Copet et al., arXiv
2306.05284).

A melody is the strongest of the pitch classes at every moment, octaves taken together. The decoder
has no cross-attention: the melody and the states of T5 stand before the codes,

    melody of ``chroma_length`` steps, states of the text, codes of the music

A melody that is too short is repeated. Without a sound, and in the unconditional branch of
classifier-free guidance, all steps have the first pitch class, and the unconditional branch has
zeros for the states of its text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad
from torch.nn.utils.rnn import pad_sequence
from transformers.audio_utils import chroma_filter_bank

from gen.contracts.checkpoint import CheckpointFiles, LoadOptions
from gen.contracts.condition import Condition
from gen.core.errors import GenError, bad_value
from gen.core.registry import register
from gen.modalities.checkpoints.musicgen import DelayedWaves, Music, MusicFrames, MusicGen
from gen.modalities.checkpoints.options import is_integer
from gen.modalities.checkpoints.sounds import mono_wave
from gen.models.load.cache_argument import with_cache
from gen.models.published.frame_lm import FrameCache

PROCESSOR = "preprocessor_config.json"
SIZES = ("sampling_rate", "n_fft", "hop_length", "chunk_length", "num_chroma")


@dataclass(frozen=True)
class Melody(Music):
    """Text and the sound whose melody the music follows, if any. ``is_null``: what guidance
    compares with."""

    is_null: bool = False


class MelodyFrames(MusicFrames):
    """Decoder of ``MusicgenMelodyForConditionalGeneration``, whose conditions stand before the
    codes."""

    def new_cache(self, slots: int) -> FrameCache:
        return FrameCache(slots)

    def begin(self, prompt: Tensor, length: Tensor, cache: FrameCache) -> tuple[Tensor, Tensor]:
        start = torch.full((1, 1, self.streams), self.size, device=prompt.device)
        start, states = self.embed(start)[0], self.conditions.of(prompt[:, 0])
        rows = [torch.cat([row["states"].to(start), start]) for row in states]
        cache.rows["gaps"] = start.new_zeros(len(rows), 0, self.streams)  # no sound is continued
        lengths = torch.tensor([len(row) for row in rows], device=length.device)
        return pad_sequence(rows, batch_first=True), lengths

    def run(self, inputs: Tensor, slots: Tensor, cache: FrameCache) -> Tensor:
        mask = cache.slots.at(slots, self.dtype)
        x = inputs + self.decoder.embed_positions.weights[slots].to(inputs)
        for layer in self.decoder.layers:
            x = layer(x, attention_mask=mask, **with_cache(layer, cache.slots))[0]
        return self.decoder.layer_norm(x)


class Chroma:
    """Melodies of sounds: the strongest pitch class of every step of a spectrogram.

    ``rate``: samples per second of sounds. ``longest``: most samples of a sound.
    """

    def __init__(self, sizes: dict[str, int]):
        self.rate, self.n_fft, self.hop = (sizes[key] for key in SIZES[:3])
        self.classes, self.longest = sizes["num_chroma"], sizes["chunk_length"] * self.rate
        bank = chroma_filter_bank(
            sampling_rate=self.rate,
            num_frequency_bins=self.n_fft,
            tuning=0,
            num_chroma=self.classes,
        )
        self.filters = torch.from_numpy(bank).float()

    @classmethod
    def of(cls, files: CheckpointFiles, classes: int) -> Chroma:
        """Read the sizes of spectrograms of a checkpoint whose model has so many pitch classes.

        Raises:
            GenError: one of them is missing, or the pitch classes are not the model's.
        """
        sizes = files.json(PROCESSOR)
        for key in SIZES:
            if not is_integer(sizes.get(key), 1):
                raise bad_value(f"{key} in {PROCESSOR} of {files.name}", sizes.get(key), "a size")
        if sizes["num_chroma"] != classes:
            raise bad_value(
                f"num_chroma in {PROCESSOR} of {files.name}",
                sizes["num_chroma"],
                f"{classes}, the pitch classes of its model",
            )
        return cls({key: sizes[key] for key in SIZES})

    def melody(self, wave: np.ndarray) -> Tensor:
        """Return the pitch class of every step of a wave float32 [n]: 0 or 1 [steps, classes]."""
        samples = torch.from_numpy(np.ascontiguousarray(wave))
        missing = max(0, self.n_fft - len(samples))
        samples = pad(samples, (missing // 2, missing - missing // 2))
        window = torch.hann_window(self.n_fft)
        spectrum = torch.stft(samples, self.n_fft, self.hop, window=window, return_complex=True)
        strength = self.filters @ spectrum.abs().square()
        return one_hot(strength.argmax(0), self.classes)


@register("checkpoint", "musicgen_melody")
class MusicGenMelody(MusicGen):
    """MusicGen Melody (mono), as a folder of transformers.

    ``audio`` is a sound whose melody the music follows, of at most 30 seconds. Its voices are not
    separated: a sound with accompaniment gives the melody of all of it.

    Args:
        seconds: length of the music (5 seconds).
        frames: length in frames, instead of ``seconds``.
    """

    architecture = "MusicgenMelodyForConditionalGeneration"
    tested = (
        "tiny random weights against transformers' MusicgenMelodyForConditionalGeneration, its"
        " `generate` and its feature extractor"
    )

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return files.model_type == "musicgen_melody"

    def __init__(
        self,
        files: CheckpointFiles,
        modality: str,
        load: LoadOptions,
        *,
        seconds: float | None = None,
        frames: int | None = None,
    ):
        super().__init__(files, modality, load, seconds=seconds, frames=frames)
        self.modality = DelayedWaves(self)
        self.chroma = Chroma.of(files, self.model.config.num_chroma)

    def parse(self, condition: Condition) -> Melody:
        """Return the music that a text and the sound of a melody state.

        Raises:
            GenError: the text is empty or too long, or the sound cannot be read or is too long.
        """
        condition.require(self.accepts, "the model", self.most)
        melody = self.condition(condition.text or "")
        if not condition.audio:
            return melody
        melody = replace(melody, sound=condition.media("audio")[0])
        wave = mono_wave(melody.sound, self.chroma.rate)
        if len(wave) > self.chroma.longest:
            raise GenError(
                f"audio lasts {len(wave) / self.chroma.rate:.1f} seconds; expected at most"
                f" {self.chroma.longest // self.chroma.rate}"
            )
        return melody

    def condition(self, prompt: str) -> Melody:
        melody = Melody(super().condition(prompt).text)
        number = torch.tensor([self.conditions.number(melody)])
        count = len(self.conditions.of(number)[0]["states"])
        if count + self.length > self.longest:
            raise GenError(
                f"text and melody take {count} positions; expected at most"
                f" {self.longest - self.length}, the positions of the decoder less those of the"
                " music"
            )
        return melody

    def _unconditional(self, condition: Melody) -> list[int]:
        return self._prompt(replace(condition, sound=None, is_null=True))

    @torch.no_grad()
    def _encode(self, condition: Melody) -> dict[str, Tensor]:
        """States [n, D] that stand before the codes."""
        words = self._states(condition.text)
        length, classes = self.model.config.chroma_length, self.chroma.classes
        melody = one_hot(torch.zeros(1, dtype=torch.long), classes)
        if condition.sound is not None:
            melody = self.chroma.melody(mono_wave(condition.sound, self.chroma.rate))
        melody = melody.repeat(-(-length // len(melody)), 1)[:length].to(words)
        if classes != words.shape[1]:  # transformers adds this layer only where the widths differ
            melody = self.model.audio_enc_to_dec_proj(melody)
        return {"states": torch.cat([melody, words * (not condition.is_null)])}

    def adapter(self, protocol: str) -> MelodyFrames:
        return MelodyFrames(self.model, self.conditions)
