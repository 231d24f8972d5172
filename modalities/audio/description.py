"""Captions of clips and sounds with bouncing balls, as their checkers read them."""

from __future__ import annotations

from collections import Counter

from gen.contracts.modality import Verdict
from gen.modalities.audio import checker, prompts
from gen.modalities.audio.balls import touches
from gen.modalities.audio.captions import COLOURS, PITCHES, Ball, Caption, natural, parse
from gen.modalities.media_tokens import Description


def caption_of(asked: Description) -> Caption:
    """Return the full caption of what a clip shows, or of what the checker hears in a sound."""
    if asked.part == "video":
        frames = prompts.clip_frames(asked.medium)
        counts = Counter(colour for _, colour in touches(frames))
    else:
        heard = checker.listen(prompts.sound_wave(asked.medium))
        counts = Counter(COLOURS[PITCHES.index(h.pitch)] for h in heard if h.pitch)
    return Caption(tuple(Ball(c, counts[c], natural(c)) for c in COLOURS if counts[c]))


def check_caption(text: str, asked: Description) -> Verdict:
    """Judge a caption of a clip or a sound: it states all balls, their numbers and pitches."""
    try:
        said = parse(text)
    except ValueError as error:
        return Verdict(False, False, str(error))
    expected = caption_of(asked)
    passed = said == expected
    return Verdict(passed, True, "" if passed else f"expected {str(expected)!r}")
