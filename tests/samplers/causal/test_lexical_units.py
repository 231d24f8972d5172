"""Runs of drafts that are committed as they are: which drafts belong to a run, by hand."""

from __future__ import annotations

import pytest
import torch
from constraint_bench import EXACT, WRONG, error
from tabular import space_of

from gen.core.registry import registry
from gen.samplers.engine.draft import Draft
from gen.samplers.verifiers.base import Token
from gen.samplers.verifiers.relaxed.formulas import LexicalUnit

relaxed_acceptance = registry.get("sampler", "relaxed_acceptance")
Q = torch.tensor([[0.95, 0.05], [0.92, 0.08], [0.6, 0.4], [0.99, 0.01]]).double()
P = torch.tensor([[0.1, 0.9], [0.0, 1.0], [0.3, 0.7], [0.2, 0.8]]).double()


def drafts(logq: torch.Tensor | None, guessed: bool = False) -> Draft:
    """A chain of four drafts of token 0."""
    tokens, exists = torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.bool)
    return Draft(tokens, exists, logq, guessed=torch.full_like(exists, guessed))


def chances(relaxation: float, p: torch.Tensor = P, tree: Draft | None = None) -> list[float]:
    """Probabilities to accept four drafts of token 0."""
    tree = drafts(Q.log()[None]) if tree is None else tree
    return LexicalUnit(relaxation).chance(tree, p.log()[None])[0].tolist()


def exact(p: torch.Tensor = P) -> list[float]:
    return (p[:, 0] / Q[:, 0]).clamp_max(1).tolist()


def test_a_run_ends_at_the_first_draft_that_is_not_sure():
    possible = P.clamp_min(0.05)
    found, verified = chances(0.1, possible), exact(possible)
    assert found[:2] == [1.0, 1.0] and found[2:] == pytest.approx(verified[2:])
    assert chances(0.06, possible) == pytest.approx([1.0, *verified[1:]])
    assert chances(1.0, possible) == [1.0] * 4


def test_a_token_that_the_target_leaves_out_is_not_committed():
    assert chances(0.1) == pytest.approx([1.0, 0.0, *exact()[2:]])


def test_a_draft_without_a_probability_is_verified():
    certain = torch.tensor([0.0, -torch.inf]).double().expand(1, 4, 2)
    for tree in (drafts(None), drafts(certain, True)):
        assert chances(0.5, P, tree) == pytest.approx(P[:, 0].tolist())


def test_without_relaxation_every_draft_is_verified():
    assert chances(0.0) == pytest.approx(exact())
    certain = drafts(torch.tensor([0.0, -torch.inf]).double().expand(1, 4, 2))
    strict = Token().chance(certain, P.log()[None])
    assert torch.equal(LexicalUnit(0.0).chance(certain, P.log()[None]), strict)


@pytest.mark.parametrize("relaxation", [0.0, 0.9])
def test_only_a_threshold_that_drafts_cannot_exceed_is_exact(relaxation):
    sampler = relaxed_acceptance(
        verifier="lexical_unit", drafter="model", relaxation=relaxation, num_speculative_tokens=2
    )
    found = error(sampler, space_of((3,), 3))
    assert found < EXACT if not relaxation else found > WRONG
