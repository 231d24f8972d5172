"""Scenes with captions in free words: what is drawn is read, and anything else is not."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from PIL import Image, ImageDraw

from gen.core.errors import GenError
from gen.recipes.image import scenes
from gen.recipes.image.scenes import COLOURS, GROUND, SHAPES, Scene, all_scenes, make, read
from gen.store.sealed import seal


def test_every_scene_is_read_from_its_image():
    rng = random.Random(5)
    for scene in all_scenes():
        assert [read(scenes.draw(scene, rng)) for _ in range(3)] == [scene] * 3


@pytest.mark.parametrize("part", ["colour", "count", "shape", "side"])
def test_control_a_scene_that_differs_in_one_part_is_read_as_another(part):
    values = {"colour": list(COLOURS), "count": [1, 2, 3], "shape": SHAPES, "side": scenes.SIDES}
    rng = random.Random(3)
    for scene in rng.sample(all_scenes(), 24):
        other = next(v for v in values[part] if v != getattr(scene, part))
        wrong = replace(scene, **{part: other})
        assert read(scenes.draw(wrong, rng)) == wrong != scene
        assert scenes.judge([scene], [scenes.draw(wrong, rng)])["obeyed"] == 0


def painted(*boxes: tuple[int, int, str]) -> Image.Image:
    """Draw discs of some colours at some centres."""
    image = Image.new("RGB", (64, 64), GROUND)
    for x, y, colour in boxes:
        ImageDraw.Draw(image).ellipse([x - 8, y - 8, x + 8, y + 8], fill=COLOURS[colour])
    return image


@pytest.mark.parametrize(
    "image",
    [
        painted(),
        painted((20, 14, "red"), (44, 14, "blue")),
        painted((32, 32, "red")),
        painted((12, 14, "red"), (52, 49, "red")),
        painted(*[(x, y, "red") for x in (14, 49) for y in (14, 49)]),
        Image.new("RGB", (64, 64), COLOURS["red"]),
    ],
    ids=["nothing", "two colours", "the middle", "two sides", "four", "all of it"],
)
def test_control_what_is_no_scene_is_read_as_none(image):
    assert read(image) is None


def test_specks_and_small_changes_of_colour_are_not_seen():
    scene = Scene("blue", 2, "disc", "top")
    image = scenes.draw(scene, random.Random(0))
    ImageDraw.Draw(image).rectangle([2, 50, 6, 54], fill=COLOURS["red"])
    assert read(image.point(lambda value: min(255, value + 8))) == scene


@pytest.mark.parametrize("held_out", ["caption", "scene"])
def test_a_fifth_is_held_out_of_training(held_out):
    drawn = make(300, 11, SHAPES, held_out)
    of = {"caption": lambda d: d.caption, "scene": lambda d: d.scene}[held_out]
    held, trained = ({of(d) for d in drawn if d.is_held == part} for part in (True, False))
    assert not held & trained
    assert 60 <= sum(d.is_held for d in drawn) <= 63
    assert {d.scene.shape for d in drawn} == {*SHAPES}
    assert any("grün" in d.caption for d in drawn) and any("red" in d.caption for d in drawn)
    assert [d.caption for d in make(300, 11, SHAPES, held_out)] == [d.caption for d in drawn]
    assert [d.caption for d in make(300, 12, SHAPES, held_out)] != [d.caption for d in drawn]


def test_a_job_is_judged_by_its_prompts(tmp_path, capsys):
    assert scenes.main(["draw", str(tmp_path / "S"), "--count", "20", "--seed", "2"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["read_right"] == 20 and figures["held_out_captions_in_train"] == 0
    rows = json.loads((tmp_path / "S" / "scenes.json").read_text(encoding="utf-8"))
    (tmp_path / "R").mkdir()
    lines = []
    for i, row in enumerate(rows[:4]):  # the last image is that of another scene
        shown = Scene(**row["meta"])
        shown = shown if i < 3 else replace(shown, count=shown.count % 3 + 1)
        scenes.draw(shown, random.Random(i)).save(tmp_path / "R" / f"{i}.png")
        line = {"id": str(i), "index": i, "prompt": row["prompt"], "file": f"{i}.png"}
        line |= {"status": "ok", "modality": "image", "sampler": "sjd", "seed": 0, "sha256": ""}
        lines.append(line)
    manifest = tmp_path / "R" / "manifest.jsonl"
    manifest.write_bytes(b"".join(map(seal, lines)))
    assert scenes.main(["read", str(tmp_path / "S"), "--run", str(tmp_path / "R")]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {
        "images": 4, "obeyed": 0.75, "colour": 1.0, "count": 0.75, "shape": 1.0, "side": 1.0
    }  # fmt: skip
    manifest.write_bytes(seal({**lines[0], "prompt": "a dog"}))
    with pytest.raises(GenError, match="prompt 'a dog' .* is no caption"):
        scenes.judge_run(tmp_path / "S", tmp_path / "R")
    with pytest.raises(GenError, match="holds no images"):
        scenes.judge_run(tmp_path / "S", tmp_path / "S")
