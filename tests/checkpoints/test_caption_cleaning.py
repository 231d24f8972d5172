"""Captions are cleaned as in the training of LlamaGen: the expected texts are those of its function
(``language/t5.py``)."""

from __future__ import annotations

import pytest

from gen.modalities.checkpoints.caption_cleaning import cleaned

CAPTIONS = (
    ("A red circle.", "a red circle."),
    ("“A cat” sits -- on a mat…", '"a cat" sits - on a mat…'),
    ("a 4x4 truck, 1920x1080 pixels", "a truck, pixels"),
    ("#12 r2d2 and c3po", "and"),
    ("this-is-my-cute-cat_and-dog", "this is my cute cat and dog"),
    ("u.s. flag / eu flag", "u. s. flag eu flag"),
    ("a <person> riding a bike", "a person riding a bike"),
    ("hello .. world ...", "hello world"),
    ("visit www.example.com now http://a.b/c", "visit now a. b c"),
    ("猫 a cat", "a cat"),
    ("a dog, ", "a dog"),
    ("-leading and trailing-", "leading and trailing"),
    ("a photo @nick & friends (two)", "a photo friends two"),
    ("<b>bold</b> text &amp; more &quot;x&quot;", 'bold text more "x"'),
    ("free shipping worldwide download free", "worldwide"),
    ("jc6640 jc6640vc 6640vc231", ""),
    ("page 12 click on me", ""),
    ('it\u2019s """WOW""" \'x\'', "it's \"wow\" 'x"),
    ("100% cotton+wool", "100% cotton wool"),
    ("10:30 a.m. at 5th ave., n.y.", "10:30 a. m. at 5th ave., n. y."),
    ("img_001.png of a tree", "of a tree"),
    ("'quoted caption'", "quoted caption"),
    ("one : two", "one: two"),
    ("A portrait of a 1.5 x2 man; 192.168.0.1", "a portrait of a 1.5 x2 man;"),
    ("a\\nb", "a b"),
    ("x<y and y>z", "xz"),
    ("five-star hotel", "five-star hotel"),
    ("a 3d render, 8k", "a 3d render, 8k"),
    ("a b&w photo", "a b w photo"),
)


@pytest.mark.parametrize(("caption", "expected"), CAPTIONS)
def test_a_caption_is_cleaned_as_published(caption, expected):
    assert cleaned(caption) == expected


def test_control_lower_case_without_signs_is_another_text():
    """The cleaning that came before left 23 of PartiPrompts' 1,632 captions as they were."""
    assert sum(" ".join(c.lower().split()) != e for c, e in CAPTIONS) > 15
