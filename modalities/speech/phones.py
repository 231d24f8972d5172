"""Tokens of spoken translations: sounds, durations, pitch and vocal tract of the slots of words
(``gen.modalities.speech.translation``), and the formant synthesiser that speaks them.

There are no weights: a code is a sound, a number of steps, a number of pulses or a scale. A signal
is a score, and the synthesiser makes a sound of it last, so that scores can be coded exactly.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from gen.contracts.frontend import FrontendConfig, TokenFrontend, require_codes
from gen.core.errors import GenError
from gen.modalities.speech import synth
from gen.modalities.speech import translation as spoken
from gen.models.load.locate import locate, pick_device, read_config

SLOTS = synth.MAX_WORDS * spoken.SLOTS


class TranslatedSpeech(np.ndarray):
    """Waveform float32 [n] with the words that its tokens name.

    Attributes:
        words: words, in their order; cuts of the waveform keep them.
    """

    words: tuple[str, ...] = ()

    @classmethod
    def of(cls, wave: np.ndarray, words: tuple[str, ...]) -> Self:
        """Return the waveform with its words."""
        found = np.asarray(wave).view(cls)
        found.words = words
        return found

    def __array_finalize__(self, other: Any) -> None:
        if isinstance(other, TranslatedSpeech):
            self.words = other.words


class SpokenPhones(TokenFrontend):
    """Codes int64 [B, 4, 32] of scores float32 [B, 32, 4] (``spoken.score``)."""

    name = "spoken_phones"
    grid = (SLOTS,)
    rate = synth.RATE

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = pick_device(device)
        self.config = FrontendConfig("speech", "codes", spoken.CODES, (1,))
        first, step, _ = spoken.SCALES
        self.units = torch.tensor([1.0, spoken.STEP, 1.0, step], device=self.device)
        self.zeros = torch.tensor([0.0, 0.0, 0.0, first], device=self.device)

    def preprocess(self, media: Any) -> Tensor:
        """Return the score of an array, float32 [32, 4].

        Raises:
            GenError: it has another shape; sounds have no score.
        """
        notes = np.asarray(media, np.float32)
        if notes.size != SLOTS * len(spoken.CODES):
            raise GenError(
                f"the score is an array {notes.shape}; expected [{SLOTS}, {len(spoken.CODES)}],"
                " sound, seconds, pulses and scale of every slot: a sound cannot be turned into one"
            )
        return torch.from_numpy(notes.reshape(SLOTS, -1)).to(self.device)

    def encode(self, x: Tensor) -> Tensor:
        codes = ((x - self.zeros) / self.units).round().long().transpose(1, 2)
        top = torch.tensor(spoken.CODES, device=codes.device)[:, None] - 1
        return torch.minimum(codes.clamp(min=0), top)

    def decode(self, codes: Tensor) -> Tensor:
        require_codes(codes, self.config)
        return codes.transpose(1, 2).to(self.device) * self.units + self.zeros

    def postprocess(self, x: Tensor) -> TranslatedSpeech:
        """Speak a score [slots, 4]: float32 [38400] with its words."""
        return TranslatedSpeech.of(*spoken.speak_score(x.cpu().numpy()))

    @property
    def codebooks(self) -> list[Tensor]:
        """Values of the codes of every stream, [V, 1]."""
        return [
            (torch.arange(size, device=self.device) * unit + zero)[:, None]
            for size, unit, zero in zip(spoken.CODES, self.units, self.zeros, strict=True)
        ]

    @property
    def fingerprint(self) -> Tensor:
        """Digest of lexicon and units as 32 numbers of 0 to 255, exact in every floating-point
        dtype."""
        told = [spoken.FOREIGN.entries, spoken.PHONE_NAMES, spoken.CODES, spoken.STEP]
        text = json.dumps([*told, spoken.SCALES])
        return torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.float32)

    def grid_for(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the grid, the same for every score."""
        return self.grid

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json``."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        described = {"frontend_class": self.name, "code_sizes": spoken.CODES}
        (path / "config.json").write_text(json.dumps(described, indent=1) + "\n")

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str = torch.float32,
    ) -> Self:
        """Load a zoo name or local folder; ``dtype`` changes nothing, since there are no weights.

        Raises:
            GenError: the folder is missing or holds another frontend.
        """
        config = read_config(locate(folder, "frontend"))
        expected = {"frontend_class": cls.name, "code_sizes": list(spoken.CODES)}
        if config != expected:
            raise GenError(f"the config of frontend {folder} is {config}; expected {expected}")
        return cls(device)
