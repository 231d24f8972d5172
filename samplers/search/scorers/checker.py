"""Scorer ``checker``: how much of its prompt the modality's checker finds in an output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gen.contracts.scorer import Scorer
from gen.core.registry import register


@register("scorer", "checker")
@dataclass(frozen=True)
class Checker(Scorer):
    """Grade of the modality's checker, between 0 and 1; 1 where the output passes."""

    about: ClassVar[str] = "grade of the modality's checker, 0 to 1"

    def score(self, samples):
        return [s.modality.grade(s.media, s.prompt) for s in samples]
