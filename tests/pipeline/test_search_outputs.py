"""Outputs of a call with a search: candidates, their media, and functions as scorers."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
import yaml

import gen
from gen.core.errors import GenError
from gen.core.stats import Candidate, SampleOutput, Stats

PROMPTS = ["remove from 8 0 4 7 5 =", "close { [ ] } [ { ="]
STEERED = {"name": "svdd", "base": "autoregressive", "m": 3, "block": 3}


def digits(text: str, prompt: str) -> float:
    return float(sum(c.isdigit() for c in text))


@pytest.fixture(scope="module")
def pipe():
    return gen.load("text")


@pytest.fixture(scope="module")
def flat(pipe):
    return pipe(PROMPTS, {"name": "best_of", "n": 3, "scorer": digits}, seed=1)


@pytest.fixture(scope="module")
def steered(pipe):
    return pipe(PROMPTS[:1], {**STEERED, "scorer": digits}, seed=1)


def test_the_chosen_candidate_is_the_output(flat):
    for media, row in zip(flat.media, flat.candidates, strict=True):
        assert len(row) == 3
        assert [c.media for c in row if c.chosen] == [media]


def test_scores_are_those_of_the_media(flat):
    for item, row in zip(flat.items, flat.candidates, strict=True):
        assert [c.score for c in row] == [digits(c.media, item.prompt) for c in row]


def test_candidates_of_a_tree_go_on_from_the_level_before(steered):
    (row,) = steered.candidates
    levels = {c.level for c in row}
    assert levels == set(range(len(levels))) and len(levels) > 1
    for candidate in row:
        assert (candidate.parent is None) == (candidate.level == 0)
        if candidate.parent is not None:
            assert 0 <= candidate.parent < sum(c.level == candidate.level - 1 for c in row)
    assert not bool(row[0].known.all())


def test_plain_samplers_have_no_candidates(pipe):
    assert pipe(PROMPTS[0], "autoregressive", seed=1).candidates is None


def test_slices_and_joined_batches_keep_the_candidates_of_their_items(pipe, flat):
    spec = {"name": "best_of", "n": 3, "scorer": digits}
    alone = pipe(PROMPTS, spec, seed=1, batch_size=1)
    assert [[c.media for c in row] for row in alone.candidates] == [
        [c.media for c in row] for row in flat.candidates
    ]
    assert [c.media for c in flat[1:].candidates[0]] == [c.media for c in flat.candidates[1]]


def test_candidates_as_plain_data_have_scores_and_places_alone(steered):
    tree = json.loads(json.dumps(steered.to_dict()))
    said = tree["items"][0]["candidates"]
    assert len(said) == len(steered.candidates[0])
    assert all({"level", "parent", "score", "chosen"} == set(c) for c in said)
    assert tree["sampler"]["scorer"].endswith("digits")


def test_candidates_can_be_sent_to_another_process(flat):
    sent = pickle.loads(pickle.dumps(flat.candidates))
    assert [c.media for c in sent[0]] == [c.media for c in flat.candidates[0]]


def test_candidates_have_the_prefix_of_the_output():
    candidate = Candidate(torch.tensor([3, 4]), 0.5, known=torch.tensor([True, False]), chosen=True)
    out = SampleOutput(torch.tensor([[3, 4]]), [Stats(1, 2, 2, 2, 2.0)], candidates=[[candidate]])
    (found,) = out.with_prefix(torch.tensor([8, 9])).candidates[0]
    assert found.tokens.tolist() == [8, 9, 3, 4]
    assert found.known.tolist() == [True, True, True, False]


def test_a_folder_of_a_function_names_it_and_no_job_takes_it(pipe, tmp_path):
    from gen.config.job import load_config

    spec = {"name": "best_of", "n": 2, "scorer": lambda text, prompt: 1.0}
    pipe(PROMPTS[:1], spec, seed=1).save(tmp_path / "out")
    said = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert said["sampler"]["scorer"].startswith("function ")
    with pytest.raises(GenError, match="Python call"):
        load_config(tmp_path / "out" / "config.yaml")


def test_an_interrupted_call_returns_media_and_no_candidates(pipe):
    def stop(info):
        raise gen.Interrupt

    out = pipe(PROMPTS, {**STEERED, "scorer": digits}, seed=1, callback=stop)
    assert out.interrupted and len(out.media) == len(PROMPTS)
    assert not any(out.candidates or ())


def test_the_callback_moves_forward_to_the_end(pipe):
    seen = []
    pipe(PROMPTS[:1], {"name": "best_of", "n": 2}, seed=1, callback=lambda i: seen.append(dict(i)))
    done = [info["done"] for info in seen]
    assert done == sorted(done) and done[0] > 0
    assert not any(bool(info["known"].any()) for info in seen), "the choice is not made yet"


def test_a_stream_gives_the_media_once_they_are_chosen(pipe):
    spec = {"name": "best_of", "n": 3, "scorer": digits}
    chunks = list(pipe.stream(PROMPTS[:1], spec, seed=1))
    assert "".join(c.media for c in chunks) == pipe(PROMPTS[:1], spec, seed=1).media[0]
    assert len(chunks) == 1
