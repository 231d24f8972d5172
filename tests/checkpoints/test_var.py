"""VAR from its published layout: the network, the quantiser and the autoencoder against a plain
forward over the published keys, and images."""

from __future__ import annotations

import plain_var
import pytest
import torch
from calls import only
from safetensors.torch import save_file
from var_layout import (
    BLOCKS,
    CHANNELS,
    CLASSES,
    CODES,
    HEADS,
    OPTIONS,
    SIDES,
    WIDTH,
    lengths,
    vae_weights,
    var_weights,
    write_var,
)

import gen
from gen.contracts.checkpoint import CheckpointFiles, family_of
from gen.core.errors import GenError
from gen.modalities.checkpoints.var import VARImages
from gen.models.load.weights import Weights, without_storage
from gen.models.nets.var import VAR, VARConfig
from gen.models.nets.var_vae import load_var_vae
from gen.models.published.var import SCALES, VARLM, config_of, load_var

FORMS = [(False, True), (False, False), (True, True), (True, False)]  # shared norms, unit vectors
PAIRS = [(side, side) for side in SIDES]
LABELS = torch.tensor([3, CLASSES])  # the second is the null class


def far(a, b) -> float:
    return float((a - b).abs().max())


def double(weights):
    return {k: v.double() for k, v in weights.items()}


@pytest.fixture(scope="module")
def vae():
    return double(vae_weights())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_var(tmp_path_factory.mktemp("var"))


@pytest.fixture(scope="module")
def autoencoder(folder):
    return load_var_vae(folder / "vae_ch160v4096z32.pth", PAIRS, dtype=torch.float64)


@pytest.fixture(scope="module")
def images():
    random = torch.Generator().manual_seed(2)
    return torch.rand(2, 3, 16, 16, generator=random, dtype=torch.float64) * 2 - 1


@pytest.fixture(scope="module")
def ids():
    random = torch.Generator().manual_seed(3)
    return torch.randint(CODES, (2, sum(lengths())), generator=random)


@pytest.fixture(scope="module", params=FORMS, ids=lambda form: f"shared{form[0]}-l2{form[1]}")
def form(request, tmp_path_factory):
    """Weights of one form in float64, and the network of a file of them."""
    shared, l2_norm = request.param
    weights = var_weights(shared=shared, l2_norm=l2_norm)
    file = tmp_path_factory.mktemp("form") / "var_d2.pth"
    torch.save(weights, file)
    model = load_var(Weights(file), "var", scales=list(SIDES), heads=HEADS, dtype=torch.float64)
    return double(weights), model


def plain(weights, vae, ids, **options):
    """Logits [B, T, V] of the plain forward, of the labels."""
    return torch.stack(
        [
            plain_var.var_logits(weights, vae, int(label), row, SIDES, heads=HEADS, **options)
            for label, row in zip(LABELS, ids, strict=True)
        ]
    )


def maps_of(autoencoder, ids):
    """What every scale reads, with zeros for the first."""
    zeros = torch.zeros(len(ids), 1, CHANNELS, dtype=torch.float64)
    return [zeros, *autoencoder.quantize.inputs(ids).split(lengths()[1:], 1)]


def test_features_and_pixels_equal_a_plain_forward(vae, autoencoder, images):
    found = autoencoder.features(images)
    expected = torch.stack([plain_var.features(vae, image) for image in images])
    assert far(found, expected) < 1e-10
    made = autoencoder.pixels(expected)
    assert far(made, torch.stack([plain_var.pixels(vae, f) for f in expected])) < 1e-10
    for wrong in ("left", "kqv"):
        assert far(found[0], plain_var.features(vae, images[0], wrong)) > 1e-3, wrong
    assert far(made[0], plain_var.pixels(vae, expected[0], "kqv")) > 1e-3


def test_codes_and_their_sum_equal_a_plain_quantiser(vae, autoencoder, images):
    f = autoencoder.features(images)
    found = autoencoder.quantize.encode(f)
    assert torch.equal(found, torch.stack([plain_var.quantised(vae, x, SIDES) for x in f]))
    total = autoencoder.quantize.decode(found)
    assert far(total, torch.stack([plain_var.sums(vae, row, SIDES)[-1] for row in found])) < 1e-10
    other = plain_var.quantised(vae, f[0], SIDES, "phi")
    assert bool((other != found[0]).any())
    assert far(total[0], plain_var.sums(vae, found[0], SIDES, "phi")[-1]) > 1e-2


def test_logits_equal_a_plain_forward(form, vae, autoencoder, ids):
    weights, model = form
    found = model(LABELS, autoencoder.quantize.inputs(ids))
    assert far(found, plain(weights, vae, ids)) < 1e-10
    # the softmax of attention without unit vectors does not change with a bias of the keys
    by_norm = ("k bias", "no limit") if model.config.l2_norm else ("usual scale",)
    for wrong in ("order", "phi", *by_norm):
        assert far(found, plain(weights, vae, ids, wrong=wrong)) > 1e-2, wrong
    assert far(found, plain(weights, vae, ids, markov=True)) > 1e-2


def test_logits_in_single_precision_are_within_rounding(folder, vae, ids):
    weights = var_weights()
    frontend = load_var_vae(folder / "vae_ch160v4096z32.pth", PAIRS)
    model = load_var(Weights(folder / "var_d2.pth"), "var", scales=list(SIDES))
    found = model(LABELS, frontend.quantize.inputs(ids))
    expected = plain(double(weights), vae, ids)
    assert far(found, expected) < 1e-5 * max(1.0, float(expected.abs().max()))


def test_scale_by_scale_with_a_cache_equals_one_pass(form, autoencoder, ids):
    model = form[1]
    lm, maps = VARLM(model, autoencoder.quantize), maps_of(autoencoder, ids)
    whole = model(LABELS, torch.cat(maps[1:], 1)).split(lengths(), 1)
    state = lm.begin(LABELS[:, None], torch.ones(2, dtype=torch.long))
    for scale, x in enumerate(maps):
        assert far(lm.fill(state, x, scale), whole[scale]) < 1e-10
        if scale == 1:  # rows that are picked, and repeated, go on as they would have
            rows = torch.tensor([1, 0, 1])
            other = state.select(rows)
    for scale in (2, 3):
        assert far(lm.fill(other, maps[scale][rows], scale), whole[scale][rows]) < 1e-10
    late = lm.begin(LABELS[:, None], torch.ones(2, dtype=torch.long))
    lm.fill(late, maps[0], 0)
    lm.fill(late, maps[1] + 1, 1)
    assert far(lm.fill(late, maps[2], 2), whole[2]) > 1e-3  # control: earlier scales are seen


def test_the_head_computes_in_float32_under_half_precision(folder, autoencoder, ids):
    model = load_var(
        Weights(folder / "var_d2.pth"), "var", scales=list(SIDES), dtype=torch.bfloat16
    )
    maps = autoencoder.quantize.inputs(ids)
    found, exact = model(LABELS, maps), plain(double(var_weights()), double(vae_weights()), ids)
    assert model.class_emb.weight.dtype == torch.bfloat16 and found.dtype == torch.float32
    assert 1e-4 < far(found, exact) < 0.2 * float(exact.abs().max())


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_what_is_made_is_the_published_loop(folder, vae, scale):
    """Greedy tokens of one pass per scale, with guidance that grows from scale to scale."""
    pipe = gen.load("image", model=folder, dtype="float64", **OPTIONS)
    sampling = only(temperature=0.0, guidance_scale=scale)
    out = pipe(["4", "class 9"], sampler="next_scale", seed=1, **sampling)
    assert [s.nfe for s in out.stats] == [len(SIDES)] * 2
    weights, kept = double(var_weights()), {}
    for grows in (True, False):
        for row, label in enumerate((4, 9)):
            ids = torch.zeros(sum(lengths()), dtype=torch.long)
            for k, n in enumerate(lengths()):
                here = slice(sum(lengths()[:k]), sum(lengths()[:k]) + n)
                with_it, without = (
                    plain_var.var_logits(weights, vae, c, ids, SIDES, heads=HEADS)[here]
                    for c in (label, CLASSES)
                )
                t = (scale - 1) * (k / (len(SIDES) - 1) if grows else 1)
                ids[here] = ((1 + t) * with_it - t * without).argmax(-1)
            kept[grows, row] = ids
    for row, medium in enumerate(out.media):
        assert out.tokens[row].tolist() == kept[True, row].tolist()
        f = plain_var.sums(vae, kept[True, row], SIDES)[-1]
        image = ((plain_var.pixels(vae, f).clamp(-1, 1) + 1) * 127.5).round().byte()
        shown = torch.tensor(list(medium.convert("RGB").tobytes())).view(16, 16, 3)
        assert far(shown.permute(2, 0, 1).int(), image.int()) <= 1
    changed = any(kept[True, row].tolist() != kept[False, row].tolist() for row in (0, 1))
    assert changed == (scale != 1.0)  # control: guidance that does not grow


def test_an_image_comes_back_from_its_codes(folder, vae, images):
    pipe = gen.load("image", model=folder, dtype="float64", **OPTIONS)
    frontend = pipe.components["frontend"]
    codes = frontend.encode(images)
    assert codes.shape == (2, 1, sum(lengths())) and frontend.grid == (sum(lengths()),)
    expected = [plain_var.quantised(vae, plain_var.features(vae, x), SIDES) for x in images]
    assert torch.equal(codes[:, 0], torch.stack(expected))
    made = torch.stack(
        [plain_var.pixels(vae, plain_var.sums(vae, row, SIDES)[-1]) for row in codes[:, 0]]
    )
    assert far(frontend.decode(codes), made) < 1e-10


@pytest.mark.parametrize("pixels", SCALES)
def test_the_published_lists_follow_from_the_shapes(pixels):
    sides = SCALES[pixels]
    positions = sum(side**2 for side in sides)
    shapes = {
        "class_emb.weight": (1001, 1024),
        "pos_start": (1, 1, 1024),
        "pos_1LC": (1, positions, 1024),
        "lvl_embed.weight": (len(sides), 1024),
        "word_embed.weight": (1024, 32),
        "head.weight": (4096, 1024),
        **{f"blocks.{n}.ffn.fc1.weight": (4096, 1024) for n in range(16)},
        "blocks.0.attn.scale_mul_1H11": (1, 16, 1, 1),
    }
    config = config_of(shapes, "var_d16.pth")
    assert config.sides == tuple((side, side) for side in sides)
    assert (config.width, config.heads, config.blocks) == (1024, 16, 16)
    assert (config.codes, config.channels, config.classes) == (4096, 32, 1000)
    assert sides[-1] * 16 == pixels and not config.shared and not config.markov
    shapes["pos_1LC"] = (1, positions + 1, 1024)
    with pytest.raises(GenError, match="none of the published lists.*the option scales"):
        config_of(shapes, "var_d16.pth")


@pytest.mark.parametrize(
    ("depth", "pixels", "shared", "millions"),
    [(16, 256, False, 310), (20, 256, False, 601), (24, 256, False, 1033), (36, 512, True, 2354)],
)
def test_networks_of_the_published_sizes_have_the_published_parameters(
    depth, pixels, shared, millions
):
    width = 64 * depth
    sides = tuple((side, side) for side in SCALES[pixels])
    sizes = (4096, 32, 1000, width, 4 * width, depth, depth)
    model = without_storage(lambda: VAR(VARConfig(sides, *sizes, shared=shared)))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions


def test_the_published_256_list_needs_no_option(tmp_path):
    sides = SCALES[256]
    write_var(tmp_path, var_weights(sides=sides, blocks=1))
    pipe = gen.load("image", model=tmp_path)
    out = pipe("class 7", sampler="next_scale", seed=0)
    assert out.tokens.shape == (1, 680) and out.media[0].size == (64, 64)
    assert pipe.config["sampling"] == {"guidance_scale": 2.5, "top_k": 900, "top_p": 0.96}


def test_the_next_scale_model_of_hmar_is_not_taken_for_var(tmp_path):
    """Their keys are the same; the mask of the training tells them apart."""
    folder = write_var(tmp_path, var_weights(markov=True))
    with pytest.raises(GenError, match=r"var_d2.pth is the next-scale model of HMAR alone"):
        gen.load("image", model=folder, **OPTIONS)
    write_var(tmp_path, var_weights(markov=False))
    assert gen.load("image", model=folder, **OPTIONS)("3", seed=0).media[0].size == (16, 16)


@pytest.mark.parametrize("wrapper", ["", "model", "safetensors"])
def test_files_load_in_every_wrapper(tmp_path, wrapper):
    weights = {k: v for k, v in var_weights().items() if not k.startswith(("lvl_1L", "attn_bias"))}
    file = tmp_path / f"transformer.{'safetensors' if wrapper == 'safetensors' else 'pth'}"
    if wrapper == "safetensors":
        save_file(weights, file)
    else:
        torch.save({wrapper: weights} if wrapper else weights, file)
    torch.save(vae_weights(), tmp_path / "tokenizer.pth")
    for path in (file, tmp_path):
        assert family_of(CheckpointFiles.find(path), "image") is VARImages
        made = gen.load("image", model=path, **OPTIONS)("3", sampler="next_scale", seed=1)
        assert made.tokens.shape == (1, sum(lengths()))


BAD_OPTIONS = {
    "[1, 2, 3, 5]": ({"scales": [1, 2, 3, 5]}, "scales is .*4 square scales with 30 positions"),
    "text": ({"scales": "1234"}, "scales is '1234'"),
    "no scales": ({}, "4 scales of 30 positions.*none of the published lists"),
    "heads": ({**OPTIONS, "heads": 5}, f"heads is 5; expected {HEADS}"),
    "vae": ({**OPTIONS, "vae": "nowhere.pth"}, "vae is 'nowhere.pth'"),
    "device_map": ({**OPTIONS, "device_map": "autos"}, "unknown device_map 'autos'"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options_are_one_error(folder, case):
    options, said = BAD_OPTIONS[case]
    with pytest.raises(GenError, match=said) as error:
        gen.load("image", model=folder, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("prompt", [str(CLASSES), "class 99999", "-1", "goldfish", ""])
def test_a_class_out_of_range_is_one_error(folder, prompt):
    pipe = gen.load("image", model=folder, **OPTIONS)
    with pytest.raises(GenError, match=f"number of a class.*below {CLASSES}|prompt"):
        pipe(prompt, sampler="next_scale", seed=0)


def test_a_missing_or_another_autoencoder_is_one_error(tmp_path):
    write_var(tmp_path)
    vae = tmp_path / "vae_ch160v4096z32.pth"
    torch.save(vae_weights(codes=CODES + 1), vae)
    with pytest.raises(GenError, match=f"predicts {CODES} codes.*has {CODES + 1} codes"):
        gen.load("image", model=tmp_path, **OPTIONS)
    torch.save({k: v for k, v in vae_weights().items() if "quant_resi" not in k}, vae)
    with pytest.raises(GenError, match="quantize.quant_resi.qresi_ls.0.weight is missing"):
        gen.load("image", model=tmp_path, **OPTIONS)
    spoiled = vae_weights()
    spoiled["encoder.mid.attn_1.qkv.weight"] = spoiled["encoder.mid.attn_1.qkv.weight"][:-1]
    torch.save(spoiled, vae)
    with pytest.raises(GenError, match="encoder.mid.attn_1.qkv.weight.*three equal parts"):
        gen.load("image", model=tmp_path, **OPTIONS)
    vae.unlink()
    with pytest.raises(GenError, match="no vae_ch160v4096z32.pth"):
        gen.load("image", model=tmp_path, **OPTIONS)


def test_several_models_in_a_folder_are_one_error(tmp_path):
    write_var(tmp_path)
    torch.save(var_weights(1), tmp_path / "var_d20.pth")
    with pytest.raises(GenError, match=r"var_d2.pth, var_d20.pth; expected the path of one"):
        gen.load("image", model=tmp_path, **OPTIONS)
    made = [
        gen.load("image", model=path, **OPTIONS, **options)("3", seed=0).tokens
        for name in ("var_d2.pth", "var_d20.pth")
        for path, options in ((tmp_path / name, {}), (tmp_path, {"transformer": name}))
    ]
    assert torch.equal(made[0], made[1]) and torch.equal(made[2], made[3])
    assert not torch.equal(made[0], made[2])
    with pytest.raises(GenError, match="transformer is 'var_d9.pth'.*var_d2.pth, var_d20.pth"):
        gen.load("image", model=tmp_path, transformer="var_d9.pth", **OPTIONS)


def test_weights_of_another_network_are_one_error(tmp_path):
    folder = write_var(tmp_path)
    file, weights = folder / "var_d2.pth", var_weights()
    torch.save({k: v for k, v in weights.items() if k != "word_embed.weight"}, file)
    with pytest.raises(GenError, match="not those of VAR.*word_embed.weight"):
        gen.load("image", model=folder, **OPTIONS)
    torch.save({**weights, "blocks.0.attn.scale_mul_1H11": torch.ones(1, 5, 1, 1)}, file)
    with pytest.raises(GenError, match="scale_mul_1H11.*divisor"):
        gen.load("image", model=folder, **OPTIONS)
    torch.save({k: v for k, v in weights.items() if f"blocks.{BLOCKS - 1}.ffn" not in k}, file)
    with pytest.raises(GenError, match=rf"missing: blocks.{BLOCKS - 1}.ffn"):
        gen.load("image", model=folder, **OPTIONS)


def test_a_model_without_unit_vectors_needs_its_heads(tmp_path):
    folder = write_var(tmp_path, var_weights(l2_norm=False))
    with pytest.raises(GenError, match=f"heads.*a divisor of the width {WIDTH}"):
        gen.load("image", model=folder, **OPTIONS)
    pipe = gen.load("image", model=folder, heads=HEADS, **OPTIONS)
    assert pipe("3", sampler="next_scale", seed=0).tokens.shape == (1, sum(lengths()))


def test_vectors_of_class_conditions_only(folder):
    pipe = gen.load("image", model=folder, **OPTIONS)
    lm = pipe.bound(pipe.model)[0].adapter("scales")
    with pytest.raises(GenError, match="expected one, the number of a class"):
        lm.begin(torch.zeros(2, 3, dtype=torch.long), torch.full((2,), 3))
    state = lm.begin(LABELS[:, None], torch.ones(2, dtype=torch.long))
    hidden = torch.ones(2, 4, dtype=torch.bool)
    with pytest.raises(GenError, match="no blocks that refine"):
        lm.refine(state, torch.zeros(2, 4, CHANNELS), hidden.long(), hidden, 1)
