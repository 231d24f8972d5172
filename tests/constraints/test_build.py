"""Constraints of requests offer what some text of their kind has, and say which key is wrong."""

from __future__ import annotations

import random
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from gen.constraints.build import build, read
from gen.contracts.constraint import Constraint
from gen.contracts.row_constraint import unpack_bitmask
from gen.contracts.vocabulary import Vocabulary
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.token_space import TokenSpace

PAD, EOS = 0, 1
LETTERS = [chr(c).encode() for c in range(32, 127)]
TOKENS = (None, None, *LETTERS)
TEXT = Vocabulary(TOKENS, TOKENS)
TRIPLES = [["A", "likes", "B"], ["B", "likes", "C"], ["A", "is", "D"], ["C", "is", "A"]]


def space(length: int, vocab_size: int, eos: int | None = EOS) -> TokenSpace:
    legal = torch.ones(length, vocab_size, dtype=torch.bool)
    if eos is not None:
        legal[:, PAD] = False
    return TokenSpace((length,), vocab_size, legal, eos_token_id=eos)


def rows(constraint: Constraint, length: int) -> set[tuple[int, ...]]:
    """Return all rows that masks lead to, each to its last position."""
    found = set()
    waiting: list[tuple[int, ...]] = [()]
    state = constraint.start()
    size = 0
    while waiting:
        row = waiting.pop()
        state.rollback(size)
        assert all(state.advance(token) for token in row)
        size = len(row)
        if size == length:
            found.add(row)
            continue
        packed = torch.from_numpy(state.allowed_bitmask(length - size))[None]
        allowed = unpack_bitmask(packed, constraint.vocab_size)[0].nonzero()[:, 0].tolist()
        assert allowed, row  # no dead ends
        waiting += [(*row, token) for token in allowed]
    return found


def ended(ids: tuple[int, ...], length: int) -> tuple[int, ...]:
    return ids + (EOS,) * (length - len(ids))


def spelt(text: str) -> tuple[int, ...]:
    return tuple(TOKENS.index(c.encode()) for c in text)


def paths(triples, hops, start, direction) -> set[tuple[int, ...]]:
    """Return the well-formed paths as numbers of triples, by definition."""
    found = set()
    for size in range(1, hops + 1):
        for path in product(range(len(triples)), repeat=size):
            visited = None if start is None else set(start)
            for i in path:
                head, _, tail = triples[i]
                entries = {head, tail} if direction == "both" else {head}
                if visited is not None and not entries & visited:
                    break
                visited = (visited or set()) | {head, tail}
            else:
                found.add(path)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_graph_accepts_the_well_formed_paths(seed):
    draw = random.Random(seed)
    names, relations = ["A", "AB", "C", "B"], ["is", "in"]
    count = draw.randint(2, 4)
    triples = [
        [draw.choice(names), draw.choice(relations), draw.choice(names)] for _ in range(count)
    ]
    start = draw.choice([None, [triples[0][0]], [triples[0][2], triples[1][0]]])
    direction, hops = draw.choice(["forward", "both"]), draw.randint(1, 3)
    options = {"hops": hops, "direction": direction, "separator": ","}
    if start is not None:
        options["start"] = start
    texts = {
        ",".join("{} {}>{}".format(*triples[i]) for i in path)
        for path in paths(triples, hops, start, direction)
    }
    if not texts:
        with pytest.raises(GenError, match="accepts no text"):
            build({"graph": triples, **options}, TEXT, space(30, len(TOKENS)))
        return
    rule = {"graph": triples, "template": "{head} {relation}>{tail}", **options}
    accepted = rows(build(rule, TEXT, space(30, len(TOKENS))), 30)
    assert accepted == {ended(spelt(text), 30) for text in texts}


def test_a_head_that_was_not_visited_does_not_follow():
    """Control: triples in any order are more texts than paths."""
    forward = paths(TRIPLES[:2], 2, ["A"], "forward")
    assert (0, 1) in forward and (1, 0) not in forward and (1,) not in forward
    assert (1, 0) in paths(TRIPLES[:2], 2, ["C"], "both")


def test_graph_of_token_ids_is_the_graph_of_their_names():
    ids = [[[2, 3], 9, 4], [4, 9, [2, 3]], [4, 8, 5]]
    accepted = rows(build({"graph": ids, "hops": 2, "start": [4]}, None, space(9, 10)), 9)
    triples = [(2, 3, 9, 4), (4, 9, 2, 3), (4, 8, 5)]
    wanted = [(1,), (2,), (1, 0), (1, 1), (1, 2), (2, 1), (2, 2)]
    joined = {sum((triples[i] for i in path), ()) for path in wanted}
    assert accepted == {ended(ids, 9) for ids in joined}


def test_choices_and_tries_are_their_sequences():
    sequences = [[2, 3], [2, 3, 4], [5]]
    for rule in ({"choice": sequences}, {"trie": sequences}):
        accepted = rows(build(rule, None, space(4, 300)), 4)
        assert accepted == {ended(tuple(ids), 4) for ids in sequences}
    texts = ["ab", "abc", "x"]
    accepted = rows(build({"choice": texts}, TEXT, space(4, len(TOKENS))), 4)
    assert accepted == {ended(spelt(text), 4) for text in texts}


@pytest.mark.parametrize("length", [1, 4, 5])
def test_chunks_fill_the_positions_of_rows_without_an_end(length):
    chunks = [(2, 3, 2), (0, 1), (4, 4)]
    rule = {"trie": [list(chunk) for chunk in chunks], "form": "chunks"}
    wanted = {
        row
        for n in range(length + 1)
        for parts in product(chunks, repeat=n)
        if len(row := sum(parts, ())) == length
    }
    if not wanted:
        with pytest.raises(GenError, match=f"no text of exactly {length} tokens"):
            build(rule, None, space(length, 6, eos=None))
        return
    assert rows(build(rule, None, space(length, 6, eos=None)), length) == wanted


@pytest.mark.parametrize("n", [1, 2, 3])
def test_windows_of_transitions_are_ngrams_of_the_list(n):
    draw, length = random.Random(n), 5
    ngrams = {tuple(draw.choices(range(3), k=n)) for _ in range(3**n // 2 + 1)}
    rule = {"trie": [list(ngram) for ngram in ngrams], "form": "transitions"}
    wanted = {
        row
        for row in product(range(3), repeat=length)
        if all(row[i : i + n] in ngrams for i in range(length - n + 1))
    }
    assert wanted
    assert rows(build(rule, None, space(length, 3, eos=None)), length) == wanted


def test_allowed_tokens_of_each_position_count():
    """Tokens that differ by position leave no dead end."""
    base = space(4, 4, eos=None)
    legal = base.legal.clone()
    legal[1, 1], legal[2, 0], legal[3, 2:] = False, False, False
    limited = TokenSpace((4,), 4, legal)
    rule = {"trie": [[0, 1], [1, 0], [1, 2], [2, 3], [3, 0], [0, 2]], "form": "transitions"}
    pairs = {tuple(pair) for pair in rule["trie"]}
    wanted = {
        row
        for row in product(range(4), repeat=4)
        if set(pairwise(row)) <= pairs and legal[range(4), list(row)].all()
    }
    assert wanted and rows(build(rule, None, limited), 4) == wanted
    assert rows(build(rule, None, base), 4) > wanted  # control


def test_the_first_token_of_a_text_has_bytes_of_its_own():
    later = (None, None, b" a", b"b")
    first = (None, None, b"a", b"b")
    rule = {"regex": "(a| a)b* a"}
    accepted = rows(build(rule, Vocabulary(first, later), space(3, 4)), 3)
    assert accepted == {(2, 2, EOS), (2, 3, 2)}


def test_kinds_are_listed_with_a_description():
    kinds = registry.table("constraint")
    assert {"regex", "choice", "trie", "graph"} <= set(kinds)
    assert all(cls.__doc__.strip().endswith(".") for cls in kinds.values())


@pytest.mark.parametrize(
    "structured, words",
    [
        ({"regx": "a"}, r"exactly one of choice, .*Did you mean 'regex'\?"),
        ({"regex": "a", "choice": ["a"]}, "exactly one of"),
        ({}, "exactly one of"),
        ("a+", "expected a mapping such as"),
        ({"graph": TRIPLES, "hop": 2}, r"the options hops, .*Did you mean 'hops'\?"),
        ({"regex": "a", "hops": 2}, "expected no other key"),
        ({"graph": TRIPLES, "hops": 0}, "structured.hops is 0; expected an integer of at least 1"),
        ({"graph": TRIPLES, "direction": "back"}, "expected forward or both"),
        ({"graph": TRIPLES, "start": ["Q"]}, "unknown entity 'Q' in structured.start"),
        ({"graph": TRIPLES, "start": [2.5]}, "structured.start"),
        ({"graph": TRIPLES, "template": "{head}"}, "{head}, {relation} and {tail}"),
        ({"graph": TRIPLES, "template": "{head} {"}, "{head}, {relation} and {tail}"),
        ({"graph": TRIPLES, "separator": 3}, "structured.separator is 3"),
        ({"graph": [["A", "B"]]}, r"structured.graph\[0\] is \['A', 'B'\]"),
        ({"graph": [[1, 2, "B"]]}, "structured.graph is 'B'"),
        ({"graph": []}, "expected a list of"),
        ({"choice": []}, "at least one element"),
        ({"choice": ["a", [2]]}, r"structured.choice\[0\] is 'a'"),
        ({"choice": [[500]]}, r"structured.choice\[0\] is 500; expected token ids below 97"),
        ({"trie": ["a"], "form": "many"}, "expected one or chunks or transitions"),
        ({"trie": ["a"], "form": "transitions"}, "expected lists of token ids"),
        ({"trie": [[2], [2, 3]], "form": "transitions"}, "expected n-grams of one n"),
        ({"regex": "a{9}"}, "has 9 tokens and there are 8 positions"),
        ({"regex": "é"}, "no text that this vocabulary can spell"),
        ({"regex": "a("}, "cannot be parsed at position 1"),
    ],
)
def test_bad_input_gets_one_clear_error(structured, words):
    with pytest.raises(GenError, match=words):
        build(structured, TEXT, space(8, len(TOKENS)))


def test_texts_need_a_vocabulary():
    for rule in ({"regex": "a"}, {"choice": ["a"]}, {"graph": TRIPLES}, {"trie": ["a"]}):
        with pytest.raises(GenError, match="the tokens of this model are not"):
            build(rule, None, space(8, 5))
        read(rule)  # no model is needed to see the keys


def test_graphs_that_lead_to_too_many_sets_are_refused(monkeypatch):
    from gen.constraints.kinds import graph

    monkeypatch.setattr(graph, "MOST_FRONTIERS", 20)
    names = "ABCDEFG"
    triples = [[a, "r", b] for a in names for b in names if a != b]
    with pytest.raises(GenError, match="more than 20 sets of entities in 3 hops"):
        build({"graph": triples}, TEXT, space(60, len(TOKENS)))


def test_masks_have_the_bits_of_allowed_tokens_alone():
    constraint = build({"regex": "[ab]c"}, TEXT, space(3, len(TOKENS)))
    state = constraint.start()
    packed = state.allowed_bitmask(3)
    assert packed.dtype == np.int32 and len(packed) == 4
    assert np.unpackbits(packed.view(np.uint8)).sum() == 2
