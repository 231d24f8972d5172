"""Templates escape every value, and a value that is missing is an error, not an empty word."""

import re

import pytest
from jinja2 import UndefinedError

from gen.gallery.page import facts, failures, filters
from gen.gallery.render import render, templates

EVIL = "<script>alert('x')</script> {{ 7 * 7 }} \"&"


def page(rows):
    return render(
        "gallery",
        title=EVIL,
        facts=facts(rows, 1, False),
        filters=filters(rows, False),
        files=[EVIL],
        large=False,
        groups=[],
        failures=failures(rows),
    )


def test_text_from_users_is_neither_markup_nor_template():
    row = {"id": EVIL, "status": "failed", "method": EVIL, "modality": EVIL, "model": EVIL}
    text = page([{**row, "prompt": EVIL, "error": EVIL, "verdict": None}])
    assert text.count("&lt;script&gt;alert(") >= 8
    assert "<script>alert" not in text and "{{ 7 * 7 }}" in text and "49" not in text


def test_without_escaping_the_same_page_would_run_the_script(monkeypatch):
    monkeypatch.setattr(templates(), "autoescape", False)
    monkeypatch.setattr(templates(), "cache", None)  # templates are compiled for their escaping
    row = {"id": EVIL, "status": "failed", "method": EVIL, "modality": EVIL}
    assert "<script>alert" in page([{**row, "prompt": EVIL, "error": EVIL, "verdict": None}])


def test_a_missing_value_is_an_error():
    with pytest.raises(UndefinedError, match="title"):
        render("gallery", large=False)


def test_nothing_but_drawings_skips_escaping():
    for name in templates().list_templates():
        source = templates().loader.get_source(templates(), name)[0]
        assert not re.search(r"\|\s*safe\b|autoescape", source), name
