"""``gen.load("text", model=folder)`` of published architectures writes what ``generate`` does,
beyond the window of their layers."""

from __future__ import annotations

import pytest
import torch
from calls import only
from published import padded_left, save_quietly, tiny_tokenizer
from published_architectures import CONFIGS, POSITIONS, VOCABULARY, WINDOW, published

import gen
from gen.core.errors import GenError

NEW = WINDOW + 8
LENGTHS = (2 * WINDOW + 3, 4, WINDOW, 3 * WINDOW)
FAST = ("mistral", "gemma3")
EACH = [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS]


def texts() -> list[str]:
    """Texts of as many words as ``LENGTHS``."""
    draws = torch.Generator().manual_seed(0)
    drawn = [torch.randint(VOCABULARY - 4, (n,), generator=draws).tolist() for n in LENGTHS]
    return [" ".join(f"w{i}" for i in row) for row in drawn]


def written(name: str, folder, **given):
    save_quietly(published(name, torch.float32, **given), folder)
    tiny_tokenizer(VOCABULARY).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", EACH)
def test_texts_of_a_folder_are_those_of_generate(name, tmp_path):
    # grouped products of experts take no float64
    dtype = "float32" if name == "gpt_oss" else "float64"
    pipe = gen.load("text", written(name, tmp_path), dtype=dtype, max_new_tokens=NEW)
    checkpoint = pipe.modality.checkpoint
    given = padded_left([checkpoint.prompt(text) for text in texts()], 0)
    settings = {"do_sample": False, "max_new_tokens": NEW}
    own = checkpoint.model.generate(**given, **settings)[:, given["input_ids"].shape[1] :]
    space, words = pipe.bound(str(tmp_path))[1].space, 0
    for sampler in ("autoregressive", "speculative_jacobi", "token_recycling"):
        ours = pipe(texts(), sampler=sampler, **only(temperature=0.0)).tokens
        for row, want in zip(ours, own, strict=True):
            until = space.before_end(row)
            assert torch.equal(until, want[: len(until)]), sampler
            assert len(until) == NEW or int(want[len(until)]) == 2
            words += len(until)
    assert words > 3 * NEW


def test_a_draft_model_with_fewer_positions_is_named_before_any_pass(tmp_path):
    """A pipeline asks the same of both models, as for prompts that are too long."""
    model = written("llama3", tmp_path / "model")
    draft = written("gpt2", tmp_path / "draft", max_position_embeddings=24)
    pipe = gen.load("text", model, max_new_tokens=NEW)
    sampler, passes = {"name": "speculative", "draft_model": str(draft)}, []
    with pytest.raises(GenError, match=f"expected at most 24 together, .* model {draft}"):
        pipe("w1 w2", sampler=sampler, callback=passes.append)
    assert not passes and POSITIONS > NEW + 3
    pipe = gen.load("text", model, max_new_tokens=8)
    assert pipe("w1 w2", sampler=sampler).texts  # control
