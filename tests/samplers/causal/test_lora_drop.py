"""Drafts of layers that run at every n-th token: what a token between full ones is made of, and
that what was rejected leaves nothing behind.

The reference computes one token after the other without a cache. Controls take the output of
another token, or leave the correction out.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from small_llama import small_llama
from trained_drafters import (
    LENGTHS,
    PROMPTS,
    V,
    network,
    scrambled,
    stepped,
    target,
    tokens_of,
    write,
)

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.models.adapters.draft_models import DroppedLayer, dropped_layers, dropping_model
from gen.models.adapters.language_models import CausalLM
from gen.models.draft_heads.layer_maps import Corrections
from gen.models.targets.causal import CausalTarget
from gen.samplers.engine.draft import tree_positions

LENGTH, EVERY, WRONG = 8, 2, 1e-3
speculative = registry.get("sampler", "speculative")
DROPPED = (1, 3)


def corrections(scale: float = 0.5) -> Corrections:
    torch.manual_seed(3)
    made = Corrections(16, 4, 8.0, DROPPED).double()
    for p in made.parameters():
        p.data.copy_(torch.randn(p.shape) * scale)
    return made.requires_grad_(False)


def draft(cycle: int, net: Corrections | None = None) -> CausalTarget:
    """A dropping model of four layers over the three prompts, one of which is shorter."""
    of = target(LENGTH, V)
    model = CausalLM(small_llama(V, layers=4))
    arguments = {"every": EVERY, "cycle": cycle}
    return of.with_model(dropping_model(model, net or corrections(), arguments))


@torch.no_grad()
def reference(tokens: torch.Tensor, cycle: int, net: Corrections, late: int = 0) -> torch.Tensor:
    """Log-probabilities of all positions, layer after layer and token after token. ``late`` takes
    the output of so many full tokens before the last one."""
    model, rows = small_llama(V, layers=4), []
    for row, length in enumerate(LENGTHS.tolist()):
        ids = torch.cat([PROMPTS[row, :length], tokens[row, :-1]])[None]
        start, count = length - 1, ids.shape[1]
        full = [t for t in range(count) if t < start or (t - start) % cycle == 0]
        states, at = model.model.embed_tokens(ids), torch.arange(count)[None]
        rotations = model.model.rotary_emb(states, at)
        for number, layer in enumerate(model.model.layers):
            if number not in DROPPED:
                states = layer(states, position_ids=at, position_embeddings=rotations)
                continue
            some = [x[:, full] for x in rotations]
            # a layer over the full tokens alone
            outputs = layer(states[:, full], position_ids=at[:, full], position_embeddings=some)
            made = []
            for t in range(count):
                last = max(n for n, f in enumerate(full) if f <= t)
                kept = outputs[0, max(0, last - late)]
                made.append(kept if t in full else kept + net(number, states)[0, t])
            states = torch.stack(made)[None]
        logits = model.lm_head(model.model.norm(states))[0, start:]
        rows.append(logits.log_softmax(-1))
    return torch.stack(rows)


@pytest.mark.parametrize("cycle", [2, 3])
def test_a_token_between_full_ones_takes_the_output_of_the_last(cycle):
    tokens, net = tokens_of(0, LENGTH), corrections()
    wanted = reference(tokens, cycle, net)
    for widths in ((LENGTH,), (1,) * LENGTH, (2, 1, 3, 2)):
        assert (stepped(draft(cycle), tokens, widths) - wanted).abs().max() < 1e-9
    assert (reference(tokens, cycle, net, late=1) - wanted).abs().max() > WRONG
    assert (reference(tokens, cycle, corrections(0.0)) - wanted).abs().max() > WRONG


def test_a_cycle_of_one_is_the_target_itself():
    tokens, plain = tokens_of(1, LENGTH), target(LENGTH, V)
    plain = plain.with_model(CausalLM(small_llama(V, layers=4)))
    wanted = stepped(plain, tokens, (LENGTH,))
    for widths in ((LENGTH,), (1,) * LENGTH):
        assert (stepped(draft(1), tokens, widths) - wanted).abs().max() < 1e-9
        assert (stepped(draft(2), tokens, widths) - wanted).abs().max() > WRONG


def test_rejected_drafts_leave_nothing_behind():
    """Positions 3 to 6 are drafted twice, with other tokens the first time; 4 is a full one."""
    tokens, others, of = tokens_of(2, LENGTH), tokens_of(5, LENGTH), draft(2)
    wanted = stepped(draft(2), tokens, (1,) * LENGTH)
    before = torch.cat([tokens[:, :1], tokens[:, :-1]], 1)
    wrong = torch.cat([others[:, :1], others[:, :-1]], 1)
    found = []
    for t in range(LENGTH):
        if t == 3:
            for ahead in range(3, 7):
                at = torch.full((3, 1), ahead)
                last = of.predict(wrong[:, ahead, None], at).logprobs
            assert (last[:, 0] - wanted[:, 6]).abs().max() > WRONG
        found.append(of.predict(before[:, t, None], torch.full((3, 1), t)).logprobs)
    assert (torch.cat(found, 1) - wanted).abs().max() < 1e-9


@pytest.mark.parametrize("start", [2, 3])
def test_a_node_of_a_tree_takes_the_output_of_its_own_branch(start):
    """Two branches of depth 3, so that the full token is a draft on each of them."""
    tokens, of = tokens_of(6, LENGTH), draft(2)
    stepped(of, tokens, (1,) * start)
    drafts = tokens_of(7, LENGTH)[:, :6]
    parents = torch.tensor([[-1, 0, 1, -1, 3, 4]]).expand(3, -1)
    at = tree_positions(torch.full((3,), start), parents)
    given = torch.cat([tokens[:, start - 1, None], drafts], 1)
    found = of.predict(given, at, parents).logprobs
    paths = []
    for columns in ([1, 2, 3], [4, 5, 6]):
        path = torch.cat([tokens[:, :start], drafts[:, [c - 1 for c in columns]]], 1)
        whole = torch.cat([path, tokens[:, start + 3 :]], 1)
        wanted = stepped(draft(2), whole, (1,) * LENGTH)[:, start : start + 4]
        assert (found[:, [0, *columns]] - wanted).abs().max() < 1e-9
        paths.append(wanted)
    assert (paths[0][:, 1:] - paths[1][:, 1:]).abs().max() > WRONG


def test_layers_rest_between_full_tokens(monkeypatch):
    calls = []
    of = draft(4)
    for layer in of.model.model.model.layers:
        if isinstance(layer, DroppedLayer):
            layer.layer.register_forward_hook(lambda *_, n=layer.number: calls.append(n))
    short = LENGTHS.tolist()
    assert len(set(short)) > 1  # rows whose full tokens have different slots
    stepped(of, tokens_of(0, LENGTH), (1,) * LENGTH)
    assert calls == [1, 3] * 2  # at positions 0 and 4


def test_all_drafts_are_accepted_where_all_tokens_are_full():
    model = CausalLM(small_llama(V, layers=4))

    def decoded(cycle: int):
        of = target(LENGTH, V, SamplingParams(temperature=0.8)).with_model(model)
        arguments = {"every": EVERY, "cycle": cycle}
        other = of.with_model(dropping_model(model, corrections(), arguments))
        sampler = speculative(num_speculative_tokens=3, drafter="model")
        return sampler(of, CounterRNG([3, 4, 5]), draft=other)

    assert [s.draft_acceptance_rate for s in decoded(1).stats] == [1.0] * 3
    assert any(s.draft_acceptance_rate < 1 for s in decoded(4).stats)


def test_a_drafter_of_another_target_is_refused(tmp_path):
    weights = write("lora_drop", target(4, 3), tmp_path)
    sampler = speculative(drafter="lora_drop", drafter_weights=weights)
    other = target(4, 3).with_model(CausalLM(small_llama(V, seed=1)))
    with pytest.raises(GenError, match="was trained for"):
        sampler(other, CounterRNG([0, 1, 2]))
    with pytest.raises(GenError, match="was trained for temperature 1"):
        sampler(target(4, 3, SamplingParams(temperature=0.5)), CounterRNG([0, 1, 2]))
    router = write("router", target(4, 3), tmp_path / "router")
    with pytest.raises(GenError, match="is of kind router; expected lora_drop"):
        speculative(drafter="lora_drop", drafter_weights=router)(target(4, 3), CounterRNG([0]))


def test_models_that_drop_nothing_are_named(monkeypatch):
    assert dropped_layers(8, 4) == (1, 2, 3, 5, 6, 7)
    for layers, every in ((1, 4), (4, 1), (4, 0)):
        with pytest.raises(GenError, match=f"every came as {every}, which drops none of {layers}"):
            dropped_layers(layers, every)
    of = target(4, 3)
    net = partial(scrambled(network("lora_drop", of)))
    monkeypatch.setattr(of.model, "takes_block_masks", True)
    with pytest.raises(GenError, match="attention is flex_attention; expected sdpa or eager"):
        dropping_model(of.model, net, {"every": 2, "cycle": 2})
