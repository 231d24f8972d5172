"""Scorer ``process``: how much of an unfinished output may belong to a right one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gen.contracts.scorer import GradesPartial, Sample, Scorer
from gen.core.registry import register


@register("scorer", "process")
@dataclass(frozen=True)
class Process(Scorer):
    """Reward of every step, between 0 and 1; of a finished output the grade of ``checker``.

    The beginning of a text has 1 where some right answer begins so, and else the share of it that
    one begins with. Other modalities grade the media of the estimate as they grade an output.
    """

    about: ClassVar[str] = "grade of an unfinished output: 1 while it may become right, 0 to 1"

    def score(self, samples):
        return [reward(s) for s in samples]


def reward(sample: Sample) -> float:
    """Return the process reward of a sample."""
    modality = sample.modality
    if sample.is_partial and isinstance(modality, GradesPartial):
        return modality.grade_partial(sample.media, sample.prompt)
    return modality.grade(sample.media, sample.prompt)
