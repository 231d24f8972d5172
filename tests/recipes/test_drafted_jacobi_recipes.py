"""The recipes of context tables and of their measurement run, and say what they should."""

from __future__ import annotations

import shutil

import pytest

from gen.models.load.locate import ZOO
from gen.models.targets.context_table import FILE, digest
from gen.recipes.drafted_jacobi import main as measure
from gen.recipes.tables import main as make_table


@pytest.mark.slow
def test_drafted_samples_have_the_tokens_of_autoregression(capsys):
    measure(["image", "--count", "1", "--samplers", '{"init": "table"}', '{"init": "model"}'])
    rows = [line for line in capsys.readouterr().out.splitlines() if "init" in line]
    assert len(rows) == 2 and all("| 1 of 1 |" in row for row in rows)


@pytest.mark.slow
def test_a_table_is_written_beside_the_weights_and_names_them(tmp_path):
    folder = tmp_path / "image-causal"
    shutil.copytree(ZOO / "image-causal", folder, ignore=shutil.ignore_patterns(FILE))
    make_table([str(folder), "--generated", "2"])
    written = (folder / FILE).read_bytes()
    assert digest(folder).encode() in written
    assert digest(ZOO / "image-draft").encode() not in written  # control
