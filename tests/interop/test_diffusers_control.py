"""Sampling parameters that look back reach pipelines that are called as in diffusers."""

from __future__ import annotations

import pytest
import torch

import gen
from gen.core.errors import GenError

PROMPT = "sort 3 1 2 ="


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_texts_take_the_keywords_of_a_call():
    pipe = gen.load("text")
    pipeline = pipe.as_diffusers()
    common = {"sampler": "speculative_jacobi", "logprobs": 1}
    out = pipeline(PROMPT, generator=seeded(), stop="2", **common)
    want = pipe(PROMPT, seed=pipeline.output.seeds[0], stop="2", **common)
    assert out.texts == want.texts and out.texts[0].strip() == "1"
    assert pipeline.output.logprobs == want.logprobs
    plain = pipeline(PROMPT, generator=seeded(), **common)
    assert plain.texts == ["1 2 3"]  # control
    biased = pipeline(PROMPT, generator=seeded(), bad_words=[[2]], **common)
    assert "2" not in biased.texts[0].split()


def test_what_does_not_fit_is_named():
    pipeline = gen.load("image").as_diffusers()
    for settings, message in (
        ({"stop": "red", "sampler": "autoregressive"}, "sampling.stop.*no text"),
        ({"logprobs": 2, "sampler": "maskgit"}, "sampling.logprobs is 2"),
        ({"repetition_penalti": 1.2}, "Did you mean 'repetition_penalty'"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ):
        with pytest.raises(GenError, match=message):
            pipeline("a red circle", **settings)
