"""Searches at equal cost: what the protocol holds equal, and what it refuses."""

from __future__ import annotations

import json

import pytest

from gen.__main__ import main
from gen.bench import search

COMMAND = ["bench", "action", "--protocol", "search", "--prompts", "2", "--repeats", "1"]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "SIZES", (1, 2))
        out = ["--out", str(folder / "rows.json"), "--gallery", str(folder / "page")]
        assert main([*COMMAND, *out]) == 0
    return json.loads((folder / "rows.json").read_text()), (folder / "page" / "index.html")


def rows_of(report, size):
    return [row for row in report[0]["table"] if row["samples"] == size]


def test_all_searches_of_a_size_take_the_same_forward_passes(report):
    one, two = ({row["passes"] for row in rows_of(report, size)} for size in (1, 2))
    assert len(one) == len(two) == 1 and two != one


def test_searches_of_one_sample_are_their_base(report):
    assert len({(row["reward"], row["log-likelihood"]) for row in rows_of(report, 1)}) == 1
    assert {row["gain"] for row in rows_of(report, 1)} == {0.0}


def test_control_searches_of_two_samples_differ(report):
    assert len({row["reward"] for row in rows_of(report, 2)}) > 1


def test_the_page_draws_every_search(report):
    page = report[1].read_text()
    for name in search.searches(1, 1, 1.0):
        assert '<li><i class="circle" style="--c: ' in page and f"</i>{name}</li>" in page


@pytest.mark.parametrize(
    "more", [["--samplers", "sjd"], ["--sweep", "n=1,2"], ["--oracle"], ["--peers", "all"]]
)
def test_flags_of_other_protocols_are_refused(more, capsys):
    assert main([*COMMAND, *more]) != 0
    assert "--protocol search" in capsys.readouterr().err


def test_a_modality_without_a_reward_is_refused(capsys):
    assert main(["bench", "all", "--protocol", "search"]) != 0
    assert "--protocol search" in capsys.readouterr().err
