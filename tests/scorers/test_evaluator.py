"""What a search sees of its outputs: media of finished and unfinished rows, as the call itself
decodes them, whatever stands beside them."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gen
from gen.contracts.scorer import Sample, Scorer, read_scorer
from gen.core.edit_spec import EditSpec
from gen.pipeline.request import GenerationRequest

CAUSAL, MASKED = {"name": "best_of", "n": 1}, {"name": "best_of", "n": 1, "base": "maskgit"}
STEPS = {"name": "maskgit", "steps": 3}


class Recorder(Scorer):
    """Scorer that keeps what it is asked about."""

    def __init__(self):
        self.seen: list[Sample] = []

    def score(self, samples):
        self.seen += samples
        return [0.0] * len(samples)


def evaluator(pipe, spec, start=EditSpec(), prompts=None) -> Any:
    """Prepare a call, and return what judges its outputs, with its request and target."""
    spec = {**spec, "base": STEPS} if spec.get("base") == "maskgit" else spec
    prompts = prompts or pipe.modality.example_prompts(2, 0)
    items = pipe.plan(prompts, seed=1)
    request = GenerationRequest(items, spec, *pipe.resolve(spec), start=start)
    prepared = pipe.prepare(request)
    return prepared.target.evaluator, request, prepared


def same(one: Any, other: Any) -> bool:
    """Compare two media."""
    if hasattr(one, "joints"):
        one, other = one.joints, other.joints
    if isinstance(one, str):
        return one == other
    return np.array_equal(np.asarray(one), np.asarray(other))


NAMES = [
    (m, kind)
    for m in ("text", "action", "motion", "image", "video", "speech")
    for kind in ("causal", "masked")
]


@pytest.fixture(scope="module")
def pipes():
    made: dict[str, Any] = {}

    def of(name: str) -> Any:
        return made.setdefault(name, gen.load(name))

    return of


@pytest.mark.parametrize(("name", "kind"), NAMES)
@pytest.mark.thinned(3)
def test_a_finished_output_is_judged_by_the_media_that_the_call_returns(pipes, name, kind):
    pipe, recorder = pipes(name), Recorder()
    spec = CAUSAL if kind == "causal" else {**MASKED, "base": STEPS}
    prompts = pipe.modality.example_prompts(2, 0)
    out = pipe(prompts, {**spec, "scorer": recorder}, seed=1, progress=False)
    assert len(recorder.seen) == 2
    for sample, media, tokens, item in zip(
        recorder.seen, out.media, out.tokens, out.items, strict=True
    ):
        assert same(sample.media, media) and torch.equal(sample.tokens, tokens)
        assert (sample.prompt, sample.condition) == (item.prompt, item.condition)
        assert not sample.is_partial


@pytest.mark.parametrize(("name", "kind"), NAMES)
@pytest.mark.thinned(3)
def test_an_unfinished_output_decodes_and_every_reward_of_its_modality_judges_it(pipes, name, kind):
    from gen.core.registry import registry

    pipe = pipes(name)
    judge, _, prepared = evaluator(pipe, CAUSAL if kind == "causal" else MASKED)
    space = prepared.target.space
    for share in (0.0, 0.3, 1.0):
        length = space.length
        known = (torch.arange(length) < share * length).expand(2, -1)
        tokens = legal_tokens(space, 2)
        for scorer_name, cls in registry.table("scorer").items():
            if inspect.signature(cls).parameters.keys() & {"model", "path"}:
                continue  # needs a model, or a file
            if not cls.modalities or name in cls.modalities:
                scores = judge.scores(read_scorer(scorer_name), tokens, np.array([0, 1]), known)
                assert scores.shape == (2,) and np.isfinite(scores).all()


def legal_tokens(space: Any, rows: int) -> Tensor:
    """Draw tokens that are allowed, none of which ends a row."""
    legal = space.legal.float().clone()
    if space.eos_token_id is not None:
        legal[:, space.eos_token_id] = 0
    return legal.multinomial(rows, replacement=True, generator=torch.Generator().manual_seed(0)).T


def test_what_is_not_decided_of_a_causal_output_does_not_change_its_media(pipes):
    judge, _, prepared = evaluator(pipes("text"), CAUSAL)
    tokens = legal_tokens(prepared.target.space, 2)
    known = (torch.arange(tokens.shape[1]) < 3).expand(2, -1)
    spoilt = torch.where(known, tokens, tokens.flip(0))
    media = [[s.media for s in judge.samples(t, np.arange(2), known)] for t in (tokens, spoilt)]
    assert media[0] == media[1]
    assert all(len(text.split()) == 3 for text in media[0])  # the words so far, and no more


def test_control_what_is_not_decided_of_a_masked_output_is_its_estimate(pipes):
    judge, _, prepared = evaluator(pipes("text"), MASKED)
    tokens = legal_tokens(prepared.target.space, 2)
    known = (torch.arange(tokens.shape[1]) < 3).expand(2, -1)
    spoilt = torch.where(known, tokens, tokens.flip(0))
    media = [[s.media for s in judge.samples(t, np.arange(2), known)] for t in (tokens, spoilt)]
    assert media[0] != media[1]


def test_the_media_of_a_row_do_not_depend_on_the_rows_beside_it(pipes):
    for name in ("image", "motion"):
        judge, _, prepared = evaluator(pipes(name), MASKED)
        tokens = legal_tokens(prepared.target.space, 3)
        known = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(1)) < 0.5
        items = np.array([0, 1, 0])
        together = judge.samples(tokens, items, known)
        for k in range(3):
            (alone,) = judge.samples(tokens[k : k + 1], items[k : k + 1], known[k : k + 1])
            assert same(alone.media, together[k].media)
            assert torch.equal(alone.known, together[k].known)


def test_equal_rows_are_decoded_once_in_a_call(pipes, monkeypatch):
    pipe = pipes("image")
    judge, _, prepared = evaluator(pipe, MASKED)
    tokens = legal_tokens(prepared.target.space, 2)[[0, 1, 0, 0]]
    decoded, decode = [], pipe.decode

    def counting(row, *more):
        decoded.append(row)
        return decode(row, *more)

    monkeypatch.setattr(pipe, "decode", counting)
    samples = judge.samples(tokens, np.array([0, 1, 1, 0]))
    assert len(decoded) == 2
    assert same(samples[0].media, samples[2].media)
    assert not same(samples[0].media, samples[1].media)
    assert [s.item for s in samples] == [0, 1, 1, 0]


def test_rows_that_differ_behind_their_end_alone_are_decoded_once(pipes, monkeypatch):
    pipe = pipes("text")
    judge, _, prepared = evaluator(pipe, MASKED)
    tokens = legal_tokens(prepared.target.space, 2)
    tokens[:, 4] = prepared.space.eos_token_id
    tokens[1, :4] = tokens[0, :4]
    assert not torch.equal(tokens[0], tokens[1])
    decoded, decode = [], pipe.decode
    monkeypatch.setattr(pipe, "decode", lambda row, *m: decoded.append(1) or decode(row, *m))
    first, second = judge.samples(tokens, np.arange(2))
    assert len(decoded) == 1 and first.media == second.media


def test_media_of_the_items_are_theirs_where_their_tokens_are_equal(pipes):
    judge, request, prepared = evaluator(pipes("action"), CAUSAL)
    tokens = legal_tokens(prepared.target.space, 1)[[0, 0]]
    samples = judge.samples(tokens, np.array([0, 1]))
    for sample, item in zip(samples, request.items, strict=True):
        assert sample.media.situation is item.condition


def test_an_unfinished_continuation_begins_with_its_prefix(pipes):
    pipe = pipes("text")
    prompts = ["sort 5 3 1 2 =", "copy 5 3 1 2 ="]
    judge, _, prepared = evaluator(pipe, CAUSAL, EditSpec(prefix="1 2"), prompts)
    tokens = legal_tokens(prepared.target.space, 2)
    assert tokens.shape[1] == prepared.space.length - 2
    known = (torch.arange(tokens.shape[1]) < 1).expand(2, -1)
    for sample, row in zip(judge.samples(tokens, np.arange(2), known), tokens, strict=True):
        words = sample.media.split()
        assert words[:2] == ["1", "2"] and len(words) == 3
        assert torch.equal(sample.tokens[2:3], row[:1])
        assert sample.known.tolist() == [True] * 3 + [False] * (len(row) - 1)


def test_an_unfinished_edit_is_judged_with_its_source_laid_around_it(pipes):
    pipe = pipes("image")
    source = pipe("a large red circle at the top left", seed=1, progress=False).media[0]
    mask = np.zeros((64, 64), bool)
    mask[:, 32:] = True
    start = EditSpec(source=source, mask=mask)
    judge, _, prepared = evaluator(pipe, MASKED, start, ["a red circle"] * 2)
    tokens = legal_tokens(prepared.target.space, 2)
    known = ~prepared.target.space.is_masked(prepared.start.canvas)
    for sample in judge.samples(tokens, np.arange(2), known):
        made = np.asarray(sample.media)
        assert np.array_equal(made[:, :32], np.asarray(source)[:, :32])
        assert not np.array_equal(made[:, 32:], np.asarray(source)[:, 32:])


def test_actions_of_byte_pairs_decode_before_they_are_a_whole_chunk():
    pipe = gen.load("action", "action-fast")
    judge, _, _ = evaluator(pipe, CAUSAL)
    prompts = pipe.modality.example_prompts(2, 0)
    whole = pipe(prompts, seed=1, progress=False).tokens
    for decided in (0, 2, 5):
        known = (torch.arange(whole.shape[1]) < decided).expand(2, -1)
        for sample in judge.samples(whole, np.arange(2), known):
            assert np.asarray(sample.media.action).shape == (16, 2)


def test_latents_decode_while_they_are_unfinished():
    pipe = gen.load("image", "image-causal-latents")
    judge, _, prepared = evaluator(pipe, CAUSAL, prompts=["a red circle", "a blue ring"])
    space = prepared.target.space
    tokens = torch.randn(2, space.length, space.channels)
    tokens[:, 5:] = float("nan")  # nothing is known of them
    known = (torch.arange(space.length) < 5).expand(2, -1)
    assert np.isfinite(judge.scores(read_scorer("red_area"), tokens, np.arange(2), known)).all()


def test_a_scorer_is_attached_to_a_call_once(pipes):
    judge, request, prepared = evaluator(pipes("text"), CAUSAL)
    calls = []

    class Attached(Recorder):
        def attach(self, models, given):
            calls.append((models, given))
            return self

    scorer, tokens = Attached(), legal_tokens(prepared.target.space, 2)
    for _ in range(3):
        judge.scores(scorer, tokens, np.arange(2))
    assert calls == [(pipes("text"), request)]


def test_outputs_that_say_the_same_give_the_same_answer(pipes):
    judge, _, prepared = evaluator(pipes("text"), MASKED)
    tokens = legal_tokens(prepared.target.space, 2)[[0, 0, 1]]
    tokens[:, 4:] = prepared.space.eos_token_id
    tokens[1, 6:] = tokens[2, 0]  # behind the end
    one, same_one, other = judge.answers(tokens, np.array([0, 0, 0]))
    assert one == same_one != other
