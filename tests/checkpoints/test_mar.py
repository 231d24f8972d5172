"""MAR from its published layout: the trunk against a plain forward, the head against the
posterior's formula, and images."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from calls import only
from mar_layout import (
    BLOCKS,
    BUFFER,
    CHANNELS,
    CLASSES,
    HEAD_DEPTH,
    HEAD_WIDTH,
    HEADS,
    OPTIONS,
    SIDE,
    STEPS,
    numbers,
    trunk_weights,
    vae_weights,
    write_trunk,
    write_vae,
)

import gen
from gen.contracts.checkpoint import CheckpointFiles
from gen.core.errors import GenError
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.modalities.checkpoints.mar import MARImages
from gen.models.adapters.denoising_path import HeadDistribution, log_density, noise_size, walk
from gen.models.load.weights import fill, without_storage
from gen.models.nets.mar_head import spaced
from gen.models.published.mar import MAR, MARConfig

POSITIONS = SIDE**2


def linear(w, at, x):
    return x @ w[f"{at}.weight"].T + w[f"{at}.bias"]


def norm(w, at, x):
    return F.layer_norm(x, x.shape[-1:], w[f"{at}.weight"], w[f"{at}.bias"], eps=1e-6)


def block(w, at, x, order="qkv"):
    parts = dict(
        zip(order, linear(w, f"{at}.attn.qkv", norm(w, f"{at}.norm1", x)).chunk(3, -1), strict=True)
    )
    q, k, v = (parts[n].view(len(x), HEADS, -1).transpose(0, 1) for n in "qkv")
    seen = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).softmax(-1) @ v
    x = x + linear(w, f"{at}.attn.proj", seen.transpose(0, 1).reshape(len(x), -1))
    h = linear(w, f"{at}.mlp.fc1", norm(w, f"{at}.norm2", x))
    return x + linear(w, f"{at}.mlp.fc2", h * (1 + torch.erf(h / math.sqrt(2))) / 2)


def plain_z(w, label, latents, order="qkv", leave=True, position=True, hide=True):
    """z [T, D] of one image from its label and latents [T, C], NaN at unknown places. The
    switches are controls."""
    known = torch.cat([torch.ones(BUFFER, dtype=torch.bool), ~latents.isnan().any(-1)])
    word = w["class_emb.weight"][label] if label < CLASSES else w["fake_latent"][0]
    x = torch.cat([word.expand(BUFFER, -1), linear(w, "z_proj", latents.nan_to_num())])
    x = norm(w, "z_proj_ln", x + w["encoder_pos_embed_learned"][0])
    x = x[known] if hide else x
    for n in range(BLOCKS):
        x = block(w, f"encoder_blocks.{n}", x, order)
    x = linear(w, "decoder_embed", norm(w, "encoder_norm", x))
    whole = w["mask_token"][0].repeat(len(known), 1)
    whole[known] = x if hide else x[known]
    x = whole + w["decoder_pos_embed_learned"][0]
    for n in range(BLOCKS):
        x = block(w, f"decoder_blocks.{n}", x, order)
    x = norm(w, "decoder_norm", x)
    x = x[BUFFER:] if leave else x[:POSITIONS]
    return x + w["diffusion_pos_embed_learned"][0] if position else x


def plain_head(w, x, t, z, swapped=False):
    """Noise and place of the variance [N, 2 C]."""
    at = "diffloss.net"
    angle = t * 10_000 ** (-torch.arange(128, dtype=x.dtype) / 128)
    wave = torch.cat([angle.sin(), angle.cos()] if swapped else [angle.cos(), angle.sin()])
    y = linear(
        w, f"{at}.time_embed.mlp.2", F.silu(linear(w, f"{at}.time_embed.mlp.0", wave))
    ) + linear(w, f"{at}.cond_embed", z)
    x = linear(w, f"{at}.input_proj", x)
    for n in range(HEAD_DEPTH):
        b = f"{at}.res_blocks.{n}"
        shift, scale, gate = linear(w, f"{b}.adaLN_modulation.1", F.silu(y)).chunk(3, -1)
        h = linear(w, f"{b}.mlp.0", norm(w, f"{b}.in_ln", x) * (1 + scale) + shift)
        x = x + gate * linear(w, f"{b}.mlp.2", F.silu(h))
    shift, scale = linear(w, f"{at}.final_layer.adaLN_modulation.1", F.silu(y)).chunk(2, -1)
    return linear(
        w,
        f"{at}.final_layer.linear",
        F.layer_norm(x, (HEAD_WIDTH,), eps=1e-6) * (1 + scale) + shift,
    )


def plain_posterior(x, noise, position, i, steps, spaced_betas=True):
    """Mean and variance of x_{i-1} given x_i among ``steps`` kept timesteps, as in DDPM: through
    x_0, with the range of the variance."""

    def bar(t):
        return np.cos((t + 0.008) / 1.008 * np.pi / 2) ** 2

    t = np.arange(1000)
    betas = np.minimum(1 - bar((t + 1) / 1000) / bar(t / 1000), 0.999)
    product = np.cumprod(1 - betas)
    at = np.rint(np.linspace(0, 999, steps)).astype(int)
    now, before = product[at[i]], product[at[i - 1]] if i else 1.0
    beta = 1 - now / before if spaced_betas else betas[at[i]]
    start = x / np.sqrt(now) - np.sqrt(1 / now - 1) * noise
    mean = (
        np.sqrt(before) * beta / (1 - now) * start
        + np.sqrt(now / before) * (1 - before) / (1 - now) * x
    )
    least = beta * (1 - before) / (1 - now)
    f = (position + 1) / 2
    return mean, None if i == 0 else np.exp(f * np.log(beta) + (1 - f) * np.log(least)), int(at[i])


def built(weights, dtype, **options):
    config = MARConfig.of(
        {k: tuple(v.shape) for k, v in weights.items()}, HEADS, **{"head_steps": STEPS, **options}
    )
    return fill(without_storage(lambda: MAR(config)), weights, dtype=dtype)


@pytest.fixture(scope="module")
def weights():
    return trunk_weights()


@pytest.fixture(scope="module")
def w(weights):
    return {k: v.double() for k, v in weights.items()}


@pytest.fixture(scope="module")
def model(weights):
    return built(weights, torch.float64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, weights):
    """As the published scripts lay it out: mar/mar_tiny/checkpoint-last.pth and vae/kl16.ckpt."""
    root = tmp_path_factory.mktemp("pretrained_models")
    (root / "mar" / "mar_tiny").mkdir(parents=True)
    (root / "vae").mkdir()
    write_trunk(root / "mar" / "mar_tiny" / "checkpoint-last.pth", weights)
    write_vae(root / "vae" / "kl16.ckpt", vae_weights())
    return root / "mar" / "mar_tiny"


@pytest.fixture(scope="module")
def pipe(folder):
    return gen.load("image", model=folder, dtype="float64", **OPTIONS)


@pytest.fixture(scope="module")
def canvas():
    """Images of which 0, 1, 7 and all places are known."""
    random = numbers(3)
    latents = torch.randn(4, POSITIONS, CHANNELS, generator=random, dtype=torch.float64)
    for row, count in enumerate((0, 1, 7, POSITIONS)):
        latents[row, torch.randperm(POSITIONS, generator=random)[count:]] = float("nan")
    return latents


LABELS = torch.tensor([[3], [CLASSES], [0], [9]])


def far(a, b):
    return float((a - b).abs().max())


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_z_equals_a_plain_forward_whatever_is_known(weights, w, canvas, dtype, limit):
    out = built(weights, dtype)(LABELS, canvas.to(dtype))
    plain = torch.stack([plain_z(w, int(a), b) for a, b in zip(LABELS, canvas, strict=True)])
    assert out.dtype == dtype and far(out[..., :-1], plain) < limit * max(
        1, float(plain.abs().max())
    )
    for broken in ({"order": "kqv"}, {"leave": False}, {"position": False}, {"hide": False}):
        assert (
            far(
                out[1:3, :, :-1],
                torch.stack([plain_z(w, int(LABELS[i]), canvas[i], **broken) for i in (1, 2)]),
            )
            > 0.01
        ), broken
    assert (
        far(out[1, :, :-1], plain_z(w, 0, canvas[1])) > 0.01
    )  # the class that says nothing is one of its own


def test_a_row_has_its_z_alone_and_among_others(model, canvas):
    out = model(LABELS, canvas)
    for i in range(len(canvas)):
        assert far(model(LABELS[i : i + 1], canvas[i : i + 1])[0], out[i]) < 1e-12
    assert far(out[0], out[2]) > 0.1


def test_guidance_grows_with_what_is_known_where_it_is_linear(model, weights, canvas):
    share = model(LABELS, canvas)[..., -1]
    assert torch.equal(
        share,
        torch.tensor([[1.0], [2.0], [8.0], [POSITIONS - 1]])
        .double()
        .div(POSITIONS)
        .expand(-1, POSITIONS),
    )
    assert bool(
        (
            built(weights, torch.float64, guidance_schedule="constant")(LABELS, canvas)[..., -1]
            == 1
        ).all()
    )


def test_the_head_equals_a_plain_forward(model, w):
    random = numbers(4)
    x, z = (torch.randn(6, n, generator=random, dtype=torch.float64) for n in (CHANNELS, 32))
    times = [plain_posterior(0.0, 0.0, 0.0, i, STEPS)[2] for i in reversed(range(STEPS))]
    for k, t in enumerate(times):
        out = model.head.predict(x, k, F.pad(z, (0, 1), value=1.0))
        assert far(out, plain_head(w, x, t, z)) < 1e-10
        assert (
            far(out, plain_head(w, x, t + 1, z)) > 1e-6
            and far(out, plain_head(w, x, t, z, swapped=True)) > 1e-3
        )


@pytest.mark.parametrize("steps", [2, 5, 100, 1000])
def test_transitions_have_the_posteriors_mean_and_learned_variance(weights, steps):
    head = built(weights, torch.float64, head_steps=steps, sigma_floor=1e-5).head
    random = numbers(5)
    x, noise, position = (
        torch.randn(7, CHANNELS, generator=random, dtype=torch.float64) for _ in range(3)
    )
    for k in sorted({0, 1, steps // 2, steps - 2, steps - 1}):
        mean, log_sigma = head.posterior(x, k, torch.cat([noise, position], 1))
        expected, variance, t = plain_posterior(
            x.numpy(), noise.numpy(), position.numpy(), steps - 1 - k, steps
        )
        assert head.timesteps[k] == t
        assert np.abs(mean.numpy() - expected).max() < 1e-10 * max(1, np.abs(expected).max())
        if variance is None:
            assert k == steps - 1 and far(log_sigma.exp(), torch.full_like(x, 1e-5)) < 1e-18
            continue
        assert np.abs(log_sigma.numpy() - np.log(variance) / 2).max() < 1e-10
        if steps < 1000:
            other = plain_posterior(
                x.numpy(), noise.numpy(), position.numpy(), steps - 1 - k, steps, spaced_betas=False
            )[0]
            assert np.abs(mean.numpy() - other).max() > 1e-6
        swapped = head.posterior(x, k, torch.cat([position, noise], 1))
        assert far(mean, swapped[0]) > 1e-6 and (steps == 2 or far(log_sigma, swapped[1]) > 1e-6)


def test_timesteps_go_from_the_first_to_the_last_and_only_possible_numbers_of_them_are_taken():
    for steps in (2, 3, 64, 100, 250, 1000):
        assert spaced(steps) == np.rint(np.linspace(0, 999, steps)).astype(int).tolist()
    for wrong in (1, 1001, 0, True, "100"):
        with pytest.raises(GenError, match="num_sampling_steps"):
            spaced(wrong)


def test_guidance_acts_on_the_noise_and_the_variance_is_the_conditional_halfs(model, w):
    random = numbers(6)
    x, z = (
        torch.randn(5, CHANNELS, generator=random).double(),
        torch.randn(5, 2, 33, generator=random).double(),
    )
    sampling = SamplingParams(guidance_scale=3.0, temperature=0.7)
    z[..., -1] = torch.tensor([0.25, 0.5, 1.0, 0.0, 0.75])[:, None]
    with_it, without = (plain_head(w, x, head_time(1), z[:, half, :-1]) for half in (0, 1))
    scale = 1 + 2 * z[:, 0, -1:]
    noise = without[:, :CHANNELS] + scale * (with_it - without)[:, :CHANNELS]
    mean, log_sigma = HeadDistribution(model.head, sampling).transition(x, 1, z)

    def expected(noise, position):
        found = plain_posterior(x.numpy(), noise.numpy(), position.numpy(), STEPS - 2, STEPS)
        return torch.from_numpy(found[0]), torch.from_numpy(found[1]).log() / 2 + math.log(0.7)

    good = expected(noise, with_it[:, CHANNELS:])
    assert far(mean, good[0]) < 1e-10 and far(log_sigma, good[1]) < 1e-10
    all_guided = without + scale * (with_it - without)
    assert far(log_sigma, expected(noise, all_guided[:, CHANNELS:])[1]) > 1e-3
    assert (
        far(
            mean,
            expected(
                without[:, :CHANNELS] + 3 * (with_it - without)[:, :CHANNELS], with_it[:, CHANNELS:]
            )[0],
        )
        > 1e-3
    )


def head_time(k):
    return plain_posterior(0.0, 0.0, 0.0, STEPS - 1 - k, STEPS)[2]


def test_a_path_has_a_density_that_is_its_noises(model):
    random = numbers(7)
    sampling, z = (
        HeadDistribution(model.head, SamplingParams()),
        torch.randn(3, 1, 33, generator=random).double(),
    )
    noise = torch.randn(3, noise_size(sampling), generator=random).double()
    path = walk(sampling, z, noise)
    total = -0.5 * noise.square().sum(1) - 0.5 * noise.shape[1] * math.log(2 * math.pi)
    for k in range(STEPS):
        total = total - sampling.transition(path[:, k], k, z)[1].sum(1)
    assert (
        far(log_density(sampling, path, z), total) < 1e-6
        and far(log_density(sampling, path, z.flip(0)), total) > 1
    )


def test_images_come_out_of_the_folder_by_every_sampler_for_masked_latents(pipe):
    made = {}
    for sampler in (
        "mar",
        "halton",
        "masked_iterative",
        {"name": "masked_iterative", "order": "raster", "steps": 3},
    ):
        out = pipe(["7", "class 3"], sampler=sampler, seed=1)
        assert [m.size for m in out.media] == [(16, 16)] * 2 and bool(out.tokens.isfinite().all())
        assert (
            out.tokens.shape == (2, POSITIONS, CHANNELS) and far(out.tokens[0], out.tokens[1]) > 0.1
        )
        made[str(sampler)] = out.tokens
    names = list(made)
    assert all(far(made[a], made[b]) > 1e-3 for i, a in enumerate(names) for b in names[:i])


def test_what_is_made_is_the_published_loop_with_the_same_noise(pipe, w):
    """One place per step in raster order, linear guidance, temperature: trunk, head and chain
    written out over the published keys."""
    sampling, kept = {"guidance_scale": 3.0, "temperature": 0.9}, {}
    out = pipe(
        "class 4",
        sampler={
            "name": "masked_iterative",
            "order": "raster",
            "schedule": "linear",
            "steps": POSITIONS,
        },
        **only(**sampling),
        seed=5,
    )
    size = (STEPS + 1) * CHANNELS
    rng = CounterRNG([pipe.draw_key(out.items[0])])
    noise = rng.normal(torch.tensor([0]), torch.arange(POSITIONS)[None], "propose", None, size)[
        0
    ].view(POSITIONS, STEPS + 1, CHANNELS)
    for last, growing in ((1e-4, True), (0.0, True), (1e-4, False)):
        canvas = torch.full((POSITIONS, CHANNELS), float("nan"), dtype=torch.float64)
        for n in range(POSITIONS):
            z = [plain_z(w, label, canvas)[n] for label in (4, CLASSES)]
            known = min(n + 1, POSITIONS - 1)
            scale, x = 1 + 2 * known / POSITIONS if growing else 3.0, noise[n, 0]
            for k, i in enumerate(reversed(range(STEPS))):
                given, nothing = (plain_head(w, x[None], head_time(k), c[None])[0] for c in z)
                e = nothing[:CHANNELS] + scale * (given - nothing)[:CHANNELS]
                mean, variance, _ = plain_posterior(
                    x.numpy(), e.numpy(), given[CHANNELS:].numpy(), i, STEPS
                )
                sigma = last if variance is None else torch.from_numpy(np.sqrt(variance))
                x = torch.from_numpy(mean) + 0.9 * sigma * noise[n, k + 1]
            canvas[n] = x
        kept[last, growing] = far(out.tokens[0], canvas) / float(canvas.abs().max())
    assert kept[1e-4, True] < 1e-10, kept
    assert kept[0.0, True] > 1e-9 and kept[1e-4, False] > 0.01, kept


def test_guidance_follows_what_is_known_after_each_step_as_in_the_published_loop(pipe, monkeypatch):
    """Four steps of 16 positions at scale 2.9, of two rows that share them."""
    found, published = [], MAR.forward

    def forward(self, words, latents, num_known=None):
        out = published(self, words, latents, num_known)
        found.append((1 + 1.9 * out[:, 0, -1]).tolist())
        return out

    monkeypatch.setattr(MAR, "forward", forward)
    pipe(["1", "2"], sampler={"name": "mar", "steps": 4}, **only(guidance_scale=2.9), seed=2)
    steps = [1.2375, 1.59375, 2.1875, 2.78125]
    assert [max(step) for step in found] == pytest.approx(steps, abs=1e-12)
    assert all(max(step) == min(step) for step in found)


def test_an_item_is_the_same_alone_and_in_a_batch(pipe):
    prompts = ["1", "2", "class 1"]
    together = pipe(prompts, sampler={"name": "mar", "steps": 4}, seed=2)
    assert together.sampling.guidance_scale == 2.9
    for item, tokens in zip(together.items, together.tokens, strict=True):
        alone = pipe(item.prompt, sampler={"name": "mar", "steps": 4}, seed=item.seed).tokens[0]
        assert far(alone, tokens) < 1e-10 * float(tokens.abs().max())
    assert (
        far(together.tokens[0], together.tokens[2]) > 0.1
    )  # the same class again has a seed of its own


def test_a_part_of_an_image_is_made_anew_and_the_rest_is_kept(pipe):
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    mask = np.zeros((16, 16), dtype=bool)
    mask[4:8, 8:16] = True
    made = np.asarray(pipe("5", sampler="mar", source=image, mask=mask).media[0])
    assert (made[~mask] == image[~mask]).all() and (made[mask] != image[mask]).any()


def test_the_averaged_weights_are_taken_unless_the_others_are_asked_for(folder, pipe, weights):
    def same(p, other):
        return torch.equal(p.bound(str(folder))[0].model.fake_latent.float(), other["fake_latent"])

    assert same(pipe, weights) and not same(pipe, trunk_weights(9))
    trained = gen.load("image", model=folder, ema=False, **OPTIONS)
    assert same(trained, trunk_weights(9)) and not same(trained, weights)


def test_a_file_and_another_autoencoder_serve_as_well_and_half_precision_does(
    folder, pipe, tmp_path
):
    pipe.frontend("latents").model.save_pretrained(tmp_path / "diffusers_vae")
    other = gen.load(
        "image",
        model=folder / "checkpoint-last.pth",
        dtype="float64",
        vae=tmp_path / "diffusers_vae",
        **OPTIONS,
    )
    a, b = (p("3", sampler={"name": "mar", "steps": 3}) for p in (pipe, other))
    assert far(a.tokens, b.tokens) < 1e-12 and np.array_equal(
        np.asarray(a.media[0]), np.asarray(b.media[0])
    )
    half = gen.load("image", model=folder, dtype="bfloat16", **OPTIONS)
    out = half("3", sampler={"name": "mar", "steps": 3})
    assert (
        out.media[0].size == (16, 16)
        and bool(out.tokens.isfinite().all())
        and far(out.tokens.double(), a.tokens) > 0
    )


def test_latents_of_several_neighbours_take_an_autoencoder_of_fewer_channels(folder, tmp_path):
    from diffusers import AutoencoderKL

    small = AutoencoderKL(
        block_out_channels=(32, 32),
        latent_channels=1,
        scaling_factor=0.5,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    small.save_pretrained(tmp_path / "small")
    pipe = gen.load("image", model=folder, vae=tmp_path / "small", scaling_factor=0.25, **OPTIONS)
    frontend = pipe.frontend("latents")
    assert (
        frontend.config.channels == CHANNELS
        and frontend.config.compression == (4, 4)
        and frontend.model.config.scaling_factor == 0.25
    )
    assert pipe("3", sampler={"name": "mar", "steps": 2}).media[0].size == (16, 16)


def test_files_are_recognised_by_their_names(folder, tmp_path):
    def find(path):
        return MARImages.matches(CheckpointFiles.find(path))

    assert find(folder) and find(folder / "checkpoint-last.pth")
    for name in ("mar_base.pth", "model.pth"):
        (tmp_path / name).write_bytes(b"")
    assert (
        find(tmp_path / "mar_base.pth") and not find(tmp_path / "model.pth") and not find(tmp_path)
    )
    (tmp_path / "checkpoint-last.pth").write_bytes(b"")
    assert find(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert not find(tmp_path)


def test_what_does_not_fit_is_one_clear_error(folder, pipe, weights, tmp_path):
    for prompt in ("10", "a fox", "class", "-1", "class 3 4"):
        with pytest.raises(GenError, match="number of a class"):
            pipe(prompt, sampler="mar")
    wrong = (
        ("option heads", {"heads": None}),
        ("heads is 5", {"heads": 5}),
        ("guidance_schedule", {"guidance_schedule": "cosine"}),
        ("sigma_floor", {"sigma_floor": 0.0}),
        ("num_sampling_steps", {"num_sampling_steps": 1}),
        ("unknown device_map 'autos'", {"device_map": "autos"}),
        ("scaling_factor", {"scaling_factor": -1}),
        ("Did you mean 'heads'", {"head": 3}),
    )
    for match, option in wrong:
        with pytest.raises(GenError, match=match):
            gen.load("image", model=folder, **{**OPTIONS, **option})
    with pytest.raises(GenError, match="causal"):
        pipe("3", sampler="autoregressive")
    bent = dict(weights)
    del bent["decoder_norm.bias"], bent["encoder_blocks.0.attn.proj.weight"]
    bent["head.weight"], bent["mask_token"] = torch.zeros(2), torch.zeros(1, 1, 7)
    write_trunk(tmp_path / "checkpoint-last.pth", bent)
    with pytest.raises(GenError) as raised:
        gen.load("image", model=tmp_path, **OPTIONS)
    for key in (
        "decoder_norm.bias",
        "encoder_blocks.0.attn.proj.weight",
        "head.weight",
        "mask_token",
        "(1, 1, 7)",
    ):
        assert key in str(raised.value)
    write_trunk(tmp_path / "checkpoint-last.pth", weights)
    with pytest.raises(GenError, match="no autoencoder"):
        gen.load("image", model=tmp_path, **OPTIONS)
    write_vae(tmp_path / "kl16.ckpt", {"layers.0.weight": torch.zeros(1)})
    with pytest.raises(GenError, match="kl16|latent diffusion"):
        gen.load("image", model=tmp_path, **OPTIONS)
    write_trunk(
        tmp_path / "checkpoint-last.pth", {k: v for k, v in weights.items() if "diffloss" not in k}
    )
    with pytest.raises(GenError, match="diffloss.net.input_proj.weight"):
        gen.load("image", model=tmp_path, **OPTIONS)
