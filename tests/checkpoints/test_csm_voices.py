"""CSM after earlier turns with their sounds, against their own processor and ``generate``."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from calls import only
from published import save_quietly
from tiny_csm import EXTRA, FRAME, RATE, Q, T, tiny, tokenizer

import gen
from gen.core.errors import GenError
from gen.media.audio import write_wav
from gen.models.load.locate import quiet

GREEDY = {"temperature": 0.0}
SAMPLERS = ("autoregressive", "speculative_jacobi")
TEMPLATE = (
    "{% for turn in messages %}{% for part in turn['content'] %}{% if part['type'] == 'text' %}"
    "{{ bos_token + '[' + turn['role'] + ']' + part['text'] + eos_token }}{% else %}"
    "{{ '<a><e>' }}{% endif %}{% endfor %}{% endfor %}"
)


def wave(samples: int, seed: int) -> np.ndarray:
    return (0.3 * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


# unequal contexts: none, one turn, two turns, one longer turn that is no whole number of frames
CONVERSATIONS = [
    ([("0", "hello")], []),
    ([("1", "how are you"), ("0", "hello there")], [wave(5 * FRAME, 1)]),
    ([("0", "hello"), ("1", "my friend"), ("0", "are you")], [wave(320, 2), wave(480, 3)]),
    ([("2", "today"), ("0", "hello")], [wave(7 * FRAME + 31, 4)]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("voices")
    save_quietly(tiny(codec={"num_quantizers": Q}), path)
    tokenizer(path)
    return path


@pytest.fixture(scope="module")
def pipe(folder):
    return gen.load("speech", model=folder, frames=T, dtype="float64")


@pytest.fixture(scope="module")
def processor(folder):
    from transformers import CsmProcessor, EncodecFeatureExtractor, PreTrainedTokenizerFast

    words = PreTrainedTokenizerFast.from_pretrained(
        folder, extra_special_tokens={"audio_token": "<a>", "audio_eos_token": "<e>"}
    )
    return CsmProcessor(
        EncodecFeatureExtractor(1, RATE, padding_value=0.0), words, chat_template=TEMPLATE
    )


@pytest.fixture(scope="module")
def model(folder):
    from transformers import CsmForConditionalGeneration

    with quiet():
        return CsmForConditionalGeneration.from_pretrained(folder, dtype=torch.float64).eval()


def theirs(model, processor, conversations) -> torch.Tensor:
    """Frames [B, T, Q] of transformers' own loop over its own processor's inputs."""
    turns = [
        [
            {
                "role": role,
                "content": [
                    {"type": "text", "text": words},
                    *([{"type": "audio"}] if i < len(sounds) else []),
                ],
            }
            for i, (role, words) in enumerate(lines)
        ]
        for lines, sounds in conversations
    ]
    sounds = [s for _, row in conversations for s in row]
    lengths = dict(kernel_sizes=[FRAME], strides=[FRAME], dilations=[1], use_causal_conv=True)
    inputs = processor(
        text=[processor.apply_chat_template(row) for row in turns],
        audio=sounds or None,
        sampling_rate=RATE,
        encoded_length_kwargs=lengths,
        padding=True,
    ).to(torch.float64)
    with quiet():
        return model.generate(
            **inputs,
            do_sample=False,
            depth_decoder_do_sample=False,
            max_new_tokens=T,
            suppress_tokens=EXTRA,
            depth_decoder_suppress_tokens=EXTRA,
        )


def condition(lines, sounds) -> dict:
    return {
        "messages": [{"role": role, "content": words} for role, words in lines],
        "audio": [(s, RATE) for s in sounds],
    }


def ours(pipe, conversations, sampler, **sampling) -> torch.Tensor:
    prompts = [condition(*c) for c in conversations]
    out = pipe(prompts, sampler=sampler, **only(**(sampling or GREEDY)))
    return out.tokens.view(len(prompts), -1, Q)


def test_greedy_codes_after_earlier_turns_are_those_of_generate(pipe, model, processor):
    want = theirs(model, processor, CONVERSATIONS)
    assert want.shape == (len(CONVERSATIONS), T, Q)
    assert len({tuple(row.flatten().tolist()) for row in want}) == len(CONVERSATIONS)
    for sampler in SAMPLERS:
        assert torch.equal(ours(pipe, CONVERSATIONS, sampler), want)
    swapped = [  # control: the sounds of two rows are exchanged
        CONVERSATIONS[0],
        (CONVERSATIONS[1][0], CONVERSATIONS[3][1]),
        CONVERSATIONS[2],
        (CONVERSATIONS[3][0], CONVERSATIONS[1][1]),
    ]
    changed = (ours(pipe, swapped, "autoregressive") != want).flatten(1).any(1)
    assert changed.tolist() == [False, True, False, True]


@pytest.mark.parametrize("row", (1, 3))
def test_a_conversation_alone_is_that_of_generate(row, pipe, model, processor):
    one = CONVERSATIONS[row : row + 1]
    want = theirs(model, processor, one)
    for sampler in SAMPLERS:
        assert torch.equal(ours(pipe, one, sampler), want)


def test_turns_and_their_sounds_go_together(pipe):
    lines, sounds = CONVERSATIONS[2]
    want = ours(pipe, [(lines, sounds)], "autoregressive")
    assert not torch.equal(ours(pipe, [(lines, sounds[::-1])], "autoregressive"), want)


def test_draws_after_earlier_turns_are_the_same_for_both_samplers(pipe):
    sampling = {"temperature": 1.0, "guidance_scale": 1.5}
    first, second = (ours(pipe, CONVERSATIONS, s, **sampling) for s in SAMPLERS)
    assert torch.equal(first, second)
    assert not torch.equal(first, ours(pipe, CONVERSATIONS, SAMPLERS[0], temperature=1.0))


def test_one_message_is_a_text_and_a_file_is_its_samples(pipe, tmp_path):
    text = pipe("[0]hello", sampler="autoregressive", **only(**GREEDY))
    alone = pipe(condition(*CONVERSATIONS[0]), sampler="autoregressive", **only(**GREEDY))
    parts = [{"role": "0", "content": [{"type": "text", "text": "hello"}]}]
    listed = pipe({"messages": parts}, sampler="autoregressive", **only(**GREEDY))
    assert torch.equal(text.tokens, alone.tokens) and torch.equal(text.tokens, listed.tokens)
    assert str(text.items[0].condition) == str(alone.items[0].condition) == "[0]hello"
    lines, sounds = CONVERSATIONS[1]
    path, turns = tmp_path / "turn.wav", tmp_path / "turns.json"
    write_wav(path, sounds[0], RATE)
    turns.write_text(json.dumps(condition(lines, [])["messages"]))
    parts = {"messages": turns, "audio": path}
    out = pipe(parts, sampler="autoregressive", **only(**GREEDY))
    rounded = np.rint(sounds[0] * 2**15).astype(np.float32) / 2**15
    want = ours(pipe, [(lines, [rounded])], "autoregressive")
    assert torch.equal(out.tokens.view(1, -1, Q), want)


def test_conversations_that_cannot_be_heard_are_refused(pipe, tmp_path):
    lines, sounds = CONVERSATIONS[1]
    turns, sound = condition(lines, [])["messages"], (sounds[0], RATE)
    silent, unreadable = tmp_path / "a.png", tmp_path / "b.wav"
    silent.write_bytes(b"x")
    unreadable.write_bytes(b"x" * 64)
    for parts, message in (
        ({"messages": turns}, "2 messages and 0 sounds; expected one sound for every message"),
        ({"messages": turns, "audio": [sound, sound]}, "2 messages and 2 sounds"),
        ({"messages": turns, "audio": silent}, "a.png', an image; expected a sound"),
        ({"messages": turns, "audio": unreadable}, "b.wav cannot be read"),
        ({"messages": turns, "audio": [np.zeros((80, 2), np.float32)]}, "audio.0 has 2 channels"),
        ({"messages": turns, "images": [np.zeros((4, 4, 3), np.uint8)]}, "got images"),
        ({"messages": turns, "text": "[0]hello", "audio": [sound]}, "got messages.*got text"),
        ({"text": "[0]hello", "audio": [sound]}, "got no messages.*; got audio"),
        ({"messages": [{"role": "user", "content": "hello"}]}, "messages.0.role is 'user'"),
        ({"messages": [{"role": "0", "content": " "}]}, "messages.0.content"),
        ({"messages": [{"role": "0", "content": [{"type": "image"}]}]}, "parts of type 'text'"),
        ({"messages": turns, "audio": [(wave(60 * FRAME, 5), RATE)]}, "tokens; expected at most"),
    ):
        with pytest.raises(GenError, match=message):
            pipe(parts, sampler="autoregressive")


def test_a_conversation_is_saved_and_made_again(pipe, tmp_path):
    from gen.config.entries import stored_job
    from gen.jobs.run import run_job
    from gen.store.ledger import read_rows

    prompts = [condition(*c) for c in CONVERSATIONS]
    out = pipe(prompts, sampler="speculative_jacobi", seed=3)
    out.save(tmp_path)
    rows = read_rows(tmp_path)
    assert [row["status"] for row in rows] == ["ok"] * len(prompts)
    job = stored_job(tmp_path)
    assert run_job(job, load=lambda *_, **__: pipe)["skipped"] == len(prompts)
    file = tmp_path / rows[2]["file"]
    before = file.read_bytes()
    file.unlink()
    assert run_job(job, load=lambda *_, **__: pipe)["skipped"] == len(prompts) - 1
    assert file.read_bytes() == before
