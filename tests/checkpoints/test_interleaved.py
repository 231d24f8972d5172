"""Texts with images in them (Chameleon): the law is that of the model under the rule of documents,
and each segment is decoded by its own frontend."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chameleon_files import diffusers_vq, vqgan_keys, write_vqgan
from image_text_folders import CODES, chameleon

import gen
from gen.core.errors import GenError
from gen.tokenizers.text.segments import segments

LENGTH, COUNT = 48, 16  # tokens of an answer, codes of an image


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = chameleon(tmp_path_factory.mktemp("chameleon"))
    vq = diffusers_vq(False, seed=3, channels=(32, 32, 32), codes=CODES).float()
    decoder = {k: v for k, v in vqgan_keys(vq).items() if k.startswith(("decoder", "post_quant"))}
    write_vqgan(path / "vqgan.ckpt", decoder)  # the encoder is the model's own
    return path


@pytest.fixture(scope="module")
def pipe(folder):
    options = {"max_new_tokens": LENGTH, "interleaved": True}
    return gen.load("text", model=folder, dtype="float64", **options)


@pytest.fixture(scope="module")
def begins(pipe):
    """Logit bias that makes images frequent."""
    return {pipe.bound(pipe.model)[2].kinds[0].begin: 12.0}


def split(pipe, row):
    """(text tokens, images of codes) of token ids, by the rule itself; None where it is broken."""
    frontend = pipe.bound(pipe.model)[2]
    kind, at, images = frontend.kinds[0], 0, []
    while at < len(row) and row[at] not in frontend.ends:
        if row[at] == kind.begin:
            codes = row[at + 1 : at + 1 + COUNT]
            if not set(codes) <= set(kind.codes) or row[at + 1 + COUNT] != kind.end:
                return None
            images.append(codes)
            at += COUNT + 2
        elif row[at] in kind.codes or row[at] == kind.end:
            return None
        else:
            at += 1
    return images


@pytest.mark.parametrize("sampler", ["autoregressive", "speculative_jacobi"])
def test_documents_are_well_formed_and_hold_their_images(pipe, begins, sampler):
    out = pipe("a cat", sampler, num_samples=4, seed=0, logit_bias=begins)
    found = [split(pipe, row.tolist()) for row in out.tokens]
    assert all(images is not None for images in found) and sum(map(len, found)) >= 2
    kind = pipe.bound(pipe.model)[2].kinds[0]
    number = {token: code for code, token in enumerate(kind.codes)}
    for text, images in zip(out.media, found, strict=True):
        shown = [s for s in segments(text) if s.kind == "image"]
        assert len(shown) == len(images)
        for segment, codes in zip(shown, images, strict=True):
            grid = torch.tensor([number[c] for c in codes]).view(1, 1, *kind.grid)
            pixels = kind.frontend.postprocess(kind.frontend.decode(grid)[0])
            assert np.array_equal(np.asarray(segment.image()), np.asarray(pixels))


def test_speculation_keeps_the_documents_of_the_autoregressive_sampler(pipe, begins):
    options = {"num_samples": 2, "seed": 5, "logit_bias": begins}
    reference = pipe("a dog", "autoregressive", **options)
    coupled = {"name": "speculative_jacobi", "coupling": "gumbel"}
    assert (pipe("a dog", coupled, **options).tokens == reference.tokens).all()
    alone = pipe("a dog", "autoregressive", seed=6, logit_bias=begins)
    assert (alone.tokens[0] == reference.tokens[1]).all()


def test_greedy_documents_are_those_of_a_plain_loop(pipe):
    """The model's own forward pass, its head, and the rule applied by hand."""
    checkpoint = pipe.modality.checkpoint
    kind = pipe.bound(pipe.model)[2].kinds[0]
    prompt, row = checkpoint.prompt("a cat"), []
    out = pipe("a cat", "autoregressive", temperature=0.0, logit_bias={kind.begin: 40.0})
    size = checkpoint.binding.space.vocab_size
    inside = 0  # tokens of an image that are still to come, its end included
    for position in range(LENGTH):
        states = checkpoint.model.model(input_ids=torch.tensor([[*prompt, *row]]))
        logits = checkpoint.model.lm_head(states.last_hidden_state[0, -1])
        logits[kind.begin] += 40
        allowed = torch.ones(size, dtype=torch.bool)
        allowed[[*kind.codes, kind.end]] = False
        allowed[kind.begin] = LENGTH - position >= COUNT + 2
        if inside:
            allowed[:] = False
            allowed[list(kind.codes) if inside > 1 else kind.end] = True
        row.append(int(logits.masked_fill(~allowed, -torch.inf).argmax()))
        inside = COUNT + 1 if row[-1] == kind.begin else max(0, inside - 1)
        if row[-1] in checkpoint.frontend.ends:
            break
    assert out.tokens[0, : len(row)].tolist() == row and row.count(kind.begin) == 2


def test_without_the_option_answers_hold_no_images(folder, begins):
    plain = gen.load("text", model=folder, dtype="float64", max_new_tokens=LENGTH)
    out = plain("a cat", "autoregressive", num_samples=2, seed=0, logit_bias=begins)
    assert not any(s.kind == "image" for text in out.media for s in segments(text))


def test_an_answer_without_room_for_an_image_is_refused(folder):
    with pytest.raises(GenError, match="an image takes 18 tokens"):
        gen.load("text", model=folder, max_new_tokens=COUNT + 1, interleaved=True)
