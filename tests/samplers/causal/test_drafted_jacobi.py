"""Jacobi drafts by a draft model and by a table: the distribution, computed on every outcome of the
draws; the tokens of autoregression; what a correction saves; tables of other models."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from closed_form import of_ids
from constrained import with_end
from constraint_bench import error as error_with_end
from enumeration import distance, enumerate_distribution
from safetensors.torch import save_file
from tabular import PROMPTS, TabularCausal, causal_distribution, causal_target, space_of

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.models.targets import context_table as tables
from gen.models.targets.context_table import ContextTable
from gen.recipes.tables import choose_offsets, log_likelihood
from gen.samplers.causal.initialisers.iterated import IteratedInitialiser

EXACT, WRONG = 1e-12, 1e-3
CONTEXTS = len(PROMPTS)
COMBINED = SamplingParams(temperature=0.7, top_k=2, guidance_scale=2.0)
jacobi = registry.get("sampler", "speculative_jacobi")
COUPLINGS = list(registry.table("coupling"))
COMPARING = [n for n, c in registry.table("coupling").items() if c.guarantee == "same_distribution"]
KEEPING = [n for n, c in registry.table("coupling").items() if c.keeps_noise]
SOME_TABLE = ContextTable(
    torch.tensor([[0, 1, 1], [2, 1, 0], [0, 1, 2], [1, 1, 2]]), (3,), 3, [(-1,)]
)


@pytest.fixture
def with_table(monkeypatch):
    """Every model has the same table."""
    registry.discover("drafting")
    drafting = registry._kinds["drafting"]
    monkeypatch.setitem(drafting, "context_table", lambda target, table: SOME_TABLE)


def distribution_error(sampler, sampling=COMBINED, length: int = 3, ids: int = 3) -> float:
    """The largest error of a probability, over three contexts in one ragged batch."""
    space = space_of((length,), ids)
    model = TabularCausal.with_params(sampling, ids)
    small = TabularCausal(ids, 5, model.low, model.spread)

    def decode(rng, context):
        target, draft = (causal_target(m, space, sampling, context) for m in (model, small))
        return sampler(target, rng, draft=draft if sampler.drafted else None).tokens

    found = enumerate_distribution(decode, CONTEXTS)
    expected = [causal_distribution(model, space, sampling, c) for c in range(CONTEXTS)]
    return max(distance(a, b) for a, b in zip(found, expected, strict=True))


def runs(items: int = 40, seed: int = 5, sampling=COMBINED):
    """A function sampler -> output, of items with contexts and keys of their own."""
    space, context = space_of((3, 4), 6), [i % CONTEXTS for i in range(items)]
    model = TabularCausal.with_params(sampling, 6)
    small = TabularCausal(6, seed, model.low, model.spread)

    def run(sampler):
        target, draft = (causal_target(m, space, sampling, context) for m in (model, small))
        rng = CounterRNG([7919 * i + 5 for i in range(items)])
        return sampler(target, rng, draft=draft if sampler.drafted else None)

    return run


# --- the distribution


@pytest.mark.parametrize("rounds", [1, None])
@pytest.mark.parametrize("init", ["model", "model_table"])
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.thinned(8)
def test_a_draft_model_keeps_the_distribution(with_table, coupling, init, rounds):
    sampler = jacobi(coupling=coupling, window=3, init=init, draft_rounds=rounds)
    assert distribution_error(sampler) < EXACT


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.thinned(2)
def test_a_table_keeps_the_distribution(with_table, coupling):
    assert distribution_error(jacobi(coupling=coupling, window=3, init="table")) < EXACT


@pytest.mark.parametrize("init", ["model", "table"])
@pytest.mark.parametrize("coupling", KEEPING)
@pytest.mark.thinned(2)
def test_drafts_that_are_not_corrected_keep_the_distribution(with_table, coupling, init):
    assert distribution_error(jacobi(coupling=coupling, window=3, init=init, redraft=False)) < EXACT


@pytest.mark.parametrize("init", ["model", "table", "model_table"])
@pytest.mark.parametrize("coupling", KEEPING)
@pytest.mark.thinned(4)
def test_drafts_that_are_replaced_keep_the_distribution(with_table, coupling, init):
    sampler = jacobi(coupling=coupling, window=3, init=init, redraft="replace")
    assert distribution_error(sampler) < EXACT
    if init == "model":
        assert error_with_end(sampler, with_end(3, ids=2)) < EXACT


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_a_draft_model_keeps_the_distribution_of_rows_that_end(coupling):
    sampler = jacobi(coupling=coupling, window=3, init="model")
    assert error_with_end(sampler, with_end(3, ids=2)) < EXACT


@pytest.mark.parametrize("coupling", COMPARING)
def test_a_trend_keeps_the_distribution(coupling):
    assert distribution_error(jacobi(coupling=coupling, window=3, trend=0.5)) < EXACT


def test_keeping_confident_drafts_does_not_keep_the_distribution():
    sampler = jacobi(coupling="fresh", window=3, keep_threshold=0.5)
    assert sampler.guarantee == "approximate"
    assert distribution_error(sampler, SamplingParams(), ids=2) > WRONG
    strict = dataclasses.replace(sampler, keep_threshold=1.0)
    assert strict.guarantee == "same_distribution"
    assert distribution_error(strict, SamplingParams(), ids=2) < EXACT


# --- controls


@pytest.mark.parametrize("init", ["model", "table"])
@pytest.mark.parametrize("coupling", ["fresh", "maximal"])
@pytest.mark.thinned(3)
def test_control_a_distribution_of_another_context(monkeypatch, with_table, coupling, init):
    true = IteratedInitialiser._fill

    def swapped(self, entering):
        filled = true(self, entering)
        filled.logq = filled.logq.roll(1, -1)
        return filled

    monkeypatch.setattr(IteratedInitialiser, "_fill", swapped)
    sampler = jacobi(coupling=coupling, window=3, init=init)
    assert distribution_error(sampler, SamplingParams(), ids=3) > WRONG


def test_control_a_position_that_is_drafted_again_until_it_likes_its_value(monkeypatch):
    """The iteration may end where nothing changes, and not because of what a draft is."""
    true = IteratedInitialiser._fill

    def picky(self, entering):
        filled = true(self, entering)
        filled.tokens = filled.tokens.clamp_max(0)  # token 0, which the distribution does not say
        return filled

    monkeypatch.setattr(IteratedInitialiser, "_fill", picky)
    sampler = jacobi(coupling="fresh", window=3, init="model")
    assert distribution_error(sampler, SamplingParams(), ids=3) > WRONG


def test_control_drafts_with_noise_of_their_own_cost_forward_passes(monkeypatch):
    """Still the tokens of autoregression."""
    sampler, plain = resolve_sampler({"name": "speculative_jacobi", "init": "model"})
    shared, reference = of_ids(sampler, plain), of_ids(resolve_sampler("autoregressive")[0], plain)
    assert shared.tokens.equal(reference.tokens)
    true = IteratedInitialiser._fill

    def independent(self, entering):
        draw = type(entering.step).categorical

        def own(step, logp, purpose, active, first=0, shared=False):
            return draw(step, logp, "draft", active, first, False)

        entering.step.categorical = own.__get__(entering.step)
        try:
            return true(self, entering)
        finally:
            del entering.step.categorical

    monkeypatch.setattr(IteratedInitialiser, "_fill", independent)
    found = of_ids(sampler, plain)
    assert found.tokens.equal(reference.tokens)
    assert sum(s.nfe for s in found.stats) > 1.1 * sum(s.nfe for s in shared.stats)


def test_control_replaced_drafts_that_say_another_distribution(monkeypatch, with_table):
    true = IteratedInitialiser._fill

    def swapped(self, entering):
        filled = true(self, entering)
        filled.logq = filled.logq.roll(1, -1)
        return filled

    monkeypatch.setattr(IteratedInitialiser, "_fill", swapped)
    sampler = jacobi(coupling="gumbel_shared", window=3, init="model", redraft="replace")
    assert distribution_error(sampler, SamplingParams(), ids=3) > WRONG


# --- what it saves


def test_the_iteration_drafts_what_one_token_at_a_time_would_in_fewer_passes():
    run = runs()
    until_fixed = run(jacobi(window=8, init="model", redraft=False, draft_rounds=None))
    as_many_as_positions = run(jacobi(window=8, init="model", redraft=False, draft_rounds=8))
    assert [s.nfe for s in until_fixed.stats] == [s.nfe for s in as_many_as_positions.stats]
    assert all(s.draft_nfe < 12 for s in until_fixed.stats)


def test_a_perfect_draft_model_leaves_one_forward_pass_per_window():
    for stats in runs(seed=0)(jacobi(window=4, init="model", draft_rounds=None)).stats:
        assert stats.nfe == 3


class Kin(TabularCausal):
    """Model whose logits are nearly those of the model of seed 0."""

    def forward(self, tokens, positions, cache):
        logits = super().forward(tokens, positions, cache)
        return logits + 0.2 * logits.flip(-1).cos()


def test_correcting_the_iterate_saves_forward_passes():
    space, context = space_of((4, 6), 6), [i % CONTEXTS for i in range(20)]

    def passes(**params):
        target, draft = (
            causal_target(m, space, SamplingParams(), context) for m in (TabularCausal(6), Kin(6))
        )
        sampler = jacobi(window=12, **params)
        out = sampler(target, CounterRNG(range(20)), draft=draft if sampler.drafted else None)
        return sum(s.nfe for s in out.stats)

    corrected, filled = passes(init="model"), passes(init="model", redraft=False)
    assert 1.2 * corrected < filled < passes()


def test_replacing_the_iterate_saves_forward_passes():
    space, context = space_of((4, 6), 6), [i % CONTEXTS for i in range(20)]

    def passes(**params):
        target, draft = (
            causal_target(m, space, SamplingParams(), context) for m in (TabularCausal(6), Kin(6))
        )
        sampler = jacobi(window=12, init="model", draft_rounds=None, **params)
        out = sampler(target, CounterRNG(range(20)), draft=draft)
        return sum(s.nfe for s in out.stats)

    assert 1.2 * passes(redraft="replace") < passes(redraft=True)


def test_draft_passes_of_an_item_do_not_depend_on_its_batch():
    sampler = jacobi(window=6, init="model")
    together, fewer = runs(9)(sampler), runs(3)(sampler)
    assert [s.draft_nfe for s in together.stats][:3] == [s.draft_nfe for s in fewer.stats]
    assert together.tokens[:3].equal(fewer.tokens)


# --- tables


def test_a_table_interpolates_between_its_levels():
    assert float(SOME_TABLE.distribution(torch.tensor([[1]])).sum()) == pytest.approx(1)
    q = SOME_TABLE.interpolated(torch.tensor([[2], [3]]))
    # level 0: 12 tokens of 3 kinds; level 1: token 2 was followed by 1 once
    first = torch.tensor([(3 + 1) / 15, (6 + 1) / 15, (3 + 1) / 15])
    assert torch.allclose(q[0].float(), (first + torch.tensor([0.0, 1.0, 0.0])) / 2)
    assert SOME_TABLE.dense is not None
    assert torch.allclose(SOME_TABLE.dense[SOME_TABLE.key(torch.tensor([[2]]))].double(), q[:1])


def test_neighbours_are_chosen_by_what_they_say():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(4, (40, 1, 5), generator=generator).expand(-1, 4, -1)  # columns repeat
    sequences = rows.reshape(40, 20).contiguous()
    offsets = choose_offsets(sequences, (4, 5), 4)
    assert offsets[0] in ((-1, 0), (-2, 0))
    table = ContextTable(sequences[::2], (4, 5), 4, offsets)
    blind = ContextTable(sequences[::2], (4, 5), 4, [])
    assert log_likelihood(table, sequences[1::2]) > log_likelihood(blind, sequences[1::2]) + 0.5


@pytest.fixture
def model_folder(tmp_path, monkeypatch):
    """A folder with weights, a config and a table."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"w": torch.zeros(2)}, folder / tables.WEIGHTS)
    tables.write_table(folder, torch.tensor([[0, 1, 1], [2, 1, 0]]), (3,), 3, [(-1,)])
    return folder


def named_target(folder):
    target = causal_target(TabularCausal(3), space_of((3,), 3), SamplingParams(), [0])
    target.name = str(folder)
    return target


def test_a_table_is_read_from_beside_the_weights(model_folder):
    found = tables.table_of(named_target(model_folder), None)
    assert found.offsets == [(-1,)] and len(found.levels) == 2
    assert tables.table_of(named_target(model_folder), str(model_folder)).size == 3
    assert tables.table_of(named_target(model_folder), "empty").levels[0].counts.sum() == 0


def test_a_table_of_another_model_is_refused(model_folder):
    save_file({"w": torch.ones(2)}, model_folder / tables.WEIGHTS)
    with pytest.raises(GenError, match="was counted with other weights"):
        tables.table_of(named_target(model_folder), None)


def test_a_table_of_other_tokens_is_refused(model_folder):
    tables.write_table(model_folder, torch.tensor([[0, 1]]), (2,), 3, [(-1,)])
    with pytest.raises(GenError, match="expected 3 ids and at least 3 positions"):
        tables.table_of(named_target(model_folder), None)


def test_a_model_without_a_table_is_refused(model_folder):
    (model_folder / tables.FILE).unlink()
    with pytest.raises(GenError, match=r"has no table.safetensors; expected sampler.table=empty"):
        tables.table_of(named_target(model_folder), None)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"draft_rounds": 0}, "draft_rounds"),
        ({"coupling": "fresh", "redraft": True}, "gumbel and gumbel_shared"),
        ({"coupling": "fresh", "redraft": "replace"}, "gumbel and gumbel_shared"),
        ({"redraft": "replce"}, "true, false, replace or None"),
        ({"redraft": 1}, "true, false, replace or None"),
        ({"keep_threshold": 0.5}, "the coupling gumbel has a rule of its own"),
        ({"trend": -1}, "trend"),
        ({"table": 3}, "table"),
        ({"draft_model": 3}, "draft_model"),
    ],
)
def test_a_bad_parameter_is_refused(params, says):
    with pytest.raises(GenError, match=says):
        jacobi(**params)


def test_a_missing_draft_model_is_refused():
    target = causal_target(TabularCausal(3), space_of((3,), 3), SamplingParams(), [0])
    with pytest.raises(GenError, match="drafts with a second model and got none"):
        jacobi(init="model")(target, CounterRNG([1]))


# --- the embedded model


@pytest.mark.slow
def test_images_have_the_tokens_of_autoregression_in_a_sixth_of_its_forward_passes():
    from gen.pipeline.pipeline import load  # heavy, for this slow test alone

    pipe = load("image", dtype="float64")
    prompts = pipe.modality.example_prompts(8, 0)
    expected = pipe(prompts, "autoregressive", seed=0).tokens
    for init, most in (("model", 40), ("table", 52), ("model_table", 40)):
        out = pipe(prompts, {"name": "speculative_jacobi", "init": init}, seed=0)
        assert out.tokens.equal(expected)
        assert sum(s.nfe for s in out.stats) / 8 < most, init
