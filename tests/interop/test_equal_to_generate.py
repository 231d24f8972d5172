"""Greedy ids of ``generate`` with gen's samplers are those of ``generate`` alone, beyond the window
of sliding layers, past the positions of a draft model, and on both sides of the original length of
rotations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from published_architectures import (
    CONFIGS,
    OTHERS,
    SIZES,
    WINDOW,
    changed,
    padded_left,
    prompts,
    published,
)
from same_tokens import SPECS

from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.interop.transformers import transformers_generate
from gen.models.adapters.windows import Window

LONGEST, NEW, PROMPTS = 4 * WINDOW, 24, 200


def own(model: Any, ids: torch.Tensor, new: int = NEW, **more: Any) -> torch.Tensor:
    """Ids of transformers by itself."""
    more = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, **more}
    return model.generate(ids, attention_mask=(ids != 0).long(), **more)


def ours(
    model: Any, ids: torch.Tensor, sampler: Any, draft: Any = None, new: int = NEW
) -> torch.Tensor:
    """Ids of a sampler, with a draft model where it takes one."""
    more = {"draft_model": draft} if resolve_sampler(sampler)[0].drafted else {}
    return own(model, ids, new, custom_generate=transformers_generate, sampler=sampler, **more)


def rows_equal(model: Any, ids: torch.Tensor, sampler: Any, draft: Any = None) -> int:
    """Count the prompts whose ids are those of transformers."""
    return int((own(model, ids) == ours(model, ids, sampler, draft)).all(1).sum())


def test_the_samplers_are_many_and_of_every_kind():
    assert len(SPECS) >= 25
    assert {"autoregressive", "speculative_jacobi", "prompt_lookup", "jacobi-model"} <= {*SPECS}
    assert all(resolve_sampler(s)[0].guarantee == "same_tokens" for s in SPECS.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_every_sampler_of_the_same_tokens_gives_the_ids_of_generate(name):
    model = published(name)
    draft, drawn = changed(model), prompts(PROMPTS, LONGEST)
    wrong, seen = {}, 0
    for n, (label, spec) in enumerate(SPECS.items()):
        rows = drawn[n :: len(SPECS)]
        equal = rows_equal(model, padded_left(rows), spec, draft)
        seen += len(rows)
        if equal < len(rows):
            wrong[label] = f"{equal} of {len(rows)}"
    assert seen == PROMPTS and not wrong, wrong


@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama4"])
def test_layers_with_a_window_decode_beyond_it(name):
    model = published(name)
    ids, draft = padded_left(prompts(3, 2 * WINDOW)), changed(model)
    for spec in ("autoregressive", "speculative_jacobi", "drafter_invariant"):
        assert rows_equal(model, ids, spec, draft) == 3, spec


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_with_windows_give_the_ids_of_generate(name):
    # eager attention of transformers makes NaN of padding in float64
    model = published(name, torch.float32 if name == "gemma2" else torch.float64)
    ids, draft = padded_left(prompts(8, LONGEST)), changed(model)
    for label in ("autoregressive", "speculative_jacobi", "follow-branching", "token_recycling"):
        assert rows_equal(model, ids, SPECS[label], draft) == len(ids), label


@pytest.mark.parametrize("by", [1, -1])
def test_control_a_window_that_is_off_by_one_gives_other_ids(monkeypatch, by):
    model, ids = published("mistral"), padded_left(prompts(4, 2 * WINDOW))
    right = Window.first
    monkeypatch.setattr(Window, "first", lambda self, positions: right(self, positions) + by)
    assert rows_equal(model, ids, "autoregressive") < 4
    assert rows_equal(model, ids, "speculative_jacobi") < 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_beams_beyond_a_window_are_those_of_generate(name):
    model, ids = published(name), padded_left(prompts(2, 2 * WINDOW))
    beams = own(model, ids, num_beams=3)
    got = ours(model, ids, {"name": "beam", "num_beams": 3})
    assert torch.equal(got, beams)


# --- positions of draft models


def few_positions(positions: int) -> Any:
    """A draft model of GPT-2 with fewer positions than texts take."""
    return published("gpt2", max_position_embeddings=positions)


@pytest.mark.parametrize(
    "spec",
    [
        "speculative",
        "drafter_invariant",
        "pearl",
        "rsd_c",
        {"name": "speculative_jacobi", "window": 4, "init": "model"},
    ],
)
def test_a_draft_model_drafts_up_to_its_last_position(spec):
    model, draft = published("llama3"), few_positions(12)
    ids = padded_left(prompts(3, 20))
    sampler = resolve_sampler(spec)[0]
    assert sampler.drafted
    assert torch.equal(ours(model, ids, spec, draft), own(model, ids))


def test_no_pass_of_a_draft_model_is_spent_past_its_positions():
    model, ids = published("llama3"), torch.arange(5, 13)[None]
    settings = {"sampler": "speculative", "return_dict_in_generate": True}

    def drafts(positions: int) -> int:
        out = own(
            model,
            ids,
            custom_generate=transformers_generate,
            draft_model=few_positions(positions),
            **settings,
        )
        return out.stats[0].draft_nfe

    assert drafts(6) == 0  # the prompt alone is longer
    assert 0 < drafts(16) < drafts(len(ids[0]) + NEW)


def test_a_model_with_too_few_positions_is_named_before_any_pass():
    model, ids = few_positions(36), torch.tensor([[5, 6, 7, 8, 9]])
    fits = 36 - 5 + 1
    assert torch.equal(ours(model, ids, "autoregressive", new=fits), own(model, ids, fits))
    with pytest.raises(GenError, match="GPT2LMHeadModel has embeddings of 36 positions"):
        ours(model, ids, "autoregressive", new=fits + 1)


# --- rotations that change with the length of the text

ORIGINAL = 32
LONG = {
    "rope_theta": 10000.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0] * 4,
    "long_factor": [1.5, 2.0, 3.0, 4.0],
}
ROTATIONS = {
    "dynamic": ("LlamaConfig", {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}),
    "longrope": ("LlamaConfig", {"rope_type": "longrope", "factor": 8.0, **LONG}),
    "phi3": ("Phi3Config", {"rope_type": "longrope", **LONG}),
}


def scaled(name: str) -> Any:
    """A model whose rotations change past ``ORIGINAL`` positions. transformers' class keeps the
    angles of its longest text, so that every text gets a new one."""
    config, parameters = ROTATIONS[name]
    sizes = {**SIZES, "rope_parameters": parameters}
    if name == "dynamic":
        sizes["max_position_embeddings"] = ORIGINAL
    if name == "phi3":
        sizes["original_max_position_embeddings"] = ORIGINAL
    torch.manual_seed(0)
    made = getattr(transformers, config)(**sizes)
    return transformers.AutoModelForCausalLM.from_config(made).double().eval()


INSIDE = ((5, 20), (ORIGINAL - 12, 13), (ORIGINAL + 1, 24), (ORIGINAL + 18, 24))
ACROSS = ((ORIGINAL - 12, 14), (ORIGINAL - 12, 32), (ORIGINAL, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ROTATIONS)
def test_rotations_of_a_length_are_those_of_generate(name):
    """On both sides of the original length, and across it where the keys of a text stay."""
    for length, new in INSIDE + (() if name == "phi3" else ACROSS):
        ids = padded_left(prompts(1, length, seed=length))
        want = own(scaled(name), ids, new)
        for spec in ("autoregressive", "speculative_jacobi", "layer_skip"):
            assert torch.equal(ours(scaled(name), ids, spec, new=new), want), (length, new, spec)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_rotations_of_a_row_are_its_own_whatever_the_batch(name):
    rows = prompts(4, 50, seed=3)
    got = ours(scaled(name), padded_left(rows), "speculative_jacobi")[:, 50:]
    for row, ids in zip(rows, got, strict=True):
        assert torch.equal(ids, own(scaled(name), torch.tensor([row]))[0, len(row) :])


def test_control_rotations_of_the_pass_depend_on_drafts(monkeypatch):
    from contextlib import nullcontext

    from gen.models.adapters import language_models

    monkeypatch.setattr(language_models, "angles_of", lambda model, lengths: nullcontext())
    ids = padded_left(prompts(1, 40))
    want = own(scaled("dynamic"), ids)
    assert not torch.equal(ours(scaled("dynamic"), ids, "speculative_jacobi"), want)


@pytest.mark.parametrize(("length", "new"), ACROSS)
def test_a_text_whose_keys_change_in_its_middle_is_refused(length, new):
    ids = padded_left(prompts(1, length, seed=length))
    with pytest.raises(GenError, match=f"changes all keys past {ORIGINAL}; expected at most"):
        ours(scaled("phi3"), ids, "autoregressive", new=new)
