"""Scorers on the command line: their list, and bad ones in samples and jobs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from gen.__main__ import main
from gen.core.registry import registry


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return code, out, err


def sample(capsys, out, scorer: str) -> tuple[int, str, str]:
    return run(capsys, "sample", "text", "sort 3 1 2 =", "--sampler", "best_of", "--set",
               "sampler.n=2", "--set", f"sampler.scorer={scorer}", "--out", out)  # fmt: skip


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    (tmp_path / "rewards.py").write_text(
        "def nan(media, prompt):\n    return float('nan')\n\n\n"
        "def picky(media, prompt):\n    return 1 / (not prompt.startswith('copy'))\n\n\n"
        "def short(media, prompt):\n    return -len(media)\n"
    )
    monkeypatch.chdir(tmp_path)


def test_ls_scorers_lists_names_modalities_and_what_each_measures(capsys):
    code, out, _ = run(capsys, "ls", "scorers")
    assert code == 0
    for name, cls in registry.table("scorer").items():
        line = next(line for line in out.splitlines() if line.startswith(f"{name} "))
        assert cls.about in line and all(m in line for m in cls.modalities or ("all",))
    code, out, _ = run(capsys, "ls", "scorers", "--json")
    found = {row["name"]: row for row in json.loads(out)}
    assert found.keys() == registry.table("scorer").keys()
    assert found["red_area"]["params"] == {"colour": "red"}
    assert found["red_area"]["modalities"] == ["image"]


def test_the_page_lists_every_scorer_with_its_modalities():
    page = (Path(__file__).parents[2] / "docs" / "scorers.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \| ", page, re.MULTILINE)
    built_in = {
        name: ", ".join(cls.modalities) or "all"
        for name, cls in registry.table("scorer").items()
        if cls.__module__.startswith("gen.")
    }
    assert dict(rows) == built_in


@pytest.mark.parametrize(
    ("scorer", "words"),
    [
        ("red_area", "judges outputs of image; got modality 'text'"),
        ("digit_cuont", "Did you mean 'digit_count'?"),
        ("{name: red_area, colour: rde}", "red_area.colour is 'rde'; expected red or"),
        ("{name: value_head, path: none}", "value_head.path is 'none'"),
        ("rewards.py:nan", "returned nan for 'sort 3 1 2 ='"),
        ("rewards.py:none", "sampler.scorer is 'rewards.py:none', which cannot be imported"),
    ],
)
def test_a_bad_scorer_is_one_line_and_leaves_no_folder(rewards, tmp_path, capsys, scorer, words):
    code, _, err = sample(capsys, tmp_path / "out", scorer)
    assert code == 2 and words in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_control_a_good_scorer_by_its_import_path_leaves_an_output(rewards, tmp_path, capsys):
    code, _, err = sample(capsys, tmp_path / "out", "rewards.py:short")
    assert code == 0, err
    assert list((tmp_path / "out").rglob("*.txt"))


def test_a_job_keeps_the_items_that_a_reward_judges_and_names_those_it_fails_on(
    rewards, tmp_path, capsys
):
    tree = {
        "modality": "text",
        "out": str(tmp_path / "job"),
        "prompts": ["sort 3 1 2 =", "copy 3 1 2 ="],
        "batch_size": 1,
        "sampler": {"name": "best_of", "n": 2, "scorer": "rewards.py:picky"},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tree))
    code, out, err = run(capsys, "run", tmp_path / "job.yaml")
    assert code != 0 and "--trust-job" in out + err and not (tmp_path / "job").exists()
    code, out, err = run(capsys, "run", tmp_path / "job.yaml", "--trust-job")
    assert code != 0 and "ZeroDivisionError" in out + err
    made = [p for p in (tmp_path / "job").rglob("*.txt") if p.read_text().strip()]
    assert len(made) == 1
