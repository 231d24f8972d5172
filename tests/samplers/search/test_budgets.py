"""Budgets of searches that decide while they decode, and searches that run searches."""

from __future__ import annotations

import pytest
import torch

import gen
from gen.core.errors import GenError

PROMPTS = ["push the block", "push the block to the left"]


@pytest.fixture(scope="module")
def pipe():
    return gen.load("action")


def steered(budget=None, **more):
    spec = {"name": "svdd", "base": "maskgit", "m": 4, "scorer": "goal_distance", "alpha": 0.0}
    return {**spec, "budget": budget, **more}


@pytest.mark.parametrize("budget", ["10 passes", {"passes": 10}, "2 tokens"])
def test_a_spent_budget_leaves_the_best_particle_alone(pipe, budget):
    prompt = pipe.modality.example_prompts(1, 0)[0]
    whole = pipe(prompt, steered(), seed=1)
    cut = pipe(prompt, steered(budget), seed=1)
    steps = whole.stats[0].nfe // 4
    # one more level may have begun; after it one particle goes on
    assert cut.stats[0].nfe < whole.stats[0].nfe
    assert steps <= cut.stats[0].nfe <= 16 + steps
    assert len({c.level for c in cut.candidates[0]}) < len({c.level for c in whole.candidates[0]})


def test_control_a_budget_that_is_not_spent_changes_nothing(pipe):
    prompt = pipe.modality.example_prompts(1, 0)[0]
    whole, rich = (pipe(prompt, steered(b), seed=1) for b in (None, "1000 passes"))
    assert torch.equal(whole.tokens, rich.tokens)
    assert whole.stats[0].nfe == rich.stats[0].nfe


def test_items_spend_their_budgets_for_themselves(pipe):
    prompts = pipe.modality.example_prompts(3, 0)
    together = pipe(prompts, steered("20 passes"), seed=1)
    for i, prompt in enumerate(prompts):
        alone = pipe(prompt, steered("20 passes"), seed=together.seeds[i])
        assert torch.equal(alone.tokens[0], together.tokens[i])
        assert alone.stats[0].nfe == together.stats[i].nfe


@pytest.mark.parametrize("budget", [0, "0 passes", {"passes": 0}, "many", {"hours": 1}, -1])
def test_a_budget_that_is_none_is_refused(pipe, budget):
    with pytest.raises(GenError, match="budget"):
        pipe("push the block", steered(budget))


def test_a_search_may_run_a_search_on_every_item(pipe):
    prompts = pipe.modality.example_prompts(3, 0)
    inner = steered(alpha=0.01, m=2)
    nested = {"name": "best_of", "n": 2, "base": inner, "scorer": "goal_distance"}
    out = pipe(prompts, nested, seed=1)
    # the first candidate of an item is what the inner search gives alone
    plain = pipe(prompts, inner, seed=1)
    for candidates, tokens in zip(out.candidates, plain.tokens, strict=True):
        assert torch.equal(candidates[0].tokens, tokens)
