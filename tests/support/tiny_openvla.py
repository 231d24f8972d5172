"""Tiny OpenVLA checkpoints in the published layout."""

from __future__ import annotations

import json

import torch
from published import save_quietly, tiny_tokenizer

from gen.modalities.checkpoints.openvla import EMPTY

WORDS = (
    "In:",
    "What",
    "action",
    "should",
    "the",
    "robot",
    "take",
    "to",
    "Out:",
    "push",
    "pull",
    "cup?",
    "red",
    "door?",
    EMPTY,
)


TEXT, BINS, PAD, VISION, HIDDEN = 64, 16, 8, 10, 32


STATISTICS = {
    "bridge": {
        "action": {"q01": [-1.0, 0.0, -0.5], "q99": [3.0, 0.5, 0.5], "mask": [True, True, False]}
    },
    "table": {"action": {"q01": [0.0, 0.0], "q99": [1.0, 2.0], "mask": [True, True]}},
}


def written(path):
    """Random weights as ``openvla-7b`` names them: a language model, the projector of two fused
    backbones, something of a backbone."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    text = dict(
        vocab_size=TEXT + BINS + PAD,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    tensors = {
        f"language_model.{k}": v.clone()
        for k, v in LlamaForCausalLM(LlamaConfig(**text)).double().state_dict().items()
    }
    for name, out, into in (
        ("fc1", 4 * VISION, VISION),
        ("fc2", HIDDEN, 4 * VISION),
        ("fc3", HIDDEN, HIDDEN),
    ):
        tensors |= {
            f"projector.{name}.weight": torch.randn(out, into).double() / 3,
            f"projector.{name}.bias": torch.randn(out).double(),
        }
    tensors["vision_backbone.featurizer.cls_token"] = torch.ones(1, 1, 4)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "openvla",
        "architectures": ["OpenVLAForActionPrediction"],
        "text_config": {"model_type": "llama", **text},
        "pad_to_multiple_of": PAD,
        "n_action_bins": BINS,
        "norm_stats": STATISTICS,
        "auto_map": {"AutoConfig": "configuration_prismatic.OpenVLAConfig"},
    }
    (path / "config.json").write_text(json.dumps(config))
    save_quietly(tiny_tokenizer(TEXT, WORDS), path)
    return path
