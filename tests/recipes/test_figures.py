"""Figures of the image models: an evaluation continues, rows of other weights are not kept, and a
sampler is measured once."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from gen.recipes.image import figures as figures_module
from gen.recipes.image.figures import Figures, measure_samplers

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


class Calls:
    """Stands for a pipeline: records its calls, and returns the prompts as media."""

    made: list[tuple[str, str]] = []

    def __init__(self, modality: str, folder: str):
        self.folder = Path(folder).name

    def __call__(self, prompts, sampler, **options):
        self.made.append((self.folder, sampler))
        return SimpleNamespace(media=prompts, stats=[SimpleNamespace(nfe=n) for n in (4, 8)])


@pytest.fixture
def calls(monkeypatch):
    def verdicts(media, captions):
        assert media == [str(c) for c in captions]
        return [SimpleNamespace(passed="red" in prompt) for prompt in media]

    monkeypatch.setattr(figures_module, "Pipeline", Calls)
    monkeypatch.setattr(figures_module, "pixels_of", lambda out: out.media)
    monkeypatch.setattr(figures_module, "check_many", verdicts)
    monkeypatch.setattr(Calls, "made", [])
    return Calls.made


def measure(figures, folder, samplers):
    captions = ["a red ring", "a blue ring"]

    def compare(name, out, verdicts, reference):
        return {"is_compared": reference is not None}

    measure_samplers(figures, folder, captions, samplers, {}, compare, log=lambda line: None)


def test_a_sampler_is_measured_once_and_beside_autoregression(zoo, calls):
    samplers = {"autoregressive": "autoregressive", "fast": "sjd"}
    figures = Figures(zoo / "new.json", HEAD, dict.fromkeys(samplers, ("a",)))
    measure(figures, zoo / "a", samplers)
    row = figures.rows["fast"]
    assert (row["passed"], row["nfe_mean"], row["is_compared"]) == (0.5, 6, True)
    assert calls == [("a", "autoregressive"), ("a", "sjd")]
    measure(figures, zoo / "a", samplers)
    assert len(calls) == 2
    del figures.rows["fast"]
    measure(figures, zoo / "a", samplers)  # the reference runs again, and is no new row
    assert calls[2:] == [("a", "autoregressive"), ("a", "sjd")]
    assert figures.rows["fast"] == row
