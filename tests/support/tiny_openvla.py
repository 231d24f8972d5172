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


TEXT, BINS, PAD, VISION, HIDDEN = 64, 16, 8, 18, 32
# of the two vision transformers: channels, attention heads, pixels of a patch and of the image
WIDTH, HEADS, PATCH, SIDE, BLOCKS = (6, 12), (3, 3), (4, 2), (16, 8), 3
NAMES = ("vit_tiny_patch4_reg2_dinov2.tiny", "vit_tiny_patch2_siglip_8")
PROCESSOR = {
    "image_processor_type": "PrismaticImageProcessor",
    "use_fused_vision_backbone": True,
    "image_resize_strategy": "resize-naive",
    "input_sizes": [[3, side, side] for side in SIDE],
    "interpolations": ["bicubic", "bicubic"],
    "means": [[0.484375, 0.455078125, 0.40625], [0.5, 0.5, 0.5]],
    "stds": [[0.228515625, 0.2236328125, 0.224609375], [0.5, 0.5, 0.5]],
}


STATISTICS = {
    "bridge": {
        "action": {"q01": [-1.0, 0.0, -0.5], "q99": [3.0, 0.5, 0.5], "mask": [True, True, False]}
    },
    "table": {"action": {"q01": [0.0, 0.0], "q99": [1.0, 2.0], "mask": [True, True]}},
}


def tower(width, patch, side, tokens, scaled):
    """Random weights of a vision transformer as timm names them: ``tokens`` is 0 for SigLIP and the
    number of registers for DINOv2, whose blocks are ``scaled``."""
    hidden, patches = 2 * width, (side // patch) ** 2
    shapes = {
        "pos_embed": (1, patches, width),
        "patch_embed.proj.weight": (width, 3, patch, patch),
        "patch_embed.proj.bias": (width,),
        "norm.weight": (width,),
        "norm.bias": (width,),
    }
    if tokens:
        shapes |= {"cls_token": (1, 1, width), "reg_token": (1, tokens, width)}
    else:
        shapes |= {"attn_pool.latent": (1, 1, width), "attn_pool.q.weight": (width, width)}
    linear = {
        "attn.qkv": (3 * width, width),
        "attn.proj": (width, width),
        "mlp.fc1": (hidden, width),
        "mlp.fc2": (width, hidden),
    }
    for i in range(BLOCKS):
        for name, shape in linear.items():
            shapes |= {f"blocks.{i}.{name}.weight": shape, f"blocks.{i}.{name}.bias": shape[:1]}
        for name in ("norm1", "norm2"):
            shapes |= {f"blocks.{i}.{name}.{kind}": (width,) for kind in ("weight", "bias")}
        if scaled:
            shapes |= {f"blocks.{i}.ls{n}.scale_factor": (width,) for n in (1, 2)}
    return {name: torch.randn(shape).double() / 2 for name, shape in shapes.items()}


def written(path):
    """Random weights as ``openvla-7b`` names them: a language model, two vision transformers, the
    projector of their features."""
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
    for i, (name, tokens) in enumerate((("featurizer", 2), ("fused_featurizer", 0))):
        made = tower(WIDTH[i], PATCH[i], SIDE[i], tokens, scaled=tokens > 0)
        tensors |= {f"vision_backbone.{name}.{key}": value for key, value in made.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "openvla",
        "architectures": ["OpenVLAForActionPrediction"],
        "text_config": {"model_type": "llama", **text},
        "pad_to_multiple_of": PAD,
        "n_action_bins": BINS,
        "use_fused_vision_backbone": True,
        "timm_model_ids": NAMES,
        "timm_override_act_layers": [None, None],
        "image_sizes": SIDE,
        "norm_stats": STATISTICS,
        "auto_map": {"AutoConfig": "configuration_prismatic.OpenVLAConfig"},
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    save_quietly(tiny_tokenizer(TEXT, WORDS), path)
    return path
