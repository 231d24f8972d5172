"""Promises of docs/jobs.md, line by line: each docstring quotes its line, and the last test
checks that every line has one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from toyjob import (
    PROMPTS,
    Pipe,
    files,
    job,
    leftovers,
    run,
    steady,
    toy,  # noqa: F401  a fixture
)

from gen.core.errors import GenError
from gen.jobs.run import run_job
from gen.jobs.signals import stoppable
from gen.jobs.worker import run_worker
from gen.store.ledger import Journal, read_plan, read_rows

pytestmark = pytest.mark.usefixtures("toy")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


class Dying(Pipe):
    """Kills its process with the microbatch of a prompt."""

    def __init__(self, prompt):
        super().__init__()
        self.prompt = prompt

    def generate(self, items, *args, **kwargs):
        if any(i.prompt == self.prompt for i in items):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().generate(items, *args, **kwargs)


def in_a_child(work) -> int:
    """What became of a process that did the work: its exit code, or minus the signal that ended
    it."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def whole(out: Path) -> bool:
    """Whether every row of the manifest speaks of a file that is there and as it says."""
    rows = (
        [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
        if (out / "manifest.jsonl").is_file()
        else []
    )
    return all(
        hashlib.sha256((out / r["file"]).read_bytes()).hexdigest() == r["sha256"]
        for r in rows
        if r["status"] == "ok"
    )


@needs_fork
def test_line_1(tmp_path):
    """Execution is at least once; every item is in the committed output exactly once."""
    add = Journal.add

    def die(self, rows):  # everything is there but the line that says so
        os.kill(os.getpid(), signal.SIGKILL)

    def work():
        Journal.add = die
        run(tmp_path, batch_size=1)

    assert in_a_child(work) == -signal.SIGKILL and Journal.add is add and read_rows(tmp_path) == []
    _, pipe = run(tmp_path)
    assert pipe.batches == [PROMPTS]  # so "alpha" was made before, and is made again
    ids = [
        json.loads(line)["id"] for line in (tmp_path / "manifest.jsonl").read_text().splitlines()
    ]
    assert ids == [i["id"] for i in read_plan(tmp_path)["items"]] and not leftovers(tmp_path)


def test_line_2(tmp_path, monkeypatch):
    """A reader never sees a partial file, and never a manifest line whose file is missing or
    different."""
    looks = []
    for name in ("replace", "fsync", "link", "unlink", "write"):
        plain = getattr(os, name)

        def looking(*args, plain=plain, **kwargs):
            value = plain(*args, **kwargs)
            looks.append(whole(tmp_path / "o"))
            return value

        monkeypatch.setattr(os, name, looking)
    run(tmp_path / "o", batch_size=1, num_samples=2)
    assert len(looks) > 30 and all(looks)
    (tmp_path / "o" / "000000-alpha-s0.txt").write_text("another")
    assert not whole(tmp_path / "o")  # the control


@needs_fork
def test_line_3(tmp_path):
    """Random draws depend on an item and its seed alone: not on microbatch, shard, rank, number of
    workers or retries. The last bits may differ between machines and microbatches, unless
    `deterministic: true`."""
    run(tmp_path / "a", num_samples=4)
    run(tmp_path / "b", num_samples=4, batch_size=1, shard_items=2)
    run(tmp_path / "c", Pipe(bad=["beta"]), num_samples=4)
    run(tmp_path / "c", num_samples=4, retry="failed")
    run_job(
        job(tmp_path / "d", num_samples=4, shard_items=3), load=Pipe().load, stop=lambda: True
    )  # plans only
    slots = [
        lambda slot=slot: run_worker(tmp_path / "d", slot=slot, load=Pipe().load) for slot in (0, 1)
    ]
    assert [in_a_child(s) for s in slots] == [0, 0]
    run(tmp_path / "d", num_samples=4, shard_items=3)
    assert (
        files(tmp_path / "a")
        == files(tmp_path / "b")
        == files(tmp_path / "c")
        == files(tmp_path / "d")
        and len(files(tmp_path / "a")) == 12
    )
    assert (
        steady(tmp_path / "a")
        == steady(tmp_path / "b")
        == steady(tmp_path / "c")
        == steady(tmp_path / "d")
    )
    run(tmp_path / "other", num_samples=4, seed=1)
    assert files(tmp_path / "other") != files(
        tmp_path / "a"
    )  # the control; tests/jobs/test_microbatches.py has the one of `deterministic`


@needs_fork
def test_line_4(tmp_path):
    """Any number of workers may join, die or come back; the same command resumes the job."""
    keys = {"shard_items": 1, "batch_size": 1}
    assert in_a_child(lambda: run(tmp_path / "o", Dying("beta"), **keys)) == -signal.SIGKILL
    assert [r["prompt"] for r in read_rows(tmp_path / "o")] == ["alpha"]
    assert (
        in_a_child(lambda: run_worker(tmp_path / "o", load=Dying("gamma").load)) == -signal.SIGKILL
    )
    assert [r["prompt"] for r in read_rows(tmp_path / "o")] == [
        "alpha",
        "beta",
    ]  # it took over what the dead one had claimed
    _, pipe = run(tmp_path / "o", **keys)
    assert pipe.batches == [["gamma"]]
    run(tmp_path / "whole", **keys)
    assert steady(tmp_path / "o") == steady(tmp_path / "whole") and files(tmp_path / "o") == files(
        tmp_path / "whole"
    )


def test_line_5(tmp_path, monkeypatch):
    """A failed item is a row with `status` and `error`; `retry=failed` retries exactly those; the
    exit code is not 0 while any are left."""
    from gen.__main__ import main
    from gen.pipeline import pipeline

    (tmp_path / "toy.yaml").write_text(
        f"modality: toy\nprompts: [alpha, beta]\nsampler: sjd\nout: {tmp_path / 'o'}\n"
    )
    pipe = Pipe(bad=["beta"])
    monkeypatch.setattr(pipeline, "load", lambda *a, **k: pipe)
    command = ["run", str(tmp_path / "toy.yaml")]
    assert main(command) == 1
    row = read_rows(tmp_path / "o")[1]
    assert row["status"] == "failed" and "KeyError" in row["error"]
    pipe.bad, pipe.batches = (), []
    assert main(command) == 1 and pipe.batches == []
    assert main([*command, "retry=failed"]) == 0 and pipe.batches == [["beta"]]
    assert main(command) == 0


def test_line_6(tmp_path):
    """Running out of memory halves the microbatch; only an item that cannot run alone fails."""
    summary, pipe = run(tmp_path / "a", Pipe(limit=2), num_samples=3)
    assert [len(b) for b in pipe.batches] == [8, 4, 2, 2, 2, 2, 1] and not summary["failed"]
    run(tmp_path / "b", num_samples=3)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert len(run(tmp_path / "c", Pipe(limit=0))[0]["failed"]) == 3


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_line_7(tmp_path, monkeypatch, name):
    """SIGTERM and SIGUSR1 finish the current microbatch, write the journal and exit with code
    75."""
    from gen.__main__ import main
    from gen.pipeline import pipeline

    class Asked(Pipe):
        def generate(self, items, *args, **kwargs):
            if items[0].prompt == "beta":
                os.kill(os.getpid(), getattr(signal, name))
            return super().generate(items, *args, **kwargs)

    (tmp_path / "toy.yaml").write_text(
        f"modality: toy\nprompts: {PROMPTS}\nsampler: sjd\nbatch_size: 1\nout: {tmp_path / 'o'}\n"
    )
    monkeypatch.setattr(pipeline, "load", lambda *a, **k: Asked())
    assert main(["run", str(tmp_path / "toy.yaml")]) == 75
    assert [r["prompt"] for r in read_rows(tmp_path / "o")] == ["alpha", "beta"] and whole(
        tmp_path / "o"
    )
    monkeypatch.setattr(pipeline, "load", lambda *a, **k: Pipe())
    assert main(["run", str(tmp_path / "toy.yaml")]) == 0 and len(read_rows(tmp_path / "o")) == 3
    monkeypatch.setattr("gen.jobs.signals.SAME", 0.0)
    with (
        pytest.raises(KeyboardInterrupt),
        stoppable() as stop,
    ):  # asked twice, it is not polite any more
        for _ in range(2):
            os.kill(os.getpid(), getattr(signal, name))
            assert stop()


def test_line_8(tmp_path):
    """A changed config is refused with a list of the differences, never mixed."""
    run(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for keys, says in (
        ({"seed": 3}, "seed: was 0, now 3"),
        ({"layout": "shards"}, "layout: was files, now shards"),
        ({"prompts": ["alpha"]}, "prompts: was 3 rows, now 1"),
    ):
        with pytest.raises(GenError, match=says):
            run(tmp_path, **keys)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    run(tmp_path, batch_size=1)  # the control: what no medium depends on


def test_every_line_of_the_promise_has_its_test():
    text = (Path(__file__).parents[2] / "docs" / "jobs.md").read_text("utf-8")
    section = text.partition("## Promises")[2].partition("\n## ")[0]
    lines = [
        " ".join(found.split())
        for found in re.findall(r"^\d\. (.*(?:\n   .*)*)", section, re.MULTILINE)
    ]
    tests = [getattr(sys.modules[__name__], f"test_line_{n}") for n in range(1, 9)]
    assert lines == [" ".join(test.__doc__.split()) for test in tests]
