"""What samplers refuse, and in which words, is what ``refusals.json`` has.

See ``tests/support/refusals.py``, which makes it: declarations may move, refusals may not.
"""

from __future__ import annotations

import pytest
import refusals

from gen.core.registry import registry

HELD = refusals.held()


@pytest.mark.parametrize("sampler", HELD)
def test_refusals_are_those_that_were_frozen(sampler):
    held, found = HELD[sampler], refusals.summary(sampler)
    rows = dict(refusals.asked(sampler))
    for spec, said in held["examples"].items():
        assert refusals.cut(rows.get(spec, "not asked")) == said, spec
    assert found["params"] == held["params"]
    assert found["sets"] == held["sets"], "the sets of parameters differ"
    moved = int(found["refused"], 16) ^ int(held["refused"], 16)
    differing = [row for n, row in enumerate(rows.items()) if moved >> len(rows) - 1 - n & 1]
    assert not differing, f"taken before and refused now, or the other way round: {differing[:5]}"
    assert found["sentences"] == held["sentences"], "a sentence that is no example differs"


def test_no_sampler_is_without_frozen_refusals():
    assert set(HELD) == set(registry.table("sampler"))


# --- control


def test_control_another_sentence_is_found(monkeypatch):
    sampler = "speculative_jacobi"
    rows = list(refusals.asked(sampler))
    at = next(n for n, (_, said) in enumerate(rows) if refusals.is_refused(said))
    for said in (None, "GenError: something else"):
        changed = [*rows[:at], (rows[at][0], said), *rows[at + 1 :]]
        monkeypatch.setattr(refusals, "asked", lambda name, changed=changed: changed)
        found = refusals.summary(sampler)
        assert found["sentences"] != HELD[sampler]["sentences"]
        assert (found["refused"] == HELD[sampler]["refused"]) == (said is not None)
