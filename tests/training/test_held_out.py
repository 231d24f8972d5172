"""The held-out loss of a model is that of the tokens that it was not trained on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import own_media
import pytest
import torch
from safetensors.torch import load_file, save_file

from gen.__main__ import main
from gen.core.errors import GenError
from gen.training.config import make_training
from gen.training.data import load_data, split
from gen.training.encode import encode_folder
from gen.training.held_out import held_out_loss
from gen.training.run import train

TINY = {"model": {"width": 32, "layers": 1}, "batch_size": 4, "steps": 4, "validation": 0.2}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Folder with tokens of texts, other ones, and models of both kinds."""
    root = tmp_path_factory.mktemp("held")
    encode_folder("text", own_media.text(root / "media", 40), root / "D")
    encode_folder("text", own_media.text(root / "others", 7), root / "O")
    for objective in ("causal", "masked"):
        tree = {**TINY, "data": str(root / "D"), "out": str(root / objective)}
        train(make_training({**tree, "objective": objective}, "here"), lambda _: None)
    return root


def validation(run: Path) -> float:
    return json.loads((run / "log.jsonl").read_text().splitlines()[-1])["validation"]


def test_of_a_causal_model_it_is_the_loss_that_training_measured(tmp_path):
    encode_folder("action", own_media.action(tmp_path / "media", 40), tmp_path / "D")
    tree = {**TINY, "data": str(tmp_path / "D"), "out": str(tmp_path / "E"), "average": False}
    done = train(make_training(tree, "here"), lambda _: None)
    found = held_out_loss(tmp_path / "E", tmp_path / "D")
    assert found["samples"] == 8 and not found["bound"]
    for measured in (done["validation"], validation(tmp_path / "E")):
        assert abs(found["nats_per_token"] - measured) < 2e-3  # training may use bfloat16
    assert abs(found["bits_per_token"] * math.log(2) - found["nats_per_token"]) < 1e-9


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_of_a_model_that_knows_nothing_it_is_the_logarithm_of_the_vocabulary(
    objective, root, tmp_path
):
    made = json.loads((root / objective / "model" / "config.json").read_text())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(made))
    weights = load_file(root / objective / "model" / "model.safetensors")
    weights["lm_head.weight"] = torch.zeros_like(weights["lm_head.weight"])
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    found = held_out_loss(tmp_path / "model", root / "O")
    assert found["samples"] == 7 and found["bound"] == (objective == "masked")
    assert abs(found["nats_per_token"] - math.log(made["vocab_size"])) < 1e-5
    lines = (root / "others" / "tasks.txt").read_text().splitlines()
    texts = [line.partition("\t")[2] for line in lines]
    bits = found["bits_per_token"] * found["tokens"]
    assert abs(found["bits_per_byte"] * sum(len(t.encode()) for t in texts) - bits) < 1e-6
    trained = held_out_loss(root / objective / "model", root / "O")  # control
    assert trained["nats_per_token"] < found["nats_per_token"] - 0.03


def test_only_samples_that_were_not_trained_on_are_measured(root):
    data = load_data(root / "D")
    held = split(len(data.tokens), 0.2, 0)[1]
    one, other = (held_out_loss(root / "masked", root / name) for name in ("D", "O"))
    assert one["samples"] == len(held) == 8 and other["samples"] == 7
    whole = held_out_loss(root / "masked" / "model", root / "D")  # a model says nothing of a run
    assert whole["samples"] == 40


def test_the_same_masks_measure_every_time(root):
    first, second = (held_out_loss(root / "masked", root / "D") for _ in range(2))
    assert first == second
    assert held_out_loss(root / "masked", root / "D", draws=3) != first  # control


def test_what_has_no_held_out_loss_is_refused(root, tmp_path, capsys):
    tree = {**TINY, "data": str(root / "D"), "out": str(tmp_path / "E"), "validation": 0}
    train(make_training(tree, "here"), lambda _: None)
    with pytest.raises(GenError, match="was trained on all samples"):
        held_out_loss(tmp_path / "E", root / "D")
    tree = {**TINY, "data": str(root / "D"), "out": str(tmp_path / "B"), "objective": "block"}
    train(make_training({**tree, "block": 4}, "here"), lambda _: None)
    with pytest.raises(GenError, match="fills blocks of 4 positions; expected a causal"):
        held_out_loss(tmp_path / "B", root / "D")
    assert main(["eval", str(root / "causal"), "--held-out", "nowhere"]) == 2
    assert "nowhere holds no tokens" in capsys.readouterr().err
    asked = ["--held-out", str(root / "D"), "--metrics", "checker"]
    assert main(["eval", str(root / "causal"), *asked]) == 2


@pytest.mark.parametrize("name", own_media.FOLDERS)
@pytest.mark.thinned(7)
def test_media_of_every_modality_are_measured_in_bits_per_value(name, tmp_path, capsys):
    encode_folder(name, own_media.FOLDERS[name](tmp_path / "media", 4), tmp_path / "D")
    tree = {**TINY, "data": str(tmp_path / "D"), "out": str(tmp_path / "E"), "steps": 1}
    train(make_training({**tree, "batch_size": 2, "validation": 0.5}, "here"), lambda _: None)
    asked = ["--held-out", str(tmp_path / "D"), "--json"]
    assert main(["eval", str(tmp_path / "E"), *asked]) == 0
    found = json.loads(capsys.readouterr().out)
    unit = "bits_per_byte" if name == "text" else "bits_per_dimension"
    assert found["samples"] == 2 and found[unit] > 0
    if name == "image":
        values, bits = 2 * 3 * 64 * 64, found["bits_per_token"] * found["tokens"]
        assert abs(found[unit] * values - bits) < 1e-6 * bits
