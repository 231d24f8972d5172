"""The clocks of the slow tier leave tests out by name, and hide no failure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import clock
import pytest

SUPPORT = Path(__file__).parents[1] / "support"
TESTS = """
import time
def test_one(): time.sleep(0.2)
def test_two(): assert {holds}
"""
FOLDERS = ("a", "b", "c")


@pytest.fixture
def session(tmp_path):
    """Runs three folders of two modules with two tests each."""

    def run(*options: str, holds: bool = True) -> tuple[int, str]:
        for folder in FOLDERS:
            (tmp_path / folder).mkdir(exist_ok=True)
            for module in ("x", "y"):
                path = tmp_path / folder / f"test_{folder}{module}.py"
                path.write_text(TESTS.format(holds=holds))
        (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p clock -rs -v\n")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(SUPPORT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    return run


def test_each_folder_is_left_at_its_clock_and_says_how_much_it_leaves_out(session):
    code, text = session("--folder-clock", "0.1")
    assert code == 0
    assert "3 passed, 9 skipped" in text.splitlines()[-1]
    for folder in FOLDERS:
        assert re.search(rf"SKIPPED \[3\] .*no time left after 0 s for {folder}$", text, re.M)


def test_a_session_ends_at_its_clock(session):
    code, text = session("--clock", "0")
    assert code == 0 and "12 skipped" in text.splitlines()[-1]


def test_control_without_clocks_all_tests_run(session):
    code, text = session()
    assert code == 0 and "12 passed" in text.splitlines()[-1] and "no time left" not in text


def test_a_failure_before_the_clock_fails_the_session(session):
    code, text = session("--folder-clock", "60", holds=False)
    assert code == 1 and "6 failed, 6 passed" in text.splitlines()[-1]


def test_every_folder_and_module_has_its_turn():
    paths = [Path(f"{folder}/test_{module}.py") for folder in FOLDERS for module in ("x", "y")]
    firsts = []
    for turn in range(6):
        items = [SimpleNamespace(path=path, case=case) for path in paths for case in range(2)]
        clock.pytest_collection_modifyitems(
            SimpleNamespace(option=SimpleNamespace(turn=turn)), items
        )
        assert sorted((i.path, i.case) for i in items) == [(p, c) for p in paths for c in range(2)]
        order = [item.path for item in items[::2]]
        assert [item.path for item in items[1::2]] == order  # a module stays together
        assert [path.parent for path in order[::2]] == [path.parent for path in order[1::2]]
        firsts.append(order[0])
    assert set(firsts) == set(paths) and firsts[0] == paths[0]
