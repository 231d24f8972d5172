"""Published language models: whole and with low-rank adapters, on texts of one's own."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import byte_folders
import pytest
import torch
from safetensors.torch import load_file

import gen
from gen.core.errors import GenError
from gen.training import loop as looping
from gen.training.config import make_training
from gen.training.data import load_data
from gen.training.encode import EncodeOptions, encode_folder
from gen.training.run import train
from gen.training.tasks import LanguageTask


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return byte_folders.causal(tmp_path_factory.mktemp("published") / "model")


@pytest.fixture(scope="module")
def tokens(model, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("texts")
    (root / "media").mkdir()
    lines = [f"say {i}\tabcabc" for i in range(9)] + ["abc"]
    (root / "media" / "a.txt").write_text("\n".join(lines))
    encode_folder("text", root / "media", root / "D", EncodeOptions(frontend=str(model)))
    return root / "D"


def config(data: Path, model: object, out: Path, **more):
    keys = {"data": str(data), "model": str(model), "out": str(out), "batch_size": 4, "steps": 20}
    return make_training({**keys, "lr": 5e-3, "average": False, **more}, "here")


def test_all_weights_are_trained_and_the_model_is_a_folder_of_its_own(model, tokens, tmp_path):
    done = train(config(tokens, model, tmp_path / "E"))
    assert done["loss"][1] < 0.7 * done["loss"][0]
    before, after = (load_file(p / "model.safetensors") for p in (model, tmp_path / "E" / "model"))
    assert all(not torch.equal(before[k], after[k]) for k in before)
    pipe = gen.load("text", str(tmp_path / "E" / "model"))
    assert isinstance(pipe("say 3", seed=0, max_new_tokens=4).texts[0], str)


def test_the_loss_is_that_of_the_tokens_behind_the_condition(model, tokens, tmp_path):
    task = LanguageTask(config(tokens, model, tmp_path / "E"), load_data(tokens))
    row = task.data.conditions.index({"text": "say 0"})
    head = [ord(c) for c in "say 0"]
    frontend = task.data.encoder.frontend
    assert task.heads[row] == frontend.ids("say 0") and len(head) == len(task.heads[row])
    ids = torch.tensor([[*task.heads[row], *task.data.tokens[row].tolist()]])
    logprobs = task.model(input_ids=ids).logits.log_softmax(-1)[0, :-1]
    each = -logprobs.gather(1, ids[0, 1:, None])[:, 0]
    expected = each[len(head) - 1 :].mean()
    rows = torch.tensor([row])
    assert torch.allclose(task.loss(task.model, rows, 0, 0.0), expected, atol=1e-5)
    without = task.loss(task.model, rows, 0, 1.0)  # dropped: another loss
    assert not torch.allclose(without, expected, atol=1e-3)


def test_rows_of_other_lengths_change_no_loss(model, tokens, tmp_path):
    task = LanguageTask(config(tokens, model, tmp_path / "E"), load_data(tokens))
    lengths = [len(t) + len(h) for t, h in zip(task.data.tokens, task.heads, strict=True)]
    one, other = lengths.index(max(lengths)), lengths.index(min(lengths))
    parts = [task.loss(task.model, torch.tensor([i]), 0, 0.0) for i in (one, other)]
    counts = [len(task.data.tokens[i]) - (not task.heads[i]) for i in (one, other)]
    both = task.loss(task.model, torch.tensor([one, other]), 0, 0.0)
    mean = sum(p * n for p, n in zip(parts, counts, strict=True)) / sum(counts)
    assert max(lengths) > min(lengths) and torch.allclose(both, mean, atol=1e-5)


@pytest.fixture(scope="module")
def adapted(model, tokens, tmp_path_factory):
    """Keys of a run with adapters, its folder, and what it returned."""
    pytest.importorskip("peft")
    out = tmp_path_factory.mktemp("lora") / "E"
    keys = {"lora": {"rank": 4, "modules": ["q_proj", "v_proj"]}, "steps": 30, "lr": 2e-2}
    return keys, out, train(config(tokens, model, out, average=True, **keys))


def test_adapters_are_trained_alone_into_a_folder_of_peft(adapted, model):
    _, out, done = adapted
    assert done["loss"][1] < done["loss"][0] - 0.1
    assert done["adapter"] == str(out / "adapter") and not (out / "model").exists()
    found = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert found["base_model_name_or_path"] == str(model) and found["r"] == 4
    parts = load_file(out / "adapter" / "adapter_model.safetensors")
    assert all(k.endswith(("lora_A.weight", "lora_B.weight")) for k in parts)
    assert {k.split(".")[-3] for k in parts} == {"q_proj", "v_proj"}
    words = f"--model {model} --model-option adapters={out / 'adapter'}"
    assert done["use"] == f"gen sample text 'say 0' {words}"


def test_a_checkpoint_of_adapters_holds_the_trained_parameters_alone(adapted, model):
    saved = torch.load(adapted[1] / "checkpoint.pt", weights_only=True)
    base = load_file(model / "model.safetensors")
    for state in (saved["model"], saved["average"]):
        assert state and all(".lora_A." in k or ".lora_B." in k for k in state)
        assert sum(map(torch.numel, state.values())) < sum(map(torch.numel, base.values())) / 10


def test_the_pipeline_and_peft_decode_the_same_with_a_trained_adapter(adapted, model):
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(adapted[1] / "adapter")
    base = AutoModelForCausalLM.from_pretrained(model)
    ids = AutoTokenizer.from_pretrained(model)("say 3", return_tensors="pt").input_ids
    how = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": byte_folders.END}
    plain = base.generate(ids, **how)[0, ids.shape[1] :]
    theirs = peft.PeftModel.from_pretrained(base, folder).generate(ids, **how)[0, ids.shape[1] :]
    assert not torch.equal(theirs, plain)  # control: the adapter does something
    for adapters, call in ((folder, {}), ({"mine": folder}, {"adapter": "mine"})):
        pipe = gen.load("text", str(model), adapters=adapters)
        how = {"sampler": "autoregressive", "temperature": 0, "max_new_tokens": 24}
        assert torch.equal(pipe("say 3", **how, **call).tokens[0][: len(theirs)], theirs)


def test_a_finished_run_merges_its_adapters_on_request(adapted, model, tokens):
    keys, out, _ = adapted
    said: list[str] = []
    done = train(config(tokens, model, out, average=True, merge=True, **keys), said.append)
    assert said == ["resumed at step 30"] and done["use"].endswith(f"--model {out / 'model'}")
    before, after = (load_file(p / "model.safetensors") for p in (model, out / "model"))
    changed = {k for k in before if not torch.equal(before[k], after[k])}
    assert before.keys() == after.keys() and changed
    assert all("q_proj" in k or "v_proj" in k for k in changed)
    pipes = [gen.load("text", str(out / "model"))]
    pipes += [gen.load("text", str(model), adapters=done["adapter"])]
    how = {"sampler": "autoregressive", "temperature": 0, "max_new_tokens": 16}
    merged, added = (pipe("say 3", **how).tokens for pipe in pipes)
    assert torch.equal(merged, added)


def test_adapters_do_not_go_on_over_other_weights(model, tokens, tmp_path):
    pytest.importorskip("peft")
    base = Path(shutil.copytree(model, tmp_path / "base"))
    keys = {"lora": {"rank": 2}, "steps": 2, "save_every": 1}
    train(config(tokens, base, tmp_path / "E", **keys))
    train(config(tokens, base, tmp_path / "E", **keys))  # control
    byte_folders.causal(base, seed=1)
    with pytest.raises(GenError, match="holds an adapter of other weights than model .*base"):
        train(config(tokens, base, tmp_path / "E", **keys))


def test_layers_that_the_pipeline_cannot_add_to_need_merged_weights(model, tokens, tmp_path):
    pytest.importorskip("peft")
    keys = {"lora": {"rank": 2, "modules": ["embed_tokens"]}, "steps": 1}
    with pytest.raises(GenError, match=r"lora adapts model.embed_tokens of .* or merge=true"):
        train(config(tokens, model, tmp_path / "E", **keys))
    train(config(tokens, model, tmp_path / "F", merge=True, **keys))  # control
    gen.load("text", str(tmp_path / "F" / "model"))


class Killed(Exception):
    """Stands for the end of a process."""


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_killed_run_ends_with_the_same_weights(lora, model, tokens, tmp_path, monkeypatch):
    if lora:
        pytest.importorskip("peft")
    keys = {"lora": lora, "steps": 6, "save_every": 3, "average": lora is not None}
    train(config(tokens, model, tmp_path / "whole", **keys))
    update = looping.Loop._update

    def dies(loop):
        if loop.step == 4:
            raise Killed
        update(loop)

    monkeypatch.setattr(looping.Loop, "_update", dies)
    with pytest.raises(Killed):
        train(config(tokens, model, tmp_path / "E", **keys))
    monkeypatch.undo()
    said: list[str] = []
    train(config(tokens, model, tmp_path / "E", **keys), said.append)
    assert said[0] == "resumed at step 3"
    weights = "adapter/adapter_model.safetensors" if lora else "model/model.safetensors"
    a, b = (load_file(tmp_path / n / weights) for n in ("whole", "E"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"objective": "masked"}, "objective is 'masked'; expected 'causal' for a published"),
        ({"model": "text-causal"}, "tokenizer of .*text-causal|another vocabulary than the tokens"),
    ],
)
def test_what_does_not_fit_is_refused(keys, message, model, tokens, tmp_path):
    with pytest.raises(GenError, match=message):
        train(config(tokens, keys.pop("model", model), tmp_path / "E", **keys))


def test_a_missing_peft_is_one_error(model, tokens, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(GenError, match=r"needs the package peft .* pip install"):
        train(config(tokens, model, tmp_path / "E", lora={"rank": 2}))
