"""The structured log: whole lines in the order of each worker, whatever clocks do, and no job that
ends because of it."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime

import pytest

from gen.store import joblog
from gen.store.joblog import JobLog, read_log, recent, source_commit


def test_the_first_line_says_what_made_the_rest(tmp_path):
    with JobLog(tmp_path, "a-1-2", device="cpu") as log:
        log.event("batch", shard=3, items=8, seconds=1.25)
    start, batch = read_log(tmp_path)
    assert {
        "time",
        "elapsed",
        "worker",
        "gen",
        "torch",
        "python",
        "commit",
        "host",
        "pid",
        "device",
        "argv",
    } <= set(start)
    assert (start["event"], start["device"], batch["event"], batch["shard"], batch["worker"]) == (
        "start",
        "cpu",
        "batch",
        3,
        "a-1-2",
    )
    assert (
        datetime.fromisoformat(batch["time"]).tzinfo is not None
        and batch["elapsed"] >= start["elapsed"] >= 0
    )
    assert [p.name for p in (tmp_path / "logs").iterdir()] == ["a-1-2.jsonl"]


def test_a_clock_that_is_set_back_changes_neither_the_order_of_a_worker_nor_its_elapsed_time(
    tmp_path, monkeypatch
):
    class Back(datetime):
        times = iter(datetime(2030, 1, 1, tzinfo=UTC).replace(hour=h) for h in (9, 8, 7, 6))

        @classmethod
        def now(cls, tz=None):
            return next(cls.times)

    monkeypatch.setattr(joblog, "datetime", Back)
    log = JobLog(tmp_path, "w")
    for n in range(3):
        log.event("batch", n=n)
    events = read_log(tmp_path)
    assert [e.get("n") for e in events] == [None, 0, 1, 2]
    assert [e.get("n") for e in sorted(events, key=lambda e: e["time"])] == [
        2,
        1,
        0,
        None,
    ]  # what sorting alone would say
    assert [e["elapsed"] for e in events] == sorted(e["elapsed"] for e in events)


def test_events_of_several_workers_come_in_the_order_of_time(tmp_path):
    logs = [JobLog(tmp_path, f"w{i}") for i in range(3)]
    for n in range(9):
        logs[n % 3].event("batch", n=n)
    times = [e["time"] for e in read_log(tmp_path)]
    assert times == sorted(times) and len(times) == 12


def test_lines_of_threads_stay_whole(tmp_path):
    log = JobLog(tmp_path, "w")
    threads = [
        threading.Thread(
            target=lambda k=k: [log.event("x", k=k, text="é" * 500) for _ in range(100)]
        )
        for k in range(4)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    lines = (tmp_path / "logs/w.jsonl").read_text(encoding="utf-8").splitlines()
    assert len([json.loads(x) for x in lines]) == 401


def test_a_torn_line_of_a_crash_takes_no_other_with_it(tmp_path):
    JobLog(tmp_path, "w").close()
    with (tmp_path / "logs/w.jsonl").open("a") as file:
        file.write('{"time": "2030-01-0')
    with JobLog(tmp_path, "w") as log:
        log.event("done")
    assert [e["event"] for e in read_log(tmp_path)] == ["start", "start", "done"]
    assert [e["event"] for e in recent(tmp_path)["w"]] == ["start", "done"]  # of the last run


@pytest.mark.parametrize(
    "value, read",
    [
        (float("nan"), None),
        (float("inf"), None),
        ({1: (2,)}, {"1": [2]}),
        (ValueError("x"), "x"),
        ("\ud800", "\ud800"),
        (1 / 3, 0.333333),
        (True, True),
    ],
)
def test_any_value_can_be_logged(tmp_path, value, read):
    with JobLog(tmp_path, "a/../b") as log:
        log.event("x", value=value)
    assert read_log(tmp_path)[-1]["value"] == read and [p.name for p in tmp_path.iterdir()] == [
        "logs"
    ]


@pytest.mark.parametrize("trouble", ["full disk", "no folder", "later"])
def test_a_log_that_cannot_be_written_is_noted_once_and_dropped(
    tmp_path, capsys, monkeypatch, trouble
):
    if trouble == "no folder":
        (tmp_path / "logs").write_text("a file")
    if trouble == "full disk":
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs/w.jsonl").symlink_to("/dev/full")
    log = JobLog(tmp_path, "w")
    if trouble == "later":
        monkeypatch.setattr(
            log.file,
            "_write",
            lambda data: (_ for _ in ()).throw(OSError(28, "No space left on device")),
        )
    for _ in range(3):
        log.event("batch")
    log.close()
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "cannot be written" in err and "w.jsonl" in err
    assert trouble == "no folder" or "No space left" in err


def test_the_tail_of_a_long_log_is_whole_lines(tmp_path):
    log = JobLog(tmp_path, "w")
    for n in range(200):
        log.event("batch", n=n)
    events = recent(tmp_path, most=2000)["w"]
    assert 5 < len(events) < 30 and [e["n"] for e in events] == list(range(200 - len(events), 200))
    assert recent(tmp_path, lambda worker, written: worker != "w") == {}


def test_the_commit_is_read_wherever_git_keeps_it(tmp_path):
    a, b = "a" * 40, "b" * 40
    git = tmp_path / ".git"
    assert source_commit(tmp_path) is None
    (git / "refs/heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert source_commit(tmp_path) is None  # nothing committed yet
    (git / "packed-refs").write_text(
        f"# pack-refs\n{b} refs/heads/other\n{a} refs/heads/main\n^{b}\n"
    )
    assert source_commit(tmp_path) == a
    (git / "refs/heads/main").write_text(b + "\n")
    assert source_commit(tmp_path) == b
    tree = tmp_path / "tree"
    (git / "worktrees/tree").mkdir(parents=True)
    tree.mkdir()
    (tree / ".git").write_text(f"gitdir: {git}/worktrees/tree\n")
    (git / "worktrees/tree/HEAD").write_text("ref: refs/heads/other\n")
    (git / "worktrees/tree/commondir").write_text("../..\n")
    assert source_commit(tree) == b
    (git / "HEAD").write_text(a + "\n")
    assert source_commit(tmp_path) == a
    (git / "HEAD").write_text("nonsense")
    assert source_commit(tmp_path) is None


def test_events_reach_the_logger_and_the_file_whatever_its_level(tmp_path, caplog):
    """The control: without a level, events of single batches stay out of the logger."""
    with caplog.at_level("INFO", logger="gen.jobs"), JobLog(tmp_path, "w") as log:
        log.event("batch", items=8)
        log.event("failed", id="a", error="\x1b[31mred", index=None)
    assert [r.getMessage().split()[0] for r in caplog.records] == ["start", "failed"]
    assert caplog.records[-1].getMessage() == 'failed id="a" error="\\u001b[31mred"'
    assert [e["event"] for e in read_log(tmp_path)] == ["start", "batch", "failed"]
    caplog.clear()
    with caplog.at_level("ERROR", logger="gen.jobs"), JobLog(tmp_path, "v") as log:
        log.event("failed", id="a")
    assert not caplog.records and len(read_log(tmp_path)) == 5
    with caplog.at_level("DEBUG", logger="gen.jobs"), JobLog(tmp_path, "u") as log:
        log.event("batch", items=8)
    assert caplog.records[-1].getMessage() == "batch items=8"


def test_workers_of_one_process_write_to_their_own_files(tmp_path):
    with JobLog(tmp_path, "a") as one, JobLog(tmp_path / "other", "a") as two:
        one.event("x")
        two.event("y")
    assert [e["event"] for e in read_log(tmp_path)] == ["start", "x"]
    assert [e["event"] for e in read_log(tmp_path / "other")] == ["start", "y"]
