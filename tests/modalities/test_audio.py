"""Sounds of bouncing balls: conditions, prompts, the order of codes, and sounds of the model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tabular import TabularMasked, masked_target
from torch import Tensor

import gen
from gen.__main__ import main
from gen.contracts.condition import Condition
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.media.video import write_mp4
from gen.modalities.audio import balls, captions, checker, prompts
from gen.modalities.audio.balls import Path, Scene
from gen.modalities.audio.modality import AudioModality, SoundTrack, bars
from gen.models.load.locate import read_config
from gen.tokenizers.text.words import TextWords

SCENE = Scene("x", (Path("red", "fast", 3, 9, True),))  # hits in frames 2, 8 and 14
CAPTION = "a red ball bounces 3 times, high"
BOTH = {"text": "a red ball bounces, low", "video": SCENE.frames()}


@pytest.fixture(scope="module")
def pipe():
    return gen.load("audio", device="cpu")


def parse(**parts):
    return AudioModality().parse(Condition.of(parts))


# --- conditions and prompts


def test_a_condition_is_a_caption_a_clip_or_both():
    text, clip, both = parse(text=CAPTION), parse(video=SCENE.frames()), parse(**BOTH)
    assert str(text) == CAPTION and text.tiles is None
    assert clip.caption == captions.Caption() and len(clip.tiles) == prompts.CLIP
    assert both.tiles == clip.tiles and str(both).startswith("a red ball bounces, low | video ")
    other = Scene("y", SCENE.paths)
    assert clip == parse(video=SCENE.frames()) != parse(video=other.frames())
    assert str(clip) != str(parse(video=other.frames()))


def test_larger_clips_are_averaged_and_other_ones_refused():
    frames = SCENE.frames()
    assert parse(video=frames.repeat(4, 1).repeat(4, 2)).tiles == parse(video=frames).tiles
    for bad in (frames[:15], frames[:, :8], np.zeros((16, 40, 40, 3), np.uint8)):
        with pytest.raises(GenError, match=r"expected 16 of 16x16"):
            parse(video=bad)
    with pytest.raises(GenError, match="at most 1 video"):
        parse(video=[frames, frames])
    with pytest.raises(GenError, match="caption is empty"):
        parse(text="")
    with pytest.raises(GenError, match="got audio"):
        parse(audio=(np.zeros(100, np.float32), balls.RATE))


def test_a_prompt_is_the_tiles_and_the_words_and_absent_parts_are_null():
    modality = AudioModality()
    both, text, clip = (
        modality.prompt_words(parse(**p))
        for p in (BOTH, {"text": BOTH["text"]}, {"video": BOTH["video"]})
    )
    null = prompts.UNCONDITIONAL
    n = prompts.CLIP
    assert both[:n] == clip[:n] and both[n:] == text[n:]
    assert text[:n] == null[:n] and clip[n:] == null[n:] and text[n:] != null[n:]
    assert {len(both), len(text), len(clip), len(null)} == {prompts.SOUND_SLOTS}
    assert max(both + text + clip) < prompts.SOUND_WORDS


def test_prompts_of_captions_tell_parts_and_pad_the_shorter_one():
    words = len(prompts.VOCABULARY) + 1
    clip = prompts.caption_prompt("video", SCENE.frames())
    sound = prompts.caption_prompt("audio", (SCENE.wave(), balls.RATE))
    assert len(clip) == len(sound) == prompts.CAPTION_SLOTS
    assert (clip[0], sound[0]) == (words, words + 1)
    padded = [row.count(words + prompts.PAD) for row in (clip, sound)]
    assert min(padded) == 0 < max(padded)
    assert not set(clip[1:]) & set(sound[1:]) - {words + prompts.PAD}
    assert max(clip + sound) < words + prompts.CAPTION_WORDS
    for part, media, problem in (
        ("text", "x", "Did you mean|Known"),
        ("audio", (SCENE.wave(), 8000), "16000 Hz"),
        ("audio", (np.zeros(balls.SAMPLES + 1, np.float32), balls.RATE), "at most"),
    ):
        with pytest.raises(GenError, match=problem):
            prompts.caption_prompt(part, media)


def test_every_caption_is_written_in_the_words_of_the_frontend():
    words = TextWords.of(prompts.VOCABULARY, prompts.CAPTION_POSITIONS)
    for scene in balls.scenes(40, 8, held=True):
        said = words.postprocess(
            words.decode(words.encode(words.preprocess(str(scene.caption()))[None]))[0]
        )
        assert captions.parse(said) == scene.caption()


# --- order of codes


class Certain(TabularMasked):
    """Model whose logits are one-hot of some targets [T]."""

    def __init__(self, vocab_size: int, targets: Tensor):
        super().__init__(vocab_size)
        self.hot = torch.nn.functional.one_hot(targets, vocab_size).double() * 50

    def forward(self, ids: Tensor, canvas_length: int) -> Tensor:
        return self.hot.expand(len(ids), -1, -1)


def decoded(targets: Tensor) -> Tensor:
    """Codes that MaskGIT gives with a model that is certain of token ids [T]."""
    modality = AudioModality()
    space = modality.bind(_config(), modality.frontend(), "audio-masked").space
    target = masked_target(Certain(space.vocab_size, targets), space, SamplingParams(), [0])
    sampler = registry.get("sampler", "masked_iterative")(steps=8, order="confidence")
    return modality.to_codes(sampler(target, CounterRNG([1])).tokens, space)[0]


def _config():
    class Config:
        pass

    config = Config()
    config.__dict__ |= read_config("audio-masked")
    return config


def test_a_certain_model_is_decoded_to_its_codes_frame_by_frame():
    codes = torch.randint(
        0, prompts.LEVELS, (prompts.STREAMS, prompts.STEPS), generator=torch.manual_seed(0)
    )
    ids = codes + prompts.LEVELS * torch.arange(prompts.STREAMS)[:, None]
    assert torch.equal(decoded(ids.T.flatten()), codes)
    # control: heads that are trained band by band belong to other positions, or to none
    permuted = codes.T.flatten().view(prompts.STREAMS, -1)
    ids = permuted + prompts.LEVELS * torch.arange(prompts.STREAMS)[:, None]
    assert not torch.equal(decoded(ids.T.flatten()), codes)


def test_the_ids_of_a_sound_are_in_the_order_of_the_model(pipe):
    ids = torch.tensor(prompts.sound_codes(SCENE.wave()))[None]
    frontend = pipe.frontend()
    space = pipe.bound("audio-masked")[1].space
    codes = pipe.modality.to_codes(ids, space)
    assert torch.equal(codes, frontend.encode(frontend.preprocess(SCENE.wave())[None]))
    assert bool(space.legal[torch.arange(space.length), ids[0]].all())


# --- the model


def test_masked_positions_fall_along_the_cosine_until_none_is_left(pipe):
    steps = 16
    out = pipe(BOTH, {"name": "maskgit", "steps": steps}, seed=0, trace=True)
    total = prompts.STEPS * prompts.STREAMS
    left = [math.floor(total * math.cos(math.pi / 2 * (i + 1) / steps)) for i in range(steps)]
    assert left == sorted(set(left), reverse=True) and left[-1] == 0
    assert out.stats[0].nfe == steps
    counts = [len(step.committed) for step in out.traces[0]]
    assert sum(counts) == total and min(counts) > 0
    assert [total - sum(counts[: i + 1]) for i in range(steps)] == left


def logprobs(pipe, scale: float, prompt: dict) -> Tensor:
    """Log-probabilities [T, V] of an empty canvas."""
    sampler, sampling = pipe.resolve("maskgit", explicit={"guidance_scale": scale})
    target = pipe.target(sampler, sampling, pipe.plan([prompt]))
    canvas = torch.full((1, target.length), target.space.mask_token_id)
    return target.predict(canvas).logprobs[0]


def test_guidance_one_is_the_condition_and_zero_is_no_condition(pipe):
    other = {"text": "a blue ball bounces 1 time, high"}
    assert torch.allclose(logprobs(pipe, 0.0, BOTH), logprobs(pipe, 0.0, other), atol=1e-5)
    one, two = logprobs(pipe, 1.0, BOTH), logprobs(pipe, 1.0, other)
    assert not torch.allclose(one, two, atol=1e-2)  # control
    legal = one.isfinite()
    guided, null = logprobs(pipe, 2.0, BOTH), logprobs(pipe, 0.0, BOTH)
    expected = (2 * one - null).masked_fill(~legal, -math.inf).log_softmax(-1)
    assert torch.allclose(guided[legal], expected[legal], atol=1e-4)


def test_a_clip_decides_when_and_a_caption_decides_which_pitch(pipe):
    for prompt, pitch in ((BOTH, "low"), ({"video": BOTH["video"]}, "high")):
        track = pipe(prompt, seed=0).media[0]
        heard = checker.listen(np.asarray(track))
        assert [h.frame for h in heard] == [h.frame for h in SCENE.hits()]
        assert {h.pitch for h in heard} == {pitch} and all(h.loud for h in heard)
        assert isinstance(track, SoundTrack) and np.array_equal(track.frames, BOTH["video"])


def test_a_caption_alone_decides_pitches(pipe):
    out = pipe("a red ball bounces 2 times, low", seed=0, num_samples=8)
    heard = [checker.listen(wave) for wave in out.media]
    assert sum({h.pitch for h in notes} == {"low"} for notes in heard) >= 7
    assert len({tuple(h.frame for h in notes) for notes in heard}) >= 4  # the time is open


@pytest.mark.slow
def test_the_command_writes_a_wave_and_a_clip_with_sound(tmp_path):
    clip = tmp_path / "clip.mp4"
    write_mp4(clip, SCENE.frames(), balls.FPS, scale=16)
    for text in ("", "a red ball bounces, high"):
        out = tmp_path / f"out{len(text)}"
        assert not main(["sample", "audio", text, "--video", str(clip), "--out", str(out)])
        wave, seen = (sorted(out.rglob(f"*.{e}")) for e in ("wav", "mp4"))
        assert len(wave) == 1 and len(seen) >= 1
        heard = checker.listen(AudioModality().load(wave[0]))
        assert [h.frame for h in heard] == [h.frame for h in SCENE.hits()]


def test_bars_show_frame_pitch_and_loudness():
    drawn = bars(SCENE.wave())
    lit = (drawn != balls.GROUND).any((1, 2, 3))
    assert np.flatnonzero(lit).tolist() == [h.frame for h in SCENE.hits()]
    assert drawn[2, 14, 12].tolist() == list(balls.PALETTE["red"])
    assert not (bars(np.zeros(balls.SAMPLES)) != balls.GROUND).any()
