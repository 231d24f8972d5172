"""The probe of a model's KV cache: right models pass in every dtype, and caches that are off by one
slot and classes that ignore masks or positions do not."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, Qwen2ForCausalLM

from gen.core.errors import GenError
from gen.models.adapters.cache_probe import CALLS, _calls, _tokens, require_slots, rounded
from gen.models.adapters.language_models import CausalLM
from gen.models.adapters.slot_cache import SlotCache

SHAPE = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
SQUARE = {k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}
HEADS, EXPERTS = {"head_dim": 16}, {"num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS = {
    "cohere2": ("Cohere2Config", {**SHAPE, "sliding_window": 8}),
    "deep llama": ("LlamaConfig", {**SHAPE, "num_hidden_layers": 8}),
    "gemma2": ("Gemma2Config", {**SHAPE, **HEADS, "sliding_window": 8}),
    "gemma3": ("Gemma3TextConfig", {**SHAPE, **HEADS, "sliding_window": 8}),
    "gpt2": ("GPT2Config", SQUARE),
    "gpt_neox": ("GPTNeoXConfig", SQUARE),
    "gpt_oss": ("GptOssConfig", {**SHAPE, **HEADS, **EXPERTS, "sliding_window": 8}),
    "llama": ("LlamaConfig", SHAPE),
    "llama4": (
        "Llama4TextConfig",
        {**SHAPE, **HEADS, **EXPERTS, "intermediate_size_mlp": 96, "attention_chunk_size": 64},
    ),
    "mistral": ("MistralConfig", {**SHAPE, "sliding_window": 8}),
    "mixtral": ("MixtralConfig", {**SHAPE, **EXPERTS, "sliding_window": None}),
    "opt": ("OPTConfig", {**SQUARE, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "phi3": ("Phi3Config", SHAPE),
    "qwen2": ("Qwen2Config", SHAPE),
    "qwen3": ("Qwen3Config", {**SHAPE, **HEADS}),
    "smollm3": ("SmolLM3Config", SHAPE),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make(name: str, dtype: torch.dtype, seed: int = 0, spread: float = 0.2, **changed):
    kind, shape = CONFIGS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, kind)(**{**shape, "initializer_range": spread, **changed})
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def probe(model, adapter=None) -> None:
    require_slots(
        adapter or CausalLM(model), "m", lambda ids: model(input_ids=ids, use_cache=False).logits
    )


# --- right models


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "llama"])
def test_right_models_pass(name, dtype):
    probe(make(name, dtype))


@pytest.mark.parametrize("name", ["llama4", "qwen2"])  # Llama 4 rotates in float32
def test_right_models_pass_in_float64(name):
    model = make(name, torch.float64)
    probe(model)
    refused(model, with_cache(model, OneSlotMore))


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["usual", "eager"])
@pytest.mark.parametrize("spread", [0.02, 0.2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_right_models_pass_with_any_weights(name, dtype, spread, attention):
    for seed in range(5):
        model = make(name, dtype, seed, spread)
        if attention == "eager":
            model.set_attn_implementation("eager")
        probe(model)


@pytest.mark.parametrize("room", [5, 9, 13, 16])
def test_models_with_few_positions_pass(room):
    probe(make("gpt2", torch.float32, max_position_embeddings=room, n_positions=room))


def test_tokens_are_spread_over_the_vocabulary_and_keep_away_from_its_ends():
    right, drafts = _tokens(1000, torch.device("cpu"))
    ids = torch.cat([right, drafts])
    assert ids.min() >= 100 and ids.max() < 900 and len(ids.unique()) == ids.numel()
    assert torch.histc(ids.float(), 8, 100, 900).min() >= ids.numel() / 16


@pytest.mark.parametrize("room", [None, *range(1, 30)])
def test_the_calls_of_the_probe_stay_within_the_positions(room):
    calls = _calls(room)
    ends = [
        max(sum(n[row] for _, n in calls[:at]) for row in range(2)) + width
        for at, (width, _) in enumerate(calls)
    ]
    assert len(calls) == 1 or max(ends) <= (room or max(ends))
    assert calls == CALLS[: len(calls)] and (room is not None or calls == CALLS)


def test_the_noise_is_that_of_rounding_and_leaves_no_hook():
    model = make("llama", torch.float32)
    ids = torch.arange(10, 20)[None]
    with torch.no_grad():
        plain = model(ids).logits
        with rounded(model):
            moved = model(ids).logits
        far = (moved - plain).abs().max() / plain.abs().max()
        assert 1e-8 < far < 1e-5 and torch.equal(model(ids).logits, plain)


# --- wrong ones


class OneSlotOff(SlotCache):
    """Writes every call but the first one slot too high."""

    def _stand(self, positions, rows):
        super()._stand(positions, rows)
        if not self.is_empty:
            self.positions, self.span = (positions + 1).clamp_max(self.slots - 1), None


class OneSlotMore(SlotCache):
    """Lets queries see the slot above their own, where a rejected draft may lie."""

    def at(self, positions, dtype, last=None):
        return super().at(positions, dtype, (positions + 1).clamp_max(self.slots - 1))

    needed = at


class OneSlotLess(SlotCache):
    """Hides a query's own slot."""

    def at(self, positions, dtype, last=None):
        return super().at(positions, dtype, (positions - 1).clamp_min(0))

    needed = at


def with_cache(model, kind: type[SlotCache]) -> CausalLM:
    class Broken(CausalLM):
        def new_cache(self, slots):
            return kind(self.config.num_hidden_layers, slots)

    return Broken(model)


def refused(model, adapter=None) -> None:
    with pytest.raises(GenError, match=r"changes its log-probabilities with gen's KV cache"):
        probe(model, adapter)


@pytest.mark.parametrize("kind", [OneSlotOff, OneSlotMore, OneSlotLess])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_cache_that_is_one_slot_off_is_refused(name, dtype, kind):
    model = make(name, dtype)
    refused(model, with_cache(model, kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OneSlotOff, OneSlotMore, OneSlotLess])
@pytest.mark.parametrize("spread", [0.02, 0.2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [n for n, (_, c) in CONFIGS.items() if "sliding_window" not in c])
def test_a_cache_that_is_one_slot_off_is_refused_with_any_weights(name, dtype, spread, kind):
    for seed in range(5):
        model = make(name, dtype, seed, spread)
        refused(model, with_cache(model, kind))


def without(base: type, argument: str) -> type:
    """Make a class that ignores one argument and goes by what its cache says."""

    class Ignorant(base):
        def forward(self, *args, **kwargs):
            kwargs.pop(argument, None)
            return super().forward(*args, **kwargs)

    return Ignorant


@pytest.mark.parametrize("argument", ["position_ids", "attention_mask"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "base"), [("gpt2", GPT2LMHeadModel), ("qwen2", Qwen2ForCausalLM)])
def test_a_class_that_ignores_positions_or_masks_is_refused(name, base, dtype, argument):
    model = make(name, dtype)
    model.__class__ = without(base, argument)
    with pytest.raises(GenError, match="gen's KV cache"):
        probe(model)


def test_logits_that_are_no_numbers_are_named():
    model = make("llama", torch.float16)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("inf"))
    with pytest.raises(GenError, match="logits that are no numbers in float16"):
        probe(model)


# --- models without keys and values by position


def small(kind: str, **more):
    shape = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, **more}
    return getattr(transformers, f"{kind}Config")(**shape)


def mixed(kind: str, layer: str, **more):
    shape = {k: SHAPE[k] for k in ("intermediate_size", "num_attention_heads")}
    types = [layer, "full_attention"]
    return small(kind, **shape, num_key_value_heads=2, layer_types=types, **more)


def recurrent() -> Iterator[tuple[str, object]]:
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    heads = {"mamba_n_heads": 8, "mamba_d_head": 8}
    yield "Mamba", small("Mamba")
    yield "Mamba2", small("Mamba2", num_heads=8, head_dim=8, n_groups=1)
    yield "Rwkv", small("Rwkv")
    yield "Jamba", small("Jamba", num_experts=2, **attention)
    yield "Bamba", small("Bamba", attn_layer_indices=[1], **heads, **attention)
    yield "FalconH1", small("FalconH1", mamba_d_ssm=64, **heads, **attention)
    yield "Lfm2", mixed("Lfm2", "conv")
    yield "MiniMax", mixed("MiniMax", "linear_attention", num_local_experts=2)
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    shared = {"shared_expert_intermediate_size": 16}
    yield "Qwen3Next", mixed("Qwen3Next", "linear_attention", **experts, **shared)


@pytest.mark.parametrize(("name", "config"), recurrent())
def test_recurrent_models_are_named_as_such(name, config):
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config).eval()
    with pytest.raises(GenError, match=rf"model m \({name}ForCausalLM\) is recurrent: "):
        probe(model)


@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_encoder_decoder_models_are_named_as_such(name):
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    bart = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_layers": 1}
    config = getattr(transformers, f"{name}Config")(vocab_size=96, **(t5 if name == "T5" else bart))
    model = getattr(transformers, f"{name}ForConditionalGeneration")(copy.deepcopy(config)).eval()
    with pytest.raises(GenError, match=r"is an encoder-decoder model"):
        probe(model)
