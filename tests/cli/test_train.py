"""``gen encode``, ``gen train`` and ``gen sample`` on a folder of images, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import own_media
import pytest

from gen.__main__ import main

PROMPT = "a small red circle in the centre"


def test_help_names_the_commands(capsys):
    for command, words in {
        "encode": ("--resize", "metadata.jsonl"),
        "train": ("KEY=VALUE",),
    }.items():
        assert main([command, "--help"]) == 0
        out = capsys.readouterr().out
        assert all(word in out for word in words)


@pytest.mark.parametrize("count", [16, pytest.param(200, marks=pytest.mark.slow)])
def test_from_a_folder_of_images_to_a_sample(count, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    own_media.images(Path("FOLDER"), count)
    assert main(["encode", "image", "FOLDER", "--out", "D"]) == 0
    assert f"{count} samples, {count} with a condition" in capsys.readouterr().out
    steps = "60" if count == 200 else "8"
    keys = [f"steps={steps}", "batch_size=8", "model.width=32", "model.layers=1", "lr=8e-3"]
    keys += ["log_every=4", "average=false"]
    config = "configs/train/image-quick.yaml"
    assert main(["train", config, "out=E", *keys]) == 0  # the data are D by default
    said = capsys.readouterr()
    assert "model: E/model" in said.out
    caption = Path("FOLDER/0000.txt").read_text().strip()
    assert said.out.splitlines()[-1] == f"use: gen sample image '{caption}' --model E/model"
    assert f"step {steps}/{steps}" in said.err
    log = [json.loads(x) for x in Path("E/log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"] - (1.0 if count == 200 else 0.3)
    assert "validation" in log[-1] and "<svg" in Path("E/index.html").read_text()
    assert main(["sample", "image", PROMPT, "--model", "E/model", "--out", "F", "--quiet"]) == 0
    assert len(list(Path("F").glob("*.png"))) == 1
    assert main(["train", config, "out=E", "--json", "--quiet", *keys]) == 0  # already done
    again = capsys.readouterr()
    assert json.loads(again.out.splitlines()[-1])["steps"] == int(steps) and not again.err


def test_samples_of_the_run_are_on_its_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    own_media.images(Path("FOLDER"), 8)
    assert main(["encode", "image", "FOLDER", "--out", "D", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 8
    keys = ["steps=1", "batch_size=2", "model.width=32", "model.layers=1"]
    assert main(["train", "train/image-quick", *keys, f"samples=[{PROMPT}]"]) == 0
    page = Path("E/index.html").read_text()
    names = [p.name for p in Path("E/samples").glob("*.png")]
    assert len(names) == 1 and f"samples/{names[0]}" in page and "samples/index.html" in page


@pytest.mark.slow
def test_the_objective_drafter_trains_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(
        "objective: drafter\nmodel: text-causal\ndrafter: {kind: ar, quick: true}\nout: W\n"
    )
    assert main(["train", "a.yaml"]) == 0
    said = capsys.readouterr().out
    assert "model: W/drafter" in said and Path("W/drafter").is_dir()
    assert "--model text-causal --model-option draft_model=W/drafter" in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["encode", "image", "none", "--out", "D"],
            "none is no folder; expected a folder of media",
        ),
        (["encode", "imge", "none", "--out", "D"], "unknown modality 'imge'"),
        (["encode", "image", "none"], "--out"),
        (["train", "train/image-quik"], "Did you mean 'train/image-quick'"),
        (["train", "train/image-quick", "step=3"], "Did you mean 'steps'"),
        (["train", "train/image-quick", "--steps=3"], "unknown flag '--steps'"),
        (["train", "train/image-quick"], "D holds no tokens; expected the folder of a finished"),
        (["run", "train/image-quick"], "unknown config 'train/image-quick'"),
    ],
)
def test_bad_input_is_one_line(argv, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_training_file_is_copied_to_edit_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["cp", "train/image-quick", "mine.yaml"]) == 0
    assert "objective: causal" in Path("mine.yaml").read_text()
