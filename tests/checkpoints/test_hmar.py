"""HMAR from its published layouts, one file and two: both passes against a plain forward over the
published keys, with and without the leak, and images."""

from __future__ import annotations

import plain_var
import pytest
import torch
from var_layout import (
    CHANNELS,
    CLASSES,
    CODES,
    HEADS,
    OPTIONS,
    SIDES,
    hmar_pair,
    hmar_weights,
    lengths,
    merged,
    vae_weights,
    var_weights,
    write_hmar,
)

import gen
from gen.contracts.checkpoint import CheckpointFiles, family_of
from gen.core.errors import GenError
from gen.modalities.checkpoints.hmar import HMARImages
from gen.models.load.weights import Weights
from gen.models.nets.var_vae import load_var_vae
from gen.models.published.var import VARLM, MergedWeights, load_var

PAIRS = [(side, side) for side in SIDES]
LABELS = torch.tensor([3, CLASSES])
NEXT_SCALE = {"parts": ("base_blocks", "ns_blocks"), "head": "ns_head", "markov": True}


def far(a, b) -> float:
    return float((a - b).abs().max())


def double(weights):
    return {k: v.double() for k, v in weights.items()}


@pytest.fixture(scope="module")
def vae():
    return double(vae_weights())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_hmar(tmp_path_factory.mktemp("hmar"))


@pytest.fixture(scope="module")
def quantize(folder):
    file = folder / "vae_ch160v4096z32.pth"
    return load_var_vae(file, PAIRS, dtype=torch.float64).quantize


@pytest.fixture(scope="module")
def model(folder):
    return load_var(Weights(folder / "hmar-d3.pth"), "x", scales=SIDES, dtype=torch.float64)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(CODES, (2, sum(lengths())), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def hidden():
    drawn = torch.rand(2, sum(lengths()), generator=torch.Generator().manual_seed(4))
    return drawn < 0.5


def begun(lm):
    return lm.begin(LABELS[:, None], torch.ones(2, dtype=torch.long))


def maps_of(quantize, ids):
    zeros = torch.zeros(len(ids), 1, CHANNELS, dtype=torch.float64)
    return [zeros, *quantize.inputs(ids).split(lengths()[1:], 1)]


def refined(lm, quantize, ids, hidden):
    """Logits [B, T - 1, V] of the refining pass, scale by scale from the second on."""
    state, parts = begun(lm), zip(*(x.split(lengths(), 1) for x in (ids, hidden)), strict=True)
    found = [
        lm.refine(state, maps, own, masked, scale)
        for scale, (maps, (own, masked)) in enumerate(
            zip(maps_of(quantize, ids), parts, strict=True)
        )
        if scale
    ]
    return torch.cat(found, 1)


def plain(weights, vae, ids, **options):
    return torch.stack(
        [
            plain_var.var_logits(weights, vae, int(label), row, SIDES, heads=HEADS, **options)
            for label, row in zip(LABELS, ids, strict=True)
        ]
    )


def plain_refined(weights, vae, ids, hidden, leak, **options):
    rows = zip(LABELS, ids, hidden, strict=True)
    found = [
        plain_var.mask_logits(weights, vae, int(c), i, h, SIDES, leak, heads=HEADS, **options)
        for c, i, h in rows
    ]
    return torch.stack(found)[:, 1:]


@pytest.mark.parametrize("shared", [False, True])
def test_the_pass_that_fills_equals_a_plain_forward(tmp_path, vae, quantize, ids, shared):
    weights = hmar_weights(shared=shared)
    torch.save(weights, tmp_path / "hmar.pth")
    model = load_var(Weights(tmp_path / "hmar.pth"), "x", scales=SIDES, dtype=torch.float64)
    whole = model(LABELS, quantize.inputs(ids))
    assert far(whole, plain(double(weights), vae, ids, **NEXT_SCALE)) < 1e-10
    lm = VARLM(model, quantize)
    state = begun(lm)
    scales = [lm.fill(state, x, k) for k, x in enumerate(maps_of(quantize, ids))]
    assert far(torch.cat(scales, 1), whole) < 1e-10
    for wrong in ({"markov": False}, {"wrong": "order"}, {"wrong": "phi"}):
        assert far(whole, plain(double(weights), vae, ids, **{**NEXT_SCALE, **wrong})) > 1e-2
    other = {**NEXT_SCALE, "parts": ("base_blocks", "mask_blocks"), "head": "mask_head"}
    assert far(whole, plain(double(weights), vae, ids, **other)) > 1e-2


@pytest.mark.parametrize("leak", [True, False])
def test_the_pass_that_refines_equals_a_plain_forward(model, vae, quantize, ids, hidden, leak):
    weights = double(hmar_weights())
    found = refined(VARLM(model, quantize, leak), quantize, ids, hidden)
    assert far(found, plain_refined(weights, vae, ids, hidden, leak)) < 1e-10
    assert far(found, plain_refined(weights, vae, ids, hidden, not leak)) > 1e-2
    for wrong in ("order", "k bias", "phi"):
        assert far(found, plain_refined(weights, vae, ids, hidden, leak, wrong=wrong)) > 1e-2


def test_scale_by_scale_equals_one_pass_of_the_refining_blocks(model, quantize, ids, hidden):
    first = lengths()[0]
    parts = zip(ids.split(lengths(), 1), hidden.split(lengths(), 1), strict=True)
    own = [quantize.own(i, h, k) for k, (i, h) in enumerate(parts)]
    whole = model(LABELS, quantize.inputs(ids), torch.cat(own[1:], 1), hidden[:, first:])
    found = refined(VARLM(model, quantize, leak=False), quantize, ids, hidden)
    assert far(found, whole[:, first:]) < 1e-10
    assert far(found, model(LABELS, quantize.inputs(ids))[:, first:]) > 1e-2  # the other blocks


@pytest.mark.parametrize("leak", [True, False])
def test_masked_ids_are_read_only_where_they_leak(model, quantize, ids, hidden, leak):
    lm, scale = VARLM(model, quantize, leak), 2
    here = slice(sum(lengths()[:scale]), sum(lengths()[: scale + 1]))
    own, masked = ids[:, here], hidden[:, here]
    assert bool(masked.any(1).all()) and not bool(masked.all())
    other = torch.where(masked, (own + 1) % CODES, own)
    maps = maps_of(quantize, ids)[scale]
    a, b = (lm.refine(begun(lm), maps, x, masked, scale) for x in (own, other))
    assert far(a, b) > 1e-2 if leak else torch.equal(a, b)
    known = torch.where(masked, own, (own + 1) % CODES)
    assert far(a, lm.refine(begun(lm), maps, known, masked, scale)) > 1e-2  # control


def test_histories_with_equal_sums_give_equal_logits(model, quantize, ids):
    """A scale sees the earlier ones through their reduced sum alone; VAR sees them as well."""
    lm, var = VARLM(model, quantize), var_like(model, quantize)
    for adapter, same in ((lm, True), (var, False)):
        found = []
        for history in (ids, (ids + 1) % CODES):
            state, maps = begun(adapter), maps_of(quantize, history)
            for scale in range(2):
                adapter.fill(state, maps[scale], scale)
            found.append(adapter.fill(state, maps_of(quantize, ids)[2], 2))
        assert (far(*found) == 0) == same


def var_like(model, quantize):
    """An adapter of VAR with the same quantiser."""
    weights = {k: v.double() for k, v in var_weights().items()}
    return VARLM(load_var(Given(weights), "x", scales=SIDES, dtype=torch.float64), quantize)


class Given(dict):
    """Weights in memory, as lazy mappings show them."""

    @property
    def shapes(self):
        return {k: tuple(v.shape) for k, v in self.items()}


def test_two_files_are_the_single_file(tmp_path):
    base, mask = hmar_pair()
    for name, weights in (("ns.pth", base), ("mask.pth", mask)):
        torch.save(weights, tmp_path / name)
    found = MergedWeights(Weights(tmp_path / "ns.pth"), Weights(tmp_path / "mask.pth"))
    expected = merged(base, mask)
    assert set(found) == set(expected) == set(found.shapes)
    for key, value in expected.items():
        assert torch.equal(found[key], value) and found.shapes[key] == tuple(value.shape), key
    changed = [k for k in expected if k.startswith("mask_blocks.") and "zero" not in k]
    assert not any(torch.equal(found[k], found[k.replace("mask_", "ns_", 1)]) for k in changed)


def test_both_layouts_make_the_same_images(tmp_path):
    base, mask = hmar_pair()
    write_hmar(tmp_path / "one", merged(base, mask))
    two = write_hmar(tmp_path / "two")
    (two / "hmar-d3.pth").unlink()
    torch.save(base, two / "ns-d9.pth")
    torch.save({"model": mask}, two / "mask-d9.pth")
    torch.save(var_weights(5, blocks=9, markov=True), tmp_path / "other.pth")
    models = {
        "one": (tmp_path / "one", {}),
        "folder": (two, {}),
        "file": (two / "mask-d9.pth", {}),
        "base": (two / "mask-d9.pth", {"base": "ns-d9.pth"}),
    }
    made = {}
    for name, (path, options) in models.items():
        assert family_of(CheckpointFiles.find(path), "image") is HMARImages
        pipe = gen.load("image", model=path, dtype="float64", **OPTIONS, **options)
        made[name] = [
            pipe(["3", "class 7"], sampler=sampler, seed=2).tokens
            for sampler in ("next_scale", "next_scale_masked")
        ]
    for name in ("folder", "file", "base"):
        assert all(torch.equal(a, b) for a, b in zip(made["one"], made[name], strict=True)), name
    assert not torch.equal(*made["one"])
    with pytest.raises(GenError, match="was not trained from .*pos_1LC differ"):
        gen.load("image", model=two / "mask-d9.pth", base=tmp_path / "other.pth", **OPTIONS)
    (two / "mask-d9.pth").unlink()
    with pytest.raises(GenError, match="ns-d9.pth is the next-scale model of HMAR alone"):
        gen.load("image", model=two, **OPTIONS)


def test_the_leak_is_on_unless_it_is_switched_off(folder):
    made, schedule = {}, [[1], [1, 3], [1, 2, 6], [1, 5, 10]]
    sampler = {"name": "next_scale_masked", "schedule": schedule}
    for leak in (None, True, False):
        options = OPTIONS if leak is None else {**OPTIONS, "leak": leak}
        pipe = gen.load("image", model=folder, dtype="float64", **options)
        assert pipe.bound(pipe.model)[0].adapter("refined_scales").leak == (leak is not False)
        made[leak] = pipe(["3", "class 7"], sampler=sampler, num_samples=3, seed=3).tokens
    assert torch.equal(made[None], made[True]) and not torch.equal(made[True], made[False])
    with pytest.raises(GenError, match="leak is 'no'; expected true or false"):
        gen.load("image", model=folder, leak="no", **OPTIONS)


@pytest.mark.parametrize(
    ("depth", "scale", "top_k"),
    [(16, 2.7, 1000), (20, 2.9, 950), (24, 3.1, 900), (30, 2.6, 650), (9, 2.7, 1000)],
)
def test_sampling_is_that_of_the_published_evaluation(tmp_path, depth, scale, top_k):
    torch.save(hmar_weights(base=depth - 8, tail=8), tmp_path / f"hmar-d{depth}.pth")
    files = CheckpointFiles.find(tmp_path)
    found = HMARImages.sampling_of(files, {})
    assert found == {"guidance_scale": scale, "top_k": top_k, "top_p": 0.99}


def test_bad_folders_are_one_error(tmp_path):
    base, mask = hmar_pair()
    folder = write_hmar(tmp_path)
    with pytest.raises(GenError, match="holds both passes and got the option base='x.pth'"):
        gen.load("image", model=folder, base="x.pth", **OPTIONS)
    torch.save(hmar_weights(1), folder / "hmar-d4.pth")
    with pytest.raises(GenError, match="hmar-d3.pth, hmar-d4.pth; expected the path of one"):
        gen.load("image", model=folder, **OPTIONS)
    for file in ("hmar-d3.pth", "hmar-d4.pth"):
        (folder / file).unlink()
    torch.save(mask, folder / "mask.pth")
    with pytest.raises(GenError, match="masked training of HMAR alone and has no next-scale"):
        gen.load("image", model=folder, **OPTIONS)
    with pytest.raises(GenError, match="base is 'nowhere.pth'"):
        gen.load("image", model=folder, base="nowhere.pth", **OPTIONS)
    torch.save(var_weights(markov=True), folder / "ns.pth")
    with pytest.raises(GenError, match="has 2 blocks and .* has 9; expected the same number"):
        gen.load("image", model=folder, **OPTIONS)
    torch.save(base, folder / "ns.pth")
    assert gen.load("image", model=folder, **OPTIONS)("3", seed=0).media[0].size == (16, 16)
