"""Small tokenizers of every kind of decoder. Not a test."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

TEXTS = [
    '{"name": "Zoë", "price": 12.50, "tags": ["a", "b"]}',
    " two  spaces, and a tab\t!",
    "naïve café 東京 🙂 don't",
    "x",
]
SPECIAL = ["<pad>", "<end>"]


def fast(inner: Tokenizer, **options) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<end>", pad_token="<pad>", **options
    )


def byte_level() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(TEXTS * 4, trainer)
    return fast(inner)


def byte_level_with_added() -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False, special=False)])
    return tokenizer


def fallback(pre_tokenizer=None, decoder=None) -> PreTrainedTokenizerFast:
    """Sentencepiece's steps: a space before the text, metaspaces, bytes of unknown characters."""
    pieces = ["<unk>", *SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁▁"]
    pieces += [f"▁{c}" for c in "abcnptwx{"] + list("abcdefghijklmnopqrstuvwxyz{}[]:,.0125\"'!")
    inner = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return fast(inner, unk_token="<unk>")


def metaspace() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.Unigram())
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    letters = sorted(set("".join(TEXTS)))
    trainer = trainers.UnigramTrainer(
        vocab_size=120,
        special_tokens=[*SPECIAL, "<unk>"],
        unk_token="<unk>",
        initial_alphabet=letters,
        show_progress=False,
    )
    inner.train_from_iterator(TEXTS * 4, trainer)
    return fast(inner)


def word_pieces(cleanup: bool = False) -> PreTrainedTokenizerFast:
    pieces = ["[UNK]", *SPECIAL, "two", "tab", "##s", "##let", ".", ",", "##.", "caf", "##é"]
    inner = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.WordPiece(cleanup=cleanup)
    return fast(inner)
