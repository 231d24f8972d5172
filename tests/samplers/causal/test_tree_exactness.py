"""Every lossless verifier with every shape and every way to draw siblings, by enumeration."""

from __future__ import annotations

import pytest
from constrained import with_end
from constraint_bench import EXACT, error, speculative
from tabular import space_of

from gen.core.registry import registry
from gen.core.sampling_params import SamplingParams

COMBINED = SamplingParams(temperature=0.7, top_k=2, guidance_scale=2.0)
SHAPES = {
    "branching": {"branching": "2-1"},
    "paths": {"paths": 2, "path_length": 2},
    "delayed": {"shape": "paths", "paths": 2, "path_length": 1, "trunk": 1},
    "selected": {"shape": "paths", "paths": 2, "path_length": 1, "trunk": 2, "branch_below": 0.5},
    "best_first": {"nodes": 3, "tree_depth": 2},
    "stochastic_beam": {"beam_width": 2, "tree_depth": 2},
    "beam": {"beam_width": 2, "tree_depth": 2, "nodes": 3},
    "optimal": {"nodes": 3, "tree_depth": 2, "acceptance_by_rank": "0.5,0.3"},
}
VERIFIERS = [
    name
    for name, v in registry.table("verifier").items()
    if v.judges_trees and v.guarantee == "same_distribution"
]


def cases():
    for shape, params in SHAPES.items():
        kind = registry.get("shape", params.get("shape", shape))
        for verifier in VERIFIERS:
            for draws in kind.takes:
                if draws in registry.get("verifier", verifier).draws:
                    yield pytest.param(
                        {"shape": shape, "verifier": verifier, "draws": draws, **params},
                        id=f"{verifier}-{shape}-{draws}",
                    )


CASES = list(cases())


@pytest.mark.parametrize("params", CASES)
@pytest.mark.thinned(15)
def test_trees_keep_the_distribution(params):
    assert error(speculative(**params), space_of((3,), 3)) < EXACT


@pytest.mark.parametrize("params", CASES)
@pytest.mark.thinned(14)
def test_trees_keep_the_distribution_with_guidance_and_filters(params):
    assert error(speculative(**params), space_of((4,), 3), COMBINED) < EXACT


@pytest.mark.parametrize("params", CASES)
@pytest.mark.thinned(14)
def test_trees_keep_the_distribution_of_texts_that_end(params):
    assert error(speculative(**params), with_end(3, 3)) < EXACT
