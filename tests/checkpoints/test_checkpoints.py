"""Published checkpoints: found, loaded strictly, and decoded as their own libraries do. Families
have files of their own; here is what all share, and the one of texts."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from calls import only
from published import padded_left, save_quietly, tiny_tokenizer
from tiny_checkpoints import tiny

import gen
from gen.contracts.checkpoint import Checkpoint, CheckpointFiles, options_of
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.models.adapters.conditioning import Conditions, Vocabulary
from gen.models.load.weights import Weights, fill, weight_files, without_storage

PROMPTS = ["w1 w2 w3", "w5", "w9 w8 w7 w6 w5 w4", "w3 w3"]
POSITIONS = 10


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt_neox"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    save_quietly(tiny(request.param), path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_quietly(tiny("llama"), path)
    tiny_tokenizer().save_pretrained(path)
    return path


def copy(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    return tmp_path / "copy"


# --- texts


def test_logits_are_those_of_the_class(folder):
    from transformers import AutoModelForCausalLM

    pipe = gen.load("text", model=folder, dtype="float64", max_new_tokens=POSITIONS)
    ids = torch.tensor([[1, 9, 8, 7, 30]])
    model = pipe.modality.checkpoint.adapter("causal")
    ours = model.forward(ids, torch.arange(5)[None], model.new_cache(5))
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert (ours - own(ids).logits).abs().max() < 1e-10
    assert (ours - own(ids.flip(1)).logits).abs().max() > 1e-3  # control


@pytest.mark.parametrize("sampler", ["autoregressive", "speculative_jacobi"])
@pytest.mark.thinned(3)
def test_greedy_texts_are_those_of_generate_alone_and_in_a_padded_batch(folder, sampler):
    pipe = gen.load("text", model=folder, dtype="float64", max_new_tokens=POSITIONS)
    checkpoint = pipe.modality.checkpoint
    rows = [checkpoint.prompt(p) for p in PROMPTS]
    assert len({len(r) for r in rows}) == len(PROMPTS)
    given = padded_left(rows, 0)
    own = checkpoint.model.generate(**given, do_sample=False, max_new_tokens=POSITIONS)[
        :, given["input_ids"].shape[1] :
    ]
    ours = pipe(PROMPTS, sampler=sampler, **only(temperature=0.0))
    alone = [pipe([p], sampler=sampler, **only(temperature=0.0)).tokens[0] for p in PROMPTS]
    for row, single, want in zip(ours.tokens, alone, own, strict=True):
        until = pipe.bound(str(folder))[1].space.before_end(row)
        assert torch.equal(until, want[: len(until)]) and (
            len(until) == POSITIONS or int(want[len(until)]) == 2
        )
        assert torch.equal(row, single)
    moved = padded_left([[*r[:-1], r[-1] + 1] for r in rows], 0)  # control: other prompts
    other = checkpoint.model.generate(**moved, do_sample=False, max_new_tokens=POSITIONS)[
        :, given["input_ids"].shape[1] :
    ]
    assert other.tolist() != own.tolist()


def test_several_samplers_write_texts_and_a_job_resumes(llama, tmp_path):
    pipe = gen.load("text", model=llama, max_new_tokens=POSITIONS)
    for sampler in (
        "autoregressive",
        "speculative_jacobi",
        "sjd",
        "scd_mc",
        {"name": "speculative", "draft_model": str(llama)},
    ):
        out = pipe(PROMPTS[:2], sampler=sampler, seed=3)
        assert all(isinstance(m, str) and m.split() for m in out.media)
    same = pipe(PROMPTS[:2], sampler="autoregressive", seed=3)
    assert torch.equal(pipe(PROMPTS[:2], seed=3).tokens, same.tokens)  # gumbel: the same tokens
    saved = out.save(tmp_path / "saved")
    assert saved.is_file() and len(list((tmp_path / "saved").glob("*.txt"))) == 2


def test_guidance_and_prefix(llama):
    pipe = gen.load("text", model=llama, dtype="float64", max_new_tokens=POSITIONS)
    plain, guided = (
        pipe(PROMPTS, sampler="autoregressive", **only(temperature=0.0, guidance_scale=s)).tokens
        for s in (1.0, 3.0)
    )
    assert not torch.equal(plain, guided)
    out = pipe(PROMPTS[:1], sampler="autoregressive", prefix="w7 w8")
    assert out.tokens[0, :2].tolist() == pipe.modality.checkpoint.frontend.ids("w7 w8")


def test_a_command_line_job_names_the_folder_and_its_options(llama, tmp_path, capsys):
    from gen.__main__ import main

    args = [
        "sample",
        "text",
        "w1 w2",
        "--model",
        str(llama),
        "model_options.max_new_tokens=4",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(args) == 0 and main(args) == 0
    row = json.loads((tmp_path / "out" / "manifest.jsonl").read_text().splitlines()[0])
    assert row["status"] == "ok" and row["tokens"] <= 4 and row["model"] == str(llama)
    capsys.readouterr()
    assert main([*args[:6], "model_options.max_new_token=4", "--out", str(tmp_path / "other")]) == 2
    assert "'max_new_tokens'" in capsys.readouterr().err


# --- bad input: one clear error each, nothing half loaded


def refused(*words, **kwargs):
    with pytest.raises(GenError) as error:
        gen.load("text", **kwargs)
    assert all(w in str(error.value) for w in words), str(error.value)
    assert "\n" not in str(error.value)


def test_models_that_are_not_there_are_refused(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused("nobody/nothing", "local cache", model="nobody/nothing")
    refused("not a folder, a file or a hub id", model=str(tmp_path / "absent" / "x" / "y"))
    refused("no config.json", model=tmp_path)


def test_a_folder_without_weights_and_one_with_cut_weights_are_refused(llama, tmp_path):
    path = copy(llama, tmp_path)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    refused("cannot be read", str(path), model=path)
    weights.unlink()
    refused("no weights", model=path)


def test_a_foreign_architecture_is_refused_with_what_it_is(llama, tmp_path):
    path = copy(llama, tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps({**config, "model_type": "vit", "architectures": ["ViTModel"]})
    )
    refused("'vit'", "no family recognises", model=path)
    with pytest.raises(GenError, match="causal_lm serves text; requested was 'image'"):
        gen.load("image", model=llama)


def test_architectures_without_a_cache_of_slots_are_refused(tmp_path):
    from transformers import MambaConfig, MambaForCausalLM

    small = MambaConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    save_quietly(MambaForCausalLM(small), tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    refused("recurrent", model=tmp_path)


@pytest.mark.parametrize("name", ["Bart", "T5"])
def test_encoder_decoder_models_are_refused_as_such(name, tmp_path):
    import transformers

    t5 = {"d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    bart = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_layers": 1}
    shape = {"vocab_size": 64, "d_model": 32, **(t5 if name == "T5" else bart)}
    config = getattr(transformers, f"{name}Config")(**shape)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    save_quietly(model, tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    refused("an encoder-decoder model", model=tmp_path)
    with pytest.raises(GenError, match=f"{name}ForConditionalGeneration.*encoder-decoder model"):
        model.generate(torch.tensor([[5, 6, 7]]), custom_generate=gen.transformers_generate)


def test_missing_extra_and_mis_shaped_keys_are_listed(llama, tmp_path):
    from safetensors.torch import load_file, save_file

    path = copy(llama, tmp_path)
    tensors = load_file(path / "model.safetensors")
    for change, word in (
        (lambda t: t.pop("model.norm.weight"), "1 missing: model.norm.weight"),
        (lambda t: t.update(odd=torch.ones(2)), "1 extra: odd"),
    ):
        changed = dict(tensors)
        change(changed)
        save_file(changed, path / "model.safetensors", {"format": "pt"})
        refused(word, model=path)
    save_file(
        {**tensors, "model.norm.weight": torch.ones(31)},
        path / "model.safetensors",
        {"format": "pt"},
    )
    refused("model.norm.weight", model=path)


def test_a_pickle_of_more_than_tensors_runs_nothing(llama, tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    path = copy(llama, tmp_path)
    (path / "model.safetensors").unlink()
    torch.save({"model.norm.weight": torch.ones(32), "evil": Evil()}, path / "pytorch_model.bin")
    refused("no pickle of plain tensors", model=path)
    with pytest.raises(GenError, match="plain tensors"):
        Weights(path)
    assert not (tmp_path / "ran").exists()
    torch.load(
        path / "pytorch_model.bin", weights_only=False
    )  # control: the pickle does what it is refused for
    assert (tmp_path / "ran").exists()


def test_code_of_a_folder_runs_only_if_the_user_says_so(llama, tmp_path):
    path = copy(llama, tmp_path)
    config = json.loads((path / "config.json").read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (path / "config.json").write_text(
        json.dumps(
            {
                **config,
                "model_type": "own_kind",
                "architectures": ["OwnForCausalLM"],
                "auto_map": own,
            }
        )
    )
    mark = tmp_path / "ran"
    (path / "own.py").write_text(
        f"open({str(mark)!r}, 'w').close()\nfrom transformers import LlamaConfig,"
        " LlamaForCausalLM\n\nclass OwnConfig(LlamaConfig):\n    model_type = 'own_kind'\n\nclass"
        " OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    refused("trust_remote_code=True", model=path)
    assert not mark.exists()
    pipe = gen.load("text", model=path, trust_remote_code=True, max_new_tokens=4)
    assert mark.exists() and len(pipe(["w1"]).media) == 1


def test_options_are_strict_and_embedded_models_have_none(llama):
    refused("'max_new_tokens'", "max_new_token", model=llama, max_new_token=3)
    refused("at least 1", model=llama, max_new_tokens=0)
    refused("no chat template", model=llama, chat=True)
    refused("expected none", model="text-causal", max_new_tokens=3)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(llama, tmp_path):
    path = copy(llama, tmp_path)
    tiny_tokenizer(80).save_pretrained(path)
    refused("80 tokens", "at most 64", model=path)


# --- weights


def linear():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


@pytest.mark.parametrize("wrapper", [None, "model", "module", "state_dict", "ema"])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_wrappings_and_renames_are_undone(wrapper, suffix, tmp_path):
    from safetensors.torch import save_file

    source = linear()
    tensors = {f"net.{k.replace('weight', 'w')}": v for k, v in source.state_dict().items()}
    path = tmp_path / f"x{suffix}"
    if suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(
            (
                {wrapper: tensors, "args": argparse.Namespace(lr=1.0), "epoch": 3}
                if wrapper
                else tensors
            ),
            path,
        )
    weights = Weights(path, wrapper if wrapper == "ema" and suffix == ".pt" else None)
    renames = ((r"^net\.", ""), (r"\.w$", ".weight"))
    model = fill(without_storage(linear), weights, rename=renames, dtype=torch.float64)
    x = torch.randn(5, 3, dtype=torch.float64)
    assert (
        torch.allclose(model(x), source.double()(x))
        and next(model.parameters()).dtype == torch.float64
    )
    with pytest.raises(GenError, match="4 missing: .*0.weight.*4 extra: .*net.0.w"):
        fill(without_storage(linear), weights)


def test_what_does_not_fit_leaves_the_model_as_it_was(tmp_path):
    model = without_storage(linear)
    wrong = {**linear().state_dict(), "1.bias": torch.ones(3)}
    with pytest.raises(GenError, match=r"1 mis-shaped: 1.bias is \(3,\), expected \(2,\)"):
        fill(model, wrong)
    assert all(p.is_meta for p in model.parameters())
    with pytest.raises(GenError, match="1 twice: 0.bias"):
        fill(model, {**linear().state_dict(), "x": torch.ones(4)}, rename=(("^x$", "0.bias"),))


def test_sharded_weights_are_read_by_their_index(tmp_path):
    model = tiny("llama")
    save_quietly(model, tmp_path, max_shard_size="40KB")
    assert len(weight_files(tmp_path)) > 1
    weights = Weights(tmp_path)
    assert set(weights) == set(model.state_dict()) and all(
        torch.equal(weights[k], v) for k, v in model.state_dict().items()
    )
    tiny_tokenizer().save_pretrained(tmp_path)
    assert gen.load("text", model=tmp_path, max_new_tokens=4)(["w1"]).media
    weight_files(tmp_path)[0].unlink()
    with pytest.raises(GenError, match="is missing"):
        weight_files(tmp_path)


def test_a_device_map_places_modules_and_changes_nothing(llama):
    plain = gen.load("text", model=llama, dtype="float64", max_new_tokens=POSITIONS)
    mapped = gen.load(
        "text", model=llama, dtype="float64", max_new_tokens=POSITIONS, device_map={"": "cpu"}
    )
    assert torch.equal(plain(PROMPTS, seed=1).tokens, mapped(PROMPTS, seed=1).tokens)
    refused("'cuda:7' is not available", model=llama, device_map={"": "cuda:7"})
    refused("device_map", "'auto'", model=llama, device_map="outo")
    placed = fill(
        without_storage(linear), linear().state_dict(), device_map={"0": "cpu", "1": "cpu"}
    )
    assert placed.hf_device_map == {"0": "cpu", "1": "cpu"}
    with pytest.raises(GenError, match="on disk"):
        fill(without_storage(linear), linear().state_dict(), device_map={"0": "cpu", "1": "disk"})


@pytest.mark.slow
def test_loading_takes_hardly_more_memory_than_the_weights(tmp_path):
    """At most 1.2 times: of all that is resident where gen reads safetensors itself, of what the
    kernel cannot take back where files stay mapped."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=500,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=12,
            num_attention_heads=8,
        )
    )
    save_quietly(model, tmp_path / "safe", max_shard_size="20MB")
    model.config.save_pretrained(tmp_path / "pickle")
    torch.save(model.state_dict(), tmp_path / "pickle" / "pytorch_model.bin")
    runs = [
        "safe:float32:own",
        "safe:float16:own",
        "safe:float32:library",
        "safe:float16:library",
        "pickle:float16:own",
        "pickle:float16:naive",
    ]
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    script = root / "tests" / "support" / "loading_memory.py"
    command = [sys.executable, str(script), *(f"{tmp_path}/{r}" for r in runs)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    peaks = dict(
        zip(
            runs,
            ([float(x) for x in line.split()] for line in done.stdout.splitlines()),
            strict=True,
        )
    )
    assert all(peaks[r][0] <= 1.2 for r in runs[:2]) and all(
        peaks[r][1] <= 1.2 for r in runs[:5]
    ), peaks
    assert min(peaks[runs[5]]) > 1.7  # control: as loading scripts do it


def test_a_hub_id_comes_out_of_the_local_cache(llama, tmp_path, monkeypatch):
    from huggingface_hub import constants

    snapshot = tmp_path / "models--me--tiny" / "snapshots" / "abc"
    shutil.copytree(llama, snapshot)
    (tmp_path / "models--me--tiny" / "refs").mkdir()
    (tmp_path / "models--me--tiny" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert gen.load("text", model="me/tiny", max_new_tokens=3)(["w1"]).tokens.shape == (1, 3)
    refused("me/tinyy", "local cache", model="me/tinyy")


# --- the vocabulary


def test_ids_go_to_the_model_and_back():
    vocabulary = Vocabulary(torch.tensor([9, 4, 7]), 12)
    assert vocabulary.to_model(torch.tensor([0, 1, 2, *vocabulary.prompt([5, 9])])).tolist() == [
        9,
        4,
        7,
        5,
        9,
    ]
    assert vocabulary.of_model(torch.arange(12)).tolist() == [
        -1,
        -1,
        -1,
        -1,
        1,
        -1,
        -1,
        2,
        -1,
        0,
        -1,
        -1,
    ]
    with pytest.raises(GenError, match="stands for two"):
        Vocabulary(torch.tensor([1, 2, 1]), 4)
    with pytest.raises(GenError, match="below 4"):
        Vocabulary(torch.tensor([1, 4]), 4)


def test_conditions_are_encoded_once_and_keep_their_numbers():
    made = []
    conditions = Conditions(lambda c: made.append(c) or {"x": torch.full((2,), float(len(c)))})
    numbers = torch.tensor([conditions.number(c) for c in ("a", "bb", "a")])
    assert numbers.tolist() == [0, 1, 0]
    assert conditions.stacked(numbers)["x"][:, 0].tolist() == [1, 2, 1] and made == ["a", "bb"]


def test_every_family_says_what_it_is():
    table = registry.table("checkpoint")
    assert len(table) >= 1
    for name, cls in table.items():
        assert (
            issubclass(cls, Checkpoint)
            and cls.__doc__
            and cls.tested
            and cls.modalities
            and cls.protocols
        ), name
        assert set(cls.protocols) <= set(registry.table("protocol"))
        assert cls.kind in ("codes", "latents")
        assert set(cls.modalities) <= set(registry.table("modality")) and isinstance(
            options_of(cls), dict
        )


def test_no_family_takes_the_embedded_models():
    from gen.models.load.locate import zoo

    assert all(CheckpointFiles.find(name).embedded for name in zoo())
