"""``log_likelihood``: the mean log-probability per token, from one forward pass."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gen
from gen.contracts.scorer import Sample, read_scorer
from gen.core.errors import GenError
from gen.samplers.search.scorers.log_likelihood import IMPOSSIBLE

PROMPTS = ["sort 3 1 2 =", "3 + 8 + 5 =", "shuffle 4 2 9 ="]


@pytest.fixture(scope="module")
def text():
    return gen.load("text")


def likelihoods(pipe, items, tokens, known=None, spec="log_likelihood", sampler="autoregressive"):
    """Score rows of tokens, row k those of item k."""
    request = SimpleNamespace(items=items, spec={"name": sampler})
    scorer = read_scorer(spec).attach(pipe, request)
    samples = [
        Sample(None, row, "", None, pipe.modality, k, None if known is None else known[k])
        for k, row in enumerate(tokens)
    ]
    return scorer.score(samples)


@pytest.mark.parametrize("modality", ["text", "action", "motion"])
def test_it_is_the_mean_of_the_log_probabilities_that_the_call_itself_returns(modality):
    pipe = gen.load(modality)
    prompts = pipe.modality.example_prompts(3, 0)
    options = {"temperature": 1.0, "guidance_scale": 1.0, "top_k": 0, "logprobs": 0}
    out = pipe(prompts, "autoregressive", seed=1, progress=False, **options)
    expected = [np.mean([t.logprob for t in row if t is not None]) for row in out.logprobs]
    assert likelihoods(pipe, out.items, out.tokens) == pytest.approx(expected, abs=1e-4)


def test_control_the_likelihood_of_other_prompts_is_another_number(text):
    out = text(PROMPTS, "autoregressive", seed=1, progress=False)
    own = likelihoods(text, out.items, out.tokens)
    others = likelihoods(text, [*out.items[1:], out.items[0]], out.tokens)
    assert all(a > b + 0.1 for a, b in zip(own, others, strict=True))


def test_of_an_unfinished_output_only_decided_tokens_count(text):
    out = text(PROMPTS, "autoregressive", seed=1, progress=False)
    known = torch.zeros_like(out.tokens, dtype=torch.bool)
    known[:, :2] = True
    spoilt = out.tokens.clone()
    spoilt[:, 2:] = 5
    partial = likelihoods(text, out.items, spoilt, known)
    assert partial == likelihoods(text, out.items, out.tokens, known)
    assert partial != likelihoods(text, out.items, out.tokens)


def test_the_likelihood_of_an_item_is_the_same_alone_and_beside_others(text):
    out = text(PROMPTS * 14, "autoregressive", seed=1, progress=False)  # more than one pass
    together = likelihoods(text, out.items, out.tokens)
    alone = [
        likelihoods(text, [item], [row])[0]
        for item, row in zip(out.items[30:34], out.tokens[30:34], strict=True)
    ]
    assert alone == pytest.approx(together[30:34], abs=1e-5)


def test_a_token_that_the_model_cannot_make_counts_as_a_number(text):
    out = text(PROMPTS[:1], "autoregressive", seed=1, progress=False)
    eos = text.bound("text-causal")[1].space.eos_token_id
    impossible = torch.full_like(out.tokens, eos)  # an answer has at least one word
    assert likelihoods(text, out.items, impossible) == [IMPOSSIBLE]


def test_a_search_takes_the_most_probable_of_its_samples(text):
    sampler = {"name": "best_of", "n": 4, "scorer": "log_likelihood"}
    out = text(["shuffle 4 2 9 5 =", "insert 7 in 3 1 2 ="], sampler, seed=1, progress=False)
    expected = likelihoods(text, out.items, out.tokens)
    for candidates, score in zip(out.candidates, expected, strict=True):
        assert max(c.score for c in candidates) == pytest.approx(score, abs=1e-5)
        assert len({round(c.score, 4) for c in candidates}) > 1


def test_a_masked_call_names_a_causal_model_of_the_same_tokens(text):
    sampler = {"name": "best_of", "n": 2, "base": "maskgit"}
    with pytest.raises(GenError, match=r"'text-masked', a .*masked.*such as 'text-causal'"):
        text(PROMPTS, {**sampler, "scorer": "log_likelihood"}, seed=1, progress=False)
    scorer = {"name": "log_likelihood", "model": "text-causal"}
    out = text(PROMPTS, {**sampler, "scorer": scorer}, seed=1, progress=False)
    assert all(c.score <= 0 for row in out.candidates for c in row)


def test_a_model_of_other_tokens_or_none_at_all_is_refused():
    action = gen.load("action")
    items = action.plan(action.modality.example_prompts(1, 0))
    tokens = torch.zeros(1, 32, dtype=torch.long)
    scorer = {"name": "log_likelihood", "model": "action-fast"}
    with pytest.raises(GenError, match=r"'action-fast' was trained on the tokens of another"):
        likelihoods(action, items, tokens, spec=scorer)
    with pytest.raises(GenError, match="text_words"):
        likelihoods(action, items, tokens, spec={**scorer, "model": "text-causal"})
    with pytest.raises(GenError, match=r"log_likelihood\.model is 7"):
        read_scorer({**scorer, "model": 7})
    with pytest.raises(GenError, match="call of a pipeline"):
        read_scorer("log_likelihood").score([])


def test_a_model_of_latents_is_refused():
    image = gen.load("image", "image-causal-latents")
    items = image.plan(["a red circle"])
    with pytest.raises(GenError, match=r"model of latents; expected a causal model of codes"):
        likelihoods(image, items, torch.zeros(1, 64, 16))
