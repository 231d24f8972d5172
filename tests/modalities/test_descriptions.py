"""Captions of clips and sounds, by the embedded model, and their check."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import gen
from gen.media.given import read_media
from gen.modalities.audio import balls
from gen.modalities.audio.captions import parse
from gen.modalities.audio.description import caption_of, check_caption
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
