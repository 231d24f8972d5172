"""Whisper through the causal protocol against its own class, feature extractor and ``generate``."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from calls import only
from tiny_whisper import (
    END,
    NO_TIMESTAMPS,
    POSITIONS,
    PREVIOUS,
    RATE,
    SIZE,
    START,
    SUPPRESSED,
    SUPPRESSED_FIRST,
    TASKS,
    wave,
    written,
)

import gen
from gen.contracts.condition import Condition
from gen.core.errors import GenError
from gen.models.load.locate import quiet

T = 12
SAMPLERS = ("autoregressive", "speculative_jacobi")
SOUNDS = [wave(n, seed) for n, seed in ((4000, 0), (16000, 1), (9000, 2), (1234, 3), (12345, 4))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def english(tmp_path_factory):
    return written(tmp_path_factory.mktemp("english"), multilingual=False, seed=1)


@pytest.fixture(scope="module")
def pipe(folder):
    return gen.load("text", model=folder, dtype="float64", max_new_tokens=T)


def loaded(folder):
    from transformers import WhisperForConditionalGeneration

    with quiet():
        return WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def model(folder):
    return loaded(folder)


def features(folder, sounds):
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    return extractor(list(sounds), sampling_rate=RATE, return_tensors="pt").input_features.double()


def theirs(model, folder, sounds, **more) -> list[list[int]]:
    """Answers of their own loop, without what stands behind the end."""
    with quiet():
        out = model.generate(features(folder, sounds), max_new_tokens=T, **more)
    return [[i for i in row if i not in (0, END)] for row in out.tolist()]


def ours(pipe, sounds, sampler="autoregressive", texts=None, **sampling) -> list[list[int]]:
    texts = texts or [""] * len(sounds)
    prompts = [{"prompt": t, "audio": (s, RATE)} for t, s in zip(texts, sounds, strict=True)]
    out = pipe(prompts, sampler=sampler, **only(**(sampling or {"temperature": 0.0})))
    for row in out.tokens:
        assert not bool(((row == END).long().cumsum(0).bool() & (row != END)).any())
    return [[i for i in row if i != END] for row in out.tokens.tolist()]


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, {"task": "transcribe"}),
        ({"language": "german"}, {"language": "de"}),
        ({"language": "fr", "task": "translate"}, {"language": "french", "task": "translate"}),
    ],
    ids=["detected", "german", "translated"],
)
def test_greedy_texts_are_those_of_generate_alone_and_in_a_batch(options, asked, folder, model):
    pipe = gen.load("text", model=folder, dtype="float64", max_new_tokens=T, **options)
    want = theirs(model, folder, SOUNDS, **asked)
    assert len({tuple(row) for row in want}) == len(SOUNDS)
    assert len({i for row in want for i in row}) > 8
    for sampler in SAMPLERS:
        assert ours(pipe, SOUNDS, sampler) == want
        number = SAMPLERS.index(sampler)  # a row alone
        alone = [SOUNDS[number]]
        assert ours(pipe, alone, sampler) == [want[number]] == theirs(model, folder, alone, **asked)
    swapped = [SOUNDS[1], SOUNDS[0], *SOUNDS[2:]]  # control: the sounds of two rows are exchanged
    changed = [a != b for a, b in zip(ours(pipe, swapped), want, strict=True)]
    assert changed == [True, True, False, False, False]


def test_languages_are_detected_item_by_item_as_they_do(pipe, folder, model):
    checkpoint = pipe.modality.checkpoint
    sounds = [wave(16000, seed) for seed in range(24)]
    with quiet():
        want = model.detect_language(input_features=features(folder, sounds)).tolist()
    heard = [checkpoint.parse(Condition.of({"audio": (s, RATE)})) for s in sounds]
    ids = [checkpoint.prompt(h) for h in heard]
    assert [row[1] for row in ids] == want
    assert all(row[0] % SIZE == START for row in ids)
    assert [row[2:] for row in ids] == [[TASKS["transcribe"], NO_TIMESTAMPS]] * len(sounds)


def test_an_english_model_has_no_language_and_no_task(english):
    pipe = gen.load("text", model=english, dtype="float64", max_new_tokens=T)
    want = theirs(loaded(english), english, SOUNDS)
    for sampler in SAMPLERS:
        assert ours(pipe, SOUNDS, sampler) == want
    for options, message in (
        ({"language": "en"}, "knows one language"),
        ({"task": "translate"}, "task 'translate'"),
    ):
        with pytest.raises(GenError, match=message):
            gen.load("text", model=english, **options)


def test_a_text_before_the_sound_is_their_prompt(pipe, folder, model):
    texts = ["w1 w2 w3", "", "w7", "w4 w4 w5 w6 w9", ""]  # prompts of unequal lengths in a batch
    tokenizer, want = pipe.modality.checkpoint.tokenizer, []
    for text, sound in zip(texts, SOUNDS, strict=True):
        ids = torch.tensor([PREVIOUS, *tokenizer(text, add_special_tokens=False)["input_ids"]])
        more = {"prompt_ids": ids} if text else {}
        want += theirs(model, folder, [sound], task="transcribe", **more)
    for sampler in SAMPLERS:
        assert ours(pipe, SOUNDS, sampler, texts) == want
    assert ours(pipe, SOUNDS) != want  # control


def test_logits_equal_those_of_the_class(pipe, folder, model):
    checkpoint = pipe.modality.checkpoint
    heard = [checkpoint.parse(Condition.of({"audio": (s, RATE)})) for s in SOUNDS]
    prompts = torch.tensor([checkpoint.prompt(h) for h in heard])
    answer = torch.randint(SIZE, (len(SOUNDS), T), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([prompts, answer], 1)
    with torch.no_grad():
        want = model(input_features=features(folder, SOUNDS), decoder_input_ids=ids % SIZE).logits
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    for cut in (4, 5, 9):
        adapter = checkpoint.adapter("causal")
        cache = adapter.new_cache(ids.shape[1])
        parts = [
            adapter.forward(ids[:, part], positions[:, part], cache)
            for part in (slice(0, cut), slice(cut, None))
        ]
        assert float((torch.cat(parts, 1) - want).abs().max()) < 1e-9
    ids[:, 0] += SIZE  # control: every row after the sound of another one
    late = adapter.forward(ids[:-1], positions[:-1], adapter.new_cache(ids.shape[1]))
    assert float((late - want[:-1]).abs().max()) > 1e-2


def test_draws_are_the_same_for_both_samplers_and_keep_to_the_allowed_tokens(pipe):
    sampling = {"temperature": 2.0, "guidance_scale": 1.5}
    first, second = (ours(pipe, SOUNDS, s, **sampling) for s in SAMPLERS)
    assert first == second != ours(pipe, SOUNDS, temperature=2.0)
    legal = pipe.modality.checkpoint.binding.space.legal
    assert not legal[:, SUPPRESSED].any() and not legal[0, SUPPRESSED_FIRST].any()
    free = set(range(SIZE)) - set(SUPPRESSED)
    assert legal[1:, sorted(free)].all() and all(set(row) <= free for row in first)
    rows = [ours(pipe, [s], SAMPLERS[1], **sampling)[0] for s in SOUNDS]
    assert [len(row) for row in rows] == [len(row) for row in first]


def test_texts_end_where_the_model_says_so(folder, tmp_path):
    """With the end's embedding made likely, rows of a batch end at different positions."""
    from safetensors.torch import load_file, save_file

    copied = shutil.copytree(folder, tmp_path / "f")
    tensors = load_file(copied / "model.safetensors")
    end = tensors["model.decoder.embed_tokens.weight"][END]
    tensors["model.decoder.layer_norm.bias"] += 2 * end
    save_file(tensors, copied / "model.safetensors", {"format": "pt"})
    pipe = gen.load("text", model=copied, dtype="float64", max_new_tokens=T)
    want = theirs(loaded(copied), copied, SOUNDS, task="transcribe")
    assert len({len(row) for row in want}) > 1 and min(map(len, want)) < T
    for sampler in SAMPLERS:
        assert ours(pipe, SOUNDS, sampler) == want


def test_the_command_line_writes_down_a_file(folder, tmp_path, capsys):
    from gen.__main__ import main
    from gen.media.audio import write_wav

    path = tmp_path / "said.wav"
    write_wav(path, SOUNDS[0], RATE)
    arguments = ["sample", "text", "", "--audio", str(path), "--model", str(folder)]
    options = ["model_options.max_new_tokens=12", "dtype=float64", "--out", str(tmp_path / "out")]
    assert main([*arguments, *options]) == 0
    rounded = np.rint(SOUNDS[0] * 2**15).astype(np.float32) / 2**15
    pipe = gen.load("text", model=folder, dtype="float64", max_new_tokens=T)
    said = pipe({"audio": (rounded, RATE)}).media[0]
    (text,) = (tmp_path / "out").glob("*.txt")
    assert text.read_text().strip() == said and said
    capsys.readouterr()


def test_what_cannot_be_heard_is_refused(pipe, folder, tmp_path):
    image, unreadable = tmp_path / "a.png", tmp_path / "b.wav"
    image.write_bytes(b"x")
    unreadable.write_bytes(b"x" * 64)
    sound = (SOUNDS[0], RATE)
    for parts, message in (
        ({"audio": image}, "a.png', an image; expected a sound"),
        ({"audio": unreadable}, "b.wav cannot be read"),
        ({"audio": [sound, sound]}, "at most 1 audio; got 2"),
        ({"audio": (np.zeros((80, 2), np.float32), RATE)}, "audio has 2 channels"),
        ({"audio": (wave(RATE + 1, 0), RATE)}, "lasts 1.0 seconds; expected at most 1,"),
        ({"text": "w1"}, "no sound; expected audio"),
        ({"audio": sound, "image": np.zeros((4, 4, 3), np.uint8)}, "got images"),
        ({"audio": sound, "text": "w1 <|en|>"}, "holds '<|en|>'; expected words"),
        ({"audio": sound, "text": "w1 " * POSITIONS}, "tokens; expected at most"),
    ):
        with pytest.raises(GenError, match=message.replace("|", r"\|")):
            pipe(parts)
    for options, message in (
        ({"language": "klingon"}, "language 'klingon'"),
        ({"task": "transcrib"}, "Did you mean 'transcribe'"),
        ({"max_new_tokens": POSITIONS}, "max_new_tokens is 40"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ):
        with pytest.raises(GenError, match=message):
            gen.load("text", model=folder, **options)


def test_folders_without_their_settings_are_refused(folder, tmp_path):
    copied = shutil.copytree(folder, tmp_path / "f")
    settings = json.loads((copied / "generation_config.json").read_text())
    for lost in ("no_timestamps_token_id", "decoder_start_token_id"):
        kept = {k: v for k, v in settings.items() if k != lost}
        (copied / "generation_config.json").write_text(json.dumps(kept))
        with pytest.raises(GenError, match=f"{lost} in generation_config.json of .* is None"):
            gen.load("text", model=copied)
    kept = {k: v for k, v in settings.items() if k != "prev_sot_token_id"}
    (copied / "generation_config.json").write_text(json.dumps(kept))
    with pytest.raises(GenError, match="takes none before a sound"):
        gen.load("text", model=copied)({"audio": (SOUNDS[0], RATE), "text": "w1"})
    (copied / "preprocessor_config.json").unlink()
    with pytest.raises(GenError, match="feature extractor of .*expected preprocessor_config.json"):
        gen.load("text", model=copied)
