"""Latents through the whole pipeline: the autoencoder frontend, the distribution, editing, and what
does not fit together."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from gen.config.job import make_job
from gen.core.errors import GenError
from gen.gallery.trace import draw_trace
from gen.modalities.image import captions as shapes
from gen.models.load.locate import ZOO
from gen.pipeline.pipeline import Pipeline
from gen.tokenizers.image.kl import KL

RING = "a small blue ring in the centre"
SAMPLING = {"guidance_scale": 2.0}


@pytest.fixture(scope="module")
def kl() -> KL:
    return KL.from_pretrained(ZOO / "image-kl")


def test_images_survive_the_autoencoder(kl):
    rng = np.random.default_rng(0)
    images = [shapes.draw(c, rng) for c in shapes.captions(4, seed=5, held=True)]
    x = torch.stack([kl.preprocess(p) for p in images])
    z = kl.encode(x)
    assert (
        z.shape == (4, 16, 8, 8) and kl.grid_for(x.shape) == (8, 8) and 0.7 < float(z.std()) < 1.4
    )
    again = np.stack([np.asarray(kl.postprocess(y)) for y in kl.decode(z)])

    def error(a):
        return ((a.astype(float) - np.stack(images)) ** 2).mean()

    assert error(again) < 100 and error(again[::-1]) > 10 * error(again)
    assert torch.equal(kl.encode(x), z), "encoding is not deterministic"


@pytest.mark.parametrize(
    "bad", [torch.zeros(1, 4, 8, 8), torch.zeros(1, 16, 8, 8).long(), torch.zeros(16, 8, 8)]
)
def test_what_are_no_latents_is_refused(kl, bad):
    with pytest.raises(GenError, match="expected floats"):
        kl.decode(bad)


def test_a_model_of_another_autoencoder_is_refused(tmp_path):
    for name in ("image-kl", "image-causal-latents"):
        shutil.copytree(ZOO / name, tmp_path / name)
    assert Pipeline("image", tmp_path / "image-causal-latents")(
        RING, "continuous_jacobi", **SAMPLING
    ).tokens.shape == (1, 64, 16)
    other = KL.from_pretrained(tmp_path / "image-kl")
    with torch.no_grad():
        other.model.decoder.conv_in.weight.add_(1)
    other.model.save_pretrained(tmp_path / "image-kl")
    with pytest.raises(
        GenError, match="put the frontend it was trained with beside it as 'image-kl'"
    ):
        Pipeline("image", tmp_path / "image-causal-latents")(RING, "continuous_jacobi", **SAMPLING)


def test_the_default_distribution_has_nothing_that_is_about_ids():
    pipe = Pipeline("image", "image-mar")
    out = pipe(RING, {"name": "mar", "steps": 2})
    assert out.sampling.guidance_scale == 2.0 and out.sampling.top_k == 0
    with pytest.raises(GenError, match="sampling.top_k is 100; it applies to discrete tokens"):
        pipe(RING, {"name": "mar", "steps": 2}, top_k=100)
    with pytest.raises(GenError, match="needs a causal one"):
        pipe(RING, "autoregressive")
    with pytest.raises(GenError, match="of latents, but the sampler needs a causal one of codes"):
        Pipeline("image", "image-causal-latents")(RING, "sjd")


@pytest.mark.parametrize(
    ("model", "sampler"),
    [
        ("image-causal-latents", {"name": "continuous_jacobi", "tolerance": 0.3}),
        pytest.param("image-causal-latents", {"name": "cspd"}, marks=pytest.mark.slow),
        ("image-mar", {"name": "mar", "steps": 6}),
    ],
)
@pytest.mark.thinned(2)
def test_an_item_is_the_same_alone_and_in_a_batch(model, sampler):
    pipe = Pipeline("image", model, dtype="float64")
    prompts = [RING, "a large red circle at the top left"]
    whole = pipe(prompts, sampler, **SAMPLING, batch_size=2)
    alone = pipe(prompts[1], sampler, **SAMPLING)
    assert (
        torch.allclose(alone.tokens[0], whole.tokens[1], atol=1e-7)
        and alone.stats[0].nfe == whole.stats[1].nfe
    )
    assert not torch.allclose(whole.tokens[0], whole.tokens[1], atol=0.1)


def test_editing_keeps_what_the_mask_does_not_mark(kl):
    image = shapes.draw(shapes.captions(1, seed=3, held=True)[0], np.random.default_rng(1))
    mask = np.zeros((64, 64), dtype=bool)
    mask[:, 40:] = True
    pipe = Pipeline("image", "image-mar")
    out = pipe(RING, {"name": "mar", "steps": 8}, **SAMPLING, source=image, mask=mask)
    again = np.asarray(out.media[0])
    assert np.array_equal(again[:, :40], image[:, :40]) and not np.array_equal(
        again[:, 40:], image[:, 40:]
    )
    known = kl.encode(kl.preprocess(image)[None])[0].flatten(1).T.view(8, 8, 16)[:, :5]
    assert torch.allclose(out.tokens[0].view(8, 8, 16)[:, :5], known, atol=1e-5)


def test_traces_of_latents_are_drawn():
    out = Pipeline("image", "image-mar")(RING, {"name": "mar", "steps": 4}, **SAMPLING, trace=True)
    steps = [
        {
            "window": s.window,
            "accepted": s.accepted,
            "committed": {str(k): v for k, v in s.committed.items()},
        }
        for s in out.traces[0]
    ]
    assert "<svg" in draw_trace(steps, [8, 8], "here")["grid"]
    assert json.dumps(steps)


def test_entries_of_two_models_are_told_apart_by_their_models_alone():
    job = make_job(
        {
            "modality": "image",
            "prompts": [RING],
            "out": "o",
            "jobs": [
                {"sampler": "autoregressive"},
                {
                    "sampler": "autoregressive",
                    "model": "image-causal-latents",
                    "sampling": {"top_k": 0},
                },
            ],
        },
        [],
        where="x",
    )
    assert job.labels() == ["autoregressive", "autoregressive image-causal-latents"]
