"""Constraints are built once at a time and kept in a cache; a process builds them within bounds."""

from __future__ import annotations

import threading
import time

import numpy as np
import psutil
import pytest
import torch

from gen.constraints import builder as module
from gen.constraints.budget import BudgetExceeded, Limits
from gen.constraints.build import built
from gen.constraints.builder import ConstraintBuilder
from gen.constraints.process import BuilderProcess
from gen.contracts.constraint import Constraint
from gen.contracts.vocabulary import Vocabulary
from gen.core.errors import GenError
from gen.core.token_space import TokenSpace

BYTES = (*(bytes([b]) for b in range(256)), None)
TEXT = Vocabulary(BYTES, BYTES)
END = 256
HOSTILE = {"regex": "((a{0,100}){0,100}){0,100}"}
UNCHECKED = {"regex": "(a|b)" * 150_000}  # parsed by the standard library, in one call
RULES = [
    {"regex": "[a-z]+@[a-z]+"},
    {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    {"trie": [[1, 2], [3]], "form": "chunks"},
    {"graph": [["A", "likes", "B"], ["B", "is", "C"]], "hops": 2},
]


def space(length: int = 24, eos: int | None = END) -> TokenSpace:
    legal = torch.ones(length, len(BYTES), dtype=torch.bool)
    legal[3, 5:9] = False
    return TokenSpace((length,), len(BYTES), legal, eos_token_id=eos)


@pytest.fixture
def counted(monkeypatch):
    """Count what is built."""
    rules = []

    def counting(structured, *args):
        rules.append(structured)
        time.sleep(0.05)
        return built(structured, *args)

    monkeypatch.setattr(module, "built", counting)
    return rules


def test_a_rule_is_built_once(counted):
    maker, found = ConstraintBuilder(), []
    threads = [
        threading.Thread(target=lambda: found.append(maker.build(RULES[0], TEXT, space())))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counted) == 1 and len({id(c) for c in found}) == 1 and len(found) == 6
    # what the constraint depends on is part of the key
    others = [
        (RULES[1], TEXT, space()),
        (RULES[0], Vocabulary(BYTES, BYTES), space()),
        (RULES[0], TEXT, space(20)),
        (RULES[0], TEXT, space(eos=None)),
    ]
    for n, other in enumerate(others):
        maker.build(*other)
        assert len(counted) == n + 2
    maker.build(RULES[0], TEXT, space(), left_to_right=False)
    assert len(counted) == len(others) + 2 and not maker._building


def test_the_cache_keeps_what_was_asked_for_last(counted):
    size = ConstraintBuilder().build(RULES[0], TEXT, space()).nbytes
    maker = ConstraintBuilder(cache_bytes=4 * size)
    rules = [{"regex": f"[a-z]+@[a-{letter}]+"} for letter in "defghij"]
    for rule in rules:
        maker.build(rules[0], TEXT, space())
        maker.build(rule, TEXT, space())
        assert maker.cache.nbytes <= 4 * size
    asked = len(counted)
    maker.build(rules[0], TEXT, space())
    maker.build(rules[-1], TEXT, space())
    assert len(counted) == asked and 2 <= len(maker.cache) < len(rules)
    maker.build(rules[1], TEXT, space())
    assert len(counted) == asked + 1  # control: this one went
    none = ConstraintBuilder(cache_bytes=10)
    none.build(rules[0], TEXT, space())
    assert len(none.cache) == none.cache.nbytes == 0


def test_a_rule_that_exceeded_its_budget_is_not_tried_again_for_a_while(counted, monkeypatch):
    maker = ConstraintBuilder(Limits(states=20))
    for _ in range(3):
        with pytest.raises(BudgetExceeded, match="20 states"):
            maker.build({"regex": "a{40}"}, TEXT, space())
    assert len(counted) == 1
    with pytest.raises(GenError, match="cannot be parsed"):  # at once, and kept nowhere
        maker.build({"regex": "a("}, TEXT, space())
    monkeypatch.setattr(module, "REFUSED_SECONDS", -1.0)
    for _ in range(2):
        with pytest.raises(BudgetExceeded):
            maker.build({"regex": "a{41}"}, TEXT, space())
    assert len(counted) == 4


def test_who_waits_for_the_same_rule_may_leave(counted):
    maker, leave = ConstraintBuilder(), GenError("the client left")
    maker.build(RULES[0], TEXT, space())  # what is imported lazily
    rule = {**HOSTILE, "budget": {"seconds": 4}}

    def build():
        with pytest.raises(BudgetExceeded):
            maker.build(rule, TEXT, space())

    other = threading.Thread(target=build)
    other.start()
    time.sleep(0.2)
    began = time.monotonic()
    with pytest.raises(GenError, match="client left"):
        maker.build(rule, TEXT, space(), interrupted=lambda: leave)
    assert other.is_alive() and time.monotonic() - began < 3
    other.join()
    assert len(counted) == 2


def test_rules_of_python_alone_are_built_without_the_cache(counted):
    maker = ConstraintBuilder()
    for _ in range(2):
        with pytest.raises(GenError, match=r"structured.choice"):
            maker.build({"choice": {1, 2}}, TEXT, space())
    assert len(counted) == 2 and len(maker.cache) == 0


# a process


@pytest.fixture(scope="module")
def process():
    made = BuilderProcess()
    yield made
    made.close()


def children(process: BuilderProcess) -> list[psutil.Process]:
    return psutil.Process(process.worker.pid).children(recursive=True)


def until(happens, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not happens() and time.monotonic() < end:
        time.sleep(0.02)
    return happens()


@pytest.mark.slow
@pytest.mark.parametrize("rule, eos", [*((rule, END) for rule in RULES), (RULES[0], None)])
def test_a_process_builds_what_a_call_builds(process, rule, eos):
    """Also where rows have no ends and positions differ."""
    here = ConstraintBuilder().build(rule, TEXT, space(eos=eos)).automaton()
    there = ConstraintBuilder(process=process).build(rule, TEXT, space(eos=eos))
    assert isinstance(there, Constraint)
    for name in ("next", "accepting", "token_class", "distance"):
        found = getattr(there.automaton(), name)
        assert (
            np.array_equal(getattr(here, name), found) and found.dtype == getattr(here, name).dtype
        )
    mask = there.start().allowed_bitmask(24)
    assert mask.any()
    path = psutil.Process(process.worker.pid)
    assert not any("torch" in part.path for part in path.memory_maps())  # it starts in no time


@pytest.mark.slow
def test_a_grammar_is_checked_in_the_process_and_built_here(process):
    maker = ConstraintBuilder(process=process)
    here = ConstraintBuilder().build({"grammar": 'start: "a" start | "b"'}, TEXT, space())
    there = maker.build({"grammar": 'start: "a" start | "b"'}, TEXT, space())
    masks = [c.start().allowed_bitmask(24) for c in (here, there)]
    assert np.array_equal(*masks) and masks[0].any()
    with pytest.raises(GenError, match="does not parse at line 1"):
        maker.build({"grammar": 'start: "a'}, TEXT, space())


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits, words", [({"seconds": 1}, "1 seconds"), ({"seconds": 30, "megabytes": 9}, "9 MB")]
)
def test_the_kernel_ends_what_checks_nothing(process, limits, words):
    maker = ConstraintBuilder(process=process)
    began = time.monotonic()
    with pytest.raises(BudgetExceeded, match=words):
        maker.build({**UNCHECKED, "budget": limits}, TEXT, space())
    assert time.monotonic() - began < limits["seconds"] + 1.5
    assert until(lambda: not children(process), 10)
    # control: a call of the same looks at its time after the parser alone
    if "megabytes" not in limits:
        began = time.monotonic()
        with pytest.raises(BudgetExceeded):
            ConstraintBuilder().build({**UNCHECKED, "budget": limits}, TEXT, space())
        assert time.monotonic() - began > 1.0 + 0.3


@pytest.mark.slow
@pytest.mark.parametrize("rule", [HOSTILE, UNCHECKED])
def test_a_construction_ends_with_its_request(process, rule):
    maker = ConstraintBuilder(process=process)
    maker.build(RULES[0], TEXT, space())
    ample = {"seconds": 300, "megabytes": 8000, "states": 10**9}
    left = threading.Event()
    errors = []

    def ask():
        try:
            maker.build(
                {**rule, "budget": ample},
                TEXT,
                space(),
                interrupted=lambda: GenError("the client left") if left.is_set() else None,
            )
        except GenError as error:
            errors.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    assert until(lambda: bool(children(process)), 60), errors
    time.sleep(0.5)
    assert children(process) and asking.is_alive()  # control: nobody ended it
    left.set()
    assert until(lambda: not children(process) and not asking.is_alive(), 10)
    assert errors == ["the client left"]


@pytest.mark.slow
def test_a_process_that_died_is_started_again(process):
    maker = ConstraintBuilder(process=process, cache_bytes=0)
    for _ in range(2):
        maker.build(RULES[0], TEXT, space())
        psutil.Process(process.worker.pid).kill()
        process.worker._process.wait()
    maker.build(RULES[0], TEXT, space())
    running = process.worker.pid
    maker.stop(GenError("it ends"))
    with pytest.raises(GenError, match="it ends"):
        maker.build(HOSTILE, TEXT, space())
    maker.close()
    assert not psutil.pid_exists(running)
