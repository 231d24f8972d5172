"""GGUF files are read once: what comes of it is what transformers alone makes, bit for bit."""

from __future__ import annotations

import functools
import json
from importlib import import_module

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gen.models.load.gguf import GgufFile
from gen.models.load.pretrained import pretrained, tokenizer_of

pytestmark = pytest.mark.slow
gguf = pytest.importorskip("gguf", reason="make test-quantization has gguf")
import tiny_gguf  # noqa: E402  it needs gguf

from gen.models.load import gguf_reader  # noqa: E402

SHAPE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=48,
    rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 128}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"tie_word_embeddings": True}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {}),
}


def write(kind, folder, quantized=False, **more):
    """Write a random model, its file and a tokenizer of its own."""
    config, network, own = CLASSES[kind]
    torch.manual_seed(5)
    model = network(config(**{**SHAPE, **own, **more}))
    for p in model.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    if model.config.tie_word_embeddings:
        del model.lm_head  # its file holds the table once
    return tiny_gguf.write(model, folder / f"{kind}.gguf", quantized)


def of_transformers(file):
    """Return the config, tokenizer and weights that transformers alone makes."""
    how = {"gguf_file": file.name}
    config = AutoConfig.from_pretrained(file.parent, **how)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **how)
    keywords = {k: v for k, v in GgufFile(file, "").keywords.items() if k != "config"}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **keywords)
    return config, tokenizer, model


def counted(monkeypatch, *names) -> dict[str, int]:
    """Count the calls of functions of the package gguf."""
    calls = dict.fromkeys(names, 0)

    def counting(name, function):
        @functools.wraps(function, updated=())
        def call(*args, **options):
            calls[name] += 1
            return function(*args, **options)

        return call

    for name in names:
        owner, _, key = name.rpartition(".")
        owner = getattr(gguf, owner) if owner else gguf
        monkeypatch.setattr(owner, key, counting(name, getattr(owner, key)))
    return calls


@pytest.mark.parametrize("quantized", [False, True], ids=["f32", "q8_0"])
@pytest.mark.parametrize("kind", CLASSES)
def test_config_tokenizer_and_weights_are_those_of_transformers_alone(kind, quantized, tmp_path):
    file = write(kind, tmp_path, quantized)
    config, tokenizer, model = of_transformers(file)
    own = GgufFile(file, "tiny")
    assert own.config.to_dict() == config.to_dict()
    mine = tokenizer_of(tmp_path, gguf=own)
    states = [json.loads(x.backend_tokenizer.to_str()) for x in (mine, tokenizer)]
    added = states[1]["added_tokens"]  # those of the class have no embedding, and are left out
    states[1]["added_tokens"] = [x for x in added if x["id"] < 64]
    assert len(mine) == 64 < len(tokenizer)
    assert states[0] == states[1]
    named = tokenizer.special_tokens_map.items()
    ids = tokenizer.get_vocab()
    assert mine.special_tokens_map == {k: v for k, v in named if ids[v] < 64}
    network = pretrained(AutoModelForCausalLM, tmp_path, gguf=own)
    weights = network.state_dict()
    assert type(network) is type(model) and list(weights) == list(model.state_dict())
    assert all(torch.equal(x, weights[key]) for key, x in model.state_dict().items())


def test_the_vocabulary_is_counted_where_nothing_else_says_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf.GGUFWriter, "add_vocab_size", lambda *_: None)
    monkeypatch.setattr(gguf_reader, "SHORT", 4)  # all arrays of the tokenizer are long
    file = write("llama", tmp_path)
    own = GgufFile(file, "tiny")
    assert own.config.vocab_size == 64 and gguf_reader.TOKENS in own.header.fields
    assert "tokenizer.ggml.merges" not in own.header.fields  # control: others are left out
    assert len(tokenizer_of(tmp_path, gguf=own)) == 64


def test_a_file_is_parsed_once_and_names_are_mapped_once(tmp_path, monkeypatch):
    file = write("llama", tmp_path)
    names = ("GGUFReader.__init__", "get_tensor_name_map")
    calls = counted(monkeypatch, *names)
    own = GgufFile(file, "tiny")
    tokenizer_of(tmp_path, gguf=own)
    pretrained(AutoModelForCausalLM, tmp_path, gguf=own)
    vocabulary = not gguf_reader.has_own_reader()  # an older transformers needs it once more
    assert calls == {names[0]: 1 + vocabulary, names[1]: 1}
    calls.update(dict.fromkeys(names, 0))
    of_transformers(file)
    assert calls[names[0]] > 3 and calls[names[1]] > 10  # control


def test_other_files_and_later_calls_are_read_as_ever(tmp_path):
    file, other = write("llama", tmp_path), tmp_path / "other"
    other.mkdir()
    other = write("qwen2", other)
    legacy = import_module("transformers.modeling_gguf_pytorch_utils")
    before = gguf.GGUFReader, gguf.get_tensor_name_map, gguf.dequantize, legacy.tqdm
    own = GgufFile(file, "tiny")
    with own.read_once():
        assert gguf.GGUFReader(file) is own.header
        inside = gguf.GGUFReader(other)
    assert inside.get_field("general.architecture").contents() == "qwen2"
    with pytest.raises(RuntimeError), own.read_once():
        raise RuntimeError
    assert before == (gguf.GGUFReader, gguf.get_tensor_name_map, gguf.dequantize, legacy.tqdm)


def test_a_header_is_that_of_the_package(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "kinds.gguf"), "llama")
    writer.add_array("a.texts", ["", "é", "<s>", "x" * 300])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.fractions", [0.5, 2.0**-20])
    writer.add_array("a.switches", [True, False])
    writer.add_array("a.one", ["x"])
    writer.add_string("a.text", "é")
    writer.add_float64("a.number", 1 / 3)
    writer.add_bool("a.switch", True)
    writer.add_tensor("x.weight", np.arange(6, dtype=np.float16).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for file in (tmp_path / "kinds.gguf", write("qwen2", tmp_path, True)):
        plain, fast = gguf.GGUFReader(file), gguf_reader.read_header(gguf, file)
        assert list(plain.fields) == list(fast.fields) and plain.data_offset == fast.data_offset
        for key, field in plain.fields.items():
            mine = fast.fields[key]
            assert field.contents() == mine.contents(), key
            assert [field.data, field.types, field.offset] == [mine.data, mine.types, mine.offset]
            pairs = list(zip(field.parts, mine.parts, strict=True))
            assert all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs), key
        for x, y in zip(plain.tensors, fast.tensors, strict=True):
            assert (x.name, x.tensor_type, x.data_offset) == (y.name, y.tensor_type, y.data_offset)
            assert x.data.dtype == y.data.dtype and np.array_equal(x.data, y.data)
            assert np.shares_memory(y.data, fast.data)  # mapped, not copied


KINDS = [k for k in gguf.GGMLQuantizationType if k in gguf.quants._type_traits]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_long_rows_dequantise_to_the_same_bits(kind, monkeypatch):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    bits = np.random.default_rng(0).integers(0, 256, (3, 20, 2 * size), dtype=np.uint8)
    rows = []
    monkeypatch.setattr(gguf_reader, "ROW", 12 * 2 * size)

    def watched(data, kind):
        rows.append(data.shape)
        return gguf.dequantize(data, kind)

    with np.errstate(all="ignore"):  # random bits are also numbers that overflow
        want = gguf.dequantize(bits, kind)
        got = gguf_reader.in_long_rows(watched)(bits, kind)
    assert want.shape == got.shape == (3, 20, 2 * block)
    assert want.tobytes() == got.tobytes()
    assert rows == [(5, 12 * 2 * size)]  # control: they were longer than before
