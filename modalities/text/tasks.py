"""Synthetic dataset of text tasks whose answers a program checks: their language, their right
answers, and the interpreter.

A prompt has one right answer or several:

    copy 3 1 2 =                 reverse 3 1 2 =              sort 3 1 2 =
    insert 7 at 1 in 3 1 2 =     remove at 1 from 3 1 2 =     replace at 1 with 7 in 3 1 2 =
                                 (indices count from 0)
    insert 7 in 3 1 2 =          remove from 3 1 2 =          replace with 7 in 3 1 2 =
                                 (any index is right)
    shuffle 3 1 2 =              (any other order)
    3 + 8 + 5 =                  answered with its steps: 11 + 5 = 16
    close ( [ ] { =              answered with the closing brackets of every open one: } )

Lists hold 2 to 8 different numbers from 0 to 9, and a new number is not in the list; sums have 2 to
4 terms from 0 to 9; 1 to 7 brackets are open. For n numbers the right answers are n! - 1 to
shuffle, n + 1 to insert, n to remove or replace anywhere, and else one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from gen.contracts.modality import Verdict
from gen.core.errors import unknown_word
from gen.modalities.small_language import (
    draw_conditions,
)
from gen.modalities.small_language import held_out as held_out

DIGITS = tuple(map(str, range(10)))
CLOSING = {"(": ")", "[": "]", "{": "}"}
NUMBER, INDEX = "<number>", "<index>"
END = "the end of the prompt"
# op -> beginning of its prompt, before the items
FORMS = {
    "copy": ("copy",),
    "reverse": ("reverse",),
    "sort": ("sort",),
    "shuffle": ("shuffle",),
    "insert at": ("insert", NUMBER, "at", INDEX, "in"),
    "insert": ("insert", NUMBER, "in"),
    "remove at": ("remove", "at", INDEX, "from"),
    "remove": ("remove", "from"),
    "replace at": ("replace", "at", INDEX, "with", NUMBER, "in"),
    "replace": ("replace", "with", NUMBER, "in"),
    "add": (),
    "close": ("close",),
}
OPS = tuple(FORMS)
RANDOM = ("shuffle", "insert", "remove", "replace")  # ops with several right answers
# op -> category of benchmarks, named after those of SPEED-Bench
CATEGORIES = {
    **dict.fromkeys(("sort", "reverse", "insert at", "remove at", "replace at"), "reasoning"),
    **dict.fromkeys(RANDOM, "writing"),
    "copy": "rag",
    "add": "math",
    "close": "coding",
}
# terms, and open brackets; lists have ``LISTS`` items
LENGTHS = {
    "add": range(2, 5),
    "close": range(1, 8),
}
LISTS = range(2, 9)
BRACKETS = 14  # most brackets of a prompt, closed ones included
LARGEST = 9 * LENGTHS["add"][-1]
WORDS: tuple[str, ...] = (
    *map(str, range(LARGEST + 1)),
    "+",
    "=",
    *CLOSING,
    *CLOSING.values(),
    *dict.fromkeys(w for form in FORMS.values() for w in form if w not in (NUMBER, INDEX)),
)


@dataclass(frozen=True)
class Task:
    """Task with its arguments.

    Attributes:
        items: numbers of the list, terms of the sum, or brackets.
        new: the new number.
        at: index in the list, from 0.

    Raises:
        ValueError: the arguments do not belong to the op.
    """

    op: str
    items: tuple[str, ...]
    new: str | None = None
    at: int | None = None

    def __post_init__(self) -> None:
        if self.op not in FORMS:
            raise unknown_word(str(self.op), OPS, "task", "the tasks")
        for name, sign in (("new", NUMBER), ("at", INDEX)):
            if (getattr(self, name) is None) == (sign in FORMS[self.op]):
                raise ValueError(
                    f"{self.op!r} got {name} {getattr(self, name)!r}; expected"
                    f" {'one' if sign in FORMS[self.op] else 'none'}"
                )
        known = (*CLOSING, *CLOSING.values()) if self.op == "close" else DIGITS
        for word in (*self.items, *([] if self.new is None else [self.new])):
            if word not in known:
                raise unknown_word(str(word), known, f"{self.op!r}", "what it takes")
        size, sizes = len(self.items), LENGTHS.get(self.op, LISTS)
        if self.op == "close":
            size = len(unclosed(self.items))
            if len(self.items) > BRACKETS:
                raise ValueError(
                    f"{self.op!r} got {len(self.items)} brackets; expected at most {BRACKETS}"
                )
        if size not in sizes:
            things = {"add": "terms", "close": "open brackets"}.get(self.op, "numbers")
            raise ValueError(f"{self.op!r} got {size} {things}; expected {sizes[0]} to {sizes[-1]}")
        if self.op in LENGTHS:
            return
        twice = [w for i, w in enumerate(self.items) if w in self.items[:i]]
        if twice or self.new in self.items:
            raise ValueError(
                f"the list {' '.join(self.items)!r} has the number {(twice or [self.new])[0]!r}"
                " already; expected different ones"
            )
        positions = size + (self.op == "insert at")
        if self.at is not None and self.at not in range(positions):
            raise ValueError(
                f"{self.op!r} got index {self.at}; expected 0 to {positions - 1} for a list of"
                f" {size}"
            )

    def words(self) -> list[str]:
        """Words of the canonical prompt."""
        filled = {NUMBER: self.new, INDEX: str(self.at)}
        start = [filled.get(w, w) for w in FORMS[self.op]]
        return [*start, *(" + ".join(self.items).split() if self.op == "add" else self.items), "="]

    def __str__(self) -> str:
        return " ".join(self.words())


def unclosed(brackets: Sequence[str]) -> list[str]:
    """Brackets that are still open, outermost first.

    Raises:
        ValueError: a bracket does not close the last open one.
    """
    stack: list[str] = []
    for bracket in brackets:
        if bracket in CLOSING:
            stack.append(bracket)
        elif not stack or CLOSING[stack.pop()] != bracket:
            raise ValueError(
                f"the brackets {' '.join(brackets)!r} have a {bracket!r} without an opening"
                " one; expected the closing bracket of the last open one"
            )
    return stack


# --- Reading


def split(text: str) -> list[str]:
    """Split a text into words. Signs and brackets need no spaces around them."""
    return re.sub(r"([+=()\[\]{}])", r" \1 ", text.lower()).split()


def parse(prompt: str) -> Task:
    """Parse a prompt. The last ``=`` may be missing.

    Raises:
        ValueError: a word is not allowed where it stands; the message names the first one and the
            nearest allowed word.
    """
    words, where = split(prompt), f"prompt {prompt!r}"
    if words and words[-1] == "=":
        words.pop()
    if not words:
        raise ValueError(
            "the prompt is empty; expected a task such as 'sort 3 1 2 =', '3 + 8 =' or 'close ("
            " [ ='"
        )
    if words[0].isdigit():
        for i, word in enumerate([*words, END] if len(words) % 2 == 0 else words):
            _expect(word, DIGITS if i % 2 == 0 else ("+",), where)
        arguments = ("add", tuple(words[::2]))
    else:
        arguments = _read(words, where)
    try:
        return Task(*arguments)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _read(words: list[str], where: str) -> tuple:
    """Arguments of a prompt that begins with a name: op, items, new number, index."""
    forms, arguments = {op: form for op, form in FORMS.items() if form}, {}
    for i in range(len(words) + 1):
        for op in (op for op, form in forms.items() if len(form) == i):
            for word in words[i:]:
                _expect(word, (*CLOSING, *CLOSING.values()) if op == "close" else DIGITS, where)
            return op, tuple(words[i:]), arguments.get(NUMBER), arguments.get(INDEX)
        word = words[i] if i < len(words) else END
        signs = dict.fromkeys(form[i] for form in forms.values())
        numeric = next((s for s in signs if s in (NUMBER, INDEX)), None)
        options = DIGITS if numeric else tuple(signs)
        _expect(word, options if i else (*options, "a sum such as 3 + 8"), where)
        if numeric:
            arguments[numeric] = word if numeric == NUMBER else int(word)
        forms = {op: form for op, form in forms.items() if form[i] == (numeric or word)}
    raise AssertionError("every form ends")


def _expect(word: str, options: Sequence[str], where: str) -> None:
    if word not in options:
        raise unknown_word(
            word,
            ("a number from 0 to 9",) if options is DIGITS else options,
            where,
            "what may stand there",
        )


# --- Answers


def answers(task: Task) -> list[tuple[str, ...]]:
    """All right answers as words, each once: 40319 to shuffle eight numbers."""
    items, new, n = task.items, task.new, len(task.items)
    if task.op == "shuffle":
        return [p for p in permutations(items) if p != items]
    if task.op in RANDOM:
        positions = range(n + (task.op == "insert"))
        return [_changed(task.op, items, at, new) for at in positions]
    return [_only(task)]


def draw_answer(task: Task, rng: np.random.Generator) -> tuple[str, ...]:
    """Draw one of the right answers, all equally likely."""
    n = len(task.items)
    if task.op == "shuffle":
        while True:
            drawn = tuple(task.items[i] for i in rng.permutation(n))
            if drawn != task.items:
                return drawn
    if task.op in RANDOM:
        return _changed(task.op, task.items, int(rng.integers(n + (task.op == "insert"))), task.new)
    return _only(task)


def _changed(op: str, items: tuple[str, ...], at: int, new: str | None) -> tuple[str, ...]:
    """List with a number more, fewer or another at one index."""
    kept = items[at + (op != "insert") :]
    return (*items[:at], *([] if op == "remove" else [new]), *kept)


def _only(task: Task) -> tuple[str, ...]:
    """Answer of a task with exactly one."""
    items = task.items
    match task.op:
        case "copy":
            return items
        case "reverse":
            return items[::-1]
        case "sort":
            return tuple(sorted(items))
        case "close":
            return tuple(CLOSING[b] for b in reversed(unclosed(items)))
        case "add":
            terms = list(map(int, items))
            steps = [[sum(terms[: k + 1]), *terms[k + 1 :]] for k in range(1, len(terms))]
            return tuple(" = ".join(" + ".join(map(str, s)) for s in steps).split())
    return _changed(task.op.removesuffix(" at"), items, task.at, task.new)


def check(task: Task, text: str) -> Verdict:
    """Judge a text as the answer to a task. ``valid``: a list of numbers from 0 to 9, a sum, or
    balanced brackets, as the task expects.
    """
    words, items, new = tuple(split(text)), task.items, task.new
    valid = _valid(task.op, words)
    if task.op not in RANDOM:
        right, expected = words == _only(task), " ".join(_only(task))
    elif task.op == "shuffle":
        right, expected = (
            sorted(words) == sorted(items) and words != items,
            "the same numbers in another order",
        )
    elif task.op == "insert":
        right = words.count(new) == 1 and tuple(w for w in words if w != new) == items
        expected = f"the list with one {new} more"
    elif task.op == "remove":
        right = len(words) == len(items) - 1 and tuple(w for w in items if w in words) == words
        expected = "the list without one number"
    else:
        right = len(words) == len(items) and [
            w for w, was in zip(words, items, strict=True) if w != was
        ] == [new]
        expected = f"the list with {new} instead of one number"
    return Verdict(
        right,
        valid,
        (
            ""
            if right
            else f"the answer is {repr(' '.join(words)) if words else 'empty'}; expected {expected}"
        ),
    )


def right_words(task: Task, words: Sequence[str]) -> int:
    """Count the words at the beginning of a text that some right answer begins with."""
    if task.op != "shuffle":
        return max(_common(answer, words) for answer in answers(task))
    items, seen = task.items, []
    for word in words[: len(items)]:
        if word not in items or word in seen:
            break
        seen.append(word)
    # the last number of an order follows from those before, and the given order is no answer
    same = _common(items, seen)
    return min(len(seen), len(items) - 2) if same >= len(items) - 1 else len(seen)


def answer_length(task: Task) -> int:
    """Count the words of a right answer; all right answers of a task have as many."""
    return len(task.items) if task.op == "shuffle" else len(answers(task)[0])


def grade(task: Task, text: str) -> float:
    """Return the share of a text that is right: its longest beginning that some right answer begins
    with, over the words of the longer of the two.

    Returns:
        0 to 1; 1 where ``check`` passes and nowhere else.
    """
    words = split(text)
    return right_words(task, words) / max(len(words), answer_length(task))


def grade_partial(task: Task, text: str) -> float:
    """Return the share of an unfinished text that some right answer begins with; 1 for no text."""
    words = split(text)
    return right_words(task, words) / len(words) if words else 1.0


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Count the words that two sequences begin with together."""
    pairs = zip(one, other, strict=False)
    return next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _valid(op: str, words: tuple[str, ...]) -> bool:
    if op == "add":
        return re.fullmatch(r"\d+( \+ \d+)*( = \d+( \+ \d+)*)*", " ".join(words)) is not None
    return bool(words) and set(words) <= set(CLOSING.values() if op == "close" else DIGITS)


# --- Sampling tasks


def random_task(
    rng: np.random.Generator, ops: Sequence[str] | None = None, lengths: Sequence[int] | None = None
) -> Task:
    """Draw a task.

    Args:
        rng: generator.
        ops: equally likely ops; an op listed twice is twice as likely.
        lengths: numbers, terms or open brackets, of which the op's are used.

    Raises:
        ValueError: the op has none of the lengths.
    """
    op = (ops or OPS)[rng.integers(len(ops or OPS))]
    sizes = [n for n in LENGTHS.get(op, LISTS) if lengths is None or n in lengths]
    if not sizes:
        raise ValueError(
            f"{op!r} got the lengths {list(lengths)}; expected some of"
            f" {list(LENGTHS.get(op, LISTS))}"
        )
    size = sizes[rng.integers(len(sizes))]
    if op == "add":
        return Task(op, tuple(map(str, rng.integers(10, size=size))))
    if op == "close":
        brackets = [list(CLOSING)[i] for i in rng.integers(len(CLOSING), size=size)]
        for _ in range(rng.integers(min(2, (BRACKETS - size) // 2) + 1)):
            at, kind = (
                int(rng.integers(len(brackets) + 1)),
                list(CLOSING)[rng.integers(len(CLOSING))],
            )
            brackets[at:at] = [kind, CLOSING[kind]]
        return Task(op, tuple(brackets))
    drawn = [DIGITS[i] for i in rng.permutation(10)]
    form, positions = FORMS[op], size + (op == "insert at")
    return Task(
        op,
        tuple(drawn[:size]),
        drawn[size] if NUMBER in form else None,
        int(rng.integers(positions)) if INDEX in form else None,
    )


def tasks(n: int, seed: int, *, held: bool) -> list[Task]:
    """Draw ``n`` tasks, all held out or none of them."""
    return draw_conditions(n, seed, random_task, held)
