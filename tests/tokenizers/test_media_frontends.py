"""The codecs of speech and video: what goes in comes out, chunks are the whole, and nothing looks
ahead."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gen
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.modalities.speech import checker as spoken_check
from gen.modalities.speech import synth as spoken
from gen.modalities.video import captions as moving
from gen.modalities.video import checker as moving_check

MODALITIES = ("speech", "video")


@pytest.fixture(scope="module")
def frontends():
    return {
        name: registry.get("modality", name)().frontend(dtype=torch.float64) for name in MODALITIES
    }


def media_of(name: str, count: int, seed: int = 3):
    rng = np.random.default_rng(seed)
    if name == "speech":
        conditions = spoken.utterances(count, seed, held=True)
        return conditions, [spoken.speak(u, rng) for u in conditions], spoken_check.check_many
    conditions = moving.captions(count, seed, held=True)
    return conditions, [moving.draw(c, rng) for c in conditions], moving_check.check_many


def codes_of(frontend, media) -> torch.Tensor:
    return torch.cat([frontend.encode(frontend.preprocess(m)[None]) for m in media])


@pytest.mark.parametrize(
    "name", [pytest.param(m, marks=[pytest.mark.slow] if m == "video" else []) for m in MODALITIES]
)
@pytest.mark.slow
def test_real_media_survive_the_codec(name, frontends):
    conditions, media, check_many = media_of(name, 24)
    frontend = registry.get("modality", name)().frontend()
    again = [frontend.postprocess(frontend.decode(codes_of(frontend, [m]))[0]) for m in media]
    assert [(a.shape, a.dtype) for a in again] == [(m.shape, m.dtype) for m in media]

    def share(given, said):
        return np.mean([v.passed for v in check_many(given, said)])

    assert share(media, conditions) >= 0.99
    assert share(again, conditions) >= 0.95
    assert (
        share(media, conditions[1:] + conditions[:1]) <= 0.05
    )  # control: with each other's conditions they do not pass


@pytest.mark.parametrize("name", MODALITIES)
def test_codes_have_the_stated_shape_and_range_and_do_not_depend_on_the_batch(name, frontends):
    frontend, (_, media, _) = frontends[name], media_of(name, 2)
    x = torch.stack([frontend.preprocess(m) for m in media])
    codes = frontend.encode(x)
    assert codes.shape == (
        2,
        len(frontend.config.codebook_sizes),
        *frontend.grid_for(tuple(x.shape[1:])),
    )
    assert codes.dtype == torch.long and int(codes.min()) >= 0
    assert all(int(codes[:, q].max()) < n for q, n in enumerate(frontend.config.codebook_sizes))
    assert torch.equal(codes, codes_of(frontend, media))
    assert torch.allclose(frontend.decode(codes)[1], frontend.decode(codes[1:2])[0], atol=1e-10)
    assert [t.shape[0] for t in frontend.codebooks] == list(frontend.config.codebook_sizes)


@pytest.mark.parametrize("name", MODALITIES)
def test_decoding_in_chunks_is_decoding_at_once(name, frontends, monkeypatch):
    frontend, (_, media, _) = frontends[name], media_of(name, 1)
    codes = codes_of(frontend, media)
    whole = frontend.decode_at_once(codes)

    def error():
        return float((frontend.decode(codes) - whole).abs().max() / whole.abs().max())

    assert error() < 1e-6  # rotary embeddings are single precision in transformers
    assert torch.equal(
        frontend.decode(codes),
        torch.cat(
            [frontend.decode_chunk(codes, n) for n in range(0, codes.shape[2], frontend.chunk)],
            frontend.time_axis,
        ),
    )
    monkeypatch.setattr(
        frontend, "context", 0
    )  # control: without what lies before, a chunk is another one
    assert error() > 1e-3


@pytest.mark.parametrize("name", MODALITIES)
def test_a_chunk_does_not_depend_on_what_comes_after_it(name, frontends):
    frontend, (_, media, _) = frontends[name], media_of(name, 1)
    codes = codes_of(frontend, media)
    cut = 3 * frontend.chunk
    other = codes.clone()
    other[:, :, cut:] = (other[:, :, cut:] + 1) % frontend.config.codebook_sizes[0]
    a, b = (frontend.decode_at_once(c) for c in (codes, other))
    n = cut * frontend.config.compression[0]
    assert torch.allclose(
        a.narrow(frontend.time_axis, 0, n), b.narrow(frontend.time_axis, 0, n), atol=1e-6
    )
    assert not torch.allclose(a, b, atol=1e-3)


@pytest.mark.parametrize("name", MODALITIES)
def test_a_frontend_that_is_saved_and_loaded_is_the_same(name, frontends, tmp_path):
    frontend, (_, media, _) = frontends[name], media_of(name, 1)
    frontend.model.save_pretrained(tmp_path / "codec")
    again = type(frontend).from_pretrained(tmp_path / "codec", dtype=torch.float64)
    assert again.config == frontend.config and torch.equal(again.fingerprint, frontend.fingerprint)
    codes = codes_of(frontend, media)
    assert torch.equal(codes, codes_of(again, media)) and torch.equal(
        frontend.decode(codes), again.decode(codes)
    )


@pytest.mark.parametrize("name", MODALITIES)
def test_codes_out_of_range_and_wrong_media_are_refused(name, frontends, tmp_path):
    frontend, (_, media, _) = frontends[name], media_of(name, 1)
    codes = codes_of(frontend, media)
    for bad in (codes - 1000, codes + 1000, codes[:, :1, 0]):
        with pytest.raises(GenError, match="expected"):
            frontend.decode(bad)
    for bad in (
        np.zeros((3, 3), np.float32),
        np.zeros(0, np.float32),
        np.zeros((16, 30, 30, 3), np.uint8),
        media[0][:-1],
    ):
        with pytest.raises(GenError, match="expected"):
            frontend.preprocess(bad)
    with pytest.raises(GenError, match="nowhere"):
        type(frontend).from_pretrained(tmp_path / "nowhere")


def test_codebook_vectors_of_different_streams_are_not_each_others_neighbours():
    pipe = gen.load("speech")
    space = pipe.target(*pipe.resolve("autoregressive", None), pipe.plan("two")).space
    near = torch.cdist(space.codebook, space.codebook).topk(20, largest=False).indices
    assert torch.equal(near // 128, torch.arange(512)[:, None].expand(-1, 20) // 128)
