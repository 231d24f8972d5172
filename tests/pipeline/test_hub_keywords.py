"""Keywords of ``from_pretrained``: which commit and which files are read, with a hand-made local
cache of two commits and no network."""

from __future__ import annotations

import json
import pickle
import shutil
import socket

import pytest
import torch
from families import WRITERS
from published import save_quietly, tiny_tokenizer
from safetensors.torch import load_file, save_file
from tiny_checkpoints import tiny

import gen
from gen.__main__ import main
from gen.contracts.checkpoint import CheckpointFiles
from gen.core.errors import GenError
from gen.models.load.hub import HubOptions
from gen.models.load.weights import Weights, fill, weight_files, without_storage
from gen.store.ledger import read_plan

OLD, NEW = "0" * 39 + "1", "f" * 39 + "2"
SECRET = "hf_averysecrettoken"
REPOSITORY = "models--me--tiny"


def write(folder, seed):
    model = tiny("llama").float()
    draws = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.data += 0.02 * torch.randn(weight.shape, generator=draws)
    save_quietly(model, folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    return [write(root / str(seed), seed) for seed in (1, 2)]


def move(cache, branch, commit):
    (cache / REPOSITORY / "refs" / branch).write_text(commit)


@pytest.fixture
def cache(folders, tmp_path, monkeypatch):
    """Cache of two commits: ``main`` is the newer one, ``v1`` the older one; no network."""
    from huggingface_hub import constants

    (tmp_path / REPOSITORY / "refs").mkdir(parents=True)
    for folder, commit in zip(folders, (OLD, NEW), strict=True):
        snapshot = tmp_path / REPOSITORY / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for file in folder.iterdir():  # as the hub's client does: links to blobs by content
            blob = tmp_path / REPOSITORY / "blobs" / f"{commit[-1]}-{file.name}"
            blob.parent.mkdir(exist_ok=True)
            shutil.copy(file, blob)
            (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    move(tmp_path, "main", NEW)
    move(tmp_path, "v1", OLD)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.fixture
def no_sockets(monkeypatch):
    """Fail at the first socket, and let the hub's client believe that it is online."""
    from huggingface_hub import constants

    def refuse(*_, **__):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def load(model="me/tiny", **more):
    return gen.load("text", model=model, **{"max_new_tokens": 4, **more})


def weights_of(pipe):
    return pipe.components["model"].model.state_dict()["lm_head.weight"]


def refused(*words, **more):
    with pytest.raises(GenError) as error:
        load(**more)
    assert all(w in str(error.value) for w in words), str(error.value)
    assert SECRET not in str(error.value) and "\n" not in str(error.value)


# --- revisions


def test_a_revision_is_a_branch_a_tag_or_a_commit_and_the_commit_is_recorded(cache, folders):
    wanted = [load_file(f / "model.safetensors")["lm_head.weight"] for f in folders]
    for revision, commit, weight in (
        (None, NEW, wanted[1]),
        ("main", NEW, wanted[1]),
        ("v1", OLD, wanted[0]),
        (OLD, OLD, wanted[0]),
        ({"me/tiny": "v1", "you/draft": "main"}, OLD, wanted[0]),
    ):
        pipe = load(revision=revision)
        assert torch.equal(weights_of(pipe), weight)
        assert pipe.commits == {"me/tiny": commit}
        said = pipe(["w1"]).model_options["revision"]
        assert (said if isinstance(said, str) else said["me/tiny"]) == commit
    assert not torch.equal(*wanted)  # control


def test_an_unknown_revision_is_refused_with_those_of_the_cache(cache):
    refused("'v2'", "main (fffffffff", "v1 (000", "'v2'", revision="v2")
    refused("Did you mean 'main'", revision="mian")
    refused("local_files_only is true", revision="v2", local_files_only=True)
    refused("is not in the local cache", model="me/other", local_files_only=True)


def test_a_branch_that_moves_changes_no_pipeline_that_has_loaded(cache):
    pipe = load()
    move(cache, "main", OLD)
    before = weights_of(pipe)
    twin = pickle.loads(pickle.dumps(pipe))
    assert torch.equal(weights_of(pipe.to(dtype="float64")), before.double())
    assert torch.equal(weights_of(twin), before) and twin.commits == {"me/tiny": NEW}
    assert not torch.equal(weights_of(load()), before)  # control


def test_a_local_folder_has_no_revision_and_the_zoo_no_files_to_choose(folders):
    refused("revision 'v1'", "a local folder", model=folders[0], revision="v1")
    for key, value in (("revision", "v1"), ("subfolder", "x"), ("variant", "fp16")):
        refused(key, "of the zoo", model="text-causal", max_new_tokens=None, **{key: value})
    with pytest.raises(GenError, match="Did you mean 'revision'"):
        gen.load("text", model="text-causal", revison="v1")
    with pytest.raises(GenError, match="revision"):
        gen.load("text", revision="v1")
    assert gen.load("text", local_files_only=True).commits == {}


def test_cache_dir_names_another_cache(cache, tmp_path):
    shutil.move(cache / REPOSITORY, tmp_path / "elsewhere" / REPOSITORY)
    refused("local cache", model="me/tiny")
    assert load(cache_dir=tmp_path / "elsewhere").commits == {"me/tiny": NEW}


# --- the token


def test_a_token_is_given_to_the_hub_and_to_nothing_else(cache, monkeypatch, tmp_path):
    import huggingface_hub

    real, asked = huggingface_hub.snapshot_download, []

    def spy(name, **how):
        asked.append(how.get("token"))
        return real(name, **how)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", spy)
    pipe = load(token=SECRET)
    out = pipe(["w1"])
    out.save(tmp_path / "out")
    assert asked[0] == SECRET  # control: it arrives
    texts = [repr(pipe), repr(pipe.config), repr(pipe._load_options), repr(out.model_options)]
    assert not any(SECRET in text for text in texts)
    assert SECRET.encode() not in pickle.dumps(pipe)
    written = [p for p in (tmp_path / "out").rglob("*") if p.is_file()]
    assert written and not any(SECRET.encode() in p.read_bytes() for p in written)
    refused("'v9'", token=SECRET, revision="v9")

    def leaky(name, **how):
        raise OSError(f"the header was Bearer {how['token']}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", leaky)
    refused("Bearer (token)", token=SECRET)


def test_a_job_file_holds_no_token(cache, tmp_path, capsys):
    path = job_file(tmp_path, token=SECRET)
    assert main(["run", str(path)]) == 2
    said = capsys.readouterr().err
    assert "HF_TOKEN" in said and SECRET not in said and not (tmp_path / "out").exists()


# --- jobs


def job_file(tmp_path, **options):
    path = tmp_path / "job.yaml"
    tree = {
        "modality": "text",
        "model": "me/tiny",
        "model_options": {"max_new_tokens": 3, **options},
        "sampler": "autoregressive",
        "prompts": ["w1", "w2"],
        "out": str(tmp_path / "out"),
    }
    path.write_text(json.dumps(tree))
    return path


def test_a_job_keeps_its_commit_and_is_refused_after_the_branch_moved(cache, tmp_path, capsys):
    path = job_file(tmp_path)
    assert main(["run", str(path)]) == 0
    plan = read_plan(tmp_path / "out")
    assert plan["commits"] == {"me/tiny": NEW} and set(plan["weights"]) == {"me/tiny"}
    sidecars = sorted((tmp_path / "out").glob("0*-w*.json"))
    recipes = [json.loads(p.read_text())["job"] for p in sidecars]
    assert len(recipes) == 2
    assert all(r["model_options"]["revision"] == NEW for r in recipes)
    assert main(["run", str(path)]) == 0  # control: nothing moved
    capsys.readouterr()
    move(cache, "main", OLD)
    assert main(["run", str(path)]) == 2
    said = capsys.readouterr().err
    assert OLD in said and NEW in said and "gen work" in said


def test_a_worker_loads_the_commit_of_the_plan(cache, tmp_path):
    path = job_file(tmp_path)
    assert main(["run", str(path)]) == 0
    before = {p.name: p.read_text() for p in (tmp_path / "out").glob("0*.txt")}
    for name in before:
        (tmp_path / "out" / name).unlink()
    (tmp_path / "out" / "manifest.jsonl").unlink()
    move(cache, "main", OLD)
    assert main(["work", str(tmp_path / "out")]) == 0
    assert {p.name: p.read_text() for p in (tmp_path / "out").glob("0*.txt")} == before
    fresh = job_file(tmp_path)
    assert main(["run", str(fresh), f"out={tmp_path / 'other'}"]) == 0
    other = {p.name: p.read_text() for p in (tmp_path / "other").glob("0*.txt")}
    assert other.keys() == before.keys() and other != before  # control


def test_where_files_lie_changes_no_fingerprint_and_a_revision_does(cache, tmp_path):
    from gen.config.entries import fingerprint
    from gen.config.job import load_config

    plain = fingerprint(load_config(job_file(tmp_path)))
    assert fingerprint(load_config(job_file(tmp_path, cache_dir=str(cache)))) == plain
    assert fingerprint(load_config(job_file(tmp_path, local_files_only=True))) == plain
    assert fingerprint(load_config(job_file(tmp_path, revision="v1"))) != plain


def test_a_dry_run_opens_no_socket_and_says_what_is_not_here(cache, tmp_path, capsys, no_sockets):
    assert main(["run", str(job_file(tmp_path)), "--dry-run"]) == 0
    assert f"me/tiny at commit {NEW}" in capsys.readouterr().out
    shutil.move(cache / REPOSITORY, tmp_path / "gone")
    assert main(["run", str(job_file(tmp_path)), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "me/tiny is not in the local cache; how many files would be fetched" in said
    with pytest.raises(AssertionError, match="a socket"):  # control
        load()


def test_a_dry_run_counts_the_files_that_are_missing(cache, tmp_path, capsys, no_sockets):
    snapshot = cache / REPOSITORY / "snapshots" / NEW
    entries = {p.name: {"size": 1, "blob_id": "0" * 40} for p in snapshot.iterdir()}
    trees = cache / REPOSITORY / "trees"
    trees.mkdir()
    tree = {"format_version": 1, "files": entries}
    (trees / f"{NEW}.json").write_text(json.dumps(tree))
    (snapshot / "model.safetensors").unlink()
    assert main(["run", str(job_file(tmp_path)), "--dry-run"]) == 0
    assert "me/tiny is not in the local cache; 1 file would be fetched" in capsys.readouterr().out


# --- files


def halved(folder, target, variant, sharded=False):
    """Copy a folder with weights of a variant that are half of the plain ones."""
    shutil.copytree(folder, target)
    weights = {k: v / 2 for k, v in load_file(folder / "model.safetensors").items()}
    if not sharded:
        save_file(weights, target / f"model.{variant}.safetensors", {"format": "pt"})
        return target
    names = [f"model-0000{i}-of-00002.{variant}.safetensors" for i in (1, 2)]
    parts = list(weights)[::2], list(weights)[1::2]
    for name, keys in zip(names, parts, strict=True):
        save_file({k: weights[k] for k in keys}, target / name, {"format": "pt"})
    where = {k: name for name, keys in zip(names, parts, strict=True) for k in keys}
    index = {"metadata": {}, "weight_map": where}
    (target / f"model.safetensors.index.{variant}.json").write_text(json.dumps(index))
    return target


@pytest.mark.parametrize("sharded", [False, True])
def test_a_variant_names_the_files_of_weights(folders, tmp_path, sharded):
    folder = halved(folders[0], tmp_path / "copy", "fp16", sharded)
    plain, half = load(folder), load(folder, variant="fp16")
    assert torch.equal(weights_of(half), weights_of(plain) / 2)
    assert len(weight_files(folder, "fp16")) == 1 + sharded
    if not sharded:
        assert [p.name for p in weight_files(folder)] == ["model.safetensors"]
    own = Weights(folder, variant="fp16")
    assert torch.equal(own["lm_head.weight"], weights_of(half))
    refused("'fp61'", "fp16", "Did you mean 'fp16'", model=folder, variant="fp61")
    refused("no variants", model=folders[0], variant="fp16")


def test_a_subfolder_holds_the_model(folders, tmp_path):
    shutil.copytree(folders[0], tmp_path / "all" / "inner")
    pipe = load(tmp_path / "all", subfolder="inner")
    assert torch.equal(weights_of(pipe), weights_of(load(folders[0])))
    refused("'iner'", "Did you mean 'inner'", model=tmp_path / "all", subfolder="iner")
    refused("subfolder", model=tmp_path / "all", subfolder="../x")


def test_a_subfolder_of_a_repository_is_all_that_is_asked_for(cache, monkeypatch):
    import huggingface_hub

    asked = []

    def spy(name, **how):
        asked.append(how)
        raise OSError("stop")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", spy)
    with pytest.raises(GenError):
        CheckpointFiles.find("me/tiny", HubOptions(subfolder="inner", variant="fp16"))
    assert asked[0]["allow_patterns"] == "inner/*"
    assert "*.bf16.safetensors" in asked[0]["ignore_patterns"]
    assert "*.fp16.safetensors" not in asked[0]["ignore_patterns"]


# --- placement and attention


def test_attention_is_chosen_by_name_and_kernels_without_masks_are_refused(folders):
    tokens = []
    for name in ("eager", "sdpa", "flex_attention"):
        with torch.compiler.set_stance("force_eager"):  # flex_attention compiles its kernels
            pipe = load(folders[0], attn_implementation=name)
            assert pipe.components["model"].model.config._attn_implementation == name
            tokens.append(pipe(["w1", "w2 w3"], sampler="speculative_jacobi", seed=0).tokens)
    assert torch.equal(tokens[0], tokens[1]) and torch.equal(tokens[0], tokens[2])
    refused("masks", model=folders[0], attn_implementation="flash_attention_2")
    refused("Did you mean 'eager'", model=folders[0], attn_implementation="eagre")


def test_offloaded_weights_give_the_same_tokens(folders, tmp_path):
    names = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    placed = {**dict.fromkeys(names, "cpu"), "model.layers": "disk"}
    off = tmp_path / "off"
    plain = load(folders[0], dtype="float64")
    pipe = load(folders[0], dtype="float64", device_map=placed, offload_folder=off)
    layers = pipe.components["model"].model.model.layers
    assert all(p.device.type == "meta" for p in layers.parameters())
    assert torch.equal(pipe(["w1"], seed=0).tokens, plain(["w1"], seed=0).tokens)
    refused("without a device_map", model=folders[0], offload_folder=off)
    refused("without a device_map", model=folders[0], max_memory={"cpu": "1GB"})


@pytest.mark.parametrize(
    "name",
    ["causal_lm"]
    + [pytest.param(n, marks=pytest.mark.slow) for n in ("chameleon", "llamagen", "llada")],
)
def test_a_whole_model_runs_from_the_disk(name, tmp_path):
    (tmp_path / "model").mkdir()
    case = WRITERS[name](tmp_path / "model")
    how = {"model": case.path, "dtype": "float64", **case.options}
    plain = gen.load(case.modality, **how)
    off = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "off"}
    pipe = gen.load(case.modality, **how, **off)
    network = pipe.bound(pipe.model)[0].adapter(pipe.config["protocols"][0]).model
    assert all(p.device.type == "meta" for p in network.parameters())
    asked = {"sampler": case.samplers[0], "seed": 1}
    assert torch.equal(
        pipe(list(case.prompts), **asked).tokens, plain(list(case.prompts), **asked).tokens
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["janus", "emu3", "llava"])
def test_a_network_that_reads_weights_beside_its_modules_keeps_some_in_memory(name, tmp_path):
    (tmp_path / "model").mkdir()
    case = WRITERS[name](tmp_path / "model")
    off = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "off"}
    with pytest.raises(GenError, match="expected at least the embedding of the tokens in memory"):
        gen.load(case.modality, model=case.path, **case.options, **off)


def test_weights_that_gen_reads_itself_are_offloaded_too(tmp_path):
    def make():
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).eval()

    model = make()
    placed = fill(
        without_storage(make),
        model.state_dict(),
        device_map={"0": "cpu", "1": "disk"},
        offload_folder=tmp_path,
    )
    x = torch.randn(2, 3)
    assert placed[1].weight.device.type == "meta" and placed[0].weight.device.type == "cpu"
    assert torch.equal(placed(x), model(x))


def test_max_memory_moves_what_does_not_fit_to_the_disk(folders, tmp_path):
    plain = load(folders[0])
    size = sum(p.nbytes for p in plain.components["model"].model.parameters())
    pipe = load(
        folders[0],
        device_map="sequential",
        max_memory={"cpu": size // 2},
        offload_folder=tmp_path / "off",
    )
    positions = set(pipe.components["model"].model.hf_device_map.values())
    assert positions == {"cpu", "disk"}
    assert torch.equal(pipe(["w1"], seed=0).tokens, plain(["w1"], seed=0).tokens)


# --- commands


def test_commands_take_the_same_options_and_refuse_the_same(cache, tmp_path, capsys):
    def said(*words, code=2):
        capsys.readouterr()
        assert main([*words]) == code, capsys.readouterr().err
        found = capsys.readouterr()
        return found.out if code == 0 else found.err

    model, out = ["--model", "me/tiny", "--model-option", "max_new_tokens=3"], tmp_path / "out"
    bench = ["bench", "text", *model, "--samplers", "autoregressive", "--quick", "--batch-sizes=1"]
    sample = ["sample", "text", "w1", *model, "--sampler", "autoregressive", "--out", str(out)]
    report = tmp_path / "report.json"
    prompts = ["--prompts", "1", "--repeats", "1"]
    options = ["--model-option", "local_files_only=true", "--model-option", "variant=fp61"]
    for command in (bench, sample):
        assert "Did you mean 'main'" in said(*command, "--model-option", "revision=mian")
        assert "Did you mean 'revision'" in said(*command, "--model-option", "revison=v1")
        assert "no variants" in said(*command, *options)
        assert "expected KEY=VALUE" in said(*command, "--model-option", "revision")
        assert "names 'revision' twice" in said(*command, *["--model-option", "revision=v1"] * 2)
        err = said(*command, "--model-option", f"token={SECRET}")
        assert "HF_TOKEN" in err and SECRET not in err
    assert "with one modality" in said("bench", "all", "--model-option", "revision=v1")
    assert "loads no model" in said(*bench, "--estimate", "h100", "--model-option", "revision=v1")
    said(*bench, *prompts, "--model-option", "revision=v1", "--out", str(report), code=0)
    assert json.loads(report.read_text())["revision"] == "v1"
    said(*sample, "--model-option", "revision=v1", code=0)
    assert read_plan(out)["commits"] == {"me/tiny@v1": OLD}
