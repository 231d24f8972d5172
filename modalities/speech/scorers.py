"""Rewards of speech."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gen.contracts.scorer import Scorer
from gen.core.registry import register
from gen.modalities.speech.checker import hear
from gen.modalities.speech.synth import DIGITS


@register("scorer", "digit_sum")
@dataclass(frozen=True)
class DigitSum(Scorer):
    """Sum of the digits that a clip says; other words count nothing."""

    modalities: ClassVar[tuple[str, ...]] = ("speech",)
    about: ClassVar[str] = "sum of the digits that are heard; 0 to 36"

    def score(self, samples):
        return [sum(DIGITS.index(w) for w in hear(s.media).words if w in DIGITS) for s in samples]


@register("scorer", "pitch")
@dataclass(frozen=True)
class Pitch(Scorer):
    """Median fundamental frequency of the words heard; 0 without voiced sound."""

    modalities: ClassVar[tuple[str, ...]] = ("speech",)
    about: ClassVar[str] = "median pitch of the voice in hertz; 0 without a voice"

    def score(self, samples):
        return [hear(s.media).f0 for s in samples]
