"""Tiny MusicGen Melody checkpoints in the published layout."""

from __future__ import annotations

import json

import tiny_musicgen
from published import save_quietly
from tiny_musicgen import CODES, RATE, Q, tokenizer

CHROMA = 7  # steps of a melody
PROCESSOR = {
    "feature_extractor_type": "MusicgenMelodyFeatureExtractor",
    "sampling_rate": RATE,
    "n_fft": 512,
    "hop_length": 128,
    "chunk_length": 1,
    "num_chroma": 12,
    "feature_size": 12,
}


def tiny(seed=0, num_codebooks=Q, **decoder):
    """A model whose random weights hear their input. Its text encoder and codec are MusicGen's."""
    from transformers import (
        MusicgenMelodyConfig,
        MusicgenMelodyDecoderConfig,
        MusicgenMelodyForConditionalGeneration,
    )

    parts = tiny_musicgen.tiny(seed).config
    own = dict(
        vocab_size=CODES,
        max_position_embeddings=64,
        num_hidden_layers=2,
        ffn_dim=64,
        num_attention_heads=2,
        hidden_size=32,
        num_codebooks=num_codebooks,
        audio_channels=1,
        pad_token_id=CODES,
        bos_token_id=CODES,
    )
    model = MusicgenMelodyForConditionalGeneration(
        MusicgenMelodyConfig(
            text_encoder=parts.text_encoder,
            audio_encoder=parts.audio_encoder,
            decoder=MusicgenMelodyDecoderConfig(**own | decoder),
            num_chroma=12,
            chroma_length=CHROMA,
        )
    )
    for layer in model.audio_encoder.quantizer.layers:
        layer.codebook.embed.normal_()
    for part, spread in ((model.decoder, 0.3), (model.text_encoder, 1.0)):
        for name, weight in part.named_parameters():
            if weight.ndim > 1:
                weight.data.normal_(std=2.0 if "embed_tokens" in name else spread)
    model.audio_enc_to_dec_proj.weight.data.normal_(std=2.0)
    for name in ("decoder_start_token_id", "pad_token_id", "bos_token_id"):
        setattr(model.generation_config, name, CODES)
    model.generation_config.guidance_scale = 2.5
    return model.eval()


def written(path, **more):
    save_quietly(tiny(**more), path)
    tokenizer(path)
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return path
