"""Jacobi decoding whose window begins with a tree (SJD-PAC): the distribution, by enumeration."""

from __future__ import annotations

import pytest
import torch
from constrained import with_end
from constraint_bench import COMBINED, EXACT, LONG, WRONG, error, run
from tabular import space_of

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.sampling_params import SamplingParams
from gen.samplers.causal.proactive import Siblings, num_siblings

jacobi = registry.get("sampler", "speculative_jacobi")
GUIDED = SamplingParams(guidance_scale=2.0)


def tree(width=2, levels=1, window=5, **params):
    params = {"tree_width": width, "tree_levels": levels, "window": window, **params}
    return jacobi(coupling="maximal", **params)


@pytest.mark.parametrize(
    ("sampler", "space", "sampling"),
    [
        pytest.param(tree(), space_of((3,), 3), SamplingParams(), id="plain"),
        pytest.param(tree(), space_of((4,), 3), COMBINED, id="guidance and filters"),
        pytest.param(tree(), with_end(3, 3), SamplingParams(), id="texts that end"),
        pytest.param(tree(levels=2, window=9), space_of((3,), 2), GUIDED, id="two levels"),
        pytest.param(tree(init="random"), space_of((3,), 2), GUIDED, id="certain drafts"),
    ],
)
@pytest.mark.thinned(2)
def test_a_tree_keeps_the_distribution(sampler, space, sampling):
    assert error(sampler, space, sampling) < EXACT


def test_control_siblings_that_are_judged_as_if_drawn_with_replacement(monkeypatch):
    true = Siblings._with_siblings

    def replaced(self, step):
        tree = true(self, step)
        tree.logq[:, 1] = tree.logq[:, 0]  # both are children of the root
        return tree

    assert error(tree(), space_of((2,), 3)) < EXACT
    monkeypatch.setattr(Siblings, "_with_siblings", replaced)
    assert error(tree(), space_of((2,), 3)) > WRONG


def test_a_tree_saves_forward_passes():
    chain = run(jacobi(coupling="maximal", window=6), LONG, GUIDED)
    out = run(tree(3, 2, 16), LONG, GUIDED)
    assert sum(s.nfe for s in out.stats) < sum(s.nfe for s in chain.stats)


def test_rows_do_not_depend_on_the_batch():
    together = run(tree(3, 2, 16), rows=list(range(6)))
    for row in range(3):
        alone = run(tree(3, 2, 16), rows=[row])
        assert torch.equal(alone.tokens[0], together.tokens[row])


def test_a_window_counts_the_siblings():
    assert (num_siblings(3, 2), num_siblings(2, 1), num_siblings(1, 4)) == (10, 1, 0)
    trace = run(tree(3, 2, 16), rows=[0], trace=True).traces[0]
    assert max(len(step.window) for step in trace) <= 16


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"coupling": "gumbel", "tree_width": 2}, "1 with the coupling gumbel, or the coupling"),
        ({"coupling": "maximal", "tree_width": 3, "window": 8}, "a number of at least 14"),
        ({"coupling": "maximal", "tree_width": 3, "window": "auto"}, "a number of at least 14"),
        ({"tree_width": 0}, "sampler.tree_width is 0"),
    ],
)
def test_a_bad_tree_is_refused(params, words):
    with pytest.raises(GenError, match=words):
        jacobi(**params)
