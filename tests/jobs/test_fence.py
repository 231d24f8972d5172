"""A worker that is stopped for longer than its lease, anywhere in a commit, and goes on behind its
successor: it spoils nothing, and the manifest is right at every moment."""

from __future__ import annotations

import functools
import os
import signal
import threading
from contextlib import nullcontext

import pytest
from crashing import (
    Pipe,
    audit,
    contents,
    fork,
    ground,  # noqa: F401  a fixture
    job,
    run,
    wait,
)

from gen.core import processes
from gen.jobs import plan, worker, writer
from gen.jobs import run as jobs
from gen.store import claims, ledger
from gen.store import manifest as publish

pytestmark = pytest.mark.usefixtures("ground")
KEYS = {"prompts": [f"prompt {i}" for i in range(6)], "shard_items": 6}


def stops(function):
    """The function, before which the process stops itself the first time."""
    told = []

    @functools.wraps(function)
    def call(*args, **kwargs):
        if not told:
            told.append(True)
            # to this thread: one that is sent to the process may let it go on for a moment
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return function(*args, **kwargs)

    return call


def stops_at(point):
    """Stops this process there, once: outside the fence, between two moves, before a row, before it
    gives the shard back, and before it writes a beat."""
    if point == "fence":
        claims.Claims.fence = stops(claims.Claims.fence)
    elif point == "move":  # the look at the claim is over
        plain, moving = os.replace, stops(os.replace)
        os.replace = lambda a, b: (moving if str(b).endswith(".csv") else plain)(a, b)
    elif point == "row":
        writer.Writer._add = stops(writer.Writer._add)
    elif point == "release":
        claims.Claims.release = stops(claims.Claims.release)
    elif point == "beat":
        claims.Claims.beat = stops(claims.Claims.beat)


def stranger(out, said, point, before=lambda: None):
    """A worker of another machine, as far as others can tell, that stops at this point. Media
    depend on the microbatch, as last bits do."""

    def work():
        processes.host = lambda: "0badcafe"
        before()
        stops_at(point)
        stale = 0.3 if point == "beat" else claims.STALE
        worker.Claims = functools.partial(claims.Claims, stale=stale)
        pipe = Pipe(wrong=True, delay=0.2 if point == "beat" else 0)
        made = worker.run_worker(out, job=said, load=pipe.load).made
        publish.publish(out, ledger.read_plan(out))
        return made

    child = fork(work)
    os.waitpid(child[0], os.WUNTRACED)
    return child


def heir(out, layout, before=lambda: None):
    def work():
        before()
        worker.Claims = functools.partial(claims.Claims, stale=0.3)
        return run(out, Pipe(wrong=True), batch_size=2, layout=layout, **KEYS)["pending"]

    return fork(work)


def planned(out, layout):
    said = job(out, layout=layout, batch_size=3, **KEYS)
    whole = plan.make_plan(said, lambda entry: Pipe())
    plan.write_plan(out, whole)
    jobs.open_folder(out, said, whole, True)
    return said


SHARDS = pytest.param("shards", marks=pytest.mark.slow)


@pytest.mark.parametrize("layout", ["files", SHARDS])
@pytest.mark.parametrize("point", ["fence", "row", pytest.param("beat", marks=pytest.mark.slow)])
def test_a_worker_whose_claim_was_taken_changes_nothing_that_its_successor_left(
    ground, layout, point
):
    out = ground / "o"
    child = stranger(out, planned(out, layout), point)
    assert wait(heir(out, layout)) == ("done", 0)
    left = contents(out)
    assert not audit(out) and {r["batch"] for r in ledger.read_rows(out)} == {2}
    os.kill(child[0], signal.SIGCONT)
    ended = wait(child)
    assert ended.how in ("done", "refused"), ended
    assert not audit(out)
    now = contents(out)
    assert {k: now[k] for k in left if ".tmp-" not in k} == {
        k: v for k, v in left.items() if ".tmp-" not in k
    }
    assert not [k for k in now if k not in left and not k.startswith("_work")]


@pytest.mark.parametrize("layout", ["files", SHARDS])
def test_a_worker_stopped_between_two_moves_keeps_its_shard_until_it_goes_on(ground, layout):
    out = ground / "o"
    child = stranger(out, planned(out, layout), "move")
    successor = heir(out, layout)
    other = claims.Claims(out / "_work/claims", stale=0)
    assert [other.take("00000") for _ in range(3)] == [None] * 3
    os.kill(child[0], signal.SIGCONT)
    assert wait(child).how == "done" and wait(successor) == ("done", 0)
    assert not audit(out)


def test_without_the_fence_the_same_stop_leaves_a_manifest_that_is_wrong(ground):
    def unfenced():
        claims.Claims._guard = lambda self, shard, wait=True: nullcontext(False)
        claims.Claims._take_turn = lambda self, shard: not self.turns.update({shard: 1})

    out = ground / "o"
    child = stranger(out, planned(out, "files"), "move", before=unfenced)
    assert wait(heir(out, "files", before=unfenced)) == ("done", 0)
    assert not audit(out)
    os.kill(child[0], signal.SIGCONT)
    wait(child)
    assert any("not what its row says" in w for w in audit(out))


def test_a_late_row_counts_less_than_the_row_of_a_later_claim():
    row = {"id": "a", "index": 0, "attempt": 1, "turn": 1, "status": "ok", "sha256": "0"}
    later = {**row, "turn": 2, "status": "failed"}
    for lines in ([row, later], [later, row]):
        assert ledger.latest(lines)["a"] is later
    assert ledger.latest([later, ledger.due_again(later)])["a"]["status"] == "due"


def test_every_claim_of_a_shard_has_a_higher_turn_than_the_one_before(ground):
    turns = []
    for name in ("0badcafe-1-1", "0badcafe-2-2", "0badcafe-1-1"):
        one = claims.Claims(ground, name, stale=-1.0)
        assert one.take("00000")
        turns.append(one.turns["00000"])
        one.release("00000")
    assert turns == [1, 2, 3]
