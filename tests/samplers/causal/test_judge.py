"""Judge decoding: a probe that says no is the token verifier, one that says yes passes every
possible draft, and it reads the hidden state of the draft itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from enumeration import enumerate_distribution
from torch import Tensor

from gen.core.errors import GenError
from gen.core.rng import CounterRNG
from gen.modalities.text import tasks as text_tasks
from gen.models.draft_heads.predictors import LEAST, probe_inputs
from gen.models.targets.identity import distribution_of, target_digest
from gen.models.targets.trained_predictors import Probe
from gen.pipeline.pipeline import Pipeline
from gen.recipes.text.judge_decoding import QUICK, LabelledDrafts, Models, fit, labelled, trained
from gen.samplers.engine.draft import Draft
from gen.samplers.engine.step_context import StepContext
from gen.samplers.verifiers.base import Token
from gen.samplers.verifiers.relaxed.judge import LAYER, Judge

PROMPTS = ["shuffle 4 0 7 5 =", "insert 7 in 3 1 2 =", "sort 3 1 2 =", "remove from 5 6 8 2 ="]
SPEC = {"name": "judge", "draft_model": "text-draft"}
DRAFTED = {"name": "relaxed_acceptance", "verifier": "typical", "drafter": "model"}
V, EXACT = 4, 1e-12


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return Pipeline("text")


def saved(pipe: Pipeline, folder, bias: float, **changed) -> str:
    """Folder of a probe that says the same to all drafts."""
    models = Models(pipe, "text-draft")
    target = models.target(pipe.plan(PROMPTS[:1]), 1.0)
    facts = target_digest(target), target.name, distribution_of(target.sampling), LAYER
    probe = Probe(*facts, torch.zeros(target.model.config.hidden_size + 3), torch.tensor(bias))
    dataclasses.replace(probe, **changed).save_pretrained(folder)
    return str(folder)


def probe_of(weight: list[float], bias: float) -> Probe:
    return Probe("", "", {}, "layer", torch.tensor(weight), torch.tensor(bias))


def step_of(hidden: Tensor, rows: int, length: int, rng=None) -> StepContext:
    """A step with hidden states [b, W, D] in its layer."""
    n, zero = torch.arange(rows), torch.zeros(rows, dtype=torch.long)
    at = torch.arange(length).expand(rows, -1)
    valid = torch.ones(rows, length, dtype=torch.bool)
    rng = rng or CounterRNG(range(rows))
    return StepContext(rng, n, zero, zero, at, valid, hidden_states={"layer": hidden})


def drafts(rows: int, length: int, seed: int) -> tuple[Draft, Tensor]:
    """Random drafts, and log p [b, L, V]."""
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.rand(2, rows, length, V, generator=generator, dtype=torch.float64)
    logp, logq = (x.pow(3).div(x.pow(3).sum(-1, keepdim=True)).log() for x in (p, q))
    tokens = torch.randint(V, (rows, length), generator=generator)
    return Draft(tokens, torch.ones_like(tokens, dtype=torch.bool), logq), logp


@pytest.mark.parametrize("relaxation", [0, 1e-6])
def test_the_limit_is_the_token_verifier(pipe, tmp_path, relaxation):
    weights = {} if not relaxation else {"verifier_weights": saved(pipe, tmp_path, 5.0)}
    exact = pipe(PROMPTS, DRAFTED | {"relaxation": 0}, num_samples=4)
    found = pipe(PROMPTS, DRAFTED | {"verifier": "judge", "relaxation": relaxation} | weights,
                 num_samples=4)  # fmt: skip
    assert found.tokens.equal(exact.tokens)
    assert [s.nfe for s in found.stats] == [s.nfe for s in exact.stats]


def test_a_probe_that_says_yes_passes_the_drafts(pipe, tmp_path):
    spec = SPEC | {"verifier_weights": saved(pipe, tmp_path, 5.0)}
    exact = pipe(PROMPTS, SPEC | {"relaxation": 0}, num_samples=4)
    found = pipe(PROMPTS, spec, num_samples=4)
    assert sum(s.nfe for s in found.stats) < sum(s.nfe for s in exact.stats)
    # greedy drafts that all pass are what the draft model says by itself
    alone = Pipeline("text", "text-draft")(PROMPTS, "autoregressive", num_samples=4, temperature=0)
    once = [s.nfe == 1 for s in found.stats]
    assert sum(once) > 8 and found.tokens[once].equal(alone.tokens[once])


def test_the_draft_itself_is_judged():
    """A mark in the state of column i + 1 passes the draft of column i and no other."""
    rows, length = 60, 3
    tree, logp = drafts(rows, length, 0)
    nothing = step_of(torch.zeros(rows, length + 1, 1), rows, length)
    exact = Token().decide(nothing, tree, logp)[0]
    judge = Judge(0.5, probe=probe_of([10.0, 0.0, 0.0, 0.0], -5.0))
    for column in range(length):
        hidden = torch.zeros(rows, length + 1, 1)
        hidden[:, column + 1] = 1
        found = judge.decide(step_of(hidden, rows, length), tree, logp)[0]
        assert found.ge(exact).all(), "the exact rule is OR-ed"
        stopped = exact == column
        assert bool(stopped.any()) and bool((found[stopped] > column).all())
        assert found[exact < column].equal(exact[exact < column])


def test_a_draft_without_a_hidden_state_is_judged_by_the_exact_rule():
    rows, length = 60, 3
    tree, logp = drafts(rows, length, 1)
    judge = Judge(0.5, probe=probe_of([0.0, 0.0, 0.0, 0.0], 5.0))
    hidden = torch.zeros(rows, length, 1)  # of no column behind the last draft
    found = judge.decide(step_of(hidden, rows, length), tree, logp)[0]
    assert found.min() == length - 1 and 0 < (found == length).sum() < rows


def test_an_impossible_draft_never_passes():
    rows, length = 60, 2
    tree, logp = drafts(rows, length, 2)
    logp = logp.scatter(-1, tree.tokens[..., None], -torch.inf)
    judge = Judge(1.0, probe=probe_of([0.0, 0.0, 0.0, 0.0], 50.0))
    step = step_of(torch.zeros(rows, length + 1, 1), rows, length)
    assert judge.decide(step, tree, logp)[0].eq(0).all()


def test_the_probe_reads_state_log_p_maximum_and_entropy():
    hidden, half = torch.randn(3, 2), torch.tensor(0.5).log()
    logp = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [torch.nan] * 3]).log()
    found = probe_inputs(hidden, logp, torch.tensor([1, 2, 0]))
    assert found[:, :2].equal(hidden)
    wanted = torch.tensor([[half, half, -half], [LEAST, 0, 0], [LEAST, LEAST, 0]])
    assert torch.allclose(found[:, 2:], wanted)


def committed(judge: Judge, logq: Tensor, logp: Tensor) -> Tensor:
    """Distribution [V] of the token that one step with one draft commits."""

    def decode(rng, case):
        rows = len(case)
        step = step_of(torch.zeros(rows, 2, 1), rows, 2, rng)
        on, logits = torch.ones(rows, 1, dtype=torch.bool), logq.expand(rows, 1, V)
        tokens = step.categorical(logits, "draft", on)
        tree = Draft(tokens, on, logits)
        return judge.verify(step, tree, logp.expand(rows, 2, V)).tokens[:, :1]

    (found,) = enumerate_distribution(decode, 1)
    return torch.tensor([found.get((x,), 0.0) for x in range(V)], dtype=torch.float64)


@pytest.mark.parametrize("least", [-9.0, -1.4, -0.7])
def test_a_step_is_no_further_than_its_draft(least):
    """Drafts of a log p above ``least`` pass: the law is q f + R norm((p - q)+)."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    q = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)
    judge = Judge(0.5, probe=probe_of([0.0, 1.0, 0.0, 0.0], -least))
    f = torch.where(p.log() > least, torch.ones_like(p), (p / q).clamp_max(1))
    rest = (p - q).clamp_min(0)
    wanted = q * f + (1 - (q * f).sum()) * rest / rest.sum()
    found = committed(judge, q.log(), p.log())
    assert (found - wanted).abs().max() < EXACT
    off = (found - p).abs().sum() / 2
    assert off <= judge.bound(p.log(), q.log()) + EXACT
    if least < -1:
        assert off > 0.01, "nothing was relaxed, so nothing was bounded"
    strict = Judge(0, probe=judge.probe)
    assert (committed(strict, q.log(), p.log()) - p).abs().max() < EXACT
    assert strict.bound(p.log(), q.log()) == 0


def test_a_probe_of_another_model_or_distribution_is_refused(pipe, tmp_path):
    good = saved(pipe, tmp_path / "good", 0.0)
    pipe(PROMPTS[0], SPEC | {"verifier_weights": good})
    with pytest.raises(GenError, match=r"trained for temperature 1.0, and .* have temperature 0.7"):
        pipe(PROMPTS[0], SPEC | {"verifier_weights": good}, temperature=0.7)
    other = saved(pipe, tmp_path / "other", 0.0, target="0" * 16)
    with pytest.raises(GenError, match="with weights 0000000000000000; expected"):
        pipe(PROMPTS[0], SPEC | {"verifier_weights": other})
    narrow = saved(pipe, tmp_path / "narrow", 0.0, weight=torch.zeros(5))
    with pytest.raises(GenError, match="the probe has 5 weights; expected 99"):
        pipe(PROMPTS[0], SPEC | {"verifier_weights": narrow})
    with pytest.raises(GenError, match="verifier_weights text-filter is of kind position_filter"):
        pipe(PROMPTS[0], SPEC | {"verifier_weights": "text-filter"})


def test_weights_and_drafters_that_do_not_fit_are_refused(pipe):
    with pytest.raises(GenError, match="with sampler.verifier judge"):
        pipe(PROMPTS[0], DRAFTED | {"verifier_weights": "text-filter"})
    with pytest.raises(GenError, match="a drafter of chains, such as model"):
        pipe(PROMPTS[0], {"name": "relaxed_acceptance", "verifier": "judge"})
    with pytest.raises(GenError, match="unknown probe 'nowhere'"):
        pipe(PROMPTS[0], SPEC | {"verifier_weights": "nowhere"})


# --- the recipe


def test_labels_of_a_task_with_one_answer_are_its_words(pipe):
    """A draft of such a task is right if and only if the answer has its word there."""
    models = Models(pipe, "text-draft")
    tasks = [text_tasks.parse(f"copy {a} {b} {c} =") for a, b, c in ("315", "082", "497", "613")]
    prompts = [str(t) for t in tasks for _ in range(6)]
    data = labelled(models, prompts, 10, 50)
    assert data.task.min() >= 10 and data.task.max() < 10 + len(prompts)
    assert data.right.any() and len(data.right) > len(prompts)
    # behind a wrong draft none is labelled
    for task in data.task.unique():
        assert data.right[data.task == task][:-1].all()
    # the greedy target copies without a mistake, so the log p of what is right is near 0
    log_p = data.inputs[:, -3]
    assert log_p[data.right].min() > -1


def test_a_fit_separates_what_is_separable():
    """Most right drafts score above most wrong ones, and wrong ones are hardly ever accepted."""

    def ordered(score: Tensor, right: Tensor) -> Tensor:
        return (score[right][:, None] > score[~right]).float().mean()

    x = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    right = x @ torch.tensor([1.0, -2.0, 0.0]) > 0.3
    weight, bias = fit(LabelledDrafts(x, right, torch.arange(400)))
    score = x @ weight + bias
    assert ordered(score, right) > 0.99 and (score[~right] > 0).float().mean() < 0.02
    shuffled = right[torch.randperm(400, generator=torch.Generator().manual_seed(1))]
    weight, bias = fit(LabelledDrafts(x, shuffled, torch.arange(400)))
    assert ordered(x @ weight + bias, shuffled) < 0.7


@pytest.mark.slow
def test_the_recipe_makes_a_probe_that_judge_takes(pipe, tmp_path):
    probe, figures = trained(pipe, "text-draft", QUICK)
    probe.save_pretrained(tmp_path)
    assert 0 < figures["right"] <= 1
    out = pipe(PROMPTS, SPEC | {"verifier_weights": str(tmp_path)})
    assert all(s.nfe >= 1 for s in out.stats)
