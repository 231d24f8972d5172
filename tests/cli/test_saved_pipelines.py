"""Commands with the folder or hub id of a saved pipeline as a model: the tokens of the pipeline."""

from __future__ import annotations

import json
import shutil
import socket

import numpy as np
import pytest
import torch
from families import WRITERS

import gen
from gen.__main__ import main
from gen.core.errors import GenError
from gen.models.load.saved import RECORD
from gen.store.ledger import read_plan, read_rows

COMMIT, PROMPT = "c" * 40, "sort 3 1 2 ="
slow = pytest.mark.slow


def published_pipe(folder, name="llamagen"):
    """Return a pipeline whose options and dtype are none that a command would guess."""
    folder.mkdir()
    case = WRITERS[name](folder)
    return case, gen.load(case.modality, model=case.path, dtype="float64", **case.options)


@pytest.fixture
def own(tmp_path):
    """Folder of a saved pipeline of gen's own architecture whose weights are none of the zoo."""
    pipe = gen.load("text", dtype="float64")
    with torch.no_grad():
        pipe.components["model"].lm_head.weight.mul_(0.02)  # nearly any token
    return pipe, pipe.save_pretrained(tmp_path / "saved")


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Function that puts a saved folder into a cache as the repository me/pipe, and its root."""
    from huggingface_hub import constants

    cache = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def put(folder):
        repository = cache / "models--me--pipe"
        shutil.copytree(folder, repository / "snapshots" / COMMIT)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(COMMIT)
        shutil.rmtree(folder)
        return "me/pipe"

    return put


def tokens_of(folder):
    """Return the tokens that a job of one item kept."""
    row = read_rows(folder)[0]
    assert row["status"] == "ok", row
    return torch.from_numpy(np.load(folder / row["tokens_file"])["tokens"]).long()


def sampled(tmp_path, modality, prompt, model, *more):
    out = tmp_path / f"out-{len(list(tmp_path.glob('out-*')))}"
    asked = ["sample", modality, prompt, "--model", str(model), "--seed", "3", "--out", str(out)]
    assert main([*asked, "tokens=true", "trace=0", *more]) == 0
    return out, tokens_of(out)


def test_a_saved_pipeline_of_own_architecture_is_a_model_of_a_command(own, tmp_path):
    pipe, folder = own
    want = pipe(PROMPT, seed=3)
    out, tokens = sampled(tmp_path, "text", PROMPT, folder)
    assert torch.equal(tokens.view(-1), want.tokens[0].view(-1))
    assert not torch.equal(gen.load("text")(PROMPT, seed=3).tokens, want.tokens)  # control
    again = gen.load(folder)
    assert again.model == str(folder) and again.dtype == torch.float64
    assert "dtype: float64" in (out / "config.yaml").read_text()
    with pytest.raises(GenError, match="a saved pipeline of modality 'text'; expected one of 'im"):
        gen.load("image", model=folder)


def test_a_saved_checkpoint_has_its_dtype_and_options_in_commands(tmp_path, cached, capsys):
    case, pipe = published_pipe(tmp_path / "source")
    folder = pipe.save_pretrained(tmp_path / "saved")
    want = pipe([case.prompts[0]], seed=3).tokens
    shutil.rmtree(tmp_path / "source")
    prompt = case.prompts[0]
    config = tmp_path / "job.yaml"
    tree = {"modality": case.modality, "prompts": [prompt], "seed": 3, "tokens": True}

    def ran(model):
        out = tmp_path / f"run-{len(list(tmp_path.glob('run-*')))}"
        config.write_text(json.dumps({**tree, "model": str(model), "out": str(out)}))
        assert main(["run", str(config)]) == 0
        return out, tokens_of(out)

    assert torch.equal(ran(folder)[1].view(-1), want.view(-1))
    capsys.readouterr()
    assert main(["show", str(folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["dtype"] == "float64" and shown["modality"] == case.modality
    assert shown["model_options"].keys() >= case.options.keys() and "commit" not in shown
    name = cached(folder)
    out, tokens = ran(name)
    assert torch.equal(tokens.view(-1), want.view(-1))
    assert read_plan(out)["commits"] == {name: COMMIT}
    assert torch.equal(gen.load(name)([prompt], seed=3).tokens, want)
    capsys.readouterr()
    assert main(["show", name]) == 0 and f"commit: {COMMIT}" in capsys.readouterr().out
    assert main(["show", str(config)]) == 0
    assert f"# model: {name} at commit {COMMIT}" in capsys.readouterr().out


@slow
def test_a_pushed_pipeline_of_own_architecture_is_read_from_its_snapshot(own, cached, tmp_path):
    pipe, folder = own
    want = pipe(PROMPT, seed=3).tokens
    name = cached(folder)
    out, tokens = sampled(tmp_path, "text", PROMPT, name)
    assert torch.equal(tokens.view(-1), want.view(-1))
    assert read_plan(out)["commits"] == {name: COMMIT}
    assert main(["check", str(out)]) == 0  # its prompts are those of the modality


def test_a_record_that_changed_is_another_model_to_a_job(own, tmp_path, capsys):
    _, folder = own
    out = tmp_path / "out"
    asked = ["sample", "text", PROMPT, "--model", str(folder), "--out", str(out)]
    assert main([*asked, "--sampler", "autoregressive", "trace=0"]) == 0
    assert main([*asked, "--sampler", "autoregressive", "trace=0"]) == 0  # control
    record = json.loads((folder / RECORD).read_text())
    (folder / RECORD).write_text(json.dumps({**record, "note": "x"}))
    capsys.readouterr()
    assert main([*asked, "--sampler", "autoregressive", "trace=0"]) == 2
    assert "other weights" in capsys.readouterr().err


def test_a_dry_run_of_a_pushed_pipeline_opens_no_socket(own, cached, tmp_path, monkeypatch, capsys):
    from huggingface_hub import constants

    name = cached(own[1])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def refuse(*_, **__):
        raise AssertionError("a socket was opened")

    for function in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, function, refuse)
    config = tmp_path / "job.yaml"
    config.write_text(json.dumps({"modality": "text", "model": name, "prompts": [PROMPT]}))
    assert main(["run", str(config), "--dry-run", f"out={tmp_path / 'out'}"]) == 0
    assert f"{name} at commit {COMMIT}" in capsys.readouterr().out
