"""Generation beyond the positions of a model is refused before anything is computed."""

from __future__ import annotations

import pytest
from families import WRITERS

import gen
from gen.core.errors import GenError


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return WRITERS["causal_lm"](tmp_path_factory.mktemp("llama"))


def test_an_answer_longer_than_the_model_is_refused_at_load(llama):
    config = (
        gen.load("text", str(llama.path), device="cpu", max_new_tokens=4)
        .bound(str(llama.path))[0]
        .model.config
    )
    limit = config.max_position_embeddings
    with pytest.raises(GenError, match=f"max_new_tokens is 1000000000; expected at most {limit}"):
        gen.load("text", str(llama.path), device="cpu", max_new_tokens=10**9)


def test_prompt_and_answer_together_fit_the_model(llama):
    pipe = gen.load("text", str(llama.path), device="cpu", max_new_tokens=4)
    limit = pipe.bound(str(llama.path))[0].model.config.max_position_embeddings
    passes = []
    with pytest.raises(GenError, match=f"expected at most {limit} together"):
        pipe(" ".join(llama.prompts[:1] * limit), callback=passes.append)
    assert not passes
    assert pipe(llama.prompts[0], callback=passes.append).texts and passes  # control
