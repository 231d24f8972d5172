"""Spoken sentences with transcripts, to train models of one's own sounds on.

    python -m gen.recipes.speech.sentences SENTENCES
    python -m gen.recipes.speech.sentences SENTENCES --count 12

espeak-ng, which has to be installed, speaks every sentence in one of two voices. Each is a WAV in
``SENTENCES/train`` or ``SENTENCES/held`` with a text of the same name beside it: the name of the
voice and the sentence, such as ``george: the doctor found the silver key near the river``. Every
fifth sentence is held out; all of its words occur in others that are trained on.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from gen.recipes.speech.real_speech import speak

WHO = (
    "my brother",
    "the captain",
    "the doctor",
    "the little girl",
    "the old man",
    "the young woman",
)
DID = ("opened", "carried", "found", "painted", "sold", "wanted")
WHAT = (
    "the silver key",
    "the last letter",
    "the old table",
    "the big house",
    "the yellow flowers",
    "the broken clock",
)
WHERE = ("in the morning", "near the river", "after dinner", "in the garden")
VOICES = {"george": "en-gb", "frank": "en-us"}  # voices of espeak-ng
HELD = 5  # every so many sentences one is held out
TRAIN, HELD_OUT = "train", "held"


def sentences(count: int, seed: int = 4) -> list[str]:
    """Draw different sentences."""
    rng, found = random.Random(seed), dict[str, None]()
    while len(found) < count:
        found[" ".join(rng.choice(part) for part in (WHO, DID, WHAT, WHERE))] = None
    return list(found)


def write(out: Path, count: int) -> tuple[int, int]:
    """Write sentences and transcripts.

    Returns:
        How many are trained on, and how many held out.

    Raises:
        GenError: espeak-ng is not installed.
    """
    counts = [0, 0]
    for number, sentence in enumerate(sentences(count)):
        name = list(VOICES)[number % len(VOICES)]
        is_held = number % HELD == HELD - 1
        folder = out / (HELD_OUT if is_held else TRAIN)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{number:03d}.wav"
        speak(sentence, path, VOICES[name])
        path.with_suffix(".txt").write_text(f"{name}: {sentence}\n", encoding="utf-8")
        counts[is_held] += 1
    return counts[0], counts[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--count", type=int, default=120, help="sentences (120)")
    args = parser.parse_args(argv)
    train, held = write(args.out, args.count)
    print(f"{train} sentences in {args.out / TRAIN}, {held} in {args.out / HELD_OUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
