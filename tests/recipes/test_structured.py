"""The comparison of engines of structured output runs, and tells complete texts from others."""

from __future__ import annotations

import json

import pytest

from gen.core.errors import GenError
from gen.recipes.text.structured import is_valid, main, word_tokens


def test_the_table_has_a_row_of_each_engine(tmp_path, capsys):
    (tmp_path / "flag.json").write_text(json.dumps({"type": "array", "items": {"type": "boolean"}}))
    (tmp_path / "some.json").write_text(json.dumps({"type": "array", "contains": {}}))
    main([str(tmp_path), "--tokens", "24", "--vocabulary", "1500"])
    printed = capsys.readouterr().out
    assert "| automaton | 1 of 2 | 2 of 2 |" in printed
    assert "| llguidance | 1 of 2 |" in printed
    assert "automaton refuses some: structured.json_schema: the schema has contains" in printed


def test_texts_that_are_cut_are_not_valid():
    assert is_valid(b"[true]", {}) and not is_valid(b"[tru", {}) and not is_valid(None, {})
    assert not is_valid(b"[true]", {"type": "object"})


def test_vocabularies_have_the_size_that_was_asked_for():
    tokens = word_tokens(2000)
    assert len(tokens) == len(set(tokens)) == 2000 and tokens[-1] is None


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(GenError, match=r"has no \*\.json"):
        main([str(tmp_path)])
