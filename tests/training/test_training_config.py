"""Training files: unknown keys get the nearest name, wrong values one error with their origin."""

from __future__ import annotations

from pathlib import Path

import pytest

from gen.config.packaged import packaged
from gen.core.errors import GenError
from gen.training.config import LoRA, NewModel, load_training, make_training

OWN = {"data": "D", "out": "E"}


@pytest.mark.parametrize("name", packaged(training=True))
def test_every_training_file_loads_and_says_what_it_is(name):
    head = packaged(training=True)[name].read_text().split("\n\n")[0]
    words = ("command", "hardware", "time", "expected", f"gen train configs/{name}.yaml")
    assert all(word in head for word in words)
    assert load_training(name).steps > 0 and name not in packaged()


def test_overrides_lie_over_the_file():
    keys = ["steps=7", "model.width=64", "lr=1e-4", "data=tokens", "lora.rank=3"]
    made = load_training("configs/train/image-quick.yaml", keys)
    assert (made.steps, made.lr, made.data) == (7, 1e-4, "tokens")
    assert made.model == NewModel(64, 2) and made.lora == LoRA(3)
    assert load_training("train/image-quick", ["model=image-causal"]).model == "image-causal"
    assert load_training("train/frontend").frontend.start == "image-vq"
    for empty in ("frontend.start=", "frontend.start=''"):
        assert load_training("train/frontend", [empty]).frontend.start == ""


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["setps=3"], "unknown key 'setps' in override 'setps=3'. Did you mean 'steps'"),
        (["model.widht=64"], r"unknown key 'model.widht' .*Did you mean 'model.width'"),
        (["steps.a=64"], "unknown key 'steps.a'"),
        (["steps"], "override 'steps' has no '='"),
        (["steps=0"], "steps is 0 in .*image-quick.yaml; expected an integer of at least 1"),
        (["steps=yes"], "steps is True"),
        (["lr=fast"], "lr is 'fast' .*expected a number of 0 to 1"),
        (["model.width=33"], "model.width is 33 .*expected a multiple of 32"),
        (["objective=casual"], "unknown objective 'casual'.* Did you mean 'causal'"),
        (["hide=0.5", "objective=masked"], "hide is 0.5 .*expected 0 for an objective other than"),
        (["hide=2"], "hide is 2 .*expected a number of 0 to 1"),
        (["objective=block"], "block is 0 .*expected an integer of at least 1"),
        (["merge=1"], "merge is 1 .*expected true or false"),
        (["merge=true"], "merge is True .*expected false without lora"),
        (["average=1"], "average is 1 .*expected true or false"),
        (["samples=a ring"], "samples is 'a ring' .*expected a list of prompts"),
        (["model=[1]"], "model is .*expected a name, a folder or"),
        (["drafter.kynd=ar"], r"unknown key 'drafter.kynd' .*Did you mean 'drafter.kind'"),
        (["objective=drafter"], "model is .*expected the name of the model to draft for"),
        (["frontend.start=3"], "frontend.start is 3 .*expected a text"),
        (["frontend.codes="], "frontend.codes is None"),
        (["sampling.temprature=1"], "unknown key 'sampling.temprature'.*'sampling.temperature'"),
        (["sampling.temperature=-1"], "sampling.temperature is -1"),
        (["sampling=hot"], "sampling is 'hot' .*expected {temperature: ...}"),
        (["out="], "out is None .*expected a folder"),
    ],
)
def test_wrong_keys_and_values_are_refused(keys, message):
    with pytest.raises(GenError, match=message):
        load_training("train/image-quick", keys)


def test_a_file_with_an_unknown_key_is_refused(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("data: D\nout: E\nobjektive: causal\n")
    with pytest.raises(GenError, match=r"unknown key 'objektive' in .*a.yaml. Did you mean"):
        load_training(tmp_path / "a.yaml")
    with pytest.raises(GenError, match="data is None in here; expected a folder"):
        make_training({"out": "E"}, "here")


def test_the_warm_up_is_a_tenth_of_a_short_run():
    lengths = {10: 1, 500: 50, 5000: 100}
    made = {n: make_training({**OWN, "steps": n}, "here").warmup_steps for n in lengths}
    assert made == lengths
