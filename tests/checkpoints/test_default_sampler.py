"""Samplers of users who name none: models that nobody has measured decode one token per pass."""

from __future__ import annotations

import pytest
import torch
from published import save_quietly, tiny_tokenizer
from tiny_checkpoints import SHAPE, tiny
from transformers import LlamaConfig, LlamaForCausalLM

import gen
from gen.config.job import make_job
from gen.contracts.checkpoint import Checkpoint
from gen.contracts.defaults import Defaults
from gen.core.registry import registry
from gen.interop.transformers import transformers_generate

POSITIONS = 24


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_quietly(tiny("llama"), path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_published_model_computes_a_position_once(llama, temperature):
    pipe = gen.load("text", model=llama, max_new_tokens=POSITIONS)
    assert pipe.config["sampler"] == {"name": "autoregressive"}
    prompts = ["w1 w2 w3", "w5"]
    out = pipe(prompts, temperature=temperature, seed=0)
    for stats, prompt in zip(out.stats, prompts, strict=True):
        # nobody reads the last token
        most = len(pipe.modality.checkpoint.prompt(prompt)) + stats.tokens - 1
        assert stats.nfe == stats.tokens and stats.tokens_computed <= most
    # control: the sampler of the built-in models computes more
    fast = pipe(prompts, sampler="speculative_jacobi", temperature=temperature, seed=0)
    assert torch.equal(fast.tokens, out.tokens)
    assert all(
        a.tokens_computed > b.tokens_computed for a, b in zip(fast.stats, out.stats, strict=True)
    )


def test_an_automatic_window_closes_where_drafts_are_rejected(tmp_path):
    shape = {**SHAPE, "max_position_embeddings": 512, "initializer_range": 1.0}
    torch.manual_seed(0)
    save_quietly(LlamaForCausalLM(LlamaConfig(num_key_value_heads=1, **shape)), tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    pipe = gen.load("text", model=tmp_path, max_new_tokens=400, dtype="float64")
    for seed in range(2):
        request = {"temperature": 1.0, "seed": seed, "min_new_tokens": 400}
        out = pipe(["w1 w2"], sampler={"name": "speculative_jacobi", "window": "auto"}, **request)
        assert out.stats[0].tokens == 400 and out.stats[0].tokens_computed <= 1.1 * 400
        assert torch.equal(out.tokens, pipe(["w1 w2"], **request).tokens)
    # control: a window that never closes
    out = pipe(["w1 w2"], sampler={"name": "speculative_jacobi", "window": 4}, **request)
    assert out.stats[0].tokens_computed > 3 * 400


def test_jobs_have_the_same_default(llama):
    job = make_job({"modality": "text", "model": str(llama), "prompts": ["w1"]}, where="here")
    assert job.entries[0].sampler["name"] == "autoregressive"
    assert Defaults.named("text", llama).sampler() == "autoregressive"


def test_generate_has_the_same_default():
    model = tiny("llama")
    ids = torch.tensor([[1, 9, 8, 7]])
    settings = {"max_new_tokens": 8, "do_sample": False, "custom_generate": transformers_generate}
    out = model.generate(ids, return_dict_in_generate=True, **settings)
    assert out.stats[0].nfe == out.stats[0].tokens


@pytest.mark.parametrize("modality", ["image", "speech", "text", "video"])
def test_control_built_in_models_keep_theirs(modality):
    assert Defaults.named(modality).sampler() == "speculative_jacobi"
    name = registry.get("modality", modality).models["causal"]
    assert Defaults.named(modality, name).sampler() == "speculative_jacobi"


def test_no_family_of_causal_models_drafts_by_default():
    families: dict[str, type[Checkpoint]] = registry.table("checkpoint")
    causal = [cls for cls in families.values() if "causal" in cls.protocols]
    assert len(causal) > 8
    for cls in causal:
        assert cls.default_samplers["causal"] == "autoregressive"
