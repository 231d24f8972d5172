"""``speculative`` takes a registered drafter by its name, and stays exact with it."""

from __future__ import annotations

import pytest
import torch
from constraint_bench import EXACT, WRONG, autoregressive, error, run, speculative
from tabular import space_of

from gen.core.errors import GenError
from gen.core.registry import Registry, registry
from gen.samplers.causal.drafters.base import DraftSource
from gen.samplers.engine.causal_loop import Drafter
from gen.samplers.engine.draft import Draft


class Repeated(Drafter):
    """Drafter of the last token, twice."""

    window = 3

    def __init__(self, verifier):
        self.verifier = verifier

    def propose(self, step, tokens):
        last = tokens.gather(1, (step.start - 1).clamp_min(0)[:, None]).clamp_min(0)
        length = step.valid.shape[1] - 1
        return Draft(last.expand(-1, length), step.valid[:, 1:])

    def verify(self, step, draft, output):
        return self.verifier.verify(step, draft, output.logprobs)


class Repeat(DraftSource):
    """Source of ``Repeated``."""

    @classmethod
    def make(cls, sampler, target, draft, verifier):
        return Repeated(verifier)


@pytest.fixture
def named(monkeypatch):
    found = Registry.get

    def get(self, kind, name, *args):
        return Repeat if (kind, name) == ("drafter", "repeat") else found(self, kind, name, *args)

    monkeypatch.setattr(Registry, "get", get)


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_a_drafter_without_a_model_is_exact(named, verifier):
    sampler = speculative(verifier=verifier, drafter="repeat")
    assert not sampler.drafted and not sampler.timed
    assert error(sampler, space_of((3,), 3)) < EXACT


def test_control_drafts_that_say_another_distribution_are_not_exact(named, monkeypatch):
    monkeypatch.setattr(Draft, "log_mass", lambda self: torch.full(self.tokens.shape, -1.0))
    assert error(speculative(drafter="repeat"), space_of((3,), 3)) > WRONG


def test_a_drafter_makes_no_forward_pass_of_a_draft_model(named):
    out, plain = run(speculative(drafter="repeat")), run(autoregressive())
    assert all(s.draft_nfe is None for s in out.stats)
    assert sum(s.nfe for s in out.stats) < sum(s.nfe for s in plain.stats)


def test_a_drafter_whose_parameters_the_sampler_lacks_is_refused():
    assert "jacobi" in registry.table("drafter")
    with pytest.raises(GenError, match="drafter is 'jacobi'; expected one that does not read coup"):
        speculative(drafter="jacobi")
    with pytest.raises(GenError, match="unknown drafter 'modle' in sampler.drafter. Did you mean"):
        speculative(drafter="modle")
