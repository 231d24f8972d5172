"""GGUF files: a model of one decodes as the model that was converted."""

from __future__ import annotations

import subprocess
import sys

import peft
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import gen
from gen.contracts.checkpoint import CheckpointFiles
from gen.core.errors import GenError
from gen.models.load.hub import HubOptions

pytestmark = pytest.mark.slow
pytest.importorskip("gguf", reason="make test-quantization has gguf")
import tiny_gguf  # noqa: E402  it needs gguf

SHAPE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=48,
    rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
)
PROMPTS = ["w1 he ran on", "abc"]
TEMPLATE = "{% for m in messages %}{{ bos_token + m['content'] + eos_token }}{% endfor %}"
GREEDY = {"seed": 0, "temperature": 0, "logprobs": 1}


def tiny(kind: str, **more):
    torch.manual_seed(3)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **more}))
    else:  # transformers reads no head_dim of a Qwen3 in GGUF: it is that of all published ones
        model = Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "head_dim": 128, **more}))
    for p in model.parameters():  # norms that are not all ones, and logits far apart
        p.data.mul_(3) if p.dim() > 1 else p.data.mul_(1 + 0.3 * torch.randn_like(p))
    return model.eval().requires_grad_(False)


def load(model, **more):
    return gen.load("text", model=model, dtype="float64", max_new_tokens=6, **more)


def logits(pipe, ids):
    model = pipe.modality.checkpoint.adapter("causal")
    return model.forward(ids, torch.arange(ids.shape[1])[None], model.new_cache(ids.shape[1]))


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("quantized", [False, True], ids=["f32", "q8_0"])
def test_a_file_gives_the_logits_and_tokens_of_the_model(kind, quantized, tied, tmp_path):
    model = tiny(kind, tie_word_embeddings=tied)
    if tied:
        del model.lm_head  # its file holds the table once
        file = tiny_gguf.write(model, tmp_path / "tiny.gguf", quantized)
        model = tiny(kind, tie_word_embeddings=True)
    else:
        file = tiny_gguf.write(model, tmp_path / "tiny.gguf", quantized)
    pipe, ids = load(file), torch.tensor([[1, 9, 30, 7, 55]])
    plain = model.double()(ids).logits
    if quantized:
        for name, p in model.named_parameters():
            if p.dim() > 1 and not (tied and name.startswith("lm_head")):
                p.data.copy_(tiny_gguf.rounded(p))
        assert (logits(pipe, ids) - plain).abs().max() > 1e-3  # control: eight bits are not all
    assert (logits(pipe, ids) - model.double()(ids).logits).abs().max() < 1e-6  # Q8_0 is float32
    made = [
        pipe(PROMPTS, sampler=s, **GREEDY).tokens for s in ("autoregressive", "speculative_jacobi")
    ]
    assert torch.equal(*made)
    prompt = pipe.modality.checkpoint.prompt(PROMPTS[0])
    want = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=6)
    want = want[0, len(prompt) :]
    assert made[0][0, : len(want)].tolist() == want.tolist()


def test_a_gpt2_of_any_length_and_with_or_without_a_table_of_its_own_for_logits(tmp_path):
    torch.manual_seed(3)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=48)
    model = GPT2LMHeadModel(config).eval().requires_grad_(False)
    for p in model.parameters():
        p.add_(0.1 * torch.randn_like(p))
    table, ids = model.transformer.wte.weight.clone(), torch.tensor([[1, 9, 30, 7, 55]])
    want = {None: table, "same": table, "other": table + torch.randn_like(table)}
    states = model.double().transformer(ids).last_hidden_state
    for name, output in want.items():
        file = tmp_path / f"{name}.gguf"
        pipe = load(tiny_gguf.write_gpt2(model, file, None if name is None else output))
        assert (logits(pipe, ids) - states @ output.double().T).abs().max() < 1e-6
    assert pipe(PROMPTS, sampler="prompt_lookup", **GREEDY).tokens.shape[1] == 6


def test_the_tokenizer_is_the_one_of_the_file(tmp_path):
    pipe = load(tiny_gguf.write(tiny("llama"), tmp_path / "tiny.gguf"))
    words, tokenizer = tiny_gguf.vocabulary(64), pipe.modality.checkpoint.tokenizer
    ids = pipe.modality.checkpoint.prompt("w1 he w1")
    assert [words[i] for i in ids] == ["w", "1", "Ġhe", "Ġw", "1"]
    assert tokenizer.decode(ids) == "w1 he w1" and tokenizer.eos_token_id == 2
    assert len(tokenizer) == 64


def test_a_file_of_a_folder_is_chosen_by_name(tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    for name, quantized in (("f32.gguf", False), ("q8_0.gguf", True)):
        tiny_gguf.write(tiny("llama"), folder / name, quantized)
    pipes = [load(folder, gguf_file="q8_0.gguf"), load(folder / "q8_0.gguf")]
    out = [pipe(PROMPTS, sampler="autoregressive", **GREEDY) for pipe in pipes]
    assert torch.equal(out[0].tokens, out[1].tokens)
    assert out[0].logprobs == out[1].logprobs
    plain = load(folder, gguf_file="f32.gguf")
    other = plain(PROMPTS, sampler="autoregressive", **GREEDY)
    assert other.logprobs != out[0].logprobs  # control


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_saved_pipeline_is_a_folder_of_safetensors_that_others_load(dtype, tmp_path):
    fields = {"general.license": "apache-2.0", "tokenizer.chat_template": TEMPLATE}
    file = tiny_gguf.write(tiny("llama"), tmp_path / "tiny.gguf", True, fields=fields)
    how = {"chat": True, "dtype": dtype, "max_new_tokens": 6}
    pipe = gen.load("text", model=file, **how)
    out = pipe(PROMPTS, sampler="autoregressive", **GREEDY)
    saved = pipe.save_pretrained(tmp_path / "saved")
    file.unlink()
    assert {p.suffix for p in saved.rglob("*")} == {".json", ".safetensors", ".md", ".jinja"}
    assert "license: apache-2.0" in (saved / "README.md").read_text()
    again = gen.load(saved)
    assert again.modality.checkpoint.chat and str(again.dtype) == f"torch.{dtype}"
    repeated = again(PROMPTS, sampler="autoregressive", **GREEDY)
    assert repeated.logprobs == out.logprobs and torch.equal(repeated.tokens, out.tokens)
    other, tokenizer = (x.from_pretrained(saved) for x in (AutoModelForCausalLM, AutoTokenizer))
    assert str(other.dtype) == f"torch.{dtype}"
    for prompt, tokens in zip(PROMPTS, out.tokens, strict=True):
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        assert ids[0].tolist() == pipe.modality.checkpoint.prompt(prompt)
        want = other.generate(ids, do_sample=False, max_new_tokens=6)[0, ids.shape[1] :]
        assert tokens[: len(want)].tolist() == want.tolist()
    other.model.embed_tokens.weight.data.neg_()  # control: other weights, other tokens
    assert other.generate(ids, do_sample=False, max_new_tokens=6)[0, -6:].tolist() != want.tolist()


def test_ends_and_sampling_of_the_file_are_those_of_the_generation_config(tmp_path):
    fields = {
        "general.sampling.temp": 0.7, "general.sampling.top_k": 5,
        "general.sampling.penalty_repeat": 1.1, "general.sampling.mirostat": 2,
        "tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2,
    }  # fmt: skip
    said = {
        "temperature": 0.7, "top_k": 5, "repetition_penalty": 1.1, "mirostat": 2,
        "do_sample": True, "eos_token_id": [2, 5],
    }  # fmt: skip
    file = tiny_gguf.write(tiny("llama"), tmp_path / "tiny.gguf", fields=fields)
    assert CheckpointFiles.find(file).json("generation_config.json") == said
    with pytest.warns(UserWarning, match="settings that gen lacks.*mirostat = 2"):
        pipe = load(file)
    stated = pipe.modality.checkpoint.sampling
    assert (stated["temperature"], stated["top_k"]) == (0.7, 5)
    own = pipe.modality.checkpoint.model.generation_config
    assert {key: getattr(own, key) for key in said if key != "mirostat"} == {
        key: value for key, value in said.items() if key != "mirostat"
    }
    stops = pipe.modality.checkpoint.frontend
    assert set(stops.ends) == {2, 5}
    # a file beside it comes first, and one without ends has those of its tokenizer
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    assert CheckpointFiles.find(file).json("generation_config.json") == {**said, "temperature": 0.5}
    (tmp_path / "plain").mkdir()
    plain = tiny_gguf.write(tiny("llama"), tmp_path / "plain" / "tiny.gguf")
    assert CheckpointFiles.find(plain).json("generation_config.json") == {"eos_token_id": [2]}


def test_weights_of_a_file_can_be_quantised_and_adapted(tmp_path):
    pytest.importorskip("torchao")
    file = tiny_gguf.write(tiny("llama"), tmp_path / "tiny.gguf", quantized=True)
    how = {"max_new_tokens": 6, "dtype": "float32"}
    pipe = gen.load("text", model=file, quantization="int8", **how)
    made = [
        pipe(PROMPTS, sampler=s, **GREEDY).tokens for s in ("autoregressive", "speculative_jacobi")
    ]
    assert torch.equal(*made)
    adapter = peft.get_peft_model(
        tiny("llama"),
        peft.LoraConfig(
            target_modules=["q_proj", "up_proj"], lora_alpha=60, init_lora_weights=False
        ),
    )
    adapter.save_pretrained(tmp_path / "adapter")
    plain, adapted = load(file), load(file, adapters=tmp_path / "adapter")
    ids = torch.tensor([[1, 9, 30, 7, 55]])
    layers = [
        x.modality.checkpoint.model.model.layers[0].self_attn.q_proj.weight
        for x in (plain, adapted)
    ]
    delta = adapter.base_model.model.model.layers[0].self_attn.q_proj.get_delta_weight("default")
    assert (layers[1] - layers[0] - delta.double()).abs().max() < 1e-6 < delta.abs().max()
    assert not torch.equal(logits(plain, ids), logits(adapted, ids))


def error(**more) -> str:
    with pytest.raises(GenError) as raised:
        load(**more)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1000
    return str(raised.value)


def test_what_is_no_readable_file_is_one_error(tmp_path, monkeypatch):
    file = tiny_gguf.write(tiny("llama"), tmp_path / "tiny.gguf")
    text = tmp_path / "text.gguf"
    text.write_text("not a model")
    assert "no GGUF file, it begins with b'not '" in error(model=text)
    assert "has no file other.gguf; expected one of text.gguf, tiny.gguf" in error(
        model=tmp_path, gguf_file="other.gguf"
    )
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:500])
    assert "cut.gguf cannot be read" in error(model=tmp_path / "cut.gguf")
    (tmp_path / "short.gguf").write_bytes(file.read_bytes()[:-5000])
    assert "short.gguf cannot be read" in error(model=tmp_path / "short.gguf")
    assert "unknown model" in error(model=tmp_path / "absent.gguf")
    assert "expected one of them" in error(model=tmp_path, gguf_file="t.gguf", variant="fp16")
    assert "a file inside the model's folder" in error(model=tmp_path, gguf_file="../t.gguf")
    assert "expected no gguf_file" in error(model=file, gguf_file="tiny.gguf")
    with pytest.raises(GenError, match="got the gguf_file 'tiny.gguf', but it is of the zoo"):
        gen.load("image", model="image-causal", gguf_file="tiny.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert 'pip install "gen-toolkit[gguf]"' in error(model=file)


def test_what_transformers_would_leave_out_is_one_error(tmp_path):
    model = tiny("llama")
    other = tiny_gguf.write(model, tmp_path / "other.gguf", arch="rwkv7")
    said = error(model=other)
    assert "cannot read the GGUF architecture 'rwkv7'" in said
    # the scaled rotations of Llama 3.1: numbers that the config of transformers does not get
    scaled = tiny_gguf.write(model, tmp_path / "s.gguf", rope_freqs__weight=[1.0, 8.0, 8.0, 8.0])
    assert "rope_freqs" in error(model=scaled)
    linear = tiny_gguf.write(model, tmp_path / "linear.gguf", scaling="linear")
    assert "llama.rope.scaling.type 'linear'" in error(model=linear)
    part = tiny_gguf.write(model, tmp_path / "part.gguf", parts=2)
    assert "one of 2 parts" in error(model=part)


def test_of_a_repository_only_the_file_and_its_texts_are_fetched(monkeypatch):
    from gen.models.load import hub

    asked = []

    class Hub:
        @staticmethod
        def snapshot_download(name, **how):
            asked.append(how)
            raise OSError("no connection")

    real = hub.huggingface_hub()
    monkeypatch.setattr(Hub, "constants", real.constants, raising=False)
    monkeypatch.setattr(hub, "huggingface_hub", lambda: Hub)
    for options in ({"gguf_file": "q8_0.gguf"}, {}):
        with pytest.raises(GenError):
            hub.snapshot_of("me/model", HubOptions(**options))
    chosen, whole = asked
    assert chosen["allow_patterns"] == ["q8_0.gguf", "*.json", "*.jinja"]
    assert "*.gguf" not in chosen["ignore_patterns"]
    assert "*.gguf" in whole["ignore_patterns"] and "allow_patterns" not in whole


def test_the_command_line_takes_a_file_and_says_nothing_else(tmp_path):
    file = tiny_gguf.write(tiny("llama"), tmp_path / "tiny.gguf", quantized=True)
    done = subprocess.run(
        [sys.executable, "-m", "gen", "sample", "text", "w1 he", "--model", str(file),
         "model_options.max_new_tokens=4", "--out", str(tmp_path / "out"), "--quiet"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(list((tmp_path / "out").glob("*.txt"))) == 1
