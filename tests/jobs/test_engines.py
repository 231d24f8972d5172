"""Launchers of workers: children that die, are stopped, or lose their parent, without a model. Real
ones: tests/jobs/test_engines_real.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from gen.core.errors import GenError
from gen.jobs import engines
from gen.jobs.engines import common, local, run_engine
from gen.jobs.progress.report import Silent
from gen.jobs.rank import VARIABLES

SLEEPER = "import time; time.sleep(60)"
POLITE = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75));"
    " print('ready', flush=True); time.sleep(60)"
)


class Notes(Silent):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


@pytest.fixture
def crew(tmp_path, monkeypatch):
    """Runs the engine ``local`` with children that run these programs; of two items, ``done`` are
    done at the end."""
    state = types.SimpleNamespace(
        children=[], devices=[], folder=tmp_path, notes=Notes(), environ=[]
    )

    def go(*programs, done=2, stop=lambda: False, device="cpu"):
        tallies = [common.Tally(2, {}), common.Tally(2, {str(i): (1, "ok") for i in range(done)})]
        for module in (local, common):  # before, and when all are over
            monkeypatch.setattr(module, "tally", lambda folder, items=None: tallies.pop(0))

        def line_of(folder, slot, device):
            return state.devices.append(device) or [
                sys.executable,
                "-c",
                programs[slot],
            ]

        monkeypatch.setattr(local, "command", line_of)
        popen = subprocess.Popen

        def start(line, **options):
            state.environ.append(options["env"])
            state.children.append(popen(line, **options))
            return state.children[-1]

        def watch(folder, progress, over):
            until = time.monotonic() + 20
            while not over():
                assert time.monotonic() < until, "children never end"
                time.sleep(0.01)

        monkeypatch.setattr(local.subprocess, "Popen", start)
        monkeypatch.setattr(local, "watch", watch)
        run = types.SimpleNamespace(workers=len(programs), engine_options={})
        job = types.SimpleNamespace(run=run, entries=[types.SimpleNamespace(device=device)])
        return run_engine("local", tmp_path, job, progress=state.notes, stop=stop)

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    state.go = go
    yield state
    assert all(c.returncode is not None for c in state.children), "a child was left behind"


def wait_for(what, seconds=15.0):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if what():
            return True
        time.sleep(0.02)
    return False


# --- which one


def test_an_engine_that_is_none_names_the_nearest_one():
    with pytest.raises(GenError, match="unknown engine 'slrum'.*Did you mean 'slurm'"):
        engines.engine("slrum")


@pytest.mark.parametrize("name, extra", [("ray", "ray"), ("slurm", "slurm")])
def test_an_engine_without_its_package_names_the_extra(monkeypatch, name, extra):
    monkeypatch.setattr(engines, "find_spec", lambda package: None)
    with pytest.raises(GenError, match=rf'pip install "gen-toolkit\[{extra}\]"'):
        engines.engine(name)


# --- children


def test_children_that_do_their_work_are_reported_together(crew):
    report = crew.go(
        "pass", "import sys; sys.exit(1)"
    )  # 1: some items failed, which is no fault of the worker
    assert (report.made, report.failed, report.stopped, crew.notes.notes) == (2, 0, False, [])
    cores = len(os.sched_getaffinity(0))
    want = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // 2)))
    assert {e["OMP_NUM_THREADS"] for e in crew.environ} == {want}


def test_a_child_that_is_killed_is_noted_and_the_others_finish(crew):
    killed = "import os, signal; print('loading', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    report = crew.go("import time; time.sleep(0.5)", killed)
    assert report.made == 2 and not report.stopped
    [note] = crew.notes.notes
    assert (
        "worker 1 was killed by SIGKILL" in note
        and "take over its shards" in note
        and "loading" in note
    )
    assert len(crew.children) == 2  # nobody is started again


def test_work_that_nobody_is_left_to_do_is_one_error_with_the_last_words(crew):
    (crew.folder / "logs").mkdir()
    (crew.folder / "logs/worker-0.txt").write_text("said by a run of yesterday\n")
    said = "import sys; print('gen: cannot write x: No space left', file=sys.stderr); sys.exit(2)"
    with pytest.raises(
        GenError, match="1 of 2 items left: one ended with exit code 2: gen: cannot write x"
    ) as error:
        crew.go(said, said, done=1)
    assert "yesterday" not in str(error.value) and "run the same command to resume" in str(
        error.value
    )
    assert "yesterday" in (crew.folder / "logs/worker-0.txt").read_text()


def test_a_request_to_stop_reaches_the_children_once_and_they_are_waited_for(crew):
    def ready():
        return all("ready" in (crew.folder / f"logs/worker-{i}.txt").read_text() for i in (0, 1))

    assert crew.go(POLITE, POLITE, done=1, stop=ready).stopped
    assert [c.returncode for c in crew.children] == [75, 75] and not crew.notes.notes


def test_work_left_without_a_request_to_stop_is_not_called_stopped(
    crew,
):  # the control of the one above
    with pytest.raises(GenError, match="1 of 2 items left"):
        crew.go("pass", "pass", done=1)


def test_ctrl_c_ends_children_quickly_even_those_that_do_not_listen(crew, monkeypatch):
    def interrupt():
        if (crew.folder / "logs/worker-1.txt").read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr(local, "QUICKLY", 1.0)
    deaf = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf',"
        " flush=True); time.sleep(60)"
    )
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        crew.go(SLEEPER, deaf, stop=interrupt)
    assert time.monotonic() - began < local.QUICKLY + 20
    assert (
        crew.children[0].returncode != -signal.SIGKILL
        and crew.children[1].returncode == -signal.SIGKILL
    )


@pytest.mark.parametrize("follows", [True, False])
def test_a_child_does_not_outlive_a_parent_that_is_killed(tmp_path, follows):
    inner = (
        "import sys, time, types; import gen.__main__; gen.__main__.main = lambda argv:"
        " time.sleep(60); from gen.cli import child;child.LOOK = 0.05;"
        f" sys.exit(child.main(sys.argv[1:]) if {follows} else time.sleep(60))"
    )
    parent = (
        "import subprocess, sys, os, time; c = subprocess.Popen([sys.executable, '-c', sys.argv[1],"
        " str(os.getpid())], process_group=0);print(c.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent, inner], stdout=subprocess.PIPE, text=True
    ) as process:
        pid = int(process.stdout.readline())
        time.sleep(0.3)
        process.kill()
    gone = wait_for(lambda: not alive(pid), 10 if follows else 1)
    if not follows:  # the control: one that does not look lives on
        os.kill(pid, signal.SIGKILL)
    assert gone == follows


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_devices_are_dealt_to_children_only_where_the_job_says_plain_cuda(crew, monkeypatch):
    monkeypatch.setattr(local, "own_device", lambda name, number: f"{name}:{number}")
    for device in ("cuda", "cuda:3", "cpu"):
        crew.go("pass", "pass", device=device)
    assert crew.devices == ["cuda:0", "cuda:1", None, None, None, None]


def test_a_command_line_of_a_child_is_understood_by_gen():
    from gen.cli.parser import parse

    args = parse(local.command(Path("/f"), 1, "cuda:1")[4:])
    assert (args.folder, args.slot, args.device) == ("/f", 1, "cuda:1")


# --- Ray actors


@pytest.mark.parametrize("progress", [False, True])
def test_a_ray_actor_that_always_dies_is_given_up_unless_items_get_done(
    monkeypatch, tmp_path, progress
):
    from gen.jobs.engines import ray_actors

    counted = iter(range(1, 20)) if progress else iter([0] * 20)
    monkeypatch.setattr(
        ray_actors,
        "tally",
        lambda folder, items: common.Tally(99, dict.fromkeys(map(str, range(next(counted))))),
    )
    pool, calls = object.__new__(ray_actors.Pool), []
    pull = types.SimpleNamespace(remote=lambda: calls.append(1) or len(calls))
    pool.folder, pool.items, pool.best, pool.told, pool.deaths = tmp_path, 99, 0, False, [0, 0]
    pool.progress, pool.reasons, pool.pulls, pool.actors = (
        Notes(),
        [],
        {},
        [types.SimpleNamespace(pull=pull)] * 2,
    )
    for _ in range(6):
        if pool.deaths[1] < ray_actors.DEATHS:
            pool._died(1)
    assert len(calls) == (6 if progress else 2) and bool(pool.reasons) is not progress


# --- launched, alone


def job_of(workers=1, device="cpu", **options):
    run = types.SimpleNamespace(workers=workers, engine_options=options)
    return types.SimpleNamespace(run=run, entries=[types.SimpleNamespace(device=device)])


@pytest.fixture
def worker(monkeypatch):
    """A worker that only says how it was called."""
    import gen.jobs.types
    import gen.jobs.worker

    calls = []

    def stand_in(folder, **k):
        return calls.append(k) or gen.jobs.types.Report(1, 0, False)

    monkeypatch.setattr(gen.jobs.worker, "run_worker", stand_in)
    monkeypatch.setattr(local, "watch", lambda folder, progress, over: progress.note("shown"))
    return calls


def launched(monkeypatch, rank):
    for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_RANK", rank)):
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_launched_process_is_one_worker_and_only_the_first_shows_progress(
    monkeypatch, tmp_path, worker, rank
):
    launched(monkeypatch, rank)
    monkeypatch.setattr(local, "own_device", lambda name, number: f"{name}:{number}")
    progress = Notes()
    run_engine("local", tmp_path, job_of(device="cuda"), progress=progress)
    assert [(c["slot"], c["device"]) for c in worker] == [(rank, f"cuda:{rank}")]
    worker[0]["progress"].note("an item failed")
    assert progress.notes == (["shown", "an item failed"] if rank == 0 else [])


@pytest.mark.parametrize(
    "engine, text", [("local", "workers is 2"), ("ray", "engine ray"), ("slurm", "engine slurm")]
)
def test_a_launched_process_starts_no_workers(monkeypatch, tmp_path, engine, text):
    launched(monkeypatch, 0)
    monkeypatch.setattr(engines, "find_spec", lambda package: object())
    with pytest.raises(GenError, match=f"{text} in a process that torchrun started as one of 2"):
        run_engine(engine, tmp_path, job_of(workers=2))


def test_one_worker_runs_in_this_process_with_the_loader_it_was_given(tmp_path, worker):
    def load(*a, **k):
        return None

    run_engine("local", tmp_path, job_of(), load=load)
    assert len(worker) == 1 and worker[0]["load"] is load


@pytest.mark.parametrize("engine", ["local", "ray", "slurm"])
def test_a_loader_of_ones_own_is_refused_where_workers_are_other_processes(
    monkeypatch, tmp_path, engine
):
    monkeypatch.setattr(engines, "find_spec", lambda package: object())
    with pytest.raises(GenError, match="a load function is given"):
        run_engine(engine, tmp_path, job_of(workers=2), load=lambda *a, **k: None)


def test_accelerate_that_started_one_process_only_is_noted(monkeypatch, tmp_path, worker):
    progress = Notes()
    run_engine("local", tmp_path, job_of(), progress=progress)
    assert not progress.notes
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    run_engine("local", tmp_path, job_of(), progress=progress)
    assert "started one process only" in progress.notes[0]


# --- options


@pytest.mark.parametrize(
    "engine, device, options, text",
    [
        (
            "ray",
            "cpu",
            {"num_gpu": 1},
            "unknown engine option of ray 'num_gpu'.*Did you mean 'num_gpus'",
        ),
        (
            "ray",
            "cpu",
            {"num_cpus": "all"},
            "num_cpus is 'all' in engine_options; expected a number",
        ),
        ("ray", "cuda:1", {}, "device is 'cuda:1' with engine ray; expected 'cuda'"),
        ("slurm", "cpu", {"wait": "no"}, "wait is 'no' in engine_options; expected true or false"),
    ],
)
def test_options_that_are_none_are_refused_before_anything_starts(
    monkeypatch, tmp_path, engine, device, options, text
):
    monkeypatch.setattr(engines, "find_spec", lambda package: object())
    monkeypatch.setattr(common, "read_plan", lambda folder: {"items": [{}]})
    with pytest.raises(GenError, match=text):
        run_engine(engine, tmp_path, job_of(workers=2, device=device, **options))
