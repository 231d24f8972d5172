"""Grades: the share of a prompt that an output shows, which is 1 exactly where the checker passes.

The outputs are drawn by the programs that draw the data sets, right ones and spoilt ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gen.contracts.scorer import GradesPartial
from gen.core.registry import registry
from gen.modalities.action import tasks as tabletop_tasks
from gen.modalities.action import world as tabletop
from gen.modalities.action.modality import ActionChunk, Situation
from gen.modalities.image import captions as shapes
from gen.modalities.motion import captions as moves
from gen.modalities.motion import synth as moves_draw
from gen.modalities.speech import synth as spoken
from gen.modalities.text import tasks as text_tasks
from gen.modalities.video import captions as moving

Case = tuple[Any, str]  # media and prompt


def crossed(prompts: Sequence[str], media: Sequence[Any]) -> list[Case]:
    """Every output with its own prompt, and with those of its neighbours."""
    turned = [*prompts[1:], *prompts[:1]]
    return [*zip(media, prompts, strict=True), *zip(media, turned, strict=True)]


def images() -> list[Case]:
    rng, captions = np.random.default_rng(1), shapes.captions(10, 7, held=True)
    drawn = [shapes.draw(c, rng) for c in captions]
    texts = [str(c) for c in captions]
    spoilt = [np.where(rng.random((64, 64, 1)) < 0.06, 255 - x, x).astype(np.uint8) for x in drawn]
    halves = [np.concatenate([x[:32], x[:32]]) for x in drawn]
    cases = crossed(texts, drawn) + list(zip(spoilt + halves, texts * 2, strict=True))
    cases += [(x, str(shapes.Caption(c.items[:1]))) for x, c in zip(drawn, captions, strict=True)]
    return [(Image.fromarray(x), text) for x, text in cases]


def clips() -> list[Case]:
    rng, captions = np.random.default_rng(2), moving.captions(8, 7, held=True)
    drawn = [moving.draw(c, rng) for c in captions]
    spoilt = [np.concatenate([x[::-1][:8], x[:8]]) for x in drawn]
    texts = [str(c) for c in captions]
    return crossed(texts, drawn) + crossed(texts, spoilt) + [(np.full_like(drawn[0], 90), texts[0])]


def waves() -> list[Case]:
    rng, said = np.random.default_rng(3), spoken.utterances(8, 7, held=True)
    drawn = [spoken.speak(u, rng) for u in said]
    spoilt = [x[: len(x) // 2] for x in drawn]
    texts = [str(u) for u in said]
    noise = rng.normal(size=spoken.SAMPLES).astype(np.float32) * 0.1
    silence = np.zeros(1600, np.float32)
    return [
        *crossed(texts, drawn),
        *zip(spoilt, texts, strict=True),
        (noise, texts[0]),
        (silence, texts[0]),
    ]


def motions() -> list[Case]:
    rng, captions = np.random.default_rng(4), moves.captions(20, 7, held=True)
    drawn = [moves_draw.draw(c, rng) for c in captions]
    spoilt = [x.joints[::2] for x in drawn]
    texts = [str(c) for c in captions]
    cases = crossed(texts, drawn) + list(zip(spoilt, texts, strict=True))
    return [*cases, (drawn[0], "a person moves"), (spoilt[0] * 2, "a person moves")]


def chunks() -> list[Case]:
    states = tabletop_tasks.episodes(24, 5, held=True).states
    actions = tabletop.demonstrate(states)
    cases = []
    for state, chunk in zip(states, actions, strict=True):
        task = tabletop_tasks.described(state)
        for made in (chunk, 0.7 * chunk, -chunk, 0 * chunk, chunk + np.nan, 3 * chunk):
            cases.append((ActionChunk(made, Situation(task, state)), str(task)))
    return cases


def texts() -> list[Case]:
    rng, cases = np.random.default_rng(6), []
    for task in text_tasks.tasks(150, 7, held=True):
        right = list(text_tasks.draw_answer(task, rng))
        swapped = [*right]
        at = int(rng.integers(len(right)))
        swapped[at] = text_tasks.WORDS[int(rng.integers(40))]
        for words in (right, swapped, right[:-1], [*right, "7"], [], list(task.items)):
            cases.append((" ".join(words), str(task)))
    return cases


CASES = {
    "image": images,
    "video": clips,
    "speech": waves,
    "motion": motions,
    "action": chunks,
    "text": texts,
}


def outcomes(name: str, grade: Callable[[Any, str], float] | None = None) -> np.ndarray:
    """Grade, and whether the checker passes, of every case: float64 [n, 2]."""
    modality = registry.get("modality", name)()
    judged = grade or modality.grade
    return np.array([[judged(m, p), modality.check(m, p).passed] for m, p in CASES[name]()])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(3)
def test_a_grade_is_one_exactly_where_the_checker_passes_and_never_outside_0_and_1(name):
    grades, passed = outcomes(name).T
    assert ((grades >= 0) & (grades <= 1)).all()
    assert ((grades == 1.0) == passed).all()
    # both kinds are there, and grades tell more than the checker does
    assert 5 <= passed.sum() <= len(passed) - 5
    assert len(set(grades.round(6))) >= 3


def test_control_a_grade_that_overlooks_further_shapes_is_one_where_the_checker_fails():
    from gen.modalities.image.checker import detect

    def lenient(image, prompt):
        seen = [region.item for region in detect(np.asarray(image))]
        asked = shapes.parse(prompt).items
        return sum(item in seen for item in asked) / len(asked)

    grades, passed = outcomes("image", lenient).T
    assert ((grades == 1.0) & (passed == 0)).any()


def test_an_image_with_one_wrong_word_of_four_and_the_shape_has_four_fifths():
    modality, rng = registry.get("modality", "image")(), np.random.default_rng(0)
    image = Image.fromarray(shapes.draw(shapes.parse("a large red circle at the top left"), rng))
    grades = [
        modality.grade(image, text)
        for text in (
            "a large red circle at the top left",
            "a large blue circle at the top left",
            "a large blue ring at the top left",
            "a red circle",
            "a large red circle at the top left and a small blue ring at the right",
        )
    ]
    assert grades == [1.0, 0.8, 0.6, 1.0, 0.5]


def test_a_text_is_graded_by_its_longest_right_beginning():
    grade = registry.get("modality", "text")().grade
    assert grade("1 2 3", "sort 3 1 2 =") == 1.0
    assert grade("1 2", "sort 3 1 2 =") == pytest.approx(2 / 3)
    assert grade("1 3 2", "sort 3 1 2 =") == pytest.approx(1 / 3)
    assert grade("1 2 3 3", "sort 3 1 2 =") == pytest.approx(3 / 4)
    assert grade("", "sort 3 1 2 =") == 0.0
    assert grade("3 1 2", "shuffle 3 1 2 =") == pytest.approx(1 / 3)


def test_the_right_beginning_of_a_text_is_that_of_the_best_of_all_right_answers():
    rng = np.random.default_rng(8)
    for task in text_tasks.tasks(200, 9, held=True):
        if len(task.items) > 6:
            continue  # 7! answers
        words = [str(w) for w in rng.choice([*task.items, "7"], int(rng.integers(0, 8)))]
        best = max(
            sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(a, words, strict=False)))
            for a in text_tasks.answers(task)
        )
        assert text_tasks.right_words(task, words) == best, (str(task), words)


def test_an_unfinished_text_has_one_while_some_right_answer_begins_so():
    modality = registry.get("modality", "text")()
    assert isinstance(modality, GradesPartial)
    assert not isinstance(registry.get("modality", "image")(), GradesPartial)
    for text, reward in (("", 1), ("1", 1), ("1 2", 1), ("1 3", 0.5), ("2", 0), ("1 2 3 3", 0.75)):
        assert modality.grade_partial(text, "sort 3 1 2 =") == reward
