"""Logits that depend on the tokens before, against the processors of transformers."""

from __future__ import annotations

import time

import pytest
import torch
from transformers.generation import logits_process

from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.targets.past import NONE, Past

P = logits_process
V, T = 11, 9
WORDS = [[3, 1], [2, 2, 2], [0, 4]]
CASES = {
    "repetition": (
        SamplingParams(repetition_penalty=1.7),
        lambda: P.RepetitionPenaltyLogitsProcessor(1.7),
    ),
    "unigrams": (SamplingParams(no_repeat_ngram_size=1), lambda: P.NoRepeatNGramLogitsProcessor(1)),
    "bigrams": (SamplingParams(no_repeat_ngram_size=2), lambda: P.NoRepeatNGramLogitsProcessor(2)),
    "trigrams": (SamplingParams(no_repeat_ngram_size=3), lambda: P.NoRepeatNGramLogitsProcessor(3)),
    "words": (SamplingParams(bad_words=WORDS), lambda: P.NoBadWordsLogitsProcessor(WORDS)),
}


def past(sampling: SamplingParams, prompts: torch.Tensor, lengths: torch.Tensor) -> Past:
    return Past(sampling, TokenSpace.codes((T,), V, V), prompts, lengths)


@pytest.mark.parametrize("case", CASES)
def test_ragged_rows_get_the_logits_of_transformers(case):
    g = torch.Generator().manual_seed(0)
    sampling, theirs = CASES[case]
    prompts = torch.randint(5, (6, 5), generator=g)
    lengths = torch.tensor([5, 3, 4, 5, 3, 4])
    history = torch.randint(5, (6, T), generator=g)
    positions = torch.randint(T, (6, 4), generator=g)
    z = torch.randn(6, 4, V, generator=g, dtype=torch.float64)
    found = past(sampling, prompts, lengths)(z, history, positions, torch.arange(6))
    for row in range(6):
        for column in range(4):
            before = history[row, : positions[row, column]]
            ids = torch.cat([prompts[row, : lengths[row]], before])[None]
            assert torch.equal(found[row, column], theirs()(ids, z[row, column, None].clone())[0])


def test_rows_know_their_items_and_what_a_prompt_says():
    space = TokenSpace.codes((2,), 3, 3)
    table = torch.tensor([-1, 2, 0])
    space = TokenSpace(space.grid, 3, space.legal, prompt_tokens=table, prefix=torch.tensor([1]))
    # id 1 stands for token 2, id 2 for token 0, and the last id of each prompt is the prefix
    prompts = torch.tensor([[0, 1, 9], [2, 9, 0]])
    sampling = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)
    one = Past(sampling, space, prompts, torch.tensor([3, 2]))
    assert one.prompts.tolist() == [[2], [0]]
    at, z = torch.zeros(3, 1, dtype=torch.long), torch.full((3, 1, 3), 4.0)
    found = one(z, torch.zeros(3, 2, dtype=torch.long), at, torch.tensor([1, 0, 1]))
    # the prefix, token 1, is said and counts as output
    assert found[:, 0].tolist() == [[2.0, 1.0, 4.0], [4.0, 1.0, 2.0], [2.0, 1.0, 4.0]]
    assert Past(sampling, space, prompts[:, :1], torch.tensor([1, 1])).prompts.shape == (2, 0)


def test_tokens_outside_of_the_logits_are_no_matter():
    prompts = torch.tensor([[V + 3, 2, 2]])
    sampling = SamplingParams(
        repetition_penalty=2.0, frequency_penalty=1.0, no_repeat_ngram_size=2, bad_words=[[2, V]]
    )
    one = past(sampling, prompts, torch.tensor([3]))
    history, z = torch.full((1, T), V + 1), torch.ones(1, 2, V)
    found = one(z, history, torch.tensor([[0, 3]]), torch.tensor([0]))
    assert found[0, 0, 2] == -torch.inf and found[0, 1, 2] == 0.5
    others = torch.arange(V) != 2
    assert bool((found[..., others] == 1).all())


def test_processors_get_rows_of_one_length_without_padding():
    seen = []

    def watch(input_ids, scores):
        seen.append(input_ids.tolist())
        return scores + len(seen)

    prompts = torch.tensor([[1, 2], [3, 0]])
    one = past(SamplingParams(logits_processor=watch), prompts, torch.tensor([2, 1]))
    history, z = torch.tensor([[4, 5, 0], [6, 7, 8]]), torch.zeros(2, 2, V)
    found = one(z, history, torch.tensor([[0, 1], [1, 2]]), torch.arange(2))
    assert seen == [[[1, 2], [3, 6]], [[1, 2, 4], [3, 6, 7]]]
    assert found[:, :, 0].tolist() == [[1, 2], [1, 2]]
    assert one.prompts[1].tolist() == [NONE, 3]


@pytest.mark.slow
def test_the_cost_of_a_position_is_below_a_millisecond():
    size = 32768
    sampling = SamplingParams(
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        no_repeat_ngram_size=3,
        bad_words=[[1, 2, 3]],
    )
    prompts = torch.randint(size, (8, 256))
    space = TokenSpace((256,), size, torch.ones(1, size, dtype=torch.bool).expand(256, -1))
    one = Past(sampling, space, prompts, torch.full((8,), 256))
    args = torch.randint(size, (8, 256)), torch.full((8, 4), 200), torch.arange(8)
    z, times = torch.randn(8, 4, size), []
    for _ in range(7):
        began = time.perf_counter()
        one(z, *args)
        times.append(time.perf_counter() - began)
    assert min(times) / 32 < 1e-3
