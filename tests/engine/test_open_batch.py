"""Open batches: items that join and leave between forward passes have the tokens, and the forward
passes, that they have alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from contract_bench import MASK, ROWS, bench, model_for

from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.engine.open_batch import OpenBatch, may_open
from gen.testing.specs import SPECS, sampling_for


def resolved(name):
    return resolve_sampler(SPECS[name], sampling_for(name))


BLOCKS = {n for n in SPECS if resolved(n)[0].protocol == "blocks"}  # all rows share a block
OPEN = [name for name in SPECS if resolved(name)[0].opens and name not in BLOCKS]


class Items:
    """Targets of single items on the bench, and their outputs alone."""

    def __init__(self, name, sampling=None):
        self.sampler, params = resolved(name)
        self.sampling = params if sampling is None else sampling
        kind = "llama" if self.sampler.protocol == "causal" else model_for(self.sampler)
        self.bench = bench(self.sampler.protocol, kind)

    def targets(self, rows, sampling=None):
        sampling = sampling or self.sampling
        prompt = self.bench.prompts[rows].clone()
        uncond = torch.full_like(prompt, 7)
        uncond[:, -1] = 6
        make, model, space = self.bench.target, self.bench.model, self.bench.space
        target = make(model, prompt, space, sampling, uncond)
        if not self.sampler.drafted:
            return target, ()
        draft = self.bench.drafts[self.sampler.draft_protocol]
        return target, (make(draft, prompt, space, sampling, uncond),)

    def alone(self, row, key, sampling=None):
        target, drafts = self.targets([row], sampling)
        more = {"draft": drafts[0]} if drafts else {}
        return self.sampler(target, CounterRNG([key]), **more)


def opened(items, sampling=None, **more):
    target, drafts = items.targets([0], sampling)
    assert may_open(items.sampler, target, drafts)
    return OpenBatch(items.sampler, target, drafts, **{"room": 12, **more})


def run_all(batch, items, arrivals, size=3):
    """Let rows (with keys) join after some steps; return the number of each in the batch."""
    numbers, step = {}, 0
    while arrivals or batch.active:
        for row, key in arrivals.pop(step, ()):
            numbers[row, key] = batch.join(*items.targets([row]), [key])[0]
        batch.grow(size)
        if batch.rows:
            batch.step()
        step += 1
        assert step < 1000
    return numbers


@pytest.mark.thinned(19)
@pytest.mark.parametrize("name", OPEN)
def test_items_that_join_later_have_the_tokens_and_forward_passes_they_have_alone(name):
    items = Items(name)
    batch = opened(items)
    arrivals = {0: [(0, 7)], 1: [(1, 38), (2, 69)], 3: [(3, 100), (4, 131), (0, 8)], 60: [(1, 9)]}
    numbers = run_all(batch, items, arrivals)
    assert len(numbers) == 7
    for (row, key), number in numbers.items():
        alone = items.alone(row, key)
        made = batch.run.output_of(number, 1.0)
        assert torch.equal(made.tokens, alone.tokens), (row, key)
        assert made.stats[0].nfe == alone.stats[0].nfe
        assert made.stats[0].tokens == alone.stats[0].tokens
        assert made.stats[0].acceptance_histogram == alone.stats[0].acceptance_histogram
        assert made.stats[0].draft_nfe == alone.stats[0].draft_nfe


def test_samplers_of_blocks_do_not_open():
    items = Items(next(iter(BLOCKS)))
    assert not may_open(items.sampler, *items.targets([0]))


def test_samples_of_one_prompt_compute_it_once_and_have_the_tokens_they_have_alone():
    items = Items("speculative_jacobi")
    batch = opened(items)
    keys = [7, 38, 69]
    late = batch.join(*items.targets([1]), [5])
    batch.grow(1)
    batch.step()
    for numbers in (batch.join(*items.targets([0, 0, 0]), keys), late):
        batch.grow(4)
        while batch.active:
            batch.step()
        stats = [batch.run.output_of(n, 1.0).stats[0] for n in numbers]
    shared = [batch.run.output_of(n, 1.0).stats[0].tokens_computed for n in (1, 2, 3)]
    alone = [items.alone(0, key) for key in keys]
    assert [a.tokens.tolist() for a in alone] == [
        batch.run.output_of(n, 1.0).tokens.tolist() for n in (1, 2, 3)
    ]
    prompt = 2 * items.bench.prompts.shape[1] - 2  # of both branches, without their last token
    computed = [a.stats[0].tokens_computed for a in alone]
    assert shared == [computed[0], computed[1] - prompt, computed[2] - prompt]
    assert stats[0].nfe == items.alone(1, 5).stats[0].nfe


def test_the_first_prompts_of_a_batch_are_shared_too():
    items = Items("autoregressive")
    batch = opened(items)
    numbers = batch.join(*items.targets([2, 0, 2, 2]), [1, 2, 3, 4])
    batch.grow(4)
    while batch.active:
        batch.step()
    for number, row, key in zip(numbers, [2, 0, 2, 2], [1, 2, 3, 4], strict=True):
        assert torch.equal(batch.run.output_of(number, 1.0).tokens, items.alone(row, key).tokens)


@pytest.mark.parametrize("name", ["speculative_jacobi", "autoregressive", "maskgit"])
def test_items_of_one_batch_may_differ_in_temperature_filters_and_guidance(name):
    items = Items(name)
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, guidance_scale=g)
        for t, k, p, g in [
            (0.5, 0, 1.0, 2.0),
            (1.3, 3, 1.0, 3.0),
            (0.0, 0, 1.0, 2.0),
            (1, 0, 0.7, 4),
        ]
    ]
    assert items.sampler.mixes_sampling
    batch = opened(items, params[0], mixed=True)
    numbers = [
        batch.join(*items.targets([row], own), [row + 50])[0] for row, own in enumerate(params)
    ]
    batch.grow(4)
    while batch.active:
        batch.step()
    for row, own in enumerate(params):
        made = batch.run.output_of(numbers[row], 1.0)
        assert torch.equal(made.tokens, items.alone(row, row + 50, own).tokens)
    # control: the first one's parameters for all give other tokens
    assert any(
        not torch.equal(
            batch.run.output_of(numbers[row], 1.0).tokens,
            items.alone(row, row + 50, params[0]).tokens,
        )
        for row in range(1, 4)
    )


@pytest.mark.parametrize("name", ["speculative_jacobi", "maskgit"])
def test_items_that_leave_free_their_rows_and_change_nobodys_tokens(name):
    items = Items(name)
    batch = opened(items)
    numbers = [batch.join(*items.targets([row]), [row])[0] for row in range(ROWS)]
    batch.grow(3)
    batch.step()
    batch.leave([numbers[0], numbers[4]])  # one with a row, one that waits
    assert batch.rows == 2 and batch.active == {1, 2, 3}
    batch.grow(3)
    assert batch.rows == 3
    while batch.active:
        batch.step()
    for row in (1, 2, 3):
        assert torch.equal(
            batch.run.output_of(numbers[row], 1.0).tokens, items.alone(row, row).tokens
        )


def test_items_may_bring_a_canvas_and_those_without_a_gap_are_over_at_once():
    items = Items("maskgit")
    batch = opened(items)
    space = items.bench.space
    canvas = space.legal.long().argmax(1).expand(3, -1).clone()
    canvas[0, ::2], canvas[1] = MASK, MASK
    numbers = batch.join(*items.targets([0, 1, 2]), [1, 2, 3], canvas)
    assert batch.active == {0, 1}
    batch.grow(3)
    while batch.active:
        batch.step()
    for row, number in enumerate(numbers):
        target, _ = items.targets([row])
        alone = items.sampler(target, CounterRNG([row + 1]), canvas=canvas[row : row + 1])
        assert torch.equal(batch.run.output_of(number, 1.0).tokens, alone.tokens)


def test_a_batch_refuses_prompts_that_it_has_no_room_for():
    items = Items("autoregressive")
    batch = opened(items, room=2)
    assert batch.takes(*items.targets([0, 1])) and not batch.takes(*items.targets([0, 1, 2]))
    longer, _ = items.targets([0])
    longer.prompts.host_lengths = np.array([batch.targets[0].prompts.all_tokens.shape[1] + 1])
    assert not batch.takes(longer, ())
