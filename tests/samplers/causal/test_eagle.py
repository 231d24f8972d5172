"""Drafts of a layer on the target's hidden states: the layer in training and in decoding, rows of a
batch, and the distribution of what is committed.

The controls see one slot too far, or claim another distribution than the drafts', and must miss.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from enumeration import distance, enumerate_distribution
from trained_drafters import GUIDED, PLAIN, PROMPTS, target
from unrolled_drafts import gap, noted

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.models.draft_heads import eagle
from gen.models.targets.identity import DrafterFacts
from gen.models.targets.trained_drafters import write_drafter
from gen.samplers.causal.drafters.heads import EntryNodes
from gen.samplers.causal.shapes.base import NodeDrafter
from gen.samplers.causal.shapes.static import Chain

EXACT, STATES, WRONG = 1e-12, 1e-9, 1e-3
LAYERS = ("model.layers.0", "model.layers.1")
speculative = registry.get("sampler", "speculative")
autoregressive = registry.get("sampler", "autoregressive")


def layer(gated: bool = False, rereads: bool = False) -> eagle.EagleLayer:
    torch.manual_seed(3)
    shape = eagle.EagleShape(32, 16, 16, 32, 16, rereads, gated)
    made = eagle.EagleLayer(shape).double().eval()
    for p in made.parameters():
        p.data.mul_(3) if p.dim() > 1 else None
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Makes folders of untrained drafters, by sampling parameters and number of token ids."""

    def write(sampling: SamplingParams, ids: int = 3) -> str:
        path, net = tmp_path_factory.mktemp("drafter"), layer()
        of = target(4, ids, sampling)
        facts = DrafterFacts.of("eagle", of, LAYERS, dataclasses.asdict(net.shape))
        write_drafter(path, facts, net.state_dict())
        return str(path)

    return write


def error(sampler, sampling: SamplingParams, length: int) -> float:
    """Largest error of a probability, over three prompts that are decoded in one batch."""

    def law(made):
        def decode(rng, rows):
            return made(target(length, 3, sampling, rows), rng).tokens

        return enumerate_distribution(decode, len(PROMPTS))

    expected = law(autoregressive())
    assert distance(expected[0], expected[1]) > WRONG
    return max(distance(a, b) for a, b in zip(law(sampler), expected, strict=True))


SHAPES = [
    {"num_speculative_tokens": 2, "verifier": "token"},
    {"num_speculative_tokens": 2, "verifier": "block"},
    {"shape": "branching", "branching": "2-1", "verifier": "recursive"},
]


@pytest.mark.parametrize("params", SHAPES, ids=["token", "block", "tree"])
def test_an_untrained_layer_leaves_the_distribution(folder, params):
    sampler = speculative(drafter="eagle", drafter_weights=folder(GUIDED), **params)
    assert error(sampler, GUIDED, 4) < EXACT


def test_control_drafts_of_another_distribution(folder, monkeypatch):
    """Drawn from one distribution, claimed to be drawn from another."""
    extend = EntryNodes.begin

    def flat(self, step, tokens):
        logq = extend(self, step, tokens)
        known = ~logq.isneginf().all(-1, keepdim=True)
        legal = torch.arange(logq.shape[-1]) < 2
        other = torch.where(legal, -torch.log(torch.tensor(2.0)), -torch.inf).to(logq)
        self.claimed = logq
        return torch.where(known, other, logq)

    def verified(self, step, draft, output):
        if draft.tokens.shape[1]:
            draft.logq[:, :1] = self.nodes.claimed
        return verify(self, step, draft, output)

    verify = NodeDrafter.verify
    monkeypatch.setattr(EntryNodes, "begin", flat)
    monkeypatch.setattr(NodeDrafter, "verify", verified)
    sampler = speculative(drafter="eagle", drafter_weights=folder(PLAIN), **SHAPES[0])
    assert error(sampler, PLAIN, 3) > WRONG


@pytest.mark.parametrize("options", [{}, {"gated": True}, {"rereads": True}])
def test_unrolled_training_is_decoding_step_by_step(options):
    net = layer(**options)
    assert gap(noted(net, LAYERS, Chain(None, 3), "with_replacement"), net, LAYERS) < STATES


def test_branches_of_a_tree_are_chains_of_their_own():
    net = layer()
    kind = registry.get("shape", "branching")
    shape = kind(registry.params_of("shape", "branching")(branching="2-2"))
    assert gap(noted(net, LAYERS, shape, "without_replacement"), net, LAYERS) < STATES


def test_control_an_unroll_too_many():
    net = layer()
    assert gap(noted(net, LAYERS, Chain(None, 3), "with_replacement"), net, LAYERS, shift=1) > WRONG


@pytest.mark.parametrize("params", SHAPES[1:], ids=["chain", "tree"])
def test_a_row_is_the_same_alone_and_in_a_batch(folder, params):
    weights = folder(PLAIN, 20)
    sampler = speculative(drafter="eagle", drafter_weights=weights, **params)
    batch = sampler(target(12, 20), CounterRNG([5, 6, 7]))
    two = target(12, 20)
    two.at_most(2)
    replaced = sampler(two, CounterRNG([5, 6, 7]))
    assert torch.equal(batch.tokens, replaced.tokens)
    for row in range(3):
        alone = sampler(target(12, 20, rows=[row]), CounterRNG([5 + row]))
        assert torch.equal(alone.tokens[0], batch.tokens[row])
        for made in (batch, replaced):
            assert made.stats[row].nfe == alone.stats[0].nfe
            assert made.stats[row].draft_nfe == alone.stats[0].draft_nfe


def test_a_row_waits_without_losing_its_entries(folder):
    weights = folder(PLAIN, 20)
    sampler = speculative(drafter="eagle", drafter_weights=weights, verifier="follow")
    whole = sampler(target(12, 20), CounterRNG([5, 6, 7]))
    run = sampler.begin(target(12, 20), CounterRNG([5, 6, 7]))
    while not run.is_over:
        run.advance(5)
    assert torch.equal(run.output().tokens, whole.tokens)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"target": "0" * 16}, "with weights 0000000000000000; expected"),
        ({"vocab_size": 9}, "is of 9 tokens; expected 20"),
        ({"kind": "medusa"}, "is of kind medusa; expected eagle"),
    ],
)
def test_a_drafter_of_something_else_is_refused(tmp_path, change, said):
    net, of = layer(), target(4, 20)
    facts = DrafterFacts.of("eagle", of, LAYERS, dataclasses.asdict(net.shape))
    write_drafter(tmp_path, dataclasses.replace(facts, **change), net.state_dict())
    sampler = speculative(drafter="eagle", drafter_weights=str(tmp_path))
    with pytest.raises(GenError, match=said):
        sampler(of, CounterRNG([1, 2, 3]))


def test_a_drafter_of_other_sampling_parameters_is_refused(folder):
    sampler = speculative(drafter="eagle", drafter_weights=folder(PLAIN))
    with pytest.raises(GenError, match=r"was trained for temperature 1.0, top_k 0.*expected equal"):
        sampler(target(4, 3, GUIDED), CounterRNG([1, 2, 3]))
