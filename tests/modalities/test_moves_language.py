"""The caption language of human motion."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gen.modalities.motion import captions as moves
from gen.modalities.motion.captions import CIRCLES, Caption, every_caption, parse

EVERY = every_caption()


# --- The caption language


def test_every_caption_reads_back_as_itself_whatever_it_leaves_unsaid():
    assert 60 <= len(set(map(str, EVERY))) == len(EVERY) <= 150
    for i, caption in enumerate(EVERY):
        partial = replace(
            caption, **{k: None for j, k in enumerate(("speed", "count", "side")) if i >> j & 1}
        )
        assert parse(str(caption)) == caption
        assert parse(str(partial)) == partial


def test_equivalent_spellings_mean_the_same_caption():
    waves = Caption("waves", None, "quickly", 3, "left")
    assert str(waves) == "a person waves quickly with the left hand three times"
    for text in (
        "The person waves three times, quickly, with their left arm.",
        "a man is waving with the left hand quickly 3 times",
    ):
        assert parse(text) == waves
    circle = Caption("walks", CIRCLES[0], "slowly")
    for text in (
        "a person walks in a circle to the left slowly",
        "someone walking slowly in a left circle",
        "walk slowly in a circle left",
    ):
        assert parse(text) == circle
    assert (
        parse("a person jumps twice")
        == parse("a person jumps up two times")
        == Caption("jumps", "in place", count=2)
    )
    assert parse("a woman sits") == parse("a person is sitting down") == Caption("sits")
    assert parse("a person runs") == Caption("runs", "forward")  # there is no other direction
    assert parse("a person kicks with the right foot") == Caption("kicks", side="right")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a persn walks forward", ("'persn'", "'person'")),
        ("a person wlks forward", ("'wlks'", "'walks'", "runs, turns")),
        ("a person walks forwrd", ("'forwrd'", "'forward'", "backward", "in a circle to the left")),
        ("a person walks forward quikly", ("'quikly'", "'quickly'", "slowly")),
        ("a person waves thre times", ("'thre'", "'three times'")),
        ("a person waves with the lfet hand", ("'lfet'", "'left'")),
        ("a person waves with the left leg", ("'leg'", "hand, arm")),
        ("a person waves with the left", ("the end of the caption", "hand, arm")),
        ("a person kicks with both legs", ("'both'", "the, a, their")),
        ("a person walks", ("needs a direction", "forward, backward")),
        ("a person turns quickly", ("needs a direction", "left, right")),
        ("a person walks forward for 5 steps", ("'5'", "four, 4, six")),
        ("a person walks forward twice", ("'twice'", "for four steps")),
        ("a person jumps quickly", ("'quickly'", "once, twice, three times")),
        ("a person walks in a circle to the left for six steps", ("'for'", "slowly, quickly")),
        ("a person sits down slowly quickly", ("'quickly'", "after its end")),
        ("a person walks forward backward", ("'backward'", "slowly, quickly")),
        ("a", ("the end of the caption", "person")),
        ("  ", ("empty", "a person walks forward")),
    ],
)
def test_a_bad_caption_names_what_is_wrong_and_what_was_expected(text, names):
    with pytest.raises(ValueError) as error:
        parse(text)
    for name in names:
        assert name in str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        ("hops",),
        ("walks",),
        ("walks", "left"),
        ("walks", "forward", None, 3),
        ("walks", CIRCLES[0], None, 4),
        ("waves", "forward"),
        ("jumps", "forward", "slowly"),
        ("kicks", None, None, 1, "both"),
        ("sits", None, None, 1),
        ("turns", "left", "fast"),
    ],
)
def test_a_caption_holds_only_what_can_be_said_of_its_action(values):
    with pytest.raises(ValueError):
        Caption(*values)


def test_slots_hold_each_stated_attribute_and_mark_the_rest():
    def words(text):
        return [t[s] for t, s in zip(moves.TABLES, parse(text).slots(), strict=True)]

    assert words("a person walks forward quickly for six steps") == [
        "walks",
        "forward",
        "quickly",
        "for six steps",
        "<any>",
    ]
    assert words("a person waves with both hands") == ["waves", "<any>", "<any>", "<any>", "both"]
    assert words("a person jumps once") == ["jumps", "in place", "<any>", "once", "<any>"]
    assert len({tuple(c.slots()) for c in EVERY}) == len(EVERY)


def test_pairs_join_words_with_their_action_and_nothing_said_with_none():
    partial = [replace(c, **{k: None}) for c in EVERY for k in ("speed", "count", "side")]
    said = np.array([c.slots() for c in EVERY + partial])
    joined = moves.pairs(said)
    assert joined.shape == said.shape and joined.min() >= 0 and joined.max() < moves.PAIRS < 300
    meant = {}  # joint word -> what it stands for
    for row, numbers in zip(said.tolist(), joined.tolist(), strict=True):
        for slot, (word, number) in enumerate(zip(row, numbers, strict=True)):
            what = (slot, word, row[0], row[1] if slot < 2 else None)
            assert meant.setdefault(number, what) == what
    assert len(set(meant.values())) == len(meant)
    unsaid = moves.pairs(np.zeros((1, moves.SLOTS), int))[0].tolist()
    assert len(set(unsaid)) == moves.SLOTS and not set(unsaid) & set(meant)
    assert len(meant) + moves.SLOTS == moves.PAIRS  # no number is wasted


def test_slots_that_no_caption_has_are_refused():
    good = parse("a person walks forward quickly for six steps").slots()
    assert moves.pairs(np.array([good])).shape == (1, moves.SLOTS)
    for slot, word in (
        (1, 0),
        (1, moves.TABLES[1].index("left")),
        (3, moves.TABLES[3].index("once")),
        (4, 1),
        (0, 0),
    ):
        bad = [*good]
        bad[slot] = word
        with pytest.raises(ValueError, match="no caption has the slots"):
            moves.pairs(np.array([good, bad]))


def test_the_held_out_tenth_is_disjoint_and_made_of_words_that_training_sees():
    assert 0.05 < np.mean([moves.held_out(c) for c in EVERY]) < 0.17
    seen, unseen = (moves.captions(400, 6, held=h) for h in (False, True))
    assert {str(c) for c in seen}.isdisjoint(map(str, unseen)) and all(map(moves.held_out, unseen))

    def words(captions):
        return {p for c in captions for p in c.pairs()}

    assert words(unseen) <= words(seen)
    bare = [
        c for c in EVERY if c.action != "jumps"
    ]  # the control: a language that holds out all jumps would fail
    assert not words(EVERY) <= words(bare)


def test_actions_are_drawn_equally_often_with_everything_said():
    rng = np.random.default_rng(2)
    drawn = [moves.random_caption(rng) for _ in range(3400)]
    kinds = {(c.action, c.direction): 0 for c in EVERY}
    for c in drawn:
        kinds[c.action, c.direction] += 1
    assert min(kinds.values()) > 0.7 * len(drawn) / len(kinds) and max(kinds.values()) < 1.3 * len(
        drawn
    ) / len(kinds)
    assert set(drawn) == set(EVERY)
