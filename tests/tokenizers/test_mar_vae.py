"""Autoencoders with the keys of latent diffusion: against a plain forward over the published keys,
and what is refused."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.nn.functional as F
from mar_layout import CHANNELS, LAYERS, LEVELS, numbers, vae_weights, write_vae

from gen.core.errors import GenError
from gen.models.nets.ldm_vae import load_ldm_vae
from gen.tokenizers.image.kl import KL

SCALE = 0.2325


def norm(w, at, x):
    return F.group_norm(x, 32, w[f"{at}.weight"], w[f"{at}.bias"], eps=1e-6)


def conv(w, at, x, **how):
    return F.conv2d(x, w[f"{at}.weight"], w[f"{at}.bias"], **how)


def resnet(w, at, x):
    h = conv(w, f"{at}.conv1", F.silu(norm(w, f"{at}.norm1", x)), padding=1)
    h = conv(w, f"{at}.conv2", F.silu(norm(w, f"{at}.norm2", h)), padding=1)
    return h + (conv(w, f"{at}.nin_shortcut", x) if f"{at}.nin_shortcut.weight" in w else x)


def attention(w, at, x):
    h = norm(w, f"{at}.norm", x)
    q, k, v = (conv(w, f"{at}.{part}", h).flatten(2) for part in "qkv")
    share = (q.transpose(1, 2) @ k * x.shape[1] ** -0.5).softmax(-1)
    return x + conv(w, f"{at}.proj_out", (v @ share.transpose(1, 2)).view_as(x))


def middle(w, half, x):
    return resnet(
        w,
        f"{half}.mid.block_2",
        attention(w, f"{half}.mid.attn_1", resnet(w, f"{half}.mid.block_1", x)),
    )


def plain_encode(w, x, attends=True, corner=True):
    """The mean of the posterior. ``attends`` and ``corner`` off are the controls."""
    x = conv(w, "encoder.conv_in", x, padding=1)
    for i in range(LEVELS):
        for j in range(LAYERS):
            x = resnet(w, f"encoder.down.{i}.block.{j}", x)
            if attends and f"encoder.down.{i}.attn.{j}.q.weight" in w:
                x = attention(w, f"encoder.down.{i}.attn.{j}", x)
        if i < LEVELS - 1:
            x = F.pad(x, (0, 1, 0, 1) if corner else (1, 0, 1, 0))
            x = conv(w, f"encoder.down.{i}.downsample.conv", x, stride=2)
    x = conv(
        w,
        "encoder.conv_out",
        F.silu(norm(w, "encoder.norm_out", middle(w, "encoder", x))),
        padding=1,
    )
    return conv(w, "quant_conv", x)[:, :CHANNELS]


def plain_decode(w, z):
    x = middle(w, "decoder", conv(w, "decoder.conv_in", conv(w, "post_quant_conv", z), padding=1))
    for i in reversed(range(LEVELS)):
        for j in range(LAYERS + 1):
            x = resnet(w, f"decoder.up.{i}.block.{j}", x)
        if i:
            x = conv(
                w, f"decoder.up.{i}.upsample.conv", F.interpolate(x, scale_factor=2.0), padding=1
            )
    return conv(w, "decoder.conv_out", F.silu(norm(w, "decoder.norm_out", x)), padding=1)


@pytest.fixture(scope="module")
def weights():
    return vae_weights()


@pytest.fixture(scope="module")
def file(tmp_path_factory, weights):
    path = tmp_path_factory.mktemp("vae") / "kl16.ckpt"
    write_vae(path, weights)
    return path


@pytest.fixture(scope="module")
def kl(file) -> KL:
    return KL(load_ldm_vae(file, scaling_factor=SCALE, dtype=torch.float64))


@pytest.fixture(scope="module")
def images():
    return torch.rand(3, 3, 16, 24, generator=numbers(5), dtype=torch.float64) * 2 - 1


def far(a, b):
    return float((a - b).abs().max())


def test_latents_and_images_equal_a_plain_forward_over_the_published_keys(kl, weights, images):
    w = {k: v.double() for k, v in weights.items()}
    z = kl.encode(images)
    assert (
        z.shape == (3, CHANNELS, 4, 6)
        and kl.config.channels == CHANNELS
        and kl.config.compression == (4, 4)
    )
    assert far(z, plain_encode(w, images) * SCALE) < 1e-10
    assert far(kl.decode(z), plain_decode(w, z / SCALE)) < 1e-10
    for broken in ({"attends": False}, {"corner": False}):
        assert far(z, plain_encode(w, images, **broken) * SCALE) > 1e-3, broken
    assert far(z, plain_encode(w, images)) > 1e-2
    assert far(kl.decode(z), plain_decode(w, z)) > 1e-2
    upside_down = {
        **w,
        **{
            f"decoder.up.{i}.block.1.conv2.bias": w[f"decoder.up.{1 - i}.block.1.conv2.bias"]
            for i in (0, 1)
        },
    }
    assert far(kl.decode(z), plain_decode(upside_down, z / SCALE)) > 1e-3


def test_latents_are_those_of_single_precision_too(file, kl, images):
    single = KL(load_ldm_vae(file, scaling_factor=SCALE))
    assert single.model.dtype == torch.float32
    assert far(single.encode(images.float()), kl.encode(images)) < 1e-4
    assert far(single.decode(kl.encode(images).float()), kl.decode(kl.encode(images))) < 1e-4


def test_an_image_has_its_latents_alone_and_in_a_batch(kl, images):
    z = kl.encode(images)
    out = kl.decode(z)
    for i in range(3):
        assert far(kl.encode(images[i : i + 1])[0], z[i]) < 1e-10
        assert far(kl.decode(z[i : i + 1])[0], out[i]) < 1e-10
    assert far(kl.encode(images[:1])[0], z[1]) > 1e-2


def test_media_become_latents_and_media_again(kl, images):
    medium = kl.postprocess(images[0])
    again = kl.postprocess(kl.preprocess(medium))
    assert medium.size == (24, 16) and list(again.getdata()) == list(medium.getdata())
    made = kl.postprocess(kl.decode(kl.encode(kl.preprocess(medium)[None]))[0])
    assert made.size == medium.size


def test_attention_is_where_the_keys_have_it(kl):
    assert kl.model.config.down_block_types == ("DownEncoderBlock2D",) * 2 + (
        "AttnDownEncoderBlock2D",
    )
    assert kl.model.config.up_block_types == ("UpDecoderBlock2D",) * 3


def test_what_is_missing_extra_or_mis_shaped_comes_in_one_error(tmp_path, weights):
    bent = dict(weights)
    del bent["decoder.up.2.block.1.conv2.weight"], bent["encoder.mid.attn_1.k.bias"]
    bent["encoder.down.9x.block"] = torch.zeros(2)
    bent["quant_conv.weight"] = torch.zeros(3, 3, 1, 1)
    bent["encoder.mid.attn_1.q.weight"] = torch.zeros(64, 64, 3, 3)
    write_vae(tmp_path / "bent.ckpt", bent)
    with pytest.raises(GenError) as raised:
        load_ldm_vae(tmp_path / "bent.ckpt", scaling_factor=SCALE)
    said = str(raised.value)
    for key in (
        "decoder.up_blocks.0.resnets.1.conv2.weight",
        "mid_block.attentions.0.to_k.bias",
        "encoder.down.9x.block",
        "quant_conv.weight",
        "encoder.mid.attn_1.q.weight",
    ):
        assert key in said
    assert "loss." not in said


def test_files_of_something_else_are_refused(tmp_path, weights):
    write_vae(tmp_path / "other.ckpt", {"layers.0.weight": torch.zeros(2, 2)})
    with pytest.raises(GenError, match="encoder.conv_in.weight"):
        load_ldm_vae(tmp_path / "other.ckpt", scaling_factor=SCALE)
    gap = {k: v for k, v in weights.items() if not k.startswith("encoder.down.1.")}
    write_vae(tmp_path / "gap.ckpt", gap)
    with pytest.raises(GenError, match="encoder.down.1.block.0.conv1.weight"):
        load_ldm_vae(tmp_path / "gap.ckpt", scaling_factor=SCALE)


class Trap:
    sprung = 0

    def __reduce__(self):
        return spring, ()


def spring():
    Trap.sprung += 1


@pytest.mark.parametrize("protocol", ["torch", "pickle"])
def test_a_pickle_of_other_objects_is_refused_and_does_nothing(tmp_path, weights, protocol):
    path = tmp_path / "trap.ckpt"
    found = {"model": {**weights, "callback": Trap()}}
    (
        torch.save(found, path)
        if protocol == "torch"
        else path.write_bytes(pickle.dumps(found, protocol=2))
    )
    with pytest.raises(GenError, match="trap.ckpt"):
        load_ldm_vae(path, scaling_factor=SCALE)
    assert not Trap.sprung
    pickle.loads(pickle.dumps(Trap()))
    assert Trap.sprung
    Trap.sprung = 0
