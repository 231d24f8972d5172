"""The image tokenizers of Chameleon and MoVQGAN against other classes with the same weights, from
files as they are published."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from chameleon_files import CODES, diffusers_vq, shaken, vqgan_keys, write_vqgan
from safetensors.torch import save_file

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.models.load.weights import without_storage
from gen.tokenizers.image.chameleon_vq import ChameleonVQ
from gen.tokenizers.image.taming_vq_net import Half, Sizes, TamingVQ

KINDS = {"chameleon": False, "movqgan": True}


@pytest.fixture(scope="module")
def models():
    return {name: diffusers_vq(modulated) for name, modulated in KINDS.items()}


@pytest.fixture(scope="module")
def files(models, tmp_path_factory):
    """Meta's wrapping for the one, a bare state for the other."""
    folder = tmp_path_factory.mktemp("vq")
    torch.save(vqgan_keys(models["movqgan"]), folder / "movqgan_270M.ckpt")
    return {
        "chameleon": write_vqgan(folder / "vqgan.ckpt", vqgan_keys(models["chameleon"])),
        "movqgan": folder / "movqgan_270M.ckpt",
    }


@pytest.fixture(scope="module")
def frontends(files):
    return {
        name: ChameleonVQ.from_pretrained(path, dtype=torch.float64) for name, path in files.items()
    }


def images(count: int = 3, h: int = 16, w: int = 24) -> torch.Tensor:
    return (
        torch.rand(count, 3, h, w, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        * 2
        - 1
    )


def codes_of(count: int = 3, h: int = 8, w: int = 12) -> torch.Tensor:
    return torch.randint(CODES, (count, 1, h, w), generator=torch.Generator().manual_seed(4))


@torch.no_grad()
def decoded_by_diffusers(model, codes: torch.Tensor) -> torch.Tensor:
    return model.decode(
        model.quantize.embedding.weight[codes[:, 0]].permute(0, 3, 1, 2), force_not_quantize=True
    ).sample


@pytest.mark.parametrize("name", KINDS)
def test_decoding_is_that_of_diffusers_with_the_same_weights(name, models, frontends):
    codes = codes_of()
    want, got = decoded_by_diffusers(models[name], codes), frontends[name].decode(codes)
    assert got.shape == (3, 3, 16, 24) and torch.allclose(got, want, atol=1e-9)
    assert (
        float((got - frontends[name].decode((codes + 1) % CODES)).abs().max()) > 0.1
    )  # control: other codes, another image


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_encoding_is_that_of_diffusers_with_the_same_weights(name, models, frontends):
    x = images()
    want = models[name].quantize(models[name].encode(x).latents)[2][2].view(3, 1, 8, 12)
    assert torch.equal(frontends[name].encode(x), want)
    assert not torch.equal(frontends[name].encode(x.flip(-1)), want)  # control


@pytest.mark.parametrize(
    "part", ["mid.block_1.conv1", "up.0.block.1.conv2", "up.1.block.0.norm1", "mid.attn_1.k"]
)
def test_every_part_of_the_decoder_matters(part, models, tmp_path):
    tensors = vqgan_keys(models["chameleon"])
    tensors[f"decoder.{part}.weight"] = tensors[f"decoder.{part}.weight"] * 1.5
    broken = ChameleonVQ.from_pretrained(
        write_vqgan(tmp_path / "vqgan.ckpt", tensors), dtype=torch.float64
    )
    codes = codes_of(1)
    assert (
        float((broken.decode(codes) - decoded_by_diffusers(models["chameleon"], codes)).abs().max())
        > 1e-6
    )


@torch.no_grad()
def test_encoder_and_codebook_are_those_of_transformers(models, frontends, tmp_path):
    from transformers import ChameleonVQVAE, ChameleonVQVAEConfig

    config = ChameleonVQVAEConfig(
        embed_dim=8,
        num_embeddings=CODES,
        latent_channels=8,
        resolution=32,
        base_channels=32,
        channel_multiplier=[1, 2],
        num_res_blocks=1,
    )
    torch.manual_seed(7)
    model = ChameleonVQVAE(config)
    model.quantize.embedding.weight.data.normal_()
    model = shaken(model, 7)
    x = images()
    want = model.encode(x).image_tokens.view(3, 1, 8, 12)
    decoder = {
        k: v.contiguous()
        for k, v in vqgan_keys(models["chameleon"]).items()
        if k.startswith("decoder.")
    }
    save_file(
        decoder, tmp_path / "vqgan.safetensors"
    )  # a decoder alone; all else as transformers has it
    frontend = ChameleonVQ.from_pretrained(tmp_path, dtype=torch.float64, rest=model.state_dict())
    assert torch.equal(frontend.encode(x), want) and torch.equal(
        frontend.codebooks[0], model.quantize.embedding.weight
    )
    assert not torch.equal(frontends["chameleon"].encode(x), want)  # control: another encoder


@torch.no_grad()
def test_a_decoder_with_attention_at_its_last_level_is_that_of_janus(models, tmp_path):
    """Its class has attention there, which Chameleon's decoder has not, and counts levels from the
    other end."""
    from transformers.models.janus.configuration_janus import JanusVQVAEConfig
    from transformers.models.janus.modeling_janus import JanusVQVAEDecoder

    torch.manual_seed(9)
    theirs = shaken(
        JanusVQVAEDecoder(
            JanusVQVAEConfig(
                latent_channels=8, base_channels=32, channel_multiplier=[1, 2], num_res_blocks=1
            )
        ),
        9,
    )
    turned = {"up.0.": "up.1.", "up.1.": "up.0."}
    keys = {
        k: "decoder." + next((turned[p] + k[len(p) :] for p in turned if k.startswith(p)), k)
        for k in theirs.state_dict()
    }
    tensors = {
        k: v for k, v in vqgan_keys(models["chameleon"]).items() if not k.startswith("decoder.")
    }
    tensors |= {keys[k]: v for k, v in theirs.state_dict().items()}
    frontend = ChameleonVQ.from_pretrained(
        write_vqgan(tmp_path / "vqgan.ckpt", tensors), dtype=torch.float64
    )
    codes = codes_of()
    latents = frontend.model.post_quant_conv(frontend.codebooks[0][codes[:, 0]].permute(0, 3, 1, 2))
    assert torch.allclose(frontend.decode(codes), theirs(latents), atol=1e-9)


@pytest.mark.parametrize("name", KINDS)
def test_a_row_is_the_same_alone_and_in_a_batch(name, frontends):
    frontend, x = frontends[name], images()
    codes = frontend.encode(x)
    assert codes.dtype == torch.long and codes.shape == (
        3,
        1,
        *frontend.grid_for(tuple(x.shape[1:])),
    )
    assert torch.equal(codes, torch.cat([frontend.encode(row[None]) for row in x]))
    assert frontend.decode(codes).shape == x.shape
    assert torch.allclose(frontend.decode(codes)[1], frontend.decode(codes[1:2])[0], atol=1e-10)


@pytest.mark.parametrize("name", KINDS)
def test_a_frontend_that_is_saved_and_loaded_is_the_same(name, frontends, tmp_path):
    frontend = frontends[name]
    frontend.save_pretrained(tmp_path)
    again = registry.get("tokenizer", "chameleon_vq").from_pretrained(tmp_path, dtype=torch.float64)
    assert again.config == frontend.config and torch.equal(again.fingerprint, frontend.fingerprint)
    assert torch.equal(again.decode(codes_of()), frontend.decode(codes_of())) and torch.equal(
        again.encode(images()), frontend.encode(images())
    )
    image = frontend.postprocess(frontend.decode(codes_of(1))[0])
    assert image.size == (24, 16) and frontend.preprocess(image).shape == (3, 16, 24)


def test_sizes_are_read_off_the_published_shapes():
    """The figures of Meta's file (levels 1, 1, 2, 2, 4 times 128 channels, two blocks) and of the
    270M one of MoVQGAN."""

    def half(channels, blocks, attention):
        return dict(channels=channels, blocks=blocks, attention=attention, middle=True)

    chameleon, movq = (128, 128, 256, 256, 512), (256, 512, 512, 1024)
    for sizes in (
        Sizes(
            Half(**half(chameleon, 2, ())), Half(**half(chameleon, 3, ())), 8192, 256, 256, False
        ),
        Sizes(Half(**half(movq, 2, (3,))), Half(**half(movq, 3, (3,))), 16384, 4, 4, True),
    ):
        model = without_storage(lambda sizes=sizes: TamingVQ(sizes))
        shapes = {k: tuple(v.shape) for k, v in model.state_dict().items()}
        assert Sizes.of(shapes) == sizes and model.factor == (8 if sizes.modulated else 16)
        plain = {k: v for k, v in shapes.items() if "decoder.up.3.attn" not in k}
        assert (Sizes.of(plain) == sizes) == (
            not sizes.modulated
        )  # control: attention is told by its keys
        assert round(sum(p.numel() for p in model.parameters()) / 1e6) in (
            (270, 271) if sizes.modulated else range(60, 90)
        )
        assert Sizes.of(shapes) != replace(sizes, codes=sizes.codes + 1)


def test_what_is_no_image_tokenizer_is_refused(models, files, tmp_path):
    tensors = vqgan_keys(models["chameleon"])
    cases = {
        "lack 'decoder.conv_in.weight'": {
            k: v for k, v in tensors.items() if not k.startswith("decoder.")
        },
        "1 missing: decoder.up.1.block.0.conv2.bias": {
            k: v for k, v in tensors.items() if k != "decoder.up.1.block.0.conv2.bias"
        },
        "1 extra: decoder.up.9.gain": tensors | {"decoder.up.9.gain": torch.zeros(2)},
        "1 mis-shaped: decoder.conv_out.bias": tensors | {"decoder.conv_out.bias": torch.zeros(4)},
        "no decoder of a VQGAN": {
            k.replace("decoder.up.", "decoder.upper."): v for k, v in tensors.items()
        },
    }
    for message, broken in cases.items():
        with pytest.raises(GenError, match=message):
            ChameleonVQ.from_pretrained(write_vqgan(tmp_path / "vqgan.ckpt", broken))
    other = {"quantize.embedding.weight": tensors["quantize.embedding.weight"].flip(0)}
    with pytest.raises(GenError, match="codebook of .* is not the model's own"):
        ChameleonVQ.from_pretrained(files["chameleon"], rest=other)
    rounded = {"quantize.embedding.weight": tensors["quantize.embedding.weight"].bfloat16()}
    assert ChameleonVQ.from_pretrained(files["chameleon"], rest=rounded).config.codebook_sizes == (
        CODES,
    )  # control


def test_codes_and_images_that_do_not_fit_are_refused(frontends):
    frontend = frontends["chameleon"]
    for bad in (codes_of() - 1, codes_of() + 1, codes_of()[:, 0]):
        with pytest.raises(GenError, match="expected"):
            frontend.decode(bad)
    with pytest.raises(GenError, match="divisible by 2"):
        frontend.preprocess(np.zeros((15, 16, 3), np.uint8))
