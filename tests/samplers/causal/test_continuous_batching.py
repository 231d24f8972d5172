"""A row that is done gives its place to the next item, and nobody's tokens change by it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decoding import decode_causal
from small_llama import small_llama
from tabular import PROMPTS, TabularCausal, causal_target

from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import CausalLM
from gen.models.targets.causal import CausalTarget
from gen.pipeline.pipeline import load
from gen.samplers.causal.autoregressive import _NoDrafts
from gen.samplers.engine.rows import RowState, RowStore, SlotChange

V, T, N = 24, 12, 11
SPECS = {
    "autoregressive": "autoregressive",
    "jacobi": {"name": "speculative_jacobi", "window": 4},
    "maximal": {"name": "speculative_jacobi", "window": 5, "coupling": "maximal", "init": "repeat"},
    "speculative": {"name": "speculative", "num_speculative_tokens": 3},
    "heuristic": {
        "name": "speculative",
        "num_speculative_tokens": 2,
        "policy": "heuristic",
        "verifier": "block",
    },
    "gsd": "typical",
    "tree": {
        "name": "speculative",
        "shape": "best_first",
        "verifier": "traversal",
        "nodes": 5,
        "tree_depth": 3,
    },
    "paths": {"name": "speculative", "shape": "paths", "verifier": "k_seq", "path_length": 2},
}


def space(end: bool = False) -> TokenSpace:
    legal = torch.zeros(T, V, dtype=torch.bool)
    legal[:, :16] = True
    return TokenSpace((T,), V, legal, eos_token_id=15 if end else None)


NETS = small_llama(V), small_llama(V, 1)


def target(net, sampling: SamplingParams, end: bool) -> CausalTarget:
    """Items with prompts of their own, of three lengths; unconditional ones likewise."""
    g = torch.Generator().manual_seed(3)
    prompt, uncond = (torch.randint(16, V, (N, 5), generator=g) for _ in range(2))
    lengths = torch.tensor([3, 5, 4] * 4)[:N]
    return CausalTarget(
        CausalLM(net),
        prompt,
        space(end),
        sampling,
        uncond if sampling.guided else None,
        lengths,
        lengths.flip(0) if sampling.guided else None,
    )


def decode(name: str, sampling: SamplingParams, end: bool, at_most: int | None):
    sampler, sampling = resolve_sampler(
        SPECS[name],
        {"temperature": sampling.temperature, "guidance_scale": sampling.guidance_scale},
    )
    ours = target(NETS[0], sampling, end)
    draft = target(NETS[1], sampling, end) if sampler.drafted else None
    for part in (ours, draft):
        if part is not None and at_most:
            part.at_most(at_most)
    sizes = []
    forward = ours.model.forward
    ours.model.forward = lambda tokens, *rest, **more: (
        sizes.append(len(tokens) // ours.branches),
        forward(tokens, *rest, **more),
    )[1]
    return sampler(ours, CounterRNG(range(N)), draft=draft, trace=True), sizes


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.thinned(7)
def test_tokens_calls_and_traces_are_those_of_one_batch(name, end, scale):
    sampling = SamplingParams(guidance_scale=scale)
    whole, _ = decode(name, sampling, end, None)
    for at_most in (1, 4):
        out, sizes = decode(name, sampling, end, at_most)
        assert torch.equal(out.tokens, whole.tokens) and max(sizes) == at_most
        assert [
            (s.nfe, s.tokens, s.tokens_computed, s.acceptance_histogram, s.draft_nfe)
            for s in out.stats
        ] == [
            (s.nfe, s.tokens, s.tokens_computed, s.acceptance_histogram, s.draft_nfe)
            for s in whole.stats
        ]
        assert [[(t.window, t.accepted, t.committed) for t in row] for row in out.traces] == [
            [(t.window, t.accepted, t.committed) for t in row] for row in whole.traces
        ]


def test_places_are_taken_at_once_so_that_the_batch_stays_full():
    out, sizes = decode("jacobi", SamplingParams(), True, 4)
    full = sum(n == 4 for n in sizes)
    calls = [s.nfe for s in out.stats]
    assert len(set(calls)) > 3, "rows of one length say nothing"
    batches = sum(max(calls[i : i + 4]) for i in range(0, N, 4))
    rounds = sum(n == 4 or sum(sizes[i:]) < 0 for i, n in enumerate(sizes))
    assert full >= (sum(calls) - 4 * max(calls)) / 4 and rounds < batches


def test_control_a_drafter_that_does_not_begin_anew_is_found(monkeypatch):
    whole, _ = decode("maximal", SamplingParams(), True, None)
    follow = RowStore.follow
    monkeypatch.setattr(
        RowStore, "follow", lambda self, change: follow(self, SlotChange(change.source))
    )
    out, _ = decode("maximal", SamplingParams(), True, 4)
    assert not torch.equal(out.tokens, whole.tokens)


def test_control_a_place_whose_prompt_is_not_brought_in_is_found(monkeypatch):
    whole, _ = decode("jacobi", SamplingParams(), False, None)
    monkeypatch.setattr(CausalTarget, "_prefill", lambda *a: None)
    out, _ = decode("jacobi", SamplingParams(), False, 4)
    assert torch.equal(out.tokens[:4], whole.tokens[:4]) and not torch.equal(
        out.tokens[4:], whole.tokens[4:]
    )


def test_a_cache_that_takes_no_calls_about_some_rows_is_refused():
    of = causal_target(TabularCausal(5), TokenSpace.codes((3,), 5, 5), SamplingParams(), [0, 1, 2])
    assert not of.replaces and len(PROMPTS) == 3
    with pytest.raises(ValueError, match="TokenBuffer takes no calls about some of its rows"):
        of.at_most(2)
    of.at_most(3)  # all of them: nothing waits


@pytest.mark.parametrize("declared", [True, False])
def test_a_drafter_that_declares_its_state_begins_anew_by_itself(declared):
    """A control keeps its state beside the store: then it is another item's."""

    class Own(_NoDrafts):
        if declared:
            seen = RowState(start=0)

        def __init__(self, rows):
            super().__init__()
            self.seen = np.zeros(rows, dtype=np.int64)

        def observe(self, step, num_accepted, num_drafted):
            assert len(self.seen) == len(step.items)
            assert (self.seen == step.starts).all()
            self.seen = self.seen + 1

    of = target(NETS[0], SamplingParams(), False)
    of.at_most(4)
    if declared:
        decode_causal(of, CounterRNG(range(N)), Own(4))
        return
    with pytest.raises(AssertionError):
        decode_causal(of, CounterRNG(range(N)), Own(4))


def test_a_pipeline_makes_the_same_media_whatever_the_batch_size():
    pipe = load("text", dtype="float64")
    prompts = ["sort 3 1 2 =", "3 + 8 + 5 =", "shuffle 4 0 7 5 ="]
    made = {
        size: pipe(prompts, "speculative_jacobi", num_samples=3, batch_size=size)
        for size in (1, 2, 9)
    }
    assert made[1].media == made[2].media == made[9].media
    assert (
        len({tuple((s.nfe, s.tokens_computed) for s in out.stats) for out in made.values()}) == 1
    )  # prompts of other lengths fill nobody up
    with pytest.raises(GenError, match="batch_size"):
        pipe(prompts, batch_size=0)
