"""Conditions as users have them: media in every form, batches, refusals, every modality."""

from __future__ import annotations

import base64
import json
from io import BytesIO

import numpy as np
import pytest
import soundfile
import torch
from seeing import SIZE, SeeingModality, image, png

import gen
from gen.contracts.condition import Condition
from gen.core.condition_parts import PARTS
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.media.given import read_media
from gen.media.video import write_lossless

OBSERVATION = {"observation.state": [0.2, 0.3, 0.6, 0.5, 0, 0, 0], "task": "reach"}
VALUES = {
    "text": "a text",
    "messages": [{"role": "user", "content": "hello"}],
    "images": [image(3)],
    "audio": [(np.zeros(9, np.float32), 8000)],
    "video": [np.zeros((2, 4, 4, 3), np.uint8)],
    "observation": OBSERVATION,
    "tokens": [1, 2],
}
QUICK = {"sampler": "autoregressive", "seed": 3}


@pytest.fixture(scope="module")
def pipe():
    return gen.load(SeeingModality())


def test_an_image_is_the_same_condition_in_every_form(tmp_path):
    path, moved = tmp_path / "a.png", tmp_path / "b.bin"
    path.write_bytes(png(70))
    moved.write_bytes(png(70))
    pixels = np.array(image(70))
    text = base64.b64encode(png(70)).decode()
    forms = [
        path,
        str(path),
        moved,
        png(70),
        f"data:image/png;base64,{text}",
        {"base64": text},
        {"bytes": png(70), "path": "a.png"},
        {"path": str(path)},
        image(70),
        pixels,
        pixels[..., 0],
        torch.from_numpy(pixels).permute(2, 0, 1),
        pixels / 255,
    ]
    found = {read_media(form, "image").digest for form in forms}
    assert len(found) == 1
    assert read_media(png(71), "image").digest not in found  # control: one shade brighter


def test_sounds_and_clips_are_the_same_condition_in_every_form(tmp_path):
    wave, clip = np.linspace(-0.5, 0.5, 64, dtype=np.float32), np.zeros((3, 4, 6, 3), np.uint8)
    clip[1] = 200
    sound, video = tmp_path / "a.wav", tmp_path / "a.mkv"
    soundfile.write(sound, wave, 8000, subtype="FLOAT")
    write_lossless(video, clip, 8)
    sounds = [
        sound,
        sound.read_bytes(),
        (wave, 8000),
        (torch.from_numpy(wave)[None], 8000),
        {"array": wave, "sampling_rate": 8000},
    ]
    assert len({read_media(form, "audio") for form in sounds}) == 1
    assert read_media((wave, 9000), "audio") != read_media(sound, "audio")  # control: another rate
    clips = [video, str(video), clip, list(clip), torch.from_numpy(clip).permute(0, 3, 1, 2)]
    assert len({read_media(form, "video") for form in clips}) == 1
    assert read_media(clip[:2], "video") != read_media(clip, "video")  # control


def test_kept_media_read_back_as_the_same_condition(tmp_path):
    sound = (np.linspace(-0.5, 0.5, 64, dtype=np.float32) / 3, 8000)
    clip = np.arange(3 * 4 * 6 * 3, dtype=np.uint8).reshape(3, 4, 6, 3)
    for kind, value in (("image", image(9)), ("audio", sound), ("video", clip)):
        media, path = (
            read_media(value, kind),
            tmp_path / f"{kind}.{'mkv' if kind == 'video' else 'x'}",
        )
        media.write(path)
        assert read_media(path, kind) == media
    with pytest.raises(GenError, match=r"sampling rate.*expected \(wave, rate\)"):
        read_media(sound[0], "audio").write(tmp_path / "b.wav")


def test_items_of_a_batch_have_their_own_media(pipe):
    prompts = [{"image": image(0)}, {"images": [image(255)]}, {"observation": OBSERVATION}, "reach"]
    whole = pipe(prompts, **QUICK)
    alone = [pipe(p, **QUICK).tokens[0] for p in prompts]
    assert all(torch.equal(a, b) for a, b in zip(alone, whole.tokens, strict=True))
    assert not torch.equal(whole.tokens[0], whole.tokens[1])  # control: black and white


WRONG = {
    "key": ({"imges": 1}, "unknown part of the condition 'imges'. Did you mean 'images'?"),
    "twice": ({"image": image(1), "images": [image(1)]}, "image and images are both given"),
    "missing": ({"image": "no.png"}, "image no.png does not exist"),
    "sound": ({"image": "no.wav"}, "image is 'no.wav', a sound; expected an image"),
    "image as sound": ({"audio": "no.png"}, "audio is 'no.png', an image; expected a sound"),
    "image as clip": ({"video": "no.png"}, "video is 'no.png', an image; expected a video"),
    "bytes": ({"image": b"x" * 40}, "image bytes cannot be read"),
    "sound bytes": ({"audio": b"x" * 40}, "expected a sound file such as WAV"),
    "array": ({"image": np.zeros((5, 5, 7))}, r"float64 \(5, 5, 7\); expected an image"),
    "wave": ({"audio": image(1)}, "expected a sound: a path, bytes"),
    "size": ({"image": image(1, (8, 9))}, "image is 9x8 .* the model takes 4x6"),
    "slots": ({"images": [image(1), image(2)]}, "takes at most 1 images; got 2"),
    "tokens": ({"tokens": [1]}, "as its condition; got tokens"),
    "nothing": ({}, "got nothing"),
    "messages": ({"messages": [{"role": "user"}]}, "messages.0 is .* keys role and content"),
    "base64": ({"image": {"base64": "!"}}, "image holds no base64"),
    "token": ({"tokens": [-1]}, "tokens is -1; expected a list of token ids"),
    "observation": ({"observation": "no.json"}, "observation is not a file: 'no.json'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_condition_is_one_sentence(pipe, case):
    given, message = WRONG[case]
    with pytest.raises(GenError, match=message) as caught:
        pipe(given, **QUICK)
    assert "\n" not in str(caught.value)


def test_a_camera_of_another_size_is_refused():
    seen = Condition.of({"observation": {**OBSERVATION, "observation.images.front": image(1)}})
    assert seen.cameras(SIZE)["observation.images.front"].array.shape == (*SIZE, 3)
    with pytest.raises(GenError, match=r"observation.images.front is 4x6 .* the model takes 8x8"):
        seen.cameras((8, 8))


@pytest.mark.parametrize("kind", ["modality", "checkpoint"])
def test_every_modality_and_family_refuses_the_parts_that_it_does_not_take(kind):
    table = registry.table(kind)
    refused = 0
    for name, cls in table.items():
        assert cls.accepts and cls.accepts <= set(PARTS), name
        made = cls() if kind == "modality" else None
        for part, value in VALUES.items():
            condition = Condition.of({part: value})
            if part in cls.accepts:
                condition.require(cls.accepts, name)  # control
                continue
            with pytest.raises(GenError, match=f"takes .* as its condition; got {part}"):
                if made is not None:
                    made.parse(condition)
                else:
                    condition.require(cls.accepts, name, cls.most)
            refused += 1
    assert refused > 4 * len(table)


def test_an_output_is_saved_with_its_media_and_made_again(pipe, tmp_path):
    from gen.config.entries import stored_job
    from gen.jobs.run import run_job
    from gen.store.ledger import read_rows

    out = pipe([{"image": image(10)}, {"image": image(200)}], **QUICK, num_samples=2)
    out.save(tmp_path)
    rows = read_rows(tmp_path)
    files = [row["condition"]["images"][0] for row in rows]
    assert [r["status"] for r in rows] == ["ok"] * 4 and len(set(files)) == 2
    job = stored_job(tmp_path)
    assert run_job(job, load=lambda *_, **__: pipe)["skipped"] == 4
    before = (tmp_path / rows[3]["file"]).read_bytes()
    (tmp_path / rows[3]["file"]).unlink()
    assert run_job(job, load=lambda *_, **__: pipe)["skipped"] == 3
    assert (tmp_path / rows[3]["file"]).read_bytes() == before


def test_conversations_and_token_ids_reach_a_language_model(tmp_path):
    from families import WRITERS

    case = WRITERS["causal_lm"](tmp_path)
    pipe = gen.load("text", model=case.path, dtype="float64", max_new_tokens=4)
    tokens = pipe.modality.checkpoint.prompt("w1 w2 w3")
    text = pipe("w1 w2 w3", temperature=0.0)
    same = pipe({"tokens": tokens}, temperature=0.0)
    assert torch.equal(text.tokens, same.tokens)
    assert not torch.equal(text.tokens, pipe({"tokens": tokens[:2]}, temperature=0.0).tokens)
    with pytest.raises(GenError, match="has no chat template"):
        pipe({"messages": VALUES["messages"]})
    with pytest.raises(GenError, match="tokens holds 64; the model takes token ids below 64"):
        pipe({"tokens": [64]})
    with pytest.raises(GenError, match="got images"):
        pipe({"text": "w1", "image": image(1)})
    pipe.modality.checkpoint.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    )
    turns = [{"role": "w5", "content": "w1"}, {"role": "w6", "content": "w2 w3"}]
    path = tmp_path / "turns.json"
    path.write_text(json.dumps(turns))
    said = pipe({"messages": turns}, temperature=0.0)
    assert torch.equal(said.tokens, pipe({"messages": path}, temperature=0.0).tokens)
    ids = pipe.modality.checkpoint.ids_of(said.items[0].condition)
    assert torch.equal(said.tokens, pipe({"tokens": ids}, temperature=0.0).tokens)


def test_media_of_a_diffusers_call_are_those_of_its_prompts(pipe):
    from gen.interop.diffusers import DiffusersPipeline, _prompts

    a, b = image(0), image(255)
    assert _prompts("p", {"image": a}) == [{"text": "p", "image": a}]
    assert _prompts("p", {"image": [a, b]}) == [{"text": "p", "image": [a, b]}]
    assert _prompts(["p", "q"], {"image": [a, b], "audio": 1}) == [
        {"text": "p", "image": a, "audio": 1},
        {"text": "q", "image": b, "audio": 1},
    ]
    assert _prompts(None, {"image": [a, b]}) == [
        {"text": None, "image": a},
        {"text": None, "image": b},
    ]
    with pytest.raises(GenError, match="image is a list of 1 and there are 2 prompts"):
        _prompts(["p", "q"], {"image": [a]})
    with pytest.raises(GenError, match="there is no prompt"):
        _prompts(None, {})
    call = DiffusersPipeline(pipe)
    seeds = [torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)]
    call(image=[a, b], generator=seeds, sampler="autoregressive")
    assert [item.given.images for item in call.output.items] == [(a,), (b,)]


def test_a_wave_file_without_its_end_is_refused():
    out = BytesIO()
    soundfile.write(out, np.zeros(800, np.float32), 8000, format="WAV")
    with pytest.raises(GenError, match="cut off"):
        read_media(out.getvalue()[:200], "audio")
