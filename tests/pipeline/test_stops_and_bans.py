"""Stops and structured output end a row although a ban forbids the eos token there."""

from __future__ import annotations

import pytest

import gen

PROMPT, TWO, END = "sort 3 1 2 =", 2, 57


@pytest.mark.parametrize("sampler", ["autoregressive", "speculative_jacobi"])
def test_a_row_ends_at_a_stop_after_which_the_eos_token_is_banned(sampler):
    pipe = gen.load("text")
    for stop in ({"stop_token_ids": [TWO]}, {"stop": "2"}, {"structured": {"choice": ["1 2"]}}):
        want = pipe(PROMPT, sampler, seed=0, **stop)
        out = pipe(PROMPT, sampler, seed=0, bad_words=[[TWO, END]], **stop)
        assert out.texts == want.texts and out.tokens.tolist() == want.tokens.tolist()
    # control: without the stop the ban holds
    banned = pipe(PROMPT, sampler, seed=0, bad_words=[[TWO, END]]).tokens[0].tolist()
    assert [TWO, END] not in [banned[n : n + 2] for n in range(len(banned) - 1)]


@pytest.mark.parametrize("sampler", ["autoregressive", "speculative_jacobi"])
def test_a_stop_with_one_token_to_make_cuts_the_text_and_fills_nothing(sampler):
    pipe = gen.load("text")
    for stop, text in (({"stop": "3"}, "1"), ({"stop": "1"}, ""), ({"stop_token_ids": [1]}, "")):
        out = pipe(PROMPT, sampler, seed=0, max_new_tokens=1, **stop)
        assert out.texts == [text] and out.tokens.tolist() == [[1]]
    # control: a second position is filled behind the stop
    assert pipe(PROMPT, sampler, seed=0, max_new_tokens=2, stop="1").tokens.tolist() == [[1, END]]
