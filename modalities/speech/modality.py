"""Speech: up to four spoken words, 2.4 s at 16 kHz, as 60 frames of 4 residual codes.

The condition is an utterance, or a sound of spoken digits to translate
(``gen.modalities.speech.translation``), whose tokens are sounds and durations instead.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gen.contracts.condition import Condition
from gen.contracts.frontend import TokenFrontend, codebook_digest, require_same_frontend
from gen.contracts.modality import Binding, Verdict
from gen.core.errors import GenError
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.media.audio import FORMATS, read_wav, write_sound
from gen.modalities.grid_base import GridModality
from gen.modalities.speech import checker as spoken_check
from gen.modalities.speech import synth as spoken
from gen.modalities.speech import translation as spoken_translation
from gen.modalities.speech.phones import SLOTS, SpokenPhones, TranslatedSpeech
from gen.modalities.speech.translation import SpokenSource, source_tokens
from gen.modalities.text import translation
from gen.models.load.locate import ZOO
from gen.models.load.networks import config_field
from gen.tokenizers.audio.codecs import open_codec

CODEC = "speech-codec"  # zoo folder of the codec
TRANSLATION = "speech-translation"  # of the model that translates
TRANSLATION_TOKENS = "speech-translation-tokens"  # of the description of its tokens
KEPT = 256  # sounds whose tokens a binding keeps
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
    models = {
        "causal": "speech-causal",
        "masked": "speech-masked",
        "causal-draft": "speech-draft",
        "lattice-audio": TRANSLATION,
    }
    frontends = {"codes": CODEC}
    default_sampling = {"guidance_scale": 2.0, "top_k": 50}
    default_samplers = GridModality.default_samplers | {"lattice": "joint_viterbi"}
    accepts = frozenset({"text", "audio"})
    most = {"audio": 1}
    masked_params = {"steps": 30}
    slots = spoken.SLOTS
    words = spoken.PAIRS
    unconditional = spoken.pairs(np.full((1, spoken.SLOTS), spoken.ANY))[0].tolist()
    layout_name, layout_params = "flatten", {"order": "time_major", "vocabulary": "offset"}
    streams = True
    rate = spoken.RATE

    def condition(self, prompt: str) -> spoken.Utterance:
        try:
            return spoken.parse(prompt)
        except ValueError as error:
            raise GenError(str(error)) from None

    def parse(self, condition: Condition) -> spoken.Utterance | SpokenSource:
        """Return the utterance of a text, or the sound to translate.

        A text beside a sound says what it says, ``translate: seven two``, for the checker alone.
        """
        condition.require(self.accepts, f"modality {self.name!r}", self.most)
        text = condition.text or ""
        if condition.audio:
            reference = self._reference(text) if text else None
            source = SpokenSource(condition.media("audio")[0], reference)
            spoken_translation.clip(source.sound)  # a sound that cannot be translated fails here
            return source
        if translation.is_translation(text):
            raise GenError(
                f"the prompt is {text!r} without a sound; expected the sound to translate as the"
                " part audio"
            )
        return self.condition(text)

    def _reference(self, text: str) -> translation.Translation:
        """Read what a sound to translate says."""
        try:
            return translation.parse(text)
        except ValueError as error:
            raise GenError(f"the text beside the sound: {error}") from None

    def example_prompts(self, count: int, seed: int) -> list[str]:
        """Held-out utterances, to measure with."""
        return [str(u) for u in spoken.utterances(count, seed=123 + seed, held=True)]

    def prompt_words(self, condition: spoken.Utterance | SpokenSource) -> list[int]:
        if isinstance(condition, SpokenSource):
            raise GenError(
                "the condition is a sound, and the model speaks words; expected a model that"
                f" translates, such as {TRANSLATION!r} with the sampler 'joint_viterbi'"
            )
        return condition.pairs()

    def frontend(self, kind="codes", device="cpu", dtype=torch.float32, folder: Path | None = None):
        if folder is not None and folder.name == TRANSLATION_TOKENS:
            return SpokenPhones.from_pretrained(folder, device)
        return open_codec(folder or ZOO / self.frontends[kind], device, dtype)

    def bind(self, config: Any, frontend: TokenFrontend, model_name: str) -> Binding:
        if config_field(config, "vertices_per_word") is None:
            return super().bind(config, frontend, model_name)
        if not isinstance(frontend, SpokenPhones):
            raise GenError(
                f"model {model_name} makes spoken phonemes, and its frontend is a"
                f" {type(frontend).__name__}; expected {TRANSLATION_TOKENS!r}"
            )
        require_same_frontend(config, frontend, model_name, TRANSLATION_TOKENS)
        codec = self.frontend(device=frontend.device)
        if config_field(config, "source_digest") != codebook_digest(codec.fingerprint):
            raise GenError(
                f"model {model_name} reads the tokens of another codec than {CODEC!r}; expected"
                " the one it was trained with"
            )
        sizes, size = spoken_translation.CODES, sum(spoken_translation.CODES)
        legal = torch.zeros(SLOTS, len(sizes), size + 1, dtype=torch.bool)
        for stream, width in enumerate(sizes):
            first = sum(sizes[:stream])
            legal[:, stream, first : first + width] = True
        legal = legal.flatten(0, 1)
        space = TokenSpace((SLOTS, len(sizes)), size + 1, legal, size)

        @lru_cache(KEPT)
        def tokens(source: SpokenSource) -> tuple[int, ...]:
            return tuple(source_tokens(codec, [source.wave])[0])

        def prompt(condition: spoken.Utterance | SpokenSource) -> list[int]:
            if isinstance(condition, SpokenSource):
                return list(tokens(condition))
            raise GenError(
                f"the prompt is {str(condition)!r}, and model {model_name} translates a sound;"
                " expected the part audio"
            )

        return Binding(space, prompt, [])

    def whole_frames(self, media: Any, frontend) -> np.ndarray:
        wave = np.asarray(media)
        if wave.ndim != 1 or not np.issubdtype(wave.dtype, np.floating):
            raise GenError(
                f"the wave to continue is an array of {wave.dtype} {wave.shape}; expected floats"
                f" [n], one channel at {self.rate} Hz"
            )
        if not np.isfinite(wave).all():
            raise GenError(
                "the wave to continue holds NaN or inf; expected finite samples in [-1, 1]"
            )
        frames = len(wave) // frontend.frame
        if not frames:
            raise GenError(
                f"the wave to continue has {len(wave)} samples; expected at least {frontend.frame}"
                f" at {self.rate} Hz, one frame"
            )
        return wave[: frames * frontend.frame]

    def trim(self, media: np.ndarray) -> np.ndarray:
        loud = np.flatnonzero(np.abs(media) > AUDIBLE)
        return media[: loud[-1] + 1 + TAIL] if len(loud) else media[:TAIL]

    def save(self, media: np.ndarray, path: Path, info: dict[str, Any]) -> None:
        if isinstance(media, TranslatedSpeech):
            info = {**info, "words": " ".join(media.words)}
        write_sound(path, media, self.rate, info)

    def load(self, path: Path) -> np.ndarray:
        return read_wav(path, self.rate)

    def check(self, media: np.ndarray, prompt: str) -> Verdict:
        if not prompt or translation.is_translation(prompt):
            return spoken_translation.check(media, self._reference(prompt) if prompt else None)
        return spoken_check.check(media, self.condition(prompt))

    def judge(self, media: np.ndarray, condition: Condition) -> Verdict:
        """Judge a translation against what its source says: its text, or what is heard in it."""
        source = self.parse(condition)
        if not isinstance(source, SpokenSource):
            return super().judge(media, condition)
        reference = source.reference or spoken_translation.source_heard(source.wave)
        return spoken_translation.check(media, reference)

    def grade(self, media: np.ndarray, prompt: str) -> float:
        """Return the share of right words, times that of voice and speed."""
        if not prompt or translation.is_translation(prompt):
            return spoken_translation.grade(media, self._reference(prompt) if prompt else None)
        return spoken_check.grade(media, self.condition(prompt))
