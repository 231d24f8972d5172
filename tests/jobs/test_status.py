"""``gen status``: right at every moment of a job's life, while others write, and cheap enough to be
asked every second."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from ledgers import ROW, write_plan, write_rows

from gen.__main__ import main
from gen.core.files import put
from gen.core.processes import host, worker_name
from gen.jobs.progress.report import Lines
from gen.jobs.progress.watch import watch
from gen.jobs.status import Over, pace, status_of
from gen.store import row_counts as counting
from gen.store.joblog import JobLog
from gen.store.ledger import CLAIMS, MANIFEST, PLAN, SHARDS, WORK, Journal, read_rows
from gen.store.row_counts import Cache, counts

DEAD = f"{host()}-{2**22 + 1}-1"  # no process has such a number
FAR = "ffffffff-4711-1"  # of another machine


def ident(i: int) -> str:
    return f"{i:016x}"


def row(i: int, status: str = "ok", attempt: int = 1, **more) -> dict:
    return {
        **ROW,
        "id": ident(i),
        "index": i,
        "sampler": "ab"[i % 2],
        "prompt": f"p{i}",
        "nfe": i % 7 if status == "ok" else None,
        "status": status,
        "attempt": attempt,
        "error": f"ValueError: {i % 3}" if status == "failed" else None,
        **more,
    }


def job(folder: Path, items: int = 40) -> Path:
    (folder / WORK).mkdir(parents=True)
    (folder / "config.yaml").write_text("")
    entries = [{"modality": "image"}, {"modality": "speech"}]
    planned = [{"id": ident(i), "entry": i % 2, "prompt": f"p{i}"} for i in range(items)]
    put(folder / PLAN, lambda path: write_plan(path, planned, relevant={"entries": entries}))
    return folder


def put_lines(path: Path, rows) -> None:
    put(path, lambda temporary: write_rows(temporary, rows))


def publish(folder: Path) -> None:
    """What is in journals moves to the manifest."""
    put_lines(folder / MANIFEST, read_rows(folder))
    for path in (folder / WORK).glob("*.jsonl"):
        path.unlink()


def claim(folder: Path, shard: int, worker: str, age: float = 0.0) -> None:
    path = folder / WORK / CLAIMS / f"{shard:05d}"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"worker": worker, "host": "here", "pid": 1, "beat": 3}))
    os.utime(path, (time.time() - age,) * 2)


# --- counting


def live(folder: Path, seed: int) -> None:
    """A random life of a job, with a look after every step: what `counts` says is what reading
    everything says."""
    rng, cache, attempts = random.Random(seed), Cache(), Counter()
    for _ in range(60):
        i, act, worker = (
            rng.randrange(45),
            rng.randrange(7),
            f"w{rng.randrange(3)}",
        )  # 40 to 44 are not in the plan
        if act < 3:
            attempts[i] += 1
            Journal(folder, i // 8, worker).add(
                [row(i, rng.choice(["ok", "ok", "failed"]), attempts[i])]
            )
        elif act == 3 and attempts[i]:
            Journal(folder, i // 8, worker).add([row(i, "due", attempts[i])])
        elif act == 4:  # a worker dies in the middle of a line
            with (folder / WORK / f"{i // 8:05d}.{worker}.jsonl").open("ab") as file:
                file.write(b'{"id": "0')
        elif act == 5:
            publish(folder)
        else:
            (folder / SHARDS).mkdir(exist_ok=True)
            put_lines(
                folder / SHARDS / f"{i // 8:05d}.jsonl",
                [r for r in read_rows(folder) if r["index"] // 8 == i // 8],
            )
        got, rows = counts(folder, cache), [r for r in read_rows(folder) if r["index"] < 40]
        by = Counter(r["status"] for r in rows)
        assert (got.ok, got.failed, got.total) == (by["ok"], by["failed"], 40)
        assert got.nfe == sum(r["nfe"] or 0 for r in rows)


@pytest.mark.parametrize("seed", range(4))
def test_counting_step_by_step_is_counting_at_once(tmp_path, seed):
    live(job(tmp_path / "j"), seed)


@pytest.mark.parametrize("broken", ["stamp", "order", "plan"])
def test_the_same_life_catches_a_counter_that_is_wrong(tmp_path, monkeypatch, broken):
    read, listed = counting._read, counting._listed
    if broken == "stamp":  # what was read once is believed for ever
        monkeypatch.setattr(
            counting, "_read", lambda path, known, was, cache: was or read(path, known, was, cache)
        )
    if broken == "order":  # the manifest is left out
        monkeypatch.setattr(counting, "_listed", lambda folder: listed(folder)[:-1])
    if broken == "plan":  # rows of other plans count
        monkeypatch.setattr(
            counting, "frozenset", lambda ids: frozenset(map(ident, range(45))), raising=False
        )
    with pytest.raises(AssertionError):
        live(job(tmp_path / "j"), 0)


def test_every_line_is_looked_into_once(tmp_path, monkeypatch):
    folder, cache, looked = job(tmp_path / "j"), Cache(), []
    seen = counting._seen
    monkeypatch.setattr(
        counting, "_seen", lambda line, cache: looked.append(line) or seen(line, cache)
    )
    for i in range(40):
        Journal(folder, i // 8, "w").add([row(i)])
        assert counts(folder, cache).ok == i + 1
    assert len(looked) == 40
    publish(folder)
    assert counts(folder, cache).ok == 40 and len(looked) == 80
    for i in range(3):  # a manifest that is replaced as a whole
        Journal(folder, 0, "w").add([row(i, "ok", 2)])
        publish(folder)
        counts(folder, cache)
    assert len(looked) == 83


def test_another_plan_starts_from_nothing(tmp_path):
    folder, cache = tmp_path / "j", Cache()
    assert counts(folder, cache).total == 0  # a job that nobody has planned yet
    job(folder)
    Journal(folder, 0, "w").add([row(1)])
    assert counts(folder, cache).ok == 1
    (folder / PLAN).unlink()
    assert counts(folder, cache).total == 0 and cache.rows == {}


def test_nothing_that_vanishes_or_is_replaced_meanwhile_is_an_error_or_a_step_back(tmp_path):
    folder, over = job(tmp_path / "j", 80), threading.Event()

    def churn():
        for i in range(80):
            Journal(folder, i // 8, "w").add([row(i)])
            claim(folder, i // 8, worker_name())
            if i % 8 == 7:
                (folder / SHARDS).mkdir(exist_ok=True)
                put_lines(
                    folder / SHARDS / f"{i // 8:05d}.jsonl",
                    [row(k) for k in range(i - 7, i + 1)],
                )
                (folder / WORK / CLAIMS / f"{i // 8:05d}").unlink()
                publish(folder)
        over.set()

    thread, cache, last, looks = threading.Thread(target=churn), Cache(), 0, 0
    thread.start()
    while not over.is_set():
        now = counts(folder, cache).ok
        assert now >= last and status_of(folder)["ok"] >= now
        last, looks = now, looks + 1
    thread.join()
    assert counts(folder, cache).ok == 80 and looks > 3


@pytest.mark.parametrize("order", ["as rows move", "against it"])
def test_rows_that_move_during_a_look_are_not_missed(tmp_path, monkeypatch, order):
    folder, read, listed = job(tmp_path / "j"), counting._read, counting._listed
    Journal(folder, 0, "w").add([row(i) for i in range(5)])

    def published_meanwhile(path, *about):
        found = read(path, *about)
        publish(folder)
        return found

    monkeypatch.setattr(counting, "_read", published_meanwhile)
    if order == "against it":
        monkeypatch.setattr(counting, "_listed", lambda folder: listed(folder)[::-1])
    assert counts(folder, Cache()).ok == (5 if order == "as rows move" else 0)


# --- a report


def test_a_report_says_who_is_at_work_on_what(tmp_path):
    folder = job(tmp_path / "j")
    claim(folder, 1, worker_name())
    claim(folder, 2, DEAD)
    claim(folder, 3, FAR)
    claim(folder, 4, FAR, age=300)
    (folder / WORK / CLAIMS / "00005").write_text('{"work')  # torn
    assert [(w["shard"], w["state"]) for w in status_of(folder)["workers"]] == [
        (1, "alive"),
        (2, "gone"),
        (3, "alive"),
        (4, "silent"),
    ]
    assert status_of(folder)["at_work"]
    for shard in (1, 3):
        (folder / WORK / CLAIMS / f"{shard:05d}").unlink()
    assert not status_of(folder)["at_work"]
    log = JobLog(folder, worker_name())  # loads its model: no claim yet
    assert [(w["shard"], w["state"]) for w in status_of(folder)["workers"]] == [
        (2, "gone"),
        (4, "silent"),
        (None, "alive"),
    ]
    log.event("done")
    assert not status_of(folder)["at_work"]


def test_groups_and_errors_add_up(tmp_path):
    folder = job(tmp_path / "j")
    Journal(folder, 0, "w").add([row(i, "failed" if i % 5 == 0 else "ok") for i in range(20)])
    Journal(folder, 0, "v").add([row(5, "due")])
    report = status_of(folder)
    assert (report["items"], report["ok"], report["failed"], report["pending"]) == (40, 16, 3, 21)
    assert report["by_sampler"] == {
        "a": {"items": 20, "ok": 8, "failed": 2, "pending": 10},
        "b": {"items": 20, "ok": 8, "failed": 1, "pending": 11},
    }
    assert (
        list(report["by_modality"]) == ["image", "speech"]
        and report["by_modality"]["speech"] == report["by_sampler"]["b"]
    )
    assert [(e["error"], e["count"], e["index"]) for e in report["errors"]] == [
        ("ValueError: 1", 1, 10),
        ("ValueError: 0", 2, 15),
    ]
    assert report["forwards_per_item"] == pytest.approx(
        sum(r["nfe"] for r in read_rows(folder) if r["status"] == "ok") / 16
    )
    assert report["items_per_second"] is report["seconds_left"] is None


def test_the_pace_is_that_of_the_last_minutes_of_every_worker():
    def batch(at, **more):
        return {
            "event": "batch",
            "elapsed": at,
            "items": 8,
            "seconds": 2.0,
            "nfe": 80.0,
            **more,
        }

    quick = [
        {"event": "start", "elapsed": 0.0},
        batch(62.0),
        batch(64.0),
        batch(66.0, error="out of memory"),
        batch(70.0),
    ]
    assert pace({"a": quick}) == (
        pytest.approx(24 / 10),
        10.0,
    )  # a minute of loading does not count, nor what failed
    slow = [batch(10.0 * k) for k in range(1, 100)]
    assert pace({"b": slow})[0] == pytest.approx(30 * 8 / 292)
    assert pace({"a": quick, "b": slow})[0] == pytest.approx(2.4 + 240 / 292)
    assert pace({}) == pace({"a": quick[:1]}) == (None, None)


def test_what_is_left_follows_from_the_pace(tmp_path):
    folder = job(tmp_path / "j")
    Journal(folder, 0, "w").add([row(i) for i in range(8)])
    log = JobLog(folder, worker_name())
    log.event("batch", items=8, seconds=1e-9, nfe=40)
    log.file._clock._passed += 4
    log.event("claim", shard=1)
    report = status_of(folder)
    assert report["items_per_second"] == pytest.approx(2, rel=0.05) and report[
        "seconds_left"
    ] == pytest.approx(16, rel=0.05)
    assert report["forwards_per_item"] == 5.0


# --- the command


def test_the_command_speaks_to_people_and_programs(tmp_path, capsys):
    folder = job(tmp_path / "j")
    Journal(folder, 0, "w").add([row(i, "failed" if i % 5 == 0 else "ok") for i in range(20)])
    claim(folder, 3, worker_name())
    assert main(["status", str(folder)]) == 0
    out = capsys.readouterr().out
    assert f"{folder}: 40 items, 16 ok, 4 failed, 20 pending\nrunning: 1 worker" in out
    assert (
        "\nmodality  items  ok  failed  pending\n" in out
        and "2 failed: ValueError: 0 (the last one 000000000000000f 'p15')" in out
    )
    assert main(["status", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(status_of(folder)))
    assert main(["status", str(tmp_path)]) == 2 and "plan.json" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_watching_ends_when_all_is_made(tmp_path, capsys, monkeypatch, flags):
    folder = job(tmp_path / "j", 3)
    claim(folder, 0, worker_name())
    monkeypatch.setattr(Over, "EVERY", 0.05)
    began = threading.Event()

    def work():
        began.wait()
        time.sleep(0.2)
        Journal(folder, 0, "w").add([row(i) for i in range(3)])
        publish(folder)
        (folder / WORK / CLAIMS / "00000").unlink()

    thread = threading.Thread(target=work)
    thread.start()
    began.set()
    assert main(["status", str(folder), "--watch", *flags]) == 0
    thread.join()
    out, err = capsys.readouterr()
    if flags:
        reports = [json.loads(x) for x in out.splitlines()]
        assert reports[0]["pending"] == 3 and reports[-1]["ok"] == 3 and err == ""
    else:
        assert (
            "3 items, 3 ok" in out and "all done" in out and err.splitlines()[0] == "gen: 3 items"
        )


def test_watching_ends_when_nobody_works_any_more(tmp_path):
    folder, now = job(tmp_path / "j"), [0.0]
    over = Over(folder, quiet=60, clock=lambda: now[0])
    said = []
    for now[0] in (0, 30, 61):
        said.append(over())
    assert said == [False, False, True]
    claim(folder, 0, worker_name())
    now[0] += 10
    assert not over()


def test_two_watchers_see_the_same_job(tmp_path):
    folder = job(tmp_path / "j", 8)
    watchers = [Lines(0), Lines(0)]
    looks = iter(range(5))

    def stop():
        i = next(looks, None)
        if i is not None:
            Journal(folder, 0, "w").add([row(i)])
        return i is None

    watch(folder, watchers[0], stop, every=0)
    watch(folder, watchers[1], lambda: True, every=0)
    assert watchers[0].done == watchers[1].done == 5 and watchers[0].made == 4
