"""Prompts of images that leave words out: a seed draws them, and the image shows the prompt."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

import gen
from gen.core.errors import GenError
from gen.interop.diffusers import _against
from gen.modalities.image import captions as shapes
from gen.modalities.image.captions import parse
from gen.modalities.image.checker import check_many

LONG = shapes.captions(120, 11, held=True)
SHORT = shapes.shortened(LONG, 5)


def completed(captions, seed=0):
    return [shapes.complete(c, np.random.default_rng(seed + i)) for i, c in enumerate(captions)]


def drawn(captions):
    rng = np.random.default_rng(3)
    return np.stack([shapes.draw(c, rng) for c in captions])


def states_all(caption) -> bool:
    return all(i.colour and i.size and i.location for i in caption.items)


def test_prompts_of_every_length_are_drawn():
    left = Counter(
        sum(word is not None for i in c.items for word in (i.colour, i.size, i.location))
        for c in SHORT
        if len(c.items) == 1
    )
    assert set(left) == {0, 1, 2, 3}
    assert [parse(str(c)) for c in SHORT] == SHORT


def test_an_image_of_the_completed_prompt_shows_the_prompt():
    full = completed(SHORT)
    assert all(map(states_all, full)) and all(parse(str(c)) for c in full)
    assert all(v.passed for v in check_many(drawn(full), SHORT))
    others = SHORT[1:] + SHORT[:1]  # control
    assert not all(v.passed for v in check_many(drawn(full), others))


def test_a_prompt_that_states_everything_stays_as_it_is():
    assert all(a is b for a, b in zip(completed(LONG), LONG, strict=True))


def test_completed_words_are_uniform_over_the_captions_that_agree():
    made = completed([parse("a red circle")] * 1800)
    assert all(c.items[0].colour == "red" and c.items[0].shape == "circle" for c in made)
    counts = Counter((c.items[0].size, c.items[0].location) for c in made)
    assert len(counts) == 18
    assert sum((n - 100) ** 2 / 100 for n in counts.values()) < 40.8  # chi-square, 17, 0.999
    second = completed([parse("a red ring at the left and a cross")] * 500)
    assert {c.items[1].colour for c in second} == set(shapes.COLOURS) - {"red"}
    assert {c.items[1].location for c in second} == {"top right", "right", "bottom right"}


def test_an_item_is_that_of_its_completed_prompt():
    pipe = gen.load("image")
    (item,) = pipe.plan("a red circle", seed=7)
    (typed,) = pipe.plan(str(item.condition), seed=7)
    (other,) = pipe.plan("a red circle", seed=8)
    assert item.prompt == "a red circle" and states_all(item.condition)
    assert item.condition.pairs() == typed.condition.pairs()
    assert pipe.draw_key(item) == pipe.draw_key(typed) != pipe.draw_key(other)


def test_an_edit_leaves_open_what_its_prompt_leaves_open(monkeypatch):
    pipe, seen = gen.load("image"), []
    target = pipe.target
    monkeypatch.setattr(
        pipe, "target", lambda *a, **k: (seen.append(a[2][0].condition), target(*a, **k))[1]
    )
    image, mask = Image.new("RGB", (64, 64), (70, 70, 70)), np.zeros((64, 64), np.uint8)
    mask[:8, :8] = 255
    pipe("a red circle", {"name": "maskgit", "steps": 1}, source=image, mask=mask)
    pipe("a red circle", {"name": "maskgit", "steps": 1})  # control
    assert seen[0] == parse("a red circle") and states_all(seen[1])


def test_a_negative_prompt_leaves_open_what_it_leaves_open():
    image = _against(gen.load("image"), "a red circle", guided=True)
    assert image.negative_condition == parse("a red circle")
    with pytest.raises(GenError, match="that a seed would choose"):  # control
        _against(gen.load("action"), "reach", guided=True)


def test_a_shape_that_leaves_no_room_for_the_other_is_refused():
    with pytest.raises(GenError, match=r"one of two shapes at 'centre', which leaves no room"):
        gen.load("image").plan("a small ring in the centre and a cross")
    assert parse("a small ring in the centre")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["image-masked", "image-mar"])
def test_prompts_of_every_length_pass_as_full_ones_do(model):
    torch.set_num_threads(1)
    steps = {"name": "maskgit" if model == "image-masked" else "mar", "steps": 12}
    out = gen.load("image", model=model)([str(c) for c in SHORT[:60]], steps, batch_size=20)
    verdicts = check_many(np.stack([np.asarray(m) for m in out.media]), SHORT[:60])
    assert np.mean([v.passed for v in verdicts]) >= 0.88
