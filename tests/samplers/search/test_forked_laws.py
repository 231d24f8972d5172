"""Laws of particles that stop at a block's end and fork there, by enumeration of production code.

Two particles of one row share their first positions and go on independently of each other, each
with the law of the base given what is decided: so nothing that a particle drew beyond the block's
end, and no state that it carries, changes the law of its copy.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from enumeration import distance, enumerate_distribution
from searches_closed_form import PLAIN, judged_target
from tabular import TabularCausal, causal_distribution, space_of

from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.samplers.search.base import Particles
from gen.testing.specs import CHAINS, tree

EXACT, WRONG = 1e-12, 1e-3
SPACE = space_of((3,), 2)
MODEL = TabularCausal(2, low=0.0)
COUPLINGS = [
    name for name, c in registry.table("coupling").items() if c.guarantee == "same_distribution"
]
SPECS = {"autoregressive": {"name": "autoregressive"}}
SPECS |= {
    f"jacobi-{c}": {"name": "speculative_jacobi", "coupling": c, "window": 3} for c in COUPLINGS
}
SPECS |= {
    f"{v}-chain": {"name": "speculative", "verifier": v, "num_speculative_tokens": 2}
    for v in CHAINS
}
SPECS |= {
    "pearl": {"name": "pearl", "num_speculative_tokens": 2},
    "recursive-tree": tree("branching", "recursive"),
    "prompt_lookup": {"name": "speculative", "drafter": "prompt_lookup"},
    "sjd_pac": {"name": "sjd_pac"},
}


def forked(spec, block, fresh=True):
    """The law of two particles, the second of which goes on from the first after a block."""
    sampler = resolve_sampler(spec)[0]

    def decode(rng, context):
        target = judged_target(SPACE, context, PLAIN, MODEL)
        draft = judged_target(SPACE, context, PLAIN, TabularCausal(2, 5, low=0.0))
        items = np.arange(len(context))
        branches = np.tile([0, 1], (len(items), 1))
        particles = Particles(
            target, rng, draft if sampler.drafted else None, None, items, branches, stepped=True
        )
        run = sampler.begin(particles.target, particles.rng, draft=particles.draft)
        run.advance(block)
        particles.branches[1::2] = 2 if fresh else 0
        run.take(np.repeat(2 * items, 2), particles.rng)
        while not run.is_over:
            run.advance(100)
        return run.output().tokens.view(len(items), -1)

    return enumerate_distribution(decode, 1)[0]


def closed(block):
    """p(x) p(y | the first positions of x)."""
    law = causal_distribution(MODEL, SPACE, PLAIN, 0)
    prefix: dict[tuple, list[float]] = {}
    for x, p in law.items():
        prefix.setdefault(x[:block], []).append(p)
    return {
        (*x, *y): p * q / math.fsum(prefix[x[:block]])
        for x, p in law.items()
        for y, q in law.items()
        if x[:block] == y[:block]
    }


@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.thinned(9)
def test_copies_go_on_independently_with_the_law_of_the_base(name, block):
    assert distance(forked(SPECS[name], block), closed(block)) < EXACT


def test_control_a_copy_with_its_ancestors_noise_repeats_it():
    assert distance(forked(SPECS["autoregressive"], 1, fresh=False), closed(1)) > WRONG
