"""Context tables that count the finished items of a call: the tokens stay, and later items need
fewer forward passes."""

from __future__ import annotations

import pytest
import torch
from constrained import with_end
from small_llama import small_llama
from tabular import causal_target, space_of

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.base import ModelAdapter
from gen.models.adapters.language_models import CausalLM
from gen.models.adapters.protocols import ModelCache
from gen.models.targets.causal import CausalTarget
from gen.models.targets.context_table import ContextTable, gather, neighbours

IDS, GRID, ITEMS = 8, (4, 6), 24
jacobi = registry.get("sampler", "speculative_jacobi")
autoregressive = registry.get("sampler", "autoregressive")


class NoCache(ModelCache):
    """Cache of a model that remembers nothing."""

    def keep(self, rows):
        pass

    def select(self, rows):
        pass


class Neighbours(ModelAdapter):
    """A token depends on the one before it alone, so that a table can learn the model."""

    device, dtype = torch.device("cpu"), torch.float64

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size
        generator = torch.Generator().manual_seed(3)
        self.logits = 4 * torch.randn(200, vocab_size, generator=generator, dtype=torch.float64)

    def new_cache(self, slots):
        return NoCache()

    def forward(self, tokens, positions, cache):
        return self.logits[tokens]


def run(sampler, space=None, rows=4):
    """Decode 24 items, ``rows`` of them at a time."""
    space = space or space_of(GRID, IDS)
    target = causal_target(
        Neighbours(space.vocab_size), space, SamplingParams(), [i % 3 for i in range(ITEMS)]
    )
    target.at_most(rows)
    return sampler(target, CounterRNG([7919 * i + 5 for i in range(ITEMS)]))


def growing(**params):
    return jacobi(**{"init": "table", "table": "empty", "scope": "call", "window": 8, **params})


def passes(out, items=slice(None)) -> int:
    return sum(s.nfe for s in out.stats[items])


@pytest.mark.parametrize("space", [space_of(GRID, IDS), with_end(24, 6)], ids=["length", "end"])
@pytest.mark.parametrize("redraft", [None, False])
@pytest.mark.thinned(2)
def test_the_tokens_are_those_of_autoregression(space, redraft):
    out = run(growing(redraft=redraft), space)
    assert torch.equal(out.tokens, run(autoregressive(), space).tokens)


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_later_items_need_fewer_forward_passes(rows):
    first, second = slice(0, ITEMS // 2), slice(ITEMS // 2, None)
    out, alone = run(growing(), rows=rows), run(growing(scope="item"), rows=rows)
    # against the same items with an empty table: some are easier than others by themselves
    shares = [passes(out, half) / passes(alone, half) for half in (first, second)]
    assert shares[1] < 0.92 * shares[0] and shares[1] < 0.6


def test_control_counts_of_other_neighbours_save_nothing(monkeypatch):
    right, plus = run(growing()), ContextTable.plus
    monkeypatch.setattr(
        ContextTable, "plus", lambda self, ids, where: plus(self, ids, where.roll(7, 0))
    )
    wrong = run(growing())
    assert torch.equal(wrong.tokens, right.tokens)
    second = slice(ITEMS // 2, None)
    assert passes(wrong, second) > 1.1 * passes(right, second)


def test_an_item_counts_only_once_it_has_finished(monkeypatch):
    counted, plus = [], ContextTable.plus

    def noted(self, sequences, where):
        counted.append(sequences)
        return plus(self, sequences, where)

    monkeypatch.setattr(ContextTable, "plus", noted)
    out = run(growing(), rows=1)
    assert torch.equal(torch.cat(counted), out.tokens[:-1])


def test_rows_that_end_count_with_the_tokens_of_the_output(monkeypatch):
    counted, plus = [], ContextTable.plus

    def noted(self, sequences, where):
        counted.append(sequences)
        return plus(self, sequences, where)

    monkeypatch.setattr(ContextTable, "plus", noted)
    out = run(growing(), with_end(24, 6), rows=1)
    assert torch.equal(torch.cat(counted), out.tokens[:-1])


def test_counts_of_two_parts_are_those_of_the_whole():
    ids = torch.randint(0, 5, (6, 12), generator=torch.Generator().manual_seed(1))
    offsets = [(0, -1), (-1, 0)]
    where = neighbours((3, 4), offsets)
    whole = ContextTable(ids, (3, 4), 5, offsets)
    parts = ContextTable(ids[:2], (3, 4), 5, offsets).plus(ids[2:3], where).plus(ids[3:], where)
    context = gather(ids, where, 5).flatten(0, 1)
    assert torch.equal(whole.interpolated(context), parts.interpolated(context))
    assert torch.equal(whole.distribution(context), parts.distribution(context))
    empty = ContextTable(ids[:0], (3, 4), 5, offsets).plus(ids, where)
    assert torch.equal(whole.interpolated(context), empty.interpolated(context))


def test_the_table_of_the_file_stays_as_it_is(monkeypatch):
    table = ContextTable(torch.zeros(1, 24, dtype=torch.long), GRID, IDS, [(0, -1), (-1, 0)])
    before = [level.counts.clone() for level in table.levels]
    registry.discover("drafting")
    monkeypatch.setitem(registry._kinds["drafting"], "context_table", lambda target, name: table)
    one, other = run(growing(table=None)), run(growing(table=None))
    assert [s.nfe for s in one.stats] == [s.nfe for s in other.stats]
    assert all(torch.equal(a, level.counts) for a, level in zip(before, table.levels, strict=True))


def test_a_model_with_a_cache_gives_the_tokens_of_autoregression():
    space, prompts = TokenSpace.codes((4, 5), 24, 20), torch.arange(18).view(6, 3)

    def decode(sampler):
        target = CausalTarget(CausalLM(small_llama(24).double()), prompts, space, SamplingParams())
        target.at_most(2)
        return sampler(target, CounterRNG(range(6))).tokens

    assert torch.equal(decode(growing()), decode(autoregressive()))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"scope": "all"}, "sampler.scope is 'all'; expected item or call"),
        ({"coupling": "maximal"}, "item with the coupling maximal, or gumbel"),
        ({"init": "uniform"}, "expected model_table or table with sampler.scope call"),
    ],
)
def test_other_couplings_and_initialisers_are_refused(params, words):
    with pytest.raises(GenError, match=words):
        growing(**params)


@pytest.mark.slow
def test_later_images_need_fewer_forward_passes():
    from gen.pipeline.pipeline import load  # heavy, for this slow test alone

    pipe = load("image", dtype="float64")
    prompts = pipe.modality.example_prompts(24, 0)
    spec = {"name": "speculative_jacobi", "init": "table", "table": "empty"}

    def decode(spec):
        sampler, sampling = pipe.resolve(spec)
        return pipe.generate(pipe.plan(prompts), sampler, sampling, max_batch=2)

    out, alone = decode({**spec, "scope": "call"}), decode(spec)
    assert torch.equal(out.tokens, alone.tokens)
    assert passes(out, slice(12, 24)) < 0.97 * passes(alone, slice(12, 24))
