"""The pipeline, the frontend and the image recipe, on models that the recipe itself trains in its
quick form."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from calls import only
from PIL import Image
from quick_models import quickly_trained

import gen
from gen.core.errors import GenError
from gen.modalities.image.modality import ImageModality
from gen.models.load.locate import zoo
from gen.pipeline.pipeline import Pipeline
from gen.recipes.image import recipe as image_recipe
from gen.recipes.image.recipe import CODES
from gen.recipes.image.recipe import main as recipe
from gen.tokenizers.image.vq import VQ

JACOBI = {"name": "speculative_jacobi", "window": 24}
PROMPTS = [
    "a large red circle at the top left",
    "a small blue ring",
    "a green cross at the left and a white square at the right",
]


@pytest.fixture(scope="session")
def quick(tmp_path_factory):
    """A zoo made by the image recipe in its quick form, not measured."""
    return quickly_trained(image_recipe, tmp_path_factory.mktemp("work")) / "zoo"


@pytest.fixture(scope="session")
def pipes(quick):
    return {
        k: Pipeline("image", quick / f"image-{k}", dtype="float64") for k in ("causal", "masked")
    }


@pytest.mark.slow
def test_the_quick_recipe_makes_a_complete_zoo(tmp_path):
    recipe(["all", "--work", str(tmp_path), "--quick"])
    quick = tmp_path / "zoo"
    figures = json.loads((quick / "evaluation.json").read_text())
    assert figures["samplers"]["gumbel"]["same_as_autoregressive_float64"] == 1.0
    assert figures["frontend"]["checker_on_real"] == 1.0
    for name in ("image-vq", "image-causal", "image-masked"):
        assert (quick / name / "README.md").read_text().count(name) >= 1
        assert list((quick / name).glob("*.safetensors"))


def test_a_resumed_training_run_ends_where_an_uninterrupted_one_does(tmp_path):
    from gen.recipes.common.train import TrainConfig, fit

    def run(out, *stops):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        for stop in stops:
            batches = iter([torch.full((2, 4), float(i)) for i in range(9)])

            def loss(m, x):
                return (m(x).pow(2).mean(), {})

            average = (
                fit(
                    model,
                    batches,
                    loss,
                    TrainConfig(steps=8, lr=0.1, save_every=stop),
                    out=out,
                    log=lambda _: None,
                )
                if stop == 8
                else _interrupted(model, batches, loss, out, stop)
            )
        return average.state["weight"]

    def _interrupted(model, batches, loss, out, stop):
        def boom(step, _):
            if step == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fit(
                model,
                batches,
                loss,
                TrainConfig(steps=8, lr=0.1, save_every=stop),
                out=out,
                on_step=boom,
                log=lambda _: None,
            )

    whole, resumed = run(tmp_path / "a", 8), run(tmp_path / "b", 4, 8)
    assert torch.equal(whole, resumed)


@pytest.mark.parametrize(
    "sampler",
    [
        pytest.param("autoregressive", marks=pytest.mark.slow),
        pytest.param(JACOBI, marks=pytest.mark.slow),
        pytest.param({**JACOBI, "coupling": "maximal"}, marks=pytest.mark.slow),
        {"name": "maskgit", "steps": 3},
    ],
)
def test_an_item_is_the_same_alone_and_in_batches_of_8_and_32(pipes, sampler):
    pipe = pipes["masked" if "steps" in sampler else "causal"]
    items = pipe.plan(PROMPTS[:2], num_samples=16, seed=5)
    whole = pipe.generate(items, sampler, {"guidance_scale": 2.0, "top_k": 100})
    eight = pipe.generate(items[3:11], sampler, {"guidance_scale": 2.0, "top_k": 100})
    alone = pipe(PROMPTS[0], sampler, guidance_scale=2.0, top_k=100, seed=items[7].seed)
    assert torch.equal(whole.tokens[3:11], eight.tokens)
    assert torch.equal(whole.tokens[7], alone.tokens[0])
    assert np.array_equal(np.asarray(whole.media[7]), np.asarray(alone.media[0]))
    assert not torch.equal(whole.tokens[7], whole.tokens[8])


def test_a_prompt_given_twice_gets_different_samples(pipes):
    items = pipes["causal"].plan(["a red circle", "a red circle"], num_samples=2, seed=3)
    assert [i.seed for i in items] == [3, 4, 5, 6]


def test_without_a_distribution_the_modality_default_is_used(pipes):
    out = pipes["causal"]("a red circle", JACOBI)
    assert (out.sampling.guidance_scale, out.sampling.top_k) == (2.0, 100)
    said = pipes["causal"]("a red circle", JACOBI, guidance_scale=1.0).sampling
    assert (said.guidance_scale, said.top_k) == (1.0, 100)


def test_guidance_changes_what_is_drawn(pipes):
    plain, guided = (
        pipes["causal"]("a red circle", JACOBI, **only(guidance_scale=s)) for s in (1.0, 500.0)
    )
    assert not torch.equal(plain.tokens, guided.tokens)


def test_the_callback_sees_every_forward_call(pipes):
    seen = []
    out = pipes["causal"]("a red circle", JACOBI, callback=seen.append)
    assert [s["step"] for s in seen] == list(range(1, out.stats[0].nfe + 1))
    assert seen[-1]["done"] == seen[-1]["total"] == 256


def test_editing_keeps_every_pixel_outside_the_mask_and_every_code(pipes):
    pipe = pipes["masked"]
    image = pipe("a large red circle at the top left", "halton").media[0]
    mask = np.zeros((64, 64), dtype=bool)
    mask[40:52, 8:20] = True
    out = pipe("a small blue ring", "maskgit", source=image, mask=mask, num_samples=2)
    before = np.asarray(image)
    for media in out.media:
        after = np.asarray(media)
        assert np.array_equal(after[~mask], before[~mask])
    codes = pipe.frontend().encode(pipe.frontend().preprocess(image)[None]).flatten()
    cells = mask.reshape(16, 4, 16, 4).any((1, 3)).flatten()
    assert torch.equal(out.tokens[0][~cells], codes[~cells])
    assert out.stats[0].tokens == cells.sum() == 9
    assert not torch.equal(out.tokens[0], out.tokens[1])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: p(""), ["empty"]),
        (lambda p: p("a large red circel"), ["circel", "'circle'"]),
        (lambda p: p("a red circle", "autoregresive"), ["'autoregressive'"]),
        (lambda p: p("a red circle", {"name": "sjd", "windw": 3}), ["windw", "'window'"]),
        (lambda p: p("a red circle", {"name": "sjd", "window": 0}), ["window is 0", "at least 1"]),
        (
            lambda p: p("a red circle", temperature=-1),
            ["temperature is -1", "at least 0"],
        ),
        (lambda p: p("a red circle", top_p=1.5), ["top_p is 1.5"]),
        (lambda p: p("a red circle", topk=3), ["topk", "'top_k'"]),
        (lambda p: p("a red circle", num_sample=3), ["num_sample", "'num_samples'"]),
        (lambda p: list(p.stream("a red circle", temperatur=3)), ["temperatur", "'temperature'"]),
        (
            lambda p: p("a red circle", "jacobi", temperature=1.0),
            ["temperature is 1.0", "jacobi"],
        ),
        (lambda p: p("a red circle", "maskgit"), ["causal", "masked"]),
        (lambda p: p("a red circle", num_samples=0), ["num_samples is 0"]),
        (lambda p: p([]), ["no prompts"]),
        (
            lambda p: p("a red circle", source=Image.new("RGB", (64, 64))),
            ["one of mask and span", "got source"],
        ),
        (lambda p: gen.load("imge"), ["imge", "'image'"]),
        (lambda p: gen.load("image", model="image-casual"), ["image-casual", "'image-causal'"]),
        (lambda p: gen.load("image", dtype="float31"), ["float31", "'float32'"]),
        (lambda p: gen.load("image", device="cuda:77"), ["cuda:77"]),
    ],
)
def test_bad_input_is_one_line_that_names_it(pipes, call, words):
    with pytest.raises(GenError) as caught:
        call(pipes["causal"])
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def _copy(quick, tmp_path):
    shutil.copytree(quick, tmp_path / "zoo")
    return tmp_path / "zoo"


@pytest.mark.parametrize("part", ["image-causal", "image-vq"])
@pytest.mark.parametrize("damage", ["cut", "gone", "garbage"])
def test_a_damaged_weight_file_is_named(quick, tmp_path, part, damage):
    folder = _copy(quick, tmp_path)
    weights = next((folder / part).glob("*.safetensors"))
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "gone":
        weights.unlink()
    else:
        weights.write_bytes(b"not weights at all")
    with pytest.raises(GenError, match=part):
        Pipeline("image", folder / "image-causal")("a red circle")


def test_weights_that_lack_a_tensor_are_refused_not_filled_at_random(quick, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = _copy(quick, tmp_path)
    weights = folder / "image-causal" / "model.safetensors"
    tensors = load_file(weights)
    tensors.pop("model.norm.weight")
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(GenError, match="model.norm.weight"):
        Pipeline("image", folder / "image-causal")("a red circle")


def test_a_model_is_refused_beside_a_frontend_it_was_not_trained_with(quick, tmp_path):
    folder = _copy(quick, tmp_path)
    vq = VQ.from_pretrained(folder / "image-vq")
    vq.model.quantize.embedding.weight.data[0] += 1
    vq.model.save_pretrained(folder / "image-vq")
    with pytest.raises(GenError, match="codebook"):
        Pipeline("image", folder / "image-causal")("a red circle")


def test_codes_decode_to_images_and_the_grid_is_a_quarter(quick):
    vq = VQ.from_pretrained(quick / "image-vq")
    codes = torch.randint(0, CODES, (3, 1, 16, 16), generator=torch.Generator().manual_seed(0))
    assert vq.decode(codes).shape == (3, 3, 64, 64)
    assert vq.grid_for((3, 64, 64)) == (16, 16) and vq.codebooks[0].shape == (CODES, 8)
    assert vq.encode(vq.decode(codes)).shape == codes.shape
    with pytest.raises(GenError, match=f"0..{CODES - 1}"):
        vq.decode(torch.full_like(codes, CODES))


def test_both_spellings_of_the_published_class_decode_alike(quick, tmp_path):
    vq = VQ.from_pretrained(quick / "image-vq", dtype=torch.float64)
    vq.model.save_pretrained(tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    config["lookup_from_codebook"] = True
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    other = VQ.from_pretrained(tmp_path / "other", dtype=torch.float64)
    codes = torch.randint(0, CODES, (2, 1, 16, 16), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(vq.decode(codes), other.decode(codes), atol=1e-10)
    # negative control: decoding latents the class quantises again is another image
    latents = vq.codebooks[0][codes[:, 0]].permute(0, 3, 1, 2) + 0.3
    assert not torch.allclose(vq.model.decode(latents).sample, vq.decode(codes), atol=1e-3)


def test_images_survive_saving_and_carry_what_made_them(tmp_path):
    modality = ImageModality()
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    modality.save(
        Image.fromarray(pixels), tmp_path / "a.png", {"prompt": "a red circle", "seed": 7}
    )
    assert np.array_equal(np.asarray(modality.load(tmp_path / "a.png")), pixels)
    with Image.open(tmp_path / "a.png") as again:
        assert again.text == {"prompt": "a red circle", "seed": "7"}
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:200])
    with pytest.raises(GenError, match="a.png"):
        modality.load(tmp_path / "a.png")


def test_the_zoo_holds_what_the_modality_names():
    modality = ImageModality()
    assert {*modality.models.values(), *modality.frontends.values()} <= set(zoo())


@pytest.mark.parametrize("sampler", ["sjd", {**JACOBI, "coupling": "fresh"}])
def test_saving_an_output_leaves_the_folder_a_job_would_leave(pipes, tmp_path, sampler):
    out = pipes["causal"](PROMPTS[:2], sampler, num_samples=2, seed=3, trace=True)
    page = out.save(tmp_path / "job")
    rows = [
        json.loads(line) for line in (tmp_path / "job" / "manifest.jsonl").read_text().splitlines()
    ]
    assert page.is_file() and [r["seed"] for r in rows] == [3, 4, 3, 4]
    with Image.open(tmp_path / "job" / rows[1]["file"]) as saved:
        assert np.array_equal(np.asarray(saved.convert("RGB")), np.asarray(out.media[1]))
    assert out.save(tmp_path / "job") == page  # again: the same job
    with pytest.raises(GenError, match="seed"):
        pipes["causal"](PROMPTS[:2], sampler, num_samples=2, seed=4).save(tmp_path / "job")


def test_editing_can_be_saved_too(pipes, tmp_path):
    mask = np.zeros((64, 64), dtype=bool)
    mask[:8, :8] = True
    out = pipes["masked"](
        "a red circle", "maskgit", source=Image.new("RGB", (64, 64), (70, 70, 70)), mask=mask
    )
    assert out.save(tmp_path / "edit").is_file()
