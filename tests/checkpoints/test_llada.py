"""LLaDA and Dream, tiny and random, in their published layout: the distributions against forward
passes written out here, and texts by several samplers."""

from __future__ import annotations

import json
import shutil

import masked_folders as made
import pytest
import torch
from calls import only
from masked_folders import DREAM, END, LLADA, MASK, VOCAB
from safetensors.torch import load_file, save_file

import gen
from gen.core.errors import GenError
from gen.models.adapters.language_models import MaskedLM

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
POSITIONS = 12
PROMPTS = ["ba de gi", "ko", "lu ma ne pi ba be"]
KINDS = {
    "llada": (LLADA, made.llada),
    "llada-gqa": ({**LLADA, "n_kv_heads": 2}, made.llada),
    "llada-tied": ({**LLADA, "weight_tying": True}, made.llada),
    "llada-wide": ({**LLADA, "embedding_size": VOCAB + 16, "mlp_hidden_size": 64}, made.llada),
    "dream": (DREAM, made.dream),
}
TURNS = {"llada": "<|eot_id|>", "dream": "<|im_end|>"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    return {
        name: made.write(
            root / name,
            config,
            weights(config),
            shards=3 if name == "llada" else 1,
            turn=TURNS[name.split("-")[0]],
            chat=name == "llada-gqa",
        )
        for name, (config, weights) in KINDS.items()
    }


@pytest.fixture(scope="module")
def pipes(folders):
    return {
        name: gen.load("text", model=folders[name], dtype="float64", max_new_tokens=POSITIONS)
        for name in ("llada", "dream")
    }


# --- forward passes from the description, on the keys as published


def norm(x, weight, eps):
    y = x.float()  # in single precision, whatever the rest is
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def turned(x, theta):
    """x [B, H, L, D]: channel i against channel i + D / 2, at angles of single precision."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[2])[:, None].float() * (
        1.0 / theta ** (torch.arange(0, x.shape[-1], 2).float() / x.shape[-1])
    )
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attend(q, k, v, heads, kv_heads, theta, causal):
    b, length, d = q.shape

    def split(x, n):
        return x.view(b, length, n, d // heads).transpose(1, 2)

    q, k, v = turned(split(q, heads), theta), turned(split(k, kv_heads), theta), split(v, kv_heads)
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    score = q @ k.mT / (d // heads) ** 0.5
    if causal:
        score = score.masked_fill(torch.ones(length, length).triu(1) > 0, -torch.inf)
    return (score.softmax(-1) @ v).transpose(1, 2).reshape(b, length, d)


def plain_llada(c, w, ids, causal=False):
    eps, heads, kv = c["rms_norm_eps"], c["n_heads"], c["n_kv_heads"]

    def at(n, name):
        return w[f"model.transformer.blocks.{n}.{name}.weight"]

    x = w["model.transformer.wte.weight"][ids]
    for n in range(c["n_layers"]):
        h = norm(x, at(n, "attn_norm"), eps)
        q, k, v = (h @ at(n, f"{i}_proj").T for i in "qkv")
        x = x + attend(q, k, v, heads, kv, c["rope_theta"], causal) @ at(n, "attn_out").T
        h = norm(x, at(n, "ff_norm"), eps)
        x = (
            x
            + (torch.nn.functional.silu(h @ at(n, "ff_proj").T) * (h @ at(n, "up_proj").T))
            @ at(n, "ff_out").T
        )
    head = w[
        "model.transformer.wte.weight" if c["weight_tying"] else "model.transformer.ff_out.weight"
    ]
    return norm(x, w["model.transformer.ln_f.weight"], eps) @ head.T


def plain_dream(c, w, ids, causal=False):
    eps, heads, kv = c["rms_norm_eps"], c["num_attention_heads"], c["num_key_value_heads"]
    x = w["model.embed_tokens.weight"][ids]
    for n in range(c["num_hidden_layers"]):

        def at(name, n=n):
            return w[f"model.layers.{n}.{name}"]

        h = norm(x, at("input_layernorm.weight"), eps)
        q, k, v = (
            h @ at(f"self_attn.{i}_proj.weight").T + at(f"self_attn.{i}_proj.bias") for i in "qkv"
        )
        x = (
            x
            + attend(q, k, v, heads, kv, c["rope_theta"], causal) @ at("self_attn.o_proj.weight").T
        )
        h = norm(x, at("post_attention_layernorm.weight"), eps)
        x = (
            x
            + (
                torch.nn.functional.silu(h @ at("mlp.gate_proj.weight").T)
                * (h @ at("mlp.up_proj.weight").T)
            )
            @ at("mlp.down_proj.weight").T
        )
    return norm(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


def plain(name, dtype, ids, causal=False):
    config, weights = KINDS[name]
    tensors = {k: v.to(dtype) for k, v in weights(config).items()}
    return (plain_dream if name == "dream" else plain_llada)(config, tensors, ids, causal)


def sequences(size: int) -> torch.Tensor:
    return torch.randint(0, size, (3, 4 + POSITIONS), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", KINDS)
def test_logits_equal_a_plain_forward(folders, name, dtype):
    adapter = (
        gen.load("text", model=folders[name], dtype=dtype, max_new_tokens=POSITIONS)
        .bound(str(folders[name]))[0]
        .adapter("masked")
    )
    assert isinstance(adapter, MaskedLM) and adapter.dtype == getattr(torch, dtype)
    ids, early = sequences(VOCAB), int(name == "dream")
    canvas = slice(4 - early, 4 + POSITIONS - early)
    logits = adapter.forward(ids, POSITIONS)

    def error(causal=False, at=canvas):
        return float(
            (logits - plain(name, getattr(torch, dtype), ids, causal)[:, at]).abs().max()
            / logits.abs().max()
        )

    assert error() < TOLERANCE[dtype]
    assert error(causal=True) > 1e-2  # control: a causal mask
    other = slice(4, 4 + POSITIONS) if early else slice(3, 3 + POSITIONS)
    assert error(at=other) > 1e-2  # control: a place earlier or later


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_padding_is_not_seen(pipes, name):
    """A row behind two columns of nothing has the distribution it has alone."""
    adapter = pipes[name].bound(pipes[name].model)[0].adapter("masked")
    ids = sequences(VOCAB)[:1, 2:]
    alone, padded = adapter.forward(ids, POSITIONS), torch.cat([ids[:, :1].repeat(1, 2), ids], 1)
    assert torch.allclose(
        adapter.forward(padded, POSITIONS, torch.tensor([2])), alone, atol=1e-5
    )  # angles are of single precision
    assert not torch.allclose(adapter.forward(padded, POSITIONS), alone, atol=1e-2)  # control


# --- texts


@pytest.mark.parametrize(
    "sampler",
    [
        "maskgit",
        "fast_dllm",
        "llada",
        "dream",
        {"name": "fast_dllm", "cache": "dual", "block_length": 4},
        {"name": "freedave", "num_drafts": 2},
    ],
)
@pytest.mark.parametrize("name", ["llada", "dream"])
@pytest.mark.thinned(6)
def test_samplers_make_the_same_text_alone_and_in_a_batch(pipes, name, sampler):
    pipe = pipes[name]
    whole = pipe(PROMPTS, sampler=sampler, seed=3)
    assert whole.tokens.shape == (3, POSITIONS) and all(isinstance(m, str) for m in whole.media)
    assert (
        not bool((whole.tokens == MASK).any())
        and len({tuple(t) for t in whole.tokens.tolist()}) == 3
    )
    for prompt, tokens, media in zip(PROMPTS, whole.tokens, whole.media, strict=True):
        alone = pipe(prompt, sampler=sampler, seed=3)
        assert torch.equal(alone.tokens[0], tokens) and alone.media == [media]
    assert whole.stats[0].nfe >= 1


def test_control_without_its_shift_dream_says_something_else(pipes, monkeypatch):
    before = pipes["dream"](PROMPTS, sampler="fast_dllm").tokens
    monkeypatch.setattr(MaskedLM, "shift", 0)
    assert not torch.equal(pipes["dream"](PROMPTS, sampler="fast_dllm").tokens, before)


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_a_text_goes_up_to_its_first_end(pipes, name):
    pipe = pipes[name]
    _, binding, frontend = pipe.bound(pipe.model)
    turn = frontend.tokenizer.get_vocab()[TURNS[name]]
    for end in (END, turn):
        tokens = torch.tensor([10, 11, end, 12, END, *[13] * (POSITIONS - 5)])
        assert (
            pipe.decode(tokens, binding.space, frontend)
            == frontend.text([10, 11])
            != frontend.text([10, 11, 12])
        )
    assert binding.space.eos_token_id == END and not pipe.modality.length_first
    assert (
        binding.space.legal[:, END].all()
        and not binding.space.legal[:, MASK].any()
        and int(binding.space.legal[0].sum()) == VOCAB - 1
    )


def test_guidance_compares_with_the_prompt_masked(pipes):
    pipe = pipes["llada"]
    binding = pipe.bound(pipe.model)[1]
    assert [binding.without(p) for p in PROMPTS] == [
        [MASK] * len(binding.prompt(p)) for p in PROMPTS
    ]

    def run(scale):
        return pipe(PROMPTS, sampler="fast_dllm", **only(guidance_scale=scale)).tokens

    assert torch.equal(run(1.0), pipe(PROMPTS, sampler="fast_dllm").tokens) and not torch.equal(
        run(1.0), run(3.0)
    )


def test_prompts_go_into_the_chat_template_where_there_is_one(folders):
    pipe = gen.load("text", model=folders["llada-gqa"], max_new_tokens=4)
    checkpoint, binding, frontend = pipe.bound(pipe.model)
    said = [{"role": "user", "content": "ba de"}]
    wanted = checkpoint.tokenizer.apply_chat_template(
        said, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    plain = gen.load("text", model=folders["llada-gqa"], max_new_tokens=4, chat=False)
    assert (
        binding.prompt("ba de")
        == wanted
        != plain.bound(plain.model)[1].prompt("ba de")
        == frontend.ids("ba de")
    )
    with pytest.raises(GenError, match="has no chat template; expected chat=False"):
        gen.load("text", model=folders["llada"], chat=True)


def test_tokenizers_of_qwen2_files_are_read(folders, tmp_path):
    """Dream's folder has vocab.json and merges.txt, and a class of its own that must not run."""
    from tokenizers import pre_tokenizers

    folder = tmp_path / "dream"
    shutil.copytree(folders["dream"], folder)
    (folder / "tokenizer.json").unlink()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    (folder / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate([*letters, "ab"])}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    own = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["modeling_own.DreamTokenizer", None]},
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**own, "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"})
    )
    config = {**DREAM, "vocab_size": 300}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {k: v.contiguous() for k, v in made.dream(config).items()}, folder / "model.safetensors"
    )
    pipe = gen.load("text", model=folder, max_new_tokens=4)
    ids = pipe.bound(pipe.model)[1].prompt("abba")
    assert len(ids) == 3 and isinstance(pipe("abba", sampler="fast_dllm").media[0], str)
    (folder / "merges.txt").unlink()
    with pytest.raises(
        GenError, match="has no tokenizer; expected tokenizer.json, or vocab.json and merges.txt"
    ):
        gen.load("text", model=folder)


@pytest.mark.parametrize("name", ["llada-gqa", "dream"])
def test_a_device_map_changes_nothing(folders, name):
    ids = sequences(VOCAB)
    distributions = [
        gen.load("text", model=folders[name], max_new_tokens=POSITIONS, **more)
        .bound(str(folders[name]))[0]
        .adapter("masked")
        .forward(ids, POSITIONS)
        for more in ({}, {"device_map": {"": "cpu"}})
    ]
    assert torch.equal(*distributions)


def test_code_of_the_folder_does_not_run(pipes, folders):
    for name in pipes:
        assert not (folders[name] / "ran").exists() and (folders[name] / "modeling_own.py").exists()


# --- mistakes


def copied(folders, tmp_path, name, **config):
    folder = tmp_path / name
    shutil.copytree(folders[name], folder)
    said = json.loads((folder / "config.json").read_text())
    said.update(config)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in said.items() if v != "gone"}))
    return folder


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("llada", {"mask_token_id": 4096}, "mask_token_id is 4096; expected an id below 48"),
        ("llada", {"eos_token_id": -1}, "eos_token_id is -1; expected an id below 48"),
        ("llada", {"include_qkv_bias": True}, "include_qkv_bias is True; expected False"),
        ("llada", {"block_type": "sequential"}, "block_type is 'sequential'; expected 'llama'"),
        (
            "llada",
            {"block_type": "gone"},
            "block_type is missing, which means 'sequential'; expected 'llama'",
        ),
        ("llada", {"scale_logits": True}, "scale_logits is True; expected False"),
        ("llada", {"alibi": True}, "alibi is True; expected False"),
        ("llada", {"activation_type": "swiglu"}, "activation_type is 'swiglu'; expected 'silu'"),
        ("llada", {"d_model": "gone", "n_heads": "gone"}, "lacks d_model, n_heads"),
        ("llada", {"embedding_size": 20}, "2 mis-shaped: model.transformer"),
        ("dream", {"use_sliding_window": True}, "use_sliding_window is True; expected False"),
        (
            "dream",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_scaling is .*; expected None",
        ),
        ("dream", {"hidden_size": "gone"}, "lacks hidden_size"),
        ("dream", {"mask_token_id": "x"}, "mask_token_id is 'x'; expected an id below 48"),
    ],
)
def test_configs_that_cannot_be_served_are_refused(folders, tmp_path, name, config, words):
    with pytest.raises(GenError, match=words) as said:
        gen.load("text", model=copied(folders, tmp_path, name, **config))
    assert "\n" not in str(said.value)


def test_a_mask_has_to_be_stated_somewhere(folders, tmp_path):
    folder = copied(folders, tmp_path, "dream", mask_token_id="gone")
    assert (
        gen.load("text", model=folder, max_new_tokens=2).bound(str(folder))[1].space.mask_token_id
        == MASK
    )  # the tokenizer's
    made.write_tokenizer(folder, mask=False)
    with pytest.raises(GenError, match="has a mask token; expected mask_token_id"):
        gen.load("text", model=folder)
    assert (
        gen.load("text", model=folder, mask_token_id=5).bound(str(folder))[1].space.mask_token_id
        == 5
    )


def test_weights_that_do_not_fit_are_listed(folders, tmp_path):
    folder = copied(folders, tmp_path, "dream")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_projection.weight"] = weights.pop(
        "model.layers.0.mlp.up_proj.weight"
    )
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1]
    save_file(weights, folder / "model.safetensors")
    lists = (
        "1 missing: model.layers.0.mlp.up_proj.weight; 1 extra:"
        " model.layers.0.mlp.up_projection.weight; 1 mis-shaped: model.norm"
    )
    with pytest.raises(GenError, match=lists):
        gen.load("text", model=folder)
    folder = copied(folders, tmp_path, "llada")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(GenError, match="names model-00002-of-00003.safetensors, which is missing"):
        gen.load("text", model=folder)


def test_what_is_asked_for_has_to_exist(folders, pipes):
    with pytest.raises(GenError, match="max_new_tokens is 0; expected an integer of at least 1"):
        gen.load("text", model=folders["llada"], max_new_tokens=0)
    with pytest.raises(GenError, match="max_new_token"):
        gen.load("text", model=folders["llada"], max_new_token=4)
    with pytest.raises(
        GenError, match="is a masked one of codes, but the sampler needs a causal one"
    ):
        pipes["llada"]("ba", sampler="autoregressive")
    with pytest.raises(GenError, match="the prompt is empty"):
        pipes["llada"]("  ", sampler="maskgit")
