"""Labels of folders or of a column stand for captions."""

from __future__ import annotations

import json

import pytest
from PIL import Image

import gen
from gen.__main__ import main
from gen.core.errors import GenError
from gen.training.config import make_training
from gen.training.data import load_data
from gen.training.encode import EncodeOptions, encode_folder
from gen.training.run import train


@pytest.fixture
def media(tmp_path):
    root, rows = tmp_path / "media", []
    for i in range(8):
        name = f"{'red_ones' if i % 2 else 'Blaue'}/{i}.png"
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), "red" if i % 2 else "blue").save(path)
        rows.append(json.dumps({"file_name": name, "class": i % 2, "text": f"caption {i}"}))
    (root / "metadata.jsonl").write_text("\n".join(rows))
    return root


def labels_of(folder):
    return [c and c["text"] for c in load_data(folder).conditions]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ("folders", ["Blaue"] * 4 + ["red ones"] * 4),
        ("class", ["0"] * 4 + ["1"] * 4),
        ("", [f"caption {i}" for i in (0, 2, 4, 6, 1, 3, 5, 7)]),
    ],
)
def test_labels_are_those_of_folders_or_of_a_column(labels, expected, media, tmp_path):
    out = tmp_path / "D"
    more = ["--labels", labels] if labels else []
    assert main(["encode", "image", str(media), "--out", str(out), *more]) == 0
    assert labels_of(out) == expected


def test_a_model_is_asked_for_a_label(media, tmp_path):
    encode_folder("image", media, tmp_path / "D", EncodeOptions(labels="folders"))
    tiny = {"model": {"width": 32, "layers": 1}, "batch_size": 4, "steps": 2}
    keys = {"data": str(tmp_path / "D"), "out": str(tmp_path / "E")}
    made = train(make_training({**tiny, **keys}, "here"), lambda _: None)
    assert len(gen.load("image", made["model"])("red ones", seed=0).images) == 1


@pytest.mark.parametrize(
    ("modality", "labels", "message"),
    [
        ("image", "colour", "labels is 'colour'; expected rows of metadata.jsonl with this field"),
        ("text", "folders", "labels is 'folders'; expected none for modality 'text'"),
    ],
)
def test_labels_that_nothing_has_are_refused(modality, labels, message, media, tmp_path):
    (media / "a.txt").write_text("a b")
    with pytest.raises(GenError, match=message):
        encode_folder(modality, media, tmp_path / "D", EncodeOptions(labels=labels))


def test_media_of_no_folder_have_no_label(media, tmp_path):
    Image.new("RGB", (64, 64)).save(media / "z.png")
    encode_folder("image", media, tmp_path / "D", EncodeOptions(labels="folders"))
    assert labels_of(tmp_path / "D")[-1] is None
    for path in media.rglob("*/*.png"):
        path.unlink()
    (media / "metadata.jsonl").unlink()
    with pytest.raises(GenError, match="labels is 'folders'; expected subfolders"):
        encode_folder("image", media, tmp_path / "E", EncodeOptions(labels="folders"))
    with pytest.raises(GenError, match="there is no .*metadata.jsonl with such a field"):
        encode_folder("image", media, tmp_path / "E", EncodeOptions(labels="class"))
