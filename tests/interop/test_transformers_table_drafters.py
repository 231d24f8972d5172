"""Table drafters behind ``generate`` of transformers: its greedy ids, in fewer forward passes."""

from __future__ import annotations

import pytest
import torch
from small_llama import small_llama

from gen.interop.transformers import transformers_generate

PRESETS = ("prompt_lookup", "suffix", "token_recycling", "aded", "stand", "aggressive")
IDS = torch.tensor([[5, 6, 7, 8, 9, 5, 6], [0, 0, 4, 5, 9, 4, 5]])
CALL = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def llama():
    return small_llama(24).double()


def generated(model, **more):
    return model.generate(IDS, attention_mask=(IDS != 0).long(), **CALL, **more)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.thinned(3)
def test_greedy_ids_are_those_of_generate(llama, name):
    more = {"custom_generate": transformers_generate, "return_dict_in_generate": True}
    out = generated(llama, sampler=name, **more)
    assert torch.equal(out.sequences, generated(llama))
    # a random model repeats itself, which all but a copy of the prompt make use of
    fewer = sum(s.nfe for s in out.stats) < sum(s.tokens for s in out.stats)
    assert fewer or name == "aggressive"


def test_names_of_transformers_are_taken(llama):
    lookup = {"name": "prompt_lookup", "prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2}
    out = generated(llama, sampler=lookup, custom_generate=transformers_generate)
    assert torch.equal(out, generated(llama))
