"""Clocks that jump: no time is negative, no pause ends a run."""

from __future__ import annotations

import errno
import os
import time
from itertools import count

import pytest

from gen.core.clock import SteadyClock, pause
from gen.jobs.progress.report import Lines, Silent, Tally, duration
from gen.jobs.progress.watch import watch


def test_a_steady_clock_counts_no_time_where_the_clock_below_runs_backwards():
    times = iter([100.0, 103.0, -7000.0, -6998.0, 50.0])
    clock = SteadyClock(lambda: next(times))
    assert [clock() for _ in range(4)] == [3.0, 3.0, 5.0, 7053.0]


def test_a_run_whose_clock_jumps_back_took_no_negative_time(capsys):
    times = iter([10_000.0, 10_000.0, 10_005.0, *[2_805.0] * 20])
    lines = Lines(clock=lambda: next(times))
    lines.start(2)
    lines.items(2)
    said = capsys.readouterr().err
    assert "took 0:05" in said and "-" not in said
    assert duration(-7195).startswith("-")  # what it said before
    assert Tally(clock=lambda: 1.0).clock() == 0


@pytest.mark.parametrize("error", [OSError(errno.EINVAL, os.strerror(errno.EINVAL)), ValueError()])
def test_a_pause_that_the_system_refuses_is_no_error(monkeypatch, error):
    def refuse(seconds):
        raise error

    monkeypatch.setattr(time, "sleep", refuse)
    pause(0.5)
    pause(-1.0)


def test_a_watch_goes_on_where_the_clock_jumps(monkeypatch, tmp_path):

    def refuse(seconds):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    jumps, asked = count(0, -3600), count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(jumps)))
    monkeypatch.setattr(time, "sleep", refuse)
    watch(tmp_path, Silent(), lambda: next(asked) > 30)
