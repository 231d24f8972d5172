"""Processes: a worker's name outlives changes of the clock, and dead workers are recognised."""

import os
import subprocess
import sys

import psutil
import pytest

from gen.core.processes import host, is_dead, started, worker_name


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    process.stdin.close()


def name_of(pid: int) -> str:
    return f"{host()}-{pid}-{started(pid)}"


def test_a_worker_is_alive_until_it_ends_and_dead_before_it_is_reaped(child):
    name = name_of(child.pid)
    assert is_dead(name) is False and is_dead(worker_name()) is False
    child.kill()
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    assert started(child.pid) == -1 and is_dead(name) is True
    child.wait()
    assert started(child.pid) == 0 and is_dead(name) is True


def test_a_process_with_a_reused_number_is_another_worker(child):
    since = started(child.pid)
    assert since > 0
    assert is_dead(f"{host()}-{child.pid}-{since - 100}") is True


def test_other_machines_and_other_names_are_unknown():
    assert is_dead(f"0badc0de-{os.getpid()}-1") is None
    assert is_dead("somebody") is None and is_dead(f"{host()}-x-1") is None
    assert is_dead(f"{host()}-{os.getpid()}-0") is None


def test_a_number_beyond_all_processes_is_dead():
    assert is_dead(f"{host()}-{10**30}-1") is True


def test_a_clock_that_is_set_changes_no_name(child, monkeypatch):
    """The control: the plain time of creation, since the epoch, moves with the clock."""
    before, epoch = started(child.pid), psutil.Process(child.pid).create_time()
    boot, reads = psutil.boot_time(), []

    def jumping() -> float:
        reads.append(None)
        return boot if len(reads) < 2 else boot + 3600  # set between the first read and the next

    monkeypatch.setattr(psutil, "boot_time", jumping)
    module = psutil._psplatform
    monkeypatch.setattr(module, "boot_time", lambda: boot + (3600 if reads else 0))
    assert started(child.pid) == before
    assert psutil.Process(child.pid).create_time() == epoch + 3600
