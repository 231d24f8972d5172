"""Emu3 from a folder in the published layout: tiny random weights, the class of transformers and
its `generate` beside it."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from calls import only
from safetensors.torch import load_file, save_file
from tiny_emu3 import CODES, NAMES, tokenizer, written

import gen
from gen.core.errors import GenError
from gen.modalities.checkpoints import emu3
from gen.models.adapters.conditioning import MappedLM, Vocabulary
from gen.tokenizers.image.emu3_vq import Emu3VQ
from gen.tokenizers.video.video_vq import VideoVQ

PROMPTS = ["a cat", "the red dog runs on the mat", "a blue cat sits", "dog"]
SIZE = {"image": dict(height=6, width=8), "video": dict(height=4, width=6, frames=12)}
GREEDY = {"temperature": 0.0, "guidance_scale": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written(tmp_path_factory.mktemp("emu3"))


@pytest.fixture(scope="module")
def theirs(folder):
    from transformers import Emu3ForConditionalGeneration

    return Emu3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def pipes(folder):
    return {m: gen.load(m, model=folder, dtype="float64", **SIZE[m]) for m in ("image", "video")}


def checkpoint(pipe):
    return pipe.bound(pipe.model)[0]


def random_tokens(space, rows, seed=0):
    scores = torch.rand(rows, *space.legal.shape, generator=torch.Generator().manual_seed(seed))
    return scores.masked_fill(~space.legal, -1).argmax(-1)


@pytest.mark.parametrize("modality", ("image", "video"))
def test_logits_equal_the_class_on_the_whole_sequence(pipes, theirs, modality):
    own, space = checkpoint(pipes[modality]), pipes[modality].bound(pipes[modality].model)[1].space
    ids = torch.cat(
        [torch.tensor([own.prompt("a red cat")]).expand(2, -1), random_tokens(space, 2)], 1
    )
    positions = torch.arange(ids.shape[1]).expand(2, -1)
    with torch.no_grad():
        whole = theirs(input_ids=own.vocabulary.to_model(ids)).logits

    def error(vocabulary):
        adapter = MappedLM(own.model, vocabulary)
        cache, parts = adapter.new_cache(ids.shape[1]), ids.tensor_split(3, 1)
        at = positions.tensor_split(3, 1)
        out = torch.cat([adapter.forward(p, n, cache) for p, n in zip(parts, at, strict=True)], 1)
        return float((out - whole[..., own.vocabulary.ids]).abs().max())

    assert error(own.vocabulary) < 1e-5
    assert (
        error(Vocabulary(own.vocabulary.ids.flip(0), theirs.config.text_config.vocab_size)) > 1e-2
    )  # control: codes in reverse order


def generated(theirs, own, space, prompts, guidance):
    """Greedy tokens by `generate`, prompts padded on the left, each place restricted to its legal
    ids."""
    size, ids = own.vocabulary.size, lambda p: torch.tensor(p) - own.vocabulary.size
    rows = [ids(own.prompt(p)) for p in prompts]
    width = max(map(len, rows))
    padded = torch.stack([torch.nn.functional.pad(r, (width - len(r), 0)) for r in rows])
    mask = torch.stack([torch.arange(width) >= width - len(r) for r in rows]).long()
    allowed = [own.vocabulary.ids[row[:size]].tolist() for row in space.legal]
    negative = ids(own.binding.unconditional).expand(len(prompts), -1)
    guided = dict(
        guidance_scale=guidance,
        negative_prompt_ids=negative,
        negative_prompt_attention_mask=torch.ones_like(negative),
    )
    out = theirs.generate(
        input_ids=padded,
        attention_mask=mask,
        max_new_tokens=space.length,
        do_sample=False,
        prefix_allowed_tokens_fn=lambda batch, seen: allowed[len(seen) - width],
        **(guided if guidance != 1 else {}),
    )
    return own.vocabulary.of_model(out[:, width:])


@pytest.mark.parametrize("modality, guidance", (("image", 1.0), ("image", 3.0), ("video", 3.0)))
def test_greedy_tokens_equal_generate_alone_and_in_a_padded_batch(
    pipes, theirs, modality, guidance
):
    pipe = pipes[modality]
    own, space, sampling = (
        checkpoint(pipe),
        pipe.bound(pipe.model)[1].space,
        {**GREEDY, "guidance_scale": guidance},
    )
    for prompts in (PROMPTS[:1], PROMPTS):
        wanted = generated(theirs, own, space, prompts, guidance)
        for sampler in ("autoregressive", "speculative_jacobi"):
            assert torch.equal(
                pipe(prompts, sampler=sampler, **only(**sampling), seed=3).tokens, wanted
            )
    assert len({tuple(row.tolist()) for row in wanted}) == len(
        PROMPTS
    )  # control: another prompt, other tokens
    other = {**sampling, "guidance_scale": 4 - guidance}
    assert not torch.equal(
        pipe(PROMPTS, sampler="autoregressive", **only(**other)).tokens, wanted
    )  # and another scale


@pytest.mark.parametrize("modality", ("image", "video"))
@pytest.mark.parametrize("sampler", ("autoregressive", "speculative_jacobi", "scd_mc"))
@pytest.mark.thinned(3)
def test_samplers_make_media_of_the_asked_size(pipes, modality, sampler, tmp_path):
    out = pipes[modality](PROMPTS[:2], sampler=sampler, seed=1)
    size, space = SIZE[modality], pipes[modality].bound(pipes[modality].model)[1].space
    assert bool(space.legal.expand(2, -1, -1).gather(2, out.tokens[..., None]).all())
    assert out.sampling.guidance_scale == 3 and out.sampling.top_k == 2048
    for medium in out.media:
        assert np.asarray(medium).shape == (
            *((size["frames"],) if modality == "video" else ()),
            size["height"],
            size["width"],
            3,
        )
    assert out.save(tmp_path / "out").is_file()


def test_images_and_their_ids_are_those_of_the_class(pipes, theirs):
    own, binding, frontend = pipes["image"].bound(pipes["image"].model)
    space = binding.space
    tokens = random_tokens(space, 2)
    closed = torch.cat(
        [own.vocabulary.to_model(tokens), torch.full((2, 3), 1)], 1
    )  # the class drops three closing ids
    with torch.no_grad():
        wanted = theirs.decode_image_tokens(image_tokens=closed, height=3, width=4)
    assert torch.allclose(frontend.decode(own.to_codes(tokens, space)), wanted, atol=1e-12)
    assert not torch.allclose(
        frontend.decode(own.to_codes(tokens, space).flip(-1)), wanted, atol=1e-3
    )  # control: rows from right to left
    with torch.no_grad():
        ids = theirs.model.get_image_tokens(wanted, torch.tensor([[6, 8]] * 2)).view(2, -1)
    again = emu3.layout_of(CODES, (3, 4)).to_sequence(frontend.encode(wanted))
    assert torch.equal(own.vocabulary.to_model(again), ids)


def test_prompts_are_those_of_the_processor(folder):
    from transformers import Emu3ImageProcessor, Emu3Processor

    pipe = gen.load("image", model=folder, height=8, width=8, suffix=" on the mat")
    processor = Emu3Processor(Emu3ImageProcessor(), tokenizer())
    wanted = processor(
        text=[p + " on the mat" for p in PROMPTS],
        return_for_image_generation=True,
        ratio="1:1",
        image_area=32 * 32,
    )["input_ids"]
    own = checkpoint(pipe)
    assert [[i - own.vocabulary.size for i in own.prompt(p)] for p in PROMPTS] == wanted
    wide = checkpoint(gen.load("image", model=folder, height=8, width=10, suffix=" on the mat"))
    assert [wide.prompt(p) for p in PROMPTS] != [
        own.prompt(p) for p in PROMPTS
    ]  # control: the size is said


def test_rows_and_frames_end_where_the_layout_says(pipes):
    space = pipes["video"].bound(pipes["video"].model)[1].space
    assert space.grid == (3, 2 * 4 + 1)
    frame = ([False] * 3 + [True]) * 2 + [True]
    assert (space.legal.sum(1) == 1).tolist() == frame * 3
    assert space.legal[3].nonzero().tolist() == [[CODES]] and space.legal[8].nonzero().tolist() == [
        [CODES + 1]
    ]
    for grid in ((2, 3), (3, 2, 3)):
        codes = torch.randint(CODES, (2, 1, *grid))
        assert torch.equal(
            emu3.layout_of(CODES, grid).from_sequence(
                emu3.layout_of(CODES, grid).to_sequence(codes)
            ),
            codes,
        )


def test_streamed_clips_are_whole_clips_and_clips_go_on(pipes):
    pipe = pipes["video"]
    whole = pipe(PROMPTS[:2], seed=2)
    parts = [
        [c.media for c in pipe.stream(PROMPTS[:2], seed=2) if c.item.index == n] for n in range(2)
    ]
    assert all(
        len(p) > 1 and np.array_equal(np.concatenate(p), m)
        for p, m in zip(parts, whole.media, strict=True)
    )
    begun = whole.media[0][:8]
    frontend, own = pipe.bound(pipe.model)[2], checkpoint(pipe)
    on = pipe(PROMPTS[0], seed=9, prefix=begun)
    codes = own.to_codes(on.tokens, pipe.bound(pipe.model)[1].space)
    assert (
        torch.equal(codes[:, :, :2], frontend.encode(frontend.preprocess(begun)[None]))
        and len(on.media[0]) == 12
    )
    with pytest.raises(GenError, match="expected at least one of"):
        pipe(PROMPTS[0], prefix=np.zeros((8, 8, 8, 3), np.uint8))


def test_the_published_ids_come_back_from_codes():
    names = {f"<|visual token {k:06d}|>": 151854 + k for k in range(32768)} | {
        "<|extra_200|>": 151846
    }
    vocabulary = Vocabulary([*emu3.codes_of(names, 32768, "it"), 151846], 184622)
    codes = torch.arange(32769)
    assert torch.equal(vocabulary.of_model(vocabulary.to_model(codes)), codes)
    assert (
        vocabulary.to_model(codes[:32768]).tolist() == list(range(151854, 184622))
        and vocabulary.to_model(codes[-1:]).item() == 151846
    )
    assert vocabulary.of_model(torch.tensor([151853, 0])).tolist() == [
        -1,
        -1,
    ]  # control: a neighbour is no code


@pytest.mark.parametrize("cls", (Emu3VQ, VideoVQ))
def test_frontends_do_not_depend_on_the_batch_and_come_back_from_disk(cls, theirs, tmp_path):
    frontend = cls(theirs.model.vqmodel)
    media = (
        np.random.default_rng(0).random((3, *((8,) if cls is VideoVQ else ()), 8, 12, 3)) * 255
    ).astype(np.uint8)
    x = torch.stack([frontend.preprocess(m) for m in media])
    codes = frontend.encode(x)
    assert (
        codes.shape
        == (3, 1, *((2,) if cls is VideoVQ else ()), 4, 6)
        == (3, 1, *frontend.grid_for(tuple(x.shape)))
    )
    assert (
        torch.equal(codes, torch.cat([frontend.encode(one[None]) for one in x]))
        and len(codes.unique()) > 1
    )
    out = frontend.decode(codes)
    assert out.shape == x.shape and np.asarray(frontend.postprocess(out[0])).shape == media[0].shape
    assert torch.allclose(out[1:2], frontend.decode(codes[1:2]), atol=1e-10)
    frontend.model.save_pretrained(tmp_path)
    again = cls.from_pretrained(tmp_path, dtype=torch.float64)
    assert again.config == frontend.config and torch.equal(again.fingerprint, frontend.fingerprint)
    assert torch.equal(again.decode(codes), out) and torch.equal(again.encode(x), codes)
    for bad in (codes - 100, codes + 100, codes[:, :, 0]):
        with pytest.raises(GenError, match="expected"):
            frontend.decode(bad)


def test_both_spellings_of_the_keys_load(folder, theirs, tmp_path):
    weights = load_file(folder / "model.safetensors")
    assert "text_model.lm_head.weight" in weights and any(
        k.startswith("vqmodel.") for k in weights
    )  # as published
    shutil.copytree(folder, tmp_path / "other")
    ours = {k: v.float().contiguous() for k, v in theirs.state_dict().items()}
    save_file(ours, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    other = checkpoint(gen.load("image", model=tmp_path / "other", **SIZE["image"])).model
    assert all(torch.equal(v, ours[k]) for k, v in other.state_dict().items())


def broken(folder, path, name="config.json", **changes):
    shutil.copytree(folder, path)
    config = json.loads((path / name).read_text()) if (path / name).is_file() else {}
    (path / name).write_text(json.dumps({**config, **changes}))
    return path


def load(path, modality="image", **options):
    return gen.load(modality, model=path, **{**SIZE[modality], **options})


def test_a_checkpoint_that_cannot_be_used_is_refused_in_one_line(folder, tmp_path):
    names = tokenizer().get_vocab()

    def without(word):
        return {w: i for w, i in names.items() if w != word}

    for n, word in enumerate(("<|visual token 000007|>", "<|extra_200|>")):
        with pytest.raises(GenError, match="vocabulary_map"):
            load(broken(folder, tmp_path / f"map{n}", vocabulary_map=without(word)))
    twice = {**names, "<|visual token 000007|>": names["<|visual token 000008|>"]}
    with pytest.raises(GenError, match="two codes"):
        load(broken(folder, tmp_path / "twice", vocabulary_map=twice))
    with pytest.raises(GenError, match="BAAI"):
        load(broken(folder, tmp_path / "own", model_type="Emu3"))
    mean = {"image_mean": [0.4, 0.5, 0.5]}
    with pytest.raises(GenError, match="image_mean"):
        load(broken(folder, tmp_path / "mean", "preprocessor_config.json", **mean))
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    with pytest.raises(GenError, match="no weights"):
        load(bare)


def test_options_that_cannot_be_used_are_refused_in_one_line(folder):
    for options in (
        dict(height=9),
        dict(width=0),
        dict(frames=8),
        dict(meta="{tall}"),
        dict(height=40, width=40),
    ):
        with pytest.raises(GenError, match="expected"):
            load(folder, **options)
    with pytest.raises(GenError, match="frames is 6; expected a multiple of 4"):
        load(folder, "video", frames=6)
    with pytest.raises(GenError, match="height"):
        load(folder, hieght=8)
    with pytest.raises(GenError, match="empty"):
        load(folder)("  ")


def test_a_tokenizer_that_cannot_be_used_is_refused_in_one_line(folder, tmp_path):
    """The tokenizer lacks the id that its config names, or names none, or there is none."""
    for n, named in enumerate((True, False)):
        plain = shutil.copytree(folder, tmp_path / f"plain{n}")
        (plain / "tokenizer.json").write_text(
            (plain / "tokenizer.json").read_text().replace("<|image start|>", "<|start|>")
        )
        if not named:
            (plain / "tokenizer_config.json").write_text(
                json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": NAMES[0]})
            )
        with pytest.raises(GenError, match="image start"):
            load(plain)
    (plain / "tokenizer.json").unlink()
    with pytest.raises(GenError, match="tokenizer of .* cannot be read"):
        load(plain)
