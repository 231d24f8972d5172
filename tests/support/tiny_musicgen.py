"""Tiny MusicGen checkpoints in the published layout."""

from __future__ import annotations

import torch

Q, CODES, T, RATE = 3, 64, 9, 8000


SENTENCE = "a slow fast loud soft song with drums guitar piano and bass in the rain"


WORDS = ["<pad>", "</s>", "<unk>", *SENTENCE.split()]


def tokenizer(folder):
    from transformers import PreTrainedTokenizerFast

    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def tiny(seed=0, **decoder):
    from transformers import (
        EncodecConfig,
        MusicgenConfig,
        MusicgenDecoderConfig,
        MusicgenForConditionalGeneration,
        T5Config,
    )

    torch.manual_seed(seed)
    text = T5Config(
        vocab_size=64,
        d_model=24,
        d_kv=16,
        d_ff=64,
        num_layers=1,
        num_heads=2,
        pad_token_id=0,
        eos_token_id=1,
    )
    audio = EncodecConfig(
        target_bandwidths=[1.2 * Q + 0.1],
        sampling_rate=RATE,
        hidden_size=16,
        num_filters=4,
        upsampling_ratios=[5, 4, 2],
        codebook_size=CODES,
        num_lstm_layers=1,
    )
    own = dict(
        vocab_size=CODES,
        max_position_embeddings=64,
        num_hidden_layers=2,
        ffn_dim=64,
        num_attention_heads=2,
        hidden_size=32,
        num_codebooks=Q,
        audio_channels=1,
        pad_token_id=CODES,
        bos_token_id=CODES,
    )
    model = MusicgenForConditionalGeneration(
        MusicgenConfig(
            text_encoder=text, audio_encoder=audio, decoder=MusicgenDecoderConfig(**own | decoder)
        )
    )
    for layer in model.audio_encoder.quantizer.layers:
        layer.codebook.embed.normal_()
    for part, spread in ((model.decoder, 0.3), (model.text_encoder, 1.0)):
        for name, weight in part.named_parameters():
            if weight.ndim > 1:
                weight.data.normal_(std=2.0 if "embed_tokens" in name else spread)
    for name in ("decoder_start_token_id", "pad_token_id", "bos_token_id"):
        setattr(model.generation_config, name, CODES)
    model.generation_config.guidance_scale = 2.5
    return model.eval()
