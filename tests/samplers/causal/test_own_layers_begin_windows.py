"""Jacobi windows that begin with drafts of the target's own layers, trained or not: the
distribution, the tokens of autoregression, and what is refused.

Controls draft with another plan than is claimed, or say another distribution.
"""

from __future__ import annotations

import warnings

import pytest
from constrained import with_end
from constraint_bench import COMBINED, EXACT, WRONG, error
from tabular import space_of
from trained_drafters import GUIDED, PLAIN, V, target, write

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.models.targets import base as targets
from gen.models.targets.identity import DrafterFacts
from gen.samplers.causal.initialisers.iterated import IteratedInitialiser, ModelInitialiser

jacobi = registry.get("sampler", "speculative_jacobi")
LENGTH = 8
PLANS = {
    "layer_skip": {"drafter": "layer_skip", "kept_layers": "0,2"},
    "early_exit": {"drafter": "early_exit", "exit_layer": 2},
}
TRAINED = [
    name for name, one in registry.table("drafter").items() if one.is_model and one.needs_weights
]


def run(sampler, sampling=PLAIN, rows=(0, 1, 2)):
    keys = [5 + 7919 * i for i in rows]
    return sampler(target(LENGTH, V, sampling, rows), CounterRNG(keys))


# --- the distribution


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
@pytest.mark.parametrize("coupling", registry.table("coupling"))
@pytest.mark.thinned(3)
def test_no_plan_changes_the_distribution(coupling, plan):
    sampler = jacobi(coupling=coupling, window=3, init="model", **plan)
    assert error(sampler, space_of((3,), 3), COMBINED) < EXACT
    assert error(sampler, with_end(3, 2)) < EXACT


@pytest.mark.parametrize("coupling", ["fresh", "maximal"])
def test_control_the_distribution_of_another_plan(monkeypatch, coupling):
    """Drawn with one distribution, claimed to be drawn with another."""
    true = IteratedInitialiser._fill

    def swapped(self, entering):
        filled = true(self, entering)
        filled.logq = filled.logq.roll(1, -1)
        return filled

    monkeypatch.setattr(IteratedInitialiser, "_fill", swapped)
    sampler = jacobi(coupling=coupling, window=3, init="model", **PLANS["layer_skip"])
    assert error(sampler, space_of((3,), 3)) > WRONG


# --- the tokens of autoregression


def trained(name: str, folder, sampling):
    weights = write(name, target(LENGTH, V, sampling), folder / f"{name}-{sampling.top_k}")
    return jacobi(window=5, init="model", drafter=name, drafter_weights=weights)


def test_the_trained_kinds_are_those_of_one_model():
    assert set(TRAINED) == {"exit", "skip", "router", "lora_drop"}


@pytest.mark.parametrize("sampling", [PLAIN, GUIDED], ids=["plain", "guided"])
@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.thinned(3)
def test_a_trained_drafter_leaves_the_tokens_of_autoregression(name, sampling, tmp_path):
    sampler = trained(name, tmp_path, sampling)
    assert sampler.guarantee == "same_tokens" and not sampler.drafted
    out, plain = run(sampler, sampling), run(resolve_sampler("autoregressive")[0], sampling)
    assert out.tokens.equal(plain.tokens)
    assert all(s.draft_nfe for s in out.stats)


@pytest.mark.parametrize("name", TRAINED)
def test_passes_of_an_item_do_not_depend_on_its_batch(name, tmp_path):
    sampler = trained(name, tmp_path, PLAIN)
    together, alone = run(sampler), run(sampler, rows=(1,))
    assert together.tokens[1:2].equal(alone.tokens)
    ours, theirs = together.stats[1], alone.stats[0]
    assert (ours.nfe, ours.draft_nfe) == (theirs.nfe, theirs.draft_nfe)


def test_control_another_distribution_of_drafts_costs_passes_and_no_token(monkeypatch):
    """All layers are the target itself, whose drafts are accepted one and all."""
    whole = jacobi(
        window=4, init="model", drafter="layer_skip", kept_layers="1/1", draft_rounds=None
    )
    out = run(whole)
    assert [s.nfe for s in out.stats] == [LENGTH // 4] * 3
    true = ModelInitialiser.predict

    def shuffled(self, entering, canvas, is_first):
        return true(self, entering, canvas, is_first).roll(1, -1)

    monkeypatch.setattr(ModelInitialiser, "predict", shuffled)
    wrong = run(whole)
    assert wrong.tokens.equal(out.tokens)
    assert sum(s.nfe for s in wrong.stats) > sum(s.nfe for s in out.stats)


# --- guidance


def test_a_distilled_model_drafts_with_the_guidance_that_it_was_trained_with(monkeypatch):
    of = target(LENGTH, V, GUIDED)

    def drafted(net):
        facts = None if net is None else DrafterFacts.of("ar", of, net=net)
        monkeypatch.setattr(targets, "facts_of_model", lambda target, draft: facts)
        init = ModelInitialiser.make(jacobi(init="model"), of, target(LENGTH, V, GUIDED))
        return init.draft.sampling.guidance_scale, init.draft.branches

    assert drafted({"guidance_scale": 1.0}) == (1.0, 1)
    assert drafted(None) == (GUIDED.guidance_scale, 2)  # control: a model of nobody


# --- what is refused


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"init": "model", "drafter": "eagle"}, "one that is a model: .*exit.*layer_skip.*model"),
        ({"init": "model", "drafter": "layer_skp"}, "layer_skip"),
        ({"init": "repeat", "drafter": "layer_skip"}, "model or model_table with sampler.drafter"),
        ({"init": "model", "drafter_weights": "x"}, "None, or a folder with sampler.drafter exit"),
        ({"init": "model", "drafter": "layer_skip", "kept_layers": "x"}, "a share of the layers"),
        ({"init": "model", "drafter": "early_exit", "exit_layer": 0}, "an integer of at least 1"),
    ],
)
def test_a_bad_parameter_is_refused(params, says):
    with pytest.raises(GenError, match=says):
        jacobi(**params)


def test_a_drafter_of_another_distribution_is_refused(tmp_path):
    sampler = trained("exit", tmp_path, PLAIN)
    with pytest.raises(GenError, match="trained for"):
        run(sampler, GUIDED)


UNREAD = {
    "exit_layer": {"exit_layer": 2},
    "kept_layers": {"init": "model", "drafter": "early_exit", "kept_layers": "0,2"},
    "draft_rounds": {"draft_rounds": 2},
    "draft_model": {"init": "model", "drafter": "early_exit", "draft_model": "image-draft"},
    "table": {"init": "model", "table": "empty"},
}
READ = (
    {"init": "model", "drafter": "early_exit", "exit_layer": 2},
    {"init": "model", "drafter": "layer_skip", "kept_layers": "0,2", "draft_rounds": 2},
    {"init": "model_table", "draft_model": "image-draft", "table": "empty", "draft_rounds": None},
    {"init": "table", "table": "empty"},
)


@pytest.mark.parametrize("name", UNREAD)
def test_a_parameter_that_no_part_of_the_window_reads_is_named(name):
    with pytest.warns(UserWarning, match=f"sampler.{name} is .* but has no effect"):
        resolve_sampler({"name": "speculative_jacobi", **UNREAD[name]})


@pytest.mark.parametrize("params", READ)
def test_parameters_that_a_part_reads_are_not_warned_of(params):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve_sampler({"name": "speculative_jacobi", **params})
