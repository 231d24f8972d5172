"""Images scale by scale, from a caption to pixels, with tiny random models."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_scales import CODES, SCALES, save_scales, tiny_model, tiny_vq

import gen
from gen.core.errors import GenError
from gen.core.sampling_params import SamplingParams
from gen.models.adapters.scales import ScalesLM
from gen.models.targets.scales import ScalesTarget
from gen.tokenizers.image.scale_vq import ScaleVQ, scale_space

PROMPT, T, SIZE = "a large red circle at the top left", 30, 64
EVERY = {
    "next_scale": {"name": "next_scale"},
    "smooth": {"name": "next_scale", "more_smooth": True},
    "masked": {"name": "next_scale_masked"},
    "threshold": {"name": "next_scale_masked", "order": "halton", "conf_threshold": 0.1},
    "random": {"name": "next_scale_masked", "order": "random", "refine_guidance": 1.5},
    "scale_draft": {"name": "scale_draft", "num_speculative_tokens": 3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_scales(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def pipes(folder):
    def load(name):
        return gen.load("image", model=folder / name, dtype="float64")

    return {"scales": load("image-scales"), "refined_scales": load("image-scales-masked")}


def pipe_of(pipes, spec):
    return pipes["scales" if spec["name"] == "next_scale" else "refined_scales"]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.thinned(3)
def test_an_item_is_the_same_in_a_batch_and_alone(pipes, name):
    spec = EVERY[name]
    pipe = pipe_of(pipes, spec)
    out = pipe([PROMPT, "a small blue ring"], spec, num_samples=2, seed=3)
    assert out.tokens.shape == (4, T) and out.images[0].size == (SIZE, SIZE)
    assert bool((out.tokens < CODES).all()) and len(out.tokens.unique(dim=0)) == 4
    for n, (prompt, seed) in enumerate([(PROMPT, 4), ("a small blue ring", 3)], 1):
        alone = pipe(prompt, spec, seed=seed)
        assert torch.equal(alone.tokens[0], out.tokens[n])
        assert alone.stats[0].nfe == out.stats[n].nfe
        assert np.array_equal(np.asarray(alone.images[0]), np.asarray(out.images[n]))


def test_forward_passes_are_counted(pipes):
    passes = {"next_scale": 4, "smooth": 4, "masked": 8}
    for name, nfe in passes.items():
        out = pipe_of(pipes, EVERY[name])(PROMPT, EVERY[name], seed=0, guidance_scale=1.0)
        assert out.stats[0].nfe == nfe
        if name != "masked":
            assert out.stats[0].tokens_computed == T + 8  # the condition once
    draft = {"name": "scale_draft", "num_speculative_tokens": 16}
    out = pipes["refined_scales"](PROMPT, draft, seed=0)
    assert out.stats[0].nfe >= 1 + 2 * 3 and out.stats[0].draft_acceptance_rate is not None


def test_a_schedule_of_one_pass_gives_the_tokens_of_next_scale(pipes):
    pipe = pipes["refined_scales"]
    filled, plain = (
        pipe(PROMPT, spec, seed=1).tokens
        for spec in ({"name": "next_scale_masked", "schedule": "fill"}, "next_scale")
    )
    assert torch.equal(filled, plain)
    schedule = [[1], [1, 3], [9], [8, 8]]
    refined = pipe(PROMPT, {"name": "next_scale_masked", "schedule": schedule}, seed=1)
    assert not torch.equal(refined.tokens, plain) and refined.stats[0].nfe == 6


def test_guidance_leaves_the_first_scale_as_it_is(pipes):
    one, three = (
        pipes["scales"]([PROMPT] * 6, "next_scale", seed=1, guidance_scale=g, top_k=0).tokens
        for g in (1.0, 8.0)
    )
    assert torch.equal(one[:, 0], three[:, 0]) and not torch.equal(one, three)


def test_the_default_sampler_is_that_of_the_model(pipes):
    assert pipes["scales"].config["sampler"] == {"name": "next_scale"}
    assert pipes["refined_scales"].config["sampler"] == {"name": "next_scale_masked"}
    assert pipes["scales"].config["protocols"] == ["scales"]


def test_a_small_model_makes_the_last_scales(pipes, folder):
    draft = str(folder / "image-scales-masked")
    spec = {"name": "next_scale", "early": 2, "draft_model": draft}
    out = pipes["scales"]([PROMPT, "a green cross"], spec, seed=2)
    plain = pipes["scales"]([PROMPT, "a green cross"], "next_scale", seed=2)
    assert torch.equal(out.tokens[:, :5], plain.tokens[:, :5])
    assert not torch.equal(out.tokens, plain.tokens)
    assert (out.stats[0].nfe, out.stats[0].draft_nfe, out.guarantee) == (2, 2, "approximate")
    own = {**spec, "draft_model": str(folder / "image-scales")}
    same = pipes["scales"]([PROMPT, "a green cross"], own, seed=2)
    assert torch.equal(same.tokens, plain.tokens)  # the model itself as the small one
    assert same.stats[0].draft_nfe == 4  # it reads the scales before


# --- editing


def halves() -> Image.Image:
    return Image.fromarray(np.kron([[0, 1]], np.ones((SIZE, SIZE // 2))).astype(np.uint8) * 255)


@pytest.mark.parametrize("name", [n for n in EVERY if n != "smooth"])
@pytest.mark.thinned(2)
def test_an_edit_keeps_the_tokens_and_pixels_around(pipes, name):
    spec = EVERY[name]
    pipe = pipe_of(pipes, spec)
    source = pipe(PROMPT, "next_scale", seed=5).images[0]
    out = pipe([PROMPT] * 2, spec, source=source, mask=halves(), seed=9)
    frontend = pipe.components["frontend"]
    codes = frontend.encode(frontend.preprocess(source)[None])[0, 0]
    again = frontend.regenerated(torch.from_numpy(np.asarray(halves()) > 127))
    assert [int(x.sum()) for x in again.split([1, 4, 9, 16])] == [1, 2, 6, 8]
    assert torch.equal(out.tokens[:, ~again], codes[~again].expand(2, -1))
    assert not torch.equal(out.tokens[0, again], out.tokens[1, again])
    pixels, result = np.asarray(source), np.asarray(out.images[0])
    assert np.array_equal(result[:, : SIZE // 2], pixels[:, : SIZE // 2])
    assert not np.array_equal(result[:, SIZE // 2 :], pixels[:, SIZE // 2 :])


def test_a_row_with_nothing_to_draw_in_a_scale_takes_no_pass_there(pipes):
    pipe = pipes["refined_scales"]
    corner = np.zeros((SIZE, SIZE), dtype=np.uint8)
    corner[:16, :16] = 255  # one cell of the last scale
    source = pipe(PROMPT, "next_scale", seed=5).images[0]
    out = pipe(PROMPT, "next_scale_masked", source=source, mask=Image.fromarray(corner), seed=9)
    assert out.stats[0].nfe == 2 and out.stats[0].tokens == 2  # of the scales of 9 and of 16


def test_smooth_sums_refuse_edits(pipes):
    source = Image.new("RGB", (SIZE, SIZE))
    with pytest.raises(GenError, match="more_smooth"):
        pipes["scales"](PROMPT, EVERY["smooth"], source=source, mask=halves())


# --- previews


def test_previews_are_the_complete_scales(pipes):
    pipe = pipes["scales"]
    chunks = list(pipe.stream(PROMPT, "next_scale", seed=0, partial_images=3))
    out = pipe(PROMPT, "next_scale", seed=0)
    previews = [c.media for c in chunks if c.preview]
    frontend, ends = pipe.components["frontend"], (1, 5, 14, 30)
    wanted = [
        frontend.postprocess(frontend.decode(out.tokens[:1, None, :end])[0]) for end in ends[:3]
    ]
    assert [np.asarray(a).tolist() for a in previews] == [np.asarray(a).tolist() for a in wanted]
    assert np.array_equal(np.asarray(chunks[-1].media), np.asarray(out.images[0]))


# --- the frontend


def test_codes_of_images_come_back(pipes):
    frontend = ScaleVQ(tiny_vq())
    x = torch.rand(2, 3, SIZE, SIZE) * 2 - 1
    codes = frontend.encode(x)
    assert codes.shape == (2, 1, T) and frontend.grid == frontend.grid_for((3, SIZE, SIZE)) == (T,)
    assert frontend.decode(codes).shape == x.shape
    assert frontend.decode(codes[..., :5]).shape == x.shape  # the first two scales
    for bad in (codes[..., :6], codes + CODES, codes[:, 0]):
        with pytest.raises(GenError, match="ends of the scales"):
            frontend.decode(bad)
    with pytest.raises(GenError, match=r"\(64, 64\)"):
        frontend.encode(x[..., :48])


# --- bad input


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"schedule": [[1], [4]]}, r"sum to \[1, 4\]; expected \[1, 4, 9, 16\]"),
        ({"schedule": [[1], [1, 2], [9], [16]]}, r"sum to \[1, 3, 9, 16\]"),
        ({"schedule": [[1], [0, 4], [9], [16]]}, "counts above 0"),
        ({"schedule": [[1], 4, [9], [16]]}, "counts above 0"),
        ({"schedule": "full"}, "counts above 0"),
        ({"order": "entropy"}, "confidence or halton or random"),
        ({"conf_threshold": 1.5}, "from 0 to 1"),
        ({"refine_guidance": -1}, "at least 0"),
    ],
)
def test_wrong_parameters_are_refused(pipes, spec, message):
    with pytest.raises(GenError, match=message):
        pipes["refined_scales"](PROMPT, {"name": "next_scale_masked", **spec})


def test_a_guided_refining_pass_needs_unconditional_prompts(pipes):
    spec = {"name": "next_scale_masked", "refine_guidance": 2.0}
    with pytest.raises(GenError, match="expected another guidance_scale"):
        pipes["refined_scales"](PROMPT, spec, guidance_scale=1.0)


@pytest.mark.parametrize("sampler", ["next_scale_masked", "scale_draft"])
def test_a_model_without_the_refining_pass_is_refused(pipes, sampler):
    with pytest.raises(GenError, match="is a scales one of codes, but the sampler needs a refined"):
        pipes["scales"](PROMPT, sampler)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"early": -1}, "a number of scales"),
        ({"early": 2, "more_smooth": True}, "expected one of them"),
        ({"draft_model": "image-scales"}, "without sampler.early"),
        ({"more_smooth": 1}, "true or false"),
    ],
)
def test_wrong_parameters_of_next_scale_are_refused(params, message):
    with pytest.raises(GenError, match=message):
        gen.load("image").resolve({"name": "next_scale", **params})


def refused(folder, model, frontend: str) -> str:
    """The message about a model with this frontend."""
    model.config.frontend = frontend
    model.save_pretrained(folder / "other")
    with pytest.raises(GenError) as caught:
        gen.load("image", model=folder / "other")(PROMPT)
    return str(caught.value)


def test_models_and_frontends_that_do_not_fit_are_refused(folder, tmp_path):
    vq = tiny_vq()
    vq.save_pretrained(tmp_path / "image-scales-vq")
    wrong = ((1, 1), (2, 2), (4, 4))
    message = refused(tmp_path, tiny_model(tiny_vq(wrong), False), "image-scales-vq")
    assert str([list(pair) for pair in wrong]) in message
    assert str([list(pair) for pair in SCALES]) in message and "its frontend" in message
    message = refused(tmp_path, tiny_model(vq, False), "image-vq")
    assert "no quantiser of scales" in message and "image-scales-vq" in message
    message = refused(tmp_path, tiny_model(tiny_vq(seed=5), False), "image-scales-vq")
    assert "was trained on codebook" in message
    config = json.loads((folder / "image-scales" / "config.json").read_text())
    assert config["frontend"] == "image-scales-vq"  # the one above that fits is not refused
    assert gen.load("image", model=folder / "image-scales")(PROMPT).tokens.shape == (1, T)


def test_a_token_space_of_other_scales_is_refused():
    lm = ScalesLM(tiny_model(tiny_vq(), False))
    space = scale_space(((1, 1), (2, 2), (5, 5)), CODES)
    with pytest.raises(GenError, match=r"\[1, 4, 9, 16\] positions; expected .* \[1, 4, 25\]"):
        ScalesTarget(lm, torch.zeros(1, 8, dtype=torch.long), space, SamplingParams())
