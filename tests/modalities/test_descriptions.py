"""Captions of images, clips and sounds, by the embedded models, and their check."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import soundfile
from PIL import Image

import gen
from gen.media.given import read_media
from gen.media.resample import resample
from gen.media.video import write_lossless
from gen.modalities.audio import balls
from gen.modalities.audio.captions import parse
from gen.modalities.audio.description import caption_of, check_caption
from gen.modalities.image import captions as shapes
from gen.modalities.image.reading import ordered
from gen.modalities.media_tokens import Description

SCENES = balls.scenes(6, 9, held=True)


def described(scene: balls.Scene) -> tuple[Description, Description]:
    """The clip and the sound of a scene, to be described."""
    clip = read_media(scene.frames(), "video")
    sound = read_media((scene.wave(), balls.RATE), "audio")
    return Description("video", clip), Description("audio", sound)


def test_the_true_caption_is_read_from_the_medium_and_others_do_not_pass():
    for scene, other in zip(SCENES, SCENES[1:] + SCENES[:1], strict=True):
        for description in described(scene):
            assert caption_of(description) == scene.caption()
            assert check_caption(str(scene.caption()), description).passed
            same = other.caption() == scene.caption()
            assert check_caption(str(other.caption()), description).passed == same
            assert not check_caption("a red square", description).valid


def test_the_model_describes_clips_and_sounds_word_for_word():
    pipe = gen.load("text", device="cpu")
    clips = [{"video": scene.frames()} for scene in SCENES]
    sounds = [{"audio": {"array": s.wave(), "sampling_rate": balls.RATE}} for s in SCENES]
    for media in (clips, sounds):
        asked = [{"text": "describe", **medium} for medium in media]
        made = pipe(asked, "autoregressive", seed=0, top_k=1).media
        for text, scene in zip(made, SCENES, strict=True):
            assert parse(text) == scene.caption()
        assert len(set(made)) > 1  # control: it is not one text for all


def test_descriptions_of_the_same_medium_are_the_same_condition():
    clip, sound = described(SCENES[0])
    assert clip == described(SCENES[0])[0] != sound
    assert str(clip) == str(described(SCENES[0])[0]) != str(sound)
    changed = replace(clip, medium=read_media(np.flip(SCENES[0].frames(), 1).copy(), "video"))
    assert str(changed) != str(clip)


IMAGES = shapes.captions(7, 31, held=True)


def images() -> list[dict]:
    rng = np.random.default_rng(6)
    return [{"text": "describe", "image": shapes.draw(caption, rng)} for caption in IMAGES]


@pytest.mark.parametrize(
    "sampler",
    ["autoregressive", "speculative_jacobi", "scd_mc", "beam_search", "superposed_decoding"],
)
@pytest.mark.thinned(2)
def test_the_captioner_of_images_describes_them_with_every_kind_of_sampler(sampler):
    pipe = gen.load("text", device="cpu")
    greedy = {} if sampler in ("beam_search", "superposed_decoding") else {"top_k": 1}
    made = pipe(images(), sampler, seed=0, batch_size=3, **greedy).media
    right = [text == str(ordered(c)) for text, c in zip(made, IMAGES, strict=True)]
    assert sum(right) >= len(IMAGES) - 1  # 0.99 of images are described word for word


def test_descriptions_of_a_batch_whose_rows_are_replaced_are_those_of_each_alone():
    pipe = gen.load("text", device="cpu")
    asked = images()
    for sampler in ("autoregressive", "speculative_jacobi"):
        batch = pipe(asked, sampler, seed=5, batch_size=2)
        for n, one in enumerate(asked):
            alone = pipe([asked[0]] * n + [one], sampler, seed=5)
            assert alone.media[n] == batch.media[n]
    assert len(set(batch.media)) > 4  # control


def test_a_file_is_described_as_it_is_shown(tmp_path):
    """A photo that is stored upside down, a clip at twice the frame rate, a sound at 48 kHz."""
    pixels = shapes.draw(shapes.parse("a small green ring at the top"), np.random.default_rng(0))
    exif = Image.Exif()
    exif[274] = 3
    Image.fromarray(pixels[::-1, ::-1].copy()).save(tmp_path / "photo.png", exif=exif)
    write_lossless(tmp_path / "clip.mkv", SCENES[0].frames().repeat(2, 0), 2 * balls.FPS)
    wave = resample(SCENES[0].wave()[:, None], balls.RATE, 48_000)
    soundfile.write(tmp_path / "sound.wav", wave, 48_000, "FLOAT")
    pipe = gen.load("text", device="cpu")
    asked = [("image", "photo.png"), ("video", "clip.mkv"), ("audio", "sound.wav")]
    found, true = [], [{"image": pixels}, {"video": SCENES[0].frames()}]
    for part, name in asked:
        given = {"text": "describe", part: str(tmp_path / name)}
        found += pipe([given], "autoregressive", seed=0, top_k=1).media
    for text, medium in zip(found, true, strict=False):
        given = {"text": "describe", **medium}
        assert [text] == pipe([given], "autoregressive", seed=0, top_k=1).media
    assert found[0] == "a small green ring at the top"
    assert parse(found[1]) == parse(found[2]) == SCENES[0].caption()
