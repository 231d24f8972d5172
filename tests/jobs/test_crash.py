"""Kill -9 at any moment, with any number of workers: resumed, a job comes to what it comes to
undisturbed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from crashing import (
    Pipe,
    audit,
    contents,
    differences,
    fork,
    ground,  # noqa: F401  a fixture
    job,
    run,
    wait,
)

from gen.core import files
from gen.jobs import worker, writer
from gen.jobs.run import run_job
from gen.store.ledger import is_job, read_rows

pytestmark = pytest.mark.usefixtures("ground")
PROMPTS = [f"prompt {i}" for i in range(100)]
KEYS = {"prompts": PROMPTS, "num_samples": 4, "trace": 20, "shard_items": 10}


def kill_at_random(out, layout, seed, kills, look=audit, least=20, **pipe):
    """Rounds of workers that are all killed; returns how many were and what ``look`` saw after each
    round. A worker hangs after its share of what is left, so that the job cannot be complete before
    the last one is killed. On a busy machine most may die before they have made anything: there are
    more of them then, until more than ``least`` items are there."""
    dice, killed, wrong = random.Random(seed), 0, []

    def there():
        return len(read_rows(out)) if is_job(out) else 0

    began = time.monotonic()
    wait(fork(lambda: run(out.with_name("begin"))))
    starting = time.monotonic() - began  # of a process on this machine, as busy as it is
    while killed < kills or (killed < 3 * kills and there() <= least):
        left = 400 - there()
        share = max(2, left // max(4, kills - killed + 4))
        batch = dice.choice([1, 2, 3, 5, 8])
        workers = dice.randint(1, 4)

        def body():
            worker.PUBLISH_EVERY, worker.PUBLISH_SHARE = 0.02, 2
            run_job(
                job(out, layout=layout, **KEYS, batch_size=min(batch, share)),
                load=Pipe(quota=share, delay=0.001, **pipe).load,
            )

        children = [fork(body) for _ in range(workers)]
        time.sleep(0.7 * starting)
        for child in dice.sample(children, workers):
            time.sleep(dice.uniform(0, starting))
            os.kill(child[0], signal.SIGKILL)
        ended = [wait(c) for c in children]
        assert all(e.how == "killed" for e in ended), ended
        killed += workers
        wrong += look(out)
    assert len(read_rows(out)) < 400
    return killed, wrong


def undisturbed(out, layout):
    run(out, layout=layout, **KEYS, batch_size=8)
    return contents(out)


def resume(out, layout, workers=3, **pipe):
    children = [
        fork(lambda: run(out, Pipe(**pipe), layout=layout, **KEYS, batch_size=7))
        for _ in range(workers)
    ]
    assert [wait(c).how for c in children] == ["done"] * workers


@pytest.mark.parametrize(
    ("layout", "kills"),
    [
        ("files", 12),
        pytest.param("files", 52, marks=pytest.mark.slow),
        pytest.param("shards", 52, marks=pytest.mark.slow),
    ],
)
def test_workers_killed_at_random_leave_the_job_of_an_undisturbed_run(ground, layout, kills):
    want = undisturbed(ground / "calm", layout)
    killed, wrong = kill_at_random(ground / "o", layout, seed=1, kills=kills)
    assert killed >= kills and not wrong, wrong[:9]
    assert 20 < len(read_rows(ground / "o")) < 400
    resume(ground / "o", layout)
    assert not differences(ground / "o", want)
    assert len({r["id"] for r in want["manifest.jsonl"]}) == 400


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["files", "shards"])
@pytest.mark.parametrize("seed", range(2, 7))
def test_whatever_the_moments_are(ground, layout, seed):
    want = undisturbed(ground / "calm", layout)
    killed, wrong = kill_at_random(ground / "o", layout, seed, kills=100)
    resume(ground / "o", layout, workers=1 + seed % 3)
    assert killed >= 100 and not wrong + differences(ground / "o", want)


def test_the_same_kills_find_a_worker_that_commits_before_it_writes(ground, monkeypatch):
    def commit(self, out, batch, keep):
        puts = files.Puts(self._syncs)
        self._add([self._save(out, i, w, puts, []) for i, w in enumerate(batch)])
        time.sleep(0.05)
        puts.commit()

    monkeypatch.setattr(writer.Writer, "_commit", commit)

    def found(seed):
        return any(
            "is missing" in w
            for w in kill_at_random(ground / f"o{seed}", "files", seed, kills=12)[1]
        )

    assert any(
        found(seed) for seed in range(1, 11)
    )  # where two processes have the machine, twelve kills may all fall elsewhere


def test_the_comparison_finds_media_that_depend_on_the_microbatch(ground):
    want = undisturbed(ground / "calm", "files")
    kill_at_random(ground / "o", "files", seed=1, kills=4, wrong=True)
    resume(ground / "o", "files", wrong=True)
    assert any("differs" in w for w in differences(ground / "o", want))


# --- the command itself


def descendants(pid):
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [p for c in children for p in (int(c), *descendants(c))]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["files", "shards"])
def test_the_command_killed_with_and_without_its_workers_goes_on_with_another_number_of_them(
    tmp_path, layout
):
    common = [
        "modality=text",
        "sampler=adablock",
        "prompts=[sort 3 1 2 =,shuffle 4 0 7 5 =,3 + 8 + 5 =,sort 9 4 =]",
        "num_samples=6",
        "dtype=float64",
        f"layout={layout}",
        "shard_items=3",
        "tokens=true",
        "sampling.temperature=1.0",
    ]
    (tmp_path / "job.yaml").write_text(
        "modality: text\nsampler: adablock\nprompts: [sort 3 1 2 =]\n"
    )

    def start(out, *more):
        line = [
            sys.executable,
            "-m",
            "gen",
            "run",
            str(tmp_path / "job.yaml"),
            *common,
            f"out={out}",
            *more,
        ]
        return subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    calm = start(tmp_path / "calm", "batch_size=8")
    assert calm.wait() == 0, calm.stderr.read()
    out, killed = tmp_path / "o", 0
    for whom, more in (
        ("all", ("workers=2", "batch_size=1")),
        ("parent", ("workers=2", "batch_size=2")),
        ("all", ("batch_size=1",)),
    ):
        done = len(read_rows(out)) if is_job(out) else 0
        command = start(out, *more)
        while command.poll() is None and (not is_job(out) or len(read_rows(out)) < done + 2):
            time.sleep(0.005)
        if command.poll() is None:
            for pid in [*(descendants(command.pid) if whom == "all" else ()), command.pid]:
                os.kill(pid, signal.SIGKILL)
                killed += 1
        command.wait()
        assert not audit(out)
    last = start(out, "batch_size=5")
    assert last.wait() == 0, last.stderr.read()
    assert killed >= 4 and not differences(out, contents(tmp_path / "calm"))
