"""Figures of the image models: an evaluation continues, and rows of other weights are not kept."""

from __future__ import annotations

import json

import pytest

from gen.recipes.image.figures import Figures

HEAD = {"held_out_captions": 2}
MODELS = {"one": ("a",), "both": ("a", "b")}


@pytest.fixture
def zoo(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    figures = Figures(tmp_path / "figures.json", HEAD, MODELS)
    figures.save_row("both", {"passed": 0.5})
    figures.save_row("one", {"passed": 1.0})
    return tmp_path


def test_a_second_evaluation_finds_the_rows_in_order(zoo):
    again = Figures(zoo / "figures.json", HEAD, MODELS)
    assert list(again.rows) == ["one", "both"]
    again.save_row("one", {"any_length": 0.5})
    row = json.loads((zoo / "figures.json").read_text())["samplers"]["one"]
    assert (row["passed"], row["any_length"]) == (1.0, 0.5)


def test_rows_of_other_weights_or_captions_are_measured_again(zoo):
    assert not Figures(zoo / "figures.json", {"held_out_captions": 3}, MODELS).rows
    (zoo / "b" / "model.safetensors").write_bytes(b"trained further")
    assert list(Figures(zoo / "figures.json", HEAD, MODELS).rows) == ["one"]
