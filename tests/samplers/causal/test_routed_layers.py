"""Drafts of the layers that routers choose for a prompt: the network that they come from, and that
a decision is the same however a row is computed.

Controls decide by another token, or open one layer more.
"""

from __future__ import annotations

import pytest
import torch
from small_llama import small_llama
from trained_drafters import (
    LENGTHS,
    PROMPTS,
    V,
    stepped,
    target,
    tokens_of,
    write,
)

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.models.adapters.draft_models import RoutedLayer, openness, routed_model
from gen.models.adapters.language_models import CausalLM
from gen.models.draft_heads.layer_maps import Routers
from gen.models.targets.causal import CausalTarget

LENGTH, LAYERS, WRONG = 8, 4, 1e-3
speculative = registry.get("sampler", "speculative")


def routers(seed: int = 4, rank: int = 4) -> Routers:
    torch.manual_seed(seed)
    made = Routers(16, LAYERS, rank).double()
    for p in made.parameters():
        p.data.copy_(torch.randn(p.shape) * 0.5)
    return made.requires_grad_(False)


def fixed(plan: tuple[int, ...]) -> Routers:
    """Routers that open the same layers for every prompt."""
    made = Routers(16, LAYERS, 0).double()
    for number, gate in enumerate(made.gates):
        gate.bias.data.fill_(3.0 if number in plan else -3.0)
    return made.requires_grad_(False)


def model() -> CausalLM:
    return CausalLM(small_llama(V, layers=LAYERS))


def draft(net: Routers) -> CausalTarget:
    return target(LENGTH, V).with_model(routed_model(model(), net))


@torch.no_grad()
def reference(
    tokens: torch.Tensor, net: Routers, more: int = 0
) -> tuple[torch.Tensor, list[list[int]]]:
    """Log-probabilities of all positions, row after row without a cache, and the open layers.
    ``more`` decides by so many more tokens of the prompt."""
    whole, rows, plans = small_llama(V, layers=LAYERS), [], []
    for row, length in enumerate(LENGTHS.tolist()):
        ids = torch.cat([PROMPTS[row, :length], tokens[row, :-1]])[None]
        at = torch.arange(ids.shape[1])[None]
        states, plan = whole.model.embed_tokens(ids), []
        rotations = whole.model.rotary_emb(states, at)
        for number, layer in enumerate(whole.model.layers):
            logits, closed = net(number, states)
            if float(logits[0, : length - 1 + more].sigmoid().mean()) > 0.5:
                plan.append(number)
                states = layer(states, position_ids=at, position_embeddings=rotations)
            else:
                states = closed
        logits = whole.lm_head(whole.model.norm(states))[0, length - 1 :]
        rows.append(logits.log_softmax(-1))
        plans.append(plan)
    return torch.stack(rows), plans


def seed_where(differ) -> int:
    """A seed of routers for which something holds."""
    return next(seed for seed in range(200) if differ(seed))


def plans_of(seed: int, more: int = 0) -> list[list[int]]:
    return reference(tokens_of(0, LENGTH), routers(seed), more)[1]


def test_the_draft_is_the_network_of_the_layers_that_the_prompt_opens():
    seed = seed_where(lambda s: len({tuple(p) for p in plans_of(s)}) == 3)
    tokens, net = tokens_of(0, LENGTH), routers(seed)
    wanted, _ = reference(tokens, net)
    for widths in ((LENGTH,), (1,) * LENGTH, (2, 1, 3, 2)):
        assert (stepped(draft(net), tokens, widths) - wanted).abs().max() < 1e-9


def test_the_last_token_of_a_prompt_and_the_answer_decide_nothing():
    seed = seed_where(lambda s: plans_of(s) != plans_of(s, more=1))
    tokens, net = tokens_of(0, LENGTH), routers(seed)
    wanted, _ = reference(tokens, net)
    control, _ = reference(tokens, net, more=1)
    found = stepped(draft(net), tokens, (1,) * LENGTH)
    assert (found - wanted).abs().max() < 1e-9 and (found - control).abs().max() > WRONG


def test_a_prompt_of_one_token_decides_by_it():
    logits = torch.tensor([[-3.0, 5.0, 5.0], [2.0, -8.0, 5.0]])
    assert openness(logits, torch.tensor([[0], [1]])).tolist() == pytest.approx(
        [float(torch.tensor(-3.0).sigmoid()), float(torch.tensor(2.0).sigmoid())]
    )
    assert openness(logits, torch.tensor([[2], [2]]))[1] < 0.5


def test_open_routers_are_the_target_itself():
    """Untrained ones are open."""
    of = target(LENGTH, V).with_model(model())
    wanted = stepped(of, tokens_of(1, LENGTH), (LENGTH,))
    untrained = Routers(16, LAYERS, 4).double().requires_grad_(False)
    assert (
        stepped(draft(untrained), tokens_of(1, LENGTH), (1,) * LENGTH) - wanted
    ).abs().max() < 1e-9
    closed = stepped(draft(fixed((0, 1, 3))), tokens_of(1, LENGTH), (1,) * LENGTH)
    assert (closed - wanted).abs().max() > WRONG

    def accepted(net: Routers) -> list[float]:
        target_ = target(LENGTH, V, SamplingParams(temperature=0.8)).with_model(model())
        other = target_.with_model(routed_model(model(), net))
        sampler = speculative(num_speculative_tokens=3, drafter="model")
        return [
            s.draft_acceptance_rate
            for s in sampler(target_, CounterRNG([3, 4, 5]), draft=other).stats
        ]

    assert accepted(untrained) == [1.0] * 3
    assert any(rate < 1 for rate in accepted(fixed((0, 3))))


def test_fixed_routers_are_the_network_with_those_layers():
    tokens = tokens_of(2, LENGTH)
    skipping = target(LENGTH, V).with_model(model().with_layers((0, 3)))
    found = stepped(draft(fixed((0, 3))), tokens, (1,) * LENGTH)
    assert (found - stepped(skipping, tokens, (LENGTH,))).abs().max() < 1e-9


def test_a_layer_that_no_row_opens_does_not_run():
    of, calls = draft(fixed((1, 2))), []
    for layer in of.model.model.model.layers:
        assert isinstance(layer, RoutedLayer)
        layer.layer.register_forward_hook(lambda *_, n=layer.number: calls.append(n))
    stepped(of, tokens_of(0, LENGTH), (2, 1))
    assert calls == [1, 2, 1, 2]


def test_a_drafter_of_another_target_is_refused(tmp_path):
    weights = write("router", target(4, 3), tmp_path)
    sampler = speculative(drafter="router", drafter_weights=weights)
    other = target(4, 3).with_model(CausalLM(small_llama(V, seed=1)))
    with pytest.raises(GenError, match="was trained for"):
        sampler(other, CounterRNG([0, 1, 2]))
    with pytest.raises(GenError, match="was trained for temperature 1"):
        sampler(target(4, 3, SamplingParams(temperature=0.5)), CounterRNG([0, 1, 2]))


@pytest.mark.parametrize("name", ["router", "lora_drop"])
def test_rows_of_one_prompt_share_its_prefill(tmp_path, name):
    """Also where they come when others have left."""
    rows = (0, 0, 1, 1, 0)
    weights = write(name, target(8, 20), tmp_path)
    sampler = speculative(drafter=name, drafter_weights=weights, num_speculative_tokens=3)
    keys = [5, 6, 7, 8, 9]
    for most in (5, 2):
        of = target(8, 20, rows=rows)
        of.at_most(most)
        of.shares_prefill = True
        found = sampler(of, CounterRNG(keys))
        for n, row in enumerate(rows):
            alone = sampler(target(8, 20, rows=(row,)), CounterRNG([keys[n]]))
            assert torch.equal(alone.tokens[0], found.tokens[n])
            assert alone.stats[0].nfe == found.stats[n].nfe
