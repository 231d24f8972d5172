"""Trunks of Hydra heads that see more than one slot: in training and in decoding, step by step.

That they leave the distribution as it is, and that those of others are refused, is in
``test_trained_drafters.py``. The controls are one unroll off, lose the prompt or mix up paths, and
must miss.
"""

from __future__ import annotations

import pytest
import torch
from trained_drafters import DEPTH, KINDS, network, scrambled, target, write
from unrolled_drafts import gap, noted

from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.samplers.causal.drafters.heads import EntryNodes
from gen.samplers.causal.shapes.static import Chain

STATES, WRONG = 1e-9, 1e-3
TRUNKS = ("clover", "chimera")
CHAIN = Chain(None, DEPTH + 1), "with_replacement"


def tree():
    kind = registry.get("shape", "branching")
    return kind(registry.params_of("shape", "branching")(branching="2-2")), "without_replacement"


def made(name: str):
    return scrambled(network(name, target(4, 20))), KINDS[name][1]


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("name", TRUNKS)
@pytest.mark.thinned(2)
def test_unrolled_training_is_decoding_step_by_step(name, shape):
    net, layers = made(name)
    assert gap(noted(net, layers, *(CHAIN if shape == "chain" else tree())), net, layers) < STATES


@pytest.mark.parametrize("name", TRUNKS)
def test_control_an_unroll_too_many(name):
    net, layers = made(name)
    assert gap(noted(net, layers, *CHAIN), net, layers, shift=1) > WRONG


@pytest.mark.parametrize("name", TRUNKS)
def test_control_a_cache_without_the_prompt(monkeypatch, name):
    monkeypatch.setattr(EntryNodes, "_read_prompts", lambda self, output: None)
    net, layers = made(name)
    assert gap(noted(net, layers, *CHAIN), net, layers) > WRONG


def test_control_tokens_of_another_path(monkeypatch):
    """The tri-gram of a draft ends in its own token and begins in another slot's."""
    entries = EntryNodes._entries

    def mixed(self, feature, tokens, slots):
        others = torch.cat([tokens[..., :-1].flip(-1), tokens[..., -1:]], -1)
        return entries(self, feature, others, slots)

    monkeypatch.setattr(EntryNodes, "_entries", mixed)
    net, layers = made("chimera")
    assert gap(noted(net, layers, *CHAIN), net, layers) > WRONG


@pytest.mark.parametrize("name", TRUNKS)
def test_a_new_trunk_says_what_the_target_says_of_the_last_state(name):
    net = network(name, target(4, 24)).double()
    torch.manual_seed(0)
    states = torch.randn(2, 6, len(KINDS[name][1]) * 16).double()
    embedding = torch.randn(2, 6, net.num_tokens * 16).double()
    for k, read in enumerate(net(states, embedding, DEPTH)):
        gap = read[:, k:] - states[:, : 6 - k, -16:]
        assert gap.abs().max() < 1e-12


def test_each_depth_is_a_pass_of_the_drafter(tmp_path):
    weights = write("clover", target(12, 20), tmp_path)
    sampler = registry.get("sampler", "speculative")
    run = sampler(drafter="hydra", drafter_weights=weights, num_speculative_tokens=2)
    out = run(target(12, 20), CounterRNG([5, 6, 7]))
    assert all(0 < s.draft_nfe <= 2 * s.nfe for s in out.stats)


def test_control_states_that_the_block_did_not_see(monkeypatch):
    monkeypatch.setattr(EntryNodes, "_over_slots", lambda self, feature, *where: feature)
    net, layers = made("clover")
    assert gap(noted(net, layers, *CHAIN), net, layers) > WRONG
