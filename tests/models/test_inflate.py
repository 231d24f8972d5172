"""An inflated model computes the function of the small one, at the size that was asked for."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from llama_kinds import KINDS, make
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import gen
from gen.__main__ import main
from gen.core.errors import GenError
from gen.models.adapters.fast_llama import LeanLlama
from gen.models.load.inflate import (
    Shape,
    enlarged_config,
    enlarged_weights,
    inflate,
    parse_size,
    parse_sizes,
)
from gen.models.load.locate import locate, read_config
from gen.models.load.weights import Weights

ZOO = ("image-causal", "image-masked", "text-causal", "speech-causal", "motion-draft")


def norms_in_double(model: nn.Module) -> nn.Module:
    """Replace the norms of transformers, which compute in float32 in any dtype."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, LlamaRMSNorm):
                norm = nn.RMSNorm(len(child.weight), child.variance_epsilon, dtype=torch.float64)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model


def built(small: nn.Module, config: dict, weights: dict, dtype: torch.dtype) -> nn.Module:
    config = type(small.config).from_dict(config)
    with torch.device("meta"):
        model = type(small)(config)
    model.to_empty(device="cpu").to(dtype)  # before its weights come, which are not rounded
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    missing, extra = model.load_state_dict(weights, strict=False)
    assert not extra and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


def enlarge(small: nn.Module, parameters: int, dtype: torch.dtype, change=lambda name, x: x):
    config = small.config.to_dict()
    weights = {k: v for k, v in small.state_dict().items()}
    if small.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    shape = Shape.of(config).enlarged(parameters)
    new = {k: change(k, v) for k, v in enlarged_weights(config, weights, shape)}
    return built(small, enlarged_config(config, shape, 0), new, dtype), shape


def worst(small: nn.Module, large: nn.Module) -> float:
    """Largest difference of logits relative to the largest logit, forwards of transformers."""
    ids = torch.randint(0, small.config.vocab_size, (2, 11), generator=torch.Generator())
    with torch.no_grad():
        a, b = small(ids).logits, large(ids).logits
    return float((a - b).abs().max() / a.abs().max())


@pytest.mark.parametrize("parameters", [60_000, 250_000, 1_500_000])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(3)
def test_logits_are_those_of_the_small_model(kind, parameters):
    for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        small = make(kind, dtype)
        large, shape = enlarge(small, parameters, dtype)
        count = sum(p.numel() for p in large.parameters())
        assert count == shape.parameters and abs(count / parameters - 1) <= 0.02
        if dtype == torch.float64:
            small, large = norms_in_double(small), norms_in_double(large)
        assert worst(small, large) < bound


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.thinned(2)
def test_logits_of_models_of_the_zoo(name):
    config = read_config(name)
    small = AutoModelForCausalLM.from_pretrained(locate(name), dtype=torch.float64)
    weights = Weights(locate(name) / "model.safetensors")
    shape = Shape.of(config).enlarged(5_000_000)
    new = dict(enlarged_weights(config, weights, shape))
    large = built(small, enlarged_config(config, shape, 0), new, torch.float64)
    assert worst(norms_in_double(small), norms_in_double(large)) < 1e-12
    assert LeanLlama.of(built(small, large.config.to_dict(), new, torch.float32)) is not None
    small, large = small.float(), large.float()
    assert worst(small, large) < 1e-5


def test_what_is_wrong_changes_the_logits():
    """Control: a norm that is not scaled, and a projection of a new layer that is not zero."""
    small = make("grid", torch.float64)
    old = small.config.num_hidden_layers

    def unscaled(name, x):
        return x * 2 if name == "model.layers.0.input_layernorm.weight" else x

    def written(name, x):
        return x + 0.01 if name == f"model.layers.{old}.self_attn.o_proj.weight" else x

    def read(name, x):  # channels beyond the small model's width are not zero
        return x + 0.01 if name == "axes.0.weight" else x

    for change in (unscaled, written, read):
        large, _ = enlarge(small, 250_000, torch.float64, change)
        assert worst(norms_in_double(small), norms_in_double(large)) > 1e-4
    large, _ = enlarge(small, 250_000, torch.float64)
    for module in large.modules():
        if isinstance(module, LlamaRMSNorm):
            module.variance_epsilon = small.config.rms_norm_eps
    assert worst(norms_in_double(small), norms_in_double(large)) > 1e-9


def test_multiplications_are_real():
    """New rows that compute something are random, not zeros."""
    small = make("plain", torch.float32)
    large, shape = enlarge(small, 1_500_000, torch.float32)
    last, first = large.model.layers[-1], large.model.layers[0]
    for weight in (
        last.self_attn.q_proj.weight,
        last.self_attn.v_proj.weight,
        last.mlp.up_proj.weight,
        first.mlp.gate_proj.weight,
    ):
        assert (weight == 0).float().mean() < 0.001
    assert not last.self_attn.o_proj.weight.any() and not last.mlp.down_proj.weight.any()
    assert large.lm_head.weight[:, 32:].ne(0).float().mean() > 0.999
    assert shape.layers > small.config.num_hidden_layers


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("inflated")
    names = ("image-causal", "image-masked", "action-causal", "action-masked")
    for name in names:
        assert inflate(name, 2_500_000, root / name)["folder"] == str(root / name)
    return root


@pytest.mark.parametrize("sampler", ["autoregressive", "speculative_jacobi", "maskgit"])
@pytest.mark.parametrize("modality", ["action", pytest.param("image", marks=pytest.mark.slow)])
def test_samplers_give_the_same_tokens_in_the_same_passes(folders, modality, sampler):
    kind = "masked" if sampler == "maskgit" else "causal"
    plain = gen.load(modality)
    prompts = plain.modality.example_prompts(2, 0)
    a = plain(prompts, sampler=sampler, seed=3)
    b = gen.load(modality, model=folders / f"{modality}-{kind}")(prompts, sampler=sampler, seed=3)
    assert torch.equal(a.tokens, b.tokens)
    assert [s.nfe for s in a.stats] == [s.nfe for s in b.stats]
    assert [s.acceptance_histogram for s in a.stats] == [s.acceptance_histogram for s in b.stats]


def test_a_draft_model_is_found_as_for_the_zoo_model(folders):
    prompts = gen.load("action").modality.example_prompts(1, 0)
    a, b = (
        gen.load("action", model=m)(prompts, sampler="speculative", seed=1)
        for m in (None, folders / "action-causal")
    )
    assert torch.equal(a.tokens, b.tokens) and a.stats[0].draft_nfe == b.stats[0].draft_nfe


def test_the_folder_is_a_model_folder_with_a_card(folders):
    folder = folders / "image-causal"
    assert (folder / "table.safetensors").is_file()
    card = (folder / "README.md").read_text()
    assert "function-preserving" in card and "1,636,640" in card
    config = json.loads((folder / "config.json").read_text())
    assert config["inflated_from"]["width"] == 160
    assert not list(folders.glob(".*"))


def test_a_large_model_is_written_in_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("gen.models.load.inflate.SHARD", 1_000_000)
    inflate("action-causal", 1_000_000, tmp_path / "sharded")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 1
    made = [
        gen.load("action", model=m)(gen.load("action").modality.example_prompts(1, 0), seed=1)
        for m in (None, tmp_path / "sharded")
    ]
    assert torch.equal(made[0].tokens, made[1].tokens)


Usage = namedtuple("Usage", "total used free")


def test_bad_input_is_one_clear_error(tmp_path, monkeypatch, capsys):
    def said(*args: str) -> str:
        assert main(["inflate", *args]) != 0
        text = capsys.readouterr().err.strip()
        assert text.count("\n") == 0, text
        return text

    out = ("--out", str(tmp_path / "new"))
    assert "expected at least 1,636,640" in said("image-causal", "--params", "1M", *out)
    assert "gen_grid_scales" in said("image-scales", "--params", "9M", *out)
    assert "such as 85M" in said("image-causal", "--params", "much", *out)
    assert "image-causal" in said("image-casual", "--params", "9M", *out)
    (tmp_path / "there").mkdir()
    assert "does not exist" in said(
        "image-causal", "--params", "9M", "--out", str(tmp_path / "there")
    )
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 10**6, 0))
        assert "free" in said("action-causal", "--params", "1M", *out)

    def full(*args, **more):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("gen.models.load.inflate.save_file", full)
        assert "No space left" in said("action-causal", "--params", "1M", *out)
    assert [p.name for p in tmp_path.iterdir()] == ["there"]  # nothing half written


def test_sizes_are_read():
    assert parse_sizes("85M, 1.5b,300_000", "x") == {
        "85M": 85_000_000,
        "1.5b": 1_500_000_000,
        "300_000": 300_000,
    }
    for wrong in ("", "M", "-5M", "0", "5T"):
        with pytest.raises(GenError, match="such as 85M"):
            parse_size(wrong, "--params")


def test_proportions_are_those_of_published_models():
    small = Shape.of(read_config("image-causal"))
    for parameters in (85e6, 300e6, 1e9, 7e9):
        shape = small.enlarged(int(parameters))
        assert abs(shape.parameters / parameters - 1) <= 0.02
        assert shape.width % 128 == 0 and 2.2 < shape.inner / shape.width < 3.3
        assert 40 < shape.width / shape.layers < 160


def test_paths_of_the_zoo_are_taken_too(tmp_path):
    made = inflate(Path(locate("action-draft")), 100_000, tmp_path / "by-path")
    assert made["layers"] >= 1
