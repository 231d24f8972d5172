"""The recipes of searches run in quick form and write what they promise."""

from __future__ import annotations

import numpy as np
import pytest

from gen.core.errors import GenError
from gen.recipes import best_of
from gen.recipes.text import calibrate, judge, search_figures
from gen.samplers.search.atts import read_calibration
from gen.samplers.search.judges import read_judge


@pytest.mark.slow
def test_the_best_of_n_passes_where_the_first_does_and_costs_n_times_as_much():
    one = best_of.accuracy("action", None, None, 1, 6)
    three = best_of.accuracy("action", None, None, 3, 6)
    assert one["best_of"] == one["base"] == three["base"] <= three["best_of"]
    assert three["passes"] > 2 * one["passes"] > 0


@pytest.mark.slow
def test_a_calibration_holds_finite_scores_in_order(tmp_path, capsys):
    calibrate.main(["--out", str(tmp_path), "--quick"])
    scores = read_calibration(str(tmp_path))
    assert len(scores) and (np.diff(scores) >= 0).all() and (scores <= 0).all()
    assert f"{len(scores)} right drafts of 40 training tasks" in capsys.readouterr().out


@pytest.mark.slow
def test_a_judge_is_read_again_and_better_than_a_coin(tmp_path, capsys):
    judge.main(["--out", str(tmp_path), "--quick"])
    said = capsys.readouterr().out
    found = [float(part.split(",")[0]) for part in said.split("AUROC ")[1:]]
    assert len(found) == len(judge.TEMPERATURES) and min(found) > 0.5
    assert read_judge(str(tmp_path)) is not None


def test_control_a_folder_without_a_judge_is_refused(tmp_path):
    with pytest.raises(GenError):
        read_judge(str(tmp_path))


@pytest.mark.slow
def test_the_table_has_a_row_per_search_that_was_asked_for(capsys):
    search_figures.main(["--quick", "--only", "best_of"])
    rows = [r for r in capsys.readouterr().out.splitlines() if r.startswith("best_of")]
    assert [r.split("  ")[0] for r in rows] == ["best_of 4", "best_of 8"]
    passes = [float(r.split("passes ")[1].split()[0]) for r in rows]
    assert passes[1] == pytest.approx(2 * passes[0], rel=0.2)
