"""Files of tokens, and that a medium made of them is the one that was sampled, in every modality of
the embedded models."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch

import gen
from gen.core.edit_spec import EditSpec
from gen.core.errors import GenError
from gen.jobs.decoder import FITTING, Decoder, require_fit
from gen.media.npz import write_npz
from gen.store.stored_tokens import facts_of, load_tokens, save_tokens


@pytest.fixture(scope="module")
def texts():
    return gen.load("text")(["close ( [ {"], num_samples=2)


# --- the file


@pytest.mark.parametrize("dtype", [torch.long, torch.float32, torch.float64, torch.bfloat16])
def test_what_is_stored_comes_back_as_it_was(texts, dtype, tmp_path):
    latents = dtype.is_floating_point
    tokens = (
        torch.randn(2, 5, 3, dtype=torch.float64).to(dtype)
        if latents
        else torch.arange(10).view(2, 5)
    )
    out = replace(texts, tokens=tokens)
    save_tokens(tmp_path / "a.npz", out, 1)
    found = load_tokens(tmp_path / "a.npz")
    assert torch.equal(found.tokens, tokens[1]) and found.tokens.dtype == dtype
    assert (found.meta["kind"], found.meta["seed"]) == ("latents" if latents else "codes", 1)
    assert found.meta["frontend"]["name"] == "text-words"
    with np.load(tmp_path / "a.npz", allow_pickle=False) as plain:  # numpy reads it as its own
        assert plain.files == ["latents" if latents else "tokens", "meta"]


def test_the_same_tokens_make_the_same_file_whenever_they_are_written(texts, tmp_path, monkeypatch):
    import time

    save_tokens(tmp_path / "a.npz", texts, 0)
    monkeypatch.setattr(
        zipfile.time, "localtime", lambda *_: time.struct_time((2031, 5, 6, 7, 8, 10, 0, 0, 0))
    )
    save_tokens(tmp_path / "b.npz", replace(texts), 0)
    save_tokens(
        tmp_path / "c.npz",
        replace(texts, tokens=texts.tokens.clone().index_fill_(1, torch.tensor([3]), 1)),
        0,
    )
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert (tmp_path / "a.npz").read_bytes() != (tmp_path / "c.npz").read_bytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": None}, "its meta names no version"),
        ({"version": 2}, "version 2; expected at most 1"),
        ({"seed": True}, "seed is True; expected an integer"),
        ({"frontend": "vq"}, "frontend is 'vq'; expected an object"),
        ({"kind": "sounds"}, "kind is 'sounds'; expected codes or latents"),
        ({"kind": "latents"}, "has no 'latents'; it has tokens, meta"),
        ({"tokens": np.zeros((2, 2), np.int32)}, r"int32 \(2, 2\); expected int32 \[T\]"),
        ({"tokens": np.zeros(3, np.float32)}, r"float32 \(3,\); expected int32"),
        ({"tokens": np.zeros(0, np.int32)}, r"\(0,\)"),
        ({"meta": "{"}, "its meta is not JSON"),
        ({"meta": "[]"}, "its meta names no version"),
    ],
)
def test_a_file_that_holds_no_tokens_is_one_line_that_names_it(texts, change, words, tmp_path):
    path = tmp_path / "a.npz"
    save_tokens(path, texts, 0)
    arrays = {"tokens": texts.tokens[0].int().numpy(), "meta": load_tokens(path).meta}
    arrays = {k: change.get(k, v) for k, v in arrays.items()}
    if isinstance(arrays["meta"], dict):
        arrays["meta"] = json.dumps(
            {**arrays["meta"], **{k: v for k, v in change.items() if k not in arrays}}
        )
    write_npz(path, arrays)
    with pytest.raises(GenError, match=f"a.npz .*{words}") as caught:
        load_tokens(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_cut_off_or_missing_is_one_line(texts, tmp_path):
    save_tokens(tmp_path / "a.npz", texts, 0)
    whole = (tmp_path / "a.npz").read_bytes()
    for size in (0, 40, len(whole) // 2, len(whole) - 8):
        (tmp_path / "a.npz").write_bytes(whole[:size])
        with pytest.raises(GenError, match=r"a.npz cannot be read"):
            load_tokens(tmp_path / "a.npz")
    with pytest.raises(GenError, match=r"b.npz does not exist"):
        load_tokens(tmp_path / "b.npz")
    with pytest.raises(GenError, match="without its frontend"):
        save_tokens(tmp_path / "c.npz", replace(texts, frontend=None), 0)


def test_what_an_item_started_from_is_stored_as_far_as_it_can_be(texts, tmp_path):
    (tmp_path / "a.txt").write_text("two + two\n")
    for source, said in (
        (tmp_path / "a.txt", "path"),
        (str(tmp_path / "a.txt"), "path"),
        ("two + two", "text"),
        (np.zeros(3), "unsaved"),
    ):
        save_tokens(
            tmp_path / "a.npz", replace(texts, start=EditSpec(source=source, span="1:2")), 0
        )
        start = load_tokens(tmp_path / "a.npz").meta["start"]
        assert said in start["source"] and start["span"] == "1:2" and "mask" not in start


# --- the same medium again

IMAGE, WALK, CLOSE = "a large red circle at the top left", "a person walks forward", "close ( [ {"
FAST = {"name": "maskgit", "steps": 2}
CASES = {
    "codes": ("image", None, IMAGE, FAST, {}),
    "latents": ("image", "image-mar", IMAGE, {"name": "masked_iterative", "steps": 2}, {}),
    "latents in double precision": (
        "image",
        "image-mar",
        IMAGE,
        {"name": "masked_iterative", "steps": 2},
        {"dtype": "float64"},
    ),
    "words": ("text", None, CLOSE, "speculative_jacobi", {}),
    "words, masked": ("text", None, CLOSE, FAST, {}),
    "bins": ("action", None, "reach", FAST, {}),
    "frequencies": ("action", "action-fast", "reach", "speculative_jacobi", {}),
    "streams": ("speech", None, "stop one down, low voice, slow", FAST, {}),
    "streams of one length": ("motion", None, WALK, "speculative_jacobi", {"frames": 32}),
    "streams of any length": ("motion", None, WALK, FAST, {}),
    "frames": (
        "video",
        None,
        "a large yellow cross moves right quickly",
        FAST,
        {"dtype": "float64"},
    ),
}


def bits(medium):
    if isinstance(medium, str):
        return medium.encode()
    parts = (
        (medium.root, medium.rotations) if hasattr(medium, "rotations") else (np.asarray(medium),)
    )
    return b"".join(p.tobytes() for p in parts)


def again(out, folder, *, change=None):
    """The bits of the first medium, and of that which its stored tokens make."""
    save_tokens(folder / "tokens.npz", out, 0)
    stored = load_tokens(folder / "tokens.npz")
    stored = stored if change is None else replace(stored, tokens=change(stored.tokens))
    decoder = Decoder(stored.meta, folder)
    found = bits(out.media[0]), bits(decoder.medium(stored))
    assert not decoder.pipe._loaded  # no model was asked for
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.thinned(6)
def test_the_medium_of_stored_tokens_is_the_sampled_one(case, tmp_path):
    modality, model, prompt, sampler, how = CASES[case]
    pipe = gen.load(modality, model, dtype=how.get("dtype", "float32"))
    out = pipe(prompt, sampler, seed=3, frames=how.get("frames"))
    first, second = again(out, tmp_path)
    assert first == second
    if out.tokens.is_floating_point():
        assert (
            first != again(out, tmp_path, change=lambda t: t + 0.5)[1]
        )  # control: other tokens, another medium
    elif case != "frequencies":  # whose ids cannot be exchanged one by one

        def other(t):
            return torch.cat([t[:1] + (1 if t[0] == 0 else -1), t[1:]])

        assert first != again(out, tmp_path, change=other)[1]


def test_edits_are_laid_over_their_source_again(tmp_path):
    images, texts = gen.load("image"), gen.load("text")
    source, mask = np.full((64, 64, 3), 90, np.uint8), np.zeros((64, 64), bool)
    mask[:, 32:] = True
    for name, medium in (("source.png", source), ("mask.png", mask)):
        images.modality.save(medium, tmp_path / name, {})
    out = images(IMAGE, FAST, source=str(tmp_path / "source.png"), mask=str(tmp_path / "mask.png"))
    first, second = again(out, tmp_path)
    assert first == second
    save_tokens(
        tmp_path / "plain.npz", replace(out, start=EditSpec()), 0
    )  # control: the same tokens, laid over nothing
    plain = Decoder(load_tokens(tmp_path / "plain.npz").meta, tmp_path).medium(
        load_tokens(tmp_path / "plain.npz")
    )
    assert not np.array_equal(np.asarray(plain), np.asarray(out.media[0]))
    words = texts(CLOSE, FAST, source="} ] )", span="1:2")
    first, second = again(words, tmp_path)
    assert first == second


def test_an_edit_that_cannot_be_made_again_says_so_in_one_line(tmp_path):
    pipe = gen.load("image")
    source, mask = np.full((64, 64, 3), 90, np.uint8), np.ones((64, 64), bool)
    job, elsewhere = tmp_path / "job", tmp_path / "elsewhere"
    (job / "inputs").mkdir(parents=True)
    elsewhere.mkdir()
    for name, medium in (("source.png", source), ("mask.png", mask)):
        pipe.modality.save(medium, elsewhere / name, {})
    out = pipe(IMAGE, FAST, source=elsewhere / "source.png", mask=elsewhere / "mask.png")
    assert len(set(again(out, job))) == 1
    (elsewhere / "source.png").rename(job / "inputs" / "source.png")  # as a job keeps it
    assert (
        len(
            set(
                again(
                    replace(out, start=replace(out.start, source=job / "inputs" / "source.png")),
                    job,
                )
            )
        )
        == 1
    )
    stored = load_tokens(job / "tokens.npz")
    stored.meta["start"]["source"]["path"] = "/nowhere/source.png"
    assert Decoder(stored.meta, job).medium(stored).tobytes() == out.media[0].tobytes()
    pipe.modality.save(source + 1, job / "inputs" / "source.png", {})
    with pytest.raises(
        GenError, match=r"cannot be reproduced: its source .*inputs/source.png has changed"
    ):
        Decoder(stored.meta, job).medium(stored)
    (job / "inputs" / "source.png").unlink()
    with pytest.raises(
        GenError,
        match=r"cannot be reproduced: its source /nowhere/source.png no longer exists",
    ):
        Decoder(stored.meta, job).medium(stored)
    save_tokens(job / "tokens.npz", replace(out, start=EditSpec(source=source, mask=mask)), 0)
    stored = load_tokens(job / "tokens.npz")
    with pytest.raises(
        GenError, match="cannot be reproduced: its source was a ndarray in memory, and no file"
    ):
        Decoder(stored.meta, job).medium(stored)


# --- what does not fit


def test_tokens_of_another_length_prompt_or_model_are_refused(texts, tmp_path):
    save_tokens(tmp_path / "a.npz", texts, 0)
    stored = load_tokens(tmp_path / "a.npz")
    decoder = Decoder(stored.meta, tmp_path)
    assert decoder.medium(stored) == texts.media[0]
    with pytest.raises(
        GenError,
        match=r"tokens have shape \(15,\); expected \(16,\), the positions of model text-causal",
    ):
        decoder.medium(replace(stored, tokens=stored.tokens[1:]))
    with pytest.raises(
        GenError,
        match="prompt and seed give 'close .*', but the output was made for 'something else'",
    ):
        decoder.medium(replace(stored, meta={**stored.meta, "condition": "something else"}))
    with pytest.raises(
        GenError,
        match=(
            r"the frontend of text-causal has codebook \w+, the tokens were made with 0123"
            r" \(text-words\)"
        ),
    ):
        Decoder(
            {**stored.meta, "frontend": {**stored.meta["frontend"], "digest": "0123"}}, tmp_path
        )
    with pytest.raises(GenError, match="unknown model 'text-casual'"):
        Decoder({**stored.meta, "model": "text-casual"}, tmp_path)


def test_a_file_cannot_allow_the_code_of_a_model_to_run(texts, tmp_path):
    save_tokens(tmp_path / "a.npz", texts, 0)
    meta = load_tokens(tmp_path / "a.npz").meta
    with pytest.raises(
        GenError, match="with trust_remote_code; pass --trust-remote-code to run its code again"
    ):
        Decoder({**meta, "model_options": {"trust_remote_code": True}}, tmp_path)


@pytest.mark.parametrize("key", FITTING)
def test_a_frontend_of_other_codes_is_refused_in_one_line(key):
    facts = facts_of(gen.load("speech").frontend())
    require_fit(dict(facts), facts, "mine", "speech-codec")
    with pytest.raises(
        GenError,
        match=(
            f"^frontend mine has {key} other; expected .*, as the one that the tokens were made"
            " with"
        ),
    ):
        require_fit({**facts, key: "other"}, facts, "mine", "speech-codec")
