"""MusicGen: the decoder through the causal protocol against its own class and its own ``generate``,
on a tiny random folder."""

import json

import pytest
import torch
from calls import only
from published import save_quietly
from tiny_musicgen import CODES, RATE, Q, T, tiny, tokenizer

import gen
from gen.contracts.layouts import make_layout
from gen.core.errors import GenError
from gen.core.rng import CounterRNG
from gen.media.audio import read_wav
from gen.modalities.checkpoints.musicgen import MusicFrames
from gen.models.load.locate import quiet
from gen.models.published.frame_lm import FrameLM
from gen.models.targets.causal import CausalTarget

PROMPTS = ["a slow song", "fast drums and loud guitar in the rain", "piano", "soft bass with drums"]
GREEDY = {"temperature": 0.0, "guidance_scale": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("musicgen")
    save_quietly(tiny(), path)
    tokenizer(path)
    return path


@pytest.fixture(scope="module")
def pipe(folder):
    return gen.load("speech", model=folder, frames=T, dtype="float64")


@pytest.fixture(scope="module")
def music(pipe, folder):
    """The checkpoint, with their own class over the same files beside it."""
    from transformers import MusicgenForConditionalGeneration

    found = pipe.bound(pipe.model)[0]
    with quiet():
        found.theirs = MusicgenForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float64
        ).eval()
    return found


def said(music, prompts):
    return music.tokenizer(prompts, padding=True, return_tensors="pt")


def theirs(music, prompts, scale):
    """The codes [B, Q, T] of transformers' own loop, taken where it hands them to the codec."""
    found, codec = [], music.theirs.audio_encoder
    real = codec.decode
    codec.decode = lambda codes, **rest: found.append(codes[0].clone()) or real(codes, **rest)
    try:
        music.theirs.generate(
            **said(music, prompts), do_sample=False, guidance_scale=scale, max_length=T + Q
        )
    finally:
        del codec.decode
    return found[0]


def ours(pipe, prompts, sampler, sampling):
    out = pipe(prompts, sampler=sampler, **only(**sampling))
    return pipe.modality.to_codes(out.tokens, None)


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "four"])
@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.thinned(2)
def test_greedy_codes_are_those_of_their_own_loop(prompts, scale, pipe, music):
    want = theirs(music, prompts, scale)
    assert want.shape == (len(prompts), Q, T) and len(want.unique()) > 8
    sampling = {"temperature": 0.0, "guidance_scale": scale}
    for sampler in ("autoregressive", "speculative_jacobi"):
        assert torch.equal(ours(pipe, prompts, sampler, sampling), want)
    assert not torch.equal(
        ours(pipe, prompts[::-1] if len(prompts) > 1 else PROMPTS[1:2], "autoregressive", sampling),
        want,
    )  # control


def test_guidance_and_prompts_change_what_is_made(pipe, music):
    assert not torch.equal(theirs(music, PROMPTS, 1.0), theirs(music, PROMPTS, 3.0))
    assert len({tuple(row.flatten().tolist()) for row in theirs(music, PROMPTS, 1.0)}) == len(
        PROMPTS
    )


def laid_out(codes, delays=tuple(range(Q))):
    return make_layout(
        "delay", sizes=(CODES,) * Q, grid=(T,), delays=delays, vocabulary="offset", flat=True
    ).to_sequence(codes)


def frames_logits(music, tokens, cut):
    """Logits [B, S, Q, CODES] of all places, asked for in two calls, each stream's own part of the
    ids."""
    adapter = music.adapter("causal")
    prompt = torch.tensor([music.binding.prompt(music.condition(p)) for p in PROMPTS])
    given = torch.cat([prompt, tokens[:, :-1]], 1)
    positions = torch.arange(given.shape[1]).expand_as(given)
    cache = adapter.new_cache(given.shape[1])
    parts = [
        adapter.forward(given[:, :cut], positions[:, :cut], cache),
        adapter.forward(given[:, cut:], positions[:, cut:], cache),
    ]
    logits = torch.cat(parts, 1).view(len(tokens), -1, Q, adapter.vocab_size)
    return torch.stack([logits[:, :, q, q * CODES : (q + 1) * CODES] for q in range(Q)], 2)


def their_logits(music, tokens):
    """The same by the class, from the frames of a delayed sequence."""
    steps = tokens.view(len(tokens), -1, Q)
    codes = torch.where(steps == Q * CODES, CODES, steps - CODES * torch.arange(Q))
    before = torch.cat([torch.full_like(codes[:, :1], CODES), codes[:, :-1]], 1)
    with torch.no_grad():
        out = music.theirs(
            **said(music, PROMPTS),
            decoder_input_ids=before.transpose(1, 2).reshape(-1, before.shape[1]),
        ).logits
    return out.view(len(tokens), Q, -1, CODES).transpose(1, 2)


@pytest.mark.parametrize("cut", [1, 4, 14])
def test_logits_equal_those_of_the_class(cut, music, monkeypatch):
    codes = torch.randint(CODES, (len(PROMPTS), Q, T), generator=torch.Generator().manual_seed(3))
    tokens = laid_out(codes)
    want = their_logits(music, tokens)

    def error():
        return float((frames_logits(music, tokens, cut) - want).abs().max())

    assert error() < 1e-5 and float(want.std()) > 0.1
    late = laid_out(codes, (0, 2, 3))[:, : tokens.shape[1]]  # control: a delay that is off by one
    assert float((frames_logits(music, late, cut) - want).abs().max()) > 1e-2
    real = MusicFrames.unseen
    monkeypatch.setattr(
        MusicFrames, "unseen", lambda self, lengths: real(self, lengths) * 0
    )  # control: padding is seen
    assert error() > 1e-3


def test_the_decoder_runs_once_per_step_and_not_once_per_code(pipe):
    sampler, sampling = pipe.resolve("autoregressive", GREEDY)
    items = pipe.plan(PROMPTS)
    target = pipe.target(sampler, sampling, items)
    out = sampler(target, CounterRNG([pipe.draw_key(i) for i in items]))
    steps = T + Q - 1
    assert target.model.calls == steps and out.tokens.shape[1] == steps * Q
    assert [s.nfe for s in out.stats] == [steps] * len(
        items
    )  # what is reported is what the network did
    again = pipe.target(sampler, sampling, items)
    for position in range(Q):  # one step's places: the first asks for it, the others find it
        again.predict(
            out.tokens[:, max(0, position - 1)][:, None], torch.full((len(items), 1), position)
        )
        assert again.model.calls == 1 and bool(again.cache.ran.all()) == (position == 0)


@pytest.mark.parametrize("window", [5, 16])
def test_a_draft_that_was_another_one_is_forgotten(window, pipe, monkeypatch):
    sampler = {"name": "speculative_jacobi", "window": window}
    sampling = {"temperature": 1.0, "guidance_scale": 2.0}
    want = ours(pipe, PROMPTS, "autoregressive", sampling)
    assert torch.equal(ours(pipe, PROMPTS, sampler, sampling), want)
    monkeypatch.setattr(
        FrameLM, "_invalidate", lambda self, position, cache: None
    )  # control: states of other drafts stay
    assert torch.equal(ours(pipe, PROMPTS, "autoregressive", sampling), want)
    assert not torch.equal(ours(pipe, PROMPTS, sampler, sampling), want)


def test_rows_that_leave_the_batch_do_not_touch_the_others(pipe):
    sampling = {"temperature": 1.0, "guidance_scale": 2.0}
    whole = ours(pipe, PROMPTS, "speculative_jacobi", sampling)
    for row, prompt in enumerate(PROMPTS):
        assert torch.equal(ours(pipe, [prompt], "speculative_jacobi", sampling)[0], whole[row])


@pytest.mark.parametrize(
    "sampler",
    ["autoregressive", "speculative_jacobi", "scd_mc", "typical", "lantern_pp", "speculative"],
)
@pytest.mark.thinned(3)
def test_samplers_write_waves(sampler, pipe, folder, tmp_path):
    spec = {"name": sampler, "draft_model": str(folder)} if sampler == "speculative" else sampler
    out = pipe(PROMPTS[:2], sampler=spec, seed=1)
    assert (
        out.sampling.guidance_scale == 2.5 and out.sampling.top_k == 250
    )  # what the folder says, and the paper
    out.save(tmp_path / "job")
    files = sorted((tmp_path / "job").glob("*.wav"))
    assert len(files) == 2
    for file in files:
        assert read_wav(file, RATE).shape == (T * 40,)


def test_a_wave_is_what_the_codec_makes_of_the_codes(pipe, music):
    out = pipe(PROMPTS[:1], sampler="autoregressive", seed=2)
    codes = pipe.modality.to_codes(out.tokens, None)
    with torch.no_grad():
        wave = music.theirs.audio_encoder.decode(codes[None], [None]).audio_values[0, 0]
    assert torch.allclose(torch.from_numpy(out.media[0]).double(), wave.clamp(-1, 1), atol=1e-6)


def test_lengths_are_said_in_seconds_or_frames(folder, pipe):
    assert gen.load("speech", model=folder, seconds=0.1).bound(str(folder))[1].space.grid == (
        20 + Q - 1,
        Q,
    )
    assert pipe.bound(pipe.model)[1].space.grid == (T + Q - 1, Q)
    for options in (
        dict(seconds=1, frames=3),
        dict(frames=0),
        dict(seconds=-1),
        dict(seconds=100),
        dict(frames=63),
    ):
        with pytest.raises(GenError, match="expected"):
            gen.load("speech", model=folder, **options)
    with pytest.raises(GenError, match="frames"):
        gen.load("speech", model=folder, frame=3)


def test_files_of_old_hold_a_table_of_positions_that_is_not_needed(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {"decoder.model.decoder.embed_positions.weights": torch.zeros(64, 32)},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    table = (
        gen.load("speech", model=tmp_path, frames=T)
        .bound(str(tmp_path))[0]
        .model.decoder.model.decoder.embed_positions.weights
    )
    assert float(table.std()) > 0.1
    save_file(
        tensors | {"decoder.model.decoder.other": torch.zeros(3)},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )  # control
    with pytest.raises(GenError, match="other"):
        gen.load("speech", model=tmp_path, frames=T)


def test_what_does_not_fit_is_refused(folder, pipe, tmp_path):
    with pytest.raises(GenError, match="empty"):
        pipe("  ", sampler="autoregressive")
    with pytest.raises(GenError, match="cannot be continued"):
        pipe(
            PROMPTS[0],
            sampler="autoregressive",
            prefix=pipe(PROMPTS[0], sampler="autoregressive").media[0],
        )
    with pytest.raises(GenError, match="masked"):
        pipe(PROMPTS[0], sampler="maskgit")
    with pytest.raises(GenError, match="speech"):
        gen.load("image", model=folder)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["decoder"]["audio_channels"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(GenError, match="mono"):
        gen.load("speech", model=tmp_path)


def test_a_codec_with_fewer_codebooks_is_refused(tmp_path):
    save_quietly(tiny(num_codebooks=Q + 1), tmp_path)
    tokenizer(tmp_path)
    with pytest.raises(GenError, match="expected equal numbers"):
        gen.load("speech", model=tmp_path)


def test_the_unconditional_half_of_guidance_is_their_null_input(pipe, music):
    space = music.binding.space
    said = music.condition(PROMPTS[0])
    rows = torch.tensor([music.binding.without(said), music.binding.prompt(said)])
    _sampler, sampling = pipe.resolve("autoregressive", {"guidance_scale": 1.0})
    target = CausalTarget(music.adapter("causal"), rows, space, sampling)
    logp = target.predict(
        torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long)
    ).logprobs
    with torch.no_grad():
        given = music.theirs.get_unconditional_inputs(1)
        start = torch.full((Q, 1), CODES)
        want = music.theirs(
            encoder_outputs=given.encoder_outputs,
            attention_mask=given.attention_mask,
            decoder_input_ids=start,
        ).logits[0, 0]
    assert torch.allclose(logp[0, 0, :CODES], want.log_softmax(-1), atol=1e-5)
    assert not torch.allclose(logp[1, 0, :CODES], want.log_softmax(-1), atol=1e-2)
