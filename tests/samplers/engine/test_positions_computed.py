"""``positions_computed`` is what the model was asked for, counted at the model itself;
``tokens_computed`` is a row's own part of it, the same in every batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from closed_form import (
    LeaningBlocks,
    LeaningCausal,
    LeaningLattice,
    LeaningMasked,
    LeaningRefinedScales,
    V,
    space,
)
from continuous import LinearHead, LinearLatent, latent_target
from small_llama import small_llama
from tabular import causal_target, masked_target

from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import CausalLM
from gen.models.targets.block import BlockTarget
from gen.models.targets.causal import CausalTarget
from gen.models.targets.lattice import LatticeTarget
from gen.models.targets.masked import MaskedTarget
from gen.models.targets.scales import ScalesTarget

GUIDED = SamplingParams(guidance_scale=2.0)
ITEMS = 5


def asked(model, *names: str) -> list[int]:
    """Count the positions of every call of a model's methods, whose first argument has them."""
    sizes: list[int] = []

    def counted(call: Callable) -> Callable:
        def forward(tokens, *args, **more):
            sizes.append(tokens.shape[0] * tokens.shape[1])
            return call(tokens, *args, **more)

        return forward

    for name in names:
        setattr(model, name, counted(getattr(model, name)))
    return sizes


def check(sampler, target, sizes: list[int], draft=None, padded: bool = True):
    stats = sampler(target, CounterRNG(range(ITEMS)), draft=draft).stats
    assert sum(s.positions_computed for s in stats) == sum(sizes)
    assert all(s.tokens_computed <= s.positions_computed for s in stats)
    assert any(s.tokens_computed < s.positions_computed for s in stats) == padded
    return stats


CAUSAL = {
    "autoregressive": {"name": "autoregressive"},
    "jacobi": {"name": "speculative_jacobi", "coupling": "fresh", "window": 6},
    "constant": {"name": "speculative", "num_speculative_tokens": 4},
    "heuristic": {"name": "speculative", "policy": "heuristic", "num_speculative_tokens": 2},
    "confidence": {
        "name": "speculative",
        "policy": "confidence",
        "num_speculative_tokens": 8,
        "confidence_threshold": 0.3,
    },
}


@pytest.mark.parametrize("sampling", [SamplingParams(), GUIDED], ids=["plain", "guided"])
@pytest.mark.parametrize("spec", CAUSAL.values(), ids=CAUSAL)
@pytest.mark.thinned(3)
def test_causal_samplers(spec, sampling):
    """Prompts of several lengths and ragged windows."""
    models = LeaningCausal(V, 1, spread=2.0), LeaningCausal(V, 3, spread=2.0)
    sizes = asked(models[0], "forward")
    target, draft = (causal_target(m, space(), sampling, [0, 1, 2, 1, 0]) for m in models)
    sampler = resolve_sampler(spec)[0]
    stats = check(sampler, target, sizes, draft if sampler.drafted else None)
    one = causal_target(LeaningCausal(V, 1, spread=2.0), space(), sampling, [1])
    of_one = causal_target(LeaningCausal(V, 3, spread=2.0), space(), sampling, [1])
    alone = sampler(one, CounterRNG([3]), draft=of_one if sampler.drafted else None).stats[0]
    assert alone.tokens_computed == stats[3].tokens_computed


@pytest.mark.parametrize("sampling", [SamplingParams(), GUIDED], ids=["plain", "guided"])
@pytest.mark.parametrize("name", ["autoregressive", "jacobi"])
def test_rows_that_take_waiting_items(name, sampling):
    """Their prompts enter the cache in a forward pass of their own."""
    model, space = CausalLM(small_llama(24)), TokenSpace.codes((3, 4), 24, 20)
    sizes = asked(model, "forward")
    prompt, length = torch.arange(4 * ITEMS).view(ITEMS, 4), torch.tensor([4, 1, 3, 2, 4])
    uncond = torch.zeros(ITEMS, 2, dtype=torch.long) if sampling.guided else None
    target = CausalTarget(model, prompt, space, sampling, uncond, length)
    target.at_most(2)
    check(resolve_sampler(CAUSAL[name])[0], target, sizes)


def test_a_window_that_the_confidence_cuts_short_is_computed_whole():
    """The network saw 301 positions of which 138 were counted."""
    sampler = resolve_sampler(CAUSAL["confidence"])[0]
    models = LeaningCausal(V, 1, spread=2.0), LeaningCausal(V, 3, spread=2.0)
    sizes = asked(models[0], "forward")
    target, draft = (causal_target(m, space(), SamplingParams(), [1] * ITEMS) for m in models)
    stats = check(sampler, target, sizes, draft)
    assert sum(s.positions_computed for s in stats) > 1.5 * sum(s.tokens_computed for s in stats)


@pytest.mark.parametrize("spec", ["continuous_jacobi", "continuous_speculative"])
def test_latents(spec):
    models = LinearLatent(LinearHead(2)), LinearLatent(LinearHead(2, shift=0.3))
    sizes = asked(models[0], "forward")
    target, draft = (latent_target(m, 12, [0, 1, 2, 1, 0]) for m in models)
    sampler = resolve_sampler(spec)[0]
    check(sampler, target, sizes, draft if sampler.drafted else None)


MASKED = {
    name: name for name in ("maskgit", "fast_dllm", "rcr", "exact_speculative", "freedave")
} | {
    "dual": {"name": "fast_dllm", "cache": "dual"},
    "prefix": {"name": "fast_dllm", "cache": "prefix"},
    "left_out": {"name": "masked_iterative", "remasker": "wino", "steps": 6},
}


@pytest.mark.parametrize("spec", MASKED.values(), ids=MASKED)
def test_masked_samplers(spec):
    """Rows that are finished leave, and those of a cache refresh at different times."""
    model = LeaningMasked(V, 1, spread=2.0)
    sizes = asked(model, "forward", "part")
    target = masked_target(model, space(), GUIDED, [0, 1, 2, 1, 0])
    sampler = resolve_sampler(spec)[0]
    stats = sampler(target, CounterRNG(range(ITEMS))).stats
    assert sum(s.positions_computed for s in stats) == sum(sizes)
    assert all(s.tokens_computed <= s.positions_computed for s in stats)


def test_prompts_of_several_lengths_before_a_canvas():
    class Ragged(LeaningMasked):
        ragged = True

        def forward(self, ids, canvas_length, left_padding=None):
            return super().forward(ids, canvas_length)

    model = Ragged(V, 1, spread=2.0)
    sizes = asked(model, "forward")
    prompt, length = torch.tensor([[12, 13, 14]] * ITEMS), torch.tensor([1, 2, 3, 2, 1])
    target = MaskedTarget(model, prompt, space(), SamplingParams(), None, length)
    check(resolve_sampler("maskgit")[0], target, sizes)


def test_rows_of_a_block_model_that_wait_for_the_others_are_computed_too():
    model = LeaningBlocks(V, 1, spread=2.0, block_length=6)
    sizes = asked(model, "forward")
    prompt = torch.tensor([[r, 12] for r in range(ITEMS)])
    target = BlockTarget(model, prompt, space(), SamplingParams())
    spec = {"name": "frame_blocks", "selector": "threshold", "conf_threshold": 0.6}
    check(resolve_sampler(spec)[0], target, sizes)


@pytest.mark.parametrize("sampling", [SamplingParams(), GUIDED], ids=["plain", "guided"])
@pytest.mark.parametrize("name", ["next_scale", "next_scale_masked", "scale_draft"])
def test_scales(name, sampling):
    sizes: list[int] = []

    class Counted(LeaningRefinedScales):
        def fill(self, state, maps, scale):
            sizes.append(maps.shape[0] * maps.shape[1])
            return super().fill(state, maps, scale)

        def refine(self, state, maps, *args):
            sizes.append(maps.shape[0] * maps.shape[1])
            return super().refine(state, maps, *args)

    model = Counted(V, 1, spread=2.0)
    prompt = torch.tensor([[r, 12] for r in range(ITEMS)])
    uncond = torch.full_like(prompt, 13) if sampling.guided else None
    target = ScalesTarget(model, prompt, space(), sampling, uncond)
    check(resolve_sampler(name)[0], target, sizes, padded=False)


@pytest.mark.parametrize("name", ["ancestral", "joint_viterbi"])
def test_graphs(name):
    model = LeaningLattice(V, 1, spread=2.0)
    prompt = torch.tensor([[r, 12, 0] for r in range(ITEMS)])
    lengths = torch.tensor([2 + r % 2 for r in range(ITEMS)])
    target = LatticeTarget(model, prompt, space(), SamplingParams(), None, lengths)
    sizes = model.forward(prompt, lengths).lengths
    stats = resolve_sampler(name)[0](target, CounterRNG(range(ITEMS))).stats
    assert [s.tokens_computed for s in stats] == (lengths + sizes).tolist()
    assert {s.positions_computed for s in stats} == {3 + int(sizes.max())}
    assert {s.nfe for s in stats} == {1}


def test_control_a_window_counted_by_its_drafts_alone_is_less_than_what_was_asked():
    sampler = resolve_sampler(CAUSAL["confidence"])[0]
    models = LeaningCausal(V, 1, spread=2.0), LeaningCausal(V, 3, spread=2.0)
    sizes = asked(models[0], "forward")
    target, draft = (causal_target(m, space(), SamplingParams(), [1] * ITEMS) for m in models)
    stats = sampler(target, CounterRNG(range(ITEMS)), draft=draft).stats
    assert sum(s.tokens_computed for s in stats) < sum(sizes)


def test_every_protocol_is_here():
    known = {"causal", "masked", "blocks", "scales", "refined_scales", "lattice"}
    frames = {"frames"}  # no positions: one frame per step
    assert set(registry.table("protocol")) - frames == known
