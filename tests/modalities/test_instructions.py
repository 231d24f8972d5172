"""Instructions that change images: their language, what they change, what stays."""

from __future__ import annotations

import numpy as np
import pytest

from gen.core.errors import GenError
from gen.modalities.image import captions as shapes
from gen.modalities.image import instructions
from gen.modalities.image.checker import check
from gen.modalities.image.instructions import Instruction, parse, random_instruction
from gen.recipes.image.pairs import pairs


def test_texts_and_instructions_are_inverse():
    rng = np.random.default_rng(0)
    for _ in range(400):
        caption = shapes.random_caption(rng)
        instruction = random_instruction(caption, rng)
        assert parse(str(instruction)) == instruction
        changed = instruction.applied(caption)
        assert sum(a != b for a, b in zip(changed.items, caption.items, strict=True)) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("make the circle blue", Instruction("blue", None, "circle")),
        ("Make it large.", Instruction("large")),
        ("move it to the left", Instruction("left")),
        ("move the red ring to the center", Instruction("centre", "red", "ring")),
        ("turn the white one into a cross", Instruction("cross", "white")),
    ],
)
def test_users_words_are_understood(text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the instruction is ''"),
        ("paint it blue", "expected an instruction such as"),
        ("make the circle blu", "Did you mean 'blue'"),
        ("make the blob blue", "'blob' is outside the vocabulary"),
        ("move it left", "has no 'to'"),
        ("turn the big ring into a cross", "'big' is outside"),
        ("make blue", "does not name a shape"),
    ],
)
def test_wrong_instructions_are_named(text, message):
    with pytest.raises(GenError, match=message):
        parse(text)


def test_an_instruction_names_one_shape_and_makes_a_possible_caption():
    two = shapes.parse("a large red circle at the left and a small blue circle at the right")
    with pytest.raises(GenError, match="names 2 shapes"):
        parse("make it green").applied(two)
    with pytest.raises(GenError, match="names 0 shapes"):
        parse("make the ring green").applied(two)
    with pytest.raises(GenError, match="changes nothing"):
        parse("make the red one red").applied(two)
    with pytest.raises(GenError, match="of one colour, or that overlap"):
        parse("make the red circle blue").applied(two)
    assert parse("make the red circle green").applied(two).items[0].colour == "green"


def test_targets_differ_from_sources_where_the_instruction_says_alone():
    for p in pairs(20, 5, held=False):
        before, after = p.images
        assert check(before, p.source).passed
        assert check(after, p.instruction.applied(p.source)).passed
        assert not check(before, p.instruction.applied(p.source)).passed  # the control
        rest = ~np.kron(p.touched, np.ones((4, 4), bool))
        assert rest.any() and (before[rest] == after[rest]).all()


def test_the_region_of_an_edit_holds_every_pixel_that_changes():
    for p in pairs(60, 6, held=False):
        region = instructions.region(p.source, p.instruction.applied(p.source))
        changed = (p.images[0] != p.images[1]).any(-1)
        assert (region | ~changed).all()
        assert region.mean() < 0.6  # the control: it is not everything
    assert not instructions.region(p.source, p.source).any()
