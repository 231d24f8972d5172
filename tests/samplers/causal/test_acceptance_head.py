"""The length policy with a trained head: its labels, its rule, the hidden states that it reads, and
that no head changes the distribution. The control drops the draft at which the head stops."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from constrained import with_end
from constraint_bench import COMBINED, EXACT, WRONG, error, speculative
from tabular import space_of
from torch import Tensor

from gen.core.errors import GenError
from gen.models.draft_heads.predictors import (
    LEAST,
    AcceptanceNet,
    acceptance_inputs,
    acceptance_label,
)
from gen.models.targets.trained_drafters import write_drafter
from gen.models.targets.trained_predictors import head_facts
from gen.pipeline.pipeline import Pipeline
from gen.recipes.acceptance_head import LAYER, QUICK, REJECTED, drafted, head_loss, trained
from gen.recipes.drafters.data import Teacher
from gen.samplers.causal.drafters.model import ModelDrafter
from gen.samplers.causal.length_policies.specdec_pp import AcceptanceHead

PROMPTS = ["shuffle 4 0 7 5 =", "sort 3 1 2 9 8 =", "close ( [ ] { =", "copy 3 1 2 5 6 ="]
SPEC = {"name": "speculative", "num_speculative_tokens": 6, "least_drafts": 1}
POLICY = {"policy": "acceptance_head", "acceptance_head": "in the test", "least_drafts": 1}


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return Pipeline("text")


@pytest.fixture(scope="module")
def teachers(pipe) -> tuple[Teacher, Teacher]:
    return Teacher(pipe, PROMPTS), Teacher(Pipeline("text", "text-draft"), PROMPTS, (LAYER,))


@pytest.fixture(scope="module")
def head(teachers, tmp_path_factory) -> str:
    """Folder of a head of random weights."""
    target, draft = teachers
    torch.manual_seed(0)
    net = AcceptanceNet(draft.model.config.hidden_size)
    folder = tmp_path_factory.mktemp("head")
    write_drafter(folder, head_facts(target.target, draft.target, LAYER, 2), net.state_dict())
    return str(folder)


@pytest.fixture
def tabular(monkeypatch):
    """Let a head of random weights read tables, whose first log-probability is the hidden state."""
    true = AcceptanceHead.stop

    def attach(self, target, draft):
        torch.manual_seed(1)
        self.net = AcceptanceNet(1)
        with torch.no_grad():  # it goes on behind drafts whose q is about a half or more
            self.net.out.weight.mul_(0.1)
            self.net.out.weight[0, 1] += 3
            self.net.out.bias.fill_(3)

    def stop(self, mass, logprobs):
        self._hidden = logprobs[:, :1].clamp_min(LEAST)
        return true(self, mass, logprobs)

    monkeypatch.setattr(AcceptanceHead, "attach", attach)
    monkeypatch.setattr(AcceptanceHead, "stop", stop)


@pytest.mark.parametrize("verifier", ["block", pytest.param("token", marks=pytest.mark.slow)])
def test_no_head_changes_the_distribution(tabular, verifier):
    sampler = speculative(verifier=verifier, num_speculative_tokens=2, **POLICY)
    assert error(sampler, space_of((4,), 3), COMBINED) < EXACT
    assert error(sampler, with_end(3, 3)) < EXACT


def test_control_the_draft_at_which_the_head_stops_is_dropped(tabular, monkeypatch):
    """Its own value decided about it."""
    stopped: list[Tensor] = []
    stop, propose = AcceptanceHead.stop, ModelDrafter.propose

    def noted(self, mass, logprobs):
        stopped.append(stop(self, mass, logprobs))
        return stopped[-1]

    def dropped(self, step, tokens):
        stopped.clear()
        draft = propose(self, step, tokens)
        for column, rows in enumerate(stopped):
            draft.exists[:, column] &= ~rows
        draft.exists = draft.exists.long().cumprod(1).bool()
        return draft

    monkeypatch.setattr(AcceptanceHead, "stop", noted)
    monkeypatch.setattr(ModelDrafter, "propose", dropped)
    sampler = speculative(num_speculative_tokens=2, **POLICY)
    assert error(sampler, space_of((4,), 3)) > WRONG


def test_the_label_is_the_probability_of_acceptance():
    p = torch.tensor([0.5, 0.3, 0.2, 0.0])
    q = torch.tensor([0.25, 0.6, 0.05, 0.1])
    ids = torch.arange(4)
    found = acceptance_label(p.log().expand(4, 4), q.log().expand(4, 4), ids)
    assert torch.allclose(found, torch.tensor([1.0, 0.5, 1.0, 0.0]))
    # its mean under q is the acceptance of a draft, sum min(p, q)
    assert torch.isclose((q * found).sum(), torch.minimum(p, q).sum())


@pytest.mark.parametrize("label", [0.1, 0.5, 0.9])
def test_the_loss_is_least_where_rejections_weigh_more(label):
    """Its minimum is a / (a + w (1 - a)), and a where both weigh the same."""
    wanted = label / (label + REJECTED * (1 - label))
    logit = torch.logit(torch.tensor([wanted])).requires_grad_()
    head_loss(logit, torch.tensor([label])).backward()
    assert logit.grad.abs() < 1e-6
    other = torch.logit(torch.tensor([label])).requires_grad_()
    head_loss(other, torch.tensor([label])).backward()
    assert other.grad.abs() > 0.1


def test_a_threshold_of_one_never_stops_and_of_zero_at_once(pipe, head):
    spec = SPEC | {"policy": "acceptance_head", "acceptance_head": head}
    runs = {
        h: pipe(PROMPTS, spec | {"rejection_threshold": h}, num_samples=2) for h in (0.0, 0.6, 1.0)
    }
    for h, most in ((0.0, 1), (1.0, 6)):
        constant = pipe(
            PROMPTS, {"name": "speculative", "num_speculative_tokens": most}, num_samples=2
        )
        assert runs[h].tokens.equal(constant.tokens)
        assert [s.draft_nfe for s in runs[h].stats] == [s.draft_nfe for s in constant.stats]
    drafts = {h: sum(s.draft_nfe for s in run.stats) for h, run in runs.items()}
    assert drafts[0.6] != drafts[0.0] and drafts[0.6] != drafts[1.0]


def test_the_head_reads_the_states_that_the_drafts_come_from(pipe, teachers, head, monkeypatch):
    """They are those of the draft model on what is committed and drafted before."""
    seen: list[tuple[Tensor, Tensor]] = []
    read, propose, drafts = AcceptanceHead.read, ModelDrafter.propose, []

    def noted(self, states):
        read(self, states)
        seen.append(self._hidden.clone())

    def kept(self, step, tokens):
        seen.clear()
        draft = propose(self, step, tokens)
        drafts.append((step.starts.copy(), tokens.clone(), draft.tokens.clone(), list(seen)))
        return draft

    monkeypatch.setattr(AcceptanceHead, "read", noted)
    monkeypatch.setattr(ModelDrafter, "propose", kept)
    spec = SPEC | {"policy": "acceptance_head", "acceptance_head": head, "rejection_threshold": 1.0}
    spec["num_speculative_tokens"] = 2
    pipe(PROMPTS[1], spec)
    starts, tokens, drafted_tokens, states = drafts[1]
    start, count = int(starts[0]), len(states)
    assert start > 0 and count > 1
    whole = tokens.clone()
    whole[0, start : start + count] = drafted_tokens[0, :count]
    batch = teachers[1].batch(torch.tensor([1]), whole)
    for column, hidden in enumerate(states):
        wanted = batch.states[LAYER][0, start + column]
        assert torch.allclose(hidden[0], wanted, atol=1e-4)
        assert not torch.allclose(hidden[0], batch.states[LAYER][0, start + column + 1], atol=1e-2)


def test_inputs_join_state_log_mass_and_entropy():
    q = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    found = acceptance_inputs(torch.zeros(2, 3), torch.tensor([0.5, 0.0]), q.log())
    assert found.shape == (2, 5)
    log2 = torch.tensor(2.0).log()
    assert torch.allclose(found[:, 3:], torch.tensor([[-log2, log2], [LEAST, 0.0]]))


def test_a_head_of_other_models_is_refused(pipe, teachers, head, tmp_path):
    spec = SPEC | {"policy": "acceptance_head"}
    with pytest.raises(GenError, match="acceptance_head '' is not allowed|acceptance_head"):
        pipe(PROMPTS[0], spec)
    with pytest.raises(GenError, match=r"sampler.acceptance_head; it is no folder"):
        pipe(PROMPTS[0], spec | {"acceptance_head": "nowhere"})
    with pytest.raises(GenError, match="reads a draft model with weights"):
        pipe(PROMPTS[0], spec | {"acceptance_head": head, "draft_model": "text-causal"})
    with pytest.raises(GenError, match="was trained for temperature 1.0"):
        pipe(PROMPTS[0], spec | {"acceptance_head": head}, temperature=0.5)
    target, draft = teachers
    facts = head_facts(target.target, draft.target, LAYER, 2)
    write_drafter(
        tmp_path, dataclasses.replace(facts, target="0" * 16), AcceptanceNet(32).state_dict()
    )
    with pytest.raises(GenError, match="with weights 0000000000000000; expected"):
        pipe(PROMPTS[0], spec | {"acceptance_head": str(tmp_path)})


@pytest.mark.slow
def test_the_recipe_learns_what_is_accepted(teachers, tmp_path):
    target, draft = teachers
    data = drafted(target, draft, target.sample(), seed=0)
    assert 0 < data.label.mean() < 1 and data.label.max() <= 1
    plan = dataclasses.replace(QUICK, steps=200)
    net = trained(data, plan, tmp_path, lambda line: None)
    blind = torch.logit(
        data.label.mean() / (data.label.mean() + REJECTED * (1 - data.label.mean()))
    )
    known = head_loss(net(data.inputs), data.label)
    assert known < 0.9 * head_loss(blind.expand(len(data.label)), data.label)
