"""Deterministic automata over bytes, as values: made of literals, joined, and minimized.

A ``ByteDFA`` is a regular language. Every function returns a minimal automaton without useless
states, so that equal languages have equal tables. Columns of the tables are classes of bytes that
the automaton treats alike. Sizes and time are those of the budget (``gen.constraints.budget``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from gen.constraints.budget import check, require_bytes, require_states
from gen.contracts.constraint import FAR, distances, slices, steps_back
from gen.core.errors import GenError, bad_value

NUMBER = 40  # bytes of a number in a list
CELL, STEP = 24, 32  # bytes of a cell of a table, and of a step, while it is minimized


@dataclass(frozen=True, eq=False)
class ByteDFA:
    """Deterministic automaton over bytes. State 0 is the first.

    Attributes:
        next: state after a byte of class k, int32 [S, K]; -1 where such a byte may not come.
        accepting: states in which a text may be complete, bool [S].
        byte_class: class of every byte, uint8 [256].
    """

    next: np.ndarray
    accepting: np.ndarray
    byte_class: np.ndarray

    @property
    def num_states(self) -> int:
        """Number of states S."""
        return len(self.next)

    @property
    def is_empty(self) -> bool:
        """True where no text is accepted."""
        return not self.accepting.any()

    def run(self, text: bytes, state: int = 0) -> int:
        """Return the state after a text; -1 where a byte may not come."""
        for byte in text:
            if state < 0:
                return -1
            state = int(self.next[state, self.byte_class[byte]])
        return state

    def accepts(self, text: bytes) -> bool:
        """Return True for a text of the language."""
        state = self.run(text)
        return state >= 0 and bool(self.accepting[state])

    def shortest(self) -> bytes:
        """Return a shortest text of the language: of several, the first in the order of bytes.

        Raises:
            GenError: the language is empty.
        """
        if self.is_empty:
            raise GenError("the language is empty; expected one with a shortest text")
        distance = np.append(distances(self.next, self.accepting), FAR)
        state, text = 0, bytearray()
        while distance[state]:
            byte = int(distance[self.next[state]][self.byte_class].argmin())
            text.append(byte)
            state = int(self.next[state, self.byte_class[byte]])
        return bytes(text)

    def optional(self) -> ByteDFA:
        """Return the language with the empty text."""
        return union(empty(), self)

    def star(self) -> ByteDFA:
        """Return texts of the language, any number of them one after the other."""
        return self.repeat(0, None)

    def plus(self) -> ByteDFA:
        """Return texts of the language, at least one of them, one after the other."""
        return self.repeat(1, None)

    def repeat(self, least: int, most: int | None = None) -> ByteDFA:
        """Return texts of the language, so many of them one after the other.

        Args:
            least: number of texts, at least.
            most: number of texts, at most; None for any number.

        Raises:
            GenError: the numbers are no range, or the automaton is too large.
        """
        if least < 0 or (most is not None and most < least):
            raise bad_value("repeat", (least, most), "least of at least 0 and most of at least it")
        nfa = Nfa()
        ends, start = [nfa.start], -1
        for i in range(max(least, 1) if most is None else most):
            if i >= least:
                nfa.accept(ends)
            start, following = nfa.add(self)
            nfa.link(ends, start)
            ends = following
        nfa.accept(ends)
        if most is None:
            nfa.link(ends, start)
            if least == 0:
                nfa.accept([nfa.start])
        return nfa.determinize()

    def minimize(self) -> ByteDFA:
        """Return the smallest automaton of the language, states in the order of first visits."""
        return _minimal(self.next, self.accepting, self.byte_class)


def nothing() -> ByteDFA:
    """Return the language without any text."""
    return ByteDFA(np.full((1, 1), -1, np.int32), np.zeros(1, bool), np.zeros(256, np.uint8))


def empty() -> ByteDFA:
    """Return the language of the empty text alone."""
    return ByteDFA(np.full((1, 1), -1, np.int32), np.ones(1, bool), np.zeros(256, np.uint8))


def anything() -> ByteDFA:
    """Return the language of all texts."""
    return ByteDFA(np.zeros((1, 1), np.int32), np.ones(1, bool), np.zeros(256, np.uint8))


def literal(text: bytes) -> ByteDFA:
    """Return the language of one text."""
    return any_of([text])


def one_of(values: Iterable[int]) -> ByteDFA:
    """Return the language of texts of one byte. ``values``: the bytes, such as ``b"abc"``."""
    chosen = np.zeros(256, np.uint8)
    chosen[list(values)] = 1
    if not chosen.any():
        return nothing()
    table = np.array([[-1, 1], [-1, -1]], np.int32)
    return _minimal(table, np.array([False, True]), chosen)


def any_of(texts: Iterable[bytes]) -> ByteDFA:
    """Return the language of a list of texts."""
    edges: list[dict[int, int]] = [{}]
    ends = set()
    for text in texts:
        state = 0
        for byte in text:
            if byte not in edges[state]:
                edges[state][byte] = len(edges)
                edges.append({})
            state = edges[state][byte]
        ends.add(state)
        require_states(len(edges))
    used = sorted({byte for row in edges for byte in row})
    column = {byte: k for k, byte in enumerate(used)}
    classes = len(used) + (len(used) < 256)
    byte_class = np.full(256, classes - 1, np.uint8)
    byte_class[used] = np.arange(len(used))
    require_bytes(len(edges) * classes * 4)
    table = np.full((len(edges), classes), -1, np.int32)
    for state, row in enumerate(edges):
        for byte, target in row.items():
            table[state, column[byte]] = target
    accepting = np.zeros(len(edges), bool)
    accepting[list(ends)] = True
    return _minimal(table, accepting, byte_class)


def concat(*parts: ByteDFA) -> ByteDFA:
    """Return texts of the parts, one after the other."""
    if len(parts) < 2:
        return parts[0] if parts else empty()
    nfa = Nfa()
    ends = [nfa.start]
    for part in parts:
        start, following = nfa.add(part)
        nfa.link(ends, start)
        ends = following
    nfa.accept(ends)
    return nfa.determinize()


def union(*parts: ByteDFA) -> ByteDFA:
    """Return texts of any of the parts."""
    if len(parts) < 2:
        return parts[0] if parts else nothing()
    nfa = Nfa()
    for part in parts:
        start, ends = nfa.add(part)
        nfa.link([nfa.start], start)
        nfa.accept(ends)
    return nfa.determinize()


def network(edges: Sequence[tuple[int, ByteDFA, int]], ends: Iterable[int]) -> ByteDFA:
    """Return the texts along the paths of a graph whose edges are languages.

    Args:
        edges: node, language, node. Paths begin at node 0.
        ends: nodes at which a path may end.
    """
    nfa = Nfa()
    number = {0: nfa.start}
    for begin, language, end in edges:
        start, accepting = nfa.add(language)
        for node in (begin, end):
            number[node] = number.get(node) or (nfa.state() if node else nfa.start)
        nfa.link([number[begin]], start)
        nfa.link(accepting, number[end])
    nfa.accept(number[end] for end in ends if end in number)
    return nfa.determinize()


def intersect(*parts: ByteDFA) -> ByteDFA:
    """Return texts that all parts have."""
    return reduce(_both, parts) if parts else anything()


def difference(first: ByteDFA, second: ByteDFA) -> ByteDFA:
    """Return texts of the first language that the second does not have."""
    return _product(first, second, lambda a, b: a & ~b, lambda a, b: a >= 0)


def complement(language: ByteDFA) -> ByteDFA:
    """Return all texts of bytes that a language does not have."""
    return difference(anything(), language)


def equal(first: ByteDFA, second: ByteDFA) -> bool:
    """Return True where two automata accept the same texts."""
    return difference(first, second).is_empty and difference(second, first).is_empty


def _heights(table: np.ndarray) -> np.ndarray:
    """Return the most steps from each state, int32 [S]; ``FAR`` where they may go on for ever."""
    begin, sources = steps_back(table)
    left = (table >= 0).sum(1)
    found = np.full(len(table), FAR, np.int32)
    level, frontier = 0, np.flatnonzero(left == 0)
    while len(frontier):
        check()
        found[frontier] = level
        before, steps = np.unique(
            sources[slices(begin[frontier], begin[frontier + 1])], return_counts=True
        )
        left[before] -= steps
        frontier = before[left[before] == 0]
        level += 1
    return found


def _both(first: ByteDFA, second: ByteDFA) -> ByteDFA:
    return _product(first, second, lambda a, b: a & b, lambda a, b: (a >= 0) & (b >= 0))


def _product(first: ByteDFA, second: ByteDFA, accepts, follows) -> ByteDFA:
    """Run two automata side by side.

    Args:
        first: automaton.
        second: automaton.
        accepts: function of (accepting in the first, in the second), bool arrays.
        follows: function of (state of the first, of the second) that says which pairs may lead to
            a text; -1 is the state after a wrong byte.
    """
    (a, b), byte_class = _aligned([first, second])
    width = len(b) + 1  # the state after a wrong byte is the last one of each
    a = np.vstack([a, np.full((1, a.shape[1]), -1, np.int32)])
    b = np.vstack([b, np.full((1, b.shape[1]), -1, np.int32)])
    require_bytes(len(a) * width * 4 + a.nbytes + b.nbytes)
    index = np.full(len(a) * width, -1, np.int32)
    index[0] = 0
    order, rows, frontier = [np.zeros(1, np.int64)], [], np.zeros(1, np.int64)
    count = 1
    while len(frontier):
        after_a, after_b = a[frontier // width], b[frontier % width]
        pairs = (after_a % len(a)).astype(np.int64) * width + after_b % width
        is_live = follows(after_a, after_b)
        found = np.unique(pairs[is_live])
        frontier = found[index[found] < 0]
        index[frontier] = np.arange(count, count + len(frontier))
        count += len(frontier)
        require_states(count)
        require_bytes(index.nbytes + count * a.shape[1] * CELL)
        rows.append((pairs, is_live))
        order.append(frontier)
    pairs = np.concatenate([p for p, _ in rows])
    is_live = np.concatenate([live for _, live in rows])
    table = np.where(is_live, index[pairs], -1).astype(np.int32)
    visited = np.concatenate(order)
    accepting = accepts(
        np.append(first.accepting, False)[visited // width],
        np.append(second.accepting, False)[visited % width],
    )
    return _minimal(table, accepting, byte_class)


def _aligned(parts: Sequence[ByteDFA]) -> tuple[list[np.ndarray], np.ndarray]:
    """Give automata the same classes of bytes.

    Returns:
        Tables [S, K] of every part, and the classes uint8 [256].
    """
    classes = np.stack([p.byte_class for p in dict.fromkeys(parts)] or [np.zeros(256, np.uint8)])
    _, first, byte_class = np.unique(classes, axis=1, return_index=True, return_inverse=True)
    return [p.next[:, p.byte_class[first]] for p in parts], byte_class.reshape(256).astype(np.uint8)


class Nfa:
    """Automata side by side, with moves between their states that take no byte.

    Attributes:
        start: state that every text begins in.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[int, ByteDFA]] = []
        self.size, self.start = 1, 0
        self.moves: dict[int, list[int]] = {}
        self.accepting: set[int] = set()

    def state(self) -> int:
        """Add a state that no byte leads to or from."""
        self.size += 1
        require_states(self.size)
        return self.size - 1

    def add(self, part: ByteDFA) -> tuple[int, list[int]]:
        """Add the states of an automaton; return its first state and its accepting ones."""
        offset = self.size
        self.size += part.num_states
        require_states(self.size)
        self.parts.append((offset, part))
        return offset, (np.flatnonzero(part.accepting) + offset).tolist()

    def link(self, sources: Iterable[int], target: int) -> None:
        """Add a move without a byte from every source to a target."""
        for source in sources:
            self.moves.setdefault(source, []).append(target)

    def accept(self, states: Iterable[int]) -> None:
        """Make states accepting."""
        self.accepting.update(states)

    def closure(self, states: Iterable[int]) -> tuple[int, ...]:
        """Return the states that moves without a byte lead to, and the states themselves."""
        found = set(states) - {-1}
        waiting = list(found)
        while waiting:
            for target in self.moves.get(waiting.pop(), ()):
                if target not in found:
                    found.add(target)
                    waiting.append(target)
        check()
        return tuple(sorted(found))

    def determinize(self) -> ByteDFA:
        """Return the deterministic automaton: its states are the reachable sets of states."""
        tables, byte_class = _aligned([part for _, part in self.parts])
        classes = int(byte_class.max()) + 1
        held = self.size * classes * NUMBER
        require_bytes(held)
        rows = [[-1] * classes] * self.size
        for (offset, part), table in zip(self.parts, tables, strict=True):
            moved = np.where(table < 0, -1, table + offset)
            rows[offset : offset + part.num_states] = moved.tolist()
        first = self.closure([self.start])
        subsets, index = [first], {first: 0, (): -1}
        after: dict[tuple[int, ...], int] = {}  # states after a byte -> number of their set
        table = []
        for subset in subsets:  # grows while it is read
            row = []
            for column in zip(*(rows[s] for s in subset), strict=True):
                target = after.get(column)
                if target is None:
                    closed = self.closure(column)
                    target = index.setdefault(closed, len(subsets))
                    if target == len(subsets):
                        subsets.append(closed)
                        held += 8 * len(closed) + classes * NUMBER
                    after[column] = target
                    held += 8 * len(column)
                    require_bytes(held)
                row.append(target)
            table.append(row)
            require_states(len(subsets))
        accepting = np.array([not self.accepting.isdisjoint(s) for s in subsets])
        return _minimal(np.array(table, np.int32), accepting, byte_class)


def _minimal(table: np.ndarray, accepting: np.ndarray, byte_class: np.ndarray) -> ByteDFA:
    """Return the smallest automaton, states in the order of first visits, classes by first byte."""
    require_bytes(table.size * CELL + np.count_nonzero(table >= 0) * STEP)
    distance = distances(table, accepting, check)
    if distance[0] == FAR:
        return nothing()
    useful = np.append(distance < FAR, False)
    table = np.where(useful[table], table, -1)
    block = _equivalence(table, distance)
    # states from the first one onwards, breadth first
    _, first = np.unique(block, return_index=True)
    merged = np.append(block, -1)[table[first]]
    order = _visits(merged, int(block[0]))
    number = np.full(len(merged) + 1, -1, np.int32)
    number[order] = np.arange(len(order))
    merged, ends = number[merged[order]], accepting[first[order]]
    _, column, byte_to = np.unique(merged, axis=1, return_index=True, return_inverse=True)
    new_class = byte_to.reshape(-1)[byte_class]
    # classes that no byte has any more are left out; the others are numbered by their first byte
    kept, first_byte = np.unique(new_class, return_index=True)
    kept = kept[np.argsort(first_byte)]
    rank = np.zeros(len(column), np.uint8)
    rank[kept] = np.arange(len(kept))
    small = np.ascontiguousarray(merged[:, column[kept]], dtype=np.int32)
    return ByteDFA(small, ends, rank[new_class])


def _equivalence(table: np.ndarray, distance: np.ndarray) -> np.ndarray:
    """Number states so that equivalent ones have the same number: int [S].

    Refines the partition by the shortest and the longest text that is left, which equivalent
    states share. A round looks only at states that lead to a state whose number has changed.
    """
    lengths = np.column_stack([distance, _heights(table)])
    block = np.unique(lengths, axis=0, return_inverse=True)[1].reshape(-1)
    begin, sources = steps_back(table)
    sizes = np.zeros(len(table), np.int64)
    sizes[: block.max() + 1] = np.bincount(block)
    count = int(block.max()) + 1
    states = np.arange(len(table))
    while len(states):
        check()
        rows = np.column_stack([block[states], np.append(block, -1)[table[states]]])
        first, group, members = distinct_rows(rows)
        owner = rows[first, 0]
        # of a block that is split, the states that were not looked at keep the number; where all
        # were, the largest group keeps it
        order = np.lexsort((members, owner))
        is_last = np.append(owner[order][1:] != owner[order][:-1], True)
        looked_at = np.bincount(owner, members, len(sizes)).astype(np.int64)
        keeps = np.zeros(len(first), bool)
        keeps[order[is_last]] = looked_at[owner[order[is_last]]] == sizes[owner[order[is_last]]]
        number = owner.copy()
        number[~keeps] = np.arange(count, count + (~keeps).sum())
        count += int((~keeps).sum())
        np.subtract.at(sizes, owner[~keeps], members[~keeps])
        sizes[number[~keeps]] = members[~keeps]
        block[states] = number[group]
        changed = states[~keeps[group]]
        states = np.unique(sources[slices(begin[changed], begin[changed + 1])])
    return block


def distinct_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first index of each distinct row, the group of every row, and their sizes."""
    packed = np.ascontiguousarray(rows).view(
        np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))
    )
    index: dict[bytes, int] = {}
    group = np.array([index.setdefault(row, len(index)) for row in packed.ravel().tolist()])
    first = np.full(len(index), len(rows))
    np.minimum.at(first, group, np.arange(len(rows)))
    return first, group, np.bincount(group)


def _visits(table: np.ndarray, first: int) -> np.ndarray:
    """Return the states that can be reached, breadth first: int [S]."""
    order, seen = [first], {first}
    for state in order:  # grows while it is read
        check()
        for target in dict.fromkeys(table[state].tolist()):
            if target >= 0 and target not in seen:
                seen.add(target)
                order.append(target)
    return np.array(order)
