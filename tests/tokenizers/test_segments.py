"""Documents of several kinds of segments: their automaton, their decoding, their parts."""

from __future__ import annotations

import base64
from itertools import product

import numpy as np
import pytest
from PIL import Image

from gen.core.errors import GenError
from gen.tokenizers.text.segments import Segment, SegmentKind, as_png, segment_automaton, segments

# ids: 0, 1 words; 2 eos; 3 begins an image, 4 ends it; 5, 6 its codes; 7 nowhere
KIND = SegmentKind("image", 3, 4, (5, 6), (1, 2), None, as_png)


def well_formed(row) -> bool:
    """The rule itself: words, [3 code code 4], and eos tokens at the end."""
    at = 0
    while at < len(row):
        if row[at] == 2:
            return set(row[at:]) == {2}
        if row[at] == 3:
            if len(row) < at + 4 or not {row[at + 1], row[at + 2]} <= {5, 6} or row[at + 3] != 4:
                return False
            at += 4
        elif row[at] in (0, 1):
            at += 1
        else:
            return False
    return True


def accepted(automaton, row) -> bool:
    state = 0
    for token in row:
        state = automaton.step(state, token)
        if state < 0:
            return False
    return bool(automaton.accepting[state])


def test_the_automaton_accepts_exactly_the_well_formed_documents():
    automaton = segment_automaton(8, [0, 1], [2], [KIND])
    found = [accepted(automaton, row) for row in product(range(8), repeat=5)]
    assert found == [well_formed(row) for row in product(range(8), repeat=5)]
    assert 0 < sum(found) < len(found)


def test_an_image_begins_only_where_it_can_end():
    automaton = segment_automaton(8, [0, 1], [2], [KIND])
    assert automaton.allowed(0, 4)[3] and not automaton.allowed(0, 3)[3]


def test_a_document_is_taken_apart_into_its_segments():
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    mime, content = as_png(image)
    text = f"before\n\n![image](data:{mime};base64,{base64.b64encode(content).decode()})\n\nbehind"
    before, middle, behind = segments(text)
    assert (before, behind) == (Segment("text", "before"), Segment("text", "behind"))
    assert np.array_equal(np.asarray(middle.image()), np.asarray(image))
    with pytest.raises(GenError, match="expected an image"):
        before.image()
    assert segments("words alone") == [Segment("text", "words alone")]
