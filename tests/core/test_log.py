"""The logger of gen: silent as a library, and as loud as asked on the command line."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gen.__main__ import main
from gen.core.errors import GenError
from gen.core.log import configure, logger
from gen.jobs.progress.report import Lines, Silent
from gen.jobs.progress.terminal import for_terminal

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.delenv("GEN_LOG_LEVEL", raising=False)
    state = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = state[0], state[2]
    logger.setLevel(state[1])


def said(capsys) -> str:
    for level in ("debug", "info", "warning", "error"):
        logging.getLogger("gen.jobs").log(getattr(logging, level.upper()), "%s", level)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, environment, levels",
    [
        ({}, None, ["warning", "error"]),
        ({"verbose": True}, None, ["info", "warning", "error"]),
        ({"quiet": True}, None, ["error"]),
        ({}, "DEBUG", ["debug", "info", "warning", "error"]),
        ({"quiet": True}, "debug", ["error"]),
    ],
)
def test_levels(capsys, monkeypatch, flags, environment, levels):
    if environment:
        monkeypatch.setenv("GEN_LOG_LEVEL", environment)
    configure(**flags)
    configure(**flags)  # a second call adds no second line
    assert said(capsys).split() == [word for level in levels for word in ("gen:", level)]


def test_a_level_that_does_not_exist_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("GEN_LOG_LEVEL", "loud")
    with pytest.raises(GenError, match="GEN_LOG_LEVEL is 'loud'; expected one of debug, info"):
        configure()
    assert main(["ls", "configs"]) == 2
    assert "GEN_LOG_LEVEL is 'loud'" in capsys.readouterr().err


def test_quiet_shows_no_progress(capsys):
    configure()
    assert isinstance(for_terminal(), Lines)
    configure(quiet=True)
    assert type(for_terminal()) is Silent


def test_verbose_and_quiet_exclude_each_other(capsys):
    assert main(["ls", "configs", "--verbose", "--quiet"]) == 2
    assert "not allowed with" in capsys.readouterr().err


def test_a_library_adds_no_handler_and_prints_no_information():
    code = (
        "import logging, gen, gen.store.joblog as j, tempfile;"
        "j.JobLog(tempfile.mkdtemp(), 'w').event('failed');"
        "print(logging.getLogger('gen').handlers, logging.getLogger('gen.jobs').handlers)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert (done.stdout.strip(), done.stderr) == ("[] []", "")
