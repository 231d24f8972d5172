"""Bytes of tokens: those of an encoded text, one after the other, are the text in UTF-8."""

from __future__ import annotations

import pytest
import torch
from tokenizer_kinds import (
    TEXTS,
    byte_level,
    byte_level_with_added,
    fallback,
    metaspace,
    word_pieces,
)

from gen.contracts.frontend import TokenFrontend, Vocabulary
from gen.core.errors import GenError
from gen.tokenizers.text.hf_text import HFText
from gen.tokenizers.text.words import TextWords
from tokenizers import (
    decoders,
)


def joined(tokenizer, text: str) -> tuple[Vocabulary, list[int]]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return HFText(tokenizer).vocabulary(), ids


@pytest.mark.parametrize("make", [byte_level, byte_level_with_added, fallback])
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_the_tokens_are_the_text(make, text):
    vocabulary, ids = joined(make(), text)
    assert vocabulary.join(ids) == text.encode()


def test_bytes_of_added_tokens_with_spaces_are_their_own():
    vocabulary, ids = joined(byte_level_with_added(), "a <tool call> b")
    assert vocabulary.join(ids) == b"a <tool call> b"


def test_metaspaces_of_a_unigram_tokenizer_are_spaces():
    tokenizer = metaspace()
    for text in TEXTS:
        vocabulary, ids = joined(tokenizer, text)
        assert vocabulary.join(ids) == tokenizer.decode(ids).encode()
    assert vocabulary.join(joined(tokenizer, "café 東京")[1]) == "café 東京".encode()


def test_word_pieces_have_spaces_before_words_only():
    vocabulary, ids = joined(word_pieces(), "two tablets cafés")
    assert vocabulary.join(ids) == "two tablets cafés".encode()


def test_words_have_spaces_between_them():
    frontend = TextWords.of(["put", "the", "ring", "here"], 8)
    ids = frontend.ids("put the ring")
    assert frontend.vocabulary().join(ids) == b"put the ring"
    assert HFText(frontend.tokenizer).vocabulary().join(ids) == b"put the ring"
    codes = torch.tensor([[ids + [frontend.eos_token_id]]])
    assert frontend.postprocess(frontend.decode(codes)[0]) == "put the ring"


def test_a_space_before_the_first_token_is_a_difference():
    """Control: a table without the bytes of first tokens writes a text that nobody encoded."""
    vocabulary, ids = joined(fallback(), "two")
    wrong = Vocabulary(vocabulary.later, vocabulary.later)
    assert vocabulary.join(ids) == b"two"
    assert wrong.join(ids) == b" two"


def test_special_and_missing_tokens_are_no_text():
    tokenizer = byte_level()
    vocabulary = HFText(tokenizer, vocab_size=len(tokenizer) + 5).vocabulary()
    assert len(vocabulary) == len(tokenizer) + 5
    assert {i for i, part in enumerate(vocabulary.later) if part is None} == {
        *tokenizer.all_special_ids,
        *range(len(tokenizer), len(tokenizer) + 5),
    }
    with pytest.raises(GenError, match=f"token {tokenizer.eos_token_id} is special"):
        vocabulary.join([tokenizer.eos_token_id])


def test_every_byte_has_a_token_in_byte_level_vocabularies():
    vocabulary = HFText(byte_level()).vocabulary()
    assert {bytes([b]) for b in range(256)} <= set(vocabulary.later)


def test_decoders_that_rewrite_a_text_are_refused():
    with pytest.raises(GenError, match="WordPiece"):
        HFText(word_pieces(cleanup=True)).vocabulary()
    tokenizer = word_pieces()
    tokenizer.clean_up_tokenization_spaces = True
    with pytest.raises(GenError, match=r"decodes tokens .*clean_up_tokenization_spaces is True"):
        HFText(tokenizer).vocabulary()


def test_decoders_that_are_not_known_are_refused_by_name():
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.decoder = decoders.CTC()
    with pytest.raises(GenError, match="CTC"):
        HFText(tokenizer).vocabulary()


def test_frontends_of_other_media_have_no_vocabulary():
    class Pixels(TokenFrontend):
        preprocess = encode = decode = postprocess = grid_for = None
        codebooks = fingerprint = None

    assert Pixels().vocabulary() is None
