"""Drafters without a model are exact with every verifier that takes them, and an item's tokens are
its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from constrained import with_end
from constraint_bench import COMBINED, EXACT, WRONG, autoregressive, error, speculative
from small_llama import small_llama
from tabular import TabularCausal, TokenBuffer, causal_target, space_of

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import CausalLM
from gen.models.targets.causal import CausalTarget
from gen.models.targets.token_table import write_table
from gen.recipes.common.draft_table import count
from gen.samplers.causal.drafters.copies import CopyTable
from gen.samplers.causal.drafters.suffix import Suffix
from gen.samplers.causal.drafters.tables import Context, Text, prompt_tokens
from gen.samplers.causal.shapes import base as builder
from gen.samplers.causal.shapes.base import TreeBuilder
from gen.samplers.engine.outputs import NONE
from gen.samplers.engine.rows import RowStore, SlotChange

# prompts of the closed-form models say tokens of their outputs
WORDS = torch.full((23,), NONE)
WORDS[torch.tensor([12, 13, 15, 19])] = torch.tensor([0, 1, 1, 2])

CHAIN = {"shape": "chain", "num_speculative_tokens": 2}
RANKS = {"shape": "best_first", "draws": "ranks", "nodes": 3, "tree_depth": 2}
STATIC = {"shape": "optimal", "draws": "ranks", "nodes": 3, "tree_depth": 2}
DRAWN = {"shape": "branching", "branching": "2-1", "draws": "without_replacement"}
PATHS = {"shape": "paths", "paths": 2, "path_length": 2}
CASES = {
    "prompt_lookup": [(CHAIN, "token block recursive"), (RANKS, "traversal")],
    "input_copy": [(CHAIN, "token"), (RANKS, "recursive")],
    "suffix": [(RANKS, "recursive traversal"), (DRAWN, "recursive"), (PATHS, "k_seq")],
    "token_recycling": [(STATIC, "recursive traversal"), (CHAIN, "block")],
    "aded": [(RANKS, "recursive"), (DRAWN, "traversal"), (PATHS, "recursive")],
    "stand": [(DRAWN, "recursive traversal"), (PATHS, "k_seq"), (CHAIN, "token block")],
}
ALL = [
    pytest.param({"drafter": drafter, "verifier": v, **shape}, id=f"{drafter}-{v}-{shape['shape']}")
    for drafter, shapes in CASES.items()
    for shape, verifiers in shapes
    for v in verifiers.split()
]


def saying(space: TokenSpace) -> TokenSpace:
    return replace(space, prompt_tokens=WORDS)


@pytest.mark.parametrize("params", ALL)
@pytest.mark.thinned(9)
def test_tables_keep_the_distribution(params):
    assert error(speculative(**params), saying(space_of((4,), 3))) < EXACT


@pytest.mark.parametrize("params", ALL)
@pytest.mark.thinned(7)
def test_tables_keep_the_distribution_with_guidance_and_filters(params):
    assert error(speculative(**params), saying(space_of((4,), 3)), COMBINED) < EXACT


@pytest.mark.parametrize("params", ALL)
@pytest.mark.thinned(7)
def test_tables_keep_the_distribution_of_texts_that_end(params):
    assert error(speculative(**params), saying(with_end(4, 3))) < EXACT


@pytest.mark.parametrize("shape", [CHAIN, DRAWN], ids=["chain", "tree"])
def test_a_trimmed_draft_vocabulary_keeps_the_distribution(shape):
    params = {"verifier": "recursive", "draft_vocab": 2, **shape}
    assert error(speculative(**params), saying(space_of((3,), 3))) < EXACT
    assert error(speculative(**params), saying(with_end(3, 4)), COMBINED) < EXACT


def test_control_drafts_of_another_distribution_are_not_exact(monkeypatch):
    finish = TreeBuilder.finish

    def flat(self):
        tree = finish(self)
        tree.logq = torch.zeros_like(tree.logq).log_softmax(-1)
        return tree

    monkeypatch.setattr(TreeBuilder, "finish", flat)
    params = {"drafter": "stand", "verifier": "recursive", **DRAWN}
    assert error(speculative(**params), space_of((4,), 3)) > WRONG


# --- rows

POSITIONS, ITEMS = 18, 5
TOKENS = saying(with_end(POSITIONS, 4))
PRESETS = ("prompt_lookup", "suffix", "token_recycling", "aded", "stand", "aggressive")


class Rows(TokenBuffer):
    """Cache that takes calls about some rows."""

    rows = slice(None)

    def select(self, rows):
        self.rows = slice(None) if rows is None else rows

    def write(self, tokens, positions):
        if self.ids is None:
            return super().write(tokens, positions)
        self.ids = self.ids.clone()
        self.ids[self.rows] = self.ids[self.rows].scatter(1, positions, tokens)
        return self.ids[self.rows]


class Repeating(TabularCausal):
    """Model whose next token depends on the last two alone, so that texts repeat themselves."""

    def new_cache(self, slots):
        return Rows(slots)

    def _states(self, ids):
        before = torch.nn.functional.pad(ids[:, :-1], (1, 0))
        return super()._states((ids * 31 + before).flatten()[:, None]).view(ids.shape)


def run(sampler, items=range(ITEMS), rows=ITEMS, temperature=1.0):
    items = list(items)
    target = causal_target(
        Repeating(4, 3, low=0.0, spread=5.0),
        TOKENS,
        SamplingParams(temperature=temperature),
        [i % 3 for i in items],
    )
    target.at_most(rows)
    return sampler(target, CounterRNG([7919 * i + 5 for i in items]))


def preset(name: str, **params):
    trees = {"nodes": 5} if name in ("suffix", "aded", "token_recycling") else {}
    return resolve_sampler({"name": name, **trees, **params})[0]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.thinned(3)
def test_an_item_is_the_same_in_any_batch(name):
    whole = run(preset(name))
    for items, rows in ((range(ITEMS), 2), ([4, 0, 3], 3), ([2, 1], 1)):
        part = run(preset(name), items, rows)
        assert torch.equal(part.tokens, whole.tokens[list(items)])
        assert [s.nfe for s in part.stats] == [whole.stats[i].nfe for i in items]


def test_control_a_table_that_outlives_its_item_changes_the_next_one(monkeypatch):
    sampler = preset("token_recycling", verifier="recursive")
    whole = run(sampler)
    assert torch.equal(run(sampler, rows=2).tokens, whole.tokens)
    follow = RowStore.follow
    monkeypatch.setattr(
        RowStore, "follow", lambda self, change: follow(self, SlotChange(change.source))
    )
    assert not torch.equal(run(sampler, rows=2).tokens, whole.tokens)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.thinned(3)
def test_the_tokens_are_those_of_autoregression(name):
    plain = run(autoregressive())
    out = run(preset(name, verifier="follow"))
    assert torch.equal(out.tokens, plain.tokens)
    assert sum(s.nfe for s in out.stats) < sum(s.nfe for s in plain.stats)


def test_a_tree_is_no_larger_than_what_its_row_knows():
    """A budget that no match can fill costs no positions."""
    small, large = run(preset("suffix", nodes=5), rows=1), run(preset("suffix", nodes=40), rows=1)
    assert torch.equal(small.tokens, large.tokens)
    for s in large.stats:
        assert s.positions_computed < s.nfe * 41 / 2


@pytest.mark.parametrize("name", PRESETS)
def test_a_pass_has_no_columns_without_drafts(name, monkeypatch):
    def padding(sampler):
        stats = run(sampler, rows=1).stats
        return [s.positions_computed - s.tokens_computed for s in stats]

    prompts = padding(autoregressive())
    assert padding(preset(name, verifier="follow")) == prompts
    monkeypatch.setattr(builder, "trimmed", lambda draft, by_column: draft)  # control
    assert sum(padding(preset(name, verifier="follow"))) > sum(prompts)


@pytest.mark.parametrize("name", ["prompt_lookup", "aggressive"])
def test_a_copied_chain_is_the_one_that_distributions_give(name, monkeypatch):
    found = run(preset(name, verifier="token"))
    monkeypatch.setattr(CopyTable, "chain", lambda *args: None)
    grown = run(preset(name, verifier="token"))
    assert torch.equal(found.tokens, grown.tokens)
    for a, b in zip(found.stats, grown.stats, strict=True):
        assert (a.nfe, a.tokens_computed) == (b.nfe, b.tokens_computed)
        assert a.draft_acceptance_rate == b.draft_acceptance_rate


@pytest.mark.parametrize("name", ["suffix", "token_recycling", "aded", "stand"])
@pytest.mark.thinned(2)
def test_finished_items_teach_the_next_ones(name):
    kept = {"verifier": "follow", "scope": "call"}
    own, call = run(preset(name, verifier="follow"), rows=1), run(preset(name, **kept), rows=1)
    assert torch.equal(own.tokens, call.tokens)
    assert own.stats[0].nfe == call.stats[0].nfe
    assert sum(s.nfe for s in call.stats) < sum(s.nfe for s in own.stats)


def test_what_finished_items_teach_takes_a_verifier_that_does_not_read_it():
    with pytest.raises(GenError, match="scope is 'call'; expected item with sampler.verifier"):
        preset("stand", scope="call")


# --- what is copied


def text(ids: list[int], room: int = 4) -> Text:
    line = torch.tensor([ids + [NONE] * room])
    return Text(line, torch.tensor([len(ids)]), 0)


def test_matches_count_the_last_tokens():
    found = text([1, 2, 3, 9, 2, 3, 1, 2, 3])
    lengths = found.matches(found.last(3)[:, None])[0, 0].tolist()
    assert lengths == [0, 0, 3, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]


def test_prompts_stand_right_before_the_output():
    target = causal_target(TabularCausal(3), saying(space_of((4,), 3)), SamplingParams(), [0, 1, 2])
    assert prompt_tokens(target).tolist() == [[-1, -1, 2], [0, 1, 2], [-1, 1, 2]]
    plain = causal_target(TabularCausal(3), space_of((4,), 3), SamplingParams(), [0, 1, 2])
    assert prompt_tokens(plain).eq(NONE).all()
    assert Context(target).width == 8


def test_suffix_drafts_are_as_long_as_their_match():
    """Of one token one draft, of three tokens three."""
    for ids, most in (([1, 2, 3, 4, 9, 1], 1), ([1, 2, 3, 4, 5, 6, 9, 1, 2, 3], 3)):
        target = causal_target(TabularCausal(12), space_of((12,), 12), SamplingParams(), [0])
        params = registry.params_of("drafter", "suffix")()
        nodes = Suffix(target, params, 8)
        nodes.text = text(ids)
        nodes.look(nodes.text)
        assert nodes.most.tolist() == [most]


# --- what is refused


def test_a_verifier_that_reads_q_refuses_a_drafter_without_one():
    with pytest.raises(GenError, match="k_seq takes with_replacement; sampler.drafter pro"):
        speculative(drafter="prompt_lookup", verifier="k_seq", **PATHS)


def test_relaxed_acceptance_names_the_drafters_that_it_takes():
    with pytest.raises(GenError, match="drafter is 'suffix'; expected .*; the sampler speculative"):
        registry.get("sampler", "relaxed_acceptance")(drafter="suffix")


@pytest.fixture
def counted(tmp_path):
    """A table of one model, and targets of any model and vocabulary."""
    path = tmp_path / "table.safetensors"

    def target(seed: int, size: int = 24):
        space = TokenSpace.codes((6,), size, size)
        model = CausalLM(small_llama(size, seed))
        return CausalTarget(model, torch.tensor([[4]]), space, SamplingParams())

    write_table(path, count([[1, 2, 1, 2, 1, 3]], 24, 2), target(0).model.model)
    return path, target


def test_a_table_of_counts_begins_the_successors(counted):
    path, target = counted
    table = target(0).token_table(str(path))
    assert table.counts[:4].tolist() == [0, 3, 2, 1]
    assert table.successors[:4].tolist() == [[-1, -1], [2, 3], [1, -1], [-1, -1]]
    first = preset("token_recycling", draft_table=str(path))(target(0), CounterRNG([3]))
    assert torch.equal(first.tokens, autoregressive()(target(0), CounterRNG([3])).tokens)


def test_a_table_of_another_model_or_vocabulary_is_refused(counted):
    path, target = counted
    for name in ("token_recycling", "suffix"):
        sampler = preset(name, draft_table=str(path), draft_vocab=3)
        with pytest.raises(GenError, match="was made with another model, .*; expected"):
            sampler(target(1), CounterRNG([3]))
        with pytest.raises(GenError, match="is of 24 tokens; expected 20, those of the model"):
            sampler(target(0, 20), CounterRNG([3]))
    with pytest.raises(GenError, match="draft_table nowhere cannot be read"):
        preset("token_recycling", draft_table="nowhere")(target(0), CounterRNG([3]))
