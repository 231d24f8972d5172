"""Runs that are stepped: blocks, copies and one particle change nothing that they should not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from contract_bench import bench, model_for
from searches_closed_form import judged_target
from tabular import space_of

from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.core.sampler import Sampler
from gen.core.stats import SampleOutput
from gen.samplers.search.base import Particles
from gen.samplers.search.svdd import SVDD
from gen.testing.specs import SPECS, sampling_for

ROWS = [0, 3]


def sampler_of(name):
    """The sampler of a spec, with a distribution that leaves much to draw."""
    given = sampling_for(name)
    hot = {"temperature": 3.0} if given.get("temperature", 0.0) else {}
    return resolve_sampler(SPECS[name], given | hot)


def is_steppable(name):
    sampler = sampler_of(name)[0]
    if sampler.wraps:
        return False
    try:
        sampler.begin(None, None)
    except GenError as error:
        return "cannot be stepped" not in str(error)
    except Exception:  # of a target that is none
        return True
    return True


STEPPABLE = [name for name in SPECS if is_steppable(name)]
NAMES = [name for name in STEPPABLE if not sampler_of(name)[0].timed]


class Stepped(Sampler):
    """A sampler whose run is stepped by ``block`` and looked into after every block."""

    guarantee = "approximate"

    def __init__(self, inner, block):
        self.inner, self.block = inner, block
        self.protocol, self.draft_protocol = inner.protocol, inner.draft_protocol

    @property
    def drafted(self):
        return self.inner.drafted

    def __call__(self, target, rng, *, draft=None, canvas=None, trace=False, callback=None):
        run = self.inner.begin(target, rng, draft=draft, canvas=canvas, trace=trace)
        while not run.is_over:
            run.advance(self.block)
            estimate = run.peek()
            known = estimate.known.sum(1)
            assert run.is_over or bool(known[torch.from_numpy(run.slots.items)].max() < 12)
            if self.protocol == "causal":
                assert (known % self.block == 0).all() or self.block > 6 or run.is_over
        return run.output()


def run_bench(sampler, inner, sampling, **kwargs):
    return bench(inner.protocol, model_for(inner))(sampler, sampling, ROWS, **kwargs)


def same_costs(one: SampleOutput, other: SampleOutput):
    return [(s.nfe, s.tokens_computed) for s in one.stats] == [
        (s.nfe, s.tokens_computed) for s in other.stats
    ]


class WithEvaluator:
    """A search on a target that has an evaluator."""

    def __init__(self, search):
        self.search = search

    def __getattr__(self, name):
        return getattr(self.search, name)

    def __call__(self, target, rng, **kwargs):
        target.evaluator = judged_target(space_of((1,), 2), [0]).evaluator
        target.evaluator.contexts = None
        return self.search(target, rng, **kwargs)


REGISTERED = [name for name in NAMES if SPECS[name]["name"] == name]


@pytest.mark.parametrize("name", REGISTERED)
@pytest.mark.thinned(6)
def test_one_particle_is_the_base_token_for_token(name):
    inner, sampling = sampler_of(name)
    base = run_bench(inner, inner, sampling)
    search = SVDD(base=SPECS[name], m=1, block=3, scorer=lambda media, prompt: 0.0)
    object.__setattr__(search, "inner", inner)  # with the sampling parameters of a preset
    found = run_bench(WithEvaluator(search), inner, sampling)
    assert torch.equal(found.tokens, base.tokens)
    assert [s.nfe for s in found.stats] == [s.nfe for s in base.stats]


BLIND_TO_WINDOWS = [
    n
    for n in NAMES
    if sampler_of(n)[0].protocol == "masked"
    or n == "autoregressive"
    or sampler_of(n)[0].guarantee == "same_tokens"
]


@pytest.mark.parametrize("name", BLIND_TO_WINDOWS)
@pytest.mark.thinned(9)
def test_blocks_change_no_token_where_windows_do_not(name):
    inner, sampling = sampler_of(name)
    base = run_bench(inner, inner, sampling)
    for block in (1, 5):
        found = run_bench(Stepped(inner, block), inner, sampling)
        assert torch.equal(found.tokens, base.tokens)
        if inner.protocol == "masked":
            assert same_costs(found, base)


class Copied(Sampler):
    """Two particles of every item, one of which goes on from the other after the first blocks.

    ``fresh``: whether the copy gets noise of its own, as it should; else it has its ancestor's and
    must repeat it.
    """

    guarantee = "approximate"

    def __init__(self, inner, block, copies=True, fresh=False):
        self.inner, self.block, self.copies, self.fresh = inner, block, copies, fresh
        self.protocol, self.draft_protocol = inner.protocol, inner.draft_protocol

    @property
    def drafted(self):
        return self.inner.drafted

    def __call__(self, target, rng, *, draft=None, canvas=None, trace=False, callback=None):
        items = np.arange(target.items)
        branches = np.tile(np.arange(2), (len(items), 1))
        particles = Particles(target, rng, draft, canvas, items, branches, stepped=True)
        run = self.inner.begin(
            particles.target, particles.rng, draft=particles.draft, canvas=particles.canvas
        )
        for level in range(2):
            run.advance(self.block)
            run.peek()
            if self.copies:
                ancestors = np.repeat(2 * items + 1, 2)
                particles.branches[::2] = 2 + level if self.fresh else 1
                run.take(ancestors, particles.rng)
        while not run.is_over:
            run.advance(100)
        return run.output()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.thinned(14)
def test_a_copy_with_the_same_noise_repeats_its_ancestor(name):
    """All state follows: caches, drafts, tables, windows and schedules of the row."""
    inner, sampling = sampler_of(name)
    block = 4 if inner.protocol == "causal" else 2
    found = run_bench(Copied(inner, block), inner, sampling).tokens
    alone = run_bench(Copied(inner, block, copies=False), inner, sampling).tokens
    assert torch.equal(found[::2], found[1::2])
    assert torch.equal(found[1::2], alone[1::2])


FORKED = ["autoregressive", "speculative_jacobi", "speculative", "maskgit", "masked_iterative"]


@pytest.mark.parametrize("name", [n for n in FORKED if n in NAMES])
def test_control_a_copy_with_noise_of_its_own_diverges(name):
    inner, sampling = sampler_of(name)
    block = 4 if inner.protocol == "causal" else 2
    found = run_bench(Copied(inner, block, fresh=True), inner, sampling).tokens
    assert not torch.equal(found[::2], found[1::2])
