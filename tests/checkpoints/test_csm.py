"""CSM: backbone and depth decoder through the causal protocol against their own classes and their
own ``generate``, on a tiny random folder."""

import json

import numpy as np
import pytest
import torch
from calls import only
from published import padded_left
from tiny_csm import CODES, EXTRA, FRAME, RATE, WORDS, Q, T, written

import gen
from gen.contracts.layouts import make_layout
from gen.core.errors import GenError
from gen.core.rng import CounterRNG
from gen.media.audio import read_wav
from gen.modalities.checkpoints.csm import AfterSilence, Line, SpokenFrames
from gen.models.load.locate import quiet
from gen.models.published.frame_lm import FrameLM

PROMPTS = ["[0]hello", "[1]how are you today my friend", "[0]hello there", "[2]are you"]
GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written(tmp_path_factory.mktemp("csm"))


@pytest.fixture(scope="module")
def ending(tmp_path_factory):
    """One with two codes, so that a frame of zeros comes soon."""
    return written(tmp_path_factory.mktemp("ending"), codec={"codebook_size": 2}, seed=7)


@pytest.fixture(scope="module")
def pipe(folder):
    return gen.load("speech", model=folder, frames=T, dtype="float64")


@pytest.fixture(scope="module")
def brief(ending):
    return gen.load("speech", model=ending, frames=12, dtype="float64")


@pytest.fixture(scope="module")
def speech(pipe, folder):
    """The checkpoint, with their own class over the same files beside it."""
    from transformers import CsmForConditionalGeneration

    found = pipe.bound(pipe.model)[0]
    with quiet():
        found.theirs = CsmForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float64
        ).eval()
    return found


def said(speech, prompts):
    return padded_left([speech.tokenizer(p)["input_ids"] for p in prompts], 0)


def theirs(speech, prompts):
    """The frames [B, T, Q] of transformers' own loop, which may say ids that are no codes unless it
    is told."""
    with quiet():
        return speech.theirs.generate(
            **said(speech, prompts),
            do_sample=False,
            depth_decoder_do_sample=False,
            max_new_tokens=T,
            suppress_tokens=EXTRA,
            depth_decoder_suppress_tokens=EXTRA,
        )


def ours(pipe, prompts, sampler, sampling, **more):
    return pipe(prompts, sampler=sampler, **only(**sampling), **more).tokens.view(
        len(prompts), -1, Q
    )


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "four"])
def test_greedy_codes_are_those_of_their_own_loop(prompts, pipe, speech, monkeypatch):
    want = theirs(speech, prompts)
    assert want.shape == (len(prompts), T, Q) and len(want.unique()) > 8
    assert len({tuple(row.flatten().tolist()) for row in want}) == len(prompts)
    for sampler in ("autoregressive", "speculative_jacobi"):
        assert torch.equal(ours(pipe, prompts, sampler, GREEDY), want)
    real = SpokenFrames.begin

    def late(self, prompt, length, cache):
        return real(
            self,
            torch.nn.functional.pad(prompt, (0, 2)),
            length.amax().expand_as(length) + 2,
            cache,
        )

    monkeypatch.setattr(SpokenFrames, "begin", late)  # control: padding is read as if it were words
    assert not torch.equal(ours(pipe, prompts, "autoregressive", GREEDY), want)


def frames_logits(speech, tokens, cut):
    """Logits [B, T, Q, CODES] of all places, asked for in two calls."""
    adapter = speech.adapter("causal")
    prompts = [speech.binding.prompt(speech.condition(p)) for p in PROMPTS]
    length, width = torch.tensor([len(p) for p in prompts]), max(map(len, prompts))
    rows = torch.tensor([p + p[-1:] * (width - len(p)) for p in prompts])
    at = torch.minimum(torch.arange(width), length[:, None] - 1)
    positions = torch.cat([at, length[:, None] + torch.arange(T * Q - 1)], 1)
    given = torch.cat([rows, tokens[:, :-1]], 1)
    cache, cut = adapter.new_cache(width + T * Q), cut + width
    parts = [
        adapter.forward(given[:, :cut], positions[:, :cut], cache),
        adapter.forward(given[:, cut:], positions[:, cut:], cache),
    ]
    return torch.cat(parts, 1)[:, width - 1 :, :CODES].view(len(tokens), T, Q, CODES)


def their_logits(speech, frames):
    """The same by the classes: the backbone over words and frames, the depth decoder over every
    frame."""
    model, found = speech.theirs, []
    with torch.no_grad():
        for prompt, row in zip(PROMPTS, frames, strict=True):
            words = model.embed_text_tokens(torch.tensor([speech.tokenizer(prompt)["input_ids"]]))
            inputs = torch.cat([words, model.backbone_model.embed_tokens(row[None, :-1])], 1)
            states = model.backbone_model(inputs_embeds=inputs).last_hidden_state[0, -T:]
            first = model.lm_head(states)[:, None, :CODES]
            ids = torch.nn.functional.pad(row[:, :-1], (1, 0))
            rest = model.depth_decoder(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                backbone_last_hidden_state=states,
            ).logits[..., :CODES]
            found.append(torch.cat([first, rest], 1))
    return torch.stack(found)


@pytest.mark.parametrize("cut", [0, 1, 6, 16])
def test_logits_equal_those_of_the_classes(cut, speech):
    frames = torch.randint(CODES, (len(PROMPTS), T, Q), generator=torch.Generator().manual_seed(3))
    want = their_logits(speech, frames)
    got = frames_logits(speech, frames.flatten(1), cut)
    assert float((got - want).abs().max()) < 1e-5 and float(want.std()) > 0.1
    late = frames_logits(
        speech, frames.roll(1, 2).flatten(1), cut
    )  # control: streams in another order
    assert float((late - want)[:, 1:].abs().max()) > 1e-2


def test_the_backbone_runs_once_per_frame(pipe):
    sampler, sampling = pipe.resolve("autoregressive", GREEDY)
    items = pipe.plan(PROMPTS)
    target = pipe.target(sampler, sampling, items)
    out = sampler(target, CounterRNG([pipe.draw_key(i) for i in items]))
    assert [s.nfe for s in out.stats] == [T] * len(
        items
    )  # what is reported is what the backbone did
    assert target.model.calls == T and target.model.depth_calls == T * (Q - 1)
    whole = pipe.target(sampler, sampling, items)  # a whole utterance of drafts: one call of each
    positions = torch.arange(T * Q).expand(len(items), -1)
    whole.predict(torch.ones_like(positions), positions)
    assert (whole.model.calls, whole.model.depth_calls) == (1, 1)


@pytest.mark.parametrize("window", [5, 16])
def test_a_draft_that_was_another_one_is_forgotten(window, pipe, monkeypatch):
    sampler, sampling = {"name": "speculative_jacobi", "window": window}, {"temperature": 1.0}
    want = ours(pipe, PROMPTS, "autoregressive", sampling)
    assert torch.equal(ours(pipe, PROMPTS, sampler, sampling), want)
    monkeypatch.setattr(
        FrameLM, "_invalidate", lambda self, position, cache: None
    )  # control: states of other drafts stay
    assert torch.equal(ours(pipe, PROMPTS, "autoregressive", sampling), want)
    assert not torch.equal(ours(pipe, PROMPTS, sampler, sampling), want)


def test_rows_of_a_batch_are_what_they_are_alone(pipe):
    sampling = {"temperature": 1.0, "guidance_scale": 1.5}
    whole = ours(pipe, PROMPTS, "speculative_jacobi", sampling)
    for row, prompt in enumerate(PROMPTS):
        assert torch.equal(ours(pipe, [prompt], "speculative_jacobi", sampling)[0], whole[row])


@pytest.mark.parametrize(
    "sampler", ["autoregressive", "speculative_jacobi", "scd_mc", "typical", "speculative"]
)
@pytest.mark.thinned(2)
def test_samplers_write_waves(sampler, pipe, folder, tmp_path):
    spec = {"name": sampler, "draft_model": str(folder)} if sampler == "speculative" else sampler
    out = pipe(PROMPTS[:2], sampler=spec, seed=1)
    assert (
        out.sampling.temperature == 0.9
        and out.sampling.top_k == 50
        and int(out.tokens.max()) < CODES
    )
    out.save(tmp_path / "job")
    files = sorted((tmp_path / "job").glob("*.wav"))
    assert len(files) == 2
    for file in files:
        assert read_wav(file, RATE).shape == (T * FRAME,)


def test_a_frame_of_zeros_ends_an_utterance_and_nothing_else_does(brief):
    positions, plain = 12, {"temperature": 1.0, "top_k": 0}
    runs = {
        s: brief(PROMPTS, sampler=s, num_samples=3, seed=5, **only(**plain))
        for s in ("autoregressive", "speculative_jacobi")
    }
    out = runs["autoregressive"]
    assert torch.equal(out.tokens, runs["speculative_jacobi"].tokens)
    ended = 0
    for row, media in zip(out.tokens.view(-1, positions, Q), out.media, strict=True):
        silent = (row[:, :-1] == 0).all(1)
        over = (row == 2).all(1)
        assert torch.equal(over, (row == 2).any(1))
        first = int(silent.long().argmax()) if bool(silent.any()) else positions - 1
        assert torch.equal(over, torch.arange(positions) > first)
        spoken = max(1, first + int(not bool(silent[first] and row[first, -1] == 0)))
        assert media.shape == (spoken * FRAME,)
        ended += bool(over.any())
    assert ended > 0


def test_the_end_changes_nothing_before_it(brief, monkeypatch):
    """The distribution of the codes is that of a space without an end; a rule that ends early is
    another distribution."""

    def draw():
        return brief(
            PROMPTS,
            sampler="autoregressive",
            num_samples=2,
            seed=5,
            **only(temperature=1.0),
        ).tokens

    want = draw()

    def never(self, history, positions):
        return torch.arange(self.vocab_size) != self.eos_token_id + 0 * positions[..., None]

    monkeypatch.setattr(AfterSilence, "legal", never)
    free = draw()
    assert not torch.equal(free, want) and torch.equal(torch.where(want == 2, free, want), free)
    monkeypatch.undo()
    real = AfterSilence.legal

    def early(self, history, positions):
        return real(self, history * (torch.arange(history.shape[1]) % Q != 1), positions)

    monkeypatch.setattr(
        AfterSilence, "legal", early
    )  # control: stream 1 is not looked at, so more frames end a row
    assert int((draw() == 2).sum()) > int((want == 2).sum())


def test_their_loop_ends_where_ours_does(brief, ending):
    """Greedy: what they make of a prompt until their stop, and what is left of it here."""
    from transformers import CsmForConditionalGeneration

    speech = brief.bound(brief.model)[0]
    with quiet():
        own = CsmForConditionalGeneration.from_pretrained(ending, dtype=torch.float64).eval()
    extra, ended = [2, 3, 4], 0
    for prompt in PROMPTS:
        with quiet():
            want = own.generate(
                **said(speech, [prompt]),
                do_sample=False,
                depth_decoder_do_sample=False,
                max_new_tokens=12,
                suppress_tokens=extra,
                depth_decoder_suppress_tokens=extra,
                output_audio=False,
            )[0]
        got = ours(brief, [prompt], "speculative_jacobi", GREEDY)[0]
        assert torch.equal(got[: len(want)], want) and bool((got[len(want) :] == 2).all())
        ended += len(want) < 12
    assert 0 < ended < len(PROMPTS)


def test_prompts_say_who_speaks(pipe, folder):
    speech = pipe.bound(pipe.model)[0]
    assert str(speech.condition(" [7] hello there ")) == "[7]hello there" and speech.condition(
        "hello"
    ) == Line(0, "hello")
    assert gen.load("speech", model=folder, frames=T, speaker=2).bound(str(folder))[0].condition(
        "hello"
    ) == Line(2, "hello")
    ids = [i - (CODES + 1) for i in speech.binding.prompt(speech.condition("[7]hello"))]
    assert [WORDS[i] for i in ids] == "<bos> [ 7 ] hello <eos>".split()
    for bad in ("", "[0]", "[3]  "):
        with pytest.raises(GenError, match="expected"):
            speech.condition(bad)
    with pytest.raises(GenError, match="tokens"):
        pipe("[0]" + "hello " * 60, sampler="autoregressive")


def test_an_utterance_is_continued(pipe):
    sampling = {"temperature": 1.0}
    start = (0.3 * np.random.default_rng(0).standard_normal(3 * FRAME + 7)).astype(np.float32)
    out = {
        s: ours(pipe, PROMPTS[:2], s, sampling, prefix=start)
        for s in ("autoregressive", "speculative_jacobi")
    }
    frontend = pipe.bound(pipe.model)[2]
    codes = frontend.encode(frontend.preprocess(start[: 3 * FRAME])[None])[0]
    assert torch.equal(out["autoregressive"][:, :3], codes.T.expand(2, -1, -1))
    assert torch.equal(out["autoregressive"], out["speculative_jacobi"])
    assert not torch.equal(
        out["autoregressive"], ours(pipe, PROMPTS[:2], "autoregressive", sampling)
    )
    for bad in (
        start[:10],
        start[None],
        np.full(FRAME, np.nan, np.float32),
        np.zeros(T * FRAME, np.float32),
    ):
        with pytest.raises(GenError, match="expected"):
            pipe(PROMPTS[0], sampler="autoregressive", prefix=bad)


def test_codes_go_back_and_forth(pipe):
    codes = torch.randint(1, CODES, (2, Q, 5))
    tokens = make_layout("depth", sizes=(CODES,) * Q, grid=(5,)).to_sequence(codes)
    assert torch.equal(pipe.modality.to_codes(tokens, None), codes)
    codes[:, :, 3:] = 0
    assert pipe.modality.to_codes(codes.transpose(1, 2).flatten(1), None).shape == (2, Q, 3)
    assert pipe.modality.to_codes(codes.transpose(1, 2).flatten(1)[:, 3 * Q :], None).shape == (
        2,
        Q,
        1,
    )  # something is always left


def test_what_does_not_fit_is_refused(folder, tmp_path):
    for options in (
        dict(seconds=1, frames=3),
        dict(frames=0),
        dict(frames=64),
        dict(speaker=-1),
        dict(speaker="0"),
        dict(second=3),
    ):
        with pytest.raises(GenError, match="expected|Did you mean"):
            gen.load("speech", model=folder, **options)
    with pytest.raises(GenError, match="speech"):
        gen.load("video", model=folder)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"codebook_eos_token_id": CODES + 1}))
    with pytest.raises(GenError, match="codebook_eos_token_id"):
        gen.load("speech", model=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(GenError, match="missing"):
        gen.load("speech", model=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(GenError, match="extra"):
        gen.load("speech", model=tmp_path)


def test_what_is_streamed_is_what_a_call_gives(pipe):
    said = dict(num_samples=2, seed=1, sampler="speculative_jacobi", **only(temperature=1.0))
    parts = {}
    for chunk in pipe.stream(PROMPTS[1], **said):
        parts.setdefault(chunk.item.index, []).append(chunk.media)
    whole = pipe(PROMPTS[1], **said)
    assert int(whole.tokens.max()) < CODES  # none of them ends
    for row, media in enumerate(whole.media):
        assert len(parts[row]) > 1 and np.array_equal(np.concatenate(parts[row]), media)


def test_rows_that_end_are_streamed_as_far_as_they_go(brief):
    said = dict(
        num_samples=3,
        seed=5,
        sampler="speculative_jacobi",
        **only(temperature=1.0),
    )
    parts = {}
    for chunk in brief.stream(PROMPTS, **said):
        parts.setdefault(chunk.item.index, []).append(chunk.media)
    whole = brief(PROMPTS, **said)
    assert len({len(m) for m in whole.media}) > 1  # some end before others
    for row, media in enumerate(whole.media):
        assert np.array_equal(np.concatenate(parts[row]), media)
