"""Drafts of a layer on the target's hidden states: the layer in training and in decoding, rows of a
batch, and the distribution of what is committed.

The controls see one slot too far, or claim another distribution than the drafts', and must miss.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from enumeration import distance, enumerate_distribution
from small_llama import small_llama

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import CausalLM
from gen.models.targets.causal import CausalTarget
from gen.samplers.causal.drafters import eagle_layer as eagle
from gen.samplers.causal.drafters.eagle import EagleNodes
from gen.samplers.causal.drafters.nodes import NodeDrafter
from gen.samplers.causal.drafters.trained import DrafterFacts, write_drafter
from gen.samplers.causal.shapes.base import Shape
from gen.samplers.causal.shapes.chain import Chain
from gen.samplers.engine.causal_loop import decode_causal

V, EXACT, STATES, WRONG = 24, 1e-12, 1e-9, 1e-3
NET = small_llama(V)
LAYERS = ("model.layers.0", "model.layers.1")
PROMPTS = torch.tensor([[7, 11, 19, 4], [2, 23, 9, 0], [19, 5, 6, 8]])
LENGTHS = torch.tensor([4, 3, 4])
UNCOND = torch.tensor([[1, 2], [1, 2], [1, 2]])
PLAIN = SamplingParams()
GUIDED = SamplingParams(temperature=0.7, top_k=2, guidance_scale=2.0)
speculative = registry.get("sampler", "speculative")
autoregressive = registry.get("sampler", "autoregressive")


def target(length: int, ids: int, sampling: SamplingParams = PLAIN, rows=(0, 1, 2)) -> CausalTarget:
    at = list(rows)
    uncond = UNCOND[at] if sampling.guided else None
    space = TokenSpace.codes((length,), V, ids)
    return CausalTarget(CausalLM(NET), PROMPTS[at], space, sampling, uncond, LENGTHS[at])


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
    extend = EagleNodes.begin

    def flat(self, step, tokens):
        logq = extend(self, step, tokens)
        known = ~logq.isneginf().all(-1, keepdim=True)
        legal = torch.arange(logq.shape[-1]) < 2
        other = torch.where(legal, -torch.log(torch.tensor(2.0)), -torch.inf).to(logq)
        self.claimed = logq
        return torch.where(known, other, logq)

    def verified(self, step, output):
        if self.tree is not None and self.tree.tokens.shape[1]:
            self.tree.logq[:, 0] = self.nodes.claimed
        return verify(self, step, output)

    verify = NodeDrafter.verify
    monkeypatch.setattr(EagleNodes, "begin", flat)
    monkeypatch.setattr(NodeDrafter, "verify", verified)
    sampler = speculative(drafter="eagle", drafter_weights=folder(PLAIN), **SHAPES[0])
    assert error(sampler, PLAIN, 3) > WRONG


class Noted(EagleNodes):
    """Nodes that note what the target's head would read, with the tree that it is about."""

    def begin(self, step, tokens):
        made = super().begin(step, tokens)
        self.seen = getattr(self, "seen", [])
        self.tokens = tokens.clone()
        return made

    def extend(self, step, tree, first):
        made = super().extend(step, tree, first)
        if self.known.any():
            known, heads = self.known.copy(), self.layer.head_input(self.outputs).detach()
            at = self.tokens, step.start.clone(), tree.tokens, tree.parents
            self.seen.append((*at, known, heads, step.items))
        return made


def noted(shape: Shape, draws: str, net: eagle.EagleLayer, length: int = 7) -> list:
    of = target(length, 20)
    nodes = Noted(of, net, LAYERS)
    rule = registry.get("verifier", "recursive")().on(of.space, of.device)
    drafter = NodeDrafter(of, nodes, shape, draws, rule)
    decode_causal(of, CounterRNG([5, 6, 7]), drafter)
    return nodes.seen


def in_training(net: eagle.EagleLayer, row: int, tokens: list[int], depth: int) -> torch.Tensor:
    """What the head reads behind tokens whose last ``depth`` are drafts, by unrolled training."""
    prompt = PROMPTS[row, : LENGTHS[row]].tolist()
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        found = NET(ids, output_hidden_states=True, use_cache=False).hidden_states
        states = torch.cat([found[1], last_layer(ids)], -1)[:, :-1]
        # what the target says of drafts is never known while they are drafted
        first = ids.shape[1] - 1 - depth
        states[:, first:] = torch.randn(1, states.shape[1] - first, states.shape[2]).double()
        embedding = NET.get_input_embeddings()(ids[:, 1:])
        return net(states, embedding, depth + 1)[depth][0, -1]


def last_layer(ids: torch.Tensor) -> torch.Tensor:
    """Output of the last layer, before the norm behind it."""
    kept = []
    hook = NET.model.layers[1].register_forward_hook(
        lambda m, i, out: kept.append(out[0] if isinstance(out, tuple) else out)
    )
    NET(ids, use_cache=False)
    hook.remove()
    return kept[0]


def gap(seen: list, net: eagle.EagleLayer, shift: int = 0) -> float:
    """Largest difference between decoding and training over all nodes of all rows and steps."""
    worst, count = 0.0, 0
    for tokens, start, drafts, parents, known, heads, items in seen:
        for row in known.nonzero()[0].tolist():
            begun = tokens[row, : int(start[row])].tolist()
            for node in range(-1, drafts.shape[1]):
                path, at = [], node
                while at >= 0:
                    path.insert(0, int(drafts[row, at]))
                    at = int(parents[row, at])
                if len(begun) + len(path) >= 7:
                    continue
                wanted = in_training(net, items[row], begun + path, len(path) + shift)
                worst = max(worst, float((heads[row, node + 1] - wanted).abs().max()))
                count += 1
    assert count > 20
    return worst


@pytest.mark.parametrize("options", [{}, {"gated": True}, {"rereads": True}])
def test_unrolled_training_is_decoding_step_by_step(options):
    net = layer(**options)
    assert gap(noted(Chain(None, 3), "with_replacement", net), net) < STATES


def test_branches_of_a_tree_are_chains_of_their_own():
    net = layer()
    kind = registry.get("shape", "branching")
    shape = kind(registry.params_of("shape", "branching")(branching="2-2"))
    assert gap(noted(shape, "without_replacement", net), net) < STATES


def test_control_an_unroll_too_many():
    net = layer()
    assert gap(noted(Chain(None, 3), "with_replacement", net), net, shift=1) > WRONG


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
