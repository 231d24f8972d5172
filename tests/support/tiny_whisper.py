"""Tiny Whisper checkpoints in the published layout."""

from __future__ import annotations

import json

import numpy as np
import torch
from published import save_quietly, tiny_tokenizer

from gen.media.audio import write_wav

SIZE, RATE, SECONDS, POSITIONS, END, START = 64, 16000, 1, 40, 2, 53
LANGUAGES = {"<|en|>": 54, "<|de|>": 55, "<|fr|>": 56}
TASKS = {"translate": 57, "transcribe": 58}
PREVIOUS, NO_TIMESTAMPS = 59, 60  # ids behind the last one are times
SPECIAL = ["<|startoftranscript|>", *LANGUAGES, "<|translate|>", "<|transcribe|>"]
SPECIAL += ["<|startofprev|>", "<|notimestamps|>", *(f"<|{t / 50:.2f}|>" for t in range(3))]
SUPPRESSED, SUPPRESSED_FIRST = [0, 1, 3, 20, 21, *range(START, SIZE)], [END, 30]


def tiny(seed=0, multilingual=True, **more):
    """A model whose random weights hear their input."""
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(seed)
    own = dict(
        vocab_size=SIZE,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=50 * SECONDS,
        max_target_positions=POSITIONS,
        pad_token_id=0,
        bos_token_id=END,
        eos_token_id=END,
        decoder_start_token_id=START,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(WhisperConfig(**own | more)).eval()
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            weight.data.normal_(std=0.3 if "embed_tokens" in name else 0.6)
    known = dict(lang_to_id=LANGUAGES, task_to_id=TASKS) if multilingual else {}
    model.generation_config = GenerationConfig(
        pad_token_id=0,
        bos_token_id=END,
        eos_token_id=END,
        decoder_start_token_id=START,
        suppress_tokens=SUPPRESSED,
        begin_suppress_tokens=SUPPRESSED_FIRST,
        no_timestamps_token_id=NO_TIMESTAMPS,
        prev_sot_token_id=PREVIOUS,
        is_multilingual=multilingual,
        **known,
    )
    return model


def written(path, **more):
    from transformers import WhisperFeatureExtractor

    save_quietly(tiny(**more), path)
    words = tiny_tokenizer(SIZE)
    vocabulary = words.get_vocab()
    names = sorted(vocabulary, key=vocabulary.get)[START : START + len(SPECIAL)]
    save_quietly(_renamed(words, dict(zip(names, SPECIAL, strict=True))), path)
    save_quietly(
        WhisperFeatureExtractor(feature_size=8, sampling_rate=RATE, chunk_length=SECONDS), path
    )
    return path


def wave(samples, seed):
    """Noise that changes, float32 [n]."""
    rng = np.random.default_rng(seed)
    loudness = np.abs(np.sin(np.arange(samples) * rng.uniform(0.0005, 0.003)))
    return (0.3 * loudness * rng.standard_normal(samples)).astype(np.float32)


def sounds(folder, rate=RATE):
    """Two WAV files of unequal length in a folder."""
    paths = [folder / "a.wav", folder / "b.wav"]
    for number, path in enumerate(paths):
        write_wav(path, wave(4000 + 9000 * number, number), rate)
    return paths


def _renamed(tokenizer, names):
    """The tokenizer with some words as special tokens of other names."""
    from transformers import PreTrainedTokenizerFast

    from tokenizers import Tokenizer

    said = json.loads(tokenizer.backend_tokenizer.to_str())
    table = said["model"]["vocab"]
    said["model"]["vocab"] = {names.get(word, word): number for word, number in table.items()}
    inner = Tokenizer.from_str(json.dumps(said))
    inner.add_special_tokens(list(names.values()))
    named = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, **named, additional_special_tokens=list(names.values())
    )
