"""Log-probabilities reach the user: outputs, prefixes, slices, plain data and job folders."""

from __future__ import annotations

import json

import pytest

import gen
from gen.config.job import make_job
from gen.core.errors import GenError
from gen.jobs.run import run_job

PROMPT = "sort 3 1 2 ="


@pytest.fixture(scope="module")
def text():
    return gen.load("text")


def test_every_token_has_its_text_and_the_most_probable_ones(text):
    out = text(PROMPT, "speculative_jacobi", num_samples=2, seed=0, logprobs=2)
    for row, tokens, stats in zip(out.logprobs, out.tokens.tolist(), out.stats, strict=True):
        assert [token.token_id for token in row] == tokens[: stats.tokens]
        *words, end = [token.text for token in row]
        assert "".join(words) == out.texts[0] and len(words) == 3 and end == "<end>"
        assert b"".join(t.text_bytes for t in row[:-1]).decode() == out.texts[0]
        assert row[-1].text_bytes is None
        for token in row:
            assert len(token.top) == len(token.top_texts) == 2
            assert dict(token.top)[token.token_id] == token.logprob  # greedy: among the first
    assert out[1:].logprobs == out.logprobs[1:]
    stored = out.to_dict()["items"][0]["logprobs"]
    assert stored[0]["text"] == out.logprobs[0][0].text and json.loads(json.dumps(stored))


def test_batches_are_joined_and_given_tokens_have_none(text):
    out = text([PROMPT, "sort 2 1 ="], "autoregressive", seed=0, batch_size=1, logprobs=0)
    assert [len(row) for row in out.logprobs] == [stats.tokens for stats in out.stats]
    begun = text(PROMPT, "speculative_jacobi", prefix="1 ", seed=0, logprobs=0)
    assert begun.logprobs[0][0] is None and begun.logprobs[0][1].text == " 2"
    assert text(PROMPT, "autoregressive", seed=0).logprobs is None


def test_a_job_stores_them_beside_each_item(tmp_path):
    tree = {"modality": "text", "sampler": "autoregressive", "prompts": [PROMPT]}
    for name, sampling in (("with", {"logprobs": 1}), ("without", {})):
        told = {**tree, "sampling": sampling, "out": str(tmp_path / name)}
        run_job(make_job(told, where="a test"))
    (path,) = tmp_path.glob("with/0*.json")
    logprobs = json.loads(path.read_text())["logprobs"]
    assert [token["text"] for token in logprobs] == ["1", " 2", " 3", "<end>"]
    assert all(token["logprob"] <= 0 and len(token["top"]) == 1 for token in logprobs)
    (path,) = tmp_path.glob("without/0*.json")
    assert "logprobs" not in json.loads(path.read_text())


def test_streams_and_masked_samplers_refuse(text):
    with pytest.raises(GenError, match="stream"):
        text.stream(PROMPT, "autoregressive", logprobs=1)
    with pytest.raises(GenError, match="sampling.logprobs"):
        text(PROMPT, "maskgit", logprobs=1)
