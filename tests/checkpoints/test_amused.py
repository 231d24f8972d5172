"""aMUSEd folders in the published layout, with tiny random weights: logits, images, editing, and
what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from calls import only
from PIL import Image
from published import save_quietly
from tiny_amused import CODES, MASK, PROMPTS, TEXT, amused_folder

import gen
from gen.contracts.checkpoint import CheckpointFiles, family_of
from gen.core.errors import GenError
from gen.models.load.locate import quiet


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return amused_folder(tmp_path_factory.mktemp("amused") / "amused-256")


@pytest.fixture(scope="module")
def pipe(folder):
    return gen.load("image", model=folder, dtype="float64")


@pytest.fixture(scope="module")
def theirs(folder):
    """diffusers' own pipeline over the same folder, in double precision."""
    from diffusers import AmusedPipeline

    with quiet():
        found = AmusedPipeline.from_pretrained(folder, dtype=torch.float64)
        found.set_progress_bar_config(disable=True)
    return found


def plain_logits(theirs, prompt: str, codes: torch.Tensor, micro=(8, 8, 0, 0, 6)) -> torch.Tensor:
    """What diffusers' model says of a canvas [4, 4] of its own ids, as its pipeline calls it: [16,
    codes]."""
    ids = theirs.tokenizer(
        prompt, return_tensors="pt", padding="max_length", truncation=True, max_length=TEXT
    ).input_ids
    said = theirs.text_encoder(ids, output_hidden_states=True)
    out = theirs.transformer(
        codes[None],
        encoder_hidden_states=said.hidden_states[-2],
        pooled_text_emb=said.text_embeds,
        micro_conds=torch.tensor([micro], dtype=torch.float64),
    )
    return out[0].flatten(1).T


def canvas(seed: int) -> torch.Tensor:
    """Codes and masks in gen's ids [16]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(CODES, (16,), generator=generator)
    return torch.where(torch.rand(16, generator=generator) < 0.5, CODES, ids)


@torch.no_grad()
def test_logits_equal_a_plain_forward(folder, pipe, theirs):
    rows = [canvas(n) for n in range(3)]
    wanted = torch.stack(
        [
            plain_logits(theirs, p, torch.where(c == CODES, MASK, c).view(4, 4))
            for p, c in zip(PROMPTS, rows, strict=True)
        ]
    )
    for dtype, limit in (("float64", 1e-5), ("float32", 1e-5 * float(wanted.abs().max()))):
        lm = (
            (pipe if dtype == "float64" else gen.load("image", model=folder))
            .bound(str(folder))[0]
            .adapter("masked")
        )
        ids = torch.stack(
            [torch.cat([torch.tensor(lm.prompt(p)), c]) for p, c in zip(PROMPTS, rows, strict=True)]
        )
        got = lm.forward(ids, 16)
        assert got.shape == (3, 16, CODES + 1) and bool((got[..., CODES] < -1e30).all())
        assert float((got[..., :CODES] - wanted).abs().max()) < limit
        assert (
            float((lm.forward(ids[[1, 0, 2]], 16)[..., :CODES] - wanted).abs().max()) > 100 * limit
        )  # control: another's canvas and text
        swapped = ids.clone()
        swapped[0, 0] = ids[1, 0]
        assert (
            float((lm.forward(swapped, 16)[0, :, :CODES] - wanted[0]).abs().max()) > 100 * limit
        )  # control: another text alone
    bare = plain_logits(
        theirs, PROMPTS[0], rows[0].view(4, 4)
    )  # control: the mask's id is another one for the model
    assert float((bare - wanted[0]).abs().max()) > 1e-3


@torch.no_grad()
def test_the_model_is_told_width_height_and_score_in_this_order(folder, theirs):
    found = gen.load(
        "image", model=folder, dtype="float64", height=8, width=16, aesthetic_score=7.5
    )
    lm = found.bound(str(folder))[0].adapter("masked")
    assert lm.grid == (4, 8)
    ids = torch.cat([canvas(1), canvas(2)])
    got = lm.forward(torch.cat([torch.tensor(lm.prompt("a cat")), ids])[None], 32)[0, :, :CODES]
    own = torch.where(ids == CODES, MASK, ids).view(4, 8)
    assert torch.allclose(got, plain_logits(theirs, "a cat", own, (16, 8, 0, 0, 7.5)), atol=1e-9)
    for other in ((8, 16, 0, 0, 7.5), (16, 8, 0, 0, 6)):
        assert not torch.allclose(got, plain_logits(theirs, "a cat", own, other), atol=1e-4)
    assert found("a cat", sampler={"name": "maskgit", "steps": 3}).media[0].size == (16, 8)


@pytest.mark.parametrize(
    "sampler", ["amused", "maskgit", "halton", "maskgit_remask", "exact_speculative"]
)
@pytest.mark.thinned(2)
def test_samplers_make_images_and_an_item_does_not_depend_on_its_batch(pipe, sampler):
    spec = {"name": sampler} if sampler == "exact_speculative" else {"name": sampler, "steps": 4}
    out = pipe(PROMPTS, sampler=spec, seed=5)
    assert (
        [m.size for m in out.media] == [(8, 8)] * 3
        and out.tokens.shape == (3, 16)
        and out.sampling.guidance_scale == 10.0
    )
    assert int(out.tokens.min()) >= 0 and int(out.tokens.max()) < CODES
    alone = pipe(PROMPTS[1], sampler=spec, seed=5)
    assert torch.equal(alone.tokens[0], out.tokens[1]) and np.array_equal(
        alone.media[0], out.media[1]
    )
    assert len({tuple(t) for t in out.tokens.tolist()}) == 3
    one, other = (
        pipe(
            PROMPTS[1],
            sampler=spec,
            seed=seed,
            **only(guidance_scale=1.5, temperature=2.0),
        ).tokens
        for seed in (5, 6)
    )
    assert not torch.equal(one, other)  # control, under a distribution that leaves some doubt


def test_images_are_those_of_diffusers_pipeline_for_the_same_codes(folder, pipe, theirs):
    latents = theirs(
        PROMPTS[0],
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    ).images
    image = theirs(
        PROMPTS[0], num_inference_steps=3, generator=torch.Generator().manual_seed(0)
    ).images[0]
    _, binding, frontend = pipe.bound(str(folder))
    ours = pipe.decode(latents.flatten(), binding.space, frontend)
    assert (
        ours.size
        == image.size
        == pipe(PROMPTS[0], sampler={"name": "amused", "steps": 3}).media[0].size
    )
    assert np.abs(np.asarray(ours).astype(int) - np.asarray(image)).max() <= 1
    from gen.tokenizers.image.vq import VQ

    signed = VQ(frontend.model).postprocess(
        frontend.decode(latents[None])[0]
    )  # control: pixels taken for [-1, 1]
    assert np.abs(np.asarray(signed).astype(int) - np.asarray(image)).max() > 10
    x = frontend.preprocess(image)
    assert (
        float(x.min()) >= 0
        and float(x.max()) <= 1
        and np.array_equal(frontend.postprocess(x), image)
    )


@pytest.mark.parametrize("sampler", ["amused", "halton", "maskgit_remask"])
def test_editing_keeps_what_is_not_marked(folder, pipe, sampler):
    rng = np.random.default_rng(0)
    source = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    marks = np.zeros((8, 8), bool)
    marks[:4, 2:6] = True
    out = pipe(
        "a cat", sampler={"name": sampler, "steps": 3}, source=source, mask=marks, num_samples=2
    )
    _, _, frontend = pipe.bound(str(folder))
    codes = frontend.encode(frontend.preprocess(source)[None]).flatten()
    kept = torch.from_numpy(~marks[::2, ::2].copy()).flatten()
    assert torch.equal(out.tokens[:, kept], codes[kept].expand(2, -1))
    for media in out.media:
        assert np.array_equal(np.asarray(media)[~marks], np.asarray(source)[~marks])
        assert not np.array_equal(np.asarray(media)[marks], np.asarray(source)[marks])


def test_without_guidance_the_empty_text_is_not_asked(folder):
    found = gen.load("image", model=folder)
    lm = found.bound(str(folder))[0].adapter("masked")
    found("a cat", sampler={"name": "maskgit", "steps": 2}, **only(guidance_scale=1.0))
    asked = lm.conditions._kept.keys()
    assert [lm.conditions._conditions[n] for n in asked] == ["a cat"]
    found("a cat", sampler={"name": "maskgit", "steps": 2})
    assert {lm.conditions._conditions[n] for n in asked} == {"a cat", ""}


# --- what is refused


def changed(folder: Path, tmp_path: Path, part: str, **values) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    name = "scheduler_config.json" if part == "scheduler" else "config.json"
    config = json.loads((copy / part / name).read_text()) | values
    (copy / part / name).write_text(json.dumps(config))
    return copy


def test_the_family_is_recognised_by_its_pipeline(folder, tmp_path):
    assert family_of(CheckpointFiles.find(folder), "image").__name__ == "Amused"
    (tmp_path / "model_index.json").write_text(
        json.dumps({"_class_name": "StableDiffusionPipeline"})
    )
    with pytest.raises(GenError, match="'StableDiffusionPipeline', which no family recognises"):
        gen.load("image", model=tmp_path)
    with pytest.raises(GenError, match="requested was 'video'"):
        gen.load("video", model=folder)


@pytest.mark.parametrize("part", ["vqvae", "text_encoder", "scheduler"])
def test_a_folder_that_lacks_a_part_is_refused(folder, tmp_path, part):
    shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / part)
    with pytest.raises(GenError, match=f"lacks the folder {part}; expected transformer, vqvae"):
        gen.load("image", model=tmp_path / "copy")


@pytest.mark.parametrize("mask", [3, CODES - 1, 72, None, True])
def test_a_mask_that_is_a_code_or_no_id_is_refused(folder, tmp_path, mask):
    with pytest.raises(GenError, match=f"mask_token_id {mask!r}; expected an id from 64 to 71"):
        gen.load("image", model=changed(folder, tmp_path, "scheduler", mask_token_id=mask))


def test_parts_that_do_not_fit_each_other_are_refused(folder, tmp_path):
    import diffusers

    copy = tmp_path / "codes"
    shutil.copytree(folder, copy)
    vq = diffusers.VQModel.from_pretrained(folder / "vqvae")
    other = diffusers.VQModel.from_config(vq.config | {"num_vq_embeddings": 32})
    save_quietly(other, copy / "vqvae")
    with pytest.raises(GenError, match="codebook_size of 64 and its vqvae 32 codes"):
        gen.load("image", model=copy)
    with pytest.raises(GenError, match="do not fit UVit2DModel; .*missing"):
        gen.load("image", model=changed(folder, tmp_path, "transformer", num_hidden_layers=2))
    shutil.rmtree(tmp_path / "copy")
    with pytest.raises(GenError, match="mis-shaped|do not fit"):
        gen.load("image", model=changed(folder, tmp_path, "transformer", cond_embed_dim=30))
    index = json.loads((copy / "model_index.json").read_text()) | {
        "vqvae": ["diffusers", "AutoencoderKL"]
    }
    (copy / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(GenError, match="vqvae of .* is a 'AutoencoderKL'; expected 'VQModel'"):
        gen.load("image", model=copy)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("height", 7, "height is 7; expected a multiple of 2"),
        ("width", True, "width is True"),
        ("aesthetic_score", "good", "a number from 0 to 100"),
        ("heigth", 8, "Did you mean 'height'"),
        ("device_map", "auto", "expected none"),
    ],
)
def test_bad_options_are_refused(folder, option, value, said):
    with pytest.raises(GenError, match=said):
        gen.load("image", model=folder, **{option: value})


def test_a_model_that_halves_its_grid_takes_even_ones_only(tmp_path):
    found = gen.load(
        "image", model=amused_folder(tmp_path / "amused-512", downsample=True, upsample=True)
    )
    assert found("a cat", sampler={"name": "amused", "steps": 2}).media[0].size == (8, 8)
    with pytest.raises(GenError, match="height is 6; expected a multiple of 4"):
        gen.load("image", model=tmp_path / "amused-512", height=6)


def test_half_precision_keeps_the_autoencoder_in_single(folder):
    found = gen.load("image", model=folder, dtype="float16").bound(str(folder))
    assert found[2].model.dtype == torch.float32 and found[0].lm.dtype == torch.float16
    assert (
        gen.load("image", model=folder, dtype="bfloat16").bound(str(folder))[2].model.dtype
        == torch.bfloat16
    )  # control
