"""Speech and video through the pipeline, the command line and jobs: streaming, continuation, and
what is refused."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import gen
from gen.__main__ import main
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.modalities.speech import synth as spoken
from gen.modalities.video import captions as moving

ROOT = Path(__file__).parents[2]
PROMPTS = {
    "speech": ["three seven", "go, high voice"],
    "video": ["a red square moves right", "a small blue ring moves up and bounces"],
}
JACOBI = {"name": "speculative_jacobi", "window": 48}


def slowly(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


STREAMED = [
    ("speech", JACOBI),
    ("speech", {"name": "maskgit", "steps": 6}),
    slowly("speech", "autoregressive"),
    ("video", JACOBI),
    ("video", {"name": "frame_blocks", "steps": 2}),
    slowly("video", {"name": "halton", "steps": 4}),
]


def IDS(x):
    return x if isinstance(x, str) else x["name"]


@pytest.fixture(scope="module")
def pipes():
    return {name: gen.load(name) for name in PROMPTS}


def medium(name: str, seed: int = 2):
    rng = np.random.default_rng(seed)
    if name == "speech":
        return spoken.speak(spoken.parse(PROMPTS[name][0]), rng)
    return moving.draw(moving.parse("a small red square moves right slowly"), rng)


# --- every sampler


@pytest.mark.parametrize("modality", PROMPTS)
def test_every_sampler_of_ids_has_a_config_and_every_other_is_refused_with_the_reason(
    modality, pipes
):
    """The configs are run by the tests of the pages."""
    configs = {p.stem for p in (ROOT / "configs" / modality).glob("*.yaml")}
    told = {
        (p.stem, json.dumps(p.read_text())) for p in (ROOT / "configs" / modality).glob("*.yaml")
    }
    # decoders of language models, whose parts test_selector_by_modality.py has, and of images
    elsewhere = {
        p.stem for room in ("text", "image") for p in (ROOT / "configs" / room).glob("*.yaml")
    }
    presets = registry.table("preset")
    elsewhere |= {presets[name].sampler for name in elsewhere if name in presets}
    named = {
        name
        for name in (*registry.table("sampler"), *registry.table("preset"))
        if name in configs
        or any(f"sampler: {name}\\n" in text or f"name: {name}" in text for _, text in told)
    }
    for name in (*registry.table("sampler"), *registry.table("preset")):
        sampler, _ = resolve_sampler(name)
        if not type(sampler).__module__.startswith("gen.samplers"):
            continue  # what other tests registered
        if "codes" not in sampler.kinds:
            with pytest.raises(
                GenError, match=f"modality '{modality}' has no {sampler.protocol}-latents model"
            ):
                pipes[modality](PROMPTS[modality][0], name)
        elif sampler.protocol not in pipes[modality].modality.models:
            with pytest.raises(
                GenError,
                match=f"modality '{modality}' has no {sampler.protocol} model; it has causal",
            ):
                pipes[modality](PROMPTS[modality][0], name)
        elif name not in (
            "distance",
            "relaxed_acceptance",
            "mar",
            "masked_window",
            "wedlm",
        ):  # for ordered bins; the family of those that are named; for latents; for a causal model
            # that was trained at mask tokens, which does not ship
            assert name in named | elsewhere, (
                f"no config of {modality}, of text or of images runs {name}"
            )


@pytest.mark.parametrize("modality", ["speech", slowly("video")])
@pytest.mark.slow
def test_jacobi_gives_the_tokens_of_autoregression(modality):
    pipe = gen.load(modality, dtype="float64")
    prompt = PROMPTS[modality][0]
    plain, jacobi = (pipe(prompt, s, seed=4, num_samples=2) for s in ("autoregressive", JACOBI))
    assert torch.equal(plain.tokens, jacobi.tokens)
    assert all(np.array_equal(a, b) for a, b in zip(plain.media, jacobi.media, strict=True))
    assert sum(s.nfe for s in jacobi.stats) * 2 <= sum(s.nfe for s in plain.stats)
    assert not torch.equal(jacobi.tokens[0], jacobi.tokens[1])  # control: other noise, other tokens


# --- streaming


@pytest.mark.parametrize(("modality", "sampler"), STREAMED, ids=IDS)
@pytest.mark.thinned(2)
def test_chunks_put_together_are_the_medium(modality, sampler, pipes):
    pipe = pipes[modality]
    whole = pipe(PROMPTS[modality], sampler, seed=3)
    parts: dict[int, list] = {0: [], 1: []}
    for chunk in pipe.stream(PROMPTS[modality], sampler, seed=3):
        parts[chunk.item.index].append(chunk.media)
        assert chunk.item.prompt == PROMPTS[modality][chunk.item.index]
    for i, medium in enumerate(whole.media):
        assert np.array_equal(np.concatenate(parts[i]), medium)
        assert len(parts[i]) > 1 or IDS(sampler) in (
            "maskgit",
            "halton",
        )  # they know the first places last


@pytest.mark.parametrize(
    ("modality", "sampler"),
    [
        ("speech", JACOBI),
        slowly("speech", "autoregressive"),
        slowly("video", "autoregressive"),
        ("video", {"name": "frame_blocks", "steps": 2}),
    ],
    ids=IDS,
)
def test_the_first_chunk_is_out_before_a_quarter_of_the_forward_passes(modality, sampler, pipes):
    """Counted, not timed: how many calls were made when the first chunk came. Speculative decoding
    of video is not among them: the first frame holds nearly all that is left to chance, and takes
    two fifths of its calls."""
    pipe, calls, first = pipes[modality], [], []
    out = pipe.generate(
        pipe.plan(PROMPTS[modality][:1]),
        sampler,
        callback=calls.append,
        on_chunk=lambda row, media: first.append(len(calls) + 1),
    )  # the callback follows the chunk
    assert first[0] * 4 < out.stats[0].nfe == len(calls)


def test_a_reader_who_leaves_ends_the_work(pipes):
    before = threading.active_count()
    stream = pipes["video"].stream(PROMPTS["video"][0], {"name": "frame_blocks", "steps": 2})
    next(stream)
    stream.close()
    assert threading.active_count() == before


def test_what_goes_wrong_in_a_stream_is_raised_where_it_is_read(pipes):
    with pytest.raises(GenError, match="outside the vocabulary"):
        next(pipes["speech"].stream("three lemons"))
    with pytest.raises(GenError, match="has no blocks model"):
        next(pipes["speech"].stream("three", "frame_blocks"))
    with pytest.raises(GenError, match="modality 'motion' cannot be streamed"):
        next(gen.load("motion").stream("a person walks forward"))


# --- continuation


@pytest.mark.parametrize(("modality", "sampler"), STREAMED, ids=IDS)
@pytest.mark.thinned(2)
def test_a_continued_medium_keeps_its_tokens_and_follows_them(modality, sampler, pipes):
    pipe = pipes[modality]
    frames = {"speech": 20, "video": 4}[modality]
    unit = {"speech": 640, "video": 2}[modality]
    given = medium(modality)[: frames * unit + 1]  # what fills no frame of codes is left out
    frontend = pipe.frontend()
    known = pipe.modality.prefix(
        given,
        frontend,
        pipe.target(
            *pipe.resolve(sampler, None),
            pipe.plan("two" if modality == "speech" else "a ring moves up"),
        ).space,
    )
    out = pipe(PROMPTS[modality][0], sampler, prefix=given, num_samples=2, trace=True)
    assert torch.equal(out.tokens[:, : len(known)], known.expand(2, -1))
    assert not torch.equal(out.tokens[0], out.tokens[1])
    committed = set().union(*(step.committed for step in out.traces[0]))
    assert committed == set(range(len(known), out.tokens.shape[1]))
    parts = [c.media for c in pipe.stream(PROMPTS[modality][0], sampler, prefix=given)]
    assert np.array_equal(np.concatenate(parts), out.media[0])


@pytest.mark.parametrize(
    ("modality", "sampler"),
    [
        slowly("speech", JACOBI),
        slowly("speech", "autoregressive"),
        ("video", {"name": "frame_blocks", "steps": 2}),
    ],
    ids=IDS,
)
def test_what_is_continued_after_its_own_tokens_is_the_same_again(
    modality, sampler, pipes, monkeypatch
):
    """The places after a prefix have the draws that they always have."""
    pipe = pipes[modality]
    whole = pipe(PROMPTS[modality][0], sampler, seed=8)
    known = whole.tokens[0, : whole.tokens.shape[1] // 2]
    monkeypatch.setattr(pipe.modality, "prefix", lambda media, frontend, space: known)
    assert torch.equal(
        pipe(PROMPTS[modality][0], sampler, seed=8, prefix="its own").tokens, whole.tokens
    )
    assert not torch.equal(
        pipe(PROMPTS[modality][0], sampler, seed=9, prefix="its own").tokens, whole.tokens
    )


def test_prefixes_that_are_no_good_are_refused_with_what_was_expected(pipes, tmp_path, monkeypatch):
    import soundfile

    for package in ("torchaudio", "scipy", "scipy.signal"):  # they would resample
        monkeypatch.setitem(sys.modules, package, None)

    speech, video = (lambda p, n=name: pipes[n](PROMPTS[n][0], prefix=p) for name in PROMPTS)
    wave, clip = medium("speech"), medium("video")

    def wav(name, x, rate):
        return (soundfile.write(tmp_path / name, x, rate), tmp_path / name)[1]

    whole = wav("whole.wav", wave, 16_000)
    (tmp_path / "cut.wav").write_bytes(whole.read_bytes()[:20_000])
    (tmp_path / "text.wav").write_text("no sound")
    for prefix, words in (
        (wav("rate.wav", wave, 22_050), "22050 samples per second; expected 16000"),
        (wav("stereo.wav", np.stack([wave, wave], 1), 16_000), "2 channels; expected 1"),
        (wav("empty.wav", wave[:0], 16_000), "empty; expected at least one sample"),
        (tmp_path / "cut.wav", "is cut off: its header promises"),
        (tmp_path / "text.wav", "cannot be read"),
        (tmp_path / "missing.wav", "missing.wav"),
        (wave[:600], "has 600 samples; expected at least 640"),
        (wave, "has 60 frames of codes; expected fewer than 60"),
        (np.stack([wave, wave]), r"expected floats \[n\], one channel"),
        (np.full(6400, np.nan, np.float32), "NaN or inf"),
    ):
        with pytest.raises(GenError, match=words):
            speech(prefix)
    from gen.media.video import write_lossless, write_mp4

    write_mp4(tmp_path / "good.mp4", clip[:8], 8, scale=8)
    write_lossless(tmp_path / "wide.mkv", np.zeros((4, 32, 48, 3), np.uint8), 8)
    (tmp_path / "cut.mp4").write_bytes((tmp_path / "good.mp4").read_bytes()[:-900])
    assert len(video(tmp_path / "good.mp4").media[0]) == 16
    for prefix, words in (
        (tmp_path / "wide.mkv", "48x32"),
        (tmp_path / "cut.mp4", "cut off|cannot be read|damaged"),
        (whole, "whole.wav"),
        (clip[:1], "has 1 frames; expected at least 2"),
        (clip, "has 8 frames of codes; expected fewer than 8"),
        (clip[:, :16], r"expected uint8 \[frames, 32, 32, 3\]"),
        (clip[:0], "has 0 frames"),
    ):
        with pytest.raises(GenError, match=words):
            video(prefix)
    with pytest.raises(GenError, match="modality 'image' cannot be continued"):
        gen.load("image")("a red circle", prefix=clip)


# --- text


@pytest.mark.parametrize(
    ("modality", "text", "words"),
    [
        ("speech", "three sevn", "'sevn' is outside the vocabulary.*Did you mean 'seven'"),
        ("speech", "", "empty"),
        ("speech", "one two three four five", "5 words to speak; expected one to four"),
        (
            "video",
            "a red squre moves right",
            "'squre' is outside the vocabulary.*Did you mean 'square'",
        ),
        ("video", "   ", "empty"),
        ("video", "a red square moves", "the end of the caption"),
    ],
)
def test_text_outside_the_language_is_refused(modality, text, words, pipes):
    with pytest.raises(GenError, match=words):
        pipes[modality](text)


# --- the command line, jobs


@pytest.mark.slow
def test_the_commands_of_the_first_page_make_media_that_can_be_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        main(["sample", "speech", "three seven", "--num-samples", "2", "--seed", "0", "--out", "D"])
        == 0
    )
    assert (
        main(
            [
                "sample",
                "video",
                "a red square moves right",
                "--num-samples",
                "2",
                "--seed",
                "0",
                "--out",
                "E",
            ]
        )
        == 0
    )
    for folder, modality, kind in (("D", "speech", ".wav"), ("E", "video", ".mp4")):
        rows = [
            json.loads(line)
            for line in (tmp_path / folder / "manifest.jsonl").read_text().splitlines()
        ]
        assert [Path(r["file"]).suffix for r in rows] == [kind] * 2 and all(
            r["status"] == "ok" for r in rows
        )
        made = gen.load(modality)(rows[0]["prompt"], num_samples=2).media
        read = [
            registry.get("modality", modality)().load(tmp_path / folder / r["file"]) for r in rows
        ]
        assert [m.shape for m in made] == [m.shape for m in read]
        worst = max(
            float(np.abs(a.astype(float) - b.astype(float)).mean())
            for a, b in zip(made, read, strict=True)
        )
        assert worst < (1e-4 if modality == "speech" else 3)
        assert main(["check", folder]) == 0
    first = next((tmp_path / "D").glob("*.wav"))
    assert (
        main(
            [
                "sample",
                "speech",
                "three seven nine",
                "--prefix",
                str(first),
                "--seed",
                "1",
                "--out",
                "F",
            ]
        )
        == 0
    )


def test_one_job_makes_three_modalities_and_one_gallery(tmp_path):
    (tmp_path / "job.yaml").write_text("""
jobs:
  - {modality: image, prompts: [a red circle], sampler: {name: maskgit, steps: 3}}
  - {modality: speech, prompts: [two], sampler: {name: maskgit, steps: 3}}
  - {modality: video, prompts: [a ring moves up], sampler: speculative_jacobi}
""")
    assert main(["run", str(tmp_path / "job.yaml"), f"out={tmp_path / 'out'}"]) == 0
    rows = [
        json.loads(line) for line in (tmp_path / "out" / "manifest.jsonl").read_text().splitlines()
    ]
    assert [Path(r["file"]).suffix for r in rows] == [".png", ".wav", ".mp4"]
    page = (tmp_path / "out" / "index.html").read_text()
    assert all(f'id="modality-{name}"' in page for name in ("image", "speech", "video"))
    assert all(r["file"] in page for r in rows) and "<audio" in page and "<video" in page
