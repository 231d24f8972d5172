"""The VQ autoencoder of LlamaGen: what it computes is written out here a second time, over the
published keys."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from tiny_llamagen_vq import vq_weights
from torch import Tensor

from gen.core.errors import GenError
from gen.models.load.weights import without_storage
from gen.tokenizers.image.llamagen_vq import LlamaGenVQ
from gen.tokenizers.image.llamagen_vq_net import LlamaGenVQModel, vq_sizes_of

EXACT, WRONG = 1e-10, 1e-3


class Plain:
    """The same over the keys, step by step. Broken on purpose by ``wrong``."""

    def __init__(self, weights: dict[str, Tensor], wrong: str = ""):
        self.w, self.wrong = {k: v.double() for k, v in weights.items()}, wrong

    def conv(self, key, x, **how):
        return F.conv2d(x, self.w[key + ".weight"], self.w[key + ".bias"], **how)

    def norm(self, key, x):
        grouped = x.unflatten(1, (32, -1))
        mean = grouped.mean((2, 3, 4), keepdim=True)
        var = ((grouped - mean) ** 2).mean((2, 3, 4), keepdim=True)
        return ((grouped - mean) / (var + 1e-6).sqrt()).flatten(1, 2) * self.w[key + ".weight"][
            :, None, None
        ] + self.w[key + ".bias"][:, None, None]

    def act(self, x):
        return x * x.sigmoid()

    def res(self, key, x):
        h = self.conv(key + ".conv1", self.act(self.norm(key + ".norm1", x)), padding=1)
        h = self.conv(key + ".conv2", self.act(self.norm(key + ".norm2", h)), padding=1)
        return h + (
            self.conv(key + ".nin_shortcut", x) if key + ".nin_shortcut.weight" in self.w else x
        )

    def attention(self, key, x):
        if key + ".q.weight" not in self.w or self.wrong == "no attention":
            return x
        q, k, v = (self.conv(f"{key}.{p}", self.norm(key + ".norm", x)).flatten(2) for p in "qkv")
        shares = (torch.einsum("bci,bcj->bij", q, k) / x.shape[1] ** 0.5).softmax(2)
        return x + self.conv(
            key + ".proj_out", torch.einsum("bij,bcj->bci", shares, v).view(x.shape)
        )

    def mid(self, half, x):
        return self.res(
            f"{half}.mid.2", self.attention(f"{half}.mid.1", self.res(f"{half}.mid.0", x))
        )

    def levels(self, half, x):
        n = 0
        while f"{half}.conv_blocks.{n}.res.0.conv1.weight" in self.w:
            key, m = f"{half}.conv_blocks.{n}", 0
            while f"{key}.res.{m}.conv1.weight" in self.w:
                x = self.attention(f"{key}.attn.{m}", self.res(f"{key}.res.{m}", x))
                m += 1
            if key + ".downsample.conv.weight" in self.w:
                left_padding = (1, 0, 1, 0) if self.wrong == "padded on the left" else (0, 1, 0, 1)
                x = self.conv(key + ".downsample.conv", F.pad(x, left_padding), stride=2)
            if key + ".upsample.conv.weight" in self.w:
                x = self.conv(
                    key + ".upsample.conv",
                    x.repeat_interleave(2, 2).repeat_interleave(2, 3),
                    padding=1,
                )
            n += 1
        return x

    def out(self, half, x):
        return self.conv(f"{half}.conv_out", self.act(self.norm(f"{half}.norm_out", x)), padding=1)

    @property
    def vectors(self):
        e = self.w["quantize.embedding.weight"]
        return e if self.wrong == "vectors as stored" else e / (e**2).sum(1, keepdim=True).sqrt()

    def latents(self, x):
        h = self.levels("encoder", self.conv("encoder.conv_in", x, padding=1))
        return self.conv("quant_conv", self.out("encoder", self.mid("encoder", h)))

    def encode(self, x):
        z = self.latents(x).movedim(1, -1)
        z = z / (z**2).sum(-1, keepdim=True).sqrt()
        return ((z[..., None, :] - self.vectors) ** 2).sum(-1).argmin(-1)[:, None]

    def decode(self, codes):
        x = self.conv("post_quant_conv", self.vectors[codes[:, 0]].movedim(-1, 1))
        return self.out(
            "decoder",
            self.levels("decoder", self.mid("decoder", self.conv("decoder.conv_in", x, padding=1))),
        )


def load(path, dtype=torch.float64):
    return LlamaGenVQ.from_pretrained(path, dtype=dtype)


def saved(folder, weights, name="vq_ds16_c2i.pt", wrapper="model"):
    torch.save({wrapper: weights, "steps": 3} if wrapper else weights, folder / name)
    return folder / name


@pytest.fixture(scope="module")
def weights():
    return vq_weights()


@pytest.fixture(scope="module")
def vq(weights, tmp_path_factory):
    return load(saved(tmp_path_factory.mktemp("vq"), weights))


@pytest.fixture(scope="module")
def images():
    return (
        torch.rand(3, 3, 16, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        * 2
        - 1
    )


@pytest.fixture(scope="module")
def codes():
    return torch.randint(24, (3, 1, 4, 6), generator=torch.Generator().manual_seed(2))


def test_latents_codes_and_images_equal_a_plain_forward(vq, weights, images, codes):
    plain = Plain(weights)
    with torch.no_grad():
        latents = vq.model.quant_conv(vq.model.encoder(images))
    assert (latents - plain.latents(images)).abs().max() < EXACT
    assert torch.equal(vq.encode(images), plain.encode(images))
    assert (vq.decode(codes) - plain.decode(codes)).abs().max() < EXACT


@pytest.mark.parametrize("wrong", ["no attention", "padded on the left", "vectors as stored"])
def test_a_broken_forward_is_another_one(vq, weights, images, codes, wrong):
    plain = Plain(weights, wrong)
    with torch.no_grad():
        latents = vq.model.quant_conv(vq.model.encoder(images))
    far = max(
        float((latents - plain.latents(images)).abs().max()),
        float((vq.decode(codes) - plain.decode(codes)).abs().max()),
    )
    assert far > WRONG


def test_the_codebook_is_what_decoding_looks_up_and_has_length_one(vq, codes):
    (table,) = vq.codebooks
    assert table.shape == (24, 8) and (table.norm(dim=1) - 1).abs().max() < 1e-12
    with torch.no_grad():
        looked_up = vq.model.decoder(
            vq.model.post_quant_conv(table[codes[:, 0]].permute(0, 3, 1, 2))
        )
        other = vq.model.decoder(
            vq.model.post_quant_conv(table[codes[:, 0] - 1].permute(0, 3, 1, 2))
        )
    assert torch.equal(vq.decode(codes), looked_up)
    assert not torch.equal(vq.decode(codes), other)


def test_the_length_of_stored_vectors_changes_nothing(vq, weights, images, codes, tmp_path):
    lengths = (
        torch.rand(24, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.1
    )
    longer = load(
        saved(
            tmp_path,
            {
                **weights,
                "quantize.embedding.weight": weights["quantize.embedding.weight"] * lengths,
            },
        )
    )
    turned = load(
        saved(
            tmp_path,
            {**weights, "quantize.embedding.weight": weights["quantize.embedding.weight"].flip(1)},
            "turned.pt",
        )
    )
    assert (
        torch.equal(longer.encode(images), vq.encode(images))
        and (longer.decode(codes) - vq.decode(codes)).abs().max() < EXACT
    )
    assert (turned.decode(codes) - vq.decode(codes)).abs().max() > WRONG


def test_codes_of_the_codebooks_own_vectors_are_themselves(vq):
    """Encoding finds the vector that decoding would look up; no network is between."""
    table, model, wanted = vq.codebooks[0], copy.deepcopy(vq.model), torch.arange(24).view(1, 4, 6)
    model.encoder = model.quant_conv = torch.nn.Identity()
    assert torch.equal(model.encode(5 * table[wanted].permute(0, 3, 1, 2)), wanted)
    assert not torch.equal(model.encode(-table[wanted].permute(0, 3, 1, 2)), wanted)


def test_a_batch_gives_what_its_rows_give_alone(vq, images, codes):
    assert torch.equal(vq.encode(images), torch.cat([vq.encode(p[None]) for p in images]))
    together, alone = vq.decode(codes), torch.cat([vq.decode(c[None]) for c in codes])
    assert (together - alone).abs().max() < EXACT and (together - alone.flip(0)).abs().max() > WRONG


def test_media_go_in_and_come_out_in_their_size(vq):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8))
    codes = vq.encode(vq.preprocess(image)[None])
    assert codes.dtype == torch.long and codes.shape == (1, 1, *vq.grid_for((3, 16, 24))) == (
        1,
        1,
        4,
        6,
    )
    again = vq.postprocess(vq.decode(codes)[0])
    assert again.size == image.size and again.mode == "RGB"
    with pytest.raises(GenError, match="divisible by 4"):
        vq.preprocess(image.resize((18, 16)))
    for wrong in (codes + 24, codes[:, 0], codes.repeat(1, 2, 1, 1)):
        with pytest.raises(GenError, match="expected"):
            vq.decode(wrong)


@pytest.mark.parametrize("wrapper", ["model", "module", "state_dict", None])
def test_every_wrapper_is_read(vq, weights, codes, tmp_path, wrapper):
    assert torch.equal(
        load(saved(tmp_path, weights, wrapper=wrapper)).decode(codes), vq.decode(codes)
    )


def test_a_folder_of_safetensors_is_read(vq, weights, codes, tmp_path):
    save_file(weights, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path).decode(codes), vq.decode(codes))


def test_other_keys_are_listed(weights, tmp_path):
    shape = {**weights, "decoder.norm_out.bias": torch.zeros(7)}
    lacks = {
        k: v
        for k, v in weights.items()
        if k not in ("decoder.mid.1.q.bias", "encoder.conv_blocks.2.attn.0.norm.bias")
    }
    for broken, words in (
        (shape, r"1 mis-shaped: decoder.norm_out.bias is \(7,\), expected \(32,\)"),
        (lacks, r"2 missing: decoder.mid.1.q.bias, .*conv_blocks.2.attn.0.norm.bias"),
        ({**weights, "discriminator.x": torch.zeros(1)}, "1 extra: discriminator.x"),
        (
            {k: v for k, v in weights.items() if not k.startswith("quantize")},
            "not those of LlamaGen's VQ: no quantize.embedding.weight",
        ),
        (
            {"tok_embeddings.weight": torch.zeros(2, 2)},
            "not those of LlamaGen's VQ: no encoder.conv_in.weight",
        ),
    ):
        with pytest.raises(GenError, match=words):
            load(saved(tmp_path, broken))


@pytest.mark.parametrize(
    ("name", "factors", "stride"), [("ds16", (1, 1, 2, 2, 4), 16), ("ds8", (1, 2, 2, 4), 8)]
)
def test_published_sizes_follow_from_the_shapes(name, factors, stride):
    published = vq_weights(tuple(128 * f for f in factors), latent=256, codes=16384, device="meta")
    sizes = vq_sizes_of({k: tuple(v.shape) for k, v in published.items()})
    assert (sizes.stride, sizes.stem, sizes.depth, sizes.latent, sizes.codes, sizes.code_dim) == (
        stride,
        128,
        2,
        256,
        16384,
        8,
    )
    own = without_storage(lambda: LlamaGenVQModel(sizes)).state_dict()
    assert {k: v.shape for k, v in own.items()} == {
        k: v.shape for k, v in published.items() if k != "quantize.codebook_used"
    }
