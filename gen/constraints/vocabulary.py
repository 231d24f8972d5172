"""Bytes of every token of a Hugging Face tokenizer, read from its decoder.

Constraints are about bytes of the text, models about token ids. What a token writes follows from
the decoder of the tokenizer: byte-level alphabets (GPT-2, Llama 3, Qwen), metaspaces with byte
fallback (sentencepiece), word pieces, or words with spaces between them. Tokenizers of Python code
alone, and decoders that look at more than one token, are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from gen.contracts.vocabulary import Vocabulary
from gen.core.errors import GenError
from gen.core.tool_calls import MARKERS

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
PROBES = 256  # pairs of tokens that are decoded to see that the table is right

Writer = Callable[[str, bool], bytes]  # token as the vocabulary spells it, is first -> bytes


def huggingface_vocabulary(
    tokenizer: Any, vocab_size: int, ends: Collection[int] = ()
) -> Vocabulary:
    """Return what every token of a tokenizer writes into a decoded text.

    Args:
        tokenizer: tokenizer of transformers, one of the ``tokenizers`` library inside.
        vocab_size: V of the model, at least that of the tokenizer.
        ends: eos token ids, which are no text.

    Raises:
        GenError: the tokenizer has Python code only, its decoder is not known, or its decoded texts
            are not the bytes of their tokens one after the other.
    """
    vocabulary = token_table(tokenizer, vocab_size, ends)
    _require_decoded(tokenizer, vocabulary, type(tokenizer).__name__)
    return vocabulary


def token_table(tokenizer: Any, vocab_size: int, ends: Collection[int] = ()) -> Vocabulary:
    """Return what the decoder of a tokenizer writes for every token; arguments and errors as of
    ``huggingface_vocabulary``, but texts are not decoded."""
    name = type(tokenizer).__name__
    # a foreign class: tokenizers of Python code have no backend
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise GenError(
            f"tokenizer {name} has no tokenizer.json; expected one, which says what its tokens"
            " write"
        )
    decoder = json.loads(backend.to_str())["decoder"]
    write = _writer(decoder, name)
    hidden = {*special_ids(tokenizer), *ends}
    size = len(tokenizer)
    spelt = tokenizer.convert_ids_to_tokens(list(range(size)))
    is_text = [text is not None and i not in hidden for i, text in enumerate(spelt)]
    later = [write(t, False) or None if ok else None for t, ok in zip(spelt, is_text, strict=True)]
    first = [
        None if bytes_ is None else write(t, True) for t, bytes_ in zip(spelt, later, strict=True)
    ]
    surplus = [None] * (vocab_size - size)
    return Vocabulary((*first, *surplus), (*later, *surplus))


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of tokens that are no text: special ones, but for the markers of calls."""
    added = tokenizer.added_tokens_decoder
    special = {i for i, token in added.items() if token.special} | {*tokenizer.all_special_ids}
    return {i for i in special if str(added.get(i)) not in MARKERS}


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode token ids without special tokens, but with the markers of calls."""
    added = tokenizer.added_tokens_decoder
    if not any(i in added and str(added[i]) in MARKERS for i in ids):
        return tokenizer.decode(ids, skip_special_tokens=True)
    hidden = special_ids(tokenizer)
    return tokenizer.decode([i for i in ids if i not in hidden])


def _writer(decoder: dict[str, Any] | None, name: str) -> Writer:
    """Return the function that a decoder applies to each token.

    Raises:
        GenError: the decoder is not known, or looks at more than one token.
    """
    if decoder is None:  # the library joins the tokens with spaces
        return lambda token, is_first: (token if is_first else " " + token).encode()
    kind = decoder["type"]
    if kind == "ByteLevel":
        return lambda token, is_first: _byte_level(token)
    if kind == "Metaspace":
        space, drops = decoder["replacement"], decoder.get("prepend_scheme", "always") != "never"
        return lambda token, is_first: token.replace(
            space, "" if is_first and drops else " "
        ).encode()
    if kind == "WordPiece" and not decoder["cleanup"]:
        prefix = decoder["prefix"]
        return lambda token, is_first: (
            token if is_first else token.removeprefix(prefix) if token.startswith(prefix)
            else " " + token
        ).encode()  # fmt: skip
    steps = decoder["decoders"] if kind == "Sequence" else [decoder]
    if [s["type"] for s in steps] == ["ByteLevel"]:
        return lambda token, is_first: _byte_level(token)
    return _fused(steps, name)


def _fused(steps: list[dict[str, Any]], name: str) -> Writer:
    """Return the function of sentencepiece's steps: replace, byte fallback, fuse, strip."""
    replaced: list[tuple[str, str]] = []
    has_bytes, is_fused, stripped = False, False, ""
    for step in steps:
        kind, pattern = step["type"], step.get("pattern", {})
        if kind == "Replace" and "String" in pattern and not is_fused:
            replaced.append((pattern["String"], step["content"]))
        elif kind == "ByteFallback" and not is_fused:
            has_bytes = True
        elif kind == "Fuse":
            is_fused = True
        elif kind == "Strip" and is_fused and (step["start"], step["stop"]) == (1, 0):
            stripped = step["content"]
        else:
            raise GenError(
                f"the decoder of tokenizer {name} has the step {json.dumps(step)}; expected"
                " ByteLevel, Metaspace, WordPiece without cleanup, or Replace, ByteFallback, Fuse"
                " and Strip of one character at the start"
            )

    def write(token: str, is_first: bool) -> bytes:
        for old, new in replaced:
            token = token.replace(old, new)
        byte = BYTE_TOKEN.fullmatch(token) if has_bytes else None
        written = bytes([int(byte[1], 16)]) if byte else token.encode()
        return written.removeprefix(stripped.encode()) if is_first else written

    return write


def _byte_level(token: str) -> bytes:
    """Return the bytes of a token of GPT-2's alphabet; other tokens stand for themselves."""
    known = [_BYTE_OF.get(letter) for letter in token]
    return token.encode() if None in known else bytes(b for b in known if b is not None)


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each letter of GPT-2's alphabet.

    Printable characters of Latin-1 stand for themselves, the other bytes are letters from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _require_decoded(tokenizer: Any, vocabulary: Vocabulary, name: str) -> None:
    """Refuse a tokenizer whose decoded texts differ from the bytes of their tokens.

    Raises:
        GenError: two tokens are decoded to another text.
    """
    known = [i for i, part in enumerate(vocabulary.later) if part is not None]
    marks = [i for i in known if (vocabulary.later[i] or b"").strip() in (b".", b",", b"?", b"!")]
    chosen = known[:: max(1, len(known) // PROBES)]
    partners = (marks or known)[:8]
    for n, token in enumerate(chosen):
        ids = [token, partners[n % len(partners)]]
        try:
            expected = vocabulary.join(ids).decode()
        except UnicodeDecodeError:  # parts of characters are written as replacement characters
            continue
        text = decoded(tokenizer, ids)
        if text != expected:
            raise GenError(
                f"tokenizer {name} decodes tokens {ids} as {text!r}; expected {expected!r}, what"
                " the tokens write one after the other (clean_up_tokenization_spaces is"
                f" {tokenizer.clean_up_tokenization_spaces})"
            )
