"""LLaDA2, tiny and random, in its published layout: the distribution against a forward pass written
out here, caches, blocks, and texts by several samplers.

Decoding against ``diffusers`` is in test_block_refinement.py.
"""

from __future__ import annotations

import json
import shutil

import masked_folders as made
import pytest
import torch
from masked_folders import LLADA2, MASK, VOCAB

import gen
from gen.core.errors import GenError
from gen.models.published.llada2 import AlignedBlockLM, BlockCausalLM

B, POSITIONS = 8, 16  # places of a block, and of an answer
PROMPTS = ["ba de gi", "ko", "lu ma ne pi ba be bi bo bu da di"]
WHOLE = ["ba de gi ko lu ma ne pi", "be bi bo bu da di do du"]  # prompts of a block
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made.write(
        tmp_path_factory.mktemp("published") / "llada2",
        LLADA2,
        made.llada2(LLADA2),
        shards=4,
        turn="<|role_end|>",
    )


@pytest.fixture(scope="module")
def pipe(folder):
    return gen.load("text", model=folder, dtype="float64", max_new_tokens=POSITIONS, block_length=B)


@pytest.fixture(scope="module")
def checkpoint(pipe):
    return pipe.bound(pipe.model)[0]


# --- the forward pass from the description, one place at a time where experts are concerned, on the
# keys as published


def norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x, theta, channels):
    """x [B, H, L, D]: of the first ``channels``, i against i + channels / 2, at angles of single
    precision."""
    half = channels // 2
    angle = torch.arange(x.shape[2])[:, None].float() * theta ** -(
        torch.arange(0, channels, 2).float() / channels
    )
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:channels]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., channels:]], -1)


def mlp(w, at, h):
    return (
        torch.nn.functional.silu(h @ w[f"{at}.gate_proj.weight"].T)
        * (h @ w[f"{at}.up_proj.weight"].T)
    ) @ w[f"{at}.down_proj.weight"].T


def routed(c, w, at, h, wrong):
    """What one place h [D] gets from its experts."""
    score = [float(s) for s in torch.sigmoid(w[f"{at}.gate.weight"] @ h)]
    biased = [s + float(b) for s, b in zip(score, w[f"{at}.gate.expert_bias"], strict=True)]
    size = c["num_experts"] // c["n_group"]
    groups = [range(g * size, (g + 1) * size) for g in range(c["n_group"])]
    best = 1 if wrong == "one per group" else 2
    groups = sorted(groups, key=lambda g: -sum(sorted((biased[e] for e in g), reverse=True)[:best]))
    open_groups = groups if wrong == "no groups" else groups[: c["topk_group"]]
    chosen = sorted((e for g in open_groups for e in g), key=lambda e: -biased[e])[
        : c["num_experts_per_tok"]
    ]
    weight = {e: (biased if wrong == "biased weights" else score)[e] for e in chosen}
    total = 1 if wrong == "not normalised" else sum(weight.values())
    return sum(
        weight[e] / total * c["routed_scaling_factor"] * mlp(w, f"{at}.experts.{e}", h)
        for e in chosen
    )


def plain(c, w, ids, wrong=""):
    heads, kv, size, eps = (
        c["num_attention_heads"],
        c["num_key_value_heads"],
        c["head_dim"],
        c["rms_norm_eps"],
    )
    b, length = ids.shape
    block = torch.arange(length) // {"causal": 1, "full": length}.get(wrong, B)
    hidden = block[None] > block[:, None]
    x = w["model.word_embeddings.weight"][ids]
    for n in range(c["num_hidden_layers"]):
        at = f"model.layers.{n}"
        h = (
            norm(x, w[f"{at}.input_layernorm.weight"], eps)
            @ w[f"{at}.attention.query_key_value.weight"].T
        )
        q, k, v = (t.transpose(1, 2) for t in h.view(b, length, -1, size).split([heads, kv, kv], 2))
        if wrong != "no head norms":
            q, k = (
                norm(q, w[f"{at}.attention.query_layernorm.weight"], eps),
                norm(k, w[f"{at}.attention.key_layernorm.weight"], eps),
            )
        channels = (
            size if wrong == "all channels turned" else int(size * c["partial_rotary_factor"])
        )
        q, k = turned(q, c["rope_theta"], channels), turned(k, c["rope_theta"], channels)
        k, v = (t.repeat_interleave(heads // kv, 1) for t in (k, v))
        sampling = (q @ k.mT / size**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        x = (
            x
            + (sampling @ v).transpose(1, 2).reshape(b, length, -1)
            @ w[f"{at}.attention.dense.weight"].T
        )
        h = norm(x, w[f"{at}.post_attention_layernorm.weight"], eps)
        if n < c["first_k_dense_replace"]:
            x = x + mlp(w, f"{at}.mlp", h)
            continue
        out = torch.stack(
            [routed(c, w, f"{at}.mlp", position, wrong) for position in h.flatten(0, 1)]
        ).view_as(h)
        x = x + out + (0 if wrong == "no shared expert" else mlp(w, f"{at}.mlp.shared_experts", h))
    return norm(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


def ids_of(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(5))


WRONG = (
    "causal",
    "full",
    "no head norms",
    "all channels turned",
    "biased weights",
    "not normalised",
    "no groups",
    "one per group",
    "no shared expert",
)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_logits_equal_a_plain_forward(folder, dtype):
    adapter = (
        gen.load("text", model=folder, dtype=dtype, max_new_tokens=POSITIONS, block_length=B)
        .bound(str(folder))[0]
        .adapter("masked")
    )
    ids, weights = (
        ids_of(2, 5 + POSITIONS),
        {k: v.to(getattr(torch, dtype)) for k, v in made.llada2(LLADA2).items()},
    )
    logits = adapter.forward(ids, POSITIONS)
    said = torch.arange(VOCAB) != MASK  # its logit is far below all others

    def error(wrong=""):
        return float(
            (logits - plain(LLADA2, weights, ids, wrong)[:, 5:])[..., said].abs().max()
            / logits[..., said].abs().max()
        )

    assert error() < TOLERANCE[dtype]
    if dtype == "float64":
        assert {w: e for w in WRONG if (e := error(w)) < 1e-3} == {}  # the controls
    assert bool((logits[..., MASK] < logits.amax(-1) - 100).all())


def test_calls_without_a_mask_or_with_one_of_padding_are_block_causal(checkpoint):
    model, ids = checkpoint.model, ids_of(2, 24)
    whole = checkpoint.adapter("masked").forward(ids, 24)
    assert torch.allclose(model(ids).logits, whole) and torch.allclose(
        model(ids, attention_mask=torch.ones_like(ids)).logits, whole
    )
    assert torch.allclose(
        model(ids, logits_to_keep=3).logits, model(ids).logits[:, -3:], rtol=0, atol=1e-12
    )
    real = torch.ones_like(ids)
    real[:, 21:] = 0  # the end of the last block is padding, which nothing in front of it sees
    cut = model(ids, attention_mask=real).logits[:, :21]
    assert torch.allclose(cut, model(ids[:, :21]).logits) and not torch.allclose(
        cut, whole[:, :21], atol=1e-3
    )
    with pytest.raises(ValueError, match="without an attention mask; expected a 4-D mask"):
        model(ids, cache=checkpoint.adapter("blocks").new_cache(24))


def test_later_blocks_change_nothing_in_earlier_ones(checkpoint):
    adapter, ids = checkpoint.adapter("masked"), ids_of(1, 24)
    other = ids.clone()
    other[:, 17] = (other[:, 17] + 1) % VOCAB
    a, b = adapter.forward(ids, 24), adapter.forward(other, 24)
    assert torch.allclose(a[:, :16], b[:, :16], atol=1e-12) and not torch.allclose(
        a[:, 16], b[:, 16], atol=1e-3
    )


def test_blocks_against_a_cache_have_the_distribution_of_the_whole(checkpoint):
    blocks, ids = checkpoint.adapter("blocks"), ids_of(2, 24)
    assert (
        isinstance(blocks, AlignedBlockLM)
        and blocks.block_length == B
        and isinstance(checkpoint.adapter("masked"), BlockCausalLM)
    )
    whole, at = checkpoint.adapter("masked").forward(ids, 24), torch.arange(24).expand(2, -1)
    cache = blocks.new_cache(24)
    last = (at // B + 1) * B - 1
    first = blocks.forward(ids[:, :16], at[:, :16], last[:, :16], cache)
    second = blocks.forward(ids[:, 16:], at[:, 16:], last[:, 16:], cache)
    assert torch.allclose(torch.cat([first, second], 1), whole, atol=1e-10)
    with pytest.raises(GenError, match="the condition has 3 tokens more than whole blocks of 8"):
        blocks.forward(ids[:, :19], at[:, :19], last[:, :19] * 0 + 18, blocks.new_cache(24))


# --- texts

SAMPLERS = [
    "llada2",
    "maskgit",
    "fast_dllm",
    "llada",
    {"name": "llada2", "cache": "dual", "block_length": B},
    {"name": "eb", "block_length": B},
]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.thinned(3)
def test_samplers_make_the_same_text_alone_and_in_a_batch(pipe, sampler):
    whole = pipe(PROMPTS, sampler=sampler, seed=3)
    assert whole.tokens.shape == (3, POSITIONS) and all(isinstance(m, str) for m in whole.media)
    assert (
        not bool((whole.tokens == MASK).any())
        and len({tuple(t) for t in whole.tokens.tolist()}) == 3
    )
    for prompt, tokens, stats in zip(PROMPTS, whole.tokens, whole.stats, strict=True):
        alone = pipe(prompt, sampler=sampler, seed=3)
        assert torch.equal(alone.tokens[0], tokens) and alone.stats[0].nfe == stats.nfe


def test_a_cache_of_blocks_is_exact_where_blocks_are_the_models(pipe):
    """For prompts of any length; and of blocks counted from the end of the prompt, which are not
    the model's, it is not."""
    for cache in ("dual", "prefix"):

        def run(**more):
            return pipe(PROMPTS, sampler={"name": "llada2", "block_length": B, **more})

        plain, kept = run(), run(cache=cache)
        assert torch.equal(plain.tokens, kept.tokens)
        assert sum(s.tokens_computed for s in kept.stats) < sum(
            s.tokens_computed for s in plain.stats
        )
    loose = {"align_blocks": False, "conf_threshold": 0.3}
    assert not torch.equal(run(**loose).tokens, run(cache="dual", **loose).tokens)


def test_frames_of_blocks_make_the_text_that_masked_steps_make(pipe):
    params = {
        "proposer": "argmax",
        "confidence_on": "raw",
        "choice_temperature": 0.0,
        "selector": "scheduled_threshold",
        "conf_threshold": 0.5,
        "schedule": "linear",
        "steps": 1024,
    }
    blocks = pipe(WHOLE, sampler={"name": "frame_blocks", **params})
    masked = pipe(
        WHOLE, sampler={"name": "masked_iterative", "blocks": "fixed", "block_length": B, **params}
    )
    assert torch.equal(blocks.tokens, masked.tokens)
    assert sum(s.tokens_computed for s in blocks.stats) < sum(
        s.tokens_computed for s in masked.stats
    )
    with pytest.raises(GenError, match="the condition has 3 tokens more than whole blocks of 8"):
        pipe(PROMPTS[0], sampler={"name": "frame_blocks", **params})


# --- loading


def test_half_precision_leaves_the_choice_of_experts_in_single(folder):
    model = (
        gen.load("text", model=folder, dtype="bfloat16", max_new_tokens=4)
        .bound(str(folder))[0]
        .model
    )
    key = "model.layers.1.mlp.gate.expert_bias"
    assert model.dtype == torch.bfloat16 and model.config.block_length == 32
    assert torch.equal(dict(model.named_buffers())[key], made.llada2(LLADA2)[key])
    assert bool(model(ids_of(1, 40)).logits.isfinite().all())
    assert not (folder / "ran").exists()  # what the folder would run


def test_a_device_map_changes_nothing(folder):
    def load(**more):
        return gen.load("text", model=folder, max_new_tokens=4, **more).bound(str(folder))[0].model

    assert torch.equal(
        load()(ids_of(1, 40)).logits, load(device_map={"": "cpu"})(ids_of(1, 40)).logits
    )


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ({"score_function": "softmax"}, {}, "score_function is 'softmax'; expected 'sigmoid'"),
        ({"norm_head": True}, {}, "norm_head is True; expected False"),
        ({}, {"block_length": 0}, "block_length is 0; expected an integer of at least 1"),
        ({"use_qk_norm": False}, {}, "use_qk_norm is False; expected True"),
        ({"num_experts": None}, {}, "lacks num_experts"),
        ({"rope_scaling": {"type": "yarn"}}, {}, "rope_scaling is .* expected None"),
        ({"n_group": 5}, {}, "12 experts in 5 groups"),
        (
            {"num_experts_per_tok": 7},
            {},
            "12 experts in 4 groups of which 2 are open, 7 of them chosen",
        ),
        ({"num_hidden_layers": 4}, {}, "missing: model.layers.3.attention"),
        ({"use_bias": True}, {}, "3 missing: model.layers.0.attention.dense.bias"),
        ({"mask_token_id": 48}, {}, "mask_token_id is 48; expected an id below 48"),
        ({}, {"mask_token_id": -2}, "mask_token_id is -2"),
    ],
)
def test_configs_and_options_that_cannot_be_served_are_refused(
    folder, tmp_path, config, options, words
):
    other = tmp_path / "llada2"
    shutil.copytree(folder, other)
    (other / "config.json").write_text(json.dumps({**LLADA2, **config}))
    with pytest.raises(GenError, match=words) as said:
        gen.load("text", model=other, **options)
    assert "\n" not in str(said.value)
