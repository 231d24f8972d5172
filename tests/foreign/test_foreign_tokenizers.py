"""Tokenizer files that somebody damaged or made to harm: each makes tokens, or is refused in one
sentence, within bounds of time and memory."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import pytest
from bounded import bounded
from byte_folders import byte_tokenizer, causal
from foreign import changed, require_held, texts_of

import gen
from gen.models.load import bounded_text, pretrained
from gen.models.load.bounded_text import BoundedTokenizer, bounded_tokenizer
from gen.models.load.text_rules import PATTERNS, parts_of, risk_of

PROMPT = "a" * 40 + "b aXa 12 \n\n" + " " * 200 + "!"
PATTERNS_TO_HARM = (
    "(a+)+$", "(a|a)*$", "(a*)*b", r"(\s*)*x", "(x+x+)+y", "(.*)*(.*)*z", "((a{1,9}){1,9}){1,9}$",
    "((a{1000}){1000}){1000}", "(" * 20_000, "a{99999}", "a{2147483647}", "(?<=a+)b", "(?i)" * 9999,
    r"(.)\1{9999}", "[" * 1000, "\\", "(?P<a>", r"\p{Nothing}", "(?=(a+))a*b\\1", "a" * 10**6, "",
    "\0", "(?R)", r"(?<n>a\g<n>?b)", "|" * 10_000, "(?:)" * 9999 + "+",
)  # fmt: skip
PLACES = ("split", "normalizer", "decoder")
VALUES = (
    None, True, -1, 0, 10**9, 10**30, 1.5, float("nan"), "", "x", [], [1], {}, {"a": 1}, [[]],
    "\ud800", "\0", [None] * 9, {"type": "Sequence"}, {"type": "Nothing"},
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = causal(tmp_path_factory.mktemp("model") / "good")
    texts_of(made)()  # what loading imports is imported once, before processes are forked
    return made


def sequence(kind: str, *parts: dict, own: dict | None = None) -> dict:
    name = {"normalizer": "normalizers", "split": "pretokenizers", "decoder": "decoders"}[kind]
    return {"type": "Sequence", name: [*parts, *([own] if own else [])]}


def replaces(pattern: dict, content: str) -> dict:
    return {"type": "Replace", "pattern": pattern, "content": content}


def with_pattern(said: dict, place: str, pattern: str) -> None:
    """Put a regular expression into a part of a tokenizer."""
    if place == "split":
        part = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
                "invert": False}  # fmt: skip
        said["pre_tokenizer"] = sequence("split", part, own=said["pre_tokenizer"])
    else:
        part = replaces({"Regex": pattern}, "c")
        said[place] = sequence(place, part, own=said[place])


def growing(times: int, content: str, pattern: dict):
    def change(said: dict) -> None:
        said["normalizer"] = sequence("normalizer", *[replaces(pattern, content)] * times)

    return change


def setting(*path, value):
    def change(said: dict) -> None:
        at = said
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return change


def charsmap(text: str):
    return setting("normalizer", value={"type": "Precompiled", "precompiled_charsmap": text})


def deep(levels: int) -> dict:
    found: dict = {"type": "Lowercase"}
    for _ in range(levels):
        found = {"type": "Sequence", "normalizers": [found]}
    return found


WORDS = {"a": 0, "b": 1}
PADDING = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
           "pad_token": "a"}  # fmt: skip
TOKEN = {"id": 5, "content": "a", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}  # fmt: skip
CHANGES = {
    "replace any by 1000, 4 times": growing(4, "a" * 1000, {"Regex": "."}),
    "replace a by 1000 a, 6 times": growing(6, "a" * 1000, {"String": "a"}),
    "replace nothing": growing(9, "ab", {"String": ""}),
    "prepend a million": setting(
        "normalizer", value={"type": "Prepend", "prepend": "a" * 10**6}
    ),
    "200 levels": setting("normalizer", value=deep(200)),
    "50 levels": setting("normalizer", value=deep(50)),
    "charsmap of nothing": charsmap(""),
    "charsmap of text": charsmap("AAECAwQFBgcICQ=="),
    "charsmap of a huge trie": charsmap("////fwAAAAA="),
    "charsmap of a bad trie": charsmap("CAAAAP//////////////////////////"),
    "charsmap that is no base64": charsmap("!!!"),
    "dropout": setting("model", "dropout", value=0.5),
    "dropout of nan": setting("model", "dropout", value=float("nan")),
    "id beyond the model": setting("model", "vocab", "a", value=10**6),
    "id of 2^32": setting("model", "vocab", "a", value=2**32),
    "id of 2^31": setting("model", "vocab", "a", value=2**31),
    "ids twice": setting("model", "vocab", "a", value=5),
    "no vocabulary": setting("model", "vocab", value={}),
    "merges of no tokens": setting("model", "merges", value=[["x", "nothing"]]),
    "merges of one": setting("model", "merges", value=[["x"]]),
    "merges of a million": setting("model", "merges", value=[["a", "b"]] * 10**5),
    "no model": setting("model", value={}),
    "words without unknown": setting(
        "model", value={"type": "WordLevel", "vocab": WORDS, "unk_token": "nothing"}
    ),
    "pieces without unknown": setting(
        "model", value={"type": "WordPiece", "vocab": WORDS, "unk_token": "nothing",
        "continuing_subword_prefix": "##", "max_input_chars_per_word": 10**9}
    ),
    "unigrams without unknown": setting(
        "model", value={"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None}
    ),
    "unigrams of an unknown unknown": setting(
        "model", value={"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 10**6}
    ),
    "unigrams of nan": setting(
        "model", value={"type": "Unigram", "vocab": [["a", float("nan")], ["b", 1e308]],
        "unk_id": 0}
    ),
    "unigrams of long tokens": setting(
        "model", value={"type": "Unigram", "vocab": [["a" * n, -1.0] for n in range(1, 1500)],
        "unk_id": 0}
    ),
    "padded to 10^9": setting("padding", value={"strategy": {"Fixed": 10**9}, **PADDING}),
    "padded to multiples of 0": setting(
        "padding", value={"strategy": "BatchLongest", **PADDING, "pad_to_multiple_of": 0}
    ),
    "truncated to 0": setting(
        "truncation", value={"direction": "Right", "max_length": 0, "strategy": "LongestFirst",
        "stride": 5}
    ),
    "added beyond": setting("added_tokens", value=[{**TOKEN, "id": 10**6}]),
    "added of nothing": setting("added_tokens", value=[{**TOKEN, "content": ""}]),
    "added twice": setting("added_tokens", value=[TOKEN, {**TOKEN, "id": 6}]),
    "added a thousand": setting(
        "added_tokens", value=[{**TOKEN, "id": n, "content": f"<{n}>"} for n in range(2000)]
    ),
    "template of a thousand": setting(
        "post_processor", value={"type": "TemplateProcessing", "single": [
        {"SpecialToken": {"id": "a", "type_id": 0}}] * 5000, "pair": [], "special_tokens": {
        "a": {"id": "a", "ids": [5] * 5000, "tokens": ["a"] * 5000}}}
    ),
    "template of unknown tokens": setting(
        "post_processor", value={"type": "TemplateProcessing", "single": [
        {"SpecialToken": {"id": "x", "type_id": 0}}], "pair": [], "special_tokens": {}}
    ),
    "bert without ids": setting(
        "post_processor", value={"type": "BertProcessing", "sep": ["x", 10**9], "cls": ["y", -1]}
    ),
    "decoder of a long prefix": setting(
        "decoder", value={"type": "WordPiece", "prefix": "a" * 10**6, "cleanup": True}
    ),
    "decoder that grows": setting(
        "decoder", value=sequence("decoder", *[replaces({"String": "a"}, "a" * 1000)] * 6)
    ),
    "split by nothing": setting(
        "pre_tokenizer", value={"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated",
        "invert": False}
    ),
    "pieces of length 0": setting("pre_tokenizer", value={"type": "FixedLength", "length": 0}),
    "metaspace of several": setting(
        "pre_tokenizer", value={"type": "Metaspace", "replacement": "ab", "prepend_scheme": "x"}
    ),
    "version": setting("version", value="9.9"),
}  # fmt: skip
FILES = {
    "nothing": b"", "zeros": b"\0" * 1000, "no JSON": b"{" * 1000, "list": b"[]", "number": b"7",
    "deep": b"[" * 200_000, "deep object": b'{"a":' * 200_000, "text": b'"x"', "null": b"null",
    "two": b"{}{}", "digits": b"1" * 5000, "not UTF-8": b'{"\xff": 1}', "BOM": b"\xef\xbb\xbf{}",
}  # fmt: skip


def with_rules(change):
    def changing(target: Path) -> None:
        path = target / "tokenizer.json"
        said = json.loads(path.read_text())
        change(said)
        path.write_text(json.dumps(said))

    return changing


def ended_with(folder: Path, tmp_path: Path, change, **limits):
    return bounded(texts_of(changed(folder, tmp_path / "bad", change), PROMPT), **limits)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_patterns_are_held(folder, tmp_path, place):
    seen = set()
    for pattern in PATTERNS_TO_HARM:
        change = with_rules(lambda said, p=pattern: with_pattern(said, place, p))
        ended = ended_with(folder, tmp_path, change)
        require_held((place, pattern[:40]), ended, tmp_path)
        seen.add(ended.how)
    assert seen == {"returned", "refused"}


@pytest.mark.slow
def test_parts_are_held(folder, tmp_path):
    seen = {}
    for name, change in CHANGES.items():
        seen[name] = ended_with(folder, tmp_path, with_rules(change))
        require_held(name, seen[name], tmp_path)
    assert {ended.how for ended in seen.values()} == {"returned", "refused"}
    for name in ("replace any by 1000, 4 times", "replace a by 1000 a, 6 times"):
        assert "takes more than 256 MB of memory" in seen[name].said
    for name in ("id beyond the model", "dropout", "words without unknown", "no model"):
        assert seen[name].how == "refused", name


@pytest.mark.slow
def test_files_are_held(folder, tmp_path):
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        for name, raw in FILES.items():
            ended = ended_with(folder, tmp_path, lambda d, r=raw: (d / file).write_bytes(r))
            require_held((file, name), ended, tmp_path)


@pytest.mark.slow
def test_values_of_any_type_are_held(folder, tmp_path):
    rng, good = random.Random(3), json.loads((folder / "tokenizer.json").read_text())
    paths = [(key,) for key in good]
    paths += [(key, name) for key, part in good.items() if isinstance(part, dict) for name in part]
    for path in paths:
        for value in rng.sample(VALUES, 5):
            change = with_rules(setting(*path, value=copy.deepcopy(value)))
            require_held((path, value), ended_with(folder, tmp_path, change), tmp_path)


# which rules run in this process


def test_published_rules_are_known_to_be_linear_and_others_are_not():
    backend = byte_tokenizer().backend_tokenizer
    good = parts_of(backend)
    assert risk_of(good) is None
    for pattern in [*PATTERNS, r"\p{N}{1,3}", r"\s+", " {2,}", "[0-9]", r"\s{2,}|[\n\r\t]"]:
        said = copy.deepcopy(good)
        with_pattern(said, "split", pattern)
        assert risk_of(said) is None, pattern
    for pattern in PATTERNS_TO_HARM[:8]:
        for place in PLACES:
            said = copy.deepcopy(good)
            with_pattern(said, place, pattern)
            assert risk_of(said) is not None, pattern
    for name in ("replace any by 1000, 4 times", "charsmap of text", "words without unknown"):
        said = copy.deepcopy(good)
        CHANGES[name](said)
        assert risk_of(said) is not None, name


def test_rules_that_are_not_known_run_elsewhere_with_the_same_tokens():
    said = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    with_pattern(said, "split", r"(?:ab|c)\s?d*")
    texts = ["abc d", "", "ab\ncdd", "\u2603" * 9]
    plain, ruled = byte_tokenizer(), byte_tokenizer()
    plain._tokenizer = type(plain._tokenizer).from_str(json.dumps(said))
    ruled._tokenizer = type(ruled._tokenizer).from_str(json.dumps(said))
    assert type(bounded_tokenizer(ruled, "x").backend_tokenizer) is BoundedTokenizer
    assert plain(texts)["input_ids"] == ruled(texts)["input_ids"]
    ids = plain(texts[2])["input_ids"]
    assert plain.decode(ids) == ruled.decode(ids) == texts[2]
    for tokenizer in (plain, ruled):
        tokenizer.add_tokens(["cdd"])
    assert plain(texts)["input_ids"] == ruled(texts)["input_ids"]


# control


@pytest.mark.slow
def test_control_without_bounds_rules_take_all_memory(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(bounded_text, "risk_of", lambda said: None)
    change = with_rules(CHANGES["replace any by 1000, 4 times"])
    assert ended_with(folder, tmp_path, change, seconds=5).how in ("memory", "died", "hung")
    monkeypatch.setattr(pretrained, "require_readable_rules", lambda *_: None)
    ended = ended_with(folder, tmp_path, with_rules(CHANGES["words without unknown"]))
    with pytest.raises(AssertionError):
        require_held("control", ended, tmp_path)


def test_a_long_prompt_is_refused_by_its_size(folder):
    pipe = gen.load("text", model=folder, max_new_tokens=4)
    for prompt in ("ab " * 40_000, {"messages": [{"role": "user", "content": "ab " * 40_000}]}):
        expected = "has 120,000 characters; expected at most 65,536|no chat template"
        with pytest.raises(gen.GenError, match=expected):
            pipe(prompt, seed=0)
    # control: one that fits the characters is counted in tokens
    with pytest.raises(gen.GenError, match="the prompt has 2999 tokens"):
        pipe("ab " * 1000, seed=0)
