"""The frontends of clips whose first frame stands alone, over tiny random autoencoders: counts of
frames, equality with diffusers' own, causality."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gen.core.errors import GenError
from gen.core.registry import registry

NAMES = ("cosmos", "vidtok")
R, SIDE = {"cosmos": 4, "vidtok": 2}, 16


def tiny(name: str, **changed):
    import diffusers

    if name == "cosmos":
        config = dict(
            latent_channels=4,
            encoder_block_out_channels=(8, 8, 16, 16),
            decode_block_out_channels=(8, 8, 16, 16),
            attention_resolutions=(32,),
            resolution=64,
            num_layers=1,
            patch_size=4,
            scaling_factor=1.0,
            spatial_compression_ratio=8,
            temporal_compression_ratio=4,
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[0.5, 2.0, 1.5, 1.0],
        )
        kind = diffusers.AutoencoderKLCosmos
    else:
        config = dict(
            ch=32,
            ch_mult=[1, 2],
            z_channels=2,
            double_z=False,
            num_res_blocks=1,
            regularizer="fsq",
            codebook_size=64,
            spatial_ds=[0],
            spatial_us=[1],
            tempo_ds=[0],
            tempo_us=[1],
        )
        kind = diffusers.AutoencoderVidTok
    torch.manual_seed(5)
    return kind(**config | changed)


def clip(frames: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (frames, SIDE, SIDE, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for name in NAMES:
        found[name] = tmp_path_factory.mktemp(name)
        tiny(name).save_pretrained(found[name])
    return found


@pytest.fixture(scope="module")
def frontends(folders):
    return {
        name: registry.get("tokenizer", name).from_pretrained(folders[name], dtype=torch.float64)
        for name in NAMES
    }


def signal(frontend, frames: int, seed: int = 0) -> torch.Tensor:
    return frontend.preprocess(clip(frames, seed))[None]


@pytest.mark.parametrize("frames", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_clip_comes_back_with_its_frames_and_its_grid_is_the_stated_one(name, frames, frontends):
    frontend, count = frontends[name], 1 + frames * R[name]
    x = signal(frontend, count)
    codes = frontend.encode(x)
    assert (
        tuple(codes.shape[2:])
        == frontend.grid_for(tuple(x.shape[1:]))
        == (1 + frames, *(SIDE // s for s in frontend.config.compression[1:]))
    )
    assert codes.shape[1] == (len(frontend.config.codebook_sizes) or frontend.config.channels)
    y = frontend.decode(codes)
    assert y.shape == x.shape and frontend.frames_for(1 + frames) == count == frontend.whole(count)
    media = frontend.postprocess(y[0])
    assert media.shape == (count, SIDE, SIDE, 3) and media.dtype == np.uint8


@pytest.mark.parametrize("name", NAMES)
def test_the_first_slice_is_that_of_the_image_alone_and_nothing_looks_ahead(name, frontends):
    frontend, r = frontends[name], R[name]
    x = signal(frontend, 1 + 3 * r)
    codes = frontend.encode(x)

    def same(a, b):
        return bool((a - b).abs().max() < 1e-5)

    assert same(codes[:, :, :1], frontend.encode(x[:, :1]))
    assert same(codes[:, :, :2], frontend.encode(x[:, : 1 + r]))
    assert not same(codes[:, :, 1:2], frontend.encode(x[:, :1]))  # control: another slice
    assert not same(
        codes[:, :, :1], frontend.encode(x.flip(1)[:, : 1 + r])[:, :, :1]
    )  # control: another first frame


@pytest.mark.parametrize("name", NAMES)
def test_a_clip_does_not_depend_on_its_batch(name, frontends):
    frontend = frontends[name]
    x = torch.cat([signal(frontend, 1 + R[name], seed) for seed in range(3)])
    codes = frontend.encode(x)
    alone = torch.cat([frontend.encode(one[None]) for one in x])
    assert torch.allclose(codes.double(), alone.double(), atol=1e-9, rtol=0) and not torch.equal(
        codes[0], codes[1]
    )
    assert torch.allclose(frontend.decode(codes)[1], frontend.decode(codes[1:2])[0], atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded_it_is_the_same(name, frontends, tmp_path):
    frontend = frontends[name]
    frontend.model.save_pretrained(tmp_path / "again")
    again = type(frontend).from_pretrained(tmp_path / "again", dtype=torch.float64)
    assert again.config == frontend.config and torch.equal(again.fingerprint, frontend.fingerprint)
    codes = frontend.encode(signal(frontend, 1 + R[name]))
    assert torch.equal(codes, again.encode(signal(again, 1 + R[name]))) and torch.equal(
        frontend.decode(codes), again.decode(codes)
    )
    other = type(frontend)(tiny(name).double())
    other.model.decoder.conv_in.load_state_dict(
        {k: v + 0.1 for k, v in other.model.decoder.conv_in.state_dict().items()}
    )
    assert not torch.equal(other.fingerprint, frontend.fingerprint)  # control


def test_cosmos_gives_scaled_latents_of_diffusers_autoencoder(frontends):
    frontend = frontends["cosmos"]
    x = signal(frontend, 9)
    z = frontend.model.encode(x.transpose(1, 2)).latent_dist.mode()
    mean, std = (
        torch.tensor(frontend.model.config[k], dtype=torch.float64).view(1, 4, 1, 1, 1)
        for k in ("latents_mean", "latents_std")
    )
    codes = frontend.encode(x)
    assert torch.allclose(codes, (z - mean) / std, atol=1e-12) and not torch.allclose(
        codes, z, atol=1e-2
    )
    plain = frontend.model.decode(z).sample.transpose(1, 2)
    assert torch.allclose(frontend.decode(codes), plain, atol=1e-10)
    assert not torch.allclose(
        frontend.decode(z), plain, atol=1e-4
    )  # control: latents that are not scaled
    assert torch.allclose(
        plain, frontend.model(x.transpose(1, 2)).sample.transpose(1, 2), atol=1e-10
    )


def test_cosmos_takes_statistics_of_every_slice_or_none():
    make = registry.get("tokenizer", "cosmos")
    one, of_slices, none = (
        make(tiny("cosmos", **c).double())
        for c in (
            {"latents_mean": [0.5] * 4, "latents_std": [2.0] * 4},
            {"latents_mean": [0.5, 0.5, 9.0] * 4, "latents_std": [2.0, 2.0, 7.0] * 4},
            {"latents_mean": None, "latents_std": None, "scaling_factor": 3.0},
        )
    )
    x = signal(one, 5)
    a, b, c = (f.encode(x) for f in (one, of_slices, none))
    assert torch.allclose(a, b, atol=1e-12) and torch.allclose(a * 2 + 0.5, c / 3, atol=1e-12)
    longer = [f.encode(signal(one, 9)) for f in (one, of_slices)]
    assert not torch.allclose(*longer, atol=1e-2)  # control: the third slice has other numbers
    with pytest.raises(GenError, match="4 slices of time; expected at most 3"):
        of_slices.encode(signal(one, 13))
    with pytest.raises(GenError, match="one of latents_mean and latents_std"):
        make(tiny("cosmos", latents_mean=None))
    with pytest.raises(GenError, match="latents_std holds 5 numbers; expected a multiple of 4"):
        make(tiny("cosmos", latents_std=[1.0] * 5))


def test_vidtok_codes_are_what_diffusers_forward_makes_and_their_vectors_what_it_decodes(frontends):
    frontend = frontends["vidtok"]
    x = signal(frontend, 5)
    codes = frontend.encode(x)
    z, ids = frontend.model(x.transpose(1, 2), encoder_mode=True)
    assert codes.dtype == torch.long and int(codes.min()) >= 0 and int(codes.max()) < 64
    assert torch.equal(codes[:, 0], ids.long())
    (table,) = frontend.codebooks
    assert (
        table.shape == (64, 2) and len(table.unique(dim=0)) == 64 and frontend.codebooks[0] is table
    )
    assert torch.allclose(table[codes[:, 0]].movedim(-1, 1), z, atol=1e-6)
    whole = frontend.model(x.transpose(1, 2)).sample.transpose(1, 2)
    assert torch.allclose(frontend.decode(codes), whole, atol=1e-5)
    wrong = type(frontend)(frontend.model)
    wrong._table = table.flip(1)
    assert not torch.allclose(
        wrong.decode(codes), whole, atol=1e-3
    )  # control: components of the vectors in another order
    assert (
        frontend.model.encode(x.transpose(1, 2))[1].shape[1] < codes.shape[2]
    )  # control: without copies of the first frame a slice is lost


def test_vidtok_rounds_where_a_sum_falls_just_short_of_an_integer(frontends):
    """A component one rounding below its level is still that level; cut off it would be the code
    before."""
    frontend = frontends["vidtok"]
    codes = torch.arange(64).view(1, 1, 1, 8, 8)
    short = frontend.codebooks[0][codes[:, 0]].movedim(-1, 1).float() - 1e-7
    frontend.model.encode, plain = (lambda x: (short, None)), frontend.model.encode
    try:
        assert torch.equal(frontend.encode(signal(frontend, 1)), codes)
        assert not torch.equal(
            frontend.levels.codes_to_indices(short.movedim(1, -1)).long()[:, None], codes
        )  # control: diffusers' own
    finally:
        frontend.model.encode = plain


def test_vidtok_keeps_no_inputs(frontends):
    frontend = frontends["vidtok"]
    frontend.decode(frontend.encode(signal(frontend, 3)))

    def caches():
        return [m.causal_cache for m in frontend.model.modules() if hasattr(m, "causal_cache")]

    assert caches() and all(c is None for c in caches())
    frontend.model(signal(frontend, 3).transpose(1, 2))
    assert any(c is not None for c in caches())  # control


@pytest.mark.parametrize("name", NAMES)
def test_other_counts_of_frames_are_refused_with_the_nearest_ones(name, frontends, tmp_path):
    frontend, r = frontends[name], R[name]
    with pytest.raises(
        GenError,
        match=rf"has {2 * r} frames; expected 1 \+ {r} k of them, such as {1 + r} or {1 + 2 * r}",
    ):
        frontend.preprocess(clip(2 * r))
    with pytest.raises(
        GenError, match=rf"has {2 + 2 * r} frames; .* such as {1 + 2 * r} or {1 + 3 * r}"
    ):
        frontend.encode(signal(frontend, 1 + r).repeat(1, 2, 1, 1, 1))
    assert [frontend.whole(n) for n in (1, r, 1 + r, 2 * r, 1 + 2 * r)] == [
        1,
        1,
        1 + r,
        1 + r,
        1 + 2 * r,
    ]
    side = frontend.config.compression[1]
    for bad in (clip(1)[:, :-1], clip(1).astype(np.float32), clip(1)[..., :2], clip(1)[:0]):
        with pytest.raises(GenError, match=f"multiples of {side}x{side}|uint8"):
            frontend.preprocess(bad)
    with pytest.raises(GenError, match="nowhere"):
        type(frontend).from_pretrained(tmp_path / "nowhere")
    codes = frontend.encode(signal(frontend, 1))
    for bad in (codes[0], codes[:, :0], codes.long() + 64):
        with pytest.raises(GenError, match="expected"):
            frontend.decode(bad)


def test_other_vidtok_models_are_refused():
    make = registry.get("tokenizer", "vidtok")
    for changed in ({"regularizer": "kl"}, {"is_causal": False}):
        with pytest.raises(GenError, match="expected 'fsq'"):
            make(tiny("vidtok", **changed))
