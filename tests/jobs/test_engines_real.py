"""Engines with real workers and the small text model: whichever one runs a job, and whatever dies,
the manifest is the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gen.config.job import make_job
from gen.core.errors import GenError
from gen.jobs.progress.report import Silent
from gen.jobs.rank import VARIABLES
from gen.jobs.run import run_job
from gen.store.joblog import read_log
from gen.store.ledger import MANIFEST, RUNTIME, parse_rows, read_rows

PROMPTS = ["sort 3 1 2 =", "shuffle 4 0 7 5 =", "3 + 8 + 5 =", "sort 5 4 3 ="]
SECONDS = 150  # at most, for a command


class Notes(Silent):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def tree(out: Path, **keys) -> dict:
    return {
        "modality": "text",
        "sampler": "speculative_jacobi",
        "prompts": PROMPTS,
        "dtype": "float64",
        "batch_size": 1,
        "trace": 0,
        "shard_items": 2,
        "out": str(out),
        **keys,
    }


def go(out: Path, **keys):
    progress = Notes()
    return run_job(make_job(tree(out, **keys), where="the test"), progress=progress), progress.notes


def made(out: Path) -> tuple[list[dict], dict[str, bytes]]:
    """The committed rows without what differs from run to run, and the media."""
    rows = parse_rows(out / MANIFEST)
    return [{k: v for k, v in r.items() if k not in RUNTIME} for r in rows], {
        r["file"]: (out / r["file"]).read_bytes() for r in rows
    }


def workers_of(out: Path) -> set[str]:
    return {r["worker"] for r in read_rows(out)}


def start(out: Path, *before: str, **keys) -> subprocess.Popen:
    """``gen run`` as a command, after these words of a launcher."""
    config = out.with_suffix(".yaml")
    config.write_text(json.dumps(tree(out, **keys)))
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in VARIABLES and not k.startswith(("ACCELERATE_", "MASTER_"))
    }
    line = [sys.executable, *before, "-m", "gen", "run", str(config)]
    return subprocess.Popen(
        line,
        env={**clean, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def until(what, process=None, seconds=SECONDS):
    limit = time.monotonic() + seconds
    while not (found := what()):
        assert process is None or process.poll() is None, "".join(process.communicate())
        assert time.monotonic() < limit, "it never came to that"
        time.sleep(0.02)
    return found


def at_work(out: Path, least: int = 6) -> dict[str, int]:
    """The processes that have finished items, by worker, once there are two of them and this many
    items."""
    rows = read_rows(out) if out.is_dir() else []
    found = {r["worker"]: int(r["worker"].split("-")[1]) for r in rows}
    return found if len(found) > 1 and len(rows) >= least else {}


def begun(out: Path) -> list[str]:
    """The workers that began, one that was started again once more."""
    return [e["worker"] for e in read_log(out) if e["event"] == "start"]


def end_one(out: Path, process: subprocess.Popen, number: int) -> str:
    """Send a signal to one of two workers and slow the other one down until a third begins, or it
    might finish the job before. Return the worker."""
    (victim, pid), (_, other) = sorted(until(lambda: at_work(out), process).items())

    def has_third() -> bool:
        os.kill(other, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(other, signal.SIGCONT)  # it may hold a lock
        time.sleep(0.02)
        return len(begun(out)) == 3

    os.kill(pid, number)
    until(has_third, process)
    return victim


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """What one worker makes of the job, by number of samples."""
    known = {}

    def of(samples):
        if samples not in known:
            out = tmp_path_factory.mktemp("one") / "job"
            go(out, num_samples=samples)
            known[samples] = made(out)
        return known[samples]

    return of


# --- local


@pytest.mark.slow
def test_two_workers_make_what_one_makes(tmp_path, one):
    summary, notes = go(tmp_path / "two", workers=2)
    assert (
        made(tmp_path / "two") == one(1)
        and summary["items"] == 4
        and not summary["pending"]
        and not notes
    )
    assert made(tmp_path / "two") != one(2)  # the control
    assert len({e["worker"] for e in read_log(tmp_path / "two") if e["event"] == "start"}) == 2
    assert {p.name for p in (tmp_path / "two/logs").glob("*.txt")} == {
        "worker-0.txt",
        "worker-1.txt",
    }


@pytest.mark.slow
def test_four_workers_make_what_one_makes(tmp_path, one):
    summary, notes = go(tmp_path / "four", workers=4, num_samples=40)
    assert (
        made(tmp_path / "four") == one(40)
        and summary["items"] == 160
        and not summary["pending"]
        and not notes
    )
    assert made(tmp_path / "four") != one(10)  # the control
    assert (
        len({e["worker"] for e in read_log(tmp_path / "four") if e["event"] == "start"})
        == len(workers_of(tmp_path / "four"))
        == 4
    )


@pytest.mark.slow
def test_a_child_that_is_killed_leaves_its_shards_to_the_others(tmp_path, one):
    process = start(tmp_path / "o", workers=2, num_samples=40)
    os.kill(min(until(lambda: at_work(tmp_path / "o"), process).values()), signal.SIGKILL)
    _out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert "was killed by SIGKILL" in err and "the others take over its shards" in err
    assert made(tmp_path / "o") == one(40)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, code",
    [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGKILL, -9)],
    ids=["SIGTERM", "SIGINT", "SIGKILL"],
)
def test_a_run_that_is_stopped_leaves_no_worker_behind_and_the_same_command_goes_on(
    tmp_path, one, number, code
):
    process = start(tmp_path / "o", workers=2, num_samples=40)
    pids = until(lambda: at_work(tmp_path / "o"), process)
    process.send_signal(number)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == code, err
    until(lambda: not any(Path(f"/proc/{p}").exists() for p in pids.values()), seconds=10)
    rows = read_rows(tmp_path / "o")
    assert 0 < len(rows) < 160 and len({r["id"] for r in rows}) == len(rows)
    if code in (75, -9):
        assert {e["event"] for e in read_log(tmp_path / "o")} >= {
            "stop"
        }  # the workers ended in peace, also without their parent
    summary, _ = go(tmp_path / "o", num_samples=40)  # one worker now
    assert summary["skipped"] == len(rows) and made(tmp_path / "o") == one(40)


# --- launchers


@pytest.mark.slow
def test_processes_that_accelerate_launched_make_what_one_worker_makes(tmp_path, one):
    launcher = [
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--main_process_port",
        "0",
    ]  # torchrun, in short
    process = start(tmp_path / "o", "-m", *launcher, num_samples=10)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert made(tmp_path / "o") == one(10) and len(workers_of(tmp_path / "o")) == 2
    assert out.count("gallery:") == 1 and err.count("gen: 40 items") == 1  # one of them talks


# --- Ray


@pytest.mark.slow
def test_ray_actors_make_what_one_worker_makes_also_when_one_is_killed(tmp_path, one):
    pytest.importorskip("ray", reason='needs pip install "gen-toolkit[ray]"')
    process = start(tmp_path / "o", engine="ray", workers=2, num_samples=40)
    victim = end_one(tmp_path / "o", process, signal.SIGKILL)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert "died; Ray starts it again" in err and made(tmp_path / "o") == one(40)
    # two, and the one that was started again
    assert victim in begun(tmp_path / "o") and len(begun(tmp_path / "o")) == 3


@pytest.mark.slow
def test_ray_passes_a_request_to_stop_on(tmp_path, one):
    pytest.importorskip("ray", reason='needs pip install "gen-toolkit[ray]"')
    process = start(tmp_path / "o", engine="ray", workers=2, num_samples=40)
    until(lambda: at_work(tmp_path / "o"), process)
    process.terminate()
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 75, err
    assert (
        sum(e["event"] == "stop" for e in read_log(tmp_path / "o")) == 2
        and len(read_rows(tmp_path / "o")) < 160
    )
    go(tmp_path / "o", num_samples=40)
    assert made(tmp_path / "o") == one(40)


# --- SLURM

LOCAL = {"cluster": "local", "timeout_min": 5}


@pytest.mark.slow
def test_submitted_tasks_make_what_one_worker_makes_also_when_one_is_preempted(tmp_path, one):
    pytest.importorskip("submitit", reason='needs pip install "gen-toolkit[slurm]"')
    process = start(tmp_path / "o", engine="slurm", workers=2, num_samples=40, engine_options=LOCAL)
    # the signal says that the time is up
    victim = end_one(tmp_path / "o", process, signal.SIGUSR2)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert made(tmp_path / "o") == one(40)
    events = [e for e in read_log(tmp_path / "o") if e["event"] in ("start", "stop")]
    assert [e["event"] for e in events if e["worker"] == victim] == [
        "start",
        "stop",
    ]  # it finished its microbatch
    assert sum(e["event"] == "start" for e in events) == 3  # and was queued again


@pytest.mark.slow
def test_submitting_without_waiting_returns_at_once_and_the_tasks_do_the_work(tmp_path, one):
    pytest.importorskip("submitit", reason='needs pip install "gen-toolkit[slurm]"')
    summary, notes = go(
        tmp_path / "o",
        engine="slurm",
        workers=2,
        num_samples=10,
        engine_options={**LOCAL, "wait": False},
    )
    assert summary["pending"] and "submitted 2 tasks" in notes[0] and "not waiting" in notes[1]
    until(lambda: len(read_rows(tmp_path / "o")) == 40)
    until(
        lambda: (
            (tmp_path / "o" / MANIFEST).is_file()
            and len(parse_rows(tmp_path / "o" / MANIFEST)) == 40
        )
    )
    assert sorted(made(tmp_path / "o")[1]) == sorted(one(10)[1])


@pytest.mark.parametrize(
    "options, text",
    [
        ({"cluster": "lokal"}, "unknown cluster 'lokal' in engine_options. Did you mean 'local'"),
        (
            {**LOCAL, "timeout_mn": 3},
            (
                "unknown engine option of slurm 'timeout_mn' in engine_options. Did you mean"
                " 'timeout_min'"
            ),
        ),
        (
            {**LOCAL, "slurm_partion": "a"},
            "unknown engine option of slurm 'slurm_partion'.* Did you mean 'slurm_partition'",
        ),
        ({**LOCAL, "mem_gb": "much"}, "submitit refuses engine_options: .*mem_gb"),
        ({}, "tasks cannot be submitted to slurm: .*srun"),
    ],
)
def test_options_that_submitit_refuses_are_one_line(tmp_path, monkeypatch, options, text):
    pytest.importorskip("submitit", reason='needs pip install "gen-toolkit[slurm]"')
    from gen.jobs.engines.slurm import submit

    monkeypatch.setenv("PATH", str(tmp_path))  # no srun here
    with pytest.raises(GenError, match=text) as error:
        submit(tmp_path, 2, dict(options))
    assert "\n" not in str(error.value)
