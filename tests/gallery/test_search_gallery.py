"""Searches in a gallery: strips, trees, thinned searches and hostile records."""

from __future__ import annotations

from pathlib import Path

import pytest

from gen.gallery.media import Files
from gen.gallery.render import templates
from gen.gallery.searches import search_card

TREE = {
    "candidates": 4,
    "levels": 2,
    "level": [0, 0, 1, 1],
    "parent": [None, None, 1, 1],
    "score": [0.25, 0.5, 1 / 3, None],
    "chosen": [1, 2],
    "text": ["one", "<script>two</script>", "three", "four"],
}
FLAT = {**TREE, "levels": 1, "level": [0] * 4, "parent": [None] * 4, "chosen": [2]}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    (tmp_path / "x.search.png").write_bytes(b"")
    return Files(tmp_path)


def card(files: Files, record: object) -> dict | None:
    return search_card(files, {"id": "x", "status": "ok", "search": record})


def test_edges_lead_from_parents_to_candidates_and_those_of_the_output_are_marked(files):
    shown = card(files, TREE)
    assert shown["tree"] and [chosen for _, chosen in shown["edges"]] == [False, True]
    lefts = [node["left"] for node in shown["nodes"]]
    assert lefts[0] == lefts[1] < lefts[2] == lefts[3]


def test_candidates_that_were_drawn_at_once_are_a_strip(files):
    shown = card(files, FLAT)
    assert not shown["tree"] and not shown["edges"]
    assert [node["score"] for node in shown["nodes"]] == ["0.25", "0.5", "0.333", "–"]
    assert [node["chosen"] for node in shown["nodes"]] == [False, False, True, False]


def test_a_thinned_search_says_so(files):
    said = card(files, {**TREE, "candidates": 2000, "levels": 50})["facts"]
    assert said == "2,000 candidates on 50 levels · 4 of them on 2 levels shown"
    assert "shown" not in card(files, TREE)["facts"]


def test_a_sheet_is_cut_into_its_cells(files):
    record = {k: v for k, v in TREE.items() if k != "text"}
    sheet = card(files, {**record, "sheet": "x.search.png", "cell": [32, 16]})["sheet"]
    assert sheet["at"] == [(0, 0), (32, 0), (64, 0), (96, 0)] and sheet["whole"] == (128, 16)


def test_files_outside_the_folder_are_not_shown(files):
    assert card(files, {**TREE, "sheet": "../x.search.png", "cell": [1, 1]})["sheet"] is None


@pytest.mark.parametrize(
    "record", [None, [], {}, {"level": [0]}, {**TREE, "score": [1.0]}, {**TREE, "parent": "none"}]
)
def test_what_is_no_record_of_a_search_is_not_shown(files, record):
    assert card(files, record) is None


def test_texts_of_candidates_are_escaped(files):
    about = {"name": "x", "method": "svdd", "prompt": "p", "about": "svdd"}
    shown = {"cards": [{**card(files, TREE), **about}], "trees": True, "more": ""}
    page = str(templates().get_template("parts.html").module.searches(shown, "", "h2", "h3"))
    assert "&lt;script&gt;two" in page and "<script>two" not in page
