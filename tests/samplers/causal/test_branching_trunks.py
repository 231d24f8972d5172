"""Trunks of drafts that end where the drafter is unsure: how long they are, row by row.

That every verifier stays exact with them is in ``test_tree_exactness.py``.
"""

from __future__ import annotations

import pytest
import torch
from trained_drafters import target

from gen.core.registry import registry
from gen.core.rng import CounterRNG

PATHS = {
    "drafter": "layer_skip",
    "kept_layers": "0",
    "shape": "paths",
    "paths": 2,
    "path_length": 1,
    "trunk": 3,
    "verifier": "recursive",
}
speculative = registry.get("sampler", "speculative")


def run(rows=(0, 1, 2), **params):
    keys = CounterRNG([5 + row for row in rows])
    return speculative(**PATHS, **params)(target(24, 20, rows=rows), keys)


def passes(**params) -> float:
    """Passes of the drafter for one of the target, over three rows."""
    stats = run(**params).stats
    return sum(s.draft_nfe for s in stats) / sum(s.nfe for s in stats)


def test_a_trunk_is_as_long_as_its_bound_says():
    fixed, some, none = (passes(branch_below=p) for p in (0.0, 0.12, 1.0))
    assert none < some < fixed and none <= 1
    assert fixed > 3


def test_an_end_that_no_draft_reaches_is_a_trunk_of_fixed_length():
    assert torch.equal(run(branch_below=1e-9).tokens, run().tokens)
    assert not torch.equal(run(branch_below=0.12).tokens, run().tokens)


@pytest.mark.parametrize("bound", [0.12, 0.15])
def test_a_row_is_the_same_alone_and_in_a_batch(bound):
    batch = run(branch_below=bound)
    for row in range(3):
        alone = run((row,), branch_below=bound)
        assert torch.equal(alone.tokens[0], batch.tokens[row])
        assert alone.stats[0].draft_nfe == batch.stats[row].draft_nfe
