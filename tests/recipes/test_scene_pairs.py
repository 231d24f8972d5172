"""Pairs of scenes: what is drawn is read right from pixels and samples alone."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from gen.recipes.image.scene_pairs import KINDS, PITCHES, heard, judge, main, sound, split
from gen.recipes.image.scenes import Scene


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn_is_read_right_and_other_answers_wrong(kind, tmp_path, capsys):
    asked = ["draw", str(tmp_path), "--kind", kind, "--count", "6", "--held", "12"]
    assert main(asked) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["train"], figures["held_out"]) == (6, 12)
    rows, shuffled = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("held-out", "shuffled")
    )
    assert all((tmp_path / row["image"]).is_file() for row in rows)
    answers = [answer(tmp_path / row["image"]) for row in rows]
    pairs = list(zip(answers, rows, strict=True))
    assert all(all(judge(path, row["meta"]).values()) for path, row in pairs)
    moved = zip(answers[6:] + answers[:6], rows, strict=True)
    assert sum(all(judge(path, row["meta"]).values()) for path, row in moved) <= 8  # control
    images = [[row["image"] for row in some] for some in (rows, shuffled)]
    assert sorted(images[0]) == sorted(images[1]) and images[0] != images[1]


def answer(image: Path) -> Path:
    """Return the file of the answer to an image."""
    if image.parent.name == "before":
        return image.parent.parent / "after" / image.name
    return image.with_suffix(".wav")


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_combinations_are_in_no_training_pair(kind):
    trained, held = split(kind, 0.2, 0)
    assert not {*trained} & {*held} and len(held) == round(0.2 * (len(trained) + len(held)))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("side", PITCHES)
def test_beeps_are_heard(count, side):
    wave = sound(Scene("red", count, "disc", side), random.Random(0))
    noise = np.random.default_rng(0).normal(0, 0.005, len(wave)).astype(np.float32)
    assert heard(wave) == heard(wave + noise) == (count, PITCHES[side])


def test_control_silence_is_no_sound_of_beeps():
    assert heard(np.zeros(16_000, np.float32)) is None
