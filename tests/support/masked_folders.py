"""Tiny random folders of masked language models as they are published: files, names and keys. Not a
test."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

WORDS = [f"{a}{b}" for a in "bdgklmnp" for b in "aeiou"]
SPECIALS = ["[UNK]", "<|endoftext|>", "<|mask|>", "<|turn|>", "<user>", "<model>"]
END, MASK = 1, 2  # ids
TEMPLATE = (
    "{% for m in messages %}<user> {{ m['content'] }} <|turn|> {% endfor %}{% if"
    " add_generation_prompt %}<model>{% endif %}"
)
VOCAB = 48  # of the models; the tokenizer has 46 of them
ENDS = (  # what a folder's own code would do
    '"""Must not run."""\nimport pathlib\npathlib.Path(__file__).with_name("ran").touch()\n'
)


def write_tokenizer(
    folder: Path,
    *,
    chat: bool = False,
    mask: bool = True,
    turn: str = "<|turn|>",
    newlines: tuple[str, ...] = (),
) -> None:
    """Words and their ids as tokenizer.json and tokenizer_config.json. ``newlines``: tokens after
    the words."""
    from transformers import PreTrainedTokenizerFast

    from tokenizers import Tokenizer, models, pre_tokenizers

    names = [turn if s == "<|turn|>" else s for s in SPECIALS]
    vocab = {w: i for i, w in enumerate([*names, *WORDS, *newlines])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="[UNK]",
        eos_token="<|endoftext|>",
        additional_special_tokens=names[3:],
        **({"mask_token": "<|mask|>"} if mask else {}),
    )
    if chat:
        own.chat_template = TEMPLATE.replace("<|turn|>", turn)
    own.save_pretrained(folder)


def write(
    folder: Path, config: dict, weights: dict[str, Tensor], shards: int = 1, **tokenizer
) -> Path:
    """The folder, with a module of its own that must not run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "float32", **config}))
    (folder / "modeling_own.py").write_text(ENDS)
    weights = {k: v.contiguous() for k, v in weights.items()}
    if shards == 1:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    else:
        names = [f"model-{n + 1:05d}-of-{shards:05d}.safetensors" for n in range(shards)]
        position = {key: names[n % shards] for n, key in enumerate(sorted(weights))}
        for name in names:
            save_file(
                {k: v for k, v in weights.items() if position[k] == name},
                folder / name,
                {"format": "pt"},
            )
        total = sum(v.nbytes for v in weights.values())
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": position})
        )
    write_tokenizer(folder, **tokenizer)
    return folder


def random_weights(
    shapes: dict[str, tuple[int, ...]], seed: int, spread: float = 1.0
) -> dict[str, Tensor]:
    """Norms around 1, biases around 0, matrices that keep lengths."""
    g = torch.Generator().manual_seed(seed)
    out = {}
    for key, shape in shapes.items():
        noise = torch.randn(shape, generator=g)
        if len(shape) == 1:
            out[key] = 0.3 * noise + (0 if "bias" in key else 1)
        else:
            out[key] = noise * (
                spread if "emb" in key or "wte" in key else spread * shape[1] ** -0.5
            )
    return out


LLADA = {
    "model_type": "llada",
    "architectures": ["LLaDAModelLM"],
    "auto_map": {
        "AutoConfig": "modeling_own.LLaDAConfig",
        "AutoModelForCausalLM": "modeling_own.LLaDAModelLM",
    },
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 4,
    "mlp_hidden_size": 48,
    "mlp_ratio": 4,
    "vocab_size": VOCAB,
    "embedding_size": VOCAB,
    "max_sequence_length": 256,
    "rope": True,
    "rope_theta": 5e5,
    "layer_norm_type": "rms",
    "rms_norm_eps": 1e-5,
    "block_type": "llama",
    "activation_type": "silu",
    "include_bias": False,
    "include_qkv_bias": False,
    "bias_for_layer_norm": False,
    "alibi": False,
    "attention_layer_norm": False,
    "scale_logits": False,
    "weight_tying": False,
    "input_emb_norm": False,
    "block_group_size": 1,
    "multi_query_attention": None,
    "mask_token_id": MASK,
    "eos_token_id": END,
    "pad_token_id": END,
}


def llada(config: dict, seed: int = 0) -> dict[str, Tensor]:
    d, m, v = config["d_model"], config["mlp_hidden_size"], config["embedding_size"]
    kv = d // config["n_heads"] * config["n_kv_heads"]
    shapes = {"model.transformer.wte.weight": (v, d), "model.transformer.ln_f.weight": (d,)}
    if not config["weight_tying"]:
        shapes["model.transformer.ff_out.weight"] = (v, d)
    for n in range(config["n_layers"]):
        for name, shape in {
            "attn_norm": (d,),
            "ff_norm": (d,),
            "q_proj": (d, d),
            "k_proj": (kv, d),
            "v_proj": (kv, d),
            "attn_out": (d, d),
            "ff_proj": (m, d),
            "up_proj": (m, d),
            "ff_out": (d, m),
        }.items():
            shapes[f"model.transformer.blocks.{n}.{name}.weight"] = shape
    return random_weights(shapes, seed, 1.5)


DREAM = {
    "model_type": "Dream",
    "architectures": ["DreamModel"],
    "auto_map": {"AutoConfig": "modeling_own.DreamConfig", "AutoModel": "modeling_own.DreamModel"},
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 2,
    "tie_word_embeddings": False,
    "mask_token_id": MASK,
    "pad_token_id": END,
    "eos_token_id": END,
}


def dream(config: dict, seed: int = 1) -> dict[str, Tensor]:
    d, m, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = d // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {
        "model.embed_tokens.weight": (v, d),
        "model.norm.weight": (d,),
        "lm_head.weight": (v, d),
    }
    for n in range(config["num_hidden_layers"]):
        at = f"model.layers.{n}."
        shapes |= {
            f"{at}{name}.weight": (d,) for name in ("input_layernorm", "post_attention_layernorm")
        }
        for name, wide in (("q", d), ("k", kv), ("v", kv)):
            shapes |= {
                f"{at}self_attn.{name}_proj.weight": (wide, d),
                f"{at}self_attn.{name}_proj.bias": (wide,),
            }
        shapes |= {f"{at}self_attn.o_proj.weight": (d, d), f"{at}mlp.down_proj.weight": (d, m)}
        shapes |= {f"{at}mlp.{name}_proj.weight": (m, d) for name in ("gate", "up")}
    return random_weights(shapes, seed, 1.5)


LLADA2 = {
    "model_type": "llada2_moe",
    "architectures": ["LLaDA2MoeModelLM"],
    "auto_map": {
        "AutoConfig": "modeling_own.LLaDA2MoeConfig",
        "AutoModelForCausalLM": "modeling_own.LLaDA2MoeModelLM",
    },
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "hidden_act": "silu",
    "use_qkv_bias": False,
    "use_bias": False,
    "use_qk_norm": True,
    "norm_head": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 6e5,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "num_experts": 12,
    "num_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "norm_topk_prob": True,
    "moe_router_enable_expert_bias": True,
    "pad_token_id": END,
    "eos_token_id": END,
}


def llada2(config: dict, seed: int = 2, spread: float = 1.5) -> dict[str, Tensor]:
    """As trained ones, these never say the mask: channel 0 of every place is the same, nothing
    writes to it, and only the mask's row of the head reads it."""
    d, m, v, e, size = (
        config[k]
        for k in ("hidden_size", "moe_intermediate_size", "vocab_size", "num_experts", "head_dim")
    )
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {
        "model.word_embeddings.weight": (v, d),
        "model.norm.weight": (d,),
        "lm_head.weight": (v, d),
    }

    def mlp(at, wide):
        return {
            f"{at}.gate_proj.weight": (wide, d),
            f"{at}.up_proj.weight": (wide, d),
            f"{at}.down_proj.weight": (d, wide),
        }

    for n in range(config["num_hidden_layers"]):
        at = f"model.layers.{n}."
        shapes |= {
            f"{at}{name}.weight": (d,) for name in ("input_layernorm", "post_attention_layernorm")
        }
        shapes |= {
            f"{at}attention.query_key_value.weight": ((heads + 2 * kv) * size, d),
            f"{at}attention.dense.weight": (d, heads * size),
            f"{at}attention.query_layernorm.weight": (size,),
            f"{at}attention.key_layernorm.weight": (size,),
        }
        if n < config["first_k_dense_replace"]:
            shapes |= mlp(f"{at}mlp", config["intermediate_size"])
            continue
        shapes |= {f"{at}mlp.gate.weight": (e, d), f"{at}mlp.gate.expert_bias": (e,)}
        shapes |= mlp(f"{at}mlp.shared_experts", m * config["num_shared_experts"])
        for i in range(e):
            shapes |= mlp(f"{at}mlp.experts.{i}", m)
    weights = random_weights(shapes, seed, spread)
    weights["model.word_embeddings.weight"][:, 0] = 4
    weights["model.norm.weight"][0] = 1
    weights["lm_head.weight"][:, 0] = 0
    weights["lm_head.weight"][MASK, 0] = -1000
    for key, value in weights.items():
        if key.endswith(("dense.weight", "down_proj.weight")):
            value[0] = 0
    return weights
