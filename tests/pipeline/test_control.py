"""Sampling parameters that look back, name tokens or end rows, through the calls of a pipeline."""

from __future__ import annotations

import json

import pytest
import torch

import gen
from gen.__main__ import main
from gen.config.job import make_job
from gen.contracts.vocabulary import Vocabulary
from gen.core.errors import GenError
from gen.core.row_rules import OVER
from gen.pipeline.control import before_stop, held_back
from gen.pipeline.stops import StopConstraint

PROMPTS = ["close { [ ] } [ { =", "shuffle 7 0 =", "remove at 2 from 3 9 0 5 6 ="]
ANSWERS = ["} ]", "0 7", "3 9 5 6"]  # greedy, without any control
SAMPLERS = ["autoregressive", "speculative_jacobi", "speculative"]


@pytest.fixture(scope="module")
def pipe():
    return gen.load("text", device="cpu")


def call(pipe, sampler="autoregressive", **options):
    return pipe(PROMPTS, sampler, seed=0, temperature=0.0, **options)


@pytest.mark.parametrize("sampler", [*SAMPLERS, "beam_search"])
@pytest.mark.thinned(2)
def test_a_row_ends_with_the_token_that_completes_a_stop(pipe, sampler):
    out = call(pipe, sampler, stop=["]", "9 5"])
    assert out.media == ["} ", "0 7", "3 "]
    frontend, eos = out.frontend, out.frontend.eos_token_id
    words = [[frontend.words[i] for i in row if i != eos] for row in out.tokens.tolist()]
    assert words == [["}", "]"], ["0", "7"], ["3", "9", "5"]]


def test_a_row_that_is_stopped_takes_no_further_forward_pass(pipe):
    assert [s.nfe for s in call(pipe).stats] == [3, 3, 5]
    assert [s.nfe for s in call(pipe, stop=["]", "9 5"]).stats] == [2, 3, 3]
    assert [s.nfe for s in call(pipe, max_new_tokens=2).stats] == [2, 2, 2]


@pytest.mark.parametrize("sampler", [*SAMPLERS, "fast_dllm"])
@pytest.mark.thinned(2)
def test_every_prompt_may_have_its_own_number_of_tokens(pipe, sampler):
    out = call(pipe, sampler, max_new_tokens=[1, 2, 3], num_samples=2, batch_size=4)
    assert out.media == ["}", "}", "0 7", "0 7", "3 9 5", "3 9 5"]
    alone = [
        pipe(p, sampler, seed=0, temperature=0.0, max_new_tokens=n).media[0]
        for p, n in zip(PROMPTS, (1, 2, 3), strict=True)
    ]
    assert out.media[::2] == alone and out.tokens.shape == (6, 3)


def test_what_a_job_cannot_hold_is_not_saved(pipe, tmp_path):
    with pytest.raises(GenError, match="max_new_tokens differs between the items to save"):
        call(pipe, max_new_tokens=[1, 2, 3]).save(tmp_path / "limits")
    with pytest.raises(GenError, match="sampling.logits_processor"):
        call(pipe, logits_processor=lambda ids, z: z, max_new_tokens=1).save(tmp_path / "own")
    assert not list(tmp_path.iterdir())


def test_no_row_ends_before_the_least_number_of_tokens(pipe):
    for sampler in ("autoregressive", "speculative_jacobi"):
        out = call(pipe, sampler, min_new_tokens=4, stop=" 5", stop_token_ids=[7])
        made = [text.split() for text in out.media]
        assert [len(words) >= 4 and "5" not in words for words in made] == [True] * 3
    assert call(pipe, min_new_tokens=6).media == call(pipe, "speculative", min_new_tokens=6).media


def test_tokens_may_be_named_by_texts(pipe):
    ids = pipe.bound("text-causal")[2].ids
    by_text = call(pipe, bad_words=["}", "3 9"], logit_bias={"0": -50.0})
    by_id = call(pipe, bad_words=[ids("}"), ids("3 9")], logit_bias={ids("0")[0]: -50.0})
    assert by_text.media == by_id.media != ANSWERS
    assert not any("}" in text or "3 9" in text or text[0] == "0" for text in by_text.media)


def test_structured_output_knows_what_else_is_forbidden(pipe):
    for sampler in SAMPLERS:
        out = call(pipe, sampler, structured={"regex": "[0-9] [0-9]( 5)*"}, bad_words=["9"])
        assert all(len(t) >= 3 and set(t) <= set("012345678 ") for t in out.media)
    with pytest.raises(GenError, match="expected exactly one of"):
        call(pipe, structured={"rgex": "a"})


def test_a_stream_holds_back_what_a_stop_may_cut_off(pipe):
    chunks = list(pipe.stream(PROMPTS[2], "autoregressive", temperature=0.0, stop="9 5"))
    assert [c.media for c in chunks] == ["3", " "]


def test_what_is_given_counts_as_output(pipe):
    liked = {"logit_bias": {"3": 40.0}, "max_new_tokens": 2, "prefix": "3 3"}
    assert call(pipe, **liked).media == ["3 3 3 3"] * 3
    held = call(pipe, **liked, frequency_penalty=40.0).media
    assert not any("3" in text[3:] for text in held)


REFUSED = {
    "stop_token_ids names token 999": {"stop_token_ids": [999]},
    "logit_bias names token 999": {"logit_bias": {999: 1}},
    "logit_bias names '0 7', which is 2 tokens": {"logit_bias": {"0 7": 1}},
    "logit_bias: .*zzz": {"logit_bias": {"zzz": 1}},
    "logit_bias names token 7 twice": {"logit_bias": {7: 1, "7": 2}},
    "bad_words: .*zzz": {"bad_words": ["zzz"]},
    "min_new_tokens is 99; expected at most 16": {"min_new_tokens": 99},
    "2 numbers and there are 3 prompts": {"max_new_tokens": [1, 2]},
    "planned for one length": {"max_new_tokens": [1, 2, 3], "structured": {"regex": "[0-9]"}},
    "expected at most 32 together": {"max_new_tokens": 400},
    "frames is given": {"max_new_tokens": 4, "frames": 3},
    "Did you mean 'no_repeat_ngram_size'": {"no_repeat_ngram": 2},
    "repetition_penalty reads the tokens before": {
        "sampler": "fast_dllm",
        "repetition_penalty": 2,
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused_before_any_forward_pass(pipe, message):
    with pytest.raises(GenError, match=message):
        call(pipe, **REFUSED[message])


def test_an_ngram_longer_than_any_output_bans_nothing_and_takes_no_time(pipe):
    plain = call(pipe)
    assert (call(pipe, no_repeat_ngram_size=10**9).tokens == plain.tokens).all()
    assert (call(pipe, no_repeat_ngram_size=1).tokens != plain.tokens).any()


@pytest.mark.parametrize("name", ["stop", "max_new_tokens"])
def test_media_without_texts_refuse_parameters_about_texts(name):
    with pytest.raises(GenError, match=f"sampling.{name} is .*no text"):
        gen.load("image", device="cpu")(
            "a red circle", "autoregressive", **{name: 3 if name != "stop" else "x"}
        )


def test_jobs_name_parameters_and_refuse_functions():
    tree = {"modality": "text", "prompts": PROMPTS, "sampler": "autoregressive"}
    plain = make_job(tree, where="a test").entries[0].sampling
    assert "stop" not in plain and "structured" not in plain
    said = {"stop": "x", "bad_words": ["0 7", [1, 2]], "logit_bias": {7: 1}, "max_new_tokens": 3}
    made = make_job({**tree, "sampling": said}, where="a test").entries[0].sampling
    assert {k: made[k] for k in said} == {
        "stop": ["x"], "bad_words": ["0 7", [1, 2]], "logit_bias": {"7": 1}, "max_new_tokens": 3
    }  # fmt: skip
    with pytest.raises(GenError, match="which Python calls take and job files do not"):
        make_job({**tree, "sampling": {"logits_processor": ["f"]}}, where="a test")


def test_flags_reach_the_output_and_its_stored_tokens(tmp_path, capsys):
    rule = tmp_path / "rule.json"
    rule.write_text(json.dumps({"regex": "[0-9]( [0-9])*"}))
    flags = ["--structured", str(rule), "--stop", " 5", "--stop", " 7", "--max-new-tokens", "5"]
    flags += ["--logit-bias", '{"9": -50}', "--bad-words", "4", "--temperature", "0"]
    out = tmp_path / "out"
    base = ["sample", "text", PROMPTS[1], "--sampler", "autoregressive", "--device", "cpu"]
    assert main([*base, *flags, "--out", str(out), "tokens=true"]) == 0
    assert next(out.glob("*.txt")).read_text() == "0\n"
    again = tmp_path / "again"
    assert main(["decode", str(out), "--out", str(again)]) == 0
    assert next(again.glob("*.txt")).read_text() == "0\n"
    capsys.readouterr()
    assert main([*base, "--logit-bias", "[1"]) == 2
    assert "--logit-bias: '[1' is no JSON" in capsys.readouterr().err


# --- stops


def test_stops_are_found_in_any_cut_of_a_text_into_tokens():
    stops = ("aab", "ba", "abcab", "cc")
    tokens = [b"a", b"b", b"c", b"ab", b"bca", b"aabb", b"ccc", None]
    vocabulary = Vocabulary(tuple(tokens), tuple(tokens))
    rule = StopConstraint(9, 8, stops, Vocabulary((*tokens, None), (*tokens, None)))
    assert len(vocabulary) == 8
    g = torch.Generator().manual_seed(0)
    for _ in range(500):
        state, text = 0, b""
        for token in torch.randint(7, (12,), generator=g).tolist():
            state, text = rule.step(state, token, not text), text + tokens[token]
            assert (state == OVER) == any(s.encode() in text for s in stops), text
    assert rule.step(0, 8, True) == 0


def test_texts_end_before_their_first_stop():
    assert before_stop("one, two; three", (";", ", ")) == "one"
    assert before_stop("one", ()) == before_stop("one", ("x",)) == "one"
    assert held_back("the EN", ("END", "x")) == "the " and held_back("the END", ("END",)) == "the "
    assert held_back("abab", ("abac",)) == "ab" and held_back("one", ("two",)) == "one"
