"""Conditions with media: which model serves them, what it makes, what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

import gen
from gen.contracts.condition import Condition
from gen.core.errors import GenError
from gen.modalities.action.view import IMAGE_KEY, render
from gen.modalities.image import captions as shapes
from gen.modalities.image import instructions

CAPTION = "a large red circle at the left"
QUICK = {"temperature": 0.0, "guidance_scale": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def source() -> np.ndarray:
    return shapes.draw(shapes.parse(CAPTION), np.random.default_rng(4))


@pytest.fixture(scope="module")
def pipe():
    return gen.load("image", device="cpu")


def test_the_part_of_a_condition_decides_which_model_serves_it(pipe, source):
    edit = {"text": "make it blue", "image": source}
    assert pipe(edit, seed=0).model == "image-masked"  # the default, and not one left to right
    assert pipe("a red circle", seed=0).model == "image-causal"
    text = gen.load("text", device="cpu")
    assert text({"text": "describe", "image": source}, seed=0).model == "image-captions"
    assert text("sort 3 1 2 =", seed=0).model == "text-causal"


def test_prompts_for_different_models_are_refused_together(pipe, source):
    edit = {"text": "make it blue", "image": source}
    with pytest.raises(GenError, match="different models of modality 'image' serve"):
        pipe([edit, "a red circle"], seed=0)


@pytest.mark.parametrize(
    "sampler",
    [*({"name": name, "steps": 3} for name in ("maskgit", "halton", "mar")), "next_scale_masked"],
    ids=str,
)
def test_an_edit_alone_is_the_edit_in_a_batch(pipe, source, sampler):
    other = shapes.draw(shapes.parse("a small green ring at the top"), np.random.default_rng(5))
    edits = [
        {"text": "make it blue", "image": source},
        {"text": "move the ring to the bottom right", "image": other},
    ]
    batch = pipe(edits, sampler, seed=1)
    for n, edit in enumerate(edits):
        alone = pipe(edit, sampler, seed=1)
        assert (np.asarray(alone.media[0]) == np.asarray(batch.media[n])).all()
    # the control: the other image is another edit
    swapped = pipe({"text": "make it blue", "image": other}, sampler, seed=1)
    assert (np.asarray(swapped.media[0]) != np.asarray(batch.media[0])).any()


@pytest.mark.parametrize(
    "sampler", ["maskgit", "mar", "next_scale_masked", "speculative_jacobi", "speculative"]
)
def test_an_edit_keeps_every_pixel_outside_of_its_region(pipe, source, sampler):
    made = np.asarray(pipe({"text": "make it small", "image": source}, sampler, seed=2).media[0])
    small = instructions.parse("make it small").applied(shapes.parse(CAPTION))
    region = instructions.region(shapes.parse(CAPTION), small)
    cells = region.reshape(8, 8, 8, 8).any((1, 3))  # the largest cells are those of latents
    rest = ~np.kron(cells, np.ones((8, 8), bool))
    assert (made[rest] == source[rest]).all() and (made[region] != source[region]).any()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"text": "make it blue"}, "is an instruction to change an image, and there is none"),
        ({"text": "paint it", "image": "SOURCE"}, "expected an instruction such as"),
        ({"text": "make it blue", "image": "SMALL"}, "8x8 .width x height.; the model takes 64x64"),
        ({"text": "make it blue", "image": ["SOURCE", "SOURCE"]}, "at most 1 images; got 2"),
        ({"text": "make it blue", "audio": "SOUND"}, "takes images and text .* got audio"),
        ({"text": "make it blue", "image": "nowhere.png"}, "nowhere.png"),
    ],
)
def test_conditions_that_make_no_sense_are_refused(pipe, source, prompt, message):
    small = np.zeros((8, 8, 3), np.uint8)
    sound = (np.zeros(80, np.float32), 8000)
    media = {"SOURCE": source, "SMALL": small, "SOUND": sound}
    found = {
        key: [media[v] for v in value] if isinstance(value, list) else media.get(value, value)
        for key, value in prompt.items()
    }
    with pytest.raises(GenError, match=message):
        pipe(found, seed=0)


def test_what_cannot_be_done_is_said(pipe, source):
    edit = {"text": "make it blue", "image": source}
    with pytest.raises(GenError, match="no causal-latents-images model; it has masked-images"):
        pipe(edit, "continuous_jacobi", seed=0)
    with pytest.raises(GenError, match="names 0 shapes"):
        pipe({"text": "make the ring blue", "image": source}, seed=0)
    with pytest.raises(GenError, match="gives media to start from too"):
        mask = np.ones((64, 64), bool)
        pipe(edit, "maskgit", source=Image.fromarray(source), mask=mask, seed=0)
    text = gen.load("text", device="cpu")
    with pytest.raises(GenError, match="came without a medium"):
        text("describe", seed=0)
    with pytest.raises(GenError, match="expected 'describe'"):
        text({"text": "sing", "image": source}, seed=0)


def test_the_checker_judges_an_edit_by_its_source(pipe, source):
    modality = pipe.modality
    condition = Condition.of({"text": "make it blue", "image": source})
    blue = shapes.draw(
        instructions.parse("make it blue").applied(shapes.parse(CAPTION)), np.random.default_rng(4)
    )
    assert modality.judge(Image.fromarray(blue), condition).passed
    assert not modality.judge(Image.fromarray(source), condition).passed  # nothing changed
    text = gen.load("text", device="cpu").modality
    asked = Condition.of({"text": "describe", "image": source})
    assert text.judge(CAPTION, asked).passed
    assert not text.judge("a large blue circle at the left", asked).passed


def test_a_policy_reads_the_table_from_its_camera():
    state = np.array([0.2, 0.3, 0.7, 0.6, 0, 0, 0], np.float32)
    modality = gen.load("action", device="cpu").modality
    seen = {IMAGE_KEY: render(state), "task": "reach"}
    found = modality.parse(Condition.of({"observation": seen}))
    assert np.abs(found.state - state).max() < 0.005
    other = render(np.array([0.5, 0.5, 0.7, 0.6, 0, 0, 0], np.float32))  # the control
    moved = modality.parse(Condition.of({"observation": {**seen, IMAGE_KEY: other}}))
    assert np.abs(moved.state - state)[:2].min() > 0.15
    with pytest.raises(GenError, match="8x8"):
        modality.parse(
            Condition.of(
                {"observation": {IMAGE_KEY: np.zeros((8, 8, 3), np.uint8), "task": "reach"}}
            )
        )


@pytest.mark.slow
def test_a_job_of_edits_resumes_and_is_judged(tmp_path, source):
    from gen.__main__ import main

    Image.fromarray(source).save(tmp_path / "a.png")
    rows = [{"prompt": t, "image": "a.png"} for t in ("make it blue", "make it small")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    folder = tmp_path / "out"
    job = [
        "run",
        str(tmp_path / "job.yaml"),
    ]
    said = f"prompts_file: {tmp_path}/rows.jsonl\nout: {folder}\nseed: 0\n"
    (tmp_path / "job.yaml").write_text(f"modality: image\nsampler: maskgit\n{said}")
    assert main(job) == 0
    before = (folder / "manifest.jsonl").read_bytes()
    assert main(job) == 0 and (folder / "manifest.jsonl").read_bytes() == before
    assert main(["check", str(folder)]) == 0
