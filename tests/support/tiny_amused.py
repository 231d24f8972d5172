"""Tiny aMUSEd checkpoints in the published layout."""

from __future__ import annotations

import json
import string
from pathlib import Path

import torch
from published import save_quietly

CODES, MASK, TEXT = 64, 71, 16
PROMPTS = ["a cat", "two dogs in the snow at night", "red"]


def clip_tokenizer(folder: Path) -> int:
    """A byte-pair tokenizer of letters and a few pairs, as CLIP's lie in folders. Returns how many
    ids it has."""
    merges = [("t", "h"), ("th", "e</w>"), ("c", "a"), ("ca", "t</w>")]
    words = [
        *string.ascii_lowercase,
        *(c + "</w>" for c in string.ascii_lowercase),
        *("".join(m) for m in merges),
    ]
    words += ["<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps({w: i for i, w in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    special = {
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
    }
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": TEXT,
        "do_lower_case": True,
        **special,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return len(words)


def transformer(**config):
    """The masked model, of 4x4 codes."""
    import diffusers

    small = dict(
        hidden_size=32,
        cond_embed_dim=24,
        micro_cond_encode_dim=8,
        micro_cond_embed_dim=40,
        encoder_hidden_size=32,
        vocab_size=72,
        codebook_size=CODES,
        in_channels=32,
        block_out_channels=32,
        num_res_blocks=1,
        block_num_heads=2,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        sample_size=4,
    )
    return diffusers.UVit2DModel(**small | config)


def vqvae():
    """The image tokenizer, of 8x8 pixels."""
    import diffusers

    return diffusers.VQModel(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(32, 32),
        layers_per_block=1,
        latent_channels=8,
        num_vq_embeddings=CODES,
        vq_embed_dim=8,
        lookup_from_codebook=True,
        mid_block_add_attention=False,
        force_upcast=True,
    )


def text_encoder(vocab_size: int):
    """The encoder of prompts, whose tokenizer ends with the bos and eos tokens."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        projection_dim=24,
        max_position_embeddings=TEXT,
        bos_token_id=vocab_size - 2,
        eos_token_id=vocab_size - 1,
        pad_token_id=vocab_size - 1,
    )
    return CLIPTextModelWithProjection(config)


def amused_folder(folder: Path, **config) -> Path:
    """A whole checkpoint: 4x4 codes of 8x8 pixels. ``config``: changes of the masked model's."""
    import diffusers

    torch.manual_seed(3)
    size = clip_tokenizer(folder / "tokenizer")
    parts = {
        "transformer": transformer(**config),
        "vqvae": vqvae(),
        "text_encoder": text_encoder(size),
        "scheduler": diffusers.AmusedScheduler(mask_token_id=MASK),
    }
    with torch.no_grad():  # random weights hardly look at their input otherwise
        parts["vqvae"].quantize.embedding.weight.normal_()
        for name, weight in [
            *parts["transformer"].named_parameters(),
            *parts["text_encoder"].named_parameters(),
        ]:
            if weight.ndim > 1 and "norm" not in name:
                weight.mul_(3)
    for name, part in parts.items():
        save_quietly(part, folder / name)
    index = {
        "_class_name": "AmusedPipeline",
        "_diffusers_version": "0.25.0.dev0",
        "tokenizer": ["transformers", "CLIPTokenizer"],
    }
    index |= {
        n: ["transformers" if n == "text_encoder" else "diffusers", type(p).__name__]
        for n, p in parts.items()
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
