"""Tiny checkpoints that a `gen.json` describes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from published import save_quietly

CODES, VOCAB = 32, 48


# ids in an order of their own: the codes stand at 40, 39, ..., 9
IMAGE = {
    "modality": "image",
    "protocol": "masked",
    "grid": [3, 4],
    "codes": list(range(40, 8, -1)),
    "mask_token_id": 8,
    "condition": {"classes": {"start": 41, "size": 5}, "unconditional": 46},
    "frontend": {"folder": "vq", "tokenizer": "vq"},
    "sampling": {"guidance_scale": 1.5},
}


VIDEO = {
    "modality": "video",
    "protocol": "causal",
    "grid": [2, 2, 2],
    "codes": {"start": 0, "size": CODES},
    "begin": [47],
    "frontend": {"folder": "codec", "tokenizer": "video_vq"},
    "fps": 8,
}


def network(protocol: str):
    from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    sizes = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=20,
        initializer_range=0.4,
        pad_token_id=0,
    )
    if protocol == "masked":
        return BertForMaskedLM(
            BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        ).eval()
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2)).eval()


def frontend(modality: str):
    import diffusers
    from transformers import Emu3VQVAE, Emu3VQVAEConfig

    torch.manual_seed(4)
    if modality == "video":
        return Emu3VQVAE(
            Emu3VQVAEConfig(
                codebook_size=CODES,
                embed_dim=4,
                latent_channels=4,
                temporal_downsample_factor=4,
                base_channels=32,
                channel_multiplier=[1, 2],
                num_res_blocks=1,
                attn_resolutions=[1],
                hidden_size=64,
                num_attention_heads=1,
            )
        )
    model = diffusers.VQModel(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(32, 32),
        layers_per_block=1,
        latent_channels=8,
        num_vq_embeddings=CODES,
        vq_embed_dim=8,
        mid_block_add_attention=False,
    )
    torch.nn.init.normal_(model.quantize.embedding.weight)
    return model


def written(path: Path, said: dict) -> Path:
    save_quietly(network(said["protocol"]), path)
    save_quietly(frontend(said["modality"]), path / said["frontend"]["folder"])
    (path / "gen.json").write_text(json.dumps(said))
    return path
