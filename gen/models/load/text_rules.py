"""Rules of tokenizers, judged before they run: which are known to take time and memory in
proportion to the text, whatever the text is.

A tokenizer of a model folder is a program: regular expressions that backtrack without end, and
replacements that multiply a text. Those of nearly all published models are made of a few parts that
cannot. They run in this process; any other runs in one that can be ended
(``gen.models.load.bounded_text``), which takes longer and keeps the vocabulary twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

GROWTH = 16.0  # characters that rules may make of one
MOST = 1000  # characters of a word or token that a model looks at together
LINEAR = {  # parts without settings that could make them slow or their results long
    "BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "StripAccents", "Strip",
    "ByteLevel", "Metaspace", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Punctuation",
    "Digits", "CharDelimiterSplit", "UnicodeScripts", "BertProcessing", "RobertaProcessing",
    "ByteFallback", "Fuse",
}  # fmt: skip
PARTS = ("normalizers", "pretokenizers", "decoders", "processors")
# of published models: alternatives consume what they looked at, so that no character is read often
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
    r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",  # CLIP
    rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",  # Llama 3
    rf"{_WORDS}|\p{{N}}|{_REST}",  # Qwen 2
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"{_ENDINGS}|\p{{N}}{{1,3}}|{_SIGNS}",  # GPT-4o
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"|{_SIGNS}",  # Mistral
    r" ?[^(\s|[.,!?…。，、।۔،])]+",  # noqa: RUF001 (BLOOM)
}
_CLASS = r"\\[pP]\{\^?\w+\}|\\[dDsSwWnrt.\-\\/]"
_ATOM = rf"(?:{_CLASS}|\[\^?(?:[^\[\]\\&]|{_CLASS})+\]|[^\\\[\](){{}}|*+?.^$])"
_COUNT = r"(?:[*+?]|\{\d{1,3}(?:,(?:\d{1,3})?)?\})"
# characters, of which the last alone may repeat: what is read is consumed
_PLAIN = re.compile(rf"{_ATOM}+{_COUNT}?(?:\|{_ATOM}+{_COUNT}?)*")


def risk_of(said: Mapping[str, Any]) -> str | None:
    """Return a part of a tokenizer that may take long or make a text long; None where every one is
    known not to.

    Args:
        said: content of a ``tokenizer.json``; the vocabulary may be left out.
    """
    model = said.get("model")
    if isinstance(model, Mapping):
        longest = model.get("max_input_chars_per_word")
        if isinstance(longest, int) and longest > MOST:
            return f"model.max_input_chars_per_word of {longest}"
        if not _has_unknown(model):
            return "model that fails for texts outside of its vocabulary"
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        growth = 1.0
        for part in _parts(said.get(name)):
            kind = part.get("type")
            if kind in LINEAR:
                continue
            grows = _growth(part)
            if grows is None:
                return f"{name} {kind}"
            growth *= grows
            if growth > GROWTH:
                return f"{name} that makes {growth:g} characters of one"
    return None


def parts_of(backend: Any) -> dict[str, Any]:
    """Return the parts of a tokenizer as its ``tokenizer.json`` states them, without vocabulary.

    Args:
        backend: tokenizer of the library tokenizers.
    """
    found: dict[str, Any] = {}
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        part = getattr(backend, name)
        found[name] = None if part is None else json.loads(part.__getstate__())
    model = backend.model
    unknown = getattr(model, "unk_token", None)
    found["model"] = {
        "type": type(model).__name__,
        "max_input_chars_per_word": getattr(model, "max_input_chars_per_word", None),
        "unk_token": unknown,
        "unk_id": getattr(model, "unk_id", None),
        "vocab": {} if unknown is None else {unknown: model.token_to_id(unknown)},
    }
    return found


def _has_unknown(model: Mapping[str, Any]) -> bool:
    """Return True for a model that has a token for texts outside of its vocabulary, or needs
    none."""
    kind = model.get("type")
    if kind == "Unigram":
        return model.get("unk_id") is not None
    if kind in ("WordLevel", "WordPiece"):
        vocab, unknown = model.get("vocab"), model.get("unk_token")
        return isinstance(vocab, Mapping) and vocab.get(unknown) is not None
    return True


def _parts(said: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a sequence, and of those in it."""
    if said is None:
        return
    if not isinstance(said, Mapping):
        yield {}
        return
    inner = next(
        (said[name] for name in PARTS if said.get("type") == "Sequence" and name in said), None
    )
    if inner is None:
        yield said
    for part in inner if isinstance(inner, list) else ():
        yield from _parts(part)


def _growth(part: Mapping[str, Any]) -> float | None:
    """Return how many characters a part with settings makes of one; None where it is not known to
    take time and memory in proportion to the text."""
    kind = part.get("type")
    if kind == "Split" and _is_linear(part.get("pattern")):
        return 1.0
    if kind == "Replace" and _is_linear(part.get("pattern")):
        found = part["pattern"].get("String") or ""
        return max(1.0, len(str(part.get("content"))) / max(1, len(found)) + (not found))
    if kind == "Prepend" and len(str(part.get("prepend"))) <= MOST:
        return 1.0
    if kind == "TemplateProcessing":
        rows = [part.get(name) for name in ("single", "pair")]
        return 1.0 if all(isinstance(row, list) and len(row) <= MOST for row in rows) else None
    if kind in ("WordPiece", "BPEDecoder", "CTC"):
        texts = [v for v in part.values() if isinstance(v, str)]
        return 1.0 if max(map(len, texts)) <= 32 else None
    return None


def _is_linear(pattern: Any) -> bool:
    """Return True for a text, and for a regular expression that reads every character a bounded
    number of times."""
    if not isinstance(pattern, Mapping) or len(pattern) != 1:
        return False
    if isinstance(pattern.get("String"), str):
        return True
    regex = pattern.get("Regex")
    return isinstance(regex, str) and (regex in PATTERNS or _PLAIN.fullmatch(regex) is not None)
