"""Janus from a folder in the published layout: tiny random weights, the class of transformers and
its `generate` beside it."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from calls import only
from tiny_janus import CODES, NAMES, SIDE, TEMPLATE, tokenizer, written

import gen
from gen.core.errors import GenError
from gen.models.published.janus import JanusLM
from gen.tokenizers.image.janus_vq import JanusVQ

PROMPTS = ["a cat", "the red dog runs on the mat", "a blue cat sits", "dog"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written(tmp_path_factory.mktemp("janus"))


@pytest.fixture(scope="module")
def theirs(folder):
    from transformers import JanusForConditionalGeneration

    return JanusForConditionalGeneration.from_pretrained(folder, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def pipe(folder):
    return gen.load("image", model=folder, dtype="float64")


def checkpoint(pipe):
    return pipe.bound(pipe.model)[0]


@torch.no_grad()
def whole(theirs, words, codes):
    """Logits of every code given words long [P] and codes [B, T] before it, by the parts of the
    class in one call: [B, T + 1, n]."""
    prompt = theirs.get_input_embeddings()(words).expand(len(codes), -1, -1)
    inputs = torch.cat([prompt, theirs.prepare_embeddings_for_image_generation(codes)], 1)
    return theirs.model.generation_head(
        theirs.model.language_model(inputs_embeds=inputs, use_cache=False).last_hidden_state[
            :, len(words) - 1 :
        ]
    )


def test_logits_equal_the_class_on_the_whole_sequence(pipe, theirs):
    own = checkpoint(pipe)
    words, codes = (
        torch.tensor(own.words("a red cat")),
        torch.randint(CODES, (2, SIDE**2), generator=torch.Generator().manual_seed(1)),
    )
    wanted = whole(theirs, words, codes)

    def error(adapter, shift=CODES):
        ids = torch.cat([(words + shift).expand(2, -1), codes], 1)
        positions, cache = torch.arange(ids.shape[1]).expand(2, -1), adapter.new_cache(ids.shape[1])
        parts = [
            adapter.forward(i, p, cache)
            for i, p in zip(ids.tensor_split(3, 1), positions.tensor_split(3, 1), strict=True)
        ]
        return float((torch.cat(parts, 1)[:, len(words) - 1 :] - wanted).abs().max())

    class WordsOnly(JanusLM):
        def embed(self, ids):
            return self.model.get_input_embeddings()(
                torch.where(ids < CODES, ids % self.words, ids - CODES)
            )

    assert error(own.adapter("causal")) < 1e-5
    assert error(WordsOnly(own.model)) > 1e-2  # control: codes by the embeddings of words
    assert error(own.adapter("causal"), 0) > 1e-2  # and words taken for codes


def padded(own, prompts):
    rows = [torch.tensor(own.words(p)) for p in prompts]
    width = max(map(len, rows))
    ids = torch.stack([F.pad(r, (width - len(r), 0), value=2) for r in rows])
    return ids, torch.stack([torch.arange(width) >= width - len(r) for r in rows]).long()


@pytest.mark.parametrize("guidance", (2.0, 5.0))
def test_greedy_codes_equal_generate_alone_and_in_a_padded_batch(
    pipe, theirs, guidance, monkeypatch
):
    own, sampling = checkpoint(pipe), {"temperature": 0.0, "guidance_scale": guidance}
    for prompts in (PROMPTS[:1], PROMPTS):
        ids, mask = padded(own, prompts)
        wanted = theirs.generate(
            ids,
            attention_mask=mask,
            generation_mode="image",
            do_sample=False,
            guidance_scale=guidance,
        )
        for sampler in ("autoregressive", "speculative_jacobi"):
            assert torch.equal(
                pipe(prompts, sampler=sampler, **only(**sampling), seed=3).tokens, wanted
            )
    assert len({tuple(row.tolist()) for row in wanted}) == len(
        PROMPTS
    )  # control: another prompt, other codes
    special = {**own._special, "pad_token": own._special["bos_token"]}
    monkeypatch.setattr(
        own, "_special", special
    )  # control: something else than pad in the place of the words
    assert not torch.equal(
        pipe(PROMPTS, sampler="autoregressive", **only(**sampling)).tokens, wanted
    )


def test_greedy_codes_without_guidance_are_the_largest_logits(pipe, theirs):
    """`generate` of the class fails without guidance, so its parts are asked one code at a time."""
    own, sampling = checkpoint(pipe), {"temperature": 0.0, "guidance_scale": 1.0}
    found = {
        s: pipe(PROMPTS, sampler=s, **only(**sampling)).tokens
        for s in ("autoregressive", "speculative_jacobi")
    }
    for n, prompt in enumerate(PROMPTS):
        codes = torch.zeros(1, 0, dtype=torch.long)
        for _ in range(SIDE**2):
            codes = torch.cat(
                [codes, whole(theirs, torch.tensor(own.words(prompt)), codes)[:, -1:].argmax(-1)], 1
            )
        assert all(torch.equal(tokens[n], codes[0]) for tokens in found.values())
    assert not torch.equal(
        found["autoregressive"],
        pipe(PROMPTS, sampler="autoregressive", **only(temperature=0.0, guidance_scale=5.0)).tokens,
    )


@pytest.mark.parametrize("sampler", ("autoregressive", "speculative_jacobi", "scd_mc"))
def test_samplers_make_images_of_the_one_size(pipe, sampler, tmp_path):
    out = pipe(PROMPTS[:2], sampler=sampler, seed=1)
    assert (
        out.sampling.guidance_scale == 5
        and out.sampling.temperature == 1
        and out.grid == (SIDE, SIDE)
    )
    assert [m.size for m in out.media] == [(8, 8)] * 2 and int(out.tokens.max()) < CODES
    assert out.save(tmp_path / "out").is_file()


def test_prompts_are_those_of_the_processor(folder, pipe):
    from transformers import JanusProcessor
    from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil

    processor = JanusProcessor(JanusImageProcessorPil(), tokenizer(), chat_template=TEMPLATE)
    said = [[{"role": "user", "content": [{"type": "text", "text": p}]}] for p in PROMPTS]
    texts = [processor.apply_chat_template(s, add_generation_prompt=True) for s in said]
    wanted = [processor(text=t, generation_mode="image")["input_ids"][0].tolist() for t in texts]
    own = checkpoint(pipe)
    assert [own.words(p) for p in PROMPTS] == wanted
    assert own.prompt(PROMPTS[0]) == [CODES + i for i in wanted[0]]
    assert own.unconditional(PROMPTS[0]) == [CODES + i for i in [0, *[2] * (len(wanted[0]) - 2), 3]]
    bare = checkpoint(gen.load("image", model=folder, chat=False))
    assert (
        bare.words("a cat")
        == processor(text="a cat", generation_mode="image")["input_ids"][0].tolist()
        != own.words("a cat")
    )


def test_a_folder_without_a_template_says_what_the_published_models_say(folder, tmp_path):
    plain = shutil.copytree(folder, tmp_path / "plain")
    for path in plain.glob("chat_template*"):
        path.unlink()
    own, words = checkpoint(gen.load("image", model=plain)), tokenizer()
    assert own.words("a cat") == words(f"<|User|>: a cat\n\n<|Assistant|>:{NAMES[3]}")["input_ids"]


def test_the_published_codes_come_back_from_prompts():
    class Sized:
        vocab_size, words = 16384, 102400

    ids = torch.tensor(JanusLM.prompt(Sized, range(Sized.words)))
    codes = torch.arange(16384)
    assert (
        int(ids.min()) == 16384
        and torch.equal(ids - 16384, torch.arange(102400))
        and not bool(torch.isin(codes, ids).any())
    )


def test_codes_are_the_vectors_that_the_decoder_looks_up(theirs):
    frontend = JanusVQ(theirs.model.vqmodel)
    table = frontend.codebooks[0]
    assert torch.allclose(
        frontend.model.quantize.get_codebook_entry(torch.arange(16)[None]).flatten(2)[0].T,
        table[:16],
        atol=1e-12,
    )
    x = (
        torch.rand(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 2
        - 1
    )
    with torch.no_grad():
        z = (
            F.normalize(frontend.model.quant_conv(frontend.model.encoder(x)), dim=1)
            .permute(0, 2, 3, 1)
            .flatten(0, 2)
        )
        raw = frontend.model.encode(x).image_tokens.view(2, 1, SIDE, SIDE)
    codes = frontend.encode(x)
    assert torch.equal(codes.flatten(), torch.cdist(z, table).argmin(1))
    assert not torch.equal(
        raw, codes
    )  # control: the quantiser of the class compares vectors that its decoder does not have


def test_the_frontend_does_not_depend_on_the_batch_and_comes_back_from_disk(theirs, tmp_path):
    frontend = JanusVQ(theirs.model.vqmodel)
    media = (np.random.default_rng(0).random((3, 8, 8, 3)) * 255).astype(np.uint8)
    x = torch.stack([frontend.preprocess(m) for m in media])
    codes = frontend.encode(x)
    assert (
        codes.shape == (3, 1, SIDE, SIDE) == (3, 1, *frontend.grid_for(tuple(x.shape)))
        and len(codes.unique()) > 1
    )
    assert torch.equal(codes, torch.cat([frontend.encode(one[None]) for one in x]))
    out = frontend.decode(codes)
    with torch.no_grad():
        wanted = theirs.decode_image_tokens(codes.flatten(1)).permute(0, 3, 1, 2)
    assert (
        out.shape == x.shape
        and torch.allclose(out, wanted, atol=1e-12)
        and torch.allclose(out[1:2], frontend.decode(codes[1:2]), atol=1e-10)
    )
    assert frontend.postprocess(out[0]).size == (8, 8)
    frontend.model.save_pretrained(tmp_path)
    again = JanusVQ.from_pretrained(tmp_path, dtype=torch.float64)
    assert again.config == frontend.config and torch.equal(again.fingerprint, frontend.fingerprint)
    assert torch.equal(again.decode(codes), out) and torch.equal(again.encode(x), codes)
    for bad in (codes - 100, codes + 100, codes[:, :, 0], codes[:, :, :2]):
        with pytest.raises(GenError, match="expected"):
            frontend.decode(bad)
    with pytest.raises(GenError, match="expected 8 x 8"):
        frontend.encode(torch.zeros(1, 3, 8, 12, dtype=torch.float64))


def broken(folder, path, name="config.json", **changes):
    shutil.copytree(folder, path)
    (path / name).write_text(json.dumps({**json.loads((path / name).read_text()), **changes}))
    return path


def test_what_cannot_be_used_is_refused_in_one_line(folder, tmp_path):
    def load(path, **options):
        return gen.load("image", model=path, **options)

    with pytest.raises(GenError, match="DeepSeek"):
        load(broken(folder, tmp_path / "own", model_type="multi_modality"))
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    with pytest.raises(GenError, match="makes 9 codes"):
        load(broken(folder, tmp_path / "nine", vision_config={**vision, "num_image_tokens": 9}))
    with pytest.raises(GenError, match="pad_token_id 999"):
        load(broken(folder, tmp_path / "pad", "generation_config.json", pad_token_id=999))
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    with pytest.raises(GenError, match="no weights"):
        load(bare)
    plain = broken(
        folder, tmp_path / "plain", "generation_config.json", generation_kwargs={}
    )  # and a tokenizer without specials
    (plain / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": NAMES[6]})
    )
    with pytest.raises(GenError, match="boi_token_id None"):
        load(plain)
    split = shutil.copytree(folder, tmp_path / "split")
    inner = json.loads((split / "tokenizer.json").read_text())
    inner["added_tokens"] = [t for t in inner["added_tokens"] if t["content"] != NAMES[3]]
    (split / "tokenizer.json").write_text(json.dumps(inner))
    (split / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": NAMES[6]})
    )
    with pytest.raises(GenError, match="that end with 3"):
        load(split)
    with pytest.raises(GenError, match="chat"):
        load(folder, chta=False)
    with pytest.raises(GenError, match="serves image"):
        gen.load("video", model=folder)
    with pytest.raises(GenError, match="empty"):
        load(folder)("  ")
