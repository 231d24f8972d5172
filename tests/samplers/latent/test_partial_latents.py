"""Partial forward passes of masked models of latents (ReCAP's of MAR): encoder and decoder against
a cache, for the embedded architecture and for the published one."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from closed_form import LinearMasked
from continuous import LinearHead
from latent_bench import CHANNELS, GRID, POSITIONS, ROWS, SAMPLING, SPACE
from torch import Tensor

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.models.adapters import partial_latents
from gen.models.adapters.language_models import MaskedLatentLM
from gen.models.nets.grid_latent import GridLatentConfig, GridLatentModel
from gen.models.published.mar import MAR, MARConfig
from gen.models.targets.cached_masked import cached
from gen.models.targets.latent import MaskedLatentTarget
from gen.models.targets.partial import Plan

NETS, EXACT, SAME = ("grid", "mar"), 1e-10, 1e-12
NEAR = 1e-8  # the untrained head of MAR makes large latents
PARTIAL = {"name": "mar", "steps": 4, "cache": "partial", "cache_warmup": 0}
POLICIES = [n for n in registry.table("cache_policy") if n != "none"]


@cache
def network(name: str, encoder: int = 1, decoder: int = 2) -> torch.nn.Module:
    """A tiny one with random weights, so that no token or table is zero."""
    torch.manual_seed(0)
    if name == "mar":
        widths = (16, encoder, 32), (24, decoder, 32)
        net = MAR(MARConfig(POSITIONS, 3, 5, CHANNELS, *widths, (2, 2), 16, 1, 4, 0.3))
    else:
        net = GridLatentModel(
            GridLatentConfig(
                grid=GRID,
                prefix_length=3,
                vocab_size=9,
                latent_channels=CHANNELS,
                causal=False,
                encoder_layers=encoder,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=encoder + decoder,
                num_attention_heads=2,
                num_key_value_heads=2,
                head_width=16,
                head_depth=1,
                head_steps=4,
                sigma_floor=0.3,
            )
        )
    with torch.no_grad():
        for weight in net.parameters():
            weight.normal_(0, 0.4)
    return net.double().eval()


def target(
    name: str, rows=range(ROWS), sampling: SamplingParams = SAMPLING, **depth: int
) -> MaskedLatentTarget:
    rows = list(rows)
    words = torch.tensor([[r, 2 * r % 9, 8] for r in rows])
    words = words[:, :1] if name == "mar" else words
    adapter = MaskedLatentLM(network(name, **depth))
    return MaskedLatentTarget(
        adapter, words, SPACE, sampling, torch.full_like(words, 5 if name == "mar" else 7)
    )


def canvases() -> tuple[Tensor, Tensor, Tensor]:
    """Before and after a part of a group of positions became known, and the group."""
    g = torch.Generator().manual_seed(1)
    before = torch.full((ROWS, POSITIONS, CHANNELS), torch.nan, dtype=torch.float64)
    group = torch.zeros(ROWS, POSITIONS, dtype=torch.bool)
    after = before.clone()
    for row in range(ROWS):
        order = torch.randperm(POSITIONS, generator=g)
        before[row, order[: row % 3]] = 0.3  # rows differ in what they know
        after[row] = before[row]
        group[row, order[3:6]] = True
        after[row, order[3:5]] = torch.randn(2, CHANNELS, generator=g).double()
    return before, after, group


def local(of: MaskedLatentTarget, group: Tensor | None) -> Tensor:
    """Conditioning vectors of a pass that computes a group (all columns: None), after a full one of
    the canvas before."""
    before, after, _ = canvases()
    made = cached(of, None)
    columns = torch.ones(ROWS, made._prefix + POSITIONS, dtype=torch.bool)
    compute = columns if group is None else torch.nn.functional.pad(group, (made._prefix, 0))
    made.predict(before)
    made._plan = Plan(compute, columns, torch.zeros(ROWS, dtype=torch.bool))
    out = made.predict(after)
    assert torch.equal(out.fresh, compute[:, made._prefix :])
    return out.logprobs


@pytest.mark.parametrize("name", NETS)
def test_a_local_pass_that_freezes_nothing_is_a_full_one(name):
    _, after, group = canvases()
    true = target(name).predict(after).logprobs
    assert float((local(target(name), None) - true).abs().max()) < EXACT
    assert float((local(target(name), group) - true).abs()[group].max()) > 1e-6  # the control


@pytest.mark.parametrize("name", NETS)
def test_where_keys_are_of_the_own_latent_alone_a_local_pass_is_exact(name):
    """A decoder of one layer, behind no layer of the encoder; one more of either is the control."""
    _, after, group = canvases()
    for encoder, decoder in ((0, 1), (0, 2), (1, 1)):
        depth = {"encoder": encoder, "decoder": decoder}
        true = target(name, **depth).predict(after).logprobs
        error = float((local(target(name, **depth), group) - true).abs()[group].max())
        assert error < SAME if (encoder, decoder) == (0, 1) else error > 1e-6, depth


@pytest.mark.parametrize("name", NETS)
def test_control_a_cache_that_is_never_read_is_found(name, monkeypatch):
    real = partial_latents._computed

    def unread(run, inputs, compute, seen, cache, rows):
        return real(run, inputs, compute, seen & compute, cache, rows)

    monkeypatch.setattr(partial_latents, "_computed", unread)
    _, after, group = canvases()
    depth = {"encoder": 0, "decoder": 1}
    true = target(name, **depth).predict(after).logprobs
    assert float((local(target(name, **depth), group) - true).abs()[group].max()) > 1e-6


def run(name: str, spec: dict, rows=range(ROWS), at_most: int | None = None):
    sampler, _ = resolve_sampler(spec)
    of = target(name, rows)
    if at_most:
        of.at_most(at_most)
    canvas = torch.full((ROWS, POSITIONS, CHANNELS), torch.nan, dtype=torch.float64)
    canvas[1, ::2], canvas[3, :2] = 0.5, -1.0
    return sampler(of, CounterRNG([31 * r + 7 for r in rows]), canvas=canvas[list(rows)])


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.thinned(9)
def test_refreshing_in_every_pass_is_the_base_with_the_same_draws(name, policy):
    spec = {"name": "mar", "steps": 4, "cache": policy, "blocks": "fixed", "block_length": 3}
    base, found, usual = (
        run(name, spec | change) for change in ({"cache": "none"}, {"cache_refresh": 1}, {})
    )
    assert torch.allclose(found.tokens, base.tokens, rtol=NEAR, atol=EXACT)
    assert [s.tokens_computed for s in found.stats] == [s.tokens_computed for s in base.stats]
    assert {s.partial_nfe for s in found.stats} == {0}
    if policy == "partial":  # the others may have nothing to keep on a canvas this short
        local = run(name, spec | {"cache_warmup": 0, "cache_refresh": 3})
        assert not torch.allclose(local.tokens, base.tokens, rtol=1e-4, atol=1e-4)
        for a, b in zip(local.stats, base.stats, strict=True):
            assert a.nfe == b.nfe and a.partial_nfe and a.tokens_computed < b.tokens_computed
    assert bool(usual.tokens.isfinite().all())


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("change", [{}, {"cache_refresh": 4, "cache_condition": True}])
@pytest.mark.thinned(2)
def test_a_row_is_the_same_alone_in_a_batch_and_in_its_turn(name, change):
    whole = run(name, PARTIAL | change)
    turns = run(name, PARTIAL | change, at_most=2)
    assert torch.allclose(turns.tokens, whole.tokens, rtol=NEAR, atol=EXACT)
    for row in range(ROWS):
        one = run(name, PARTIAL | change, [row])
        assert torch.allclose(one.tokens[0], whole.tokens[row], rtol=NEAR, atol=EXACT)
        costs = [
            (s.nfe, s.partial_nfe, s.tokens_computed) for s in (one.stats[0], whole.stats[row])
        ]
        assert costs[0] == costs[1]


def test_a_network_without_two_stacks_is_refused():
    words = torch.zeros(1, 1, dtype=torch.long)
    of = MaskedLatentTarget(LinearMasked(LinearHead(2, (0.9, 0.6))), words, SPACE, SamplingParams())
    with pytest.raises(GenError, match="MaskedLatentTarget of LinearMasked keeps no keys"):
        cached(of, None)
    bare = MaskedLatentLM(network("grid"))
    bare.model = torch.nn.Linear(2, 2)
    with pytest.raises(GenError, match="Linear keeps no keys and values"):
        bare.new_cache(4)
