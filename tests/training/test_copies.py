"""Shifted copies of media are trained on beside them, and measured never."""

from __future__ import annotations

import pytest
import torch
from PIL import Image, ImageDraw

from gen.core.errors import GenError
from gen.training.config import make_training
from gen.training.copies import shifted, shifted_copies
from gen.training.data import load_data
from gen.training.encode import EncodeOptions, encode_folder
from gen.training.tasks import make_task


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("copies")
    (root / "media").mkdir()
    for i in range(4):
        image = Image.new("RGB", (64, 64), "black")
        ImageDraw.Draw(image).rectangle([8 * i, 20, 8 * i + 15, 40], fill="red")
        image.save(root / "media" / f"{i}.png")
        (root / "media" / f"{i}.txt").write_text(f"ein roter Block, Platz {i}")
    for copies in (1, 3):
        options = EncodeOptions(copies=copies)
        encode_folder("image", root / "media", root / f"D{copies}", options)
    return root


def test_an_image_is_moved_and_its_edges_are_repeated():
    image = torch.randn(3, 40, 60)
    moved = shifted(image, [2, -3])
    assert torch.equal(moved[:, 2:, :-3], image[:, :-2, 3:])
    assert torch.equal(moved[:, 0, :-3], image[:, 0, 3:])
    assert torch.equal(moved[:, 2:, -1], image[:, :-2, -1])


def test_a_sound_begins_later_or_earlier_in_silence():
    sound = torch.randn(1, 100)
    assert torch.equal(shifted(sound, [-5]), torch.cat([sound[:, 5:], torch.zeros(1, 5)], 1))
    assert torch.equal(shifted(sound, [4]), torch.cat([torch.zeros(1, 4), sound[:, :-4]], 1))


def test_the_name_decides_the_shifts():
    image = torch.randn(3, 64, 64)
    made = [shifted_copies(image, 4, name) for name in ("a", "a", "b")]
    assert torch.equal(torch.stack(made[0]), torch.stack(made[1]))
    assert not torch.equal(torch.stack(made[0]), torch.stack(made[2]))  # control
    assert torch.equal(made[2][0], image)


def test_samples_are_those_without_copies(root):
    plain, copied = (load_data(root / name) for name in ("D1", "D3"))
    assert torch.equal(torch.stack(plain.tokens), torch.stack(copied.tokens))
    assert copied.conditions == plain.conditions
    assert copied.manifest["samples"] == copied.manifest["captioned"] == 4
    assert [len(c) for c in copied.copies] == [2] * 4 and not plain.copies
    assert any(not torch.equal(c, t[0]) for t, c in zip(copied.copies, plain.tokens, strict=True))


def test_copies_are_trained_on_and_not_measured(root):
    tasks = []
    for name in ("D1", "D3"):
        keys = {"data": str(root / name), "out": "O", "model": {"width": 32, "layers": 1}}
        tasks.append(make_task(make_training(keys, "here"), load_data(root / name)))
    losses = {}
    for mode in (False, True):
        for task in tasks:
            task.model.train(mode)
        found = [task.loss(task.model, torch.arange(4), 7, 0.0).item() for task in tasks]
        losses[mode] = found
    assert losses[False][0] == losses[False][1]
    assert losses[True][0] != losses[True][1]


def test_copies_of_what_cannot_be_shifted_are_refused(root):
    with pytest.raises(GenError, match="copies is 2; expected 1 for modality 'motion'"):
        encode_folder("motion", root / "media", root / "M", EncodeOptions(copies=2))
