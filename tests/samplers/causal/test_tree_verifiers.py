"""Verifiers of trees: what each mistake does to the distribution, which tokens ``follow`` gives,
and how many drafts the verifiers accept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from constrained import with_end
from constraint_bench import (
    CONTEXTS,
    EXACT,
    LONG,
    SAMPLING_CASES,
    WRONG,
    error,
    models,
    run,
    speculative,
)
from enumeration import enumerate_distribution
from tabular import causal_target, space_of

from gen.core.registry import registry
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.samplers.causal.shapes.base import NodeDrafter
from gen.samplers.causal.shapes.static import Branching, levels_of
from gen.samplers.engine.draft import WITH_REPLACEMENT, WITHOUT_REPLACEMENT
from gen.samplers.verifiers.base import Verifier
from gen.samplers.verifiers.trees import Follow, node

SHAPES = {
    "chain": {"num_speculative_tokens": 3},
    "branching": {"branching": "2-2-1"},
    "paths": {"paths": 2, "path_length": 2, "trunk": 1},
    "best_first": {"nodes": 6, "tree_depth": 3},
    "stochastic_beam": {"beam_width": 2, "tree_depth": 3},
    "beam": {"beam_width": 2, "tree_depth": 3, "nodes": 5},
    "optimal": {"nodes": 6, "tree_depth": 3, "acceptance_by_rank": "0.5,0.3"},
}
SPACES = {"length": LONG, "end": with_end(12, 5)}
# drafters of several models have a shape of their own, tests/samplers/causal/test_several_drafts.py
KNOWN = [
    name
    for name, source in registry.table("drafter").items()
    if source.shapes and not source.several and not source.needs_weights
]
WAYS = [
    (drafter, shape, way)
    for drafter in KNOWN
    for shape, kind in registry.table("shape").items()
    if not kind.needs_weights
    for way in kind.takes
    if way in registry.get("drafter", drafter).draws
    # what reads a mixture of a level has no distribution of single nodes
    if (drafter, shape) != ("superposed", "best_first")
]


# --- the tokens of plain autoregression


def test_every_shape_is_here():
    known = registry.table("shape").items()
    assert set(SHAPES) == {name for name, kind in known if not kind.needs_weights}


@pytest.fixture(scope="module")
def plain():
    autoregressive = registry.get("sampler", "autoregressive")()
    cold = SamplingParams(temperature=0.0)
    return {
        name: (run(autoregressive, space), run(autoregressive, space, cold))
        for name, space in SPACES.items()
    }


@pytest.mark.parametrize(("drafter", "shape", "way"), WAYS)
@pytest.mark.thinned(13)
def test_follow_gives_the_tokens_of_autoregression(drafter, shape, way, plain):
    parts = {"drafter": drafter, "shape": shape, "draws": way, **SHAPES[shape]}
    # what mixes tokens has none whose constraint could be read
    space = "length" if drafter == "model" else "end"
    guided, cold = plain[space]
    out = run(speculative(verifier="follow", **parts), SPACES[space])
    assert torch.equal(out.tokens, guided.tokens)
    greedy = speculative(verifier="greedy", **parts)
    out = run(greedy, SPACES[space], SamplingParams(temperature=0.0))
    assert torch.equal(out.tokens, cold.tokens)


def test_drafts_with_the_noise_of_the_position_are_accepted_more_often():
    tree = {"shape": "branching", "branching": "1-1-1", "verifier": "follow"}
    accepted = {
        way: sum(sum(s.acceptance_histogram[1:]) for s in run(speculative(draws=way, **tree)).stats)
        for way in ("position_noise", "with_replacement")
    }
    assert accepted["position_noise"] > accepted["with_replacement"]


# --- controls: every mistake is seen

TREE = {"shape": "branching", "branching": "2-1", "draws": WITH_REPLACEMENT}
SPACE, SHORT = space_of((3,), 3), space_of((2,), 3)


def spoil(monkeypatch, change):
    """Change every tree between drafting and verifying."""
    grow = NodeDrafter.grow

    def spoilt(self, step, tokens):
        draft = grow(self, step, tokens)
        if draft.tokens.shape[1]:
            change(draft)
        return draft

    monkeypatch.setattr(NodeDrafter, "grow", spoilt)


@pytest.mark.parametrize("verifier", ["recursive", "traversal", "k_seq"])
def test_control_siblings_without_replacement_are_not_independent(verifier, monkeypatch):
    sampler = speculative(verifier=verifier, **TREE)
    make = NodeDrafter.__init__

    def without(self, nodes, shape, draws, *others):
        make(self, nodes, shape, WITHOUT_REPLACEMENT, *others)

    def independent(tree):  # the second of two siblings is claimed to be drawn as the first
        tree.logq = tree.logq[:, [0, 0, *range(2, 4)]]

    monkeypatch.setattr(NodeDrafter, "__init__", without)
    spoil(monkeypatch, independent)
    assert error(sampler, SHORT) > WRONG


@pytest.mark.parametrize("verifier", ["recursive", "traversal", "k_seq"])
def test_control_the_draft_distribution_of_another_node(verifier, monkeypatch):
    spoil(monkeypatch, lambda tree: setattr(tree, "logq", tree.logq[:, [2, 2, 0, 0]]))
    assert error(speculative(verifier=verifier, **TREE), SHORT) > WRONG


def drop_unlikely(tree):
    """Drop drafts whose value turned out unlikely, with all that follows them."""
    tree.exists = tree.exists & (tree.log_mass() > -1.0)
    for column in range(tree.tokens.shape[1]):
        above = tree.parents[:, column, None]
        there = tree.exists.gather(1, above.clamp_min(0)) | (above < 0)
        tree.exists[:, column] &= there[:, 0]


@pytest.mark.parametrize("verifier", ["recursive", "traversal", "k_seq"])
def test_control_a_draft_dropped_for_its_value(verifier, monkeypatch):
    spoil(monkeypatch, drop_unlikely)
    assert error(speculative(verifier=verifier, **TREE), SHORT) > WRONG


class DrawPerChild(Follow):
    """Draws a token of the target for every child, not one for the node."""

    guarantee = "same_distribution"
    draws = (WITH_REPLACEMENT, WITHOUT_REPLACEMENT)

    def verify(self, step, tree, logp):
        return Verifier.verify(self, step, tree, logp)

    def decide(self, step, tree, logp):
        at = torch.full_like(step.start, -1)
        for column in range(tree.tokens.shape[1]):
            turn = tree.exists[:, column] & (tree.parents[:, column] == at)
            key = step.start[:, None] + (column + 1) * 1000
            drawn = step.rng.categorical(
                node(logp, at)[:, None], step.rows, key, "accept", step.round, turn[:, None]
            )[:, 0]
            at = torch.where(turn & (drawn == tree.tokens[:, column]), column, at)
        return at + 1, lambda: node(logp, at)


def test_control_two_target_draws_at_one_node(monkeypatch):
    table = {**registry._kinds["verifier"], "follow": DrawPerChild}
    monkeypatch.setitem(registry._kinds, "verifier", table)
    assert error(speculative(verifier="follow", **TREE), SHORT) > WRONG


# --- how much they accept


def accepted(space: TokenSpace, sampling=SAMPLING_CASES["plain"], **params) -> list[float]:
    """Expected accepted drafts of the first forward pass, by context."""
    target, small = models(space, sampling)
    sampler = speculative(**params)

    def decode(rng, context):
        now, draft = (causal_target(m, space, sampling, context) for m in (target, small))
        traces = sampler(now, rng, draft=draft, trace=True).traces
        return torch.tensor([[len(trace[0].accepted)] for trace in traces])

    found = enumerate_distribution(decode, CONTEXTS)
    return [sum(count[0] * mass for count, mass in f.items()) for f in found]


@pytest.mark.parametrize("length", [1, 2])
def test_on_a_chain_a_verifier_of_trees_is_one_of_chains(length):
    """One draft after the other, or all of them together."""
    chain = {"num_speculative_tokens": length}
    for tree, known in (("recursive", "token"), ("traversal", "block"), ("k_seq", "token")):
        assert accepted(SPACE, verifier=tree, **chain) == pytest.approx(
            accepted(SPACE, verifier=known, **chain), abs=EXACT
        )


@pytest.mark.parametrize("way", [WITH_REPLACEMENT, WITHOUT_REPLACEMENT, "ranks"])
def test_traversal_accepts_at_least_as_many_as_recursive(way):
    tree = {"shape": "branching", "branching": "2-1", "draws": way}
    more = accepted(SPACE, verifier="traversal", **tree)
    less = accepted(SPACE, verifier="recursive", **tree)
    assert all(a >= b - EXACT for a, b in zip(more, less, strict=True))
    assert way == "ranks" or max(a - b for a, b in zip(more, less, strict=True)) > WRONG


def test_a_tree_accepts_more_than_its_first_path():
    chain = accepted(SPACE, verifier="recursive", num_speculative_tokens=2)
    tree = accepted(SPACE, verifier="recursive", shape="branching", branching="2-1")
    assert all(a > b for a, b in zip(tree, chain, strict=True))


def test_a_budget_of_branching_counts_every_level():
    params = replace(registry.params_of("shape", "branching")(), branching="3-2-1")
    tree = Branching(params)
    assert (tree.nodes, len(levels_of(tree.parents()))) == (3 + 6 + 6, 3)
