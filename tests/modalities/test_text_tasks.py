"""The language of text tasks: what is asked, what is right, and that the interpreter says so of
nothing else."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from gen.modalities.small_language import held_out
from gen.modalities.text import tasks as text_tasks
from gen.modalities.text.tasks import (
    CLOSING,
    LENGTHS,
    LISTS,
    OPS,
    WORDS,
    Task,
    answers,
    check,
    draw_answer,
    parse,
    random_task,
)


def some(n: int, seed: int = 0, ops=None, lengths=None) -> list[Task]:
    rng = np.random.default_rng(seed)
    return [random_task(rng, ops, lengths) for _ in range(n)]


def right(task: Task, words) -> bool:
    return check(task, " ".join(words)).passed


# --- prompts


def test_a_prompt_says_its_task():
    tasks = some(2000)
    assert {t.op for t in tasks} == set(OPS)
    for task in tasks:
        words = task.words()
        assert parse(str(task)) == task and words[-1] == "=" and len(words) <= 16
        assert (
            parse(
                f"  {str(task).upper().removesuffix('=')} ".replace(" + ", "+").replace("( ", "(")
            )
            == task
        )  # as it may be written
        assert set(words) <= set(WORDS)
    assert len(set(WORDS)) == len(WORDS)
    lists = [t for t in tasks if t.op not in LENGTHS]
    assert {len(t.items) for t in lists} == set(LISTS) and {
        len(t.items) for t in tasks if t.op == "add"
    } == set(LENGTHS["add"])
    assert {len(text_tasks.unclosed(t.items)) for t in tasks if t.op == "close"} == set(
        LENGTHS["close"]
    )
    assert any(
        set(CLOSING.values()) & set(t.items) for t in tasks
    )  # some brackets are closed already
    assert {t.at for t in tasks if t.op == "insert at"} == set(
        range(9)
    )  # behind the last of eight too


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "the prompt is empty; expected a task such as"),
        (" = ", "the prompt is empty"),
        ("srt 3 1 2 =", "'srt' is outside what may stand there. Did you mean 'sort'"),
        ("3 1 2 =", "'1' is outside what may stand there. Known: [+]"),
        ("sort 3 x 2", "'x' is outside .* a number from 0 to 9"),
        ("sort 3 12", "'12' is outside"),
        ("sort 3", "'sort' got 1 numbers; expected 2 to 8"),
        ("copy 0 1 2 3 4 5 6 7 8", "9 numbers; expected 2 to 8"),
        ("sort 3 1 3", "the list '3 1 3' has the number '3' already"),
        ("insert 7 ot 1 in 3 1", "'ot' is outside .*Known: at, in"),
        ("insert 3 in 3 1", "has the number '3' already"),
        ("insert 7", "'the end of the prompt'"),
        ("insert 7 at 3 in 3 1", "'insert at' got index 3; expected 0 to 2 for a list of 2"),
        ("remove at 2 from 3 1", "expected 0 to 1"),
        ("replace 1 with 7 in 3 1", "'1' is outside what may stand there. Known: at, with"),
        ("sort 3 1 = 1 3", "'=' is outside"),
        ("3 + =", "'the end of the prompt' is outside"),
        ("3 + 8 + 1 + 2 + 4 =", "'add' got 5 terms; expected 2 to 4"),
        ("12 + 3", "'12' is outside"),
        ("close ( ] =", "a ']' without an opening one"),
        ("close ( ) =", "'close' got 0 open brackets; expected 1 to 7"),
        ("close", "0 open brackets"),
        ("close " + "( ) " * 7 + "( =", "15 brackets; expected at most 14"),
        ("close ( 3", "'3' is outside"),
    ],
)
def test_a_prompt_without_sense_is_one_clear_line(prompt, words):
    with pytest.raises(ValueError, match=words) as caught:
        parse(prompt)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (("sirt", ("1", "2")), "Did you mean 'sort'"),
        (("sort", ("1", "2"), "3"), "'sort' got new '3'; expected none"),
        (("insert", ("1", "2")), "got new None; expected one"),
        (("insert at", ("1", "2"), "3"), "got at None"),
        (("remove", ("1", "x")), "'x'"),
    ],
)
def test_a_task_that_cannot_be_asked_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        Task(*fields)


def test_ops_and_lengths_are_kept_to():
    assert {t.op for t in some(100, ops=["sort", "add"])} == {"sort", "add"}
    assert {len(t.items) for t in some(100, ops=["sort", "add"], lengths=[3])} == {3}
    share = Counter(t.op for t in some(2000, ops=["sort", "sort", "sort", "copy"]))["sort"] / 2000
    assert 0.7 < share < 0.8  # named three times, three times as likely
    with pytest.raises(ValueError, match="'add' got the lengths \\[9\\]"):
        random_task(np.random.default_rng(0), ["add"], [9])


def test_a_tenth_is_held_out():
    tasks = some(3000, seed=1)
    assert 0.08 < np.mean([held_out(t) for t in tasks]) < 0.12
    for held in (True, False):
        assert {held_out(t) for t in text_tasks.tasks(50, 3, held=held)} == {held}


# --- answers


def test_every_answer_is_right_and_there_are_as_many_as_counting_says():
    for task in some(600, lengths=range(1, 6)):
        n, found = len(task.items), answers(task)
        count = {"shuffle": math.factorial(n) - 1, "insert": n + 1, "remove": n, "replace": n}.get(
            task.op, 1
        )
        assert len(found) == len(set(found)) == count
        for words in found:
            verdict = check(task, " ".join(words))
            assert (
                verdict.passed
                and verdict.valid
                and not verdict.detail
                and set(words) <= set(WORDS)
                and 1 <= len(words) < 16
            )


def brute(task: Task) -> set[tuple[str, ...]]:
    """The right answers by another way: every short row of words that undoes to the question."""
    items, n = list(task.items), len(task.items)
    if task.op in ("insert", "insert at"):
        return {
            (*items[:i], task.new, *items[i:])
            for i in ([task.at] if task.op == "insert at" else range(n + 1))
        }
    if task.op in ("remove", "remove at"):
        return {
            tuple(w for w in items if w != gone)
            for gone in ([items[task.at]] if task.op == "remove at" else items)
        }
    if task.op in ("replace", "replace at"):
        return {
            tuple(task.new if w == gone else w for w in items)
            for gone in ([items[task.at]] if task.op == "replace at" else items)
        }
    raise ValueError(task.op)


def test_answers_follow_the_rule():
    for task in some(
        400, seed=2, ops=[op for op in OPS if op.split()[0] in ("insert", "remove", "replace")]
    ):
        assert set(answers(task)) == brute(task)
    for task in some(100, seed=3, ops=["sort"]):
        (words,) = answers(task)
        assert all(int(a) < int(b) for a, b in pairwise(words)) and set(words) == set(task.items)
    for task in some(100, seed=3, ops=["add"]):
        steps = " ".join(answers(task)[0]).split(" = ")
        assert {sum(map(int, s.split(" + "))) for s in steps} == {sum(map(int, task.items))}
        assert len(steps) == len(task.items) - 1 and "+" not in steps[-1]
    for task in some(100, seed=3, ops=["close"]):
        assert text_tasks.unclosed([*task.items, *answers(task)[0]]) == []


def test_drawn_answers_are_right_and_equally_likely():
    rng = np.random.default_rng(0)
    for task in some(500, seed=4):
        assert right(task, draw_answer(task, rng))
    for text in (
        "shuffle 3 1 2 =",
        "insert 7 in 3 1 2 =",
        "remove from 3 1 2 =",
        "replace with 7 in 3 1 2 =",
    ):
        task, n = parse(text), 4000
        found, every = Counter(draw_answer(task, rng) for _ in range(n)), answers(task)
        assert set(found) == set(every)
        expected = n / len(every)
        assert (
            sum((found[a] - expected) ** 2 / expected for a in every) < 25
        )  # chi-square, at most 4 degrees of freedom: p < 1e-4
        skewed = Counter(
            every[min(int(rng.integers(len(every) + 1)), len(every) - 1)] for _ in range(n)
        )
        assert (
            sum((skewed[a] - expected) ** 2 / expected for a in every) > 25
        )  # control: one of them twice as often
    many = parse("shuffle 0 1 2 3 4 5 6 7 =")
    assert len({draw_answer(many, rng) for _ in range(50)}) > 45  # among 40319


# --- the interpreter


def test_nothing_else_is_right():
    """Negative controls: changed answers, answers of others, the question itself."""
    rng = np.random.default_rng(5)
    tasks = some(300, seed=5, lengths=range(1, 6))
    for task, other in zip(tasks, tasks[1:] + tasks[:1], strict=True):
        every = set(answers(task))
        drawn = list(draw_answer(task, rng))
        changed = [
            drawn[:-1],
            [*drawn, drawn[0]],
            [*drawn, "="],
            drawn[::-1],
            sorted(drawn),
            [],
            list(task.items),
            list(draw_answer(other, rng)),
        ]
        for _ in range(10):
            new = list(drawn)
            new[rng.integers(len(new))] = WORDS[rng.integers(len(WORDS))]
            changed.append(new)
        for words in changed:
            assert right(task, words) == (tuple(words) in every), (str(task), words)
    for task in some(100, seed=6, ops=["shuffle"]):
        assert not right(task, task.items)
        assert "in another order" in check(task, " ".join(task.items)).detail


def test_a_checker_that_takes_any_order_would_be_found_out():
    """Control of the test above: a rule that looks at the numbers alone calls wrong answers
    right."""

    def loose(task, words):
        return sorted(words) == sorted(answers(task)[0])

    tasks = some(100, seed=7, ops=["sort", "reverse"], lengths=[4])
    assert any(loose(t, t.items) and not right(t, t.items) for t in tasks)


@pytest.mark.parametrize(
    ("prompt", "text", "valid"),
    [
        ("sort 3 1", "3 1", True),
        ("sort 3 1", "3", True),
        ("sort 3 1", "", False),
        ("sort 3 1", "sort", False),
        ("sort 3 1", "12 3", False),
        ("sort 3 1", "3 + 1", False),
        ("3 + 1", "5", True),
        ("3 + 1", "3 + 1 = 5", True),
        ("3 + 1", "3 +", False),
        ("3 + 1", "= 4", False),
        ("close (", "]", True),
        ("close (", "(", False),
        ("close (", "3", False),
    ],
)
def test_valid_is_what_could_answer_a_task_of_the_kind(prompt, text, valid):
    verdict = check(parse(prompt), text)
    assert (verdict.passed, verdict.valid) == (False, valid) and "expected" in verdict.detail


def test_the_interpreter_does_not_enumerate(monkeypatch):
    monkeypatch.setattr(text_tasks, "answers", lambda task: pytest.fail("enumerated"))
    monkeypatch.setattr(text_tasks, "permutations", lambda items: pytest.fail("enumerated"))
    task = parse("shuffle 0 1 2 3 4 5 6 7")
    assert (
        check(task, "7 6 5 4 3 2 1 0").passed
        and draw_answer(task, np.random.default_rng(0)) != task.items
    )
