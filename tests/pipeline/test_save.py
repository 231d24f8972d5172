"""Saved pipelines: what is loaded again makes the same, of every family and every modality."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import yaml
from families import WRITERS, Case
from published import save_quietly, tiny_tokenizer
from safetensors.torch import load_file, save_file
from tiny_checkpoints import tiny

import gen
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.models.load.reads import ENDINGS, TEXTS
from gen.pipeline.card import card_of
from gen.pipeline.save import RECORD

FAST = ("causal_lm", "llamagen", "llada")
OWN = ("image", "text")
PROMPTS = {"text": "sort 3 1 2 ="}


def loaded(case: Case, **more):
    return gen.load(case.modality, model=case.path, **{**case.options, "dtype": "float64", **more})


def made(pipe, case: Case) -> torch.Tensor:
    return pipe(list(case.prompts), sampler=case.samplers[0], seed=3).tokens


def gone(case: Case) -> None:
    """Remove the source, so that a saved folder must stand alone; media of prompts stay."""
    for path in [p for p in case.root.rglob("*") if p.suffix in (*TEXTS, *ENDINGS)]:
        path.unlink()
    with pytest.raises(GenError):
        loaded(case)


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in WRITERS]
)
def test_every_family_makes_the_same_tokens_from_the_saved_folder(name, tmp_path):
    (tmp_path / "source").mkdir()
    case = WRITERS[name](tmp_path / "source")
    pipe = loaded(case)
    before = made(pipe, case)
    folder = pipe.save_pretrained(tmp_path / "saved")
    gone(case)
    again = gen.load(folder)
    assert again.dtype == torch.float64
    assert torch.equal(made(again, case), before)
    assert not list(tmp_path.glob(".*"))  # no temporary folder is left


@pytest.mark.parametrize(
    "modality",
    [
        n if n in OWN else pytest.param(n, marks=pytest.mark.slow)
        for n in registry.table("modality")
    ],
)
def test_every_modality_makes_the_same_tokens_from_the_saved_folder(modality, tmp_path):
    pipe = gen.load(modality)
    prompt = PROMPTS.get(modality) or pipe.modality.example_prompts(1, 0)[0]
    before = pipe(prompt, seed=1)
    folder = pipe.save_pretrained(tmp_path / "saved")
    again = gen.load(folder)
    assert again.model.startswith(str(folder))
    assert torch.equal(again(prompt, seed=1).tokens, before.tokens)


def test_a_changed_weight_of_the_saved_folder_changes_the_tokens(tmp_path):
    pipe = gen.load("image")
    before = pipe("a red circle", seed=0).tokens
    folder = pipe.save_pretrained(tmp_path / "saved")
    file = folder / "image-causal" / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["lm_head.weight"].flip(0)
    save_file(weights, file, metadata={"format": "pt"})
    assert not torch.equal(gen.load(folder)("a red circle", seed=0).tokens, before)


def test_own_weights_are_saved_from_memory_in_shards_and_in_their_dtype(tmp_path):
    pipe = gen.load("image", dtype="float64")
    network = pipe.components["model"]
    with torch.no_grad():
        network.lm_head.weight.mul_(0.5)
    folder = pipe.save_pretrained(tmp_path / "saved", max_shard_size="4MB")
    files = sorted((folder / "image-causal").glob("model-*.safetensors"))
    assert len(files) > 1
    found = {k: v for file in files for k, v in load_file(file).items()}
    assert torch.equal(found["lm_head.weight"], network.lm_head.weight)
    again = gen.load(folder)
    assert again.dtype == torch.float64 and gen.load(folder, dtype="float32").dtype == torch.float32
    assert torch.equal(again("a ring", seed=0).tokens, pipe("a ring", seed=0).tokens)


def test_a_sampler_chooses_which_model_is_saved(tmp_path):
    folder = gen.load("image").save_pretrained(tmp_path / "saved", sampler="maskgit")
    assert gen.load("image", model=folder).config["protocols"] == ["masked"]


def test_options_and_files_elsewhere_come_along_and_dtype_is_kept(tmp_path):
    (tmp_path / "source").mkdir()
    case = WRITERS["llamagen"](tmp_path / "source")
    vq = next(p for p in case.root.rglob("vq_*"))
    elsewhere = tmp_path / "elsewhere" / vq.name
    elsewhere.parent.mkdir()
    shutil.move(vq, elsewhere)
    (case.root / "unrelated.safetensors.bak").write_text("not read")
    pipe = loaded(case, vq=str(elsewhere), dtype="bfloat16")
    before = made(pipe, case)
    folder = pipe.save_pretrained(tmp_path / "saved")
    gone(case)
    shutil.rmtree(elsewhere.parent)
    again = gen.load(folder)
    assert again.dtype == torch.bfloat16 and torch.equal(made(again, case), before)
    assert not list(folder.rglob("*.bak"))


def test_a_size_that_the_name_of_a_folder_states_is_kept(tmp_path):
    case = WRITERS["llamagen"](tmp_path)
    named = tmp_path / "source-256"
    named.mkdir()
    for path in case.root.iterdir():
        if path != named:
            shutil.move(path, named / path.name)
    file = named / case.path.name if case.path.is_file() else named
    options = {k: v for k, v in case.options.items() if k not in ("height", "width")}
    pipe = gen.load("image", model=file, **options)
    folder = pipe.save_pretrained(tmp_path / "saved")
    assert gen.load(folder).bound(str(folder))[1].space.grid == pipe.bound(str(file))[1].space.grid
    record = json.loads((folder / RECORD).read_text())
    assert record["options"]["height"] == record["options"]["width"] == 256


def test_the_base_model_of_a_hub_id_is_in_the_card(tmp_path):
    (tmp_path / "source").mkdir()
    case = WRITERS["causal_lm"](tmp_path / "source")
    pipe = loaded(case)
    name = str(case.path)
    text = card_of(pipe, "org/base", pipe.bound(name)[0], pipe.files(name))
    card = yaml.safe_load(text.split("---\n")[1])
    assert (card["base_model"], card["pipeline_tag"]) == ("org/base", "text-generation")
    assert "base_model" not in card_of(pipe, name, pipe.bound(name)[0], pipe.files(name))


def test_published_weights_that_were_changed_are_refused(tmp_path):
    (tmp_path / "source").mkdir()
    case = WRITERS["causal_lm"](tmp_path / "source")
    pipe = loaded(case)
    with torch.no_grad():
        pipe.bound(pipe.model)[0].model.lm_head.weight.add_(1)
    with pytest.raises(GenError, match="were changed after loading"):
        pipe.save_pretrained(tmp_path / "saved")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_a_folder_with_content_a_file_and_a_full_disk_leave_nothing(tmp_path, monkeypatch):
    pipe = gen.load("image")
    used, file = tmp_path / "used", tmp_path / "file"
    used.mkdir()
    (used / "mine.txt").write_text("mine")
    file.write_text("mine")
    for target in (used, file):
        with pytest.raises(GenError, match="new or empty"):
            pipe.save_pretrained(target)
    with pytest.raises(GenError, match="folder is 3"):
        pipe.save_pretrained(3)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(GenError, match="No space left") as raised:
        pipe.save_pretrained(tmp_path / "new")
    assert "\n" not in str(raised.value)
    monkeypatch.undo()
    with pytest.raises(GenError, match="cannot write"):
        pipe.save_pretrained(file / "below")
    assert sorted(os.listdir(tmp_path)) == ["file", "used"]
    (tmp_path / "empty").mkdir()
    assert pipe.save_pretrained(tmp_path / "empty").is_dir()


def test_a_record_that_cannot_be_read_is_one_error(tmp_path):
    (tmp_path / RECORD).write_text("{}")
    with pytest.raises(GenError, match="expected the record"):
        gen.load(tmp_path)


class Hub:
    """Stands for ``HfApi`` and keeps what was asked of it."""

    def __init__(self, token):
        Hub.asked = {"token": token}

    def create_repo(self, repo_id, **options):
        Hub.asked["create_repo"] = (repo_id, options)
        return SimpleNamespace(repo_id=repo_id)

    def create_branch(self, repo_id, **options):
        Hub.asked["create_branch"] = (repo_id, options)

    def upload_folder(self, *, folder_path, **options):
        Hub.asked["upload_folder"] = options
        Hub.files = {
            p.relative_to(folder_path).as_posix(): p.read_bytes()
            for p in Path(folder_path).rglob("*")
            if p.is_file()
        }
        return SimpleNamespace(commit_url="https://hub/commit")


def test_exactly_the_saved_files_are_uploaded_with_a_card(tmp_path, monkeypatch, caplog, capsys):
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    pipe = gen.load("image")
    url = pipe.push_to_hub(
        "org/name", revision="v2", private=True, token="hf_secret", commit_message="First"
    )
    assert url == "https://hub/commit"
    assert Hub.asked == {
        "token": "hf_secret",
        "create_repo": ("org/name", {"private": True, "exist_ok": True}),
        "create_branch": ("org/name", {"branch": "v2", "exist_ok": True}),
        "upload_folder": {
            "repo_id": "org/name",
            "revision": "v2",
            "commit_message": "First",
        },
    }
    folder = pipe.save_pretrained(tmp_path / "saved")
    files = [p for p in folder.rglob("*") if p.is_file()]
    assert Hub.files == {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}
    assert not any(b"hf_secret" in content for content in Hub.files.values())
    assert "hf_secret" not in caplog.text + "".join(capsys.readouterr())
    _, front, text = Hub.files["README.md"].decode().split("---\n", 2)
    card = yaml.safe_load(front)
    assert (card["license"], card["library_name"], card["pipeline_tag"]) == (
        "apache-2.0",
        "gen",
        "text-to-image",
    )
    assert "same_tokens" in text and "gen.load(" in text


def test_a_refusal_of_the_hub_is_one_error(monkeypatch):
    def refused(self, repo_id, **options):
        raise OSError("403 Forbidden\nno access")

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(Hub, "create_repo", refused)
    with pytest.raises(GenError, match="org/name: 403 Forbidden no access"):
        gen.load("image").push_to_hub("org/name")


@pytest.mark.parametrize("head", ["", "---\nlicense: mit\ntags: [x]\n---\n# Title\n"])
def test_a_license_is_that_of_the_source_or_absent(head, tmp_path):
    (tmp_path / "source").mkdir()
    case = WRITERS["causal_lm"](tmp_path / "source")
    (case.root / "README.md").write_text(head)
    folder = loaded(case).save_pretrained(tmp_path / "saved")
    text = (folder / "README.md").read_text()
    card = yaml.safe_load(text.split("---\n")[1])
    assert card.get("license") == ("mit" if head else None)
    assert ("states no license" in text) == (not head)
    assert json.loads((folder / RECORD).read_text())["options"] == dict(case.options)


def test_weights_of_a_variant_in_a_subfolder_are_those_that_are_saved(tmp_path):
    inner = tmp_path / "all" / "inner"
    save_quietly(tiny("llama").float(), inner)
    tiny_tokenizer().save_pretrained(inner)
    halves = {k: v / 2 for k, v in load_file(inner / "model.safetensors").items()}
    save_file(halves, inner / "model.fp16.safetensors", {"format": "pt"})
    where = {"model": tmp_path / "all", "subfolder": "inner", "max_new_tokens": 8}
    pipe, plain = gen.load("text", **where, variant="fp16"), gen.load("text", **where)
    pipe.save_pretrained(tmp_path / "saved")
    shutil.rmtree(tmp_path / "all")
    want, other = pipe(["w1 w2"], seed=1).tokens, plain(["w1 w2"], seed=1).tokens
    assert torch.equal(gen.load(tmp_path / "saved")(["w1 w2"], seed=1).tokens, want)
    assert not torch.equal(other, want)  # control: the plain weights
