"""Drafters of models of one's own: trained for a folder of any name, taken by every door that loads
a model, and refused for any other model."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import own_media
import pytest
import torch
from served import serving

import gen
from gen.__main__ import main
from gen.contracts.modality_of import modality_of
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.engine.engine import LIMITS
from gen.pipeline.pipeline import Pipeline
from gen.recipes.drafters.recipe import main as recipe
from gen.serve.run import make_engine
from gen.training.config import make_training
from gen.training.encode import encode_folder
from gen.training.run import train

PROMPT = "copy 4 0 7 5 ="
TINY = {"model": {"width": 32, "layers": 2}, "batch_size": 4, "steps": 4}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Folder with a small model of texts, trained on files, and drafters of two kinds."""
    root = tmp_path_factory.mktemp("own")
    encode_folder("text", own_media.text(root / "media", 40), root / "D")
    train(make_training({**TINY, "data": str(root / "D"), "out": str(root / "E")}, "here"))
    for kind in ("ar", "exit"):
        drafter(root, kind)
    return root


def drafter(root: Path, kind: str, **more: object) -> dict[str, object]:
    """Train a drafter of the model by gen train."""
    tree = {"objective": "drafter", "model": str(root / "E" / "model"), "data": str(root / "D")}
    tree |= {"out": str(root / kind), "drafter": {"kind": kind, "quick": True}, **more}
    return train(make_training(tree, "here"), lambda _: None)


def folder(root: Path, kind: str) -> str:
    return str(root / kind / "drafter")


def loaded(root: Path, kind: str | None) -> Pipeline:
    more = {} if kind is None else {"draft_model": folder(root, kind)}
    return gen.load("text", str(root / "E" / "model"), device="cpu", **more)


@pytest.mark.parametrize("name", ["model", "image-causal", "speech", "Mein Modell"])
def test_the_modality_is_that_of_the_config_whatever_the_folder_is_called(name, root, tmp_path):
    copy = shutil.copytree(root / "E" / "model", tmp_path / name)
    assert modality_of(str(copy)) == "text"
    with pytest.raises(GenError, match="is a model of modality 'text'; expected one of 'image'"):
        gen.load("image", str(copy))
    config = json.loads((copy / "config.json").read_text())
    del config["modality"]
    (copy / "config.json").write_text(json.dumps(config))
    assert modality_of(str(copy)) == "text"  # the frontend of the package is that of texts alone
    (copy / "config.json").write_text(json.dumps({**config, "frontend": "frontend"}))
    with pytest.raises(GenError, match=r"modality of model .* is none by its config"):
        modality_of(str(copy))


def test_every_model_of_the_package_belongs_to_the_modality_that_lists_it():
    for modality, cls in registry.table("modality").items():
        assert {modality_of(name) for name in cls.models.values()} <= {modality}


@pytest.mark.parametrize("kind", ["ar", "exit"])
@pytest.mark.parametrize("way", ["recipe", "train"])
@pytest.mark.thinned(2)
def test_the_last_line_is_a_command_that_drafts_with_the_result(
    way, kind, root, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(root / "E", tmp_path / "audio-1")  # neither a modality nor a model
    if way == "recipe":
        argv = ["--model", "audio-1/model", "--kind", kind, "--out", "W", "--quick"]
        assert recipe(argv) == 0
    else:
        keys = ["objective=drafter", "model=audio-1/model", f"data={root / 'D'}", "out=W"]
        keys += [f"drafter.kind={kind}", "drafter.quick=true"]
        assert main(["train", "train/image-quick", *keys]) == 0
    line = capsys.readouterr().out.splitlines()[-1].removeprefix("use: ")
    assert main([*shlex.split(line)[1:], "--out", "S", "--quiet"]) == 0
    row = json.loads(next((tmp_path / "S").glob("manifest*")).read_text().splitlines()[0])
    assert row["sampler"].startswith("speculative") and row["draft_acceptance_rate"] > 0


def test_the_line_of_gen_train_works_as_printed(root, tmp_path):
    keys = {**TINY, "data": str(root / "D"), "out": str(tmp_path / "E")}
    done = train(make_training(keys, "here"), lambda _: None)
    words = shlex.split(done["use"])[1:]
    assert "PROMPT" not in words and main([*words, "--out", str(tmp_path / "S"), "--quiet"]) == 0


@pytest.mark.parametrize("kind", ["ar", "exit"])
def test_a_call_that_names_no_sampler_drafts_with_the_draft_model(kind, root):
    out = loaded(root, kind)(PROMPT, seed=0)
    assert out.spec["name"] == "speculative" and out.stats[0].draft_nfe > 0
    assert out.spec.get("drafter", "model") == ("exit" if kind == "exit" else "model")
    plain = loaded(root, None)(PROMPT, seed=0)  # control
    assert plain.spec["name"] != "speculative"


@pytest.mark.parametrize("kind", ["ar", "exit"])
def test_the_verifier_follow_keeps_the_tokens_of_the_model_alone(kind, root):
    prompts = [PROMPT, "sort 3 1 2 ="]
    spec = {"name": "speculative", "verifier": "follow"}
    drafted = loaded(root, kind)(prompts, spec, seed=3, num_samples=4)
    alone = loaded(root, None)(prompts, "autoregressive", seed=3, num_samples=4)
    assert torch.equal(drafted.tokens, alone.tokens)


def test_control_a_drafter_of_another_model_is_refused(root, tmp_path):
    keys = {**TINY, "data": str(root / "D"), "out": str(tmp_path / "E"), "seed": 1}
    train(make_training(keys, "here"), lambda _: None)
    for kind in ("ar", "exit"):
        pipe = gen.load("text", str(tmp_path / "E" / "model"), draft_model=folder(root, kind))
        with pytest.raises(GenError, match="trained for"):
            pipe(PROMPT, seed=0)
    beside = tmp_path / "E" / "model-exit"  # found by no name of a folder
    shutil.copytree(folder(root, "exit"), beside)
    named = {"name": "speculative", "drafter": "exit"}
    with pytest.raises(GenError, match="comes without a drafter of kind exit"):
        gen.load("text", str(tmp_path / "E" / "model"))(PROMPT, named, seed=0)
    named = {"name": "speculative", "drafter": "eagle"}  # a kind that was not loaded
    with pytest.raises(GenError, match="comes without a drafter of kind eagle"):
        loaded(root, "exit")(PROMPT, named, seed=0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "unknown model 'nowhere'"),
        ("speech-draft", "speech-draft is a model of modality 'speech'"),
        ("text-words", "draft_model is 'text-words'; expected a model"),
        (3, "draft_model is 3, a int; expected a zoo name, a folder or a hub id"),
    ],
)
def test_what_cannot_draft_is_refused_where_the_model_is_loaded(name, message, root):
    with pytest.raises(GenError, match=message):
        gen.load("text", str(root / "E" / "model"), draft_model=name)


def test_a_model_of_other_tokens_is_refused_where_the_model_is_loaded(root, tmp_path):
    copy = shutil.copytree(root / "E" / "model", tmp_path / "other")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "vocab_size": 7}))
    with pytest.raises(GenError, match=r"other has 7 token ids; expected \d+, those of model"):
        gen.load("text", str(root / "E" / "model"), draft_model=str(copy))


@pytest.mark.parametrize("kind", ["ar", "exit"])
def test_a_saved_pipeline_brings_its_draft_model_along(kind, root, tmp_path):
    pipe = loaded(root, kind)
    pipe.save_pretrained(tmp_path / "saved")
    shutil.move(tmp_path / "saved", tmp_path / "moved")
    again = gen.load(tmp_path / "moved", device="cpu")
    one, two = (p(PROMPT, seed=5, num_samples=3) for p in (pipe, again))
    assert torch.equal(one.tokens, two.tokens) and two.spec == one.spec
    assert two.stats[0].draft_nfe == one.stats[0].draft_nfe > 0
    assert Path(again.model_options["draft_model"]).is_relative_to(tmp_path / "moved")
    assert not (tmp_path / "moved" / "text-draft").exists()
    loaded(root, None).save_pretrained(tmp_path / "plain")  # control
    assert (tmp_path / "plain" / "text-draft").is_dir()


@pytest.mark.parametrize("kind", ["ar", "exit"])
def test_requests_draft_with_what_the_operator_loaded_and_name_no_folder(kind, root):
    with serving(models={"mine": loaded(root, kind)}) as server:
        body = {"model": "mine", "prompt": PROMPT, "seed": 0}
        for sampler in ({}, {"sampler": "speculative"}):
            status, answer, _ = server.ask("/v1/completions", {**body, **sampler})
            assert status == 200, answer
        assert server.engine.stats.drafted["mine"] > 0
        name = "draft_model" if kind == "ar" else "drafter_weights"
        spec = {"name": "speculative", name: folder(root, kind)}
        status, answer, _ = server.ask("/v1/completions", {**body, "sampler": spec})
        assert status == 400 and answer["error"]["param"] == f"sampler.{name}"
    with serving(models={"mine": loaded(root, None)}) as server:  # control: nothing was loaded
        spec = {"name": "speculative", "drafter": "exit"}
        status, answer, _ = server.ask("/v1/completions", {**body, "sampler": spec})
        assert status == 400 and "comes without a drafter of kind exit" in str(answer)


def test_the_command_of_the_server_takes_a_draft_model(root):
    """``--model-option ID:draft_model=FOLDER``."""

    class Args:
        model = [f"mine=text:{root / 'E' / 'model'}"]
        model_option = [f"mine:draft_model={folder(root, 'exit')}"]
        device, dtype, max_rows, max_waiting, limits = "cpu", None, None, None, LIMITS

    engine = make_engine(Args)
    try:
        made = engine.submit("mine", PROMPT, seed=0).result(timeout=120)
        assert made.spec == {"name": "speculative", "drafter": "exit"}
    finally:
        engine.close()


def test_a_job_drafts_with_the_folder_and_notices_another_one_in_its_place(root, tmp_path):
    copy = shutil.copytree(folder(root, "exit"), tmp_path / "drafter")
    tree = {"modality": "text", "model": str(root / "E" / "model"), "prompts": [PROMPT]}
    tree |= {"model_options": {"draft_model": str(copy)}, "out": str(tmp_path / "S")}
    (tmp_path / "job.yaml").write_text(json.dumps(tree))
    assert main(["run", str(tmp_path / "job.yaml"), "--quiet"]) == 0
    row = json.loads(next((tmp_path / "S").glob("manifest*")).read_text().splitlines()[0])
    assert row["draft_acceptance_rate"] > 0
    assert main(["run", str(tmp_path / "job.yaml"), "--quiet"]) == 0  # control: the same again
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    assert main(["run", str(tmp_path / "job.yaml"), "--quiet"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ar", "eagle"])
def test_a_model_of_captions_of_its_own_gets_a_drafter(kind, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    media = own_media.images(Path("media"), 12)
    for number, caption in enumerate(sorted(media.glob("*.txt"))):
        caption.write_text(f"ein Café mit {number % 3} Gästen")
    encode_folder("image", media, "D")
    done = train(make_training({**TINY, "data": "D", "out": "E"}, "here"), lambda _: None)
    argv = ["--model", "E/model", "--kind", kind, "--out", "V", "--quick"]
    with pytest.raises(GenError, match="conditions of its own; expected gen train with objective"):
        recipe(argv)
    keys = {"objective": "drafter", "model": done["model"], "data": "D", "out": "W"}
    keys["drafter"] = {"kind": kind, "quick": True}
    made = train(make_training(keys, "here"), lambda _: None)
    words = shlex.split(made["use"])[1:]
    assert words[2].startswith("ein Café mit")
    assert main([*words, "--out", "S", "--quiet"]) == 0 and main(["check", "S"]) == 0
    assert "1 items not judged: no checker for this model" in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_without_conditions_takes_no_prompt_and_no_checker_judges_it(tmp_path, capsys):
    media = own_media.images(tmp_path / "media", 8)
    for caption in media.glob("*.txt"):
        caption.unlink()
    encode_folder("image", media, tmp_path / "D")
    keys = {"data": str(tmp_path / "D"), "out": str(tmp_path / "E"), **TINY, "steps": 2}
    done = train(make_training(keys, "here"), lambda _: None)
    words = shlex.split(done["use"])[1:]
    assert main([*words, "sampler.window=64", "--out", str(tmp_path / "S"), "--quiet"]) == 0
    assert main(["check", str(tmp_path / "S")]) == 0
    out = capsys.readouterr().out
    assert "1 items not judged: no checker for this model" in out and "0.0%" not in out
    prompted = [*words[:2], "a red circle", *words[2:]]
    assert main([*prompted, "--out", str(tmp_path / "T"), "--quiet"]) == 2
    assert "was trained without conditions" in capsys.readouterr().err
    job = {"modality": "image", "model": done["model"], "out": str(tmp_path / "J"), "seed": 4}
    (tmp_path / "job.yaml").write_text(json.dumps({**job, "num_samples": 1}))
    assert main(["run", str(tmp_path / "job.yaml"), "sampler.window=64", "--quiet"]) == 0
    (tmp_path / "job.yaml").write_text(json.dumps({**job, "prompts": ["a red circle"]}))
    assert main(["run", str(tmp_path / "job.yaml"), f"out={tmp_path / 'K'}", "--quiet"]) == 2


def test_control_captions_of_the_modality_are_judged(root, tmp_path, capsys):
    asked = ["--model", str(root / "E" / "model"), "--quiet", "--out"]
    assert main(["sample", "text", PROMPT, *asked, str(tmp_path / "S")]) == 0
    assert main(["check", str(tmp_path / "S")]) == 0
    assert "not judged" not in capsys.readouterr().out
    assert main(["sample", "text", "", *asked, str(tmp_path / "T")]) == 2
    assert "expected a text that is not empty" in capsys.readouterr().err
