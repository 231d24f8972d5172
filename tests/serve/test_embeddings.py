"""``/v1/embeddings``: what the network's hidden states are pooled to, as the folder says."""

from __future__ import annotations

import json

import numpy as np
import openai
import pytest
import torch
from byte_folders import VOCAB, byte_tokenizer
from published import save_quietly
from served import serving
from transformers import LlamaConfig, LlamaForCausalLM

import gen
from gen.core.errors import GenError
from gen.models.load.pooling import Pooling

TEXTS = ["a b", "the sky is blue", "x"]
KINDS = ("Transformer", "Pooling", "Normalize")


def written(folder, kinds=KINDS, pooling=None, **said):
    """A random Llama, and the files by which sentence-transformers know how to pool."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, initializer_range=0.4,
    )  # fmt: skip
    save_quietly(LlamaForCausalLM(config), folder)
    save_quietly(byte_tokenizer(), folder)
    if kinds:
        paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
        modules = [
            {"idx": n, "path": paths.get(k, k), "type": f"sentence_transformers.models.{k}"}
            for n, k in enumerate(kinds)
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        pooling = pooling or {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
        (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
        (folder / "config_sentence_transformers.json").write_text(json.dumps(said))
    return folder


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    return gen.load("text", model=written(tmp_path_factory.mktemp("embedding")), device="cpu")


@pytest.fixture(scope="module")
def server(pipe, tmp_path_factory):
    plain = gen.load("text", model=written(tmp_path_factory.mktemp("plain"), ()), device="cpu")
    with serving(models={"e": pipe, "plain": plain}) as made:
        yield made


def states(pipe, text):
    checkpoint = pipe.modality.checkpoint
    ids = checkpoint.tokenizer(text, return_tensors="pt")["input_ids"]
    out = checkpoint.model(ids, output_hidden_states=True)
    return out.hidden_states[-1][0]  # after the last norm


def test_vectors_are_the_pooled_hidden_states(server, pipe):
    client = server.client()
    expected = np.stack([states(pipe, text)[-1].detach().numpy() for text in TEXTS])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    made = client.embeddings.create(model="e", input=TEXTS)  # the client asks for base64
    found = np.array([d.embedding for d in made.data])
    assert found.shape == (3, 32) and [d.index for d in made.data] == [0, 1, 2]
    assert np.allclose(found, expected, atol=1e-6)
    assert made.usage.prompt_tokens == made.usage.total_tokens == sum(map(len, TEXTS))
    plain = client.embeddings.create(model="e", input=TEXTS, encoding_format="float")
    assert np.array_equal(np.array([d.embedding for d in plain.data], np.float32), found)
    ids = [pipe.modality.raw_ids(text) for text in TEXTS]
    by_ids = client.embeddings.create(model="e", input=ids)
    assert [d.embedding for d in by_ids.data] == [d.embedding for d in made.data]
    first = client.embeddings.create(model="e", input=TEXTS[0], dimensions=8).data[0].embedding
    cut = expected[0, :8] / np.linalg.norm(expected[0, :8])
    assert np.allclose(first, cut, atol=1e-6)
    other = client.embeddings.create(model="e", input="a c").data[0].embedding
    assert not np.allclose(other, found[0], atol=0.01)  # the control


def test_models_without_pooling_and_wrong_values_are_refused(server):
    client = server.client()
    named = {m.id: m.gen["endpoints"] for m in client.models.list()}
    assert "/v1/embeddings" in named["e"] and "/v1/embeddings" not in named["plain"]
    for how, param in (
        ({"model": "plain", "input": "a"}, "model"),
        ({"model": "e", "input": []}, "input"),
        ({"model": "e", "input": ""}, "input"),
        ({"model": "e", "input": "a" * 65}, "input"),
        ({"model": "e", "input": [VOCAB]}, "input"),
        ({"model": "e", "input": "a", "dimensions": 33}, "dimensions"),
        ({"model": "e", "input": "a", "dimensions": 0}, "dimensions"),
        ({"model": "e", "input": "a", "encoding_format": "int8"}, "encoding_format"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(**how)
        assert caught.value.param == param and caught.value.code, how


def test_poolings_are_those_of_the_files(tmp_path, pipe):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    weights = torch.arange(1.0, 6.0)
    expected = {
        "cls_token": x[0],
        "mean_tokens": x.sum(0) / 5,
        "max_tokens": x.max(0).values,
        "mean_sqrt_len_tokens": x.sum(0) / 5**0.5,
        "weightedmean_tokens": weights @ x / 15,
        "lasttoken": x[-1],
    }
    for mode, vector in expected.items():
        newer = mode.removesuffix("_tokens").removesuffix("_token")
        for config in ({f"pooling_mode_{mode}": True}, {"pooling_mode": newer}):
            pooling = Pooling.of(written(tmp_path, KINDS[:2], config))
            assert pooling.modes == (mode,) and torch.allclose(pooling(x), vector)
    both = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
    pooling = Pooling.of(written(tmp_path, KINDS[:2], both))
    assert torch.allclose(pooling(x), torch.cat([x[0], x.mean(0)]))
    assert Pooling.of(written(tmp_path / "none", ())) is None
    dense = Pooling.of(written(tmp_path, (*KINDS, "Dense")))
    with pytest.raises(GenError, match="need Dense; expected the modules"):
        dense(x)


@pytest.mark.slow
def test_a_stated_prompt_is_put_before_texts_and_folders_may_be_saved(tmp_path):
    folder = written(tmp_path / "a", prompts={"query": "q: "}, default_prompt_name="query")
    pipe = gen.load("text", model=folder, device="cpu")
    with serving(models={"e": pipe}) as server:
        made = server.client().embeddings.create(model="e", input="a b").data[0].embedding
    expected = states(pipe, "q: a b")[-1].detach().numpy()
    assert np.allclose(made, expected / np.linalg.norm(expected), atol=1e-6)
    again = gen.load(pipe.save_pretrained(tmp_path / "b"), device="cpu")
    assert again.pooling == pipe.pooling and again.pooling is not None
