"""Workers in each other's way: claims, jobs started at once, and what somebody else does between
two steps of a commit."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import time

import pytest
from crashing import (
    Pipe,
    audit,
    contents,
    differences,
    fork,
    ground,  # noqa: F401  a fixture
    job,
    medium,
    run,
    wait,
)

from gen.core import files, processes
from gen.core.errors import GenError
from gen.jobs import plan, worker, writer
from gen.jobs import run as jobs
from gen.jobs.progress.report import Silent
from gen.store import claims, ledger
from gen.store import manifest as publish
from gen.store import webdataset as tars

pytestmark = pytest.mark.usefixtures("ground")
PROMPTS = [f"prompt {i}" for i in range(10)]


def elsewhere(name="0badcafe-1-1"):
    """The claim of a worker of another machine."""
    return json.dumps({"worker": name, "beat": 0}).encode()


def planned(out, **keys):
    """A folder with a plan and a config, and nothing made."""
    said = job(out, **keys)
    whole = plan.make_plan(said, lambda entry: Pipe())
    plan.write_plan(out, whole)
    jobs.open_folder(out, said, whole, True)
    return said


@pytest.mark.parametrize("layout", ["files", "shards"])
def test_a_worker_whose_shard_was_taken_over_commits_nothing_over_it_and_goes_on(
    ground, layout, monkeypatch
):
    run(ground / "calm", layout=layout)
    said, out = planned(ground / "o", layout=layout), ground / "o"
    monkeypatch.setattr(worker, "Claims", functools.partial(claims.Claims, stale=0.2))
    pipe, generate = Pipe(), Pipe.generate

    def stopped_for_long(items, *args, **kwargs):
        if not pipe.made:
            (out / "_work/claims/00000").write_bytes(elsewhere())
        return generate(pipe, items, *args, **kwargs)

    pipe.generate = stopped_for_long
    report = worker.run_worker(out, job=said, load=pipe.load)
    publish.publish(out, ledger.read_plan(out))
    assert (
        report.made == 3 and len(pipe.made) == 6
    )  # what it made while the shard was not its own does not count
    assert not differences(out, contents(ground / "calm"))


@pytest.mark.parametrize("taken_over", [True, False])
def test_a_folder_that_the_heir_of_a_shard_removed_ends_no_worker(ground, monkeypatch, taken_over):
    run(ground / "calm", layout="shards")
    said, out = planned(ground / "o", layout="shards"), ground / "o"
    monkeypatch.setattr(worker, "Claims", functools.partial(claims.Claims, stale=0.2))
    digest, removed = writer.sha256, []

    def after_it_is_gone(path):
        if not removed:
            removed.append(path)
            if taken_over:
                (out / "_work/claims/00000").write_bytes(elsewhere())
            shutil.rmtree(path.parent)
        return digest(path)

    monkeypatch.setattr(writer, "sha256", after_it_is_gone)
    pipe = Pipe()
    if not taken_over:  # control: what nobody else removed is an error
        with pytest.raises(FileNotFoundError):
            worker.run_worker(out, job=said, load=pipe.load)
        return
    worker.run_worker(out, job=said, load=pipe.load)
    publish.publish(out, ledger.read_plan(out))
    assert removed and not differences(out, contents(ground / "calm"))


def test_a_dead_workers_claim_is_taken_at_once_and_a_strangers_after_so_long_without_a_beat(
    ground, monkeypatch
):
    now = [0.0]
    mine = claims.Claims(ground, stale=60, clock=lambda: now[0])
    (ground / "00000").write_bytes(elsewhere(wait(fork(processes.worker_name)).said))
    assert mine.take("00000") == "stolen"
    path = ground / "00001"
    path.write_bytes(elsewhere())
    looks = [(0, None), (59, None)]
    for at, want in looks:
        now[0] = at
        assert mine.take("00001") is want
    path.write_bytes(json.dumps({"worker": "0badcafe-1-1", "beat": 1}).encode())  # it lives
    jumps = iter([-1e9, 0, 1e9, 1e12])
    for at, want in [(60, None), (61, None), (119, None), (121, "stolen")]:
        now[0], wall = at, next(jumps)
        monkeypatch.setattr(
            time, "time", lambda: wall
        )  # whatever the clock on the wall and the times of files say
        if want is None:
            os.utime(path, (abs(wall) % 2**32, abs(wall) % 2**32))
        assert mine.take("00001") == want, at


def test_a_worker_that_beats_keeps_its_claim(
    ground,
):
    now = [0.0]
    mine, other = (
        claims.Claims(ground, stale=60, clock=lambda: now[0]),
        claims.Claims(ground, "0badcafe-1-1"),
    )
    other.take("00000")
    for at in range(0, 600, 50):
        now[0] = at
        other.beat()
        assert mine.take("00000") is None and other.mine("00000")


@pytest.mark.parametrize("layout", ["files", "shards"])
def test_a_stopped_worker_that_wakes_up_after_its_shard_was_taken_over_spoils_nothing(
    ground, layout
):
    keys = {"layout": layout, "prompts": PROMPTS, "shard_items": 10}
    run(ground / "calm", **keys)
    want, out = contents(ground / "calm"), ground / "o"
    said = planned(out, **keys)

    def stranger():  # of another machine, as far as others can tell
        processes.host = lambda: "0badcafe"
        return worker.run_worker(out, job=said, load=Pipe(delay=0.01).load).made

    child = fork(stranger)
    while not list((out / "_work").glob("*.jsonl")):
        time.sleep(0.002)
    while True:
        os.kill(child[0], signal.SIGSTOP)
        with claims.locked(out / "_work/claims/00000.lock", wait=False) as free:
            if free is not None:  # between two moves it would keep its shard
                break
        os.kill(child[0], signal.SIGCONT)

    def heir():
        worker.Claims = functools.partial(claims.Claims, stale=0.3)
        return run(out, batch_size=2, **keys)["pending"]

    assert wait(fork(heir)) == ("done", 0)
    assert not [
        d for d in differences(out, want) if ".tmp-0badcafe-" not in d
    ]  # those are the stopped one's, which may go on with them
    os.kill(child[0], signal.SIGCONT)
    assert wait(child).how in ("done", "refused")
    run(out, **keys)
    assert not differences(out, want)


def test_of_many_who_find_a_dead_workers_claim_one_takes_it(ground):
    dead = wait(fork(processes.worker_name)).said
    both = 0
    for turn in range(8):
        folder, start = ground / str(turn), time.monotonic() + 0.1
        folder.mkdir()
        (folder / "00000").write_bytes(elsewhere(dead))

        def take():
            mine = claims.Claims(folder)
            time.sleep(max(0, start - time.monotonic()))
            taken = mine.take("00000")
            (folder / f"asked-{os.getpid()}").touch()
            while len(list(folder.glob("asked-*"))) < 4:  # nobody dies before all have asked
                time.sleep(0.002)
            return taken, mine.mine("00000")

        said = [wait(c).said for c in [fork(take) for _ in range(4)]]
        assert sum(owner for _, owner in said) == 1, said
        both += sum(taken is not None for taken, _ in said) > 1
    assert not both


def test_a_row_that_is_journalled_while_the_manifest_is_put_together_waits_for_the_next(
    ground, monkeypatch
):
    run(ground / "calm")
    out = ground / "o"
    said = planned(out)
    look = publish.lines_of

    def and_then_another_finishes(folder, damage=None):
        rows = look(folder, damage)
        worker.run_worker(out, job=said, load=Pipe().load)
        return rows

    with monkeypatch.context() as patch:
        patch.setattr(publish, "lines_of", and_then_another_finishes)
        publish.publish(out, ledger.read_plan(out))
    run(out)
    assert not differences(out, contents(ground / "calm"))


@pytest.mark.parametrize("layout", ["files", "shards"])
def test_what_is_to_be_tried_again_is_not_forgotten_when_the_manifest_is_written_meanwhile(
    ground, layout, monkeypatch
):
    keys = {"layout": layout, "shard_items": 1}
    run(ground / "calm", **keys)
    run(ground / "o", Pipe(bad=("alpha", "beta", "gamma")), **keys)
    monkeypatch.setattr(worker, "PUBLISH_EVERY", 0.0)
    monkeypatch.setattr(worker, "PUBLISH_SHARE", 0)
    run(ground / "o", retry="failed", **keys)
    assert not differences(ground / "o", contents(ground / "calm"))


def test_a_manifest_never_speaks_of_a_tar_that_is_being_replaced(ground, monkeypatch):
    keys = {"layout": "shards"}
    run(ground / "calm", **keys)
    run(ground / "o", Pipe(bad=("beta",)), **keys)
    wrong, hide, put = [], publish.publish, files.put

    def hide_and_somebody_else_publishes(folder, plan, **how):
        hide(folder, plan, **how)
        return hide(folder, plan)

    def put_and_look(path, *args, **kwargs):
        put(path, *args, **kwargs)
        wrong.extend(audit(path.parents[1]) if path.suffix == ".tar" else [])

    monkeypatch.setattr(tars, "publish", hide_and_somebody_else_publishes)
    monkeypatch.setattr(tars, "put", put_and_look)
    run(ground / "o", retry="failed", **keys)
    assert not wrong and not differences(ground / "o", contents(ground / "calm"))


def test_a_tar_that_is_none_any_more_is_made_again(ground):
    keys = {"layout": "shards"}
    run(ground / "calm", **keys)
    run(ground / "o", **keys)
    (ground / "o/shards/00000.tar").write_bytes(b"not a tar at all" * 99)
    run(ground / "o", **keys)
    assert not differences(ground / "o", contents(ground / "calm"))


def test_a_tar_that_was_altered_does_not_go_into_the_next_one(ground):
    keys = {"layout": "shards", "shard_items": 2}
    run(ground / "calm", **keys)
    with pytest.raises(
        OSError, match="enough"
    ):  # a job that is not complete, with one shard that is
        run(ground / "o", Refusing("gamma", bad=("beta",)), **keys)
    tar = ground / "o/shards/00000.tar"
    data = bytearray(tar.read_bytes())
    data[data.index(medium("alpha", 0)) + 40] ^= 1
    tar.write_bytes(data)
    run(ground / "o", retry="failed", **keys)
    assert not differences(ground / "o", contents(ground / "calm"))


class Refusing(Pipe):
    """Refuses one prompt as a disk would."""

    def __init__(self, prompt, **how):
        super().__init__(**how)
        self.prompt = prompt

    def generate(self, items, *args, **kwargs):
        if any(i.prompt == self.prompt for i in items):
            raise OSError(28, "enough")
        return super().generate(items, *args, **kwargs)


def test_a_shard_that_becomes_a_tar_while_somebody_looks_for_damage_is_not_damaged(
    ground, monkeypatch
):
    out, keys = ground / "o", {"layout": "shards"}
    run(ground / "calm", **keys)
    with monkeypatch.context() as patch:  # everything is made, and the worker dies before the tar
        patch.setattr(worker, "commit_shard", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        assert wait(fork(lambda: run(out, **keys))).how == "killed"
    whole, sha256, seen = ledger.read_plan(out), files.sha256, []

    def somebody_commits_first(path):
        if "_work" in path.parts and not seen:
            seen.append(path)
            tars.commit_shard(out, whole, 0, ledger.lines_of(out))
        return sha256(path)

    with monkeypatch.context() as patch:
        patch.setattr(publish, "sha256", somebody_commits_first)
        assert publish.mark_due(out, whole, publish.damaged(out, whole)) == 0 and seen
    pipe = Pipe()
    run(out, pipe, **keys)
    assert not pipe.made and not differences(out, contents(ground / "calm"))


@pytest.mark.parametrize("layout", ["files", "shards"])
def test_a_worker_that_joins_as_the_job_is_completed_makes_nothing_again(ground, layout):
    out = ground / "o"
    said, pipe = planned(out, layout=layout), Pipe()
    late = worker.Worker(out, said, 0, worker.Pipes(pipe.load), Silent(), lambda: False)
    run(out, layout=layout)
    (out / "_work/claims").mkdir(parents=True)  # another one that came late
    with late:
        assert late.pull().made == 0 and not pipe.made


def test_a_worker_of_a_job_that_was_overwritten_adds_nothing_to_the_next(ground):
    out = ground / "o"
    run(ground / "calm", seed=7)
    said = planned(out)
    late = worker.Worker(out, said, 0, worker.Pipes(Pipe().load), Silent(), lambda: False)
    run(out, seed=7, overwrite=True)
    with late:
        try:
            late.pull()
        except GenError:  # says so, or has nothing to do
            pass
    run(out, seed=7)
    assert not differences(out, contents(ground / "calm"))


def test_a_claim_is_given_up_where_its_folder_goes_away_as_the_job_ends(ground, monkeypatch):
    create, mine = claims.create, claims.Claims(ground / "_work/claims")

    def gone(path, data):
        shutil.rmtree(ground / "_work")
        return create(path, data)

    monkeypatch.setattr(claims, "create", gone)
    assert mine.take("00000") is None


def test_of_two_different_jobs_started_at_once_one_is_refused_and_nothing_is_mixed(
    ground, monkeypatch
):
    monkeypatch.setattr(jobs, "INLINE", 1)  # so that they have files of prompts to mix up as well
    texts = {0: ["red", "green"], 1: ["blue", "grey"]}
    want = {}
    for which, prompts in texts.items():
        run(ground / f"calm{which}", prompts=prompts)
        want[which] = contents(ground / f"calm{which}")
    winners = set()
    for turn in range(10):
        out, start = ground / str(turn), time.monotonic() + 0.15

        def begin(which):
            time.sleep(max(0, start - time.monotonic()))
            run(out, prompts=texts[which])
            return which

        ended = [wait(c) for c in [fork(functools.partial(begin, which)) for which in (0, 1)]]
        assert sorted(e.how for e in ended) == ["done", "refused"], ended
        said = next(e.said for e in ended if e.how == "refused")
        assert "holds a different job" in said and "prompts" in said, said
        which = next(e.said for e in ended if e.how == "done")
        winners.add(which)
        found = {k: v for k, v in contents(out).items() if not k.startswith("inputs/")}
        assert found == {k: v for k, v in want[which].items() if not k.startswith("inputs/")}
    assert winners


@pytest.mark.parametrize(
    "who, says",
    [
        ("the same", ""),
        ("another", "holds a different job .*seed: was 7, now 0"),
        ("nobody", "has no job"),
    ],
)
def test_a_job_that_is_begun_between_two_looks_at_the_folder_is_seen(
    ground, monkeypatch, who, says
):
    plain, looks = plan.is_job, []

    def look(folder):
        if not looks:
            looks.append(plain(folder))
            (
                run(out, seed=7 if who == "another" else 0)
                if who != "nobody"
                else (out / "notes.txt").write_text("mine")
            )
            return False
        return plain(folder)

    out, pipe = ground / "o", Pipe()
    out.mkdir()
    monkeypatch.setattr(plan, "is_job", look)
    with pytest.raises(GenError, match=says) if says else contextlib.nullcontext():
        assert run(out, pipe)["skipped"] == 3
    assert looks == [False] and not pipe.made


@pytest.mark.parametrize("layout", ["files", "shards"])
def test_the_same_job_started_twice_at_once_is_made_once_by_both(ground, layout):
    keys = {"layout": layout, "num_samples": 6, "shard_items": 2}
    run(ground / "calm", **keys)
    want = contents(ground / "calm")
    for turn in range(4):
        out, start = ground / str(turn), time.monotonic() + 0.1

        def begin():
            time.sleep(max(0, start - time.monotonic()))
            pipe = Pipe(delay=0.002)
            run(out, pipe, batch_size=1, **keys)
            return pipe.made

        ended = [wait(c) for c in [fork(begin), fork(begin)]]
        assert [e.how for e in ended] == ["done", "done"], ended
        made = [m for e in ended for m in e.said]
        assert len(made) == len(set(made)) == 18
        assert not differences(out, want)


def test_a_folder_of_journals_that_goes_away_between_two_looks_is_no_error(ground, monkeypatch):
    run(ground / "o")
    (ground / "o/_work").mkdir()
    plain = os.listdir

    def gone(path="."):
        if str(path).endswith("_work"):  # the job is complete by now
            shutil.rmtree(path, ignore_errors=True)
        return plain(path)

    monkeypatch.setattr(os, "listdir", gone)
    assert len(ledger.read_rows(ground / "o")) == 3 and not (ground / "o/_work").exists()
