"""Drafts of several models at once: exact whatever the models, and better than each of them."""

from __future__ import annotations

import pytest
import torch
from constrained import sampling_of, with_end
from constraint_bench import COMBINED, CONTEXTS, EXACT, LONG, WRONG, models
from enumeration import distance, enumerate_distribution
from small_llama import small_llama
from tabular import TabularCausal, causal_target, space_of

import gen
from gen.config.job import make_job
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.jobs.pins import named_models
from gen.samplers.causal.shapes.base import TreeBuilder

speculative = registry.get("sampler", "speculative")
PLAIN, GUIDED = SamplingParams(), SamplingParams(guidance_scale=2.0)
PATHS = {"drafter": "several", "shape": "paths", "paths": 2, "path_length": 2}
TEXTS = ["sort 3 1 2 =", "shuffle 4 0 7 5 =", "3 + 8 + 5 =", "close ( [ ] { ="]


def draft_models(space, count):
    """Draft models that differ much from each other."""
    return [TabularCausal(space.vocab_size, seed, low=0.0, spread=4.0) for seed in (5, 8)[:count]]


def targets(space, sampling, context, count=2):
    model, _ = models(space, sampling)
    drafts = tuple(
        causal_target(draft, space, sampling, context) for draft in draft_models(space, count)
    )
    return causal_target(model, space, sampling, context), drafts


def error(sampler, space, sampling=PLAIN, count=2):
    """The largest error of a probability over three contexts, which are decoded in one batch."""

    def decode(rng, context):
        target, drafts = targets(space, sampling, context, count)
        return sampler(target, rng, draft=drafts).tokens

    found = enumerate_distribution(decode, CONTEXTS)
    model, _ = models(space, sampling)
    expected = [sampling_of(model, space, sampling, c) for c in range(CONTEXTS)]
    return max(distance(a, b) for a, b in zip(found, expected, strict=True))


def recursive(**params):
    return speculative(**{**PATHS, "verifier": "recursive", **params})


@pytest.mark.parametrize("verifier", ["recursive", "traversal"])
@pytest.mark.parametrize(
    ("space", "sampling"),
    [
        pytest.param(space_of((3,), 3), PLAIN, id="plain"),
        pytest.param(space_of((4,), 3), COMBINED, id="guidance and filters"),
        pytest.param(with_end(3, 3), PLAIN, id="texts that end"),
    ],
)
def test_drafts_of_two_models_keep_the_distribution(space, sampling, verifier):
    assert error(recursive(verifier=verifier), space, sampling) < EXACT


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"paths": 3, "path_length": 1}, id="a model with two paths"),
        pytest.param({"paths": 3, "path_length": 2}, id="longer paths", marks=pytest.mark.slow),
        pytest.param({"draft_vocab": 2}, id="some tokens alone"),
    ],
)
def test_paths_of_two_models_keep_the_distribution(params):
    assert error(recursive(**params), space_of((3,), 3)) < EXACT


@pytest.mark.parametrize("verifier", ["recursive", "traversal"])
def test_control_the_distribution_of_the_other_model(monkeypatch, verifier):
    """Judging every sibling against the first model's distribution is wrong, and seen."""

    finish = TreeBuilder.finish

    def of_the_first(self):
        tree = finish(self)
        tree.logq = tree.logq.clone()
        tree.logq[:, 1] = tree.logq[:, 0]  # both are children of the root
        return tree

    short = space_of((2,), 3)
    sampler = recursive(verifier=verifier)
    assert error(sampler, short) < EXACT
    monkeypatch.setattr(TreeBuilder, "finish", of_the_first)
    assert error(sampler, short) > WRONG


def run(sampler, space=LONG, sampling=GUIDED, count=2, rows=20):
    context = [row % CONTEXTS for row in range(rows)]
    target, drafts = targets(space, sampling, context, count)
    draft = drafts if count > 1 else drafts[0]
    rng = CounterRNG([7919 * row + 5 for row in range(rows)])
    return sampler(target, rng, draft=draft)


@pytest.mark.parametrize("space", [LONG, with_end(12, 5)], ids=["length", "end"])
def test_follow_gives_the_tokens_of_autoregression(space):
    plain = run(registry.get("sampler", "autoregressive")(), space)
    out = run(speculative(verifier="follow", **PATHS), space)
    assert torch.equal(out.tokens, plain.tokens)
    cold = SamplingParams(temperature=0.0)
    plain = run(registry.get("sampler", "autoregressive")(), space, cold)
    out = run(speculative(verifier="greedy", **PATHS), space, cold)
    assert torch.equal(out.tokens, plain.tokens)


def test_one_model_drafts_as_the_drafter_model_does():
    alone = run(recursive(), count=1)
    usual = run(recursive(drafter="model"), count=1)
    assert torch.equal(alone.tokens, usual.tokens)
    assert [s.draft_nfe for s in alone.stats] == [s.draft_nfe for s in usual.stats]


def accepted(sampler, first, count):
    """Expected accepted drafts of the first forward pass of every context."""
    space = space_of((3,), 3)

    def decode(rng, context):
        target, drafts = targets(space, PLAIN, context)
        drafts = drafts[first : first + count]
        traces = sampler(target, rng, draft=drafts, trace=True).traces
        return torch.tensor([[len(trace[0].accepted)] for trace in traces])

    found = enumerate_distribution(decode, CONTEXTS)
    return [sum(number[0] * mass for number, mass in f.items()) for f in found]


def test_two_models_accept_more_than_the_better_one():
    together = sum(accepted(recursive(), 0, 2))
    alone = [sum(accepted(recursive(paths=1), first, 1)) for first in (0, 1)]
    assert together > max(alone) + WRONG


def test_passes_of_all_models_are_counted():
    one, two = run(recursive(paths=1), count=1, rows=6), run(recursive(), rows=6)
    for stats in (one.stats, two.stats):
        assert all(s.draft_nfe > 0 for s in stats)
    # both models are asked once per draft of a path
    assert all(s.draft_nfe % 2 == 0 for s in two.stats)
    assert sum(s.draft_nfe for s in two.stats) / sum(s.nfe for s in two.stats) == pytest.approx(
        2 * sum(s.draft_nfe for s in one.stats) / sum(s.nfe for s in one.stats), rel=0.2
    )


def test_rows_do_not_depend_on_the_batch():
    together = run(recursive(), rows=6)
    for row in range(3):
        target, drafts = targets(LONG, GUIDED, [row % CONTEXTS])
        alone = recursive()(target, CounterRNG([7919 * row + 5]), draft=drafts)
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert alone.stats[0].draft_nfe == together.stats[row].draft_nfe


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"verifier": "k_seq"}, "sampler.verifier is 'k_seq'; expected follow or greedy or"),
        ({"shape": "branching"}, "sampler.shape is 'branching'; expected paths"),
        ({"trunk": 1}, "sampler.trunk is 1; expected 0"),
        ({"draft_model": "a,b,c"}, "sampler.paths is 2; expected at least 3"),
        ({"draws": "position_noise"}, "sampler.drafter several takes with_replacement"),
        ({"drafter": "model", "draft_model": ["a", "b"]}, "sampler.drafter several takes several"),
        ({"draft_model": ["a", 3]}, "sampler.draft_model is"),
    ],
)
def test_other_parts_are_refused(params, words):
    with pytest.raises(GenError, match=words):
        recursive(**params)


def test_a_model_without_a_path_is_refused():
    with pytest.raises(GenError, match="sampler.paths is 1; expected at least 2"):
        run(recursive(paths=1))


def test_generate_of_transformers_takes_a_list_of_draft_models():
    model, *drafts = (small_llama(24, seed) for seed in (0, 1, 2))
    ids = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
    found = [
        model.generate(
            ids,
            custom_generate=gen.transformers_generate,
            max_new_tokens=6,
            do_sample=False,
            **more,
        )
        for more in (
            {"sampler": "specinfer", "draft_model": drafts},
            {"sampler": "autoregressive"},
        )
    ]
    assert torch.equal(*found)
    with pytest.raises(GenError, match="draft_model has 2 models; expected one"):
        model.generate(
            ids,
            custom_generate=gen.transformers_generate,
            max_new_tokens=6,
            sampler="speculative",
            draft_model=drafts,
        )


def test_names_come_as_a_list_or_joined_by_commas():
    for names in (["text-draft", "text-causal"], "text-draft,text-causal"):
        sampler = recursive(draft_model=names)
        assert sampler.draft_names == ("text-draft", "text-causal")
        assert hash(sampler) == hash(recursive(draft_model="text-draft,text-causal"))
    assert recursive().draft_names == (None,)


@pytest.mark.parametrize("names", [["text-draft", "text-causal"], "text-draft,text-causal"])
def test_a_job_digests_the_weights_of_every_draft_model(names):
    sampler = {"name": "specinfer", "draft_model": names}
    job = make_job({"modality": "text", "sampler": sampler, "prompts": TEXTS}, where="test")
    assert set(named_models(job).weights) == {"text-draft", "text-causal"}


def test_the_preset_drafts_with_the_models_of_its_list():
    pipe = gen.load("text")
    out = pipe(TEXTS, {"name": "specinfer", "draft_model": ["text-draft", "text-causal"]}, seed=0)
    plain = pipe(TEXTS, {"name": "specinfer"}, seed=0)
    assert out.guarantee == plain.guarantee == "same_distribution"
    # the target is among the drafts: every path of its own is right
    assert sum(s.nfe for s in out.stats) <= sum(s.nfe for s in plain.stats)
