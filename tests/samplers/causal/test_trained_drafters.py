"""Drafters with trained networks: the distribution of what is committed whatever their weights,
what each node's distribution is made of, and rows of a batch.

The controls claim another distribution than the drafts', read the state of another position, or
say the right tokens one position too early, and must miss.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from decoding import decode_causal
from enumeration import distance, enumerate_distribution
from trained_drafters import (
    DEPTH,
    GUIDED,
    KINDS,
    LAST,
    LENGTHS,
    NET,
    PLAIN,
    PROMPTS,
    network,
    scrambled,
    target,
    write,
)

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.models.adapters.draft_models import exit_layer, exit_model
from gen.models.draft_heads.heads import MedusaHeads
from gen.models.targets.trained_drafters import projection
from gen.samplers.causal.drafters.heads import HeadNodes
from gen.samplers.causal.shapes.base import NodeDrafter
from gen.samplers.causal.shapes.static import Chain

EXACT, WRONG = 1e-12, 1e-3
VARIED = SamplingParams(temperature=3)
speculative = registry.get("sampler", "speculative")
autoregressive = registry.get("sampler", "autoregressive")
SHAPES = {
    "token": {"num_speculative_tokens": 2, "verifier": "token"},
    "block": {"num_speculative_tokens": 2, "verifier": "block"},
    "tree": {"shape": "branching", "branching": "2-1", "verifier": "recursive"},
}


def drafting(name: str, weights: str, **params):
    return speculative(drafter=KINDS[name][0], drafter_weights=weights, **params)


def error(sampler, sampling: SamplingParams, length: int) -> float:
    """Largest error of a probability, over three prompts that are decoded in one batch."""

    def law(made):
        def decode(rng, rows):
            return made(target(length, 3, sampling, rows), rng).tokens

        return enumerate_distribution(decode, len(PROMPTS))

    expected = law(autoregressive())
    assert distance(expected[0], expected[1]) > WRONG
    return max(distance(a, b) for a, b in zip(law(sampler), expected, strict=True))


def cases():
    for name in KINDS:
        for shape in SHAPES:
            fast = name == "medusa" and shape == "token"
            yield pytest.param(name, shape, marks=[] if fast else [pytest.mark.slow])


@pytest.mark.parametrize(("name", "shape"), cases())
def test_untrained_drafters_leave_the_distribution(tmp_path, name, shape):
    weights = write(name, target(4, 3, GUIDED), tmp_path)
    assert error(drafting(name, weights, **SHAPES[shape]), GUIDED, 4) < EXACT


@pytest.mark.parametrize("name", ["medusa", pytest.param("masked", marks=pytest.mark.slow)])
def test_control_drafts_of_another_distribution(tmp_path, monkeypatch, name):
    """Claims the distribution of no drafter, whatever the drafts were drawn from."""
    verify = NodeDrafter.verify

    def claimed(self, step, draft, output):
        if draft.logq is not None:
            draft.logq = torch.where(draft.logq.isneginf(), -torch.inf, -math.log(3))
        return verify(self, step, draft, output)

    weights = write(name, target(4, 3), tmp_path)
    monkeypatch.setattr(NodeDrafter, "verify", claimed)
    assert error(drafting(name, weights, **SHAPES["token"]), PLAIN, 4) > WRONG


@pytest.mark.parametrize("shape", ["block", "tree"])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.thinned(9)
def test_a_row_is_the_same_alone_and_in_a_batch(tmp_path, name, shape):
    weights = write(name, target(10, 20), tmp_path)
    sampler = drafting(name, weights, **SHAPES[shape])
    batch = sampler(target(10, 20), CounterRNG([5, 6, 7]))
    two = target(10, 20)
    two.at_most(2)
    replaced = sampler(two, CounterRNG([5, 6, 7]))
    assert torch.equal(batch.tokens, replaced.tokens)
    for row in range(3):
        alone = sampler(target(10, 20, rows=(row,)), CounterRNG([5 + row]))
        assert torch.equal(alone.tokens[0], batch.tokens[row])
        for made in (batch, replaced):
            assert made.stats[row].nfe == alone.stats[0].nfe
            assert made.stats[row].draft_nfe == alone.stats[0].draft_nfe


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.thinned(6)
def test_rows_that_wait_at_a_bound_go_on(tmp_path, name):
    weights = write(name, target(12, 20), tmp_path)
    sampler = drafting(name, weights, verifier="follow")
    whole = sampler(target(12, 20), CounterRNG([5, 6, 7]))
    run = sampler.begin(target(12, 20), CounterRNG([5, 6, 7]))
    while not run.is_over:
        run.advance(5)
    assert torch.equal(run.output().tokens, whole.tokens)


# --- heads


class Noted(HeadNodes):
    """Heads whose distributions are noted, with the tokens that they are about."""

    def begin(self, step, tokens):
        made = super().begin(step, tokens)
        self.seen = getattr(self, "seen", [])
        self.tokens = tokens.clone()
        return made

    def extend(self, step, tree, first):
        made = super().extend(step, tree, first)
        drafts = tree.tokens.clone(), tree.parents.clone()
        self.seen.append((self.tokens, step.start.clone(), self.known, *drafts, first, made))
        return made


def noted(name: str, shape: str) -> list:
    of = target(8, 20)
    net = scrambled(network(name, of))
    nodes = Noted(of, net, KINDS[name][1])
    kind = registry.get("shape", "branching")
    made = kind(registry.params_of("shape", "branching")(branching="2-2-1"))
    made = Chain(None, 4) if shape == "chain" else made
    rule = registry.get("verifier", "recursive")().attach(of)
    draws = "without_replacement" if shape == "tree" else "with_replacement"
    decode_causal(of, CounterRNG([5, 6, 7]), NodeDrafter(nodes, made, draws, rule))
    return [(net, *one) for one in nodes.seen]


def gap(seen: list, name: str, shift: int = 0) -> float:
    """Largest difference between a node's distribution and that of its path on its own."""
    worst, count = 0.0, 0
    for net, tokens, start, known, drafts, parents, first, made in seen:
        for row in range(len(start)):
            if not known[row]:
                assert made[row].isneginf().all()
                continue
            begun = tokens[row, : int(start[row])].tolist()
            for node in range(first, drafts.shape[1]):
                path, at = [], node
                while at >= 0:
                    path.insert(0, int(drafts[row, at]))
                    at = int(parents[row, at])
                if len(path) >= DEPTH:
                    assert made[row, node - first].isneginf().all()
                elif len(begun) + len(path) < 8:
                    wanted = alone(net, name, row, begun, path, shift)
                    worst = max(worst, float((made[row, node - first] - wanted).abs().max()))
                    count += 1
    assert count > 10
    return worst


@torch.no_grad()
def alone(net, name: str, row: int, begun: list[int], path: list[int], shift: int) -> torch.Tensor:
    """Distribution behind a path of drafts, from a forward pass over what is committed."""
    prompt = PROMPTS[row, : LENGTHS[row]].tolist()
    found = NET(torch.tensor([[*prompt, *begun]]), output_hidden_states=True, use_cache=False)
    numbers = {"model.layers.0": 1, LAST: 2}
    # the last committed token was drawn from the state of the one before
    states = [found.hidden_states[numbers[layer]][0, -2 + shift] for layer in KINDS[name][1]]
    embedded = NET.get_input_embeddings()(torch.tensor([begun[-1], *path]))
    return net(len(path), torch.cat(states), embedded)[:20].log_softmax(-1)


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("name", ["medusa", "hydra", "recurrent", "trigram"])
@pytest.mark.thinned(3)
def test_a_node_reads_the_state_before_the_last_token_and_its_own_path(name, shape):
    assert gap(noted(name, shape), name) < 1e-9


def test_control_the_state_of_the_last_token():
    assert gap(noted("hydra", "chain"), "hydra", shift=1) > WRONG


@pytest.mark.parametrize("depth", range(DEPTH))
@pytest.mark.parametrize("name", ["medusa", "hydra", "recurrent", "trigram"])
def test_a_head_reads_no_later_token(name, depth):
    net = scrambled(network(name, target(4, 20)))
    state, embedded = torch.randn(2, 5, len(KINDS[name][1]) * 16, DEPTH, 16).double().split(1)
    state, embedded = state[0, ..., 0, 0], embedded[0, :, 0]
    before = net(depth, state, embedded)
    other = embedded.clone()
    other[:, depth + 1 :] += 1
    assert torch.equal(net(depth, state, other), before)
    other[:, depth] += 1
    assert torch.equal(net(depth, state, other), before) == (name == "medusa")


@pytest.mark.parametrize("name", ["medusa", "hydra", "recurrent", "trigram"])
def test_new_heads_say_what_the_target_says_of_their_state(name):
    of = target(4, 24)
    net = network(name, of).double()
    width = 16
    state = torch.randn(5, len(KINDS[name][1]) * width).double()
    embedded = torch.randn(5, DEPTH, width).double()
    own = NET.get_output_embeddings()(state[:, -width:])
    for depth in range(DEPTH):
        assert torch.allclose(net(depth, state, embedded), own, atol=1e-12, rtol=0)


class Oracle(MedusaHeads):
    """Heads that know what follows each state."""

    def __init__(self, head, states, tokens, shift: int = 0):
        super().__init__(head, DEPTH)
        self.known, self.tokens, self.shift = states, tokens, shift

    def forward(self, depth, state, embedded):
        at = torch.cdist(state.flatten(0, -2), self.known).argmin(1)
        ids = self.tokens[(at + 1 + depth + self.shift).clamp_max(len(self.tokens) - 1)]
        return torch.nn.functional.one_hot(ids, 20).double().view(*state.shape[:-1], -1)


def passes_with_an_oracle(shift: int, length: int = 14) -> int:
    of = target(length, 20, VARIED, (0,))
    tokens = autoregressive()(of, CounterRNG([3])).tokens[0]
    ids = torch.tensor([[*PROMPTS[0].tolist(), *tokens.tolist()]])
    with torch.no_grad():
        states = NET(ids, output_hidden_states=True).hidden_states[2][0, 3:-1]
    assert len(tokens.unique()) > 4, "a sequence that repeats itself says nothing of shifts"
    of = target(length, 20, VARIED, (0,))
    nodes = HeadNodes(of, Oracle(projection(of, "medusa"), states, tokens, shift), (LAST,))
    rule = registry.get("verifier", "follow")()
    drafter = NodeDrafter(nodes, Chain(None, DEPTH), "ranks", rule)
    out = decode_causal(of, CounterRNG([3]), drafter)
    assert torch.equal(out.tokens[0], tokens)
    return out.stats[0].nfe


def test_heads_that_know_the_sequence_have_every_draft_accepted():
    assert passes_with_an_oracle(0) == 1 + math.ceil(13 / (DEPTH + 1))


@pytest.mark.parametrize("shift", [-1, 1])
def test_control_heads_that_are_one_position_off(shift):
    assert passes_with_an_oracle(shift) > 10


# --- exit


def logits_of(model, rows: int = 2) -> torch.Tensor:
    ids = torch.randint(0, 24, (rows, 6), generator=torch.Generator().manual_seed(2))
    at = torch.arange(6).expand_as(ids)
    return model.forward(ids, at, model.new_cache(8))


def test_an_exit_before_the_last_layer_with_that_layer_is_the_target():
    model = target(4, 20).model
    found = exit_model(model, 1, exit_layer(model, 1))
    assert torch.allclose(logits_of(found), logits_of(model), atol=1e-12, rtol=0)


def test_an_exit_with_a_layer_that_does_nothing_is_an_early_exit():
    model = target(4, 20).model
    own = copy.deepcopy(exit_layer(model, 1))
    own.self_attn.o_proj.weight.data.zero_()
    own.mlp.down_proj.weight.data.zero_()
    found, plain = exit_model(model, 1, own), model.with_layers((0,))
    assert torch.allclose(logits_of(found), logits_of(plain), atol=1e-12, rtol=0)
    assert float((logits_of(plain) - logits_of(model)).abs().max()) > WRONG


def test_the_layer_of_an_exit_leaves_the_target_as_it_is():
    model = target(4, 20).model
    before = logits_of(model)
    exit_model(model, 1, scrambled(exit_layer(model, 1)))
    assert torch.equal(logits_of(model), before)


@pytest.mark.parametrize("layers", [0, 2])
def test_an_exit_behind_all_layers_is_refused(layers):
    with pytest.raises(GenError, match=f"exit_layer is {layers}; expected from 1 to 1"):
        exit_layer(target(4, 20).model, layers)


# --- passes and folders


def test_a_drafter_of_all_depths_takes_one_pass_per_step(tmp_path):
    for name in ("masked", "prompt"):
        weights = write(name, target(12, 20), tmp_path / name)
        sampler = drafting(name, weights, num_speculative_tokens=DEPTH)
        out = sampler(target(12, 20), CounterRNG([5, 6, 7]))
        for stats in out.stats:
            # the last position has no room for a draft
            assert stats.draft_nfe in (stats.nfe, stats.nfe - 1)


def test_heads_take_no_forward_pass_of_their_own(tmp_path):
    weights = write("hydra", target(12, 20), tmp_path)
    out = drafting("hydra", weights)(target(12, 20), CounterRNG([5, 6, 7]))
    assert all(stats.draft_nfe is None for stats in out.stats)


@pytest.mark.parametrize("name", KINDS)
def test_a_drafter_of_other_sampling_parameters_or_shapes_is_refused(tmp_path, name):
    weights = write(name, target(4, 20), tmp_path / "a")
    with pytest.raises(GenError, match="was trained for temperature 1"):
        drafting(name, weights)(target(4, 20, GUIDED), CounterRNG([1, 2, 3]))
    other = "medusa" if name == "exit" else "exit"
    wrong = write(name, target(4, 20), tmp_path / "b", scrambled(network(other, target(4, 20))))
    with pytest.raises(GenError, match=f"the weights of the {KINDS[name][0]} drafter have"):
        drafting(name, wrong)(target(4, 20), CounterRNG([1, 2, 3]))
    with pytest.raises(GenError, match="comes without a drafter of kind"):
        drafting(name, None)(target(4, 20), CounterRNG([1, 2, 3]))
