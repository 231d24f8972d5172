"""Texts and bytes of tokens: those of an answer join to its text, and no two tokens are alike."""

from __future__ import annotations

from itertools import pairwise

import pytest
from language_models import CHAT, byte_tokenizer, save
from tokenizer_kinds import (
    TEXTS,
    byte_level,
    byte_level_with_added,
    fallback,
    metaspace,
    word_pieces,
)

import gen
from gen.core.logprobs import TokenLogprob
from gen.pipeline.logprobs import with_texts
from gen.serve.api.texts import Chats, Completions
from gen.tokenizers.text.hf_text import HFText

KINDS = {
    "bytes": byte_level,
    "bytes and added tokens": byte_level_with_added,
    "sentencepiece": fallback,
    "metaspaces": metaspace,
    "word pieces": word_pieces,
    "word pieces that are cleaned up": lambda: word_pieces(cleanup=True),
    "bytes of a chat": byte_tokenizer,
}
WORDS = ["two tabs , caf", "tablets", "two"]  # which word pieces know
CHARACTERS = ["\N{GRINNING FACE}", "東京 🙂", "naïve café", "a\u0301b", "🙂🙂 x"]


def row_of(frontend: HFText, ids: list[int], top: list[int] | None = None, given: int = 0):
    """Log-probabilities of an item whose first tokens were given."""
    every = tuple((i, -1.0 - n) for n, i in enumerate(top or ()))
    row = [TokenLogprob(i, -1.0, every) for i in ids]
    return with_texts([[None] * given + row[given:]], frontend)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_join_to_the_text_and_offsets_are_places_in_it(kind):
    tokenizer = KINDS[kind]()
    frontend, tested = HFText(tokenizer, len(tokenizer) + 3), 0
    for text in WORDS if "pieces" in kind else [*TEXTS, *CHARACTERS]:
        ids = frontend.ids(text)
        if {tokenizer.convert_tokens_to_ids(t) for t in ("<unk>", "[UNK]")} & set(ids):
            continue  # what the vocabulary has no token for
        tested += 1
        decoded = frontend.text(ids)
        row = row_of(frontend, ids)
        cleaned = b"".join(t.text_bytes or b"" for t in row)
        if "cleaned" not in kind:
            assert cleaned.decode() == decoded
        said = Completions().logprobs(row)
        bounds = [*said["text_offset"], len(cleaned.decode())]
        assert bounds == sorted(bounds)
        for token, (a, b) in zip(row, pairwise(bounds), strict=True):
            if token.text_bytes is not None and not token.text.startswith("bytes:"):
                assert cleaned.decode()[a:b] == token.text
        chat = Chats().logprobs(row)["content"]
        assert b"".join(bytes(t["bytes"]) for t in chat) == cleaned
    assert tested >= 2


@pytest.mark.parametrize("character", CHARACTERS)
@pytest.mark.parametrize("kind", ["bytes of a chat", "sentencepiece"])
def test_parts_of_a_character_are_spelt_by_their_bytes(kind, character):
    frontend = HFText(KINDS[kind]())
    row = row_of(frontend, frontend.ids(character))
    assert b"".join(t.text_bytes for t in row).decode() == character
    parts = [t for t in row if not t.text_bytes.isascii() and len(t.text_bytes) == 1]
    for token in parts:
        assert token.text == f"bytes:\\x{token.text_bytes[0]:02x}" and "\ufffd" not in token.text


def test_a_space_of_sentencepiece_stays_but_before_the_first_token():
    tokenizer = fallback()
    frontend, ids = HFText(tokenizer), tokenizer.convert_tokens_to_ids(["▁a", "▁a"])
    assert [t.text for t in row_of(frontend, ids)] == ["a", " a"]
    assert [t.text for t in row_of(frontend, ids, given=1)[1:]] == [" a"]
    end = frontend.ends[0]
    assert [t.text for t in row_of(frontend, [end, *ids])] == ["<end>", "a", " a"]


def test_special_tokens_and_ids_without_tokens_are_apart():
    tokenizer = byte_level()
    frontend = HFText(tokenizer, len(tokenizer) + 3)
    size, end = len(tokenizer), frontend.ends[0]
    row = row_of(frontend, [end, size, size + 1], [end, size, size + 1, size + 2])
    assert [t.text for t in row] == ["<end>", f"token_id:{size}", f"token_id:{size + 1}"]
    assert [t.text_bytes for t in row] == [None] * 3
    assert all(len(x) == 4 for x in Completions().logprobs(row)["top_logprobs"])
    assert Completions().logprobs(row)["text_offset"] == [0, 0, 0]
    assert Chats().logprobs(row)["content"][0]["bytes"] == list(b"<end>")


@pytest.mark.parametrize("drawn", range(3))
def test_equal_texts_of_several_tokens_stay_apart(drawn):
    tokenizer = byte_level_with_added()
    twins = [tokenizer.convert_tokens_to_ids(t) for t in ("<tool call>",)]
    frontend = HFText(tokenizer, len(tokenizer))
    first = twins[0]
    texts = {first: "same", first - 1: "same", first - 2: "same"}

    class Twins(HFText):
        def token_text(self, token, is_first=False):
            return texts[token], texts[token].encode()

    ids = list(texts)
    row = row_of(Twins(tokenizer, frontend.size), [ids[drawn]], ids)
    (found,) = Completions().logprobs(row)["top_logprobs"]
    assert len(found) == 3 and found["same"] == -1.0 - drawn
    assert set(found) == {"same", *(f"token_id:{i}" for i in ids if i != ids[drawn])}
    assert len(Chats().logprobs(row)["content"][0]["top_logprobs"]) == 3


def test_offsets_begin_behind_what_was_given():
    frontend = HFText(byte_level())
    row = row_of(frontend, frontend.ids("ab cd"), given=1)
    first = frontend.text(frontend.ids("ab cd")[:1])
    assert Completions().logprobs(row, len(first))["text_offset"][0] == len(first)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    from served import serving

    folder = save(tmp_path_factory.mktemp("texts") / "llama", seed=2, template=CHAT)
    pipe = gen.load("text", model=folder, device="cpu")
    with serving(models={"m": pipe}) as server:
        yield server


@pytest.mark.parametrize("character", CHARACTERS[:3])
def test_a_chat_returns_the_bytes_of_its_answer(served, character):
    body = {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 30,
        "structured": {"choice": [character]}, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    status, answer, _ = served.ask("/v1/chat/completions", body)
    assert status == 200, answer
    choice = answer["choices"][0]
    found = [t["bytes"] for t in choice["logprobs"]["content"]][: len(character.encode())]
    assert b"".join(map(bytes, found)).decode() == choice["message"]["content"] == character


@pytest.mark.parametrize("seed", range(3))
def test_a_completion_returns_as_many_tokens_as_asked_for(served, seed):
    body = {
        "model": "m", "prompt": "hi", "max_tokens": 20, "logprobs": 5, "temperature": 2,
        "seed": seed,
    }  # fmt: skip
    status, answer, _ = served.ask("/v1/completions", body)
    assert status == 200, answer
    said = answer["choices"][0]["logprobs"]
    assert [len(t) for t in said["top_logprobs"]] == [5] * len(said["tokens"])
    text, offsets = answer["choices"][0]["text"], said["text_offset"]
    for token, at in zip(said["tokens"], offsets, strict=True):
        if not token.startswith(("bytes:", "<", "token_id:")):
            assert text[at : at + len(token)] == token
