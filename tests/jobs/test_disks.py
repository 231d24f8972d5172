"""Disks that are full or turn read-only in the middle of a run, and clocks that are set back: one
sentence, nothing half done, and the next run makes what an undisturbed one makes.

The disks are real ones in memory, which only root may mount.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from crashing import (
    Pipe,
    apart,
    audit,
    contents,
    differences,
    fork,
    ground,  # noqa: F401  a fixture
    intact,
    run,
    wait,
)

from gen.store.ledger import is_job, read_rows

KEYS: dict[str, Any] = {
    "prompts": [f"prompt {i}" for i in range(24)], "shard_items": 6, "trace": 3, "batch_size": 2
}  # fmt: skip
LAYOUTS = ("files", "shards")
SIZES = (40, 80, 120, 160, 200, 240)  # kilobytes; a finished folder takes about 500


def mount(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["mount", *words], capture_output=True, text=True, check=False)


@pytest.fixture
def disk(ground):
    """A file system of its own in memory."""
    place = ground / "disk"
    place.mkdir()
    said = mount("-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place))
    if said.returncode:
        pytest.skip(f"no file system can be mounted: {said.stderr.strip()}")
    try:
        yield place
    finally:
        while not subprocess.run(["umount", str(place)], capture_output=True).returncode:
            pass  # one after the other, where one lies over it


def turn_read_only(disk: Path) -> None:
    """Have every new look at the disk find it read-only. A file that is open can be written on."""
    assert not mount("--bind", str(disk), str(disk)).returncode
    while mount("-o", "remount,bind,ro", str(disk)).returncode:  # a file was opened just now
        time.sleep(0.005)


def again(out: Path, layout: str, want: dict[str, Any], items: int) -> list[str]:
    """What is wrong after the next run, which keeps what is whole; ``items`` of it at least."""
    had = intact(out) if out.exists() else {}
    run(out, layout=layout, **KEYS)
    now = intact(out)
    kept = [f"item {i} was whole and made again" for i in had if now.get(i) != had[i]]
    return kept + differences(out, want) + ["nothing was there"] * (len(had) < items)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_disk_is_one_sentence_and_the_next_run_goes_on(ground, disk, layout):
    run(ground / "calm", layout=layout, **KEYS)
    want, ends, wrong = contents(ground / "calm"), 0, []
    for size in SIZES:
        assert not mount("-o", f"remount,size={size}k", str(disk)).returncode
        out = disk / "o"
        ended = apart(lambda out=out: run(out, layout=layout, **KEYS))
        assert ended.how == "refused", ended
        ends += os.strerror(errno.ENOSPC) in ended.said and "\n" not in ended.said
        wrong += [f"{size}k: {w}" for w in (audit(out) if out.exists() else [])]
        wrong += [f"{size}k: {p.name} is left" for p in out.rglob(".tmp-*")]
        assert not mount("-o", "remount,size=64m", str(disk)).returncode
        wrong += [f"{size}k, resumed: {w}" for w in again(out, layout, want, items=0)]
        shutil.rmtree(out)
    print(f"{layout}: {ends} runs ended by a full disk")
    assert ends == len(SIZES) and not wrong, "\n".join(wrong[:9])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_disk_that_turns_read_only_is_one_sentence_and_the_next_run_goes_on(ground, disk, layout):
    run(ground / "calm", layout=layout, **KEYS)
    want, wrong, dice = contents(ground / "calm"), [], random.Random(layout)
    assert not mount("-o", "remount,size=64m", str(disk)).returncode
    for _ in range(4):
        out = disk / "o"
        child = fork(lambda out=out: run(out, Pipe(delay=0.2), layout=layout, **KEYS))
        wanted = dice.randrange(2, 16)
        while not is_job(out) or len(read_rows(out)) < wanted:
            time.sleep(0.01)
        turn_read_only(disk)
        ended = wait(child)
        assert ended.how == "refused" and os.strerror(errno.EROFS) in ended.said, ended
        assert "\n" not in ended.said
        wrong += audit(out)
        ended = apart(lambda out=out: run(out, layout=layout, **KEYS))  # it begins on such a disk
        assert ended.how == "refused" and os.strerror(errno.EROFS) in ended.said, ended
        subprocess.run(["umount", str(disk)], check=True)
        wrong += [f"resumed: {w}" for w in again(out, layout, want, items=1)]
        shutil.rmtree(out)
    assert not wrong, "\n".join(wrong[:9])


@pytest.mark.slow
def test_a_half_written_medium_that_a_row_names_is_seen(ground, disk):
    """The control: without the check of what is there, a cut file stays."""
    out = disk / "o"
    assert not mount("-o", "remount,size=64m", str(disk)).returncode
    run(out, **KEYS)
    medium = next(out.glob("*.txt"))
    medium.write_bytes(medium.read_bytes()[:20])
    assert any("not what its row says" in w for w in audit(out))


# --- clocks


def backwards(steps: random.Random):
    """A clock on the wall that is set back, and forth, by up to a year between two looks."""
    return lambda: 1.7e9 + steps.uniform(-3e7, 3e7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_clock_that_is_set_back_changes_no_medium_and_no_row(ground, layout):
    run(ground / "calm", layout=layout, **KEYS)
    want = contents(ground / "calm")

    def work(number: int, **pipe: Any) -> Any:
        time.time = backwards(random.Random(number))
        return run(ground / "o", Pipe(**pipe), layout=layout, **KEYS)["pending"]

    first = [fork(lambda n=n: work(n, delay=0.01)) for n in range(3)]  # at one folder
    assert [wait(child) for child in first] == [("done", 0)] * 3
    assert not differences(ground / "o", want)
    shutil.rmtree(ground / "o")
    cut = apart(lambda: (_stops_after(7), work(4)))
    assert cut.how == "killed" and intact(ground / "o")
    assert apart(lambda: work(5)) == ("done", 0) and not differences(ground / "o", want)


def _stops_after(count: int) -> None:
    """Kill this process at a commit."""
    from gen.store.ledger import Journal

    plain, left = Journal.add, [count]

    def add(self: Journal, rows: Any) -> None:
        plain(self, rows)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), 9)

    Journal.add = add
