"""Tiny LlamaGen checkpoints in the published layout."""

from __future__ import annotations

import torch
from published import save_quietly, tiny_tokenizer
from tiny_llamagen_vq import STRIDE, vq_weights
from torch import Tensor

CODES, DIM, LAYERS, HEADS_OF, CLASSES, POSITIONS, WIDTH = 24, 48, 2, 4, 10, 7, 16


ROWS, COLUMNS = 3, 4


OPTIONS = dict(dtype="float64", heads=HEADS_OF, height=ROWS * STRIDE, width=COLUMNS * STRIDE)


def ar_weights(
    text: bool = False, kv: int = HEADS_OF, codes: int = CODES, hidden: int = 64, seed: int = 5
) -> dict[str, Tensor]:
    """Random weights under the published keys."""
    noise = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(shape, generator=noise, dtype=torch.float64) / shape[-1] ** 0.5

    out = {
        "tok_embeddings.weight": 4 * rand(codes, DIM),
        "output.weight": 2 * rand(codes, DIM),
        "norm.weight": 1 + rand(DIM),
    }
    if text:
        out |= {
            "cls_embedding.cap_proj.fc1.weight": 4 * rand(DIM, WIDTH),
            "cls_embedding.cap_proj.fc2.weight": 4 * rand(DIM, DIM),
            "cls_embedding.uncond_embedding": 4 * rand(POSITIONS, WIDTH),
        }
    else:
        out["cls_embedding.embedding_table.weight"] = 4 * rand(CLASSES + 1, DIM)
    for n in range(LAYERS):
        out |= {
            f"layers.{n}.{k}.weight": v
            for k, v in {
                "attention.wqkv": 2 * rand((HEADS_OF + 2 * kv) * DIM // HEADS_OF, DIM),
                "attention.wo": rand(DIM, DIM),
                "feed_forward.w1": rand(hidden, DIM),
                "feed_forward.w3": rand(hidden, DIM),
                "feed_forward.w2": rand(DIM, hidden),
                "attention_norm": 1 + rand(DIM),
                "ffn_norm": 1 + rand(DIM),
            }.items()
        }
    return out


def saved(folder, w, name="c2i_B.pt", wrapper="model"):
    torch.save({wrapper: w, "steps": 7} if wrapper else w, folder / name)
    torch.save(
        {"model": vq_weights((32, 32, 32), depth=1, latent=8)}, folder / f"vq_ds16_{name[:3]}.pt"
    )
    return folder


def saved_with_text(folder):
    from transformers import T5Config, T5ForConditionalGeneration

    path = saved(folder, ar_weights(text=True), "t2i_XL_stage1.pt")
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64,
        d_model=WIDTH,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=2,
    )
    model = T5ForConditionalGeneration(config).double().eval()  # as published: with its decoder
    model.shared.weight.data *= 5
    save_quietly(model, path / "flan-t5-xl")
    tiny_tokenizer().save_pretrained(path / "flan-t5-xl")
    return path
