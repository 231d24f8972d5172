"""Translations of digits: prompts, right outputs, the checker, and their model in a pipeline."""

from __future__ import annotations

import numpy as np
import pytest

import gen
from gen.core.errors import GenError
from gen.modalities.text import translation
from gen.modalities.text.modality import TextModality

PROMPT = "translate: seven seven two"
RIGHT = {"sette sette due", "due sette sette", "septem septem duo", "duo septem septem"}


def test_prompts_read_back_as_they_are_written():
    for source in translation.sources(50, 0):
        assert translation.parse(str(source)) == source
    assert translation.parse("Translate:  SEVEN seven two") == translation.parse(PROMPT)
    assert str(TextModality().condition(PROMPT)) == PROMPT


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("translate: seven sevn", "'sevn' is outside the digit words.*'seven'"),
        ("translate: one", "has 1 words; expected 2 to 10"),
        ("translate seven two", "begins with 'translate'"),
        ("translate: " + "one " * 11, "has 11 words"),
    ],
)
def test_bad_prompts_are_refused(prompt, message):
    with pytest.raises(GenError, match=message):
        TextModality().condition(prompt)


def test_the_right_outputs_are_those_of_the_checker():
    modality = TextModality()
    source = translation.parse(PROMPT)
    assert {" ".join(words) for words in translation.outputs(source).values()} == RIGHT
    assert all(modality.check(text, PROMPT).passed for text in RIGHT)
    for wrong in ("sette septem due", "sette due sette", "sette due", "sette sette due due", ""):
        verdict = modality.check(wrong, PROMPT)
        assert not verdict.passed and "sette sette due" in verdict.detail
    assert not modality.check("seven seven two", PROMPT).valid


def test_all_right_outputs_are_drawn_equally_often():
    source, rng = translation.parse("translate: one two"), np.random.default_rng(0)
    drawn = [" ".join(translation.draw_output(source, rng)) for _ in range(400)]
    counts = {text: drawn.count(text) for text in drawn}
    assert len(counts) == 4 and min(counts.values()) > 70


def test_grades_are_the_share_of_a_right_beginning():
    modality = TextModality()
    assert modality.grade("due sette sette", PROMPT) == 1
    assert modality.grade("due sette due", PROMPT) == pytest.approx(2 / 3)
    assert modality.grade_partial("due sette", PROMPT) == 1
    assert modality.grade("septem sette due", PROMPT) == pytest.approx(1 / 3)
    assert modality.grade("nihil", PROMPT) == 0


@pytest.fixture(scope="module")
def pipe():
    return gen.load("text", model="text-dag")


def test_the_model_decodes_in_one_forward_pass(pipe):
    out = pipe([PROMPT, "translate: one nine"], seed=0)
    assert [s.nfe for s in out.stats] == [1, 1]
    assert all(set(str(text).split()) <= set(translation.WORDS) for text in out.media)


def test_the_modality_chooses_the_model_by_the_sampler():
    assert gen.load("text").model_name("joint_viterbi") == "text-dag"
    assert gen.load("text").model_name("autoregressive") == "text-causal"


def test_tasks_and_translations_go_to_their_models(pipe):
    with pytest.raises(GenError, match="model text-dag translates"):
        pipe("sort 3 1 2 =")
    with pytest.raises(GenError, match="the model answers tasks"):
        gen.load("text")(PROMPT, sampler="autoregressive")


def test_a_limit_of_tokens_holds(pipe):
    out = pipe(PROMPT, sampler="ancestral", num_samples=8, seed=1, max_new_tokens=2)
    assert max(len(str(text).split()) for text in out.media) <= 2


def test_rows_are_the_same_alone_and_in_a_batch(pipe):
    prompts = [PROMPT, "translate: one nine three four zero zero two", "translate: six five"]
    for sampler in ("ancestral", "joint_viterbi"):
        whole = pipe(prompts, sampler=sampler, seed=3)
        alone = [pipe(p, sampler=sampler, seed=3).media[0] for p in prompts]
        assert list(whole.media) == alone
